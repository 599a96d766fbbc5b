"""Trials beside an adaptation: which share of general text is taken, what more text would give; none is made twice."""

import json
import shutil
from dataclasses import asdict, replace

import pytest
from conftest import tiny_run
from hypothesis import given
from hypothesis import strategies as st

from headwright.configs import UserError
from headwright.configs.schema import ShapeConfig, TrackConfig
from headwright.data.harvest import harvest, open_store
from headwright.data.replay import replaying, some_of
from headwright.train import trials
from headwright.train.launch import open_launch
from headwright.train.run import train
from headwright.train.trials import Stopped, Trials, asked_of, choose, expected


def made(tau: float, general: float, floor: float = 1.5) -> dict:
    """What a trial leaves."""
    return {"last": {"tau": tau, "tau_general": general}, "general_floor": floor, "step": 3}


def test_the_best_for_the_domain_within_the_budget():
    assert choose({0.0: made(2.0, 1.4), 0.25: made(1.9, 1.6), 0.5: made(1.8, 1.7)}) == 0.25


def test_where_none_keeps_the_budget_the_one_that_forgets_least(capsys):
    assert choose({0.0: made(2.0, 1.2), 0.25: made(1.9, 1.4), 0.5: made(1.8, 1.3)}) == 0.25
    assert "no share of replay kept the budget" in capsys.readouterr().out


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
    """They leave what came of them and no weights; they are not tracked and do not decode."""
    launch = open_launch(base.train)
    chosen = Trials(base, launch).replay()
    assert chosen in (0.0, 0.5)
    assert "trials of replay" in capsys.readouterr().out
    assert [run.name for run in counted] == ["adapted-trial-replay-0", "adapted-trial-replay-0.5"]
    assert [run.train.epochs for run in counted] == [1.0, 1.0]
    assert {run.features for run in counted} == {"adapted"}
    assert {(run.train.track.wandb, run.train.decode.evals) for run in counted} == {("off", 0)}
    assert not [run for run in counted if run.directory.exists()]
    found = json.loads((base.directory / "trials" / "replay-0.5.json").read_text(encoding="utf-8"))
    assert found["last"]["tau"] >= 1
    assert found["general_floor"] > 0
    assert Trials(base, launch).replay() == chosen
    wider = replace(base, adapt=replace(base.adapt, shares=[0.0, 0.5], curve=[0.1, 0.2]))
    spread = replace(wider, train=replace(base.train, track=TrackConfig(wandb="offline"), accumulate=2, processes=2))
    assert Trials(spread, launch).replay() == chosen
    assert len(counted) == 2


def test_another_setting_is_another_trial(base, model_dir, chats, tmp_path):
    """What the weights depend on: settings, the head's own weights, the text, the depth that is measured."""
    now = asked_of(base)
    assert asked_of(replace(base, train=replace(base.train, lr=1e-2))) != now
    assert asked_of(replace(base, seed=7)) != now
    assert asked_of(replace(base, adapt=replace(base.adapt, part=0.5))) != now
    assert asked_of(replace(base, eval=replace(base.eval, shapes=[ShapeConfig(depth=2)]))) != now
    shutil.copytree(base.adapt.head, tmp_path / "head")
    other = replace(base, adapt=replace(base.adapt, head=str(tmp_path / "head")))
    moved = asked_of(other)
    assert moved["weights"] == now["weights"]
    (tmp_path / "head" / "model.safetensors").write_bytes(b"others")
    assert asked_of(other)["weights"] != now["weights"]
    less = tiny_run(
        model_dir, chats, tmp_path, corpus=asdict(base.corpus) | {"held_out": 0.5}, answers={"by": "corpus"}
    )
    harvest(less)
    assert asked_of(replace(base, runs=less.runs, name=less.name))["features"] != now["features"]


def test_a_curve_has_the_text_that_was_learned(base, counted):
    run = replace(base, adapt=replace(base.adapt, replay=0.0, budget=1.0))
    made = Trials(run, open_launch(run.train)).whole()
    point, whole = Trials(run, open_launch(run.train)).curve(made)
    features = open_store(run, "train")
    rows = [n for n, source in zip(features.loss_rows(), features.sources()) if source == "other"]
    assert (point["part"], whole["part"]) == (0.25, 1.0)
    assert 0 < point["rows"] < whole["rows"] == sum(rows)
    assert min(point["tau"], whole["tau"]) >= 1
    assert [run.adapt.part for run in counted] == [1.0, 0.25]
    half = replace(run, adapt=replace(run.adapt, part=0.5))
    parts = [point["part"] for point in Trials(half, open_launch(run.train)).curve(made)]
    assert parts == [0.125, 0.5]


def test_what_is_trained_is_not_trained_again(base, counted):
    """Nor by another number of processes."""
    run = replace(base, name="again", features="adapted", adapt=replace(base.adapt, replay=0.0, budget=1.0))
    made = Trials(run, open_launch(run.train)).whole()
    spread = replace(run, train=replace(run.train, accumulate=2))
    assert Trials(spread, open_launch(run.train)).whole() == made
    assert len(counted) == 1


def test_a_run_that_kept_no_head_is_named_before_the_curve(base, monkeypatch):
    run = replace(base, name="none", features="adapted", adapt=replace(base.adapt, replay=0.0))
    monkeypatch.setattr("headwright.train.run.floor_of", lambda *_: 99.0)
    with pytest.raises(UserError, match=r"no head lost less than adapt\.budget"):
        Trials(run, open_launch(run.train)).whole()


def test_a_search_needs_general_text_that_is_held_out(base, counted, monkeypatch):
    monkeypatch.setattr("headwright.train.trials.general_sources", lambda corpus: {"elsewhere"})
    with pytest.raises(UserError, match="no general text is held out"):
        Trials(base, open_launch(base.train)).replay()
    assert not counted


def test_a_trial_that_is_stopped_ends_the_search(base, monkeypatch):
    monkeypatch.setattr(trials, "train", lambda run: False)
    other = replace(base, adapt=replace(base.adapt, shares=[0.3]))
    with pytest.raises(Stopped):
        Trials(other, open_launch(base.train)).replay()
    assert not (base.directory / "trials" / "replay-0.3.json").exists()
