"""Where the weights of a target lie that no device holds alone.

ends: embeddings, final norm and lm_head, which heads read in every step, are on the device; the layers stay in the
checkpoint's files, and are read when they are run. That is enough to train on stored features, and little memory.

shared: each process keeps a part of every layer's weights and gathers a layer when it runs it (FSDP2, without gradients);
the ends stay whole on each. That is fast enough for live features. Gathering is a message between processes, so all must run
the target equally often: who uses such a target asks for the same number of passes on each.
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


def ends_map(model: Any, device: torch.device) -> dict[str, Any]:
    """transformers' device_map for a model (may be an empty one): its decoder layers on disk, the rest on `device`."""
    layers = next(name for name, part in model.named_modules() if part is model.get_decoder().layers)
    found: dict[str, Any] = {layers: "disk"}
    for name, part in model.named_modules():
        inside = name == layers or name.startswith(f"{layers}.")
        if not inside and next(part.children(), None) is None:
            found[name] = str(device)  # safetensors knows no torch.device
    return found


def check_sharing(config: TargetConfig, processes: int) -> None:
    """What cannot be spread, or would be twice. Raises UserError."""
    if config.shard and processes == 1:
        raise UserError(
            "target.shard: there is one process, so nothing to spread the target over: target.device_map=auto"
        )
    if config.shard and (config.device_map or config.quantize != "none"):
        raise UserError("target.shard: leave target.device_map and target.quantize at their defaults beside it")
    if config.device_map not in (None, "ends") and processes > 1:
        raise UserError(
            f"target.device_map {config.device_map}: each of the {processes} processes would spread a target of its own over "
            "the same devices: use target.shard=true or target.device_map=ends, or one process"
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
    """Keep a part of each decoder layer, and the rest of the model whole, on `device`. Layers are spread over the processes of
    one machine, where there are several: between machines gathering would be slow.
    """
    world, local = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    mesh = init_device_mesh(device.type, (world // local, local), mesh_dim_names=("machine", "process"))
    mesh = mesh["process"] if local > 1 else mesh["machine"]
    for layer in model.get_decoder().layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    return model.to(device)
