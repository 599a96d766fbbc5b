"""Targets that no device holds alone: with their layers on disk, or spread over processes, they are the same targets."""

from dataclasses import replace

import pytest
import torch
from conftest import TAPS, make_model, make_tokenizer, on_two_processes, tiny_run
from torch import nn

from headwright.configs import UserError
from headwright.configs.schema import TargetConfig
from headwright.data.block import make_block
from headwright.data.harvest import harvest
from headwright.data.placing import check_sharing, ends_map
from headwright.data.small_model import cut_target
from headwright.data.target import Target
from headwright.eval.metrics import read_metrics
from headwright.heads.adapter import Adapter, AdapterConfig
from headwright.train.run import train


@pytest.fixture(scope="module")
def half_model(tmp_path_factory):
    """A checkpoint in bfloat16."""
    folder = tmp_path_factory.mktemp("half")
    make_model().to(torch.bfloat16).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_on_disk_are_the_same_target(half_model, dtype):
    """Fingerprint, features and logits, bit for bit; and the layers hold no memory."""
    config = TargetConfig(model=str(half_model), dtype=dtype)
    whole = Target.load(config, TAPS)
    ends = Target.load(replace(config, device_map="ends"), TAPS)
    assert ends.spec == whole.spec
    assert ends.spec.fingerprint
    assert all(weight.is_meta for weight in ends.body.layers.parameters())
    assert not any(weight.is_meta for part in (ends.lm_head, ends.norm) for weight in part.parameters())
    ids = torch.randint(0, 250, (2, 9), generator=torch.Generator().manual_seed(3))
    ours, theirs = ends.features(ids), whole.features(ids)
    assert torch.equal(ours.taps_BNKD, theirs.taps_BNKD)
    assert torch.equal(ends.logits(ours.last_BND), whole.logits(theirs.last_BND))


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
def test_every_part_has_a_place(family):
    """Each parameter lies in exactly one of the parts that the map names."""
    model = make_model(family)
    places = ends_map(model, torch.device("cpu"))
    for name, _ in model.named_parameters():
        owners = [part for part in places if name.startswith(f"{part}.")]
        assert len(owners) == 1, name
        assert (places[owners[0]] == "disk") is (".layers." in name)
    assert not any(isinstance(model.get_submodule(part), nn.ModuleList) for part in places if places[part] != "disk")


def test_training_with_the_layers_on_disk_ends_in_the_same_bits(model_dir, chats, tmp_path):
    """Stored features need no layer, and decoding during training reads them."""
    run = tiny_run(model_dir, chats, tmp_path)
    harvest(run)
    curves = []
    for name, place in (("whole", None), ("ends", "ends")):
        one = replace(run, name=name, features="tiny", target=replace(run.target, device_map=place))
        train(one)
        records = read_metrics(one.directory / "metrics.jsonl")
        curves.append([[r.get(key) for key in ("loss_0", "tau", "tau_decoded", "grad_norm")] for r in records])
    assert curves[0] == curves[1]
    assert any(record[2] for record in curves[0])


@pytest.mark.parametrize(
    ("changes", "processes", "wrong"),
    [
        ({"shard": True}, 1, "there is one process"),
        ({"shard": True, "device_map": "auto"}, 2, "leave target.device_map"),
        ({"device_map": "auto"}, 2, "each of the 2 processes"),
    ],
)
def test_what_cannot_be_placed_is_refused(changes, processes, wrong):
    with pytest.raises(UserError, match=wrong):
        check_sharing(TargetConfig(model="m", **changes), processes)
    check_sharing(TargetConfig(model="m", device_map="ends"), 2)


def test_who_needs_layers_says_so(model_dir):
    """Copies and adapters of layers that lie on disk would hold nothing."""
    ends = Target.load(TargetConfig(model=str(model_dir), device_map="ends"), TAPS)
    whole = Target.load(TargetConfig(model=str(model_dir)), TAPS)
    whole.want_layers("anybody")
    asks = {
        "head.block": lambda target: make_block(target, "target"),
        "head.layers": lambda target: cut_target(target, 2),
        "head.adapter": lambda target: Adapter(AdapterConfig(rank=2), target),  # changes the target: last
    }
    for who, ask in asks.items():
        with pytest.raises(
            UserError, match=f"{who} takes layers of the target, which target.device_map keeps elsewhere"
        ):
            ask(ends)
        ask(whole)


SHARED = """
import sys
import torch
import torch.distributed as dist
from accelerate import PartialState
from headwright.configs.schema import TargetConfig
from headwright.data.small_model import cut_target
from headwright.data.target import Target

PartialState(cpu=True)
config = TargetConfig(model=sys.argv[1])
whole = Target.load(config, (1, 3, 6))
part = Target.load(config, (1, 3, 6), shared=True)
assert part.spec == whole.spec
layers = sum(weight.numel() for weight in whole.body.layers.parameters())
held = sum(weight.to_local().numel() for weight in part.body.layers.parameters())
assert held <= 0.6 * layers, (held, layers)
rank = dist.get_rank()
ids = torch.randint(0, 250, (1 + rank, 7 + 3 * rank))  # each reads what it likes
for _ in range(2):
    ours, theirs = part.features(ids), whole.features(ids)
    assert torch.equal(ours.taps_BNKD, theirs.taps_BNKD) and torch.equal(ours.last_BND, theirs.last_BND)
print("rank", rank, "equal")
dist.destroy_process_group()
"""


def test_a_target_spread_over_two_processes_is_the_same_target(model_dir, tmp_path):
    """Each holds half of the layers, and gets the features of its own texts bit for bit."""
    output = on_two_processes(tmp_path / "shared.py", SHARED, str(model_dir))
    assert {"rank 0 equal", "rank 1 equal"} <= set(output.splitlines())
