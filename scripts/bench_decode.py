"""How fast the decoder is, what each drafter and shape brings, and whether the cost model foretells it.

    bash scripts/quickstart.sh                                                # or harvest and train: a run with a head
    python scripts/bench_decode.py --config configs/smollm2-eagle3.yaml      # drafters and shapes on its held-out prompts
    python scripts/bench_decode.py --config configs/smollm2-eagle3.yaml --parts batch tau
    python scripts/bench_decode.py --parts overhead                           # no run needed: thin random layers
    python scripts/bench_decode.py --parts bound --size 1b                    # no run needed: random weights against
    memory speed

Every side decodes a prompt before the next prompt comes, in an order that turns from prompt to prompt, so that a slow
moment of the machine meets all. Speed-ups are against the faster of our plain loop and transformers' `generate`. Texts
are compared in the same run: a side whose text differs from plain decoding is named.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from headwright.configs import RunConfig
from headwright.configs.command import clean_exit
from headwright.configs.console import say, table
from headwright.configs.load import load_run
from headwright.data.batch import DocumentFeatures, pack
from headwright.data.harvest import store_path
from headwright.data.small_model import random_target
from headwright.data.store import FeatureReader
from headwright.data.target import Target
from headwright.eval.acceptance import stack
from headwright.eval.baselines import chosen_exit, datastore, training_texts
from headwright.eval.decode import PLAIN, Generation, Settings, generate, generate_one
from headwright.eval.drafters import PromptLookup
from headwright.eval.lookahead import Lookahead
from headwright.eval.metrics import acceptance_length, phase_milliseconds, tokens_per_second
from headwright.eval.retrieval import Retrieval
from headwright.eval.rollout_tau import replay, rollout_taus
from headwright.eval.shape import Bench, Costs, between, first_answer, measure_costs, measure_ranks, sparse_shape
from headwright.eval.suffix import SuffixDrafter, read_corpus
from headwright.eval.tune import answered, cycle_ms, prompt_of, spread, typical
from headwright.heads.base import Drafter, DraftHead
from headwright.heads.draft_tree import TreeShape
from headwright.heads.saved import load_head

SIZES = {  # hidden, layers, heads, key-value heads, MLP, vocabulary
    "tiny": (64, 4, 4, 2, 128, 300),
    "1b": (2048, 16, 32, 8, 8192, 128256),
    "8b": (4096, 32, 32, 8, 14336, 128256),
}


@dataclass
class Side:
    """One way of decoding, and its runs."""

    name: str
    shape: TreeShape
    drafter: Drafter | None
    runs: list[Generation] = field(default_factory=list)


@dataclass
class Scene:
    """A run's target, head and held-out texts."""

    run: RunConfig
    target: Target
    head: DraftHead
    documents: list[DocumentFeatures]
    limit: int

    @classmethod
    def open(cls, arguments: argparse.Namespace) -> "Scene":
        """Load it."""
        run = load_run(arguments.config, arguments.overrides)
        reader = FeatureReader(store_path(run, "held-out"))
        device = "cuda" if torch.cuda.is_available() else "cpu"
        target = Target.load(run.target, reader.manifest.taps, device)
        head = load_head(run.directory / "head", target).eval()
        return cls(run, target, head, spread(answered(run, reader), arguments.prompts), arguments.tokens)


def sides_of(scene: Scene) -> list[Side]:
    """Plain decoding, shapes of the head, and the drafters without training."""
    head, chain = scene.head, TreeShape.chain(5)
    ranks = measure_ranks(head, scene.target, scene.documents, 5)
    shapes = ("chain-2", "chain-3", "chain-5", "tree-3x2-3", "tree-4x4-12", "eagle-1")
    sides = [Side("plain", PLAIN, None)]
    sides += [Side("head", TreeShape.parse(name), head) for name in shapes]
    sides.append(Side("head", sparse_shape(ranks, 12), head))
    lookahead = Lookahead()
    corpus = read_corpus(training_texts(scene.run, 200_000))
    early, model, [exit_chain] = chosen_exit(scene.run, scene.target, 5)
    return [
        *sides,
        Side("prompt-lookup", chain, PromptLookup()),
        Side("suffix, own text", chain, SuffixDrafter()),
        Side("suffix, with training texts", chain, SuffixDrafter(corpus)),
        Side("retrieval", chain, Retrieval(datastore(scene.run))),
        Side("retrieval", TreeShape.parse("tree-4x4-12"), Retrieval(datastore(scene.run))),
        Side("lookahead", lookahead.shape, lookahead),
        Side(early, exit_chain, model),
    ]


