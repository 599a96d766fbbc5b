"""Several processes train the same head as one, whatever shards it; and a run that is killed, stopped, hung or handed to
another launch goes on as if nothing had been.

Two real processes on CPUs, started as a user starts them. This file is also what some of the launches run: `work` below.
"""

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import Interrupted, crash_at, tiny_run
from safetensors.torch import load_file
from test_train import assert_same_bits, curve, last_checkpoint
from torch import Tensor

from headwright.configs import RunConfig, UserError, dump
from headwright.configs.load import load_run
from headwright.configs.schema import TrainConfig
from headwright.data.harvest import store_path
from headwright.data.store import FeatureReader
from headwright.data.stream import FeatureStream
from headwright.train import launch as launching
from headwright.train import loop
from headwright.train import run as stage
from headwright.train.checkpoint import Saver
from headwright.train.launch import Launch
from headwright.train.measure import Measure
from headwright.train.run import train
from headwright.train.strategy import Lesson, Strategy, local
from headwright.train.track import Meter, read_metrics

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "train" / "eagle3.py"
TRAIN = {"epochs": 6, "tokens_per_batch": 256, "lr": 1e-2, "log_every": 1, "evals": 3, "saves": 6}
STEPS = 30
SHORT = {"epochs": 2, "evals": 1, "saves": 1}
ROUNDING = 2e-6  # relative: fp32 sums in another order, over 30 steps. Measured: 2e-7
ROUNDING_OF_MOMENTS = 5e-6  # these are small differences of gradients. Measured: 6e-7
ACCELERATE = str(Path(sys.executable).parent / "accelerate")
LIMIT = 300  # seconds for a launch: DeepSpeed's first one on a machine compiles for a minute
SHARDED = ("fsdp2", "zero1", "zero2", "zero3")
NAMES = {
    "ddp": "DistributedDataParallel: a copy of the head on each of 2 processes",
    "fsdp2": "FSDPLesson (FSDP2): ",
    "zero1": "DeepSpeedEngine with DeepSpeedZeroOptimizer (DeepSpeed ZeRO 1): sharded over 2 processes",
    "zero2": "DeepSpeedEngine with DeepSpeedZeroOptimizer (DeepSpeed ZeRO 2): sharded over 2 processes",
    "zero3": "DeepSpeedEngine with DeepSpeedZeroOptimizer_Stage3 (DeepSpeed ZeRO 3): sharded over 2 processes",
}


# Launching


@dataclass
class Started:
    """A command that runs, and what it has printed."""

    process: subprocess.Popen
    log: Path

    def output(self) -> str:
        """Words with single spaces: lines are broken by the width of a terminal."""
        return " ".join(self.log.read_text(encoding="utf-8").split())

    def wait(self, limit: float = LIMIT) -> int:
        """Its exit code."""
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"not done after {limit} s: {self.output()[-4000:]}")

    def done(self) -> str:
        """Its output, when it has ended well."""
        code = self.wait()
        assert code == 0, self.output()[-6000:]
        return self.output()

    def family(self) -> list[psutil.Process]:
        """It and all that it has started."""
        try:
            top = psutil.Process(self.process.pid)
            return [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def workers(self) -> dict[int, psutil.Process]:
        """By rank."""
        found = {}
        for process in self.family()[1:]:
            with contextlib.suppress(psutil.Error):
                rank = process.environ().get("RANK")
                if rank is not None and not process.children():
                    found[int(rank)] = process
        return found

    def kill(self) -> None:
        """As kill -9 of everything at once."""
        family = self.family()
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(family, timeout=30)
        self.process.wait(30)


STARTED: list[Started] = []


@pytest.fixture(autouse=True)
def nothing_is_left():
    """No test leaves processes behind, however it ends."""
    yield
    while STARTED:
        started = STARTED.pop()
        if started.process.poll() is None:
            started.kill()


def begin(command: list[str], folder: Path, **environment: str) -> Started:
    """A command of the user's, writing to a log in `folder`."""
    log = folder / f"{len(list(folder.glob('*.log')))}.log"
    settled = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "WANDB_MODE": "disabled"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | settled | environment,
            start_new_session=True,
        )
    STARTED.append(Started(process, log))
    return STARTED[-1]


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def launch(
    run: RunConfig, name: str = "ddp", *words: str, script: Path = SCRIPT, precision: str = "no", **environment: str
) -> Started:
    """`accelerate launch` with one of our files, two processes."""
    several = ["--config_file", f"configs/accelerate-{name}.yaml", "--main_process_port", str(free_port())]
    head = [ACCELERATE, "launch", *several, "--mixed_precision", precision, "--num_processes", "2"]
    return begin([*head, *words, str(script), "--config", str(written(run))], run.directory.parent, **environment)


def alone(run: RunConfig, script: Path = SCRIPT, **environment: str) -> Started:
    """One process, without a launcher."""
    return begin([str(script), "--config", str(written(run))], run.directory.parent, **environment)


def written(run: RunConfig) -> Path:
    """Its run file."""
    path = run.directory.parent / "run.yaml"
    path.write_text(dump(run), encoding="utf-8")
    return path


def until(condition: Callable[[], Any], started: Started, limit: float = LIMIT) -> Any:
    """What `condition` gives as soon as it is anything."""
    end = time.monotonic() + limit
    while not (found := condition()):
        assert started.process.poll() is None, started.output()[-4000:]
        assert time.monotonic() < end, started.output()[-4000:]
        time.sleep(0.005)
    return found


