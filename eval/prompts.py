"""Prompts to be decoded: the user's held-out ones, the field's sets, any file. Conversations are asked turn by turn."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from headwright.configs import RunConfig, UserError
from headwright.configs.console import say
from headwright.configs.load import nearest
from headwright.configs.schema import PromptSet, Source
from headwright.data.chat import Renderer, clean
from headwright.data.corpus import label as name_of
from headwright.data.demo import check_demo, demo_originals
from headwright.data.scripts import script_of
from headwright.data.sources import Malformed, matching, source_rows
from headwright.data.store import FeatureReader
from headwright.data.target import Target
from headwright.eval.prompt_sets import KNOWN, Known, user_turns

HELD_OUT = "held-out"
SHOWN = 3  # unusable rows that are printed


@dataclass
class Prompt:
    """Token ids to continue, and where they come from. rounds: of a conversation, the turns before each answer."""

    ids: list[int]
    source: str
    place: str
    set: str = HELD_OUT
    domain: str = ""
    language: str = ""
    rounds: list[list[dict[str, Any]]] = field(default_factory=list)
    limit: int | None = None  # tokens of an answer, where prompts differ in it


@dataclass
class Room:
    """A target's template and context, for the next turn of a conversation."""

    renderer: Renderer
    context: int
    ends: frozenset[int]
    system: str | None = None  # before every chat that has none

    @classmethod
    def of(cls, run: RunConfig, target: Target) -> "Room":
        """For a run's target."""
        renderer = Renderer(target.tokenizer, options=run.corpus.template)
        return cls(renderer, target.spec.max_positions, frozenset(target.spec.eos_token_ids), run.corpus.system)

    def conversation(self, prompt: Prompt, answers: Sequence[Sequence[int]]) -> list[int] | None:
        """The ids of the next turn after these answers. None where there is none, or no room for it."""
        if not answers:
            return prompt.ids
        if len(answers) >= len(prompt.rounds):
            return None
        messages: list[dict[str, Any]] = []
        for asked, said in zip(prompt.rounds, answers):
            messages += [*asked, {"role": "assistant", "content": self.text(said)}]
        try:
            ids = self.renderer.prompt_ids(messages + prompt.rounds[len(answers)])
        except ValueError:  # a template that refuses what the target said
            return None
        return ids if len(ids) < self.context else None

    def own(self, ids: Sequence[int]) -> Sequence[int]:
        """A prompt without the words that the template puts around every chat, which say nothing of its language."""
        before = common(self.frame, ids)
        after = common(self.frame[::-1], ids[::-1])
        return ids[before : len(ids) - after] if before + after < len(ids) else ids

    @cached_property
    def frame(self) -> list[int]:
        """A chat without content; nothing where there is no template."""
        if not getattr(self.renderer.tokenizer, "chat_template", None):
            return []
        try:
            before = [{"role": "system", "content": self.system}] if self.system else []
            return self.renderer.prompt_ids([*before, {"role": "user", "content": ""}])
        except ValueError:
            return []

    def text(self, tokens: Sequence[int]) -> str:
        """An answer without its end token."""
        spoken = tokens[:-1] if tokens and tokens[-1] in self.ends else tokens
        decoded: str = self.renderer.tokenizer.decode(list(spoken))
        return decoded


