"""Trials beside an adaptation: which share of general text is taken, what more text would give; none is made twice."""

import json
from dataclasses import replace

import pytest
from conftest import tiny_run
from hypothesis import given
from hypothesis import strategies as st

from headwright.configs import UserError
from headwright.data.harvest import harvest, open_store
from headwright.data.replay import replaying, some_of
from headwright.train import trials
from headwright.train.launch import open_launch
from headwright.train.run import train
from headwright.train.trials import Stopped, Trials, choose, domain_rows, expected


def made(tau: float, general: float, floor: float = 1.5) -> dict:
    """What a trial leaves."""
    return {"last": {"tau": tau, "tau_general": general}, "general_floor": floor, "step": 3}


def test_the_best_for_the_domain_within_the_budget():
    assert choose({0.0: made(2.0, 1.4), 0.25: made(1.9, 1.6), 0.5: made(1.8, 1.7)}) == 0.25


def test_where_none_keeps_the_budget_the_one_that_forgets_least(capsys):
    assert choose({0.0: made(2.0, 1.2), 0.25: made(1.9, 1.4), 0.5: made(1.8, 1.3)}) == 0.25
    assert "no share of replay kept the budget" in capsys.readouterr().out


def test_without_general_text_nothing_can_be_chosen():
    with pytest.raises(UserError, match="no general text is held out"):
        choose({0.0: {"last": {"tau": 2.0}, "general_floor": 0.0}})


# The learning curve


@given(
    a=st.floats(1.5, 4),
    b=st.floats(0.1, 3),
    power=st.floats(0.1, 1.5),
    sizes=st.lists(st.integers(3, 14), min_size=3, max_size=5, unique=True),
)
def test_a_power_law_is_found_again(a, b, power, sizes):
    """τ = a - b · n^-c through three points or more says what it is at twice the text."""
    sizes = sorted(2.0**size for size in sizes)
    points = [(size, a - b * (size / sizes[0]) ** -power) for size in sizes]
    twice = 2 * sizes[-1]
    assert expected(points, twice) == pytest.approx(a - b * (twice / sizes[0]) ** -power, abs=0.02 * b)


def test_two_points_give_equal_gains_by_doubling():
    assert expected([(100, 1.5), (200, 1.7)], 400) == pytest.approx(1.9, abs=0.01)
    assert expected([(100, 1.5)], 200) is None


@given(count=st.integers(1, 60), parts=st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)), seed=st.integers(0, 5))
def test_smaller_parts_lie_within_larger_ones(count, parts, seed):
    small, large = (some_of(range(10, 10 + count), part, seed) for part in sorted(parts))
    assert set(small) <= set(large) <= set(range(10, 10 + count))
    assert large == sorted(large)
    assert len(small) >= 1
    assert some_of(range(count), 1.0, seed) == list(range(count))


def test_a_part_of_the_domain_is_replayed_beside_its_share():
    general = [number % 2 == 0 for number in range(40)]
    chosen = replaying(general, [1] * 40, 0.5, 0, part=0.25)(0)
    assert sum(not general[document] for document in chosen) == 5
    assert sum(general[document] for document in chosen) == 5


# Real trials


@pytest.fixture(scope="module")
def base(model_dir, chats, tmp_path_factory):
    """A head, and a run that adapts it."""
    run = tiny_run(model_dir, chats, tmp_path_factory.mktemp("base"))
    harvest(run)
    train(run)
    other = tmp_path_factory.mktemp("corpus") / "other.jsonl"
    rows = [{"prompt": f"spell {number}", "response": "abc" * (1 + number % 5)} for number in range(30)]
    other.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sources = [{"path": str(other)}, {"path": str(chats), "general": True}]
    adapted = tiny_run(
        model_dir,
        chats,
        tmp_path_factory.mktemp("runs"),
        name="adapted",
        corpus={"sources": sources, "held_out": 0.25, "max_length": 256},
        answers={"by": "corpus"},
        vocab={"size": 60, "pin_bytes": False, "least": 0.0},
        adapt={
            "head": str(run.directory / "head"),
            "replay": "search",
            "shares": [0.0, 0.5],
            "trial": 0.5,
            "budget": 0.5,
            "curve": [0.25],
        },
    )
    harvest(adapted)
    return adapted


@pytest.fixture
def counted(monkeypatch):
    """The runs that were trained."""
    seen = []

    def training(run):
        seen.append(run)
        return train(run)

    monkeypatch.setattr(trials, "train", training)
    return seen


def test_trials_are_made_once(base, counted, capsys):
    """They leave what came of them and no weights; another setting makes them anew."""
    launch = open_launch(base.train)
    chosen = Trials(base, launch).replay()
    assert chosen in (0.0, 0.5)
    assert "trials of replay" in capsys.readouterr().out
    assert [run.name for run in counted] == ["adapted-trial-replay-0", "adapted-trial-replay-0.5"]
    assert [run.train.epochs for run in counted] == [1.0, 1.0]
    assert {run.features for run in counted} == {"adapted"}
    assert not [path for run in counted for path in (run.directory,) if path.exists()]
    found = json.loads((base.directory / "trials" / "replay-0.5.json").read_text(encoding="utf-8"))
    assert found["last"]["tau"] >= 1
    assert found["general_floor"] > 0
    assert Trials(base, launch).replay() == chosen
    assert len(counted) == 2
    Trials(replace(base, seed=base.seed + 1), launch).trial(
        "replay-0.5", replace(base, adapt=replace(base.adapt, replay=0))
    )
    assert len(counted) == 3


def test_a_curve_has_the_text_that_was_learned(base, counted):
    run = replace(base, adapt=replace(base.adapt, replay=0.0))
    train(run)
    point, whole = Trials(run, open_launch(run.train)).curve()
    features = open_store(run, "train")
    rows = [n for n, source in zip(features.loss_rows(), features.sources()) if source == "other"]
    assert point["part"] == 0.25
    assert 0 < point["rows"] < sum(rows) == domain_rows(run, 1.0)
    assert whole["rows"] == sum(rows)
    assert min(point["tau"], whole["tau"]) >= 1
    assert [run.adapt.part for run in counted] == [0.25]


def test_a_trial_that_is_stopped_ends_the_search(base, monkeypatch):
    monkeypatch.setattr(trials, "train", lambda run: False)
    other = replace(base, adapt=replace(base.adapt, shares=[0.3]))
    with pytest.raises(Stopped):
        Trials(other, open_launch(base.train)).replay()
    assert not (base.directory / "trials" / "replay-0.3.json").exists()