def checkpoints(run: RunConfig) -> list[Path]:
    return sorted((run.directory / "checkpoints").glob("step-*"))


def progress(run: RunConfig) -> dict[str, Any]:
    return json.loads((last_checkpoint(run) / "progress.json").read_text(encoding="utf-8"))


def nothing_written(run: RunConfig) -> None:
    """A run that was refused has left no trace."""
    assert not {p.name for p in run.directory.iterdir()} & {"checkpoints", "metrics.jsonl", "head", "provenance.json"}


# Runs


@pytest.fixture(scope="module")
def fresh(model_dir, chats, harvested, tmp_path_factory):
    """New runs over the same features, or over a copy of another run's directory."""

    def make(of: RunConfig | None = None, **changes) -> RunConfig:
        runs = tmp_path_factory.mktemp("scale") / "runs"
        shutil.copytree(of.directory.parent if of else harvested, runs, symlinks=True)
        return tiny_run(model_dir, chats, runs, train=TRAIN | changes)

    return make


@pytest.fixture(scope="module")
def one(fresh) -> RunConfig:
    """One process with two micro-batches a step."""
    run = fresh(accumulate=2)
    train(run)
    return run


@pytest.fixture(scope="module")
def straight(fresh):
    """Two processes, launched once for each file of configs/ and never stopped: the run, and what it printed."""
    made: dict[tuple[str, str], tuple[RunConfig, str]] = {}

    def get(name: str, precision: str = "no") -> tuple[RunConfig, str]:
        if (name, precision) not in made:
            run = fresh()
            made[name, precision] = run, launch(run, name, precision=precision).done()
        return made[name, precision]

    return get


@pytest.fixture(scope="module")
def killed(fresh):
    """Two processes that were killed at a random moment after their first checkpoint. Not to be changed: copy it."""
    made: dict[str, RunConfig] = {}

    def get(name: str) -> RunConfig:
        if name not in made:
            run = fresh(saves=STEPS)
            started = launch(run, name, script=Path(__file__), MOMENT="slow")
            until(lambda: checkpoints(run), started)
            time.sleep(random.uniform(0, 2))
            started.kill()
            assert checkpoints(run), "a checkpoint stays"
            assert not (run.directory / "training.json").exists(), "it was killed before its end"
            made[name] = run
        return made[name]

    return get


def close_curves(left: RunConfig, right: RunConfig, tolerance: float = ROUNDING) -> None:
    """Every metric of every step: losses, gradient norm, learning rate, τ, accepted shares, decoding."""
    ours, theirs = curve(left), curve(right)
    assert [record["step"] for record in ours] == [record["step"] for record in theirs]
    for a, b in zip(ours, theirs):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key] == pytest.approx(b[key], rel=tolerance, abs=1e-9), (key, a["step"])
    wanted = {"loss_0", "loss_1", "grad_norm", "lr", "tau", "accepted_1", "accepted_3", "tau_proxy", "tau_decoded"}
    assert wanted <= {key for record in ours for key in record}


def close_tensors(
    left: RunConfig, right: RunConfig, weights: float = ROUNDING, moments: float = ROUNDING_OF_MOMENTS
) -> None:
    """The last checkpoints: weights and optimizer."""
    for name, tolerance in (("model", weights), ("optimizer", moments)):
        ours, theirs = (load_file(last_checkpoint(run) / f"{name}.safetensors") for run in (left, right))
        assert ours.keys() == theirs.keys()
        assert ours
        for key, value in ours.items():
            other = theirs[key]
            assert (value.shape, value.dtype) == (other.shape, other.dtype), key
            if key.startswith("step:"):
                assert torch.equal(value, other), key
            assert float((value - other).norm()) <= tolerance * float(other.norm()) + 1e-12, key


# What some launches run


def work() -> None:
    """With MOMENT: a training that shows where it is, and lingers there. Else the jobs of a file, one after the other."""
    if "MOMENT" in os.environ:
        linger(os.environ["MOMENT"])
        stage.main(kind="eagle3")
        return
    jobs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for job in jobs:
        seen = Path(job["seen"] + f"-{os.environ['RANK']}.json")
        seen.write_text(json.dumps(worked(job)), encoding="utf-8")
        dist.barrier()


def linger(moment: str) -> None:
    """In every step (slow), in step 7 (step, hang), while a checkpoint is written (save), or while it measures."""

    def mark(seconds: float) -> None:
        Path(os.environ["MARKER"] + os.environ.get("RANK", "0")).touch()
        time.sleep(seconds)

    step, write, measure, count = loop.one_step, Saver.write, Measure.__call__, iter(range(10**6))

    def slow_step(*args):
        place = next(count)
        if moment == "slow":
            time.sleep(0.15)
        if moment in ("step", "hang") and place == 7:
            mark(2.0 if moment == "step" else 600.0)
        return step(*args)

    def slow_write(*args):
        if moment == "save" and next(count) == 11:
            mark(1.5)
        return write(*args)

    def slow_measure(*args):
        mark(1.5)
        return measure(*args)

    if moment == "save":
        Saver.write = slow_write
    elif moment == "measure":
        Measure.__call__ = slow_measure
    else:
        loop.one_step = slow_step


