"""Held-out prompts of the user's own corpus, as the harvest stored them."""

from dataclasses import dataclass

from headwright.configs import UserError
from headwright.data.store import FeatureReader


@dataclass
class Prompt:
    """Token ids to continue, and where they come from."""

    ids: list[int]
    source: str
    place: str


def held_out_prompts(reader: FeatureReader, count: int) -> list[Prompt]:
    """At most `count` prompts, taken from the sources in turn, so that each is represented."""
    by_source: dict[str, list[Prompt]] = {}
    for document, note in zip(reader, reader.notes):
        ids, mask = document.ids_T.tolist(), document.mask_T.tolist()
        prompt = Prompt(ids[: mask.index(True)], note["source"], note["place"])
        if prompt.ids:
            by_source.setdefault(prompt.source, []).append(prompt)
    if not by_source:
        raise UserError(f"{reader.root}: no held-out prompt; raise corpus.held_out")
    chosen: list[Prompt] = []
    for turn in range(max(len(prompts) for prompts in by_source.values())):
        chosen += [prompts[turn] for prompts in by_source.values() if turn < len(prompts)]
    return chosen[:count]
