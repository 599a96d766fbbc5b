"""What a draft vocabulary can say, by source and by script. Runnable: `headwright vocab --config …`."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from headwright.configs import RunConfig, UserError
from headwright.configs.command import run_stage
from headwright.configs.console import say, table
from headwright.data.batch import Answer
from headwright.data.corpus import read_corpus
from headwright.data.harvest import check_offline, jobs_of, store_path
from headwright.data.live import Texts
from headwright.data.store import FeatureReader
from headwright.data.stream import Answers
from headwright.data.target import load_tokenizer
from headwright.data.vocab import (
    DraftVocab,
    Group,
    byte_pieces,
    choose_vocab,
    count_tokens,
    coverage,
    grouped,
    pinned_ids,
    vocab_maker,
)

SECTIONS = ("vocab",)
ABOUT = (
    "The draft vocabulary of harvested features: what it covers, by source and by script, and the bound that this puts "
    "on τ. Nothing is harvested again: training builds its vocabulary from the same stored tokens."
)


@dataclass
class Bound:
    """τ of a chain that guesses every token right that it can say."""

    depth: int
    cycles: int = 0
    emitted: int = 0

    def add(self, inside_T: Sequence[bool]) -> None:
        """One answer, token by token. The first token is the target's; each cycle ends with one more of its own."""
        root, end = 0, len(inside_T) - 1
        while root < end:
            accepted = 0
            while accepted < self.depth and root + accepted < end and inside_T[root + accepted + 1]:
                accepted += 1
            emitted = min(accepted + 1, end - root)
            self.cycles += 1
            self.emitted += emitted
            root += emitted

    @property
    def tau(self) -> float:
        """The bound."""
        return self.emitted / self.cycles if self.cycles else float("nan")


@dataclass
class Coverage:
    """What a vocabulary covers of one group of texts. A bound needs whole answers; the lines of one script are none."""

    bound: Bound | None
    tokens: int = 0
    inside: int = 0
    chosen: int = 0
    chosen_inside: int = 0
    ids: set[int] = field(default_factory=set)

    def row(self, name: str) -> tuple[object, ...]:
        """A line of the table."""
        chosen = f"{self.chosen_inside / self.chosen:.2%}" if self.chosen else "–"
        bound = f"{self.bound.tau:.2f}" if self.bound else "–"
        return name, self.tokens, len(self.ids), f"{self.inside / self.tokens:.2%}", chosen, bound


def cover(vocab: DraftVocab, pieces: Iterable[tuple[Group, Answer]], depth: int) -> dict[Group, Coverage]:
    """Coverage by source and by script, the largest first."""
    kept_V = vocab.t2d_V
    found: dict[Group, Coverage] = {}
    for kind, part in pieces:
        group = found.setdefault(kind, Coverage(Bound(depth) if kind[0] == "source" else None))
        inside = kept_V[part.ids]
        known = part.argmax[part.argmax >= 0]
        group.tokens += len(part.ids)
        group.inside += int(inside.sum())
        group.chosen += len(known)
        group.chosen_inside += int(kept_V[known].sum())
        group.ids.update(part.ids.tolist())
        if group.bound:
            group.bound.add(inside.tolist())
    return dict(sorted(found.items(), key=lambda item: (item[0][0] != "source", -item[1].tokens)))


SMALL = 0.02  # share of the text under which a script is not judged: a name, a formula


