"""Every kind of head trains under every strategy: three steps on two processes are those of one process."""

import json

import pytest
import torch
from conftest import on_two_processes
from test_zoo import CASES

STRATEGIES = ("ddp", "fsdp2", "zero2", "zero3")
DEFAULT = ("fsdp2", "zero3")
WORKER = """
import json
import os
import sys
import traceback
from dataclasses import replace

sys.path.insert(0, os.environ["TESTS"])
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from conftest import make_target
from test_adapter import make_any, texts
from test_zoo import CASES

from headwright.configs.schema import TrainConfig
from headwright.data.batch import pack
from headwright.heads.base import Engine
from headwright.train.launch import Launch, close_launch, open_launch
from headwright.train.loop import one_step
from headwright.train.spread import spread
from headwright.train.track import Meter


def train(launch, case, parts):
    target = make_target(taps=(1, 3, 6, 7))
    documents = texts(target, 4)
    head = make_any(target=target, **CASES[case]).train()
    head.engine = Engine(progress=0.75)
    strategy, steps = spread(head, config, launch), []
    for step in range(3):
        for group in strategy.groups():
            group["lr"] = 1e-3 * group["scale"]
        torch.manual_seed(step)
        batches = [pack([documents[place]]) for place in parts] if len(parts) == 2 else [pack([documents[parts[0]]])]
        norm, _ = one_step(strategy, batches, target, Meter())
        steps.append(float(norm))
    with strategy.shown() as shown:
        whole = sum(float(weight.detach().double().abs().sum()) for weight in shown.parameters())
    return {"steps": steps, "whole": whole}


config, found, opened = TrainConfig(), {}, open_launch(TrainConfig())
for case in sys.argv[2:]:
    found[case] = {"one": train(Launch(), case, [0, 1])}
    for name in sys.argv[1].split(","):
        options = {"zero_optimization": {"stage": int(name[-1])}} if name.startswith("zero") else None
        options = FullyShardedDataParallelPlugin(fsdp_version=2) if name == "fsdp2" else options
        try:
            found[case][name] = train(replace(opened, strategy=name, options=options), case, [opened.rank])
        except Exception:
            found[case][name] = {"error": traceback.format_exc()}
if opened.main:
    print("FOUND " + json.dumps(found))
opened.wait()
close_launch()
"""


def run_worker(folder, strategies, cases) -> dict:
    """What the steps of each case came to."""
    output = on_two_processes(folder / "worker.py", WORKER, ",".join(strategies), *cases)
    said = [text for text in output.splitlines() if text.startswith("FOUND ")]
    return json.loads(said[0].removeprefix("FOUND "))


@pytest.fixture(scope="module")
def some(tmp_path_factory):
    """The two strategies that shard weights, for one head of each make."""
    return run_worker(tmp_path_factory.mktemp("some"), DEFAULT, MAKES)


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    return run_worker(tmp_path_factory.mktemp("everything"), STRATEGIES, CASES)


MAKES = ("eagle3-deep", "eagle1", "medusa-2", "hydra++", "mtp", "draft-model")


def same(found: dict, case: str, name: str) -> None:
    """Gradient norms, and the weights after three steps."""
    ours, theirs = found[case][name], found[case]["one"]
    assert "error" not in ours, ours["error"]
    assert ours["steps"] == pytest.approx(theirs["steps"], rel=1e-4)
    assert ours["whole"] == pytest.approx(theirs["whole"], rel=1e-6)
    assert len(torch.tensor(theirs["steps"]).unique()) == 3


def test_heads_of_every_make_train_sharded(some):
    """One test: two workers would each launch the two processes."""
    for case in MAKES:
        for name in DEFAULT:
            same(some, case, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("case", CASES)
def test_every_head_trains_under_every_strategy(everything, case, name):
    same(everything, case, name)
