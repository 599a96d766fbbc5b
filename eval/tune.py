"""Which draft shape pays on this device, for these prompts, or whether drafting pays at all. Runnable: `headwright tune`.

Writes `runs/<name>/tune.json`, and `runs/<name>/tree.json`: the best static tree that the prompts' own ranks make.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from headwright.configs import RunConfig, UserError
from headwright.configs.command import run_stage
from headwright.configs.console import say, table
from headwright.data.batch import DocumentFeatures
from headwright.data.generate import read_documents
from headwright.data.harvest import check_offline, open_store
from headwright.data.store import FeatureReader, checksum, write_json, write_text
from headwright.data.target import Target
from headwright.eval.clock import device_name
from headwright.eval.decode import Generation, decode_plain, speculate
from headwright.eval.metrics import acceptance_length
from headwright.eval.shape import (
    NODES,
    Bench,
    Costs,
    Prediction,
    Recorded,
    first_answer,
    measure_costs,
    measure_ranks,
    predict,
    sparse_shape,
    static_cycles,
)
from headwright.heads.base import DraftHead
from headwright.heads.draft_tree import TreeShape, most_nodes
from headwright.heads.saved import load_head

SECTIONS = ("tune",)
ABOUT = "Measure what a target pass and a draft cost here, compute τ of every shape, and try the best ones."
SCHEMA = "headwright.tune/1"


@dataclass
class Trial:
    """A shape that was really run: τ, milliseconds of a cycle and of a plain step, and the speed-up, prefill not counted."""

    prediction: Prediction
    tau: float
    cycle_ms: float
    plain_ms: float
    same_text: int

    @property
    def speedup(self) -> float:
        """New tokens per second over plain decoding's."""
        return self.tau * self.plain_ms / self.cycle_ms


def tune(run: RunConfig, dry_run: bool = False) -> None:
    """The whole comparison."""
    check_offline(run)
    if dry_run:
        return
    reader = open_store(run, "held-out")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = Target.load(run.target, reader.manifest.taps, device)
    head = load_head(run.directory / "head", target).eval()
    documents = as_adapted(head, target, answered(run, reader))
    if head.deepest is not None:
        run = replace(run, tune=replace(run.tune, depth=min(run.tune.depth, head.deepest)))
    say(f"τ of every shape from {len(documents)} held-out answers, which the target wrote greedily; batch 1, {device}")
    bench = Bench(head, target, typical(documents))
    overhead = measure_overhead(run, head, target, documents)
    costs = measure_costs(bench, run.tune.widths, run.tune.depth, run.tune.nodes, overhead, run.tune.rounds)
    predictions = sorted(every_shape(run, head, target, documents, costs), key=lambda found: -found.speedup)
    show_costs(costs)
    trials = try_best(run, head, target, documents, different(predictions, run.tune.real_runs))
    write(run, costs, predictions, trials, target.device)
    show(run, costs, predictions, trials)


def as_adapted(head: DraftHead, target: Target, documents: list[DocumentFeatures]) -> list[DocumentFeatures]:
    """Documents with the states of the target that the head has adapted; as they are for any other head."""
    if head.changes_target() is None:
        return documents
    return read_documents(
        target, [(d.ids_T.tolist(), d.mask_T.tolist()) for d in documents], documents[0].taps_TKD.dtype
    )


def answered(run: RunConfig, reader: FeatureReader) -> list[DocumentFeatures]:
    """Held-out documents whose first answer the target wrote greedily, long enough to draft in."""
    if run.answers.by != "target":
        raise UserError("tune replays the target's own greedy answers: harvest with answers.by: target")
    documents = [d for d in (reader[number] for number in range(len(reader))) if d.mask_T.any()]
    found = [d for d in documents if first_answer(d)[1] - first_answer(d)[0] > 2 and first_answer(d)[0] > 2]
    if not found:
        raise UserError(f"{reader.root}: no held-out answer of three tokens or more; raise corpus.held_out")
    return spread(found, run.tune.prompts)


def spread(documents: Sequence[DocumentFeatures], count: int) -> list[DocumentFeatures]:
    """So many of them, evenly from a store whose documents are sorted by length."""
    step = max(len(documents) / count, 1.0)
    return [documents[int(place * step)] for place in range(min(count, len(documents)))]


