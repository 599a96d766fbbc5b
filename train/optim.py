"""Optimizer and learning-rate schedule."""

import math

import torch
from torch import nn

from headwright.configs.schema import TrainConfig


def make_optimizer(head: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW over the trainable parameters; matrices decay, vectors do not."""
    trainable = [weight for weight in head.parameters() if weight.requires_grad]
    groups = [
        {"params": [weight for weight in trainable if weight.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [weight for weight in trainable if weight.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


def learning_rate(config: TrainConfig, step: int, total: int) -> float:
    """Linear warm-up, then a cosine down to `final_lr`. A function of the step alone, so that resuming is exact."""
    warm = max(1, round(config.warmup * total))
    if step < warm:
        return config.lr * (step + 1) / warm
    progress = (step - warm) / max(1, total - warm)
    floor = config.final_lr
    return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Into every group."""
    for group in optimizer.param_groups:
        group["lr"] = value
