"""Pearson's χ² test of drawn tokens against a distribution, for any vocabulary size."""

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

LEAST_EXPECTED = 5.0  # of a cell; rarer tokens share one, or are too few even together


def chi_square(drawn: Sequence[int], probs: Sequence[float]) -> tuple[float, int, float]:
    """(χ², degrees of freedom, p). Tokens expected less than five times are one cell. Where they are that even together, χ² is
    of the others alone, and their number is held against Poisson's law; p is then twice the smaller of both. What can
    never come must not.
    """
    expected = [len(drawn) * share for share in probs]
    counts = Counter(drawn)
    if any(probs[token] == 0 for token in counts):
        return float("inf"), 1, 0.0
    large = [token for token, value in enumerate(expected) if value >= LEAST_EXPECTED]
    cells = [(counts[token], expected[token]) for token in large]
    rest = len(drawn) - sum(count for count, _ in cells), sum(expected) - sum(value for _, value in cells)
    if rest[1] >= LEAST_EXPECTED:
        return pearson([*cells, rest])
    scale = (len(drawn) - rest[0]) / max(len(drawn) - rest[1], 1e-300)
    statistic, free, p = pearson([(count, value * scale) for count, value in cells])
    return statistic, free, min(1.0, 2 * min(p, gamma(torch.special.gammainc, rest[0], rest[1]))) if rest[1] > 0 else p


def pearson(cells: Sequence[tuple[int, float]]) -> tuple[float, int, float]:
    """Of cells (count, expected). With fewer than two there is nothing to test: (0, 0, 1)."""
    if len(cells) < 2:
        return 0.0, 0, 1.0
    statistic = sum((count - value) ** 2 / value for count, value in cells)
    return statistic, len(cells) - 1, gamma(torch.special.gammaincc, (len(cells) - 1) / 2, statistic / 2)


def gamma(function: Callable[[Tensor, Tensor], Tensor], shape: float, place: float) -> float:
    """A regularised incomplete gamma function; P(Poisson(λ) ≥ 0) is 1."""
    if shape == 0:
        return 1.0
    return float(function(torch.tensor(shape, dtype=torch.float64), torch.tensor(place, dtype=torch.float64)))
