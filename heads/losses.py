"""Losses between the target's distribution p and the head's q, per row. Shapes: P rows, W draft vocabulary.

With α = Σ min(p, q) = 1 − TV(p, q), the acceptance probability of one sampled draft:

    kl   Σ p log(p/q), whose gradient is that of the soft cross-entropy of EAGLE-3
    tv   1 − α
    lk   λ·kl + (1−λ)·tv with λ = exp(−3α), detached (LK hybrid, arXiv 2602.23881): KL early, TV late
"""

from collections.abc import Callable

import torch
from torch import Tensor

from headwright.configs import UserError


def kl(probs_PW: Tensor, logq_PW: Tensor) -> Tensor:
    """Forward KL divergence [P]; zero-probability terms count nothing."""
    return (torch.xlogy(probs_PW, probs_PW) - probs_PW * logq_PW).sum(-1)


def tv(probs_PW: Tensor, logq_PW: Tensor) -> Tensor:
    """Total variation distance [P]."""
    return 1 - acceptance(probs_PW, logq_PW)


def lk(probs_PW: Tensor, logq_PW: Tensor) -> Tensor:
    """LK hybrid [P]."""
    blend = (-3 * acceptance(probs_PW, logq_PW).detach()).exp()
    return blend * kl(probs_PW, logq_PW) + (1 - blend) * tv(probs_PW, logq_PW)


def acceptance(probs_PW: Tensor, logq_PW: Tensor) -> Tensor:
    """α = Σ min(p, q) [P]."""
    return torch.minimum(probs_PW, logq_PW.exp()).sum(-1)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"kl": kl, "tv": tv, "lk": lk}


def choose_loss(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """A loss by name."""
    if name not in LOSSES:
        raise UserError(f"head.loss {name!r}: there are {', '.join(LOSSES)}")
    return LOSSES[name]
