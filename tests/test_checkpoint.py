"""Checkpoints are whole or absent, errors of their writing are not lost; what is measured is what it is said to be."""

import errno
import itertools
import json
import math
import shutil
import threading
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
from conftest import TAPS, Interrupted, crash_at, tiny_run
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from headwright.configs import UserError
from headwright.configs.command import clean_exit
from headwright.configs.load import build
from headwright.configs.schema import DecodeConfig, TrainConfig
from headwright.data.batch import pack
from headwright.data.harvest import store_path
from headwright.data.store import FeatureReader
from headwright.data.target import Target
from headwright.eval.decode import generate
from headwright.eval.metrics import rank_correlation, read_metrics
from headwright.eval.prompts import held_out_prompts
from headwright.eval.rollout_tau import rollout_tau
from headwright.eval.settings import Settings
from headwright.heads import get_head, kinds
from headwright.heads.draft_tree import TreeShape
from headwright.heads.saved import load_head
from headwright.train import checkpoint, loop
from headwright.train.checkpoint import Progress, Saver, differences, read_checkpoint, refuse_other, show
from headwright.train.launch import Launch
from headwright.train.loop import decodes_due, measures_due
from headwright.train.measure import Measure, proxy
from headwright.train.run import train
from headwright.train.strategy import Strategy

TRAIN = {
    "epochs": 2,
    "tokens_per_batch": 256,
    "lr": 3e-3,
    "log_every": 1,
    "evals": 3,
    "saves": 6,
    "decode": {"evals": 0},
}


# Writing


def spread_head(value: float = 0.0, main: bool = True) -> SimpleNamespace:
    """What a saver asks of a strategy."""
    return SimpleNamespace(
        weights=lambda: {"w": torch.full((3,), value)} if main else {},
        moments=lambda: {"exp_avg:w": torch.full((3,), -value)} if main else {},
        launch=Launch(rank=0 if main else 1, world=2),
    )


def make_saver(folder: Path, keep: int = 1) -> Saver:
    return Saver(folder, keep, {"revision": "abc"})


def names(folder: Path) -> list[str]:
    """All that lies there, hidden or not."""
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def read(folder: Path) -> checkpoint.Checkpoint:
    """What is there, whosever it is."""
    found = read_checkpoint(folder, {})
    assert found is not None
    return found


def breaking(monkeypatch, error: BaseException, calls: set[int]) -> None:
    """Let some of the writings of tensors break, in their middle."""
    real, count = checkpoint.save_tensors, iter(range(10**6))

    def save(tensors, path, metadata=None):
        if next(count) in calls:
            path.write_bytes(b"torn")
            raise error
        real(tensors, path, metadata)

    monkeypatch.setattr(checkpoint, "save_tensors", save)


def test_what_is_saved_is_read_back(tmp_path):
    saver, state = make_saver(tmp_path), Progress(step=7, total=9, best_tau=1.25, best_step=4, seconds=0.5)
    saver.save(spread_head(2.0), state)
    saver.wait()
    found = read(tmp_path)
    assert found.progress == state
    assert found.weights["w"].tolist() == [2.0] * 3
    assert found.moments["exp_avg:w"].tolist() == [-2.0] * 3
    assert json.loads((tmp_path / "step-0000007" / "provenance.json").read_text(encoding="utf-8")) == {
        "revision": "abc"
    }
    saver.close()


def test_without_a_checkpoint_there_is_none(tmp_path):
    assert read_checkpoint(tmp_path, {}) is None
    assert read_checkpoint(tmp_path / "nothing", {}) is None


@pytest.mark.parametrize("call", [0, 1])
def test_a_crash_in_the_middle_leaves_no_checkpoint(tmp_path, monkeypatch, call):
    """Neither a whole-looking one nor scratch; the one of before is still there, and is the last."""
    saver = make_saver(tmp_path)
    saver.save(spread_head(1.0), Progress(step=1))
    saver.wait()
    with monkeypatch.context() as patch:
        breaking(patch, RuntimeError("crash"), {call})
        saver.save(spread_head(2.0), Progress(step=2))
        with pytest.raises(RuntimeError, match="crash"):
            saver.wait()
    assert names(tmp_path) == ["last", "step-0000001"]
    assert (tmp_path / "last").resolve().name == "step-0000001"
    assert read(tmp_path).weights["w"].tolist() == [1.0] * 3
    saver.close()


