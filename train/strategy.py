"""How a head is spread over the processes of a launch: what a training step must ask of it, and nothing more.

`Strategy` is one process, and the interface. `DataParallel` copies the head; fsdp.py and zero.py shard it. All of them
keep weights in fp32 and compute in the launch's precision under autocast, so that they train the same head to rounding.
"""

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from headwright.configs.schema import TrainConfig
from headwright.data.batch import FeatureBatch
from headwright.data.target import Target
from headwright.heads.base import DraftHead
from headwright.train.launch import Launch
from headwright.train.optim import make_optimizers

Metrics = dict[str, tuple[Tensor, Tensor]]
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
SCALING = ("scale", "growth")
FIRST_SCALE, GROWTH_STEPS = 2.0**16, 2000  # of fp16 losses, as in torch.amp.GradScaler


class Lesson(nn.Module):
    """What is wrapped: a head's loss as plain tensors, which is what the hooks of wrappers can see."""

    def __init__(self, head: DraftHead, launch: Launch):
        super().__init__()
        self.head = head
        self.device, self.dtype = launch.device.type, PRECISIONS.get(launch.precision)

    def forward(self, batch: FeatureBatch, target: Target, anchor: Tensor | None = None) -> tuple[Tensor, Metrics]:
        """The loss as a sum over rows, and the metrics. `anchor`: a zero with a gradient, whose node is the oldest of the
        graph and so the last of the backward pass (zero.py).
        """
        with parametrize.cached(), torch.autocast(self.device, self.dtype, enabled=self.dtype is not None):
            out = self.head(batch, target)
        return out.total if anchor is None else out.total + 0 * anchor, out.metrics