def common(some: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    return next((place for place, (a, b) in enumerate(zip(some, others)) if a != b), min(len(some), len(others)))


def check_sets(sets: Sequence[PromptSet]) -> None:
    """What can be known of them without reading them or a network."""
    for wanted in sets:
        places = [key for key in ("path", "hub", "demo") if getattr(wanted, key)]
        if len(places) > 1 or not (places or wanted.set):
            raise UserError(
                f"eval.sets: give a set's name, and at most one of path, hub and demo, not {places or 'nothing'}"
            )
        if wanted.set not in (None, HELD_OUT, *KNOWN):
            raise UserError(f"eval.sets: no set {wanted.set!r}; {nearest(str(wanted.set), [HELD_OUT, *KNOWN])}")
        if wanted.set == HELD_OUT and (places or wanted.turns or wanted.template):
            raise UserError(
                "eval.sets: held-out is the run's own split, as the harvest asked it: no path, hub, demo, turns or template"
            )
        if wanted.path:
            check_path(wanted.path)
        if wanted.demo:
            check_demo(wanted.demo)
        if wanted.set in KNOWN and not places and KNOWN[wanted.set].hub is None:
            raise UserError(f"eval.sets: {wanted.set} is on no hub: give the path of its file")
    names = [label(wanted) for wanted in sets]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise UserError(f"eval.sets: two sets are called {twice!r}: give one a name")


def check_path(path: str) -> None:
    """There must be such files, of a known kind."""
    try:
        matching(path)
    except UserError as error:
        raise UserError(str(error).replace("corpus path", "eval.sets: path", 1)) from None


def label(wanted: PromptSet) -> str:
    """A set's name in tables."""
    return wanted.name or wanted.set or name_of(Source(path=wanted.path, hub=wanted.hub, demo=wanted.demo))


def read_sets(run: RunConfig, target: Target, reader: FeatureReader | None) -> list[Prompt]:
    """The prompts of all sets of a run. `reader`: its held-out features. Raises UserError for a set without prompts."""
    check_sets(run.eval.sets)
    room, prompts = Room.of(run, target), []
    for wanted in run.eval.sets:
        count = wanted.prompts or run.eval.prompts
        if wanted.set == HELD_OUT:
            if reader is None:
                raise UserError("eval.sets: held-out prompts are the harvest's: headwright harvest first")
            found = described_prompts(held_out_prompts(reader, count), room, wanted)
        else:
            found = in_turn(list(read_set(wanted, room)), count)
        prompts += found
    return prompts


def described_prompts(prompts: list[Prompt], room: Room, wanted: PromptSet | None = None) -> list[Prompt]:
    """Held-out prompts with set, domain and language."""
    wanted = wanted or PromptSet(HELD_OUT)
    for prompt in prompts:
        prompt.set, prompt.domain = label(wanted), wanted.domain or prompt.source
        prompt.language = wanted.language or script_of(room.text(room.own(prompt.ids)))
    return prompts


def read_set(wanted: PromptSet, room: Room) -> Iterator[Prompt]:
    """The usable prompts of one set. Rows that are none are named; so are prompts longer than the context."""
    name = label(wanted)
    left: list[str] = []
    empty = True
    for place, row in rows_of(wanted):
        try:
            if isinstance(row, Malformed):
                raise row
            yield make_prompt(wanted, room, place, row)
            empty = False
        except ValueError as error:
            left.append(f"{place}: {error}")
    if empty:
        raise UserError(f"eval.sets {name}: no usable prompt in it" + (f": {left[0]}" if left else ""))
    for why in left[:SHOWN]:
        say(f"{name}: left out {why}")
    if len(left) > SHOWN:
        say(f"{name}: {len(left)} rows left out in all")


def known_of(wanted: PromptSet) -> Known | None:
    """What is known of a set, by its name or that of the package's set."""
    return KNOWN.get(wanted.set or wanted.demo or "")


def make_prompt(wanted: PromptSet, room: Room, place: str, row: Any) -> Prompt:
    """A row as a prompt. Raises ValueError."""
    known = known_of(wanted)
    turns = user_turns(row, known, wanted.template)
    rounds = rounds_of(turns)[: wanted.turns]
    ids = room.renderer.prompt_ids(rounds[0])
    if len(ids) >= room.context:
        raise ValueError(f"a prompt of {len(ids)} tokens leaves no room in the target's context of {room.context}")
    name, category = label(wanted), row.get("category") if isinstance(row, dict) else None
    domain = wanted.domain or (known.domain if known else None) or (clean(str(category)) if category else name)
    language = wanted.language or (known.language if known else None) or script_of(rounds[-1][-1]["content"])
    return Prompt(ids, name, place, name, domain, language, rounds)


def rounds_of(turns: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """What is said before each answer: a user's turn, and a system's before it."""
    rounds: list[list[dict[str, Any]]] = [[]]
    for turn in turns:
        rounds[-1].append(turn)
        if turn["role"] == "user":
            rounds.append([])
    if len(rounds) == 1:
        raise ValueError("no user turn")
    return rounds[:-1]


def rows_of(wanted: PromptSet) -> Iterator[tuple[str, Any]]:
    """(place, row) of a set: from a file, a registry package or the hub."""
    known = known_of(wanted)
    if wanted.demo:
        yield from demo_originals(wanted.demo)
        return
    config, split = (known.config, known.split) if known and not wanted.hub else (None, "test")
    source = Source(
        path=wanted.path,
        hub=wanted.hub or (known.hub if known and not wanted.path else None),
        config=wanted.config or config,
        split=wanted.split or split,
        revision=wanted.revision,
    )
    yield from source_rows(source, 0)


def in_turn(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """At most `count` prompts, from their domains (sources, of held-out ones) in turn, so that each is represented."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.domain or prompt.source, []).append(prompt)
    chosen: list[Prompt] = []
    for turn in range(max(map(len, groups.values()), default=0)):
        chosen += [group[turn] for group in groups.values() if turn < len(group)]
    return chosen[:count]


def held_out_prompts(reader: FeatureReader, count: int) -> list[Prompt]:
    """At most `count` prompts of the run's own corpus, as the harvest stored them, taken from the sources in turn."""
    found = []
    for document, note in zip(reader, reader.notes):
        ids, mask = document.ids_T.tolist(), document.mask_T.tolist()
        turn = f", turn {note['turn'] + 1}" if note.get("turn") else ""
        found.append(Prompt(ids[: mask.index(True)], note["source"], note["place"] + turn))
    found = [prompt for prompt in found if prompt.ids]
    if not found:
        raise UserError(f"{reader.root}: no held-out prompt; raise corpus.held_out")
    return in_turn(found, count)
