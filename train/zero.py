"""DeepSpeed ZeRO: optimizer state (stage 1), gradients (2) and weights (3) of the head sharded over the ranks.

DeepSpeed's own engine is called, and not Accelerate's wrapper of it, which does not know a CPU's ranks. What is saved and
restored has the same names and shapes as elsewhere, so that a checkpoint can be continued under any strategy.
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.utils import (
    logger,
    safe_get_full_optimizer_state,
    safe_set_full_optimizer_state,
    set_z3_leaf_modules,
)
from torch import Tensor

from headwright.data.batch import FeatureBatch
from headwright.data.target import Target
from headwright.heads.base import DraftHead
from headwright.train.optim import make_optimizers
from headwright.train.strategy import SCALING, Lesson, Metrics, Strategy, on_host


class Zero(Strategy):
    """`options` are the DeepSpeed config, as Accelerate's plugin holds it."""

    def build(self, lesson: Lesson) -> tuple[Any, list[torch.optim.Optimizer]]:
        """DeepSpeed's engine around head and optimizer. AdamW is torch's: DeepSpeed's own would be compiled first."""
        logger.setLevel(logging.ERROR)
        if self.launch.device.type == "cpu":  # it would compile one for a minute first; gloo serves as well
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        if self.stage == 3:
            set_z3_leaf_modules(lesson, [Lesson])  # gathered as one: heads reach into their layers' weights
        [optimizer] = make_optimizers(self.head, self.config, self.launch.device)
        for group in optimizer.param_groups:
            group["lr"] = 0.0  # some versions make their state by a step, which must move nothing
        engine, *_ = deepspeed.initialize(model=lesson, optimizer=optimizer, config=self.settings())
        inner = engine.optimizer.optimizer
        set_counts(inner, {"step": torch.tensor(0.0)})
        return engine, [inner]

    @property
    def stage(self) -> int:
        """1, 2 or 3."""
        return int(self.launch.strategy[-1])

    def settings(self) -> dict[str, Any]:
        """The launch's config, with what the run decides."""
        ours = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.config.accumulate,
            "train_batch_size": self.launch.world * self.config.accumulate,
            "gradient_clipping": self.config.clip,
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "fp16": {"enabled": False},  # weights stay in fp32; Lesson computes under autocast
            "bf16": {"enabled": False},
        }
        return {key: value for key, value in self.launch.options.items() if key != "bfloat16"} | ours

    def describe(self) -> str:
        """What it really is."""
        return (
            f"{type(self.model).__name__} with {type(self.model.optimizer).__name__} (DeepSpeed ZeRO {self.stage}): "
            f"sharded over {self.launch.world} processes"
        )

    def micro(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Whether a step follows."""
        self.model.set_gradient_accumulation_boundary(last)
        return contextlib.nullcontext()

    def loss(self, batch: FeatureBatch, target: Target) -> tuple[Tensor, Metrics]:
        """Stage 3 frees the weights when the gradient of the module's inputs is there; without one, it would do so first."""
        anchor = torch.zeros((), device=self.launch.device, requires_grad=True) if self.stage == 3 else None
        found: tuple[Tensor, Metrics] = self.model(batch, target, anchor)
        return found

    def backward(self, loss: Tensor) -> None:
        """DeepSpeed averages over ranks, too. It is told the scale of fp16 losses, and divides by it before it clips."""
        if self.scaler is not None:
            self.model.optimizer.override_loss_scale(float(self.scaler.scale))
        self.model.backward(loss * self.launch.world, scale_wrt_gas=False)

    def advance(self) -> tuple[Tensor, Tensor]:
        """DeepSpeed clips, leaves out what is not finite, and steps."""
        self.model.step()
        norm = torch.as_tensor(self.model.get_global_grad_norm()).float()
        bad = torch.as_tensor(self.model.optimizer.overflow, device=self.launch.device)
        if self.scaler is not None:
            self.scaler.update(bad)
        return norm, bad

    @contextlib.contextmanager
    def whole(self) -> Iterator[DraftHead]:
        """All weights on every rank."""
        gathered = list(self.head.parameters()) if self.stage == 3 else []
        with deepspeed.zero.GatheredParameters(gathered, enabled=bool(gathered)):
            yield self.head

    def moments(self) -> dict[str, Tensor]:
        """Put together parameter by parameter."""
        found: dict[str, Any] = {}
        for name, weight in self.trained():
            for key, value in next(iter(self.optimizers[0].state.values()), {}).items():
                found[f"{key}:{name}"] = value if is_count(value) else safe_get_full_optimizer_state(weight, key)
        found |= self.scaler.state() if self.scaler is not None else {}
        return on_host(found) if self.launch.main else {}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Into state that a step without a gradient has made."""
        if not tensors:
            return
        self.make_state()
        weights = dict(self.trained())
        counts = {}
        for label, value in tensors.items():
            key, name = label.split(":", 1)
            if key in SCALING:
                if self.scaler is not None:
                    self.scaler.take(key, value)
            elif is_count(value):
                counts[key] = value
            elif name in weights:
                safe_set_full_optimizer_state(weights[name], value.to(self.launch.device), key)
        set_counts(self.optimizers[0], counts)

    def make_state(self) -> None:
        """There is none before the first step. DeepSpeed has no public way to make it."""
        [optimizer], sharder = self.optimizers, self.model.optimizer
        if optimizer.state:
            return
        for group in self.groups():
            group["lr"] = 0.0
        flats = sharder.fp32_partitioned_groups_flat if self.stage == 3 else sharder.single_partition_of_fp32_groups
        buffers = [flat.grad for flat in flats]  # offloading keeps its own there
        for place, flat in enumerate(flats):
            flat.grad = torch.zeros_like(flat)
            if self.stage == 3:
                sharder._optimizer_step(place)  # its groups hold their partitions only now
        if self.stage < 3:
            optimizer.step()
            sharder._lazy_init_hp_params_optimizer_state()
        for flat, buffer in zip(flats, buffers):
            flat.grad = buffer


def is_count(value: Any) -> bool:
    """A number of steps, which belongs to no parameter alone."""
    return torch.as_tensor(value).ndim == 0


def set_counts(optimizer: torch.optim.Optimizer, counts: dict[str, Tensor]) -> None:
    """Into the state of every partition."""
    for state in optimizer.state.values():
        for key, value in counts.items():
            if key in state:
                state[key] = value.clone().to(state[key]) if isinstance(state[key], Tensor) else value.item()
