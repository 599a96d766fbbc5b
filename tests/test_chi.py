"""The χ² test of drawn tokens, against scipy's and by hand."""

import math
import random

import pytest
import scipy.stats

from headwright.eval.chi import LEAST_EXPECTED, chi_square


@pytest.mark.parametrize("seed", range(6))
def test_statistic_and_p_are_scipys(seed):
    rng = random.Random(seed)
    probs = [rng.uniform(0.5, 2) for _ in range(2 + 3 * seed)]
    probs = [share / sum(probs) for share in probs]
    drawn = rng.choices(range(len(probs)), [1.0] * len(probs) if seed % 2 else probs, k=400)
    statistic, free, p = chi_square(drawn, probs)
    wanted = scipy.stats.chisquare([drawn.count(token) for token in range(len(probs))], [400 * p for p in probs])
    assert free == len(probs) - 1
    assert statistic == pytest.approx(wanted.statistic)
    assert p == pytest.approx(wanted.pvalue, abs=1e-12)


def test_rare_tokens_share_a_cell():
    probs = [0.5, 0.4, *[0.01] * 10]  # of 100 draws one each is expected of the last ten
    drawn = [0] * 45 + [1] * 40 + [3] * 10 + [7] * 5
    statistic, free, p = chi_square(drawn, probs)
    wanted = scipy.stats.chisquare([45, 40, 15], [50, 40, 10])
    assert (statistic, free, p) == pytest.approx((wanted.statistic, 2, wanted.pvalue))


def test_the_least_expectation_is_a_cell_of_its_own():
    assert LEAST_EXPECTED == 5
    assert chi_square([0] * 15 + [1] * 5, [0.75, 0.25]) == pytest.approx((0, 1, 1))


def test_impossible_tokens_are_never_excused():
    assert chi_square([0] * 99 + [1], [1.0, 0.0]) == (math.inf, 1, 0.0)
    assert chi_square([1], [1.0, 0.0])[2] == 0


@pytest.mark.parametrize(
    ("drawn", "probs"), [([], [0.5, 0.5]), ([0, 1, 0], [0.5, 0.5]), ([0] * 50, [1.0]), ([0] * 50, [1.0, 0.0])]
)
def test_too_few_draws_show_nothing(drawn, probs):
    assert chi_square(drawn, probs) == (0.0, 0, 1.0)


def test_right_draws_pass_and_wrong_ones_do_not():
    rng = random.Random(1)
    probs = [0.4, 0.3, 0.2, 0.1]
    assert chi_square(rng.choices(range(4), probs, k=2000), probs)[2] > 0.01
    assert chi_square(rng.choices(range(4), [0.3, 0.4, 0.2, 0.1], k=2000), probs)[2] < 1e-6


def test_tokens_that_should_hardly_come_are_not_excused():
    assert chi_square([0] * 500 + [1] * 500, [0.9995, 0.0005])[2] < 1e-4


def test_false_alarms_are_as_rare_as_p_says():
    rest, alarms = 1 / 500, 0.0
    for rare in range(12):  # the others come as often as expected
        drawn = [0] * ((500 - rare) // 2) + [1] * (500 - rare - (500 - rare) // 2) + [2] * rare
        if chi_square(drawn, [(1 - rest) / 2, (1 - rest) / 2, rest])[2] < 1e-3:
            alarms += scipy.stats.binom.pmf(rare, 500, rest)
    assert alarms < 2e-3