def worked(job: dict[str, Any]) -> dict[str, Any]:
    """What a job shows of itself on this rank."""
    wanted = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"}
    if job["strategy"].startswith("zero"):
        wanted = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": job["deepspeed"]}
    elif job["strategy"] == "ddp":
        wanted = {}
    before, seen, noise = dict(os.environ), {}, io.StringIO()
    os.environ.update(wanted)
    try:
        run = load_run(job["config"])
        with contextlib.redirect_stderr(noise):
            if job["spoil"]:
                with spoiled(job["spoil"], 1, int(os.environ["RANK"]), seen):
                    train(run)
            elif job["look"]:
                seen |= looked_at(run)
            else:
                train(run)
    except Exception as error:
        seen["error"] = str(error) if isinstance(error, UserError) else traceback.format_exc()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return seen | {"stderr": noise.getvalue()}


def looked_at(run: RunConfig) -> dict[str, Any]:
    """Two steps with a part of the head frozen: how many numbers of what are on this rank."""
    launched = stage.open_launch(run.train)
    torch.manual_seed(run.seed)
    lesson = stage.prepare(run, launched)
    head = lesson.head
    stream = stage.make_stream(run, lesson.features, head, launched)
    head.lm_head.weight.requires_grad_(False)
    trained = [weight.numel() for weight in head.parameters() if weight.requires_grad]
    seen: dict[str, Any] = {"trained": sum(trained), "all": sum(weight.numel() for weight in head.parameters())}
    frozen = head.lm_head.weight.detach().clone()
    strategy = stage.spread(head, run.train, launched)
    head.train()
    seen["describe"] = strategy.describe()
    advance = strategy.advance

    def noting() -> tuple[Tensor, Tensor]:
        seen["gradients"] = gradients_here(strategy)
        return advance()

    strategy.advance = noting  # type: ignore[method-assign]
    for batches in stream.steps(0, 2):
        set_rate(strategy)
        loop.one_step(strategy, batches, lesson.target, Meter())
    seen["weights"] = weights_here(strategy)
    with strategy.shown() as shown:
        seen["shown"] = sum(local(weight).numel() for weight in shown.parameters())
    seen["weights after evaluation"] = weights_here(strategy)
    seen["state"] = sum(
        local(state["exp_avg"]).numel() for o in strategy.optimizers for state in o.state.values() if "exp_avg" in state
    )
    steered = {id(weight) for group in strategy.groups() for weight in group["params"]}
    seen["target in optimizer"] = any(id(weight) in steered for weight in lesson.target.model.parameters())
    with strategy.whole() as whole:
        tensors = {name: local(value).detach().clone() for name, value in whole.named_parameters()}
    seen["digest"] = digest(tensors)
    seen["frozen"] = torch.equal(tensors["lm_head.weight"], frozen)
    return seen


def set_rate(strategy: Strategy) -> None:
    """A learning rate for the step."""
    for group in strategy.groups():
        group["lr"] = 1e-2


def weights_here(strategy: Strategy) -> dict[str, int]:
    """Numbers of trained weights on this rank: as tensors, and in DeepSpeed's parts."""
    trained = [weight for _, weight in strategy.trained()]
    parts = [weight.ds_tensor.numel() for weight in trained if hasattr(weight, "ds_tensor")]
    return {"tensors": sum(local(weight).numel() for weight in trained), "parts": sum(parts)}


def gradients_here(strategy: Strategy) -> int:
    """Numbers of gradients on this rank, when all have been exchanged."""
    found = [local(weight.grad).numel() for _, weight in strategy.trained() if weight.grad is not None]
    kept = getattr(getattr(strategy.model, "optimizer", None), "averaged_gradients", None) or {}
    return sum(found) + sum(part.numel() for parts in kept.values() for part in parts or [])


