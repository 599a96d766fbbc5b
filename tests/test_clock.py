"""Phases cut the wall time into pieces: nothing is counted twice, nothing is left out."""

import itertools
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwright.eval.clock import PHASES, Clock, between

CPU = torch.device("cpu")


class Watch:
    """A time that passes when it is told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def watch(monkeypatch):
    watch = Watch()
    monkeypatch.setattr(time, "perf_counter", watch)
    return watch


def test_a_lap_is_charged_with_what_passed_since_the_last(watch):
    clock = Clock(CPU)
    watch.now += 1
    clock.lap("prefill")
    watch.now += 2
    clock.lap("draft")
    watch.now += 4
    clock.lap("verify")
    watch.now += 8
    clock.lap("draft")
    watch.now += 16
    phases, wall = clock.stop()
    assert phases == {"prefill": 1, "draft": 10, "verify": 4, "select": 0, "commit": 0, "other": 16}
    assert wall == 31


def test_time_before_the_clock_is_not_its_own(watch):
    watch.now += 50
    clock = Clock(CPU)
    phases, wall = clock.stop()
    assert wall == 0
    assert phases == dict.fromkeys(PHASES, 0.0)


def test_phases_are_named():
    with pytest.raises(KeyError):
        named_wrongly().stop()


def named_wrongly() -> Clock:
    clock = Clock(CPU)
    clock.lap("lunch")
    return clock


LAPS = st.lists(st.tuples(st.sampled_from(PHASES), st.integers(0, 1000)), max_size=30)


@given(laps=LAPS, rest=st.integers(0, 1000))
def test_laps_add_up(laps, rest):
    """Any sequence of laps: each phase has its own sum, and all together are the wall time."""
    with pytest.MonkeyPatch.context() as patch:
        watch = Watch()
        patch.setattr(time, "perf_counter", watch)
        clock = Clock(CPU)
        for phase, passed in laps:
            watch.now += passed
            clock.lap(phase)
        watch.now += rest
        phases, wall = clock.stop()
    for phase in PHASES:
        own = sum(passed for name, passed in laps if name == phase)
        assert phases[phase] == own + (rest if phase == "other" else 0)
    assert sum(phases.values()) == wall == sum(passed for _, passed in laps) + rest


def test_real_time_adds_up():
    """Two watches that nobody has faked agree."""
    clock = Clock(CPU)
    for phase in itertools.islice(itertools.cycle(PHASES), 200):
        sum(range(2000))
        clock.lap(phase)
    phases, wall = clock.stop()
    assert all(seconds > 0 for seconds in phases.values())
    assert sum(phases.values()) == pytest.approx(wall, rel=0.02)


def test_between_is_seconds():
    assert between(2.0, 5.5) == 3.5