def bench_sides(scene: Scene, rounds: int) -> dict[str, Any]:
    """All sides in turn."""
    sides = sides_of(scene)
    hf: list[tuple[float, int]] = []
    for side in sides:
        generate_one(scene.target, side.drafter, prompt_of(scene.documents[0]), Settings(side.shape, 4))
    scene.target.generate_hf(torch.tensor([prompt_of(scene.documents[0])], device=scene.target.device), 4)
    bench, found = Bench(scene.head, scene.target, typical(scene.documents)), []
    for number in range(rounds):
        for place, document in enumerate(scene.documents):
            turn = (place + number) % len(sides)
            for side in sides[turn:] + sides[:turn]:
                settings = Settings(side.shape, scene.limit)
                side.runs.append(generate_one(scene.target, side.drafter, prompt_of(document), settings))
            hf.append(timed_hf(scene, prompt_of(document)))
            found.append(measure_costs(bench, (1, 2, 4), 5, 30, 0.0, 1))  # among the runs: the machine's speed moves
    costs = median_costs(found)
    say(f"machine and versions: {stack(scene.target)}")
    return {"costs": costs_json(costs), "hf": hf, "sides": show_sides(scene, sides, costs, hf)}


def timed_hf(scene: Scene, prompt: list[int]) -> tuple[float, int]:
    """Seconds and new tokens of transformers' generate."""
    begun = time.perf_counter()
    tokens = scene.target.generate_hf(torch.tensor([prompt], device=scene.target.device), scene.limit)
    return time.perf_counter() - begun, len(tokens)


def median_costs(found: Sequence[Costs]) -> Costs:
    """Of all measurements."""

    def median(parts: Sequence[dict[int, float]]) -> dict[int, float]:
        return {key: statistics.median(part[key] for part in parts) for key in parts[0]}

    verify, first, level = ([getattr(costs, name) for costs in found] for name in ("verify", "first", "level"))
    passes = median(verify)
    return Costs(passes, median(first), median(level), 0.0, passes[1])


def costs_json(costs: Costs) -> dict[str, Any]:
    """In JSON."""
    return {"verify_ms": costs.verify, "draft_first_ms": costs.first, "draft_level_ms": costs.level}


def show_sides(scene: Scene, sides: Sequence[Side], costs: Costs, hf: Sequence[tuple[float, int]]) -> list[Any]:
    """The table, and its numbers."""
    plain = sides[0]
    ours = tokens_per_second(plain.runs)
    theirs = sum(count for _, count in hf) / sum(seconds for seconds, _ in hf)
    say(f"plain decoding: {ours:.1f} tok/s (ours), {theirs:.1f} tok/s (transformers' generate); prefill included")
    step = statistics.median(cycle_ms(run) for run in plain.runs if run.emitted)
    found = [measured(side, plain, costs, step, max(ours, theirs)) for side in sides]
    columns = (
        "drafter",
        "shape",
        "τ",
        "tok/s",
        "speed-up",
        "draft",
        "verify",
        "rest",
        "rest/cycle",
        "S foretold",
        "S measured",
        "same",
    )
    rows = [
        (
            entry["name"],
            entry["shape"],
            f"{entry['tau']:.2f}",
            f"{entry['tokens_per_second']:.1f}",
            f"{entry['speedup']:.2f}×",
            f"{entry['phases_ms']['draft']:.1f}",
            f"{entry['phases_ms']['verify']:.1f}",
            f"{entry['rest_ms']:.2f}",
            f"{entry['rest_share']:.1%}",
            f"{entry['foretold']:.2f}",
            f"{entry['measured']:.2f}",
            f"{entry['same']}/{len(plain.runs)}",
        )
        for entry in found
    ]
    table("decoding (phases in ms per cycle; S: decoding alone, without the prefill)", columns, rows)
    return found


