"""Does a head guess what its target says, and if not, would it with one thing changed? For faults that names and shapes do
not show.

The target continues a few prompts greedily. On its text the head as the directory has it guesses first and second tokens; then
every hypothesis does: halves exchanged, states shifted by a layer, another rotary base, a matrix transposed, … One that guesses
far better tells what went wrong.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headwright.configs import UserError
from headwright.configs.load import build
from headwright.data.batch import DocumentFeatures, pack
from headwright.data.generate import read_documents
from headwright.data.target import Target, TargetSpec
from headwright.data.vocab import DraftVocab
from headwright.heads import get_head
from headwright.heads.base import make_head
from headwright.heads.contract import WEIGHTS, Change, Draft, Finding, Method
from headwright.heads.engine_tables import THETA
from headwright.heads.foreign import Plain
from headwright.heads.mtp_native import swapped

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Water boils at one hundred degrees",
    "Once upon a time, in a small village,",
    "Monday, Tuesday, Wednesday,",
    "To make bread you need flour,",
    "1, 2, 3, 4, 5,",
    "The quick brown fox",
)
NEW = 32


@dataclass
class Guesses:
    """Share of first and second guesses that were right, and what was changed for it."""

    change: str
    where: str
    first: float
    second: float
    rows: int
    mend: Callable[[Draft], None] | None = None

    @property
    def score(self) -> float:
        """What hypotheses are compared by: tokens that a chain of two adds to a pass."""
        return self.first * (1 + self.second)


def own_text(target: Target, prompts: Sequence[str] = PROMPTS, count: int = NEW) -> list[DocumentFeatures]:
    """What the target says after each prompt, with all its states."""
    texts = [continued(target, list(target.tokenizer(prompt)["input_ids"]), count) for prompt in prompts]
    return read_documents(target, texts)


@torch.inference_mode()
def continued(target: Target, prompt: list[int], count: int) -> tuple[list[int], list[bool]]:
    """Greedy text and its mask."""
    cache, ids = target.new_cache(1, len(prompt) + count + 1), list(prompt)
    new = prompt
    while len(ids) < len(prompt) + count:
        cache.make_room(len(new))
        last_BND = target.extend(torch.tensor([new], device=target.device), cache).last_BND
        cache.advance(len(new))
        new = [int(target.logits(last_BND[0, -1]).argmax())]
        ids += new
    return ids, [False] * len(prompt) + [True] * count


def hypotheses(plain: Plain, spec: TargetSpec) -> Iterator[Change]:
    """What may have gone wrong."""
    if plain.method.halves:
        words, where = (
            "the halves of its input exchanged ([feature ; embedding])",
            f"{WEIGHTS}: {plain.method.halves[0]}",
        )
        yield Change(words, where, tensors=dict.fromkeys(plain.method.halves, swapped))
    for name, weight in sorted(plain.tensors.items()):
        if weight.ndim == 2 and weight.shape[0] == weight.shape[1]:
            yield Change("transposed", f"{WEIGHTS}: {name}", tensors={name: turned})
    yield from other_rotations(plain, spec)
    yield from plain.method.changes(plain.config, plain.tensors, spec)


def turned(weight: Tensor) -> Tensor:
    """A square matrix written the other way round: its shape does not tell."""
    return weight.T.contiguous()


def other_rotations(plain: Plain, spec: TargetSpec) -> Iterator[Change]:
    """Another rotary base."""
    if "rope_parameters" not in plain.config:
        return
    here = plain.config["rope_parameters"]["rope_theta"]
    for theta in sorted({spec.rope["rope_theta"], THETA} - {here}):
        rope = {"rope_parameters": plain.config["rope_parameters"] | {"rope_theta": theta}, "rope_theta": theta}
        yield Change(f"a rotary base of {theta:g}", "config.json: rope_theta", rope)


def changed(plain: Plain, change: Change) -> Plain:
    """A directory without what may be wrong."""
    tensors = plain.tensors | {name: alter(plain.tensors[name]) for name, alter in change.tensors.items()}
    return replace(plain, config=plain.config | change.keys, tensors=tensors)


def mending(method: Method, change: Change) -> Callable[[Draft], None]:
    """The same for the files."""

    def mend(draft: Draft) -> None:
        keys = change.keys if change.file_keys is None else change.file_keys
        if keys and method.section is not None and change.file_keys is None:
            draft.config[method.section] = draft.config[method.section] | keys
        else:
            draft.config |= keys
        for name in draft.tensors:
            alter = change.tensors.get(method.spells(name) or "")
            if alter is not None:
                draft.tensors[name] = alter(draft.tensors[name])

    return mend


def guesses(plain: Plain, target: Target, documents: Sequence[DocumentFeatures]) -> tuple[float, float, int]:
    """Share of right first guesses, of right second ones where the first was right, and of how many. `target` gives all its
    states.

    Raises UserError where the head cannot be made.
    """
    adopted = plain.method.adopt(plain.config, plain.tensors, target.spec, None)
    config = build(get_head(adopted.options["kind"]).Config, adopted.options, "probe")
    vocab = DraftVocab(adopted.ids_W, target.spec.vocab_size)
    if not 0 <= int(vocab.ids_W.min()) <= int(vocab.ids_W.max()) < target.spec.vocab_size:
        return 0.0, 0.0, 0
    head = make_head(config, target.spec, adopted.taps, vocab)
    head.attach(target)
    head.load_state_dict(adopted.tensors)
    head = head.to(target.device).float().eval()
    places = [target.taps.index(tap) for tap in adopted.taps]
    batch = pack([replace(document, taps_TKD=document.taps_TKD[:, places]) for document in documents])
    steps = min(2, head.deepest or 2)
    with torch.inference_mode():
        right = head.agreement(batch.to(target.device), target, steps).cpu()
    rows = batch.loss_masks(steps)[:, steps - 1].cpu()
    first = right[rows, 0].float()
    both = right[rows].all(1).float() if steps == 2 else first
    return float(first.mean()), float(both.sum() / first.sum().clamp_min(1)), len(first)


def probe(plain: Plain, target: Target, prompts: Sequence[str] = PROMPTS) -> list[Guesses]:
    """The head as it is, then with each hypothesis, best first. Raises UserError where the head cannot be made at all."""
    documents = own_text(target, prompts)
    found = [Guesses("as it stands", "", *guesses(plain, target, documents))]
    others = []
    for change in hypotheses(plain, target.spec):
        try:
            right = guesses(changed(plain, change), target, documents)
        except UserError:  # such a head cannot be
            continue
        others.append(Guesses(change.words, change.where, *right, mending(plain.method, change)))
    return found + sorted(others, key=lambda other: -other.score)


# What a hypothesis must be better by, in score: at least BETTER, and SPREAD over the root of the number of guesses, which is
# more than chance makes of few of them.
BETTER, SPREAD = 0.08, 1.25
WEAK = 0.1  # share of right first guesses below which a head is as good as none


def judged(found: Sequence[Guesses]) -> Iterator[Finding]:
    """What the guesses say."""
    here, best = found[0], found[1] if len(found) > 1 else None
    if best is not None and best.score > here.score + max(BETTER, SPREAD / max(here.rows, 1) ** 0.5):
        what = (
            f"{best.change}: {best.first:.0%} of first guesses are right so, and {best.second:.0%} of the second after them; "
            f"{here.first:.0%} and {here.second:.0%} as the directory has it"
        )
        so = "names and shapes are as they should be: every engine serves this without a word, badly"
        yield Finding("error", "all engines", best.where, what, so, "--fix writes it so", best.mend)
    elif here.first < WEAK:
        yield Finding(
            "error",
            "all engines",
            WEIGHTS,
            f"{here.first:.0%} of first guesses are right, and no change that was tried helps",
            "τ is near 1.0 in every engine",
            "the head of another target, or hardly trained",
        )
