"""The same on GPUs: several processes train the same head as one, in bf16 and fp16, and what is not finite costs no wait."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, make_target, make_tiny_head
from safetensors.torch import load_file
from test_train import TRAIN as SHORT
from test_train import curve, last_checkpoint, write_config

from headwright.configs.schema import TrainConfig
from headwright.train.health import Lagged
from headwright.train.launch import Launch
from headwright.train.strategy import Strategy

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
TRAIN = SHORT | {"lr": 1e-3}
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def launched(run, name: str, processes: int, precision: str) -> str:
    """The training as a user starts it, on GPUs."""
    config = ["--config_file", str(ROOT / "configs" / f"accelerate-{name}.yaml"), "--mixed_precision", precision]
    line = [str(Path(sys.executable).parent / "accelerate"), "launch", *config, "--num_processes", str(processes)]
    line += [str(ROOT / "train" / "eagle3.py"), "--config", str(write_config(run))]
    done = subprocess.run(line, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600)
    assert done.returncode == 0, done.stdout
    return done.stdout


@two_gpus
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero1", "zero2", "zero3", "zero2-offload", "zero3-offload"])
def test_two_gpus_equal_one_that_accumulates(make_run, name, precision):
    one, two = make_run(accumulate=2), make_run()
    launched(one, "ddp", 1, precision)
    assert "cuda" in launched(two, name, 2, precision)
    close = {"no": 2e-4, "bf16": 2e-2, "fp16": 1e-2}[precision]
    for ours, theirs in zip(curve(two), curve(one), strict=True):
        assert ours.get("loss_0") == pytest.approx(theirs.get("loss_0"), rel=close)
    assert {v.dtype for v in load_file(last_checkpoint(two) / "model.safetensors").values()} == {torch.float32}


def test_flags_are_read_one_step_late_and_in_order():
    """The host never waits for the step at hand."""
    lagged, seen = Lagged(torch.device("cuda")), []
    for step in range(5):
        known = lagged.read(step, torch.tensor([float(step), 1.0], device="cuda"))
        seen.append(known)
    assert seen == [None, *((step, [float(step), 1.0]) for step in range(4))]


def test_a_step_that_is_not_finite_is_left_out_on_the_device():
    """Weights, moments and step counts stay as they were; the next step counts."""
    target = make_target()
    target.model.to("cuda")
    head = make_tiny_head(target).to("cuda")
    strategy = Strategy(head, TrainConfig(), Launch(device=torch.device("cuda", 0)))
    generator = torch.Generator("cuda").manual_seed(0)

    def step(spoilt: bool) -> None:
        for _, weight in strategy.trained():
            weight.grad = torch.randn(weight.shape, device="cuda", generator=generator)
            if spoilt:
                weight.grad.view(-1)[0] = float("nan")
        strategy.advance()

    step(False)
    before = strategy.weights() | strategy.moments()
    step(True)
    after = strategy.weights() | strategy.moments()
    assert all(torch.equal(before[name], value) for name, value in after.items())
    step(False)
    assert not torch.equal(strategy.weights()["fc.weight"], before["fc.weight"])


def test_a_run_on_a_gpu_says_so(make_run):
    run = make_run()
    launched(run, "ddp", 1, "bf16")
    assert json.loads((run.directory / "provenance.json").read_text())["precision"] == "bf16"