def lint(run: RunConfig, vocab: DraftVocab, held_out: Answers, tokenizer: Any) -> Iterator[str]:
    """What a head with this vocabulary could never say of the held-out answers, in words. Raises UserError where that is so
    much of a script that training is idle.
    """
    depth = next((shape.depth for shape in run.eval.shapes if shape.kind == "chain"), 5)
    groups = cover(vocab, grouped(held_out.answers(), tokenizer), depth)
    scripts = {name: group for (kind, name), group in groups.items() if kind == "script"}
    whole = sum(group.tokens for group in scripts.values())
    for name, group in scripts.items():
        share = group.inside / group.tokens
        if group.tokens < SMALL * whole or share >= run.vocab.coverage:
            continue
        what = f"the draft vocabulary of {len(vocab)} tokens can say {share:.1%} of the {name} held-out response tokens"
        if share < run.vocab.least:
            raise UserError(
                f"{what}; what lies outside can never be accepted. Raise vocab.size, give {name} a share by vocab.quotas, put "
                f"more such text into the corpus, or set vocab.least=0 to train in any case"
            )
        yield f"warning: {what}: raise vocab.size, or give it a share by vocab.quotas"
    for (kind, name), group in groups.items():
        if kind == "source" and group.bound and group.inside / group.tokens < run.vocab.coverage:
            yield f"{name}: no head with this vocabulary exceeds τ {group.bound.tau:.2f} as a chain of {depth}"
    missing = len(set(byte_pieces(tokenizer, vocab.target_size)) - set(vocab.ids_W.tolist()))
    if missing and len(scripts) > 1:
        yield f"{missing} pieces that spell single bytes are outside (vocab.pin_bytes): rare letters cannot be drafted"


def show(run: RunConfig, dry_run: bool = False) -> None:
    """Print the tables."""
    if dry_run:
        check_offline(run)
        return
    held_out, tokenizer = FeatureReader(store_path(run, "held-out")), load_tokenizer(run.target)
    features = training_text(run, held_out, tokenizer)
    vocab = choose_vocab(run, features, held_out.manifest.target, tokenizer)
    depth = next((shape.depth for shape in run.eval.shapes if shape.kind == "chain"), 5)
    columns = ("text", "tokens", "distinct", "inside", "target's choice inside", f"τ bound, chain of {depth}")
    for side, answers in (("training", features.answers()), ("held-out", held_out.answers())):
        groups = cover(vocab, grouped(answers, tokenizer), depth)
        table(
            f"{side} text, vocabulary of {len(vocab)}",
            columns,
            (g.row(f"{kind} {name}") for (kind, name), g in groups.items()),
        )
    show_sizes(run, features, held_out, tokenizer)
    say("A perfect head that is cut to the vocabulary reaches the bound; no head reaches more.")


def training_text(run: RunConfig, held_out: FeatureReader, tokenizer: Any) -> Answers:
    """The stored tokens; where features are live, the corpus's."""
    if run.harvest.features == "stored":
        return FeatureReader(store_path(run, "train"))
    corpus = read_corpus(run.corpus, run.seed, run.directory)
    longest = held_out.manifest.target["max_positions"]
    return Texts(jobs_of(run, tokenizer, longest, "train", corpus.train, corpus.skipped))


def show_sizes(run: RunConfig, features: Answers, held_out: FeatureReader, tokenizer: Any) -> None:
    """Other sizes, to choose from."""
    spec = held_out.manifest.target
    make = vocab_maker(run, features, spec, tokenizer)
    counts = count_tokens(features.response_tokens(), spec["vocab_size"])
    unseen = count_tokens(held_out.response_tokens(), spec["vocab_size"])
    distinct = int((counts > 0).sum())
    least = len(pinned_ids(tokenizer, spec["eos_token_ids"], spec["vocab_size"], run.vocab.pin_bytes))
    rows: list[tuple[object, ...]] = []
    for tried in (2**power for power in range(9, 19) if least < 2**power < distinct):
        vocab = make(tried)
        rows.append((tried, f"{coverage(vocab, counts):.2%}", f"{coverage(vocab, unseen):.2%}"))
    whole = float((unseen * (counts > 0)).sum()) / max(int(unseen.sum()), 1)
    rows.append((f"{distinct} (all that occur)", "100.00%", f"{whole:.2%}"))
    table("other sizes", ("vocab.size", "training text inside", "held-out text inside"), rows)


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    run_stage("headwright vocab", ABOUT, SECTIONS, show, argv)


if __name__ == "__main__":
    main()
