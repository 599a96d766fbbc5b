"""Optimizers, learning rates and their schedules."""

import fnmatch
import importlib.util
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from headwright.configs import UserError
from headwright.configs.schema import StrategyName, TrainConfig
from headwright.heads.base import DraftHead


def make_optimizers(
    head: DraftHead, config: TrainConfig, device: torch.device | str = "cpu"
) -> list[torch.optim.Optimizer]:
    """The optimizers of a head's trainable parameters. Matrices decay, vectors do not.

    muon: torch's Muon for the matrices inside the head, AdamW for the rest (embeddings, lm_heads and vectors), both at the
    run's learning rate, since Muon's step is scaled to AdamW's.
    """
    named = [(name, weight) for name, weight in head.named_parameters() if weight.requires_grad]
    rate = rate_of(head, config, [name for name, _ in named])
    if config.optimizer == "muon":
        inside = [(name, weight) for name, weight in named if is_inner_matrix(name, weight)]
        rest = [(name, weight) for name, weight in named if not is_inner_matrix(name, weight)]
        if not inside:
            raise UserError("train.optimizer muon: this head has no matrix inside for it: use adamw")
        muon = torch.optim.Muon(grouped(inside, config, rate), lr=config.lr, adjust_lr_fn="match_rms_adamw")
        return [muon, adamw(grouped(rest, config, rate), config)] if rest else [muon]
    if config.optimizer == "adamw-8bit":
        from bitsandbytes.optim import AdamW8bit

        return [AdamW8bit(grouped(named, config, rate), lr=config.lr, betas=config.betas)]
    return [adamw(grouped(named, config, rate), config)]


def adamw(groups: list[dict[str, Any]], config: TrainConfig) -> torch.optim.Optimizer:
    """torch's, fused: one kernel, which also decides on the device whether a step counts."""
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


def is_inner_matrix(name: str, weight: Any) -> bool:
    """What Muon is for: a map between hidden states, and no table of tokens."""
    return weight.ndim == 2 and min(weight.shape) > 1 and "lm_head" not in name and "embed" not in name


def grouped(
    named: Iterable[tuple[str, Any]], config: TrainConfig, rate: Callable[[str], float]
) -> list[dict[str, Any]]:
    """Parameter groups by weight decay and learning rate."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, weight in named:
        decay = config.weight_decay if weight.ndim > 1 else 0.0
        groups.setdefault((decay, rate(name)), []).append(weight)
    return [{"params": weights, "weight_decay": decay, "scale": scale} for (decay, scale), weights in groups.items()]


def rate_of(head: DraftHead, config: TrainConfig, names: list[str]) -> Callable[[str], float]:
    """The learning rate of a parameter in the run's: the head's own choice, times that of `train.lr_scale`."""
    for pattern in config.lr_scale:
        if not any(matches(name, pattern) for name in names):
            raise UserError(f"train.lr_scale: no trained parameter is called {pattern!r}; there are {', '.join(names)}")

    def rate(name: str) -> float:
        scales = [scale for pattern, scale in config.lr_scale.items() if matches(name, pattern)]
        return head.rate_of(name) * math.prod(scales)

    return rate


def matches(name: str, pattern: str) -> bool:
    """Whether a parameter, or the module that holds it, is meant."""
    return fnmatch.fnmatch(name, pattern) or name.startswith(f"{pattern}.")


def refuse_optimizer(config: TrainConfig, strategy: StrategyName, device: torch.device) -> None:
    """What an optimizer cannot do under a strategy, or on a device. Before anything is loaded."""
    name = config.optimizer
    if name == "muon" and not hasattr(torch.optim, "Muon"):
        raise UserError(f"train.optimizer muon: torch {torch.__version__} has no Muon: use torch 2.9 or later")
    if name == "muon" and strategy.startswith("zero"):
        raise UserError(
            f"train.optimizer muon: it needs whole matrices, and DeepSpeed ZeRO cuts weights into flat parts ({strategy}): "
            "use FSDP2, DDP or adamw"
        )
    if name == "adamw-8bit":
        if device.type != "cuda" or importlib.util.find_spec("bitsandbytes") is None:
            raise UserError("train.optimizer adamw-8bit: needs a CUDA GPU and `pip install bitsandbytes`: use adamw")
        if strategy == "fsdp2":
            raise UserError(
                "train.optimizer adamw-8bit: bitsandbytes cannot read FSDP2's sharded tensors: use DDP, ZeRO or adamw"
            )
    if config.ema is not None and strategy.startswith("zero"):
        raise UserError(
            f"train.ema: DeepSpeed ZeRO keeps weights where an average cannot follow ({strategy}): use FSDP2 or DDP"
        )


# Schedules: functions of the step alone, so that resuming is exact


def learning_rate(config: TrainConfig, step: int, total: int) -> float:
    """Linear warm-up, then the schedule: cosine and linear fall to `final_lr`, wsd in its last part only, constant never."""
    warm = max(1, round(config.warmup * total))
    if step < warm:
        return config.lr * (step + 1) / warm
    return config.lr * (config.final_lr + (1 - config.final_lr) * remaining(config, step, warm, total))


def remaining(config: TrainConfig, step: int, warm: int, total: int) -> float:
    """What is left of the rate's way down: 1 after the warm-up."""
    if config.schedule == "constant":
        return 1.0
    start = max(warm, round(total * (1 - config.decay))) if config.schedule == "wsd" else warm
    progress = min(max((step - start) / max(1, total - start), 0.0), 1.0)
    return 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress


def set_learning_rate(groups: Iterable[dict[str, Any]], value: float) -> None:
    """Into every group, by its scale."""
    for group in groups:
        group["lr"] = value * group["scale"]
