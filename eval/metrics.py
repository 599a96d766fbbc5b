"""Metrics of decoding runs, with their definitions. A cycle is one target pass after the prefill."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headwright.eval.clock import PHASES
from headwright.eval.decode import Generation

DEFINITIONS = {
    "acceptance_length": "τ: tokens emitted per cycle, bonus token included, cut at the end of the text; all cycles pooled",
    "acceptance_length_macro": "mean over prompts of each prompt's τ",
    "acceptance_length_ci95": "95 % bootstrap interval of τ over prompts",
    "accepted_per_position": "share of the cycles that accept at least k drafted tokens (joint; vLLM's definition)",
    "conditional_per_position": "share of the cycles that accept token k, of those that accepted k-1",
    "histogram": "cycles by number of accepted drafted tokens, from 0",
    "tokens_per_second": "new tokens over wall time, prefill included, batch 1",
    "chars_per_second": "characters of the answers over the same time: what readers of different languages can compare",
    "speedup": "wall time of the faster plain greedy baseline over this run's, both per new token, prefill included, summed "
    "over the timed prompts; the faster of the set, or of all sets in pooled figures",
    "speedup_ci95": "95 % bootstrap interval of the speed-up over the timed prompts",
    "speedup_per_prompt": "the same ratio for each timed prompt: percentiles and mean",
    "ttft_ms": "milliseconds from a turn's beginning to its first token: the prefill, drafting state not included",
    "token_latency_ms": "milliseconds per new token after the first; tokens of one cycle share its time",
    "gap_ms": "milliseconds between two arrivals of text: whole cycles, as a reader of a stream sees them",
    "phases_ms": "milliseconds of a cycle by phase; prefill: of a prompt",
    "speedup_model": "τ · plain step / cycle from the phases measured here, prefill left out; break_even: the τ at which that "
    "is 1; ceiling: if every draft were accepted; modelled_gpu: not measured",
    "greedy_identity": "share of the prompts whose text is that of plain decoding, token by token",
    "logit_gap": "where two texts part, the difference of the target's logits for the two tokens: a rounding tie if near 0",
    "compatible": "the same runs by others' definitions. spec_bench: mean of all cycles' tokens; tok/s of the mean question "
    "over that of transformers' generate. vllm: 1 + accepted / drafts, cycles in full where they run over the end; cycles "
    "without a draft are none. sglang: all new tokens, the prefill's too, over verification passes",
    "repeated_4grams": "share of 4-grams that occurred before in the same answer; loops flatter τ",
}


def acceptance_length(runs: Sequence[Generation]) -> float:
    """τ over all cycles of `runs`."""
    cycles = sum(len(run.emitted) for run in runs)
    return sum(sum(run.emitted) for run in runs) / cycles if cycles else float("nan")


def acceptance_metrics(runs: Sequence[Generation], depth: int, seed: int = 0) -> dict[str, Any]:
    """The acceptance part of a report entry."""
    counts = histogram(runs, depth)
    cycles = sum(counts)
    joint, conditional = rates(counts) if cycles else ([], [])
    per_prompt = [run.acceptance_length for run in runs if run.emitted]
    return {
        "acceptance_length": acceptance_length(runs),
        "acceptance_length_macro": float(np.mean(per_prompt)) if per_prompt else float("nan"),
        "acceptance_length_ci95": bootstrap(runs, acceptance_length, seed),
        "cycles": cycles,
        "drafted": sum(sum(run.drafted) for run in runs),
        "accepted": sum(sum(run.accepted) for run in runs),
        "accepted_per_position": joint,
        "conditional_per_position": conditional,
        "histogram": counts,
    }


def histogram(runs: Sequence[Generation], depth: int) -> list[int]:
    """Cycles by the drafted tokens that they accept, from 0."""
    counts = Counter(accepted for run in runs for accepted in run.accepted)
    return [counts[k] for k in range(depth + 1)]


def rates(counts: Sequence[int]) -> tuple[list[float], list[float]]:
    """Of a histogram: the share of all cycles that accept draft k, and of those that accepted the one before it."""
    joint = [sum(counts[place:]) / max(sum(counts), 1) for place in range(1, len(counts))]
    return joint, [share / before if before else 0.0 for share, before in zip(joint, [1.0, *joint])]


def pooled_tau(answers: Sequence[tuple[int, int]]) -> float:
    """τ over answers of (tokens, cycles)."""
    return sum(emitted for emitted, _ in answers) / max(1, sum(cycles for _, cycles in answers))


def bootstrap(
    items: Sequence[Any], statistic: Callable[[Sequence[Any]], float], seed: int, draws: int = 1000
) -> list[float]:
    """95 % percentile interval of `statistic` under resampling of `items`."""
    generator = np.random.default_rng(seed)
    picks = generator.integers(len(items), size=(draws, len(items)))
    values = [statistic([items[index] for index in pick]) for pick in picks]
    if np.isnan(values).all():
        return [float("nan")] * 2
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return [float(low), float(high)]


def percentiles(values: Sequence[float], which: Sequence[int] = (50, 95)) -> dict[str, float]:
    """p50, p95, …; NaN of nothing."""
    found = np.percentile(values, which) if len(values) else [float("nan")] * len(which)
    return {f"p{name}": float(value) for name, value in zip(which, found)}


def latencies(turns: Sequence[Generation]) -> dict[str, Any]:
    """What a reader of a stream waits for."""
    first, tokens, gaps = [], [], []
    for turn in turns:
        first += turn.moments[:1]
        for before, now, emitted in zip(turn.moments, turn.moments[1:], turn.emitted):
            gaps.append(now - before)
            tokens += [(now - before) / emitted] * emitted
    named = {"ttft_ms": first, "token_latency_ms": tokens, "gap_ms": gaps}
    return {name: percentiles([1000 * value for value in values]) for name, values in named.items()}


def as_others_count(turns: Sequence[Generation], speeds: Sequence[float], plain: Sequence[float]) -> dict[str, Any]:
    """Spec-Bench's, vLLM's and SGLang's figures of the same runs. `speeds`, `plain`: tok/s of each timed prompt, here and by
    transformers' generate.

    Sources: Spec-Bench's speed report; vLLM 0.32, spec_decode/metrics.py; SGLang 0.5.23, meta_info of a request.
    """
    emitted = [count for turn in turns for count in turn.emitted]
    pairs = [pair for turn in turns for pair in zip(turn.drafted, turn.stood) if pair[0]]
    drafted, stood = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
    passes, tokens = len(emitted), sum(len(turn.tokens) for turn in turns)
    nothing = float("nan")
    return {
        "spec_bench": {
            "mean_accepted_tokens": sum(emitted) / passes if passes else nothing,
            "speedup_ratio": float(np.mean(speeds) / np.mean(plain)) if len(speeds) and len(plain) else nothing,
        },
        "vllm": {
            "mean_acceptance_length": 1 + stood / len(pairs) if pairs else nothing,
            "draft_acceptance_rate": stood / drafted if drafted else nothing,
        },
        "sglang": {
            "accept_length": tokens / passes if passes else nothing,
            "accept_rate": stood / drafted if drafted else nothing,
        },
    }


def tokens_per_second(runs: Sequence[Generation]) -> float:
    """New tokens over wall time."""
    return sum(len(run.tokens) for run in runs) / sum(run.seconds for run in runs)


def phase_milliseconds(runs: Sequence[Generation]) -> dict[str, float]:
    """Mean per cycle; prefill per prompt."""
    cycles = max(sum(len(run.emitted) for run in runs), 1)
    total = {name: 1000 * sum(run.phases[name] for run in runs) for name in PHASES}
    return {name: total[name] / (len(runs) if name == "prefill" else cycles) for name in PHASES}


def repeated_4grams(texts: Sequence[Sequence[int]]) -> float:
    """Share of 4-grams seen before in the same text."""
    repeated = total = 0
    for text in texts:
        grams = [tuple(text[i : i + 4]) for i in range(len(text) - 3)]
        repeated += len(grams) - len(set(grams))
        total += len(grams)
    return repeated / total if total else 0.0


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's: 1 where both order the runs alike, −1 where they order them the other way round. Equals share a rank."""
    ours, theirs = ranks(left), ranks(right)
    if min(ours.std(), theirs.std()) == 0:
        return float("nan")
    return float(np.corrcoef(ours, theirs)[0, 1])


def ranks(values: Sequence[float]) -> np.ndarray:
    """The place of each value, from 0; the mean of the places that equal values take."""
    given = np.asarray(values)
    return ((given[:, None] > given).sum(1) + (given[:, None] >= given).sum(1) - 1) / 2


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, for tables and plots; a torn last line is left out."""
    records = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                records.append(json.loads(line))
            except ValueError:
                continue
    return records
