"""Ways to take a head to a domain, on the same features: what each brings there, what it forgets, what it costs.

    headwright harvest --config configs/smollm2-russian.yaml
    python scripts/bench_adapt.py train --config configs/smollm2-russian.yaml
    python scripts/bench_adapt.py table --config configs/smollm2-russian.yaml

`train` trains every variant that is not trained yet (two such processes with different --variants share the work). `table`
measures the exact τ of greedy chains on all held-out answers, of the domain and of general text, with paired bootstrap
intervals, and says when each came near what training from scratch ended with.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headwright.configs import RunConfig
from headwright.configs.command import clean_exit
from headwright.configs.console import say, table
from headwright.configs.load import load_run
from headwright.data.corpus import general_sources
from headwright.data.harvest import open_store
from headwright.data.store import write_json
from headwright.data.target import Target
from headwright.data.vocab import count_tokens, coverage
from headwright.eval.metrics import bootstrap, pooled_tau, read_metrics
from headwright.eval.records import facts
from headwright.eval.rollout_tau import cycles_of_documents
from headwright.heads.base import DraftHead
from headwright.heads.saved import load_head
from headwright.train.launch import open_launch
from headwright.train.run import measured_depth, prepare, train

WIDE = "adapt.budget=1.0"  # what is kept is the best for the domain, whatever is forgotten
VARIANTS = {
    "LoRA r16": ["train.lora={rank: 16}", "train.lr=2e-3", "adapt.replay=0", WIDE],
    "LoRA r64": ["train.lora={rank: 64}", "train.lr=2e-3", "adapt.replay=0", WIDE],
    "LoRA r32": ["train.lora={rank: 32}", "train.lr=2e-3", "adapt.replay=0", WIDE],
    "LoRA r16, no new rows": ["train.lora={rank: 16, new_rows: false}", "train.lr=2e-3", "adapt.replay=0", WIDE],
    "full": ["adapt.replay=0", WIDE],
    "full, 25 % replay": [],
    "full, 50 % replay": ["adapt.replay=0.5"],
    "LoRA r16, 25 % replay": ["train.lora={rank: 16}", "train.lr=2e-3"],
    "from scratch": ["adapt.fresh=true", "train.lr=1e-3", WIDE],
}
UNTRAINED = ("no change", "vocabulary only")
NEAR = 0.95  # of the τ of training from scratch


@dataclass
class Measured:
    """A head on the held-out answers: (tokens, cycles) of each, and what it can say of the domain's."""

    answers: list[tuple[int, int]]
    covered: float


def run_of(name: str, args: argparse.Namespace) -> RunConfig:
    """The run of a variant, on the features of the config's run."""
    run = load_run(args.config, [*VARIANTS.get(name, []), *args.overrides])
    label = name.lower().replace(",", "").replace(" %", "").replace(" ", "-")
    return replace(run, name=f"{run.name}-{label}", features=run.features or run.name)


def train_all(args: argparse.Namespace) -> None:
    """Every variant that is not trained yet."""
    for name in args.variants:
        run = run_of(name, args)
        if not (run.directory / "training.json").is_file():
            say(f"variant: {name}")
            if not train(run):
                return


def heads(args: argparse.Namespace, target: Target) -> Iterator[tuple[str, DraftHead]]:
    """All variants, the untrained ones first. Those that are not trained yet are left out."""
    base = run_of("no change", args)
    yield "no change", load_head(Path(str(base.adapt.head)), target)
    yield "vocabulary only", prepare(base, open_launch(base.train)).head
    for name in args.variants:
        folder = run_of(name, args).directory
        if (folder / "training.json").is_file() and (folder / "head").is_dir():
            yield name, load_head(folder / "head", target)
        else:
            say(f"{name}: no head of it, left out")


def measure(args: argparse.Namespace) -> None:
    """The table, and its numbers as JSON."""
    base = run_of("no change", args)
    reader, general = open_store(base, "held-out"), general_sources(base.corpus)
    target = Target.load(base.target, reader.manifest.taps, "cpu")
    domain = [source not in general for source in reader.sources()]
    depth, budget = measured_depth(base), base.train.tokens_per_batch
    found: dict[str, Measured] = {}
    for name, head in heads(args, target):
        cycles = cycles_of_documents(head.eval(), target, reader, [depth], budget)
        answers = [(sum(one[depth].emitted), len(one[depth].emitted)) for one in cycles]
        found[name] = Measured(answers, covered(head, reader, domain))
    rows = [line(name, found, domain, args) for name in found]
    write_json(Path(args.out or base.directory.parent / f"{base.features}-variants.json"), rows)
    show(rows, depth, sum(domain), len(domain) - sum(domain))


