"""Optimizer and learning-rate schedule."""

import math
from collections.abc import Callable

import torch
from torch import nn

from headwright.configs.schema import TrainConfig


def make_optimizer(
    head: nn.Module, config: TrainConfig, rate_of: Callable[[str], float] = lambda name: 1.0
) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters; matrices decay, vectors do not. `rate_of`: a parameter's rate, in the run's."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, weight in head.named_parameters():
        if weight.requires_grad:
            decay = config.weight_decay if weight.ndim > 1 else 0.0
            groups.setdefault((decay, rate_of(name)), []).append(weight)
    made = [{"params": weights, "weight_decay": decay, "scale": scale} for (decay, scale), weights in groups.items()]
    return torch.optim.AdamW(made, lr=config.lr, betas=config.betas, fused=True)


def learning_rate(config: TrainConfig, step: int, total: int) -> float:
    """Linear warm-up, then a cosine down to `final_lr`. A function of the step alone, so that resuming is exact."""
    warm = max(1, round(config.warmup * total))
    if step < warm:
        return config.lr * (step + 1) / warm
    progress = (step - warm) / max(1, total - warm)
    floor = config.final_lr
    return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Into every group, by its scale."""
    for group in optimizer.param_groups:
        group["lr"] = value * group["scale"]
