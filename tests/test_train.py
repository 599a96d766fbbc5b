"""Training: learns, saves, and a run that was stopped in any way ends in the same bits as one that was not."""

import copy
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import TAPS, Interrupted, crash_at, make_model, make_tiny_head, make_tokenizer, tiny_run
from safetensors.torch import load_file

from headwright.configs import UserError, dump
from headwright.configs.schema import TrainConfig
from headwright.data.batch import pack
from headwright.data.harvest import harvest, store_path
from headwright.data.store import FeatureReader
from headwright.data.stream import FeatureStream
from headwright.data.target import Target
from headwright.eval.decode import speculate
from headwright.eval.rollout_tau import rollout_tau
from headwright.heads.draft_tree import TreeShape
from headwright.heads.saved import load_head
from headwright.train import loop
from headwright.train.launch import Launch
from headwright.train.loop import one_step
from headwright.train.optim import learning_rate, make_optimizers, set_learning_rate
from headwright.train.run import train
from headwright.train.strategy import Strategy
from headwright.train.track import Meter, Tracker, read_metrics

TRAIN = {"epochs": 3, "tokens_per_batch": 256, "lr": 3e-3, "log_every": 1, "evals": 3, "saves": 6}


@pytest.fixture(autouse=True)
def same_config(request):
    """The shared run's config.yaml, as it was before a test that was refused."""
    straight = request.getfixturevalue("straight") if "straight" in request.fixturenames else None
    before = (straight.directory / "config.yaml").read_text(encoding="utf-8") if straight else ""
    yield
    if straight:
        (straight.directory / "config.yaml").write_text(before, encoding="utf-8")


@pytest.fixture(scope="module")
def straight(model_dir, chats, harvested, tmp_path_factory):
    """A run that was never stopped."""
    runs = tmp_path_factory.mktemp("straight") / "runs"
    shutil.copytree(harvested, runs)
    run = tiny_run(model_dir, chats, runs, train=TRAIN)
    train(run)
    return run


def last_checkpoint(run) -> Path:
    [folder] = (run.directory / "checkpoints").glob("step-*")
    return folder


def assert_same_bits(left, right) -> None:
    """Weights, optimizer and the kept head of two runs."""
    pairs = [
        (last_checkpoint(left) / "model.safetensors", last_checkpoint(right) / "model.safetensors"),
        (last_checkpoint(left) / "optimizer.safetensors", last_checkpoint(right) / "optimizer.safetensors"),
        (left.directory / "head" / "model.safetensors", right.directory / "head" / "model.safetensors"),
    ]
    for a, b in pairs:
        ours, theirs = load_file(a), load_file(b)
        assert ours.keys() == theirs.keys()
        assert ours
        for name in ours:
            assert torch.equal(ours[name], theirs[name]), f"{a.name}: {name}"
    a, b = (json.loads((last_checkpoint(run) / "progress.json").read_text()) for run in (left, right))
    for progress in (a, b):  # the clock, and the directories' names
        for key in ("seconds", "cpu_seconds", "seconds_measuring", "seconds_saving", "config"):
            del progress[key]
    assert a == b


def curve(run) -> list[dict]:
    """metrics.jsonl without what depends on the clock or the machine."""
    clock = {"tokens_per_second", "data_wait", "memory_gib", "measure_seconds"}
    return [{k: v for k, v in r.items() if k not in clock} for r in read_metrics(run.directory / "metrics.jsonl")]


def test_training_learns_and_leaves_what_it_promises(straight):
    records = read_metrics(straight.directory / "metrics.jsonl")
    losses = [r["loss_0"] for r in records if "loss_0" in r]
    taus = [r["tau"] for r in records if "tau" in r]
    progress = json.loads((straight.directory / "training.json").read_text())
    assert len(losses) == progress["total"] == progress["step"]
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    assert len(taus) >= TRAIN["evals"]
    assert progress["best_tau"] == max(taus)
    assert last_checkpoint(straight).name == f"step-{progress['total']:07d}"
    assert (straight.directory / "config.yaml").is_file()
    links = {name: (straight.directory / "checkpoints" / name).resolve() for name in ("last", "best")}
    assert links == {"last": last_checkpoint(straight).resolve(), "best": (straight.directory / "head").resolve()}
    assert {p.name for p in (straight.directory / "head").iterdir()} == {
        "head.json",
        "model.safetensors",
        "provenance.json",
    }
    assert {p.name for p in last_checkpoint(straight).iterdir()} == {
        "model.safetensors",
        "optimizer.safetensors",
        "progress.json",
        "provenance.json",
    }


