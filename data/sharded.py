"""A frozen target whose layers are spread over the processes of a training, for live features of a target that no device
holds alone.

Each process keeps a part of every layer's weights and gathers a layer when it runs it (FSDP2, without gradients).
Embeddings, final norm and lm_head stay whole on each: heads read them in every step. Since gathering is a message between
all processes, all must run the target equally often: who uses such a target asks for the same number of passes on each.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from headwright.configs import UserError
from headwright.configs.schema import TargetConfig


def check_sharing(config: TargetConfig, processes: int) -> None:
    """What cannot be spread, or would be twice. Raises UserError."""
    if config.shard and processes == 1:
        raise UserError(
            "target.shard: there is one process, so nothing to spread the target over: target.device_map=auto"
        )
    if config.shard and (config.device_map or config.quantize != "none"):
        raise UserError("target.shard: leave target.device_map and target.quantize at their defaults beside it")
    if config.device_map and processes > 1:
        raise UserError(
            f"target.device_map {config.device_map}: each of the {processes} processes would spread a target of its own over "
            "the same devices: use target.shard=true, or one process"
        )


@contextlib.contextmanager
def in_turn() -> Iterator[None]:
    """The processes of a machine one after the other, so that its memory holds one whole model at a time."""
    mine, count = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    for _ in range(mine):
        dist.barrier()
    yield
    for _ in range(mine, count):
        dist.barrier()


def spread_layers(model: Any, device: torch.device) -> Any:
    """Keep a part of each decoder layer, and the rest of the model whole, on `device`."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.get_decoder().layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    return model.to(device)
