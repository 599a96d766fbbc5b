"""fp16 losses are scaled under every strategy alike. On CPUs, whose autocast knows fp16, though runs there refuse it."""

import json

import pytest
from conftest import on_two_processes

STRATEGIES = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
WORKER = """
import json
import os
import sys
from dataclasses import replace

sys.path.insert(0, os.environ["TESTS"])
import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from conftest import make_target, make_tiny_head
from test_adapter import texts

from headwright.configs.schema import TrainConfig
from headwright.data.batch import pack
from headwright.train.launch import open_launch
from headwright.train.loop import one_step
from headwright.train.spread import spread

from headwright.train.track import Meter

config = TrainConfig(lr=1e-3)
found, opened, target = {}, open_launch(config), make_target()
documents = texts(target)
batch = pack(documents[opened.rank :: 2])
for name in sys.argv[1:]:
    options = {"zero_optimization": {"stage": int(name[-1])}} if name.startswith("zero") else None
    options = FullyShardedDataParallelPlugin(fsdp_version=2) if name == "fsdp2" else options
    launch = replace(opened, strategy=name, precision="fp16", options=options)
    strategy = spread(make_tiny_head(target).train(), config, launch)
    norms, scales = [], []
    for step in range(6):
        for group in strategy.groups():
            group["lr"] = 1e-3
        if step == 3:
            before, kept = strategy.weights(), strategy.scaler.scale.clone()
            strategy.scaler.scale.fill_(2.0**120)  # any gradient overflows
        norm, flags = one_step(strategy, [batch], target, Meter())
        if step == 3:
            after = strategy.weights()
            same = all(torch.equal(before[key], value) for key, value in after.items())
            left_out, halved = bool(flags[1]), float(strategy.scaler.scale) == 2.0**119
            strategy.scaler.scale.copy_(kept)
            assert "scale:" in strategy.moments() or not launch.main
        else:
            norms.append(float(norm))
    found[name] = {"norms": norms, "same": same, "left_out": left_out, "halved": halved}
if opened.main:
    print("FOUND " + json.dumps(found))
opened.wait()
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each strategy did on two processes: six steps, of which the fourth overflows."""
    output = on_two_processes(tmp_path_factory.mktemp("half") / "worker.py", WORKER, *STRATEGIES)
    [said] = [text for text in output.splitlines() if text.startswith("FOUND ")]
    return json.loads(said.removeprefix("FOUND "))


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_losses_are_scaled_and_overflows_left_out(found, name):
    """Gradient norms are those without a scale, alike everywhere; a step that overflows moves nothing and halves the scale."""
    assert found[name]["norms"] == pytest.approx(found["ddp"]["norms"], rel=5e-3)
    assert all(0 < norm < 1e4 for norm in found[name]["norms"])
    assert found[name]["left_out"]
    assert found[name]["halved"]
    assert found[name]["same"]
