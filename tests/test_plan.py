"""The plan against what happens: tokens and bytes are foretold, and the summary shows both."""

import json

import pytest
from conftest import TAPS, tiny_run

from headwright.configs import UserError
from headwright.data.corpus import read_corpus
from headwright.data.harvest import harvest, jobs_of, store_path
from headwright.data.store import FeatureReader
from headwright.data.target import Target
from headwright.train.plan import band, expected_tau, expected_tokens, plan
from headwright.train.summary import compare, stored_sides


def planned(run) -> dict:
    """The kept plan."""
    plan(run)
    return json.loads((run.directory / "plan.json").read_text())


def actual(run) -> tuple[int, int, int]:
    """Tokens, response tokens and bytes of both stores."""
    harvest(run)
    sides = stored_sides(run)
    return tuple(sum(getattr(side, name) for side in sides) for name in ("tokens", "response_tokens", "bytes"))


@pytest.mark.parametrize("by", ["target", "corpus"])
def test_tokens_and_disk_are_foretold(model_dir, chats, tmp_path, by):
    run = tiny_run(model_dir, chats, tmp_path, answers={"by": by, "max_new_tokens": 12, "rows": 8})
    found = planned(run)
    tokens, response_tokens, size = actual(run)
    assert found["tokens"] == pytest.approx(tokens, rel=0.05)
    assert found["response_tokens"] == pytest.approx(response_tokens, rel=0.1)
    assert found["features_bytes"] == pytest.approx(size, rel=0.05)
    assert found["features_bytes"] <= found["features_bytes_at_most"] * 1.2
    assert min(found[f"{stage}_seconds"] for stage in ("harvest", "train", "eval")) > 0


def test_texts_are_counted_exactly(model_dir, chats, tmp_path):
    run = tiny_run(model_dir, chats, tmp_path, answers={"by": "corpus"})
    target = Target.load(run.target, TAPS)
    jobs = jobs_of(run, target.tokenizer, 512, "train", read_corpus(run.corpus, run.seed).train)
    harvest(run)
    reader = FeatureReader(store_path(run, "train"))
    assert expected_tokens(jobs, {True: 1.0, False: 1.0})[0] == sum(reader.lengths())


def test_plan_is_compared_with_what_happened(model_dir, chats, tmp_path):
    run = tiny_run(model_dir, chats, tmp_path)
    assert compare(run, {"seconds": 2.0}, {"seconds": 3.0}) == {}  # never planned
    found = planned(run)
    tokens, _, size = actual(run)
    pairs = compare(run, {"seconds": 2.0}, {"seconds": 3.0})
    assert pairs["tokens"] == {"predicted": found["tokens"], "actual": tokens}
    assert pairs["features_bytes"] == {"predicted": found["features_bytes"], "actual": size}
    assert pairs["train_seconds"] == {"predicted": found["train_seconds"], "actual": 2.0}


def test_steps_are_those_of_training(model_dir, chats, tmp_path):
    from headwright.train.run import train

    run = tiny_run(model_dir, chats, tmp_path)
    steps = planned(run)["steps"]
    harvest(run)
    train(run)
    total = json.loads((run.directory / "training.json").read_text())["total"]
    assert steps == pytest.approx(total, abs=2)


def test_dry_run_probes_nothing(model_dir, chats, tmp_path):
    plan(tiny_run(model_dir, chats, tmp_path), dry_run=True)
    assert list(tmp_path.iterdir()) == []


def test_plan_of_live_features_needs_texts(model_dir, chats, tmp_path):
    run = tiny_run(model_dir, chats, tmp_path, harvest={"taps": list(TAPS), "features": "live"})
    with pytest.raises(UserError, match="headwright regenerate first"):
        plan(run, dry_run=True)


def test_band_grows_with_the_text():
    assert len({band(tokens) for tokens in (10_000, 10_000_000, 100_000_000)}) == 3
    assert expected_tau(10_000) < expected_tau(10_000_000)