def test_kept_head_is_the_one_with_the_best_tau(straight):
    """Loaded from its files, it measures what the training wrote down."""
    reader = FeatureReader(store_path(straight, "held-out"))
    target = Target.load(straight.target, TAPS)
    head = load_head(straight.directory / "head", target).eval()
    tau = rollout_tau(head, target, reader, 3, TRAIN["tokens_per_batch"]).acceptance_length
    assert tau == json.loads((straight.directory / "training.json").read_text())["best_tau"]


def test_loaded_head_drafts_the_same(straight):
    """Two loads, and the weights of the file itself, decode alike."""
    target = Target.load(straight.target, TAPS)
    heads = [load_head(straight.directory / "head", target).eval() for _ in range(2)]
    saved = load_file(straight.directory / "head" / "model.safetensors")
    assert torch.equal(saved.pop("vocab.ids"), heads[0].vocab.ids_W)
    assert len(heads[0].vocab) == 24
    assert saved.keys() == heads[0].state_dict().keys()
    assert all(torch.equal(value, saved[name]) for name, value in heads[0].state_dict().items())
    shape = TreeShape("dynamic", 3, 2, 6)
    a, b = (speculate(target, head, [65, 66, 67], shape, 20) for head in heads)
    assert (a.tokens, a.accepted) == (b.tokens, b.accepted)


def test_two_runs_are_the_same_bits(make_run, straight):
    again = make_run()
    train(again)
    assert_same_bits(again, straight)
    assert curve(again) == curve(straight)


def test_training_a_finished_run_again_changes_nothing(make_run, straight):
    run = make_run(straight.directory.parent)
    before = {p: p.read_bytes() for p in (run.directory / "head").iterdir()}
    train(run)
    assert before == {p: p.read_bytes() for p in (run.directory / "head").iterdir()}
    assert_same_bits(run, straight)