def test_what_a_killed_run_was_writing_is_swept(tmp_path):
    for name in (".step-0000003.tmp", ".step-0000005.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"torn")
    assert read_checkpoint(tmp_path, {}) is None, "scratch is no checkpoint"
    saver = make_saver(tmp_path)
    saver.save(spread_head(), Progress(step=5))
    saver.wait()
    assert names(tmp_path) == ["last", "step-0000005"]
    saver.close()


@pytest.mark.parametrize("keep", [1, 2, 3, 9])
def test_the_newest_are_kept_and_last_points_to_the_newest(tmp_path, keep):
    saver, steps = make_saver(tmp_path, keep), [2, 3, 10, 99, 100, 1000]
    for count, step in enumerate(steps, 1):
        saver.save(spread_head(float(step)), Progress(step=step))
        saver.wait()
        kept = [f"step-{number:07d}" for number in steps[:count][-keep:]]
        assert names(tmp_path) == ["last", *kept]
        assert (tmp_path / "last").resolve().name == kept[-1]
        assert read(tmp_path).progress.step == step
    saver.close()


def test_keeping_fewer_than_there_are(tmp_path):
    saver = make_saver(tmp_path, 5)
    for step in range(1, 6):
        saver.save(spread_head(), Progress(step=step))
    saver.wait()
    saver.close()
    saver = make_saver(tmp_path, 2)
    saver.save(spread_head(), Progress(step=6))
    saver.wait()
    assert names(tmp_path) == ["last", "step-0000005", "step-0000006"]
    saver.close()


def test_last_goes_with_its_directory(tmp_path):
    """It names its neighbour, not a place."""
    saver = make_saver(tmp_path / "old")
    saver.save(spread_head(3.0), Progress(step=3))
    saver.wait()
    (tmp_path / "old").rename(tmp_path / "new")
    assert load_file(tmp_path / "new" / "last" / "model.safetensors")["w"].tolist() == [3.0] * 3
    saver.close()


def test_file_systems_without_links_do_without(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    saver = make_saver(tmp_path)
    saver.save(spread_head(), Progress(step=4))
    saver.wait()
    assert names(tmp_path) == ["step-0000004"]
    saver.close()


def test_the_same_step_can_be_saved_again(tmp_path):
    saver = make_saver(tmp_path)
    for value in (1.0, 2.0):
        saver.save(spread_head(value), Progress(step=4))
    saver.wait()
    assert names(tmp_path) == ["last", "step-0000004"]
    assert read(tmp_path).weights["w"].tolist() == [2.0] * 3
    saver.close()


def test_the_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """What is written is what was there when it was asked for."""
    go, real = threading.Event(), checkpoint.save_tensors

    def late(*args, **options):
        assert go.wait(30)
        real(*args, **options)

    monkeypatch.setattr(checkpoint, "save_tensors", late)
    linear = torch.nn.Linear(2, 2, bias=False)
    linear.rate_of = lambda name: 1.0  # all that is asked of a head here
    strategy = Strategy(linear, TrainConfig(ema=0.5), Launch())
    linear.weight.sum().backward()
    strategy.advance()
    before = strategy.weights() | strategy.moments()
    saver, state = make_saver(tmp_path), Progress(step=1, total=9)
    saver.save(strategy, state)  # returns at once: the writer waits
    assert not list(tmp_path.glob("step-*"))
    state.step = 2
    for _ in range(3):
        linear.weight.sum().backward()
        strategy.advance()
    go.set()
    saver.wait()
    found = read(tmp_path)
    assert found.progress.step == 1
    assert (found.weights | found.moments).keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in (found.weights | found.moments).items())
    assert not torch.equal(strategy.weights()["weight"], before["weight"])
    saver.close()


def test_only_the_main_rank_writes(tmp_path):
    saver = make_saver(tmp_path / "folder")
    saver.save(spread_head(main=False), Progress(step=1))
    saver.wait()
    saver.close()
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("how", ["save", "wait"])
def test_an_error_of_the_writer_is_raised_by_the_next_call(tmp_path, monkeypatch, how):
    saver = make_saver(tmp_path)
    breaking(monkeypatch, ValueError("broken"), {1})
    saver.save(spread_head(), Progress(step=1))  # breaks behind our back
    with pytest.raises(ValueError, match="broken"):
        saver.wait() if how == "wait" else saver.save(spread_head(), Progress(step=2))
    assert names(tmp_path) == []
    saver.close()


def test_an_error_of_the_last_checkpoint_ends_the_run(make_run, monkeypatch):
    """The training is over when it happens; it must not look well."""
    run = make_run(saves=1)
    breaking(monkeypatch, ValueError("broken"), {1})
    with pytest.raises(ValueError, match="broken"):
        train(run)
    assert not (run.directory / "training.json").exists()
    assert names(run.directory / "checkpoints") == []


def test_a_full_disk_is_a_clean_end_and_the_run_continues(make_run, monkeypatch, capsys):
    run, straight = make_run(), make_run()
    with monkeypatch.context() as patch:
        breaking(patch, OSError(errno.ENOSPC, "No space left on device"), {5})
        with pytest.raises(SystemExit) as caught, clean_exit():
            train(run)
    assert caught.value.code == 28
    said = capsys.readouterr()
    assert "the disk is full" in said.err
    assert "Traceback" not in said.err + said.out
    [left] = (run.directory / "checkpoints").glob("step-*")
    assert read_progress(left)["step"] < read_progress(left)["total"]
    train(run)
    train(straight)
    for file in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (load_file(the_checkpoint(one) / file) for one in (run, straight))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def the_checkpoint(run) -> Path:
    """The only one of a run."""
    [found] = (run.directory / "checkpoints").glob("step-*")
    return found


def read_progress(folder: Path) -> dict:
    return json.loads((folder / "progress.json").read_text(encoding="utf-8"))


# Reading


def spoil(folder: Path, how: str) -> None:
    """Break a checkpoint."""
    described, model = folder / "progress.json", folder / "model.safetensors"
    if how == "torn JSON":
        described.write_text(described.read_text(encoding="utf-8")[:40], encoding="utf-8")
    elif how == "no JSON":
        described.write_bytes(b"\xff\xfe\x00")
    elif how == "a list":
        described.write_text("[1, 2]", encoding="utf-8")
    elif how == "unknown key":
        described.write_text(json.dumps(read_progress(folder) | {"mood": 1}), encoding="utf-8")
    elif how == "torn weights":
        model.write_bytes(model.read_bytes()[:50])
    elif how == "empty weights":
        model.write_bytes(b"")
    elif how == "torn moments":
        (folder / "optimizer.safetensors").write_bytes(b"torn")
    else:
        (folder / how).unlink()


@pytest.mark.parametrize(
    "how",
    [
        "torn JSON",
        "no JSON",
        "a list",
        "unknown key",
        "torn weights",
        "empty weights",
        "torn moments",
        "progress.json",
        "model.safetensors",
        "optimizer.safetensors",
    ],
)
def test_a_broken_checkpoint_is_named(tmp_path, how):
    saver = make_saver(tmp_path)
    saver.save(spread_head(), Progress(step=12))
    saver.wait()
    saver.close()
    spoil(tmp_path / "step-0000012", how)
    with pytest.raises(UserError, match=r"cannot be read .*remove it to train anew") as caught:
        read_checkpoint(tmp_path, {})
    assert str(caught.value).startswith(f"{tmp_path / 'step-0000012'}: ")
    assert "\n" not in str(caught.value)


def test_the_newest_checkpoint_is_read(tmp_path):
    saver = make_saver(tmp_path, 3)
    for step in (9, 10, 11):
        saver.save(spread_head(float(step)), Progress(step=step))
    saver.wait()
    saver.close()
    assert read(tmp_path).weights["w"].tolist() == [11.0] * 3


# What changed

LEAVES = st.one_of(st.integers(-3, 3), st.sampled_from(["a", "b", ""]), st.lists(st.integers(0, 2), max_size=2))
KEYS = st.sampled_from(["lr", "train", "head", "steps", "weight decay"])
TREES = st.recursive(
    st.dictionaries(KEYS, LEAVES, max_size=4),
    lambda inner: st.dictionaries(KEYS, inner | LEAVES, max_size=4),
    max_leaves=12,
)


def changed_to(tree: dict, changes: dict) -> dict:
    """A tree with the changes made: a value of None takes a key away."""
    tree = json.loads(json.dumps(tree))
    for key, (_, now) in changes.items():
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            node = node[parent]
        if now is None:
            del node[last]
        else:
            node[last] = now
    return tree


@given(TREES, TREES)
@settings(max_examples=300, deadline=None)
def test_differences_are_what_makes_one_of_the_other(before, now):
    """And nothing else: equals have none, each pair differs, and the other way round they are the same."""
    found = differences(before, now)
    assert changed_to(before, found) == now
    assert differences(now, before) == {key: (b, a) for key, (a, b) in found.items()}
    assert all(a != b for a, b in found.values())
    assert (found == {}) == (before == now)
    assert differences(before, json.loads(json.dumps(before))) == {}


def test_differences_by_hand():
    before = {"train": {"lr": 1, "lr_scale": {"lm_head": 0.5}, "gone": 2}, "seed": 0, "same": [1]}
    now = {"train": {"lr": 2, "lr_scale": {"*norm*": 2.0}}, "seed": {"a": 1}, "same": [1], "new": "x"}
    assert differences(before, now) == {
        "train.lr": (1, 2),
        "train.lr_scale.lm_head": (0.5, None),
        "train.lr_scale.*norm*": (None, 2.0),
        "train.gone": (2, None),
        "seed": (0, {"a": 1}),
        "new": (None, "x"),
    }


@given(st.integers(0, 40))
@settings(max_examples=40, deadline=None)
def test_changes_are_shown_one_a_line_and_not_without_end(count):
    changed = {f"train.key{i}": (i, f"{i}") for i in range(count)}
    lines = show(changed)
    assert lines[:12] == [f"  train.key{i}: was {i}, now '{i}'" for i in range(min(count, 12))]
    assert lines[12:] == ([f"  … and {count - 12} more"] if count > 12 else [])


def test_only_another_number_of_batches_is_told_how_to_mend(tmp_path):
    before = {"seed": 0, "batches per step": 8, "train": {"lr": 1.0}}
    with pytest.raises(UserError) as caught:
        refuse_other(before, before | {"batches per step": 4}, tmp_path / "checkpoints" / "step-0000001")
    said = str(caught.value)
    for words in ("batches per step: was 8, now 4", "train.accumulate times the number of processes", "is 8 again"):
        assert words in said
    assert f"Remove {tmp_path / 'checkpoints'} to train anew" in said
    with pytest.raises(UserError) as caught:
        refuse_other(before, before | {"batches per step": 4, "seed": 1}, tmp_path / "step-0000001")
    assert "seed: was 0, now 1" in str(caught.value)
    assert "train.accumulate" not in str(caught.value)
    refuse_other(before, dict(before), tmp_path)


def test_a_run_with_another_accumulation_is_told_how_to_go_on(make_run):
    """A launch of fewer processes, or another train.accumulate: nothing else was changed by the user."""
    run = make_run(accumulate=2, epochs=1)
    train(run)
    with pytest.raises(UserError, match="batches per step: was 2, now 1") as caught:
        train(make_run(run.directory.parent, accumulate=1, epochs=1))
    assert "train.accumulate" in str(caught.value)


@pytest.mark.parametrize("kind", kinds())
def test_what_a_checkpoint_must_share_survives_json(kind):
    """Else no run of this kind could be continued: a tuple would come back as a list."""
    identity = asdict(build(get_head(kind).Config, {"kind": kind}, "test"))
    assert differences(json.loads(json.dumps(identity)), identity) == {}


def test_what_does_not_matter_may_change_and_is_shown(make_run, monkeypatch, capsys):
    """The run goes on to the same bits; the next checkpoint has the config of now."""
    run, straight = make_run(), make_run()
    train(straight)
    with monkeypatch.context() as patch:
        crash_at(patch, 8)
        with pytest.raises(Interrupted):
            train(run)
    capsys.readouterr()
    changed = make_run(run.directory.parent, saves=2, keep=3, log_every=2, patience=50)
    train(changed)
    said = capsys.readouterr().out
    assert said.count("changed since the checkpoint (the weights do not depend on it)") == 1
    shown = {line.strip() for line in said.splitlines() if ": was " in line}
    assert shown == {
        "train.saves: was 6, now 2",
        "train.keep: was 1, now 3",
        "train.log_every: was 1, now 2",
        "train.patience: was None, now 50",
    }
    newest = sorted((changed.directory / "checkpoints").glob("step-*"))[-1]
    ours, theirs = load_file(newest / "model.safetensors"), load_file(the_checkpoint(straight) / "model.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert read_progress(newest)["config"]["train"]["saves"] == 2
    train(changed)
    assert "changed since" not in capsys.readouterr().out


# Measuring


@pytest.fixture(scope="module")
def measured(model_dir, chats, harvested, tmp_path_factory):
    """A trained head, its target and its held-out documents."""
    runs = tmp_path_factory.mktemp("measured") / "runs"
    shutil.copytree(harvested, runs)
    run = tiny_run(model_dir, chats, runs, train=TRAIN | {"epochs": 6, "lr": 1e-2})
    train(run)
    target = Target.load(run.target, TAPS)
    head = load_head(run.directory / "head", target)
    return run, target, head, FeatureReader(store_path(run, "held-out"))


class Part(Launch):
    """One of several ranks, each of which notes what it would have sent; or is told what the sum was."""

    def sum(self, value: Tensor) -> Tensor:
        sent, given = vars(self).setdefault("sent", []), vars(self).get("given")
        sent.append(value.clone())
        return value.clone() if given is None else given[len(sent) - 1]


def measure_on(measured, launch: Launch, budget: int = 100, decode: DecodeConfig | None = None) -> Measure:
    """What a training measures with."""
    _, target, head, reader = measured
    decode = decode or DecodeConfig(prompts=5, max_new_tokens=8)
    return Measure(Strategy(head, TrainConfig(), launch), target, reader, 3, budget, decode)


def split(measured, world: int, decoded: bool = False) -> list[dict[str, float]]:
    """What each of several ranks says when counts are summed over all."""
    asked = []
    for rank in range(world):
        launch = Part(rank=rank, world=world)
        measure_on(measured, launch)(decoded)
        asked.append(vars(launch)["sent"])
    sums = [sum(parts) for parts in zip(*asked)]
    found = []
    for rank in range(world):
        launch = Part(rank=rank, world=world)
        vars(launch)["given"] = sums
        found.append(measure_on(measured, launch)(decoded))
    return found


def test_rollout_is_that_of_the_evaluation(measured):
    _, target, head, reader = measured
    found = measure_on(measured, Launch())(False)
    cycles = rollout_tau(head.eval(), target, reader, 3, 100)
    assert found["tau"] == cycles.acceptance_length
    assert [found[f"accepted_{k}"] for k in (1, 2, 3)] == cycles.joint(3)
    assert found["tau"] > 1.05
    assert "tau_decoded" not in found


@pytest.mark.parametrize("world", [2, 3, 40])
def test_ranks_together_measure_what_one_does(measured, world):
    """The same numbers on each; also where there are more ranks than batches."""
    alone = measure_on(measured, Launch())(False)
    assert all(found == alone for found in split(measured, world))


def test_ranks_together_decode_what_one_does(measured):
    alone = measure_on(measured, Launch())(True)
    assert alone["decoded_prompts"] == 5
    assert all(found == alone for found in split(measured, 2, decoded=True))


def test_decoding_is_the_decoders(measured):
    """Chains of the same depth, greedy, over the first held-out prompts."""
    _, target, head, reader = measured
    found = measure_on(measured, Launch())(True)
    prompts = [prompt.ids for prompt in held_out_prompts(reader, 5)]
    texts = generate(target, head.eval(), prompts, Settings(TreeShape.chain(3), 8, batch=1)).generations
    emitted, cycles = sum(sum(text.emitted) for text in texts), sum(len(text.emitted) for text in texts)
    assert found["tau_decoded"] == pytest.approx(emitted / cycles, rel=1e-12)
    assert found["decoded_prompts"] == len(texts) == 5


def test_no_prompt_is_begun_after_the_time_is_up(measured):
    """The first few are decoded in any case."""
    found = measure_on(measured, Launch(), decode=DecodeConfig(prompts=9, max_new_tokens=4, seconds=1e-9))(True)
    assert found["decoded_prompts"] == 4


def test_measuring_leaves_the_head_in_training(measured):
    _, _, head, _ = measured
    head.train()
    before = {name: value.clone() for name, value in head.state_dict().items()}
    measure_on(measured, Launch())(True)
    assert head.training
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())


def test_proxy_by_hand():
    assert proxy([]) == 1.0
    assert proxy([0.5]) == 1.5
    assert proxy([0.5, 0.4, 0.1]) == pytest.approx(1 + 0.5 + 0.5 * 0.4 + 0.5 * 0.4 * 0.1)
    assert proxy([1.0] * 5) == 6.0
    assert proxy([0.0, 1.0, 1.0]) == 1.0


def test_proxy_of_a_head_is_that_of_its_shares_of_right_guesses(measured):
    """Counted anew, row by row."""
    _, target, head, reader = measured
    head.eval()
    right, asked = np.zeros(3), np.zeros(3)
    for number in range(len(reader)):
        document = reader[number]
        with torch.inference_mode():
            agreed = head.agreement(pack([document]), target, 3)
        mask = document.mask_T.tolist()
        for row in range(len(mask)):
            for step in range(3):
                if row + 2 + step < len(mask) and all(mask[row + 1 : row + 3 + step]):
                    asked[step] += 1
                    right[step] += bool(agreed[row, step])
    found = measure_on(measured, Launch())(False)
    assert found["tau_proxy"] == pytest.approx(proxy((right / asked).tolist()))
    assert right[0] > 0


NUMBERS = st.one_of(st.integers(0, 4).map(float), st.floats(-1e3, 1e3))


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=2, max_size=30))
@settings(max_examples=200, deadline=None)
def test_rank_correlation_is_spearmans(pairs):
    left, right = zip(*pairs)
    found = rank_correlation(left, right)
    if len(set(left)) == 1 or len(set(right)) == 1:
        assert math.isnan(found)
    else:
        assert found == pytest.approx(scipy.stats.spearmanr(left, right).statistic, abs=1e-9)