class Strategy:
    """One process. A step is: `micro` and `backward` for each micro-batch, then `advance`."""

    def __init__(self, head: DraftHead, config: TrainConfig, launch: Launch):
        self.head, self.config, self.launch = head, config, launch
        self.model, self.optimizers = self.build(Lesson(head, launch))
        self.scaler = Scaler(launch) if launch.precision == "fp16" else None
        self.average: dict[str, Tensor] = {}
        if config.ema is not None:
            self.average = {name: value.detach().clone() for name, value in self.trained()}

    def build(self, lesson: Lesson) -> tuple[Any, list[torch.optim.Optimizer]]:
        """What is called with a batch, and the optimizers of what it holds."""
        model = self.wrap(lesson)
        return model, make_optimizers(self.head, self.config, self.launch.device)

    def wrap(self, lesson: Lesson) -> Any:
        """What is called with a batch."""
        return lesson

    def describe(self) -> str:
        """What it really is, for the user."""
        return "one process, nothing is shared"

    def trained(self) -> list[tuple[str, Any]]:
        """Names and parameters that the optimizer moves, as this rank holds them."""
        return [(name, weight) for name, weight in self.head.named_parameters() if weight.requires_grad]

    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    # A step

    def micro(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Around a micro-batch's forward and backward pass; gradients are exchanged in the last."""
        return contextlib.nullcontext()

    def loss(self, batch: FeatureBatch, target: Target) -> tuple[Tensor, Metrics]:
        """A micro-batch's forward pass."""
        found: tuple[Tensor, Metrics] = self.model(batch, target)
        return found

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss`, which is this rank's share of the sum over all ranks."""
        loss = loss * self.launch.world  # wrappers average over ranks
        (loss if self.scaler is None else loss * self.scaler.scale).backward()

    def advance(self) -> tuple[Tensor, Tensor]:
        """Clip, step, forget the gradients. Returns the gradient norm, and whether the step was left out because that is not
        finite, both on the device: nothing waits for them.
        """
        weights = [weight for _, weight in self.trained() if weight.grad is not None]
        norm = whole_tensor(torch.nn.utils.get_total_norm([weight.grad for weight in weights]))
        if self.scaler is not None:
            norm = norm / self.scaler.scale
        bad = ~torch.isfinite(norm)
        self.shrink(weights, (self.config.clip / (norm + 1e-6)).clamp(max=1.0))
        for optimizer in self.optimizers:
            step_unless(optimizer, bad)
            optimizer.zero_grad(set_to_none=True)
        if self.scaler is not None:
            self.scaler.update(bad)
        self.follow(bad)
        return norm, bad

    def shrink(self, weights: Sequence[Any], factor: Tensor) -> None:
        """Scale the gradients."""
        if self.scaler is not None:
            factor = factor / self.scaler.scale
        torch._foreach_mul_([local(weight.grad) for weight in weights], factor)

    @torch.no_grad()
    def follow(self, bad: Tensor) -> None:
        """The moving average of the weights, which a step that is left out does not move."""
        rate = (1 - float(self.config.ema or 0)) * (~bad).float()
        weights = dict(self.trained()) if self.average else {}
        for name, value in self.average.items():
            local(value).lerp_(local(weights[name]), rate)

    # The head as a whole. All ranks call these together.

    @contextlib.contextmanager
    def whole(self) -> Iterator[DraftHead]:
        """The head, unsharded on every rank."""
        yield self.head

    @contextlib.contextmanager
    def shown(self) -> Iterator[DraftHead]:
        """The head as it would be kept: unsharded, averaged, in evaluation mode."""
        self.head.eval()
        with self.averaged(), self.whole() as head, parametrize.cached():
            yield head
        self.head.train()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The moving average in the weights' place."""
        self.exchange()
        try:
            yield
        finally:
            self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        """Weights and their average change places."""
        weights = dict(self.trained())
        for name, value in self.average.items():
            ours, theirs = local(weights[name]), local(value)
            kept = ours.clone()
            ours.copy_(theirs)
            theirs.copy_(kept)

    def weights(self) -> dict[str, Tensor]:
        """The head's state on the CPU of the main rank; empty on others."""
        with self.whole() as head:
            whole = {name: whole_tensor(value) for name, value in head.state_dict().items()}
            return on_host(whole) if self.launch.main else {}

    def shown_weights(self) -> dict[str, Tensor]:
        """The same of the head as it would be kept."""
        with self.averaged():
            return self.weights()

    def moments(self) -> dict[str, Tensor]:
        """The optimizers' state under the parameters' names, likewise: `exp_avg:fc.weight`, …, with the average's and the
        loss scale's.
        """
        names = {weight: name for name, weight in self.trained()}
        found = {
            f"{key}:{names[weight]}": whole_tensor(torch.as_tensor(value))
            for optimizer in self.optimizers
            for weight, state in optimizer.state.items()
            for key, value in state.items()
        }
        found |= {f"ema:{name}": whole_tensor(value) for name, value in self.average.items()}
        found |= self.scaler.state() if self.scaler is not None else {}
        return on_host(found) if self.launch.main else {}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """The inverse, before the first step; every rank gives all tensors."""
        weights = dict(self.trained())
        owner = {
            weight: optimizer for optimizer in self.optimizers for g in optimizer.param_groups for weight in g["params"]
        }
        for label, value in tensors.items():
            key, name = label.split(":", 1)
            if key in SCALING:
                if self.scaler is not None:
                    self.scaler.take(key, value)
            elif key == "ema":
                if name in self.average:
                    local(self.average[name]).copy_(local(self.place(value, weights[name])))
            else:
                weight = weights[name]
                owner[weight].state[weight][key] = self.place(value, weight)

    def place(self, value: Tensor, weight: Any) -> Tensor:
        """A whole tensor, where the parameter is; as it is spread, if it has the parameter's shape."""
        return value.to(weight.device)


class DataParallel(Strategy):
    """A copy of the head on each rank; gradients are averaged (torch's DistributedDataParallel)."""

    def wrap(self, lesson: Lesson) -> Any:
        """In DDP. Buffers are constants: exchanging them in every pass would cost a message."""
        wrapper = nn.parallel.DistributedDataParallel
        known = inspect.signature(wrapper).parameters
        quiet = (
            "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        )  # renamed in torch 2.13
        choices: dict[str, Any] = {"gradient_as_bucket_view": True, quiet: False}
        return wrapper(lesson, **choices)

    def describe(self) -> str:
        """What it really is."""
        return f"{type(self.model).__name__}: a copy of the head on each of {self.launch.world} processes"

    def micro(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Gradients are exchanged in the last micro-batch."""
        return contextlib.nullcontext() if last else self.model.no_sync()


class Scaler:
    """The scale of fp16 losses, kept on the device: grows while gradients stay finite, halves when they do not."""

    def __init__(self, launch: Launch):
        self.scale = torch.tensor(FIRST_SCALE, device=launch.device)
        self.growth = torch.tensor(0, dtype=torch.int32, device=launch.device)

    def state(self) -> dict[str, Tensor]:
        """As it is saved."""
        return {"scale:": self.scale, "growth:": self.growth}

    def take(self, key: str, value: Tensor) -> None:
        """The inverse, key by key."""
        (self.scale if key == "scale" else self.growth).copy_(value)

    def update(self, bad: Tensor) -> None:
        """After a step."""
        torch._amp_update_scale_(self.scale, self.growth, bad.float(), 2.0, 0.5, GROWTH_STEPS)


def step_unless(optimizer: torch.optim.Optimizer, bad: Tensor) -> None:
    """A step that leaves everything as it was where `bad`. Fused optimizers decide on the device; others wait for the flag."""
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
        optimizer.step()
    elif not bool(bad):
        optimizer.step()


def local(value: Any) -> Tensor:
    """This rank's part of a tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def whole_tensor(value: Any) -> Tensor:
    """All of it; a collective where it is sharded."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def on_host(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """Copies on the CPU, which later steps do not change."""
    return {name: value.detach().to("cpu", copy=True).contiguous() for name, value in tensors.items()}
