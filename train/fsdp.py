"""FSDP2: weights, gradients and optimizer state of the head sharded over the ranks, by torch's `fully_shard`.

The head is one unit: heads reach into their layers' weights (one projection for all steps of a rollout), which the hooks
of smaller units would not see, and a head is small beside its target.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from headwright.heads.base import DraftHead
from headwright.train.strategy import Lesson, Strategy


class FullyShard(Strategy):
    """`options` are Accelerate's FSDP plugin: reshard_after_forward and cpu_offload are taken from it."""

    def wrap(self, lesson: Lesson) -> Any:
        """Sharded in place."""
        launch, plugin = self.launch, self.launch.options
        mesh = init_device_mesh(launch.device.type, (launch.world,))
        choices: dict[str, Any] = {"reshard_after_forward": bool(plugin.reshard_after_forward)}
        if plugin.cpu_offload:
            choices["offload_policy"] = plugin.cpu_offload
        return fully_shard(lesson, mesh=mesh, **choices)

    def describe(self) -> str:
        """What it really is."""
        here = sum(weight.to_local().numel() for _, weight in self.trained())
        return (
            f"{type(self.model).__name__} (FSDP2): {here} trained weights on this one of {self.launch.world} processes"
        )

    def micro(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Gradients are exchanged in the last micro-batch."""
        self.model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def whole(self) -> Iterator[DraftHead]:
        """All weights on every rank, as parameters and in forward passes; state_dict() would shard them again."""
        self.model.unshard()
        try:
            yield self.head
        finally:
            self.model.reshard()

    def place(self, value: Tensor, weight: DTensor) -> Tensor:
        """This rank's part of a tensor that every rank has."""
        value = value.to(weight.device)
        if value.shape != weight.shape:
            return value
        return distribute_tensor(value, weight.device_mesh, weight.placements, src_data_rank=None)