def covered(head: DraftHead, reader: Any, domain: Sequence[bool]) -> float:
    """Share of the domain's held-out response tokens that a head can say."""
    pieces = itertools.compress(reader.response_tokens(), domain)
    return coverage(head.vocab, count_tokens(pieces, head.spec.vocab_size))


def line(name: str, found: dict[str, Measured], domain: Sequence[bool], args: argparse.Namespace) -> dict[str, Any]:
    """A variant in numbers; differences to the head as it was are paired over answers."""
    out: dict[str, Any] = {"variant": name, "coverage": found[name].covered}
    for side, wanted in (("domain", domain), ("general", [not own for own in domain])):
        now, before = (list(itertools.compress(found[key].answers, wanted)) for key in (name, "no change"))
        pairs = list(zip(before, now))
        out[side] = {"tau": pooled_tau(now), "ci95": bootstrap(now, pooled_tau, 0)}
        out[side]["kept"] = kept(pairs)
        out[side]["kept_ci95"] = bootstrap(pairs, kept, 0)
    made = facts(run_of(name, args).directory / "training.json")
    keys = ("trained_parameters", "step", "best_step", "cpu_seconds", "seconds")
    return out | {key: made.get(key) for key in keys} | {"reached": reached(name, args)}


def kept(pairs: Sequence[tuple[tuple[int, int], tuple[int, int]]]) -> float:
    """Accepted drafts per cycle (τ - 1) over those of the head as it was."""
    before, now = (pooled_tau([pair[side] for pair in pairs]) - 1 for side in (0, 1))
    return now / before if before > 0 else float("nan")


def reached(name: str, args: argparse.Namespace) -> float | None:
    """The share of the steps of training from scratch after which a variant had 95 % of its τ."""
    scratch = facts(run_of("from scratch", args).directory / "training.json")
    path = run_of(name, args).directory / "metrics.jsonl"
    if name in UNTRAINED or not scratch or not path.is_file():
        return None
    wanted = NEAR * scratch["best_tau"]
    steps = [record["step"] for record in read_metrics(path) if record.get("tau", 0) >= wanted]
    return steps[0] / scratch["total"] if steps else None


def show(rows: Sequence[dict[str, Any]], depth: int, domain: int, general: int) -> None:
    """As a table."""
    columns = (
        "variant",
        "τ domain [95 %]",
        "τ general [95 %]",
        "kept [95 %]",
        "inside",
        "trained",
        "CPU-s",
        "near scratch",
    )
    cells = []
    for row in rows:
        cells.append(
            (
                row["variant"],
                *(f"{row[side]['tau']:.2f} {interval(row[side]['ci95'])}" for side in ("domain", "general")),
                f"{row['general']['kept']:.0%} {interval(row['general']['kept_ci95'], '.0%')}",
                f"{row['coverage']:.1%}",
                f"{row['trained_parameters'] / 1e6:.2f} M" if row["trained_parameters"] else "–",
                f"{row['cpu_seconds']:.0f}" if row["cpu_seconds"] else "–",
                "–" if row["reached"] is None else f"{row['reached']:.0%} of its steps",
            )
        )
    table(f"greedy chain of {depth}, {domain} and {general} held-out answers", columns, cells)


def interval(ends: Sequence[float], form: str = ".2f") -> str:
    """[low, high]."""
    return f"[{ends[0]:{form}}, {ends[1]:{form}}]"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=("train", "table"))
    parser.add_argument("--config", required=True, help="a run file with adapt.head")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), help="default: all")
    parser.add_argument("--out", help="where `table` writes its numbers; default: runs/NAME-variants.json")
    parser.add_argument("--override", dest="overrides", action="append", default=[], help="section.key=value")
    args = parser.parse_args()
    with clean_exit():
        {"train": train_all, "table": measure}[args.stage](args)


if __name__ == "__main__":
    main()