def measured(side: Side, plain: Side, costs: Costs, step: float, best: float) -> dict[str, Any]:
    """One row."""
    phases, tau = phase_milliseconds(side.runs), acceptance_length(side.runs)
    rest = phases["select"] + phases["commit"] + phases["other"]
    cycle = phases["draft"] + phases["verify"] + rest
    verify = statistics.fmean(between(costs.verify, count + 1) for run in side.runs for count in run.drafted)
    draft = costs.draft(side.shape) if isinstance(side.drafter, DraftHead) else phases["draft"]
    cycles = statistics.median(cycle_ms(run) for run in side.runs if run.emitted)
    return {
        "name": side.name,
        "shape": side.shape.name,
        "tau": tau,
        "tokens_per_second": tokens_per_second(side.runs),
        "speedup": tokens_per_second(side.runs) / best,
        "phases_ms": phases,
        "rest_ms": rest,
        "rest_share": rest / cycle,
        "foretold": tau * costs.plain / (draft + verify + rest),
        "measured": tau * step / cycles,
        "same": sum(run.tokens == reference.tokens for run, reference in zip(side.runs, plain.runs)),
    }


def bench_batch(scene: Scene, rounds: int) -> list[Any]:
    """Tokens per second of batches, plain and drafted, texts compared with batch 1."""
    prompts = [prompt_of(document) for document in scene.documents]
    single = [g.tokens for g in generate(scene.target, None, prompts, Settings(PLAIN, scene.limit)).generations]
    found = []
    for batch in (1, 2, 4, 8):
        speeds: dict[str, list[float]] = {}
        for _ in range(rounds):
            for name, shape, drafter in batch_sides(scene):
                out = generate(scene.target, drafter, prompts, Settings(shape, scene.limit, batch=batch))
                same = sum(text.tokens == alone for text, alone in zip(out.generations, single))
                if same < len(prompts):
                    say(f"{name}, batch {batch}: only {same} of {len(prompts)} texts are those of batch 1")
                speeds.setdefault(name, []).append(sum(len(g.tokens) for g in out.generations) / out.seconds)
        found.append({"batch": batch} | {name: statistics.median(values) for name, values in speeds.items()})
    rows = [(entry["batch"], *(f"{value:.1f}" for name, value in entry.items() if name != "batch")) for entry in found]
    table("batches with refill: new tokens per second, prefill included", ("batch", *list(found[0])[1:]), rows)
    return found


def batch_sides(scene: Scene) -> list[tuple[str, TreeShape, Drafter | None]]:
    """What is compared at every batch size."""
    return [
        ("plain", PLAIN, None),
        ("chain-3", TreeShape.chain(3), scene.head),
        ("tree-3x2-3", TreeShape.parse("tree-3x2-3"), scene.head),
    ]


def bench_tau(scene: Scene) -> dict[str, Any]:
    """τ of chains of 1 to 7 by one rollout over all stored answers, against decoding some of them with a chain of 5."""
    reader = FeatureReader(store_path(scene.run, "held-out"))
    depths = list(range(1, 8))
    begun = time.perf_counter()
    taus = rollout_taus(scene.head, scene.target, reader, depths, scene.run.train.tokens_per_batch)
    replayed = time.perf_counter() - begun
    answers = sum(int(reader[number].mask_T.sum()) for number in range(len(reader)))
    begun, outs = time.perf_counter(), []
    for document in scene.documents:
        start, end = first_answer(document)
        settings = Settings(TreeShape.chain(5), end - start)
        outs.append(generate_one(scene.target, scene.head, prompt_of(document), settings))
    decoded, tokens = time.perf_counter() - begun, sum(len(out.tokens) for out in outs)
    same = sum(counts(scene, document) == out.accepted for document, out in zip(scene.documents, outs))
    ratio = decoded / tokens / (replayed / answers)
    say(
        f"chains of 1 to 7 by one rollout: {1000 * replayed / answers:.2f} ms a token ({answers} tokens, {replayed:.1f} s)"
    )
    say(f"decoding with a chain of 5: {1000 * decoded / tokens:.1f} ms a token, {ratio:.0f} times as long")
    say(f"the same accepted drafts in every cycle: {same} of {len(outs)} answers")
    table("τ by rollout", ("depth", "τ"), [(depth, f"{taus[depth].acceptance_length:.3f}") for depth in depths])
    return {"ratio": ratio, "same": same, "tau": {depth: taus[depth].acceptance_length for depth in depths}}