@pytest.fixture(autouse=True)
def handlers():
    """Signal handlers of this process, as they were."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("step", [1, 11])
def test_crashed_and_resumed_equals_straight(monkeypatch, make_run, straight, step):
    """Before the first checkpoint, and between two of them."""
    run = make_run()
    with monkeypatch.context() as patch:
        crash_at(patch, step)
        with pytest.raises(Interrupted):
            train(run)
    assert bool(list((run.directory / "checkpoints").glob("step-*"))) == (step == 11)
    train(run)
    assert_same_bits(run, straight)


def test_metrics_of_a_resumed_run_are_those_of_a_straight_one(monkeypatch, make_run, straight):
    """No step stands twice in metrics.jsonl, and none is missing."""
    run = make_run()
    with monkeypatch.context() as patch:
        crash_at(patch, 11)
        with pytest.raises(Interrupted):
            train(run)
    train(run)
    assert curve(run) == curve(straight)


def test_a_crash_gives_the_signal_handlers_back(monkeypatch, make_run, handlers):
    """Otherwise Ctrl-C does nothing in the program that called the training."""
    with monkeypatch.context() as patch:
        crash_at(patch, 1)
        with pytest.raises(Interrupted):
            train(make_run())
    assert {number: signal.getsignal(number) for number in handlers} == handlers


def test_signal_stops_after_the_step_and_the_run_continues(monkeypatch, make_run, straight):
    """The step at hand is finished and saved; the second half of the run is that of a straight one."""
    run, real, count = make_run(), loop.one_step, iter(range(10**6))

    def signalling(*args):
        if next(count) == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "one_step", signalling)
        train(run)
    assert signal.getsignal(signal.SIGINT) == before
    assert last_checkpoint(run).name == "step-0000008"
    train(run)
    assert_same_bits(run, straight)
    assert curve(run) == curve(straight)


def write_config(run) -> Path:
    path = run.directory.parent / "run.yaml"
    path.write_text(dump(run), encoding="utf-8")
    return path


def start(config: Path, *arguments: str, launch: tuple[str, ...] = (), **environment: str) -> subprocess.Popen:
    """The training as a user starts it."""
    command = [
        sys.executable,
        *(launch or ("-m", "headwright.train.cli", "train")),
        "--config",
        str(config),
        *arguments,
    ]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )


def wait_for_checkpoint(run, process: subprocess.Popen) -> None:
    """Until the first checkpoint is there."""
    limit = time.monotonic() + 120
    while not list((run.directory / "checkpoints").glob("step-*")):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < limit
        time.sleep(0.002)


LONG = {"epochs": 24, "saves": 40, "evals": 2, "log_every": 20}


@pytest.fixture(scope="module")
def long_straight(model_dir, chats, harvested, tmp_path_factory):
    """A run that is long enough to be killed in its middle; never stopped."""
    runs = tmp_path_factory.mktemp("long") / "runs"
    shutil.copytree(harvested, runs)
    run = tiny_run(model_dir, chats, runs, train=TRAIN | LONG)
    train(run)
    return run


def test_killed_process_resumes_to_the_same_bits(make_run, long_straight):
    run = make_run(**LONG)
    process = start(write_config(run))
    wait_for_checkpoint(run, process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    total = json.loads((long_straight.directory / "training.json").read_text())["total"]
    assert not (run.directory / "training.json").exists(), "it was killed before its end"
    train(run)
    assert_same_bits(run, long_straight)
    assert last_checkpoint(run).name == f"step-{total:07d}"


def test_ctrl_c_exits_0_and_the_same_command_continues(make_run, long_straight):
    run = make_run(**LONG)
    process = start(write_config(run))
    wait_for_checkpoint(run, process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "a checkpoint is written. To continue:" in output
    assert "train --config" in output
    assert "Traceback" not in output
    progress = json.loads((last_checkpoint(run) / "progress.json").read_text())
    assert 0 < progress["step"] < progress["total"]
    train(run)
    assert_same_bits(run, long_straight)


@pytest.mark.parametrize(
    ("section", "key", "value", "shown"),
    [("train", "lr", 7e-4, ("0.003", "0.0007")), ("head", "steps", 1, ("2", "1")), ("seed", None, 5, ("0", "5"))],
)
def test_another_run_is_refused_and_says_what_changed(make_run, straight, section, key, value, shown):
    run = make_run(straight.directory.parent)
    if key is None:
        setattr(run, section, value)
    else:
        setattr(run, section, replace(getattr(run, section), **{key: value}))
    before = last_checkpoint(straight).stat().st_mtime_ns
    with pytest.raises(UserError, match="what changed") as caught:
        train(run)
    for part in (section, *shown):
        assert part in str(caught.value)
    assert last_checkpoint(straight).stat().st_mtime_ns == before


def test_a_refused_run_leaves_the_config_of_the_one_that_is_there(make_run, straight):
    """config.yaml says how the checkpoint, the metrics and the head beside it were made."""
    run = make_run(straight.directory.parent, lr=7e-4)
    before = (straight.directory / "config.yaml").read_text(encoding="utf-8")
    assert "lr: 0.003" in before
    with pytest.raises(UserError, match="what changed"):
        train(run)
    assert (straight.directory / "config.yaml").read_text(encoding="utf-8") == before


def test_logging_and_saving_more_often_is_no_other_run(make_run, straight):
    run = make_run(straight.directory.parent, saves=2, log_every=3)
    train(run)
    assert_same_bits(run, straight)


def test_features_of_another_target_are_refused(make_run, tmp_path):
    folder = tmp_path / "other-model"
    make_model(seed=9).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    run = make_run()
    run.target = replace(run.target, model=str(folder))
    with pytest.raises(UserError, match=r"harvested from .*, not from .*other-model"):
        train(run)


def test_head_of_another_target_is_refused(straight, tmp_path):
    folder = tmp_path / "other-model"
    make_model(seed=9).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    with pytest.raises(UserError, match="not for"):
        load_head(straight.directory / "head", Target.load(replace(straight.target, model=str(folder)), TAPS))
    with pytest.raises(UserError, match=r"taps \[1, 3, 6\]"):
        load_head(straight.directory / "head", Target.load(straight.target, (0, 3, 6)))


def test_missing_and_broken_heads_are_refused(straight, tmp_path):
    with pytest.raises(UserError, match="train first"):
        load_head(tmp_path / "nothing")
    folder = tmp_path / "head"
    shutil.copytree(straight.directory / "head", folder)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match="cannot be read"):
        load_head(folder)


def test_training_without_features_says_so(model_dir, chats, tmp_path):
    with pytest.raises(UserError, match="run the harvest first"):
        train(tiny_run(model_dir, chats, tmp_path))


def test_training_without_held_out_text_leaves_a_head_or_says_why_not(model_dir, chats, tmp_path):
    """corpus.held_out = 0 is a legal config: a training that ends well must leave something to use."""
    corpus = {"sources": [{"path": str(chats), "limit": 12}], "held_out": 0.0, "max_length": 256}
    run = tiny_run(model_dir, chats, tmp_path, corpus=corpus)
    refused = ""
    try:
        harvest(run)
        train(run)
    except UserError as error:
        refused = str(error)
    assert "held_out" in refused or (run.directory / "head" / "head.json").is_file()


def test_uneven_end_of_an_epoch_under_accumulation(make_run, harvested, model_dir, chats):
    """Where the last step of an epoch has fewer batches, it is filled up without loss, and training goes on."""
    reader = FeatureReader(store_path(tiny_run(model_dir, chats, harvested), "train"))
    stream_batches = len(FeatureStream(reader, 256).epoch_batches(0))
    accumulate = next(n for n in (4, 5, 3, 7) if stream_batches % n)
    run = make_run(accumulate=accumulate, epochs=1)
    train(run)
    losses = [r["loss_0"] for r in read_metrics(run.directory / "metrics.jsonl") if "loss_0" in r]
    assert len(losses) == math.ceil(stream_batches / accumulate)
    assert all(math.isfinite(loss) for loss in losses)


def plain_descent(head, **config) -> Strategy:
    """One process, and w ← w − g."""
    strategy = Strategy(head, TrainConfig(**config), Launch())
    strategy.optimizers = [torch.optim.SGD(head.parameters(), lr=1.0)]
    return strategy


def step_weights(tiny, batches, start):
    """The weights after one optimizer step over `batches`, and the gradient norm before clipping."""
    head = copy.deepcopy(start).train()
    norm, _ = one_step(plain_descent(head, clip=1e9), batches, tiny, Meter())
    return head.state_dict(), float(norm)


def test_one_batch_of_many_documents_equals_many_batches(tiny, straight):
    """The same gradient however the documents are spread over micro-batches, uneven ones and empty ones included."""
    reader = FeatureReader(store_path(straight, "train"))
    documents = [reader[i] for i in range(7)]
    start = make_tiny_head(tiny, steps=3)
    spreads = [
        [pack(documents)],
        [pack(documents[:1]), pack(documents[1:])],
        [pack([document]) for document in documents],
    ]
    results = [step_weights(tiny, spread, start) for spread in spreads]
    for weights, norm in results[1:]:
        assert norm == pytest.approx(results[0][1], rel=1e-4)
        for name, value in weights.items():
            assert torch.allclose(value, results[0][0][name], rtol=1e-4, atol=1e-6), name
    assert not torch.equal(results[0][0]["fc.weight"], start.fc.weight)


def test_a_batch_without_loss_changes_no_step(tiny, straight):
    reader = FeatureReader(store_path(straight, "train"))
    batch = pack([reader[i] for i in range(3)])
    start = make_tiny_head(tiny, steps=2)
    alone, norm = step_weights(tiny, [batch], start)
    filled, same_norm = step_weights(tiny, [batch, batch.without_loss()], start)
    assert norm == same_norm
    for name, value in filled.items():
        assert torch.equal(value, alone[name]), name


def test_gradient_norm_is_clipped(tiny, straight):
    reader = FeatureReader(store_path(straight, "train"))
    head = make_tiny_head(tiny, steps=1).train()
    before = {name: value.clone() for name, value in head.state_dict().items()}
    norm, _ = one_step(plain_descent(head, clip=0.01), [pack([reader[0]])], tiny, Meter())
    moved = math.sqrt(sum(float((value - before[name]).square().sum()) for name, value in head.state_dict().items()))
    assert float(norm) > 0.01
    assert moved == pytest.approx(0.01, rel=1e-3)


# Launched with several processes

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


@pytest.mark.slow
def test_two_processes_equal_one_that_accumulates(make_run):
    """Loss, gradient norm, τ and weights, over an epoch that ends unevenly."""
    one, two = make_run(accumulate=2), make_run(accumulate=1)
    train(one)
    script = str(Path(__file__).resolve().parents[1] / "train" / "eagle3.py")
    process = start(write_config(two), launch=(*TORCHRUN, script), ACCELERATE_USE_CPU="true")
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 0, output
    left, right = curve(one), curve(two)
    assert len(left) == len(right)
    for a, b in zip(left, right):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key] == pytest.approx(b[key], rel=2e-3, abs=1e-5), (key, a["step"])
    for name, value in load_file(last_checkpoint(one) / "model.safetensors").items():
        other = load_file(last_checkpoint(two) / "model.safetensors")[name]
        assert torch.allclose(value, other, rtol=1e-2, atol=1e-3), name


@pytest.mark.slow
def test_processes_that_would_not_share_gradients_are_refused(make_run):
    """Two launched processes that Accelerate does not join must not train two heads."""
    run = make_run()
    process = start(write_config(run), launch=(*TORCHRUN, str(Path(__file__).resolve().parents[1] / "train/eagle3.py")))
    output, _ = process.communicate(timeout=150)
    joined = process.returncode == 0
    assert joined or "no gradients would be shared" in output, output


# Learning rate, files, trackers


def test_learning_rate_rises_then_falls_to_its_floor():
    config, total = TrainConfig(lr=2.0, warmup=0.1, final_lr=0.25), 100
    rates = [learning_rate(config, step, total) for step in range(total + 1)]
    assert rates[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert rates[9] == rates[10] == max(rates) == 2.0
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))
    assert rates[55] == pytest.approx(2.0 * (0.25 + 0.75 * 0.5))
    assert rates[total] == pytest.approx(0.5)
    assert all(rate > 0 for rate in (learning_rate(TrainConfig(warmup=0.0), step, 1) for step in range(2)))


def test_matrices_decay_and_vectors_do_not(tiny):
    head = make_tiny_head(tiny)
    [optimizer] = make_optimizers(head, TrainConfig(weight_decay=0.3, lr=0.5))
    set_learning_rate(optimizer.param_groups, 0.125)
    decay, plain = optimizer.param_groups
    assert {w.ndim for w in decay["params"]} == {2}
    assert {w.ndim for w in plain["params"]} == {1}
    assert (decay["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert decay["lr"] == plain["lr"] == 0.125
    assert len(decay["params"]) + len(plain["params"]) == len(list(head.parameters()))


def test_nothing_in_a_run_directory_is_pickled(straight):
    """Every file is text, or is read by safetensors."""
    files = [path for path in straight.directory.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".safetensors", ".json", ".jsonl", ".yaml", ".lock"}
    for path in files:
        if path.suffix == ".safetensors":
            assert load_file(path)
        else:
            path.read_text(encoding="utf-8")
    assert not list(straight.directory.rglob(".*")), "no scratch file is left"


def test_meter_adds_up_over_batches_and_starts_anew():
    meter = Meter()
    meter.add({"loss_0": (torch.tensor(3.0), torch.tensor(2.0)), "none": (torch.tensor(0.0), torch.tensor(0.0))})
    meter.add({"loss_0": (torch.tensor(5.0), torch.tensor(6.0))})
    assert meter.read(lambda x: 2 * x) == {"loss_0": 1.0}
    assert meter.read(lambda x: x) == {}


def test_torn_last_line_of_metrics_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st', encoding="utf-8")
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]


def test_wandb_offline_writes_its_own_directory(monkeypatch, make_run, tmp_path):
    pytest.importorskip("wandb")
    for name, value in {"WANDB_CACHE_DIR": "c", "WANDB_CONFIG_DIR": "g", "WANDB_DATA_DIR": "d"}.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    run = make_run(epochs=0.3, track={"wandb": "offline"})
    train(run)
    [folder] = (run.directory / "wandb").glob("offline-run-*")
    assert folder.name.endswith(run.name)
    assert list(folder.glob("*.wandb"))


def test_wandb_that_does_not_start_stops_no_training(monkeypatch, make_run, capsys):
    wandb = pytest.importorskip("wandb")

    def broken(**_):
        raise RuntimeError("no network\nsecond line")

    monkeypatch.setattr(wandb, "init", broken)
    monkeypatch.setenv("WANDB_API_KEY", 40 * "0")
    run = make_run(epochs=0.3, track={"wandb": "online"})
    train(run)
    assert (run.directory / "head" / "head.json").is_file()
    assert [line for line in capsys.readouterr().out.splitlines() if "W&B" in line] == ["W&B is off: no network"]


@pytest.mark.parametrize("method", ["log", "finish"])
def test_wandb_that_breaks_later_stops_no_training(monkeypatch, make_run, method):
    """The connection may be lost in the middle of a long run."""
    wandb = pytest.importorskip("wandb")

    class Broken:
        """A run whose `method` fails."""

        def log(self, *_, **__):
            if method == "log":
                raise ConnectionError("lost")

        def finish(self, *_, **__):
            if method == "finish":
                raise ConnectionError("lost")

    monkeypatch.setattr(wandb, "init", lambda **_: Broken())
    run = make_run(epochs=0.3, track={"wandb": "online"})
    tracker = Tracker(run, active=True, since=0)
    tracker.log({"step": 1, "loss_0": 2.0})
    tracker.close()
    assert read_metrics(run.directory / "metrics.jsonl") == [{"step": 1, "loss_0": 2.0}]
