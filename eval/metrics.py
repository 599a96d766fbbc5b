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
    "speedup": "wall time of the faster plain greedy baseline over this run's, both per new token, on the timed prompts",
    "repeated_4grams": "share of 4-grams that occurred before in the same answer; loops flatter τ",
}


def acceptance_length(runs: Sequence[Generation]) -> float:
    """τ over all cycles of `runs`."""
    cycles = sum(len(run.emitted) for run in runs)
    return sum(sum(run.emitted) for run in runs) / cycles if cycles else float("nan")


def acceptance_metrics(runs: Sequence[Generation], depth: int, seed: int = 0) -> dict[str, Any]:
    """The acceptance part of a report entry."""
    counts = Counter(accepted for run in runs for accepted in run.accepted)
    cycles = sum(counts.values())
    joint = [sum(n for k, n in counts.items() if k > place) / cycles for place in range(depth)] if cycles else []
    conditional = [share / before if before else 0.0 for share, before in zip(joint, [1.0, *joint])]
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
        "histogram": [counts.get(k, 0) for k in range(depth + 1)],
    }


def bootstrap(
    items: Sequence[Any], statistic: Callable[[Sequence[Any]], float], seed: int, draws: int = 1000
) -> list[float]:
    """95 % percentile interval of `statistic` under resampling of `items`."""
    generator = np.random.default_rng(seed)
    picks = generator.integers(len(items), size=(draws, len(items)))
    values = [statistic([items[index] for index in pick]) for pick in picks]
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return [float(low), float(high)]


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