def counts(scene: Scene, document: DocumentFeatures) -> list[int]:
    """Accepted drafts of each cycle of a chain of 5, by rollout."""
    batch = pack([document]).to(scene.target.device)
    return replay(document.mask_T, scene.head.agreement(batch, scene.target, 5).cpu()).accepted


def bench_overhead(rounds: int) -> dict[str, float]:
    """One plain step of 30 layers so thin that their weights cost nothing: ours, and the model with transformers' own cache."""
    target = random_target((48, 30, 3, 1, 64, 256), torch.float32, "cuda" if torch.cuda.is_available() else "cpu")
    prompt = list(range(64)) * 4
    ours, theirs = [], []
    for _ in range(rounds + 1):
        out = generate_one(target, None, prompt, Settings(PLAIN, 48))
        ours.append(cycle_ms(out))
        theirs.append(dynamic_cache_ms(target, prompt, 48))
    left, right = statistics.median(ours[1:]), statistics.median(theirs[1:])
    say(f"thin model, one plain step: {left:.2f} ms ours, {right:.2f} ms with DynamicCache: {left / right:.2f} of it")
    return {"ours_ms": left, "dynamic_cache_ms": right}


@torch.inference_mode()
def dynamic_cache_ms(target: Target, prompt: list[int], count: int) -> float:
    """Milliseconds of a step of the plainest greedy loop over the model itself."""
    cache = transformers.DynamicCache(config=target.model.config)
    with target.attention(target.own_attention):
        ids = torch.tensor([prompt], device=target.device)
        token = target.model(input_ids=ids, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
        begun = time.perf_counter()
        for _ in range(count):
            token = target.model(input_ids=token, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
            int(token)
    return 1000 * (time.perf_counter() - begun) / count


def bench_bound(size: str) -> dict[str, float]:
    """Plain decoding of random weights against the time that reading them takes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = random_target(SIZES[size], torch.bfloat16 if device == "cuda" else torch.float32, device)
    used = sum(
        p.numel() * p.element_size() for name, p in target.model.named_parameters() if "embed_tokens" not in name
    )
    generate_one(target, None, list(range(1, 129)), Settings(PLAIN, 16))  # warm-up
    out = generate_one(target, None, list(range(1, 129)), Settings(PLAIN, 128))
    step, floor = cycle_ms(out), 1000 * used / memory_speed(device)
    say(
        f"{size}: {used / 1e9:.2f} GB of weights, {step:.2f} ms a token, floor {floor:.2f} ms: {floor / step:.0%} of the bound"
    )
    return {"step_ms": step, "floor_ms": floor, "share": floor / step}


def memory_speed(device: str) -> float:
    """Bytes per second of reading memory: the sum of a large tensor, the best of several."""
    block = torch.ones(2**28 if device == "cuda" else 2**26, device=device)
    best = 0.0
    for _ in range(6):
        if device == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        float(block.sum())
        best = max(best, block.numel() * block.element_size() / (time.perf_counter() - begun))
    return best


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="a run with features and a head")
    parser.add_argument("--parts", nargs="+", default=["sides"], choices=["sides", "batch", "tau", "overhead", "bound"])
    parser.add_argument("--prompts", type=int, default=8, help="held-out prompts (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="repetitions (default: %(default)s)")
    parser.add_argument("--size", default="1b", choices=list(SIZES), help="of the random model (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="change keys of the run file")
    arguments = parser.parse_args()
    with clean_exit():
        if set(arguments.parts) & {"sides", "batch", "tau"} and arguments.config is None:
            parser.error("these parts need --config")
        scene = Scene.open(arguments) if arguments.config else None
        parts: dict[str, Callable[[], Any]] = {
            "sides": lambda: bench_sides(scene, arguments.rounds),
            "batch": lambda: bench_batch(scene, arguments.rounds),
            "tau": lambda: bench_tau(scene),
            "overhead": lambda: bench_overhead(arguments.rounds + 3),
            "bound": lambda: bench_bound(arguments.size),
        }
        found = {name: parts[name]() for name in arguments.parts}
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