def digest(tensors: dict[str, Tensor]) -> str:
    """Of every bit."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def everything(strategy: Strategy) -> dict[str, Tensor]:
    """Weights and moments as a whole, on the main rank; and what this rank holds of the weights."""
    here = {f"here:{name}": local(weight).detach().clone() for name, weight in strategy.trained()}
    return strategy.weights() | strategy.moments() | here


@contextlib.contextmanager
def spoiled(steps: list[int], micro: int, rank: int, seen: dict[str, Any]) -> Iterator[None]:
    """In some steps, the features of one micro-batch of the step become NaN on their way into the loss. Notes whether these
    steps have changed anything.
    """
    step, forward, count, now = loop.one_step, Lesson.forward, iter(range(10**6)), {"bad": False, "place": 0}
    seen["changed"] = []

    def one_step(strategy: Strategy, *args):
        now["bad"], now["place"] = next(count) in steps, rank * strategy.config.accumulate
        before = everything(strategy) if now["bad"] else {}
        found = step(strategy, *args)
        if now["bad"]:
            after = everything(strategy)
            assert after.keys() == before.keys()
            seen["changed"] += [name for name, value in after.items() if not torch.equal(value, before[name])]
        return found

    def wrapped(lesson, batch, *args):
        if now["bad"] and now["place"] == micro:
            batch = replace(batch, taps_TKD=batch.taps_TKD * float("nan"))
        now["place"] += 1
        return forward(lesson, batch, *args)

    loop.one_step, Lesson.forward = one_step, wrapped  # type: ignore[method-assign]
    try:
        yield
    finally:
        loop.one_step, Lesson.forward = step, forward  # type: ignore[method-assign]


# The same training


def test_the_trajectory_ends_its_epochs_unevenly(fresh, one):
    """Otherwise no rank is ever without a batch, and what follows proves less than it says."""
    reader = FeatureReader(store_path(one, "train"))
    assert len(FeatureStream(reader, TRAIN["tokens_per_batch"]).epoch_batches(0)) % 2 == 1
    assert progress(one)["step"] == STEPS
    assert len({record["tau"] for record in curve(one) if "tau" in record}) == TRAIN["evals"], "τ moves"


LAUNCHED = ("ddp",)  # by default; the others by -m slow. All of them train among the jobs
SLOW = ("fsdp2", "zero1", "zero2", "zero2-offload", "zero3", "zero3-offload")


@pytest.mark.parametrize("name", [*LAUNCHED, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_two_processes_equal_one_that_accumulates(straight, one, name):
    """Curve, weights and optimizer; and the processes did what the launch asked for."""
    run, output = straight(name)
    kind = name.removesuffix("-offload")
    assert NAMES[kind] in output
    assert "a step is 2 batches of at most 256 tokens, 1 on each process" in output
    facts = json.loads((run.directory / "provenance.json").read_text(encoding="utf-8"))
    assert (facts["strategy"], facts["processes"], facts["precision"]) == (kind, 2, "no")
    close_curves(run, one)
    close_tensors(run, one)
    if kind == "ddp":  # the sum of two numbers is the same in any order
        assert_same_bits(run, one)
        assert curve(run) == curve(one)


@pytest.mark.slow
def test_bf16_computes_roughly_and_keeps_fp32_weights(straight):
    """Under every strategy; weights in bf16 would leave the curve soon."""
    runs = {name: straight(name, "bf16")[0] for name in ("ddp", "fsdp2", "zero2")}
    losses = {name: [r["loss_0"] for r in curve(run) if "loss_0" in r] for name, run in runs.items()}
    for name, run in runs.items():
        assert "bf16 over fp32 weights" in straight(name, "bf16")[1]
        for file in ("model", "optimizer"):
            tensors = load_file(last_checkpoint(run) / f"{file}.safetensors")
            assert {value.dtype for value in tensors.values()} == {torch.float32}, name
        assert len(losses[name]) == STEPS
        assert losses[name] == pytest.approx(losses["ddp"], rel=2e-3), name
    exact = [r["loss_0"] for r in curve(straight("ddp")[0]) if "loss_0" in r]
    assert losses["ddp"] != exact, "it was another precision"
    assert losses["ddp"] == pytest.approx(exact, rel=2e-2)


@pytest.mark.slow
def test_two_nodes_equal_one(fresh, straight):
    """Two launchers that meet at an address."""
    run, port = fresh(), str(free_port())
    nodes = [launch(run, "two-nodes", "--machine_rank", str(rank), "--main_process_port", port) for rank in (0, 1)]
    output = nodes[0].done()
    nodes[1].done()
    assert NAMES["ddp"] in output
    assert_same_bits(run, straight("ddp")[0])
    assert curve(run) == curve(straight("ddp")[0])


@pytest.mark.slow
def test_torchrun_equals_accelerate_launch(fresh, straight):
    run = fresh()
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(SCRIPT)]
    assert NAMES["ddp"] in begin([*words, "--config", str(written(run))], run.directory.parent).done()
    assert_same_bits(run, straight("ddp")[0])
    assert curve(run) == curve(straight("ddp")[0])


# Jobs that share one launch


@dataclass
class Jobs:
    """What was asked of one launch of two processes, by name."""

    runs: dict[str, RunConfig] = field(default_factory=dict)
    seen: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # of each rank


@pytest.fixture(scope="module")
def jobs(fresh, killed, tmp_path_factory) -> Jobs:
    """Small trainings under several strategies, and looks into them, each in its own run directory."""
    folder = tmp_path_factory.mktemp("jobs")
    asked: dict[str, dict[str, Any]] = {f"look-{name}": {"look": True} | SHORT for name in SHARDED}
    asked |= {f"{what}-{name}": option for name in ("ddp", "fsdp2") for what, option in OPTIONS.items()}
    asked |= {f"spoiled-{name}": {"spoil": [6], **SHORT} for name in NAMES}
    asked |= {f"hopeless-{name}": {"spoil": [5, 6, 7], "bad_steps": 3, **SHORT, "saves": 10} for name in HOPELESS}
    asked |= {f"continued-{name}": {"saves": STEPS} for name in SHARDED}
    asked["released-zero3"] = {}
    found, listed = Jobs(), []
    for name, options in asked.items():
        strategy = name.split("-")[1]
        before = killed("ddp") if name.startswith("continued") else None
        run = fresh(before, **{key: value for key, value in options.items() if key not in ("look", "spoil")})
        deepspeed = folder / f"{strategy}.json"
        sharding = {"stage": int(strategy[-1]), "stage3_param_persistence_threshold": 0} if "zero" in strategy else {}
        deepspeed.write_text(json.dumps({"zero_optimization": sharding, "gradient_clipping": "auto"}), encoding="utf-8")
        job = {"look": False, "spoil": []} | {k: v for k, v in options.items() if k in ("look", "spoil")}
        where = {"config": str(written(run)), "deepspeed": str(deepspeed), "seen": str(folder / name)}
        listed.append(job | where | {"strategy": strategy})
        found.runs[name] = run
    (folder / "jobs.json").write_text(json.dumps(listed), encoding="utf-8")
    several = ["--config_file", "configs/accelerate-ddp.yaml", "--main_process_port", str(free_port())]
    words = [ACCELERATE, "launch", *several, "--mixed_precision", "no", "--num_processes", "2"]
    started = begin([*words, str(Path(__file__)), str(folder / "jobs.json")], folder)
    code = started.wait()
    for name in asked:
        files = [folder / f"{name}-{rank}.json" for rank in (0, 1)]
        if all(file.is_file() for file in files):
            found.seen[name] = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    assert code == 0, (list(found.seen), started.output()[-6000:])
    return found


OPTIONS = {"muon": {"optimizer": "muon", "weight_decay": 0.1, **SHORT}, "ema": {"ema": 0.9, **SHORT}}
HOPELESS = ("ddp",)


@pytest.mark.parametrize("name", SHARDED)
def test_each_rank_holds_its_share(jobs, name):
    """Of weights, gradients and optimizer state, as far as the strategy shards them; after an evaluation, too."""
    for seen in jobs.seen[f"look-{name}"]:
        half = seen["trained"] // 2
        about = pytest.approx(half, rel=0.05)  # parts are of equal length, so that one of them is filled up
        assert seen["state"] == about
        assert seen["weights"] == seen["weights after evaluation"]
        assert seen["shown"] == seen["all"], "unsharded for an evaluation"
        if name == "fsdp2":
            assert seen["weights"]["tensors"] == about
        if name == "zero3":
            assert seen["weights"] == {"tensors": 0, "parts": about}
        if name in ("fsdp2", "zero2", "zero3"):
            assert seen["gradients"] == about


@pytest.mark.parametrize("name", SHARDED)
def test_what_is_frozen_is_in_no_optimizer(jobs, name):
    """A frozen part of the head has no state and stays as it was; nor is the target steered."""
    found = jobs.seen[f"look-{name}"]
    held = sum(seen["state"] for seen in found)
    assert found[0]["trained"] < 0.95 * found[0]["all"], "something is frozen"
    assert found[0]["trained"] <= held < found[0]["trained"] * 1.05
    for seen in found:
        assert seen["frozen"]
        assert not seen["target in optimizer"]


@pytest.mark.parametrize("name", SHARDED)
def test_all_ranks_see_the_same_whole_head(jobs, name):
    ours, theirs = jobs.seen[f"look-{name}"]
    assert ours["digest"] == theirs["digest"]


def test_zero3_that_releases_every_weight_equals_one_process(jobs, one):
    """By default, small weights such as these stay on every rank."""
    close_curves(jobs.runs["released-zero3"], one)
    close_tensors(jobs.runs["released-zero3"], one)


@pytest.mark.parametrize("what", OPTIONS)
def test_muon_and_average_under_ddp_equal_one_process(fresh, jobs, what):
    run = fresh(accumulate=2, **OPTIONS[what])
    train(run)
    tensors = load_file(last_checkpoint(run) / "optimizer.safetensors")
    assert any(key.startswith({"muon": "momentum_buffer:", "ema": "ema:"}[what]) for key in tensors)
    assert_same_bits(jobs.runs[f"{what}-ddp"], run)
    assert curve(jobs.runs[f"{what}-ddp"]) == curve(run)


@pytest.mark.parametrize(("what", "tolerance"), [("muon", 1e-2), ("ema", ROUNDING)])
def test_muon_and_average_under_fsdp2_equal_one_process(fresh, jobs, what, tolerance):
    """Muon loosely: its Newton-Schulz iteration runs in bf16, and over shards its sums are rounded in other places."""
    ours, theirs = jobs.runs[f"{what}-fsdp2"], jobs.runs[f"{what}-ddp"]
    close_tensors(ours, theirs, tolerance, max(tolerance, ROUNDING_OF_MOMENTS))
    close_curves(ours, theirs, tolerance)


@pytest.mark.parametrize(
    ("options", "reason"), [({"optimizer": "muon"}, "needs whole matrices"), ({"ema": 0.9}, "average cannot follow")]
)
@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_zero_refuses_what_it_cannot_do_before_anything_is_written(monkeypatch, fresh, name, options, reason):
    run = fresh(**options)
    monkeypatch.setattr(stage, "open_launch", lambda config: Launch(strategy=name))
    with pytest.raises(UserError, match=rf"{reason} \({name}\)|{reason}.*{name}"):
        train(run)
    nothing_written(run)


# Steps that are not finite


@pytest.fixture(scope="module")
def spoiled_alone(fresh) -> tuple[RunConfig, dict[str, Any]]:
    """One process whose second micro-batch of step 6 is bad, and what was seen."""
    run, seen, noise = fresh(accumulate=2, **SHORT), {}, io.StringIO()
    with spoiled([6], 1, 0, seen), contextlib.redirect_stderr(noise):
        train(run)
    return run, seen | {"stderr": noise.getvalue()}


def test_a_step_that_is_not_finite_is_left_out(spoiled_alone):
    """Nothing moves in it, it is counted, and its documents are named."""
    run, seen = spoiled_alone
    assert "step 6: the loss is not finite, the step is left out; rank 0 read documents" in seen["stderr"]
    assert all(f"{document} (" in seen["stderr"] for document in documents_of(run, 6)[:6])
    left_out(run, seen)


def documents_of(run: RunConfig, step: int, rank: int = 0, world: int = 1) -> list[int]:
    reader = FeatureReader(store_path(run, "train"))
    return FeatureStream(reader, 256, run.train.accumulate, rank, world, run.seed).documents(step)


def left_out(run: RunConfig, seen: dict[str, Any]) -> None:
    """One step of ten."""
    assert seen["changed"] == []
    assert json.loads((run.directory / "training.json").read_text(encoding="utf-8"))["left_out"] == 1
    assert progress(run)["left_out"] == 1
    tensors = load_file(last_checkpoint(run) / "optimizer.safetensors")
    assert {float(value) for key, value in tensors.items() if key.startswith("step:")} == {9.0}
    losses = [record["loss_0"] for record in read_metrics(run.directory / "metrics.jsonl") if "loss_0" in record]
    assert len(losses) >= 9
    assert all(0 < loss < 20 for loss in losses)


def test_the_spoiled_step_would_have_counted(fresh):
    """What is tested above is not so by itself."""
    run, seen = fresh(accumulate=2, **SHORT), {}
    with spoiled([6], 5, 0, seen):  # there is no micro-batch 5
        train(run)
    assert seen["changed"]


@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_leave_a_step_out_that_is_bad_on_one(jobs, spoiled_alone, name):
    """As one process does, and only the rank that is to blame names its documents."""
    run = jobs.runs[f"spoiled-{name}"]
    first, second = jobs.seen[f"spoiled-{name}"]
    assert "error" not in first | second
    left_out(run, first)
    printed = "step 6: the loss is not finite, the step is left out; rank 1 read documents"
    assert printed in second["stderr"]
    assert all(f"{document} (" in second["stderr"] for document in documents_of(run, 6, 1, 2)[:6])
    assert printed not in first["stderr"]
    close_tensors(run, spoiled_alone[0])


def test_too_many_bad_steps_end_the_run_and_keep_the_last_good_checkpoint(fresh):
    run, seen = fresh(accumulate=2, bad_steps=3, **(SHORT | {"saves": 10})), {}
    with spoiled([5, 6, 7], 1, 0, seen), pytest.raises(UserError, match="3 steps in a row") as caught:
        train(run)
    assert all(f"{document} (" in str(caught.value) for document in documents_of(run, 7)[:6])
    assert seen["changed"] == []
    good = fresh(accumulate=2, **(SHORT | {"saves": 10}))
    with pytest.MonkeyPatch.context() as patch:
        crash_at(patch, 5)
        with pytest.raises(Interrupted):
            train(good)
    for file in ("model", "optimizer"):
        ours, theirs = (load_file(last_checkpoint(r) / f"{file}.safetensors") for r in (run, good))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[key]) for key, value in ours.items())


@pytest.mark.parametrize("name", HOPELESS)
def test_too_many_bad_steps_end_all_ranks(jobs, name):
    for seen in jobs.seen[f"hopeless-{name}"]:
        assert "3 steps in a row" in seen["error"]
        assert seen["changed"] == []


# Killed, and continued


@pytest.mark.parametrize(
    "name",
    [
        "ddp",
        pytest.param("fsdp2", marks=pytest.mark.slow),
        pytest.param("zero2", marks=pytest.mark.slow),
        pytest.param("zero3", marks=pytest.mark.slow),
    ],
)
def test_killed_processes_continue_to_the_same_bits(fresh, straight, killed, name):
    """kill -9 of the launcher and all it started, at any moment; then the same command."""
    run = fresh(killed(name), saves=STEPS)
    at = int(checkpoints(run)[-1].name.removeprefix("step-"))
    output = launch(run, name).done()
    assert f"steps {at} to {STEPS}" in output
    assert_same_bits(run, straight(name)[0])
    assert curve(run) == curve(straight(name)[0])


@pytest.mark.slow
def test_two_processes_become_one_and_two_again(fresh, straight, killed):
    """With as many batches in a step as before, the same batches."""
    run = fresh(killed("ddp"), saves=STEPS, accumulate=2)
    at = progress(run)["step"]
    with pytest.MonkeyPatch.context() as patch:
        crash_at(patch, 5)
        with pytest.raises(Interrupted):
            train(run)
    assert progress(run)["step"] == at + 5
    again = fresh(run, saves=STEPS)
    assert f"steps {at + 5} to {STEPS}" in launch(again).done()
    assert_same_bits(again, straight("ddp")[0])
    assert curve(again) == curve(straight("ddp")[0])


def test_fewer_processes_alone_are_refused_with_the_remedy(fresh, killed):
    """Half the batches in a step would be another training."""
    run = fresh(killed("ddp"), saves=STEPS)
    before = {path: path.read_bytes() for path in run.directory.rglob("*.safetensors")}
    with pytest.raises(UserError, match=r"batches per step: was 2, now 1\n(.*\n)*.*train\.accumulate"):
        train(run)
    assert before == {path: path.read_bytes() for path in run.directory.rglob("*.safetensors")}


@pytest.mark.parametrize("name", SHARDED)
def test_every_strategy_continues_a_checkpoint_of_ddp(jobs, one, name):
    """The same batches, and the curve of a run that was never stopped."""
    assert not any("error" in seen for seen in jobs.seen[f"continued-{name}"])
    close_curves(jobs.runs[f"continued-{name}"], one)
    close_tensors(jobs.runs[f"continued-{name}"], one)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("ddp", "zero3"), ("zero1", "fsdp2"), ("zero3", "ddp")])
def test_another_launch_continues(fresh, one, killed, before, after):
    run = fresh(killed(before), saves=STEPS)
    at = progress(run)["step"]
    output = launch(run, after).done()
    assert NAMES[after] in output
    assert f"steps {at} to {STEPS}" in output
    close_curves(run, one)
    close_tensors(run, one)


# Signals

MOMENTS = [
    ("step", signal.SIGTERM, 8),
    pytest.param("save", signal.SIGTERM, None, marks=pytest.mark.slow),
    pytest.param("measure", signal.SIGTERM, 11, marks=pytest.mark.slow),
    pytest.param("step", signal.SIGUSR1, 8, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("moment", "number", "step"), MOMENTS)
def test_a_signal_ends_one_process_well(fresh, one, moment, number, step):
    """Whatever it is doing: a checkpoint, the command to go on, exit code 0; and then the same bits."""
    run = fresh(accumulate=2, saves=STEPS)
    marker = run.directory.parent / "marker"
    started = alone(run, Path(__file__), MOMENT=moment, MARKER=str(marker))
    until(Path(f"{marker}0").exists, started)
    started.process.send_signal(number)
    output = started.done()
    reached = progress(run)["step"]
    assert reached == step or (step is None and reached < STEPS)
    assert f"stopped after step {reached} of {STEPS}; a checkpoint is written. To continue:" in output
    assert str(run.directory.parent / "run.yaml") in output.split("To continue:")[1]
    assert "Traceback" not in output
    assert not list((run.directory / "checkpoints").glob(".*"))
    train(run)
    assert_same_bits(run, one)
    assert curve(run) == curve(one)


def test_a_second_signal_ends_a_step_that_hangs(fresh):
    """Not at once: launchers hand on what a terminal has sent already."""
    run = fresh(accumulate=2, saves=STEPS)
    marker = run.directory.parent / "marker"
    started = alone(run, Path(__file__), MOMENT="hang", MARKER=str(marker))
    until(Path(f"{marker}0").exists, started)
    started.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    started.process.send_signal(signal.SIGTERM)
    time.sleep(2.0)
    assert started.process.poll() is None, started.output()
    started.process.send_signal(signal.SIGTERM)
    assert started.wait(10) == 128 + signal.SIGTERM
    assert "the last checkpoint is whole" in started.output()
    assert progress(run)["step"] == 7


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_ends_all_ranks_at_the_same_step(fresh, straight, number):
    """SIGTERM, as schedulers send it to the launcher; Ctrl-C, as a terminal sends it to all."""
    run = fresh(saves=STEPS)
    marker = run.directory.parent / "marker"
    started = launch(run, "ddp", script=Path(__file__), MOMENT="step", MARKER=str(marker))
    until(lambda: all(Path(f"{marker}{rank}").exists() for rank in (0, 1)), started)
    workers = list(started.workers().values())
    assert len(workers) == 2
    if number == signal.SIGTERM:
        started.process.send_signal(number)
    else:
        os.killpg(started.process.pid, number)
    code = started.wait()
    output = started.output()
    assert not any(worker.is_running() for worker in workers)
    assert code == 1, "torch's launcher reports the signal, though its processes have ended well"
    said = "stopped after step 9 of 30; a checkpoint is written. To continue: accelerate launch"
    assert said in output, "ranks tell each other at the begin of the step after"
    assert progress(run)["step"] == 9
    assert not (run.directory / "training.json").exists()
    launch(run).done()
    assert_same_bits(run, straight("ddp")[0])
    assert curve(run) == curve(straight("ddp")[0])


# A rank that hangs


@pytest.mark.slow
@pytest.mark.parametrize("mute", [1, 0])
def test_a_rank_that_hangs_is_named(fresh, mute):
    """The others say which, and the launch ends with an error."""
    run = fresh(saves=STEPS, hang_minutes=0.1)
    started = launch(run, script=Path(__file__), MOMENT="slow")
    until(lambda: checkpoints(run), started)
    workers = started.workers()
    assert set(workers) == {0, 1}
    time.sleep(2.5)  # it has been heard of twice
    workers[mute].suspend()
    try:
        code = started.wait(150)
    finally:
        for process in workers.values():
            with contextlib.suppress(psutil.Error):
                process.kill()
    output = started.output()
    assert code != 0
    assert "no step was finished for 0.1 minutes (train.hang_minutes)" in output
    where = f"rank {mute}: process {workers[mute].pid} on "
    assert where in output
    assert "does not answer" in output.split(where)[1].split("rank ")[0]
    assert output.count("does not answer") == 1
    assert checkpoints(run)


# Refusals


@pytest.mark.parametrize(
    ("options", "environment", "message"),
    [
        ({"strategy": "fsdp2"}, {}, "train.strategy is fsdp2, but what was launched is single (one process)"),
        ({"processes": 3}, {}, "train.processes is 3, but one process were launched|processes is 3, but one process"),
        ({"mixed_precision": "no"}, {"ACCELERATE_MIXED_PRECISION": "bf16"}, "launch asks for bf16 and the run for"),
        ({"mixed_precision": "fp16"}, {"ACCELERATE_USE_CPU": "true"}, "fp16 needs a GPU"),
        ({}, {"ACCELERATE_MIXED_PRECISION": "fp8"}, "mixed precision fp8: give no, bf16 or fp16"),
        ({}, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "gradient_accumulation_steps 4"),
    ],
)
def test_a_launch_that_contradicts_the_run_is_refused(monkeypatch, fresh, options, environment, message):
    """Before anything is written."""
    run = fresh(**options)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UserError) as caught:
        train(run)
    assert any(part in str(caught.value) for part in message.split("|"))
    assert "\n" not in str(caught.value)
    nothing_written(run)


@pytest.mark.parametrize(
    ("deepspeed", "message"),
    [
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, "a section 'optimizer': remove it"),
        ({"scheduler": {"type": "WarmupLR", "params": {}}}, "a section 'scheduler': remove it"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps 4, the run makes it 1: set it to auto"),
        ({"gradient_clipping": 0.5}, "gradient_clipping 0.5, the run makes it 1.0"),
        ({"train_batch_size": 64}, "train_batch_size 64, the run makes it 2"),
        ({"zero_optimization": {"stage": 0}}, "DeepSpeed with ZeRO stage 0: give 1, 2 or 3"),
        ({"gradient_accumulation_steps": 1, "gradient_clipping": 1.0, "train_batch_size": 2}, None),
    ],
)
def test_a_deepspeed_config_may_only_say_how_the_head_is_sharded(monkeypatch, tmp_path, deepspeed, message):
    path = tmp_path / "deepspeed.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}} | deepspeed), encoding="utf-8")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(path))
    if message is None:
        launching.check(TrainConfig(), 2, *launching.launched_strategy(2))
        return
    with pytest.raises(UserError) as caught:
        launching.check(TrainConfig(), 2, *launching.launched_strategy(2))
    assert message in str(caught.value)


def test_fsdp_1_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(UserError, match="FSDP 1, which is not supported"):
        launching.launched_strategy(2)


def one_clear_line(output: str, run: RunConfig) -> None:
    """Nothing of ours but the error, and nothing written. The launcher shows a traceback of its own."""
    assert "headwright/" not in output.replace(f"{ROOT}/", "")  # a checkout may be called so
    assert str(ROOT / "train") + "/" not in output.replace(str(SCRIPT), "")
    nothing_written(run)


def test_accelerate_that_starts_one_process_for_two_is_refused(fresh):
    """It does so on CPUs, and says nothing."""
    run = fresh()
    words = [ACCELERATE, "launch", "--cpu", "--num_processes", "2", "--mixed_precision", "no", str(SCRIPT)]
    started = begin([*words, "--config", str(written(run))], run.directory.parent)
    assert started.wait() != 0
    output = started.output()
    assert "error: accelerate launch was asked for 2 processes and started one" in output
    assert "--multi_gpu --num_processes 2" in output
    one_clear_line(output, run)


@pytest.mark.parametrize(
    ("command", "count"),
    [
        ("python /venv/bin/accelerate launch --cpu --num_processes 2 train/eagle3.py", 2),
        ("/venv/bin/accelerate-launch launch --num_processes=4 x.py", 4),
        ("accelerate launch --num-processes 3 x.py", 3),
        ("accelerate launch x.py", 1),
        ("python train/eagle3.py --config run.yaml", 1),
        ("python -m accelerate.commands.launch --cpu --num_processes 2 x.py", 2),
        ("bash launch --num_processes 2", 1),
    ],
)
def test_the_number_of_processes_is_read_from_the_launchers_command(command, count):
    assert launching.asked_processes(command.split()) == count


def test_the_number_of_processes_is_read_from_the_launchers_file():
    words = ["accelerate", "launch", "--config_file", str(ROOT / "configs" / "accelerate-ddp.yaml"), "x.py"]
    assert launching.asked_processes(words) == 8
    assert launching.asked_processes([*words[:2], "--num_processes", "2", *words[2:]]) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision", "options", "message"),
    [
        ("ddp", "no", {"strategy": "fsdp2"}, "train.strategy is fsdp2, but what was launched is ddp (2 processes)"),
        ("ddp", "no", {"processes": 3}, "train.processes is 3, but 2 processes were launched"),
        (
            "fsdp2",
            "bf16",
            {"mixed_precision": "no"},
            "the launch asks for bf16 and the run for train.mixed_precision=no",
        ),
        ("ddp", "fp16", {}, "mixed precision fp16 needs a GPU"),
        ("zero3", "no", {"ema": 0.9}, "train.ema: DeepSpeed ZeRO keeps weights where an average cannot follow (zero3)"),
        ("zero2", "no", {"optimizer": "muon"}, "train.optimizer muon: it needs whole matrices"),
    ],
)
def test_a_real_launch_is_refused_in_one_line(fresh, name, precision, options, message):
    run = fresh(**options)
    started = launch(run, name, precision=precision)
    assert started.wait() != 0
    output = started.output()
    assert f"error: {message}" in output
    assert "exitcode : 2" in output
    one_clear_line(output, run)


if __name__ == "__main__":
    work()