def typical(documents: Sequence[DocumentFeatures]) -> DocumentFeatures:
    """One of median length."""
    return sorted(documents, key=lambda document: len(document.ids_T))[len(documents) // 2]


def prompt_of(document: DocumentFeatures) -> list[int]:
    """The tokens before its first answer."""
    ids: list[int] = document.ids_T[: first_answer(document)[0]].tolist()
    return ids


def length_of(document: DocumentFeatures) -> int:
    """New tokens of its first answer."""
    start, end = first_answer(document)
    return end - start


def measure_overhead(run: RunConfig, head: DraftHead, target: Target, documents: Sequence[DocumentFeatures]) -> float:
    """Milliseconds of a cycle that are neither draft nor verification."""
    shape = TreeShape.chain(min(4, run.tune.depth))
    out = speculate(target, head, prompt_of(documents[0]), shape, min(24, length_of(documents[0])))
    return 1000 * sum(out.phases[name] for name in ("select", "commit")) / max(len(out.emitted), 1)


def every_shape(
    run: RunConfig, head: DraftHead, target: Target, documents: Sequence[DocumentFeatures], costs: Costs
) -> list[Prediction]:
    """Chains, dynamic trees and static trees of the prompts' own ranks, within the bounds of the run file."""
    found, depth = [], run.tune.depth
    sizes = [count for count in NODES if count <= run.tune.nodes]
    for width in run.tune.widths:
        recorded = Recorded(head, target, documents, depth, width)
        for shape in shapes_of(width, depth, sizes):
            found.append(predict(shape, recorded.cycles(shape), costs))
    ranks = measure_ranks(head, target, documents, depth)
    for count in sizes:
        shape = sparse_shape(ranks, count)
        found.append(predict(shape, static_cycles(documents, ranks, shape), costs))
    return found


def shapes_of(width: int, depth: int, sizes: Sequence[int]) -> list[TreeShape]:
    """All shapes of one width."""
    if width == 1:
        return [TreeShape.chain(levels) for levels in range(1, depth + 1)]
    return [
        TreeShape.dynamic(levels, width, count)
        for levels in range(1, depth + 1)
        for count in sizes
        if levels <= count <= most_nodes(levels, width)
    ]


def different(predictions: Sequence[Prediction], count: int) -> list[Prediction]:
    """The best predictions, of which no two have the same kind, depth and width."""
    kept: dict[tuple[Any, ...], Prediction] = {}
    for found in predictions:
        shape = found.shape
        width = shape.top_k if shape.kind == "dynamic" else 1
        kept.setdefault((shape.kind, shape.depth if shape.kind != "static" else 0, width), found)
    return list(kept.values())[:count]


def try_best(
    run: RunConfig,
    head: DraftHead,
    target: Target,
    documents: Sequence[DocumentFeatures],
    predictions: Sequence[Prediction],
) -> list[Trial]:
    """Real runs, in turn with plain decoding, prompt by prompt."""
    plain: list[Generation] = []
    runs: list[list[Generation]] = [[] for _ in predictions]
    for document in spread(documents, run.tune.run_prompts):
        prompt, limit = prompt_of(document), length_of(document)
        plain.append(decode_plain(target, prompt, limit))
        for found, outs in zip(predictions, runs):
            outs.append(speculate(target, head, prompt, found.shape, limit))
    step = statistics.median(cycle_ms(out) for out in plain if out.emitted)
    return [
        Trial(
            found,
            acceptance_length(outs),
            statistics.median(cycle_ms(out) for out in outs if out.emitted),
            step,
            sum(out.tokens == reference.tokens for out, reference in zip(outs, plain)),
        )
        for found, outs in zip(predictions, runs)
    ]


def cycle_ms(out: Generation) -> float:
    """Milliseconds of one cycle; neither the prefill nor the capturing of passes is counted."""
    return 1000 * (out.seconds - out.phases["prefill"] - out.warmup) / len(out.emitted)


def described(shape: TreeShape) -> dict[str, Any]:
    """A shape in JSON."""
    return {"name": shape.name, "kind": shape.kind, "depth": shape.depth, "top_k": shape.top_k, "nodes": shape.nodes}


def write(
    run: RunConfig, costs: Costs, predictions: Sequence[Prediction], trials: Sequence[Trial], device: torch.device
) -> None:
    """tune.json, and tree.json for the best static tree."""
    rows = [
        described(found.shape)
        | {
            "tau": found.tau,
            "cycle_ms": found.cycle_ms,
            "predicted_speedup": found.speedup,
            "accepted_per_position": found.accepted,
        }
        for found in predictions
    ]
    real = [
        described(trial.prediction.shape)
        | {
            "tau": trial.tau,
            "cycle_ms": trial.cycle_ms,
            "plain_ms": trial.plain_ms,
            "speedup": trial.speedup,
            "predicted_speedup": trial.prediction.speedup,
            "same_text": trial.same_text,
        }
        for trial in trials
    ]
    best = max(trials, key=lambda trial: trial.speedup)
    even = best.cycle_ms / best.plain_ms
    report = {
        "schema": SCHEMA,
        "head": checksum(run.directory / "head" / "model.safetensors"),
        "device": device_name(device),
        "costs_ms": asdict(costs),
        "predictions": rows,
        "trials": real,
        "break_even_tau": even,
    }
    write_json(run.directory / "tune.json", json.loads(json.dumps(report)))
    static = next((found.shape for found in predictions if found.shape.kind == "static"), None)
    if static is not None:
        write_text(run.directory / "tree.json", json.dumps([list(path) for path in static.paths]) + "\n")


def show_costs(costs: Costs) -> None:
    """What a pass costs by nodes, in plain steps."""
    rows = [(count, f"{value:.1f}", f"{value / costs.plain:.2f}") for count, value in costs.verify.items()]
    table("cost of a target pass", ("nodes, the root included", "ms", "plain steps"), rows)
    widths = ", ".join(
        f"width {width}: {costs.first[width] / costs.plain:.3f} + {costs.level[width] / costs.plain:.3f} per further level"
        for width in costs.level
    )
    say(f"one plain step: {costs.plain:.1f} ms; select, commit and the rest of a cycle: {costs.overhead:.2f} ms")
    say(f"a draft, in plain steps: {widths}")


def show(run: RunConfig, costs: Costs, predictions: Sequence[Prediction], trials: Sequence[Trial]) -> None:
    """Tables and the verdict."""
    rows = [(f.shape.name, f"{f.tau:.2f}", f"{f.cycle_ms / costs.plain:.2f}", f"{f.speedup:.2f}×") for f in predictions]
    table("predicted", ("shape", "τ", "cycle, in plain steps", "speed-up"), rows[:10])
    table(
        "really run",
        ("shape", "τ", "predicted", "measured", "same text"),
        [
            (
                trial.prediction.shape.name,
                f"{trial.tau:.2f}",
                f"{trial.prediction.speedup:.2f}×",
                f"{trial.speedup:.2f}×",
                trial.same_text,
            )
            for trial in trials
        ],
    )
    say(verdict(run, trials))


def verdict(run: RunConfig, trials: Sequence[Trial]) -> str:
    """What to do."""
    best = max(trials, key=lambda trial: trial.speedup)
    shape = best.prediction.shape
    if best.speedup <= 1:
        return (
            f"Do not speculate on this device with this head: the best shape, {shape.name}, reaches {best.speedup:.2f}× "
            f"plain decoding (τ {best.tau:.2f}, break-even {best.cycle_ms / best.plain_ms:.2f})."
        )
    config = {"kind": shape.kind, "depth": shape.depth}
    if shape.kind == "dynamic":
        config |= {"top_k": shape.top_k, "nodes": shape.nodes}
    if shape.kind == "static":
        config = {"kind": "static", "file": str(run.directory / "tree.json")}
    text = ", ".join(f"{key}: {value}" for key, value in config.items())
    return (
        f"Use {shape.name}: {best.speedup:.2f}× plain decoding; drafting pays while τ stays above "
        f"{best.cycle_ms / best.plain_ms:.2f}. In the run file: eval.shapes: [{{{text}}}]"
    )


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    run_stage("headwright tune", ABOUT, SECTIONS, tune, argv)


if __name__ == "__main__":
    main()
