"""What each kind of head is worth at the same cost of training: the same features, the same CPU time, the same prompts.

    headwright harvest --config configs/smollm2-eagle3.yaml name=zoo 'harvest.taps=[2,15,27,30]'
    python scripts/bench_heads.py train --features zoo --cpu-seconds 300
    python scripts/bench_heads.py measure --features zoo

`train` times a few steps of each head, chooses the number of epochs that fits the budget, and trains (what is trained already
is left). `measure` computes the exact τ of greedy chains on all held-out answers, by rollout; decodes prompts with chains and a
tree, every side in turn; and prints one table. Speed-ups are against plain decoding of the same target: for a head that adapts
its target, of the adapted one.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from headwright.configs import RunConfig
from headwright.configs.command import clean_exit
from headwright.configs.console import cpu_seconds, say, table
from headwright.configs.load import load_run
from headwright.data.harvest import open_store, store_path
from headwright.data.store import FeatureReader, write_json
from headwright.data.target import Target
from headwright.data.vocab import choose_vocab
from headwright.eval.acceptance import stack, target_shift
from headwright.eval.baselines import training_texts
from headwright.eval.decode import PLAIN, Generation, Settings, generate_one
from headwright.eval.drafters import PromptLookup
from headwright.eval.metrics import acceptance_length, bootstrap, phase_milliseconds, pooled_tau, tokens_per_second
from headwright.eval.rollout_tau import cycles_of_documents
from headwright.eval.suffix import SuffixDrafter, read_corpus
from headwright.eval.tune import answered, prompt_of
from headwright.eval.tune import spread as evenly
from headwright.heads.base import Drafter, DraftHead, Engine, make_head
from headwright.heads.draft_tree import TreeShape
from headwright.heads.saved import load_head
from headwright.train.launch import open_launch
from headwright.train.loop import one_step
from headwright.train.run import make_stream, train
from headwright.train.spread import spread
from headwright.train.track import Meter

JOINT = [  # Medusa-2 goes on where Medusa-1 ended, with the target from the first step
    "train.warm_start=runs/{features}-medusa-1/head",
    "head.adapter.joint_from=0.0",
    "head.adapter.ramp=constant",
    "head.adapter.rate=1.0",
    "train.lr=2e-4",
]
KINDS = {  # name in the table: config, overrides
    "EAGLE-1": ("smollm2-eagle1", []),
    "EAGLE-3": ("smollm2-eagle3", []),
    "EAGLE-3.1": ("smollm2-eagle3", ["head.norm_output=true"]),
    "Medusa-1": ("smollm2-medusa", ["head.steps=5"]),
    "Medusa-2": ("smollm2-medusa2", ["head.steps=5", *JOINT]),
    "Hydra": ("smollm2-hydra", ["head.steps=5"]),
    "MTP, recursive": ("smollm2-mtp", []),
    "draft model": ("smollm2-draft-model", []),
}
SHAPES = ("chain-3", "chain-5", "tree-4x4-12")
DEPTHS = (3, 5)
PROBE, WARM = 10, 3


def run_of(name: str, arguments: argparse.Namespace) -> RunConfig:
    """The run of a kind, on the shared features."""
    config, overrides = KINDS[name]
    overrides = [override.format(features=arguments.features) for override in overrides]
    run = load_run(f"configs/{config}.yaml", [*overrides, *arguments.overrides])
    label = name.lower().replace(",", "").replace(" ", "-").replace(".", "")
    return replace(run, name=f"{arguments.features}-{label}", features=arguments.features)


def steps_per_second(run: RunConfig) -> tuple[float, int]:
    """CPU seconds of a training step, median of a few; and the steps of an epoch."""
    launch = open_launch(run.train)
    features = open_store(run, "train")
    target = Target.load(run.target, features.manifest.taps, launch.device)
    vocab = choose_vocab(run, features, features.manifest.target, target.tokenizer)
    head = make_head(run.head, target.spec, target.taps, vocab).to(launch.device)
    head.attach(target)
    head.initialise(target)
    head.engine = Engine(progress=0.75)
    strategy, stream = spread(head, run.train, launch), make_stream(run, features, head, launch)
    seconds = []
    for batches in stream.steps(0, PROBE):
        begun = cpu_seconds()
        one_step(strategy, batches, target, Meter())
        seconds.append(cpu_seconds() - begun)
    return statistics.median(seconds[WARM:]), stream.steps_per_epoch()


def train_all(arguments: argparse.Namespace) -> None:
    """Every kind that is not trained yet."""
    for name in arguments.kinds:
        run = run_of(name, arguments)
        path = run.directory / "budget.json"
        if path.is_file():
            continue
        cost, per_epoch = steps_per_second(run)
        epochs = arguments.cpu_seconds / cost / per_epoch
        say(f"{name}: {cost:.3f} CPU-s a step, {epochs:.2f} epochs in {arguments.cpu_seconds:g} CPU-s")
        before = cpu_seconds()
        train(replace(run, train=replace(run.train, epochs=epochs, evals=4, saves=1)))
        write_json(path, {"cpu_seconds": cpu_seconds() - before, "epochs": epochs, "seconds_per_step": cost})


@dataclass
class Side:
    """One head or drafter in one shape, and what came of it."""

    name: str
    shape: TreeShape
    drafter: Drafter | None
    target: Target
    taps: tuple[int, ...]
    runs: list[Generation] = field(default_factory=list)

    def decode(self, prompt: list[int], tokens: int) -> None:
        """A prompt more. The target reports the states that this side reads."""
        self.target.taps = self.taps
        self.runs.append(generate_one(self.target, self.drafter, prompt, Settings(self.shape, tokens)))


@dataclass
class Contender:
    """A trained head, with the target that it drafts for."""

    name: str
    run: RunConfig
    head: DraftHead
    target: Target


def contenders(arguments: argparse.Namespace, shared: Target) -> list[Contender]:
    """All trained heads. One that adapts its target has one of its own."""
    found = []
    for name in arguments.kinds:
        run = run_of(name, arguments)
        if not (run.directory / "budget.json").is_file():
            say(f"{name}: not trained, left out")
            continue
        taps = run.head.choose_taps(
            shared.spec.num_layers, tuple(FeatureReader(store_path(run, "train")).manifest.taps)
        )
        target = shared
        if run.head.kind == "medusa" and run.head.adapter is not None:
            target = Target.load(run.target, taps, shared.device)
        target.taps = taps
        found.append(Contender(name, run, load_head(run.directory / "head", target).eval(), target))
    return found


def exact(contender: Contender) -> dict[str, Any]:
    """τ of greedy chains on every held-out answer, with bootstrap intervals; and what was trained."""
    run, head, target = contender.run, contender.head, contender.target
    target.taps = head.taps
    reader, depths = open_store(run, "held-out"), [d for d in DEPTHS if d <= (head.deepest or d)]
    cycles = list(cycles_of_documents(head, target, reader, depths, run.train.tokens_per_batch))
    found: dict[str, Any] = json.loads((run.directory / "budget.json").read_text(encoding="utf-8"))
    for depth in depths:
        answers = [(sum(c[depth].emitted), len(c[depth].emitted)) for c in cycles]
        found[f"tau_{depth}"], found[f"ci_{depth}"] = pooled_tau(answers), bootstrap(answers, pooled_tau, 0)
    found["parameters"] = sum(weight.numel() for weight in head.parameters() if weight.requires_grad)
    if head.changes_target():
        found["target"] = target_shift(head, target, reader)
    return found


def measure(arguments: argparse.Namespace) -> None:
    """The table."""
    base = run_of("EAGLE-3", arguments)
    reader = FeatureReader(store_path(base, "held-out"))
    shared = Target.load(base.target, reader.manifest.taps, "cpu")
    heads = contenders(arguments, shared)
    prompts = [prompt_of(document) for document in evenly(answered(base, reader), arguments.prompts)]
    sides = all_sides(base, heads, shared)
    for side in sides:
        side.decode(prompts[0], 4)
        side.runs.clear()
    for number, prompt in enumerate(prompts):
        for place in range(len(sides)):
            sides[(place + number) % len(sides)].decode(prompt, arguments.tokens)
    results = {contender.name: exact(contender) for contender in heads}
    rows = list(rows_of(sides, results))
    table(f"{len(prompts)} prompts, {arguments.tokens} tokens, greedy, batch 1; {stack(shared)}", COLUMNS, rows)
    write_json(
        arguments.out, {"stack": stack(shared), "results": results, "rows": [dict(zip(COLUMNS, row)) for row in rows]}
    )


def all_sides(base: RunConfig, heads: Sequence[Contender], shared: Target) -> list[Side]:
    """Plain decoding of every target, each head in each shape that it reaches, and drafters without training."""
    sides = [Side("plain", PLAIN, None, shared, shared.taps)]
    for contender in heads:
        if contender.target is not shared:
            sides.append(Side(f"plain, {contender.name}", PLAIN, None, contender.target, contender.head.taps))
        for name in SHAPES:
            shape = TreeShape.parse(name)
            if contender.head.deepest is None or shape.depth <= contender.head.deepest:
                sides.append(Side(contender.name, shape, contender.head, contender.target, contender.head.taps))
    suffix = SuffixDrafter(read_corpus(training_texts(base, 200_000)))
    for name, drafter in (("prompt lookup", PromptLookup()), ("suffix, with training texts", suffix)):
        sides += [Side(name, TreeShape.chain(depth), drafter, shared, shared.taps) for depth in DEPTHS]
    return sides


COLUMNS = (
    "drafter",
    "shape",
    "trained",
    "training CPU s (epochs)",
    "τ, exact [95 %]",
    "τ, decoded",
    "draft ms per cycle",
    "tok/s",
    "speed-up",
    "same text",
)


def rows_of(sides: Sequence[Side], results: dict[str, dict[str, Any]]) -> Any:
    """One row for each side."""
    plain = {side.name: side for side in sides if side.drafter is None}
    for side in sides:
        own = plain.get(f"plain, {side.name}", plain["plain"])
        found, depth = results.get(side.name, {}), side.shape.depth
        chain = side.shape.kind == "chain" and f"tau_{depth}" in found
        interval = found.get(f"ci_{depth}", [0, 0])
        same = sum(a.tokens == b.tokens for a, b in zip(side.runs, own.runs))
        is_plain = side.drafter is None
        yield [
            side.name,
            "" if is_plain else side.shape.name,
            f"{found['parameters'] / 1e6:.1f} M" if found else "–",
            f"{found['cpu_seconds']:.0f} ({found['epochs']:.1f})" if found else "–",
            f"{found[f'tau_{depth}']:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]" if chain else "–",
            "–" if is_plain else f"{acceptance_length(side.runs):.2f}",
            "–" if is_plain else f"{phase_milliseconds(side.runs)['draft']:.1f}",
            f"{tokens_per_second(side.runs):.1f}",
            f"{tokens_per_second(side.runs) / tokens_per_second(own.runs):.2f}×",
            f"{same}/{len(side.runs)}",
        ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["train", "measure"])
    parser.add_argument("--features", required=True, help="name of the run whose features all heads learn from")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS), metavar="KIND")
    parser.add_argument("--cpu-seconds", type=float, default=300.0, help="of each training")
    parser.add_argument("--prompts", type=int, default=8, help="held-out prompts that are decoded")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--out", type=Path, default=Path("bench_heads.json"), help="the measured values as JSON")
    parser.add_argument("--set", nargs="*", default=[], dest="overrides", metavar="section.key=value")
    arguments = parser.parse_args()
    with clean_exit():
        torch.manual_seed(0)
        (train_all if arguments.stage == "train" else measure)(arguments)


if __name__ == "__main__":
    main()