# When it is measured, and when it ends


def due_steps(config: TrainConfig, total: int) -> tuple[list[int], list[int]]:
    """The steps at which a run measures, and at which it decodes beside it."""
    states = [Progress(step=step, total=total) for step in range(1, total + 1)]
    measured = [state for state in states if measures_due(config, state)]
    return [state.step for state in measured], [state.step for state in measured if decodes_due(config, state)]


EVERY = st.one_of(st.none(), st.integers(1, 60))


@given(st.integers(1, 300), st.integers(1, 12), EVERY)
@settings(max_examples=200, deadline=None)
def test_a_run_measures_evenly_and_at_its_end(total, evals, every):
    config = TrainConfig(evals=evals, eval_every=every)
    measured, _ = due_steps(config, total)
    gap = every or max(1, total // evals)
    assert measured[-1] == total
    assert all(step % gap == 0 for step in measured[:-1])
    assert all(b - a == gap for a, b in itertools.pairwise(measured[:-1]))
    if len(measured) > 1:
        assert gap / 2 < measured[-1] - measured[-2] <= 1.5 * gap  # not shortly before the end
    if every is None:
        assert len(measured) >= min(evals, total)


def decodings_hold(total: int, evals: int, every: int | None, wanted: int) -> None:
    """As many decodings as are wanted, or as there are measurements; the last at the end."""
    config = TrainConfig(evals=evals, eval_every=every, decode=DecodeConfig(evals=wanted))
    measured, decoded = due_steps(config, total)
    assert len(decoded) == min(wanted, len(measured)), (measured, decoded)
    assert decoded[-1:] == ([total] if wanted else [])


def has_a_tail(total: int, evals: int, every: int | None) -> bool:
    """Whether the run is measured once more at its end, after a measurement that did not come shortly before it."""
    gap = every or max(1, total // evals)
    return total % gap > gap // 2 and total > gap


@given(st.integers(1, 300), st.integers(1, 12), EVERY, st.integers(0, 14))
@settings(max_examples=300, deadline=None)
def test_a_run_decodes_as_often_as_is_asked(total, evals, every, wanted):
    assume(not has_a_tail(total, evals, every))
    decodings_hold(total, evals, every, wanted)


@pytest.mark.parametrize(("total", "evals", "every", "wanted"), [(23, 6, None, 2), (23, 6, None, 7), (8, 6, 5, 1)])
def test_a_run_with_a_tail_decodes_as_often_as_is_asked(total, evals, every, wanted):
    """23 steps, measured every third: at 21 and at the end."""
    assert has_a_tail(total, evals, every)
    decodings_hold(total, evals, every, wanted)


def measured_steps(run) -> list[int]:
    return [record["step"] for record in read_metrics(run.directory / "metrics.jsonl") if "tau" in record]


PATIENT = {"epochs": 4, "evals": 12, "lr": 1e-12, "saves": 1}


def test_patience_ends_a_run_and_more_of_it_continues(make_run, capsys):
    """Without any progress: the first measurement is the best, and two more are enough."""
    run = make_run(**PATIENT, patience=2)
    train(run)
    said = capsys.readouterr().out
    assert "ended early: τ was not better in 2 measurements (train.patience)" in said
    steps = measured_steps(run)
    told = json.loads((run.directory / "training.json").read_text(encoding="utf-8"))
    assert len(steps) == 3
    assert told["step"] == steps[-1] < told["total"]
    assert told["best_step"] == steps[0]
    assert the_checkpoint(run).name == f"step-{steps[-1]:07d}"
    more = make_run(run.directory.parent, **PATIENT, patience=4)
    train(more)
    assert "train.patience: was 2, now 4" in capsys.readouterr().out
    assert len(measured_steps(more)) == 5
    train(make_run(run.directory.parent, **PATIENT))
    assert measured_steps(more)[-1] == told["total"]
    assert the_checkpoint(run).name == f"step-{told['total']:07d}"


def test_a_run_that_has_ended_early_is_over(make_run):
    """The same command again does nothing more."""
    run = make_run(**PATIENT, patience=2)
    train(run)
    steps, before = measured_steps(run), the_checkpoint(run)
    head = (run.directory / "head" / "model.safetensors").read_bytes()
    train(run)
    assert measured_steps(run) == steps
    assert the_checkpoint(run) == before
    assert (run.directory / "head" / "model.safetensors").read_bytes() == head


def test_patience_never_ends_a_run_at_its_end():
    """The last step is its end in any case."""
    config = TrainConfig(patience=1)
    assert loop.patience_ending(config, Progress(step=9, total=10, since_best=1)) == "early"
    assert loop.patience_ending(config, Progress(step=10, total=10, since_best=1)) == ""
    assert loop.patience_ending(config, Progress(step=9, total=10, since_best=0)) == ""
    assert loop.patience_ending(TrainConfig(), Progress(step=9, total=10, since_best=99)) == ""


def test_weights_that_do_not_fit_are_not_read_as_pickle(tmp_path):
    """A checkpoint is tensors and JSON; a file of another kind is refused before anything runs."""
    saver = make_saver(tmp_path)
    saver.save(spread_head(), Progress(step=1))
    saver.wait()
    saver.close()
    torch.save({"w": torch.zeros(3)}, tmp_path / "step-0000001" / "model.safetensors")
    with pytest.raises(UserError, match="cannot be read"):
        read_checkpoint(tmp_path, {})
    save_file({"w": torch.zeros(3)}, tmp_path / "step-0000001" / "model.safetensors")
    assert read(tmp_path).weights["w"].tolist() == [0.0] * 3
