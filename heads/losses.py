"""Losses between the target's distribution p and the head's q, per row, and the weights of a rollout's steps.

Shapes: P rows, W draft vocabulary, I steps, H width. With α = Σ min(p, q) = 1 − TV(p, q), the acceptance probability of one
sampled draft:

    kl    Σ p log(p/q), whose gradient is that of the soft cross-entropy of EAGLE-3
    rkl   Σ q log(q/p)
    jsd   ½ KL(p‖m) + ½ KL(q‖m), m = ½ (p + q)
    tv    1 − α
    nla   −log α
    lk    λ·kl + (1−λ)·tv with λ = exp(−3α), detached (LK hybrid, arXiv 2602.23881): KL early, TV late
    ce    −log q of the target's first choice
    topk  −Σ p log q over the target's k first choices (HASS, arXiv 2408.15766)

Each has a plain form, of log q, for reading and for the tests, and a fast one, which gives ∂loss/∂logits in closed form.
Logarithms are taken of `LEAST` at the least: only the reverse KL of a p that underflowed to zero can tell, and an α below it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from headwright.configs import UserError

LEAST = torch.finfo(torch.float32).tiny
LossName = Literal["kl", "rkl", "jsd", "tv", "nla", "lk", "ce", "topk"]


@dataclass
class Taught:
    """The target's distributions p_PW, and Σ p log p of each."""

    p_PW: Tensor
    negentropy_P: Tensor

    def rows(self, index: Tensor | slice) -> "Taught":
        """Some rows."""
        return Taught(self.p_PW[index], self.negentropy_P[index])


@dataclass
class Guess:
    """The head's logits z_PW, their softmax q_PW (which a slope may overwrite), and z's maximum and log-sum-exp."""

    z_PW: Tensor
    q_PW: Tensor
    top_P: Tensor
    lse_P: Tensor

    @property
    def logq_PW(self) -> Tensor:
        """log q, also where q underflows."""
        return self.z_PW - self.lse_P[:, None]


@dataclass(frozen=True)
class Loss:
    """A loss of a row: `value` of p and log q, the plain form; `slope`: (value [P], ∂value/∂z [P, W])."""

    value: Callable[[Tensor, Tensor], Tensor]
    slope: Callable[[Taught, Guess], tuple[Tensor, Tensor]]


# Plain forms, of p [P, W] and log q [P, W]


def kl(probs_PW: Tensor, logq_PW: Tensor) -> Tensor:
    """Forward KL divergence [P]; zero-probability terms count nothing."""
    return (torch.xlogy(probs_PW, probs_PW) - probs_PW * logq_PW).sum(-1)


def rkl(probs_PW: Tensor, logq_PW: Tensor) -> Tensor:
    """Reverse KL divergence [P]."""
    return (logq_PW.exp() * (logq_PW - probs_PW.clamp_min(LEAST).log())).sum(-1)


def jsd(probs_PW: Tensor, logq_PW: Tensor) -> Tensor:
    """Jensen-Shannon divergence [P], in nats."""
    q_PW = logq_PW.exp()
    middle_PW = (0.5 * (probs_PW + q_PW)).clamp_min(LEAST).log()
    ours, theirs = q_PW * (logq_PW - middle_PW), torch.xlogy(probs_PW, probs_PW) - probs_PW * middle_PW
    return 0.5 * (ours + theirs).sum(-1)


def tv(probs_PW: Tensor, logq_PW: Tensor) -> Tensor:
    """Total variation distance [P]."""
    return 1 - acceptance(probs_PW, logq_PW)


def nla(probs_PW: Tensor, logq_PW: Tensor) -> Tensor:
    """Negative log-acceptance [P]."""
    return -acceptance(probs_PW, logq_PW).clamp_min(LEAST).log()


def lk(probs_PW: Tensor, logq_PW: Tensor) -> Tensor:
    """LK hybrid [P]."""
    blend = (-3 * acceptance(probs_PW, logq_PW).detach()).exp()
    return blend * kl(probs_PW, logq_PW) + (1 - blend) * tv(probs_PW, logq_PW)


def ce(probs_PW: Tensor, logq_PW: Tensor) -> Tensor:
    """Cross-entropy of the target's first choice [P]."""
    return -logq_PW.gather(-1, probs_PW.argmax(-1, keepdim=True))[:, 0]


def topk(count: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Cross-entropy over the target's `count` first choices [P]."""

    def value(probs_PW: Tensor, logq_PW: Tensor) -> Tensor:
        best = probs_PW.topk(min(count, probs_PW.shape[-1]), dim=-1)
        return -(best.values * logq_PW.gather(-1, best.indices)).sum(-1)

    return value


def acceptance(probs_PW: Tensor, logq_PW: Tensor) -> Tensor:
    """α = Σ min(p, q) [P]."""
    return torch.minimum(probs_PW, logq_PW.exp()).sum(-1)


def smooth_l1(guess_PH: Tensor, feature_PH: Tensor) -> Tensor:
    """Smooth-L1 distance of two features, the mean over their width [P] (feature regression of EAGLE-1, arXiv 2401.15077)."""
    apart = (guess_PH - feature_PH).abs()
    return torch.where(apart < 1, 0.5 * apart * apart, apart - 0.5).mean(-1)


# Fast forms. A loss f(q) has ∂f/∂z = q · (f' − Σ q f').


def kl_slope(taught: Taught, guess: Guess) -> tuple[Tensor, Tensor]:
    """Σp = 1, so the slope is q − p, and −Σ p log q is lse − p·z."""
    value = taught.negentropy_P - rowdot(taught.p_PW, guess.z_PW) + guess.lse_P
    return value, guess.q_PW.sub_(taught.p_PW)


def rkl_slope(taught: Taught, guess: Guess) -> tuple[Tensor, Tensor]:
    """f' = log(q/p) + 1; the mean of log(q/p) under q is the loss itself."""
    ratio = guess.logq_PW.sub_(taught.p_PW.clamp_min(LEAST).log_())
    value = rowdot(guess.q_PW, ratio)
    return value, ratio.sub_(value[:, None]).mul_(guess.q_PW)


def jsd_slope(taught: Taught, guess: Guess) -> tuple[Tensor, Tensor]:
    """f' = ½ log(q/m)."""
    middle = (taught.p_PW + guess.q_PW).mul_(0.5).clamp_min_(LEAST).log_()
    theirs = taught.negentropy_P - rowdot(taught.p_PW, middle)
    ratio = guess.logq_PW.sub_(middle)
    ours = rowdot(guess.q_PW, ratio)
    return (ours + theirs).mul_(0.5), ratio.sub_(ours[:, None]).mul_(guess.q_PW).mul_(0.5)


def tv_slope(taught: Taught, guess: Guess) -> tuple[Tensor, Tensor]:
    """f' = −1 where q < p, else 0."""
    alpha, slope = overlap(taught, guess)
    return 1 - alpha, slope


def overlap(taught: Taught, guess: Guess) -> tuple[Tensor, Tensor]:
    """α, as it is (1 − TV has lost a small one), and the slope of −α."""
    alpha = torch.minimum(taught.p_PW, guess.q_PW).sum(-1)
    inside = (guess.q_PW < taught.p_PW).to(taught.p_PW.dtype)
    share = rowdot(inside, guess.q_PW)
    return alpha, (share[:, None] - inside).mul_(guess.q_PW)


def nla_slope(taught: Taught, guess: Guess) -> tuple[Tensor, Tensor]:
    """The slope of TV over α."""
    alpha, slope = overlap(taught, guess)
    alpha.clamp_min_(LEAST)
    return -alpha.log(), slope.div_(alpha[:, None])


def lk_slope(taught: Taught, guess: Guess) -> tuple[Tensor, Tensor]:
    """The mixture's slope; its weight is a constant."""
    distance, near = tv_slope(taught, guess)
    blend = (-3 * (1 - distance)).exp_()
    value, far = kl_slope(taught, guess)
    return torch.lerp(distance, value, blend), near.lerp_(far, blend[:, None])


def ce_slope(taught: Taught, guess: Guess) -> tuple[Tensor, Tensor]:
    """q − 1 at the target's first choice, q elsewhere."""
    first = taught.p_PW.argmax(-1, keepdim=True)
    value = guess.lse_P - guess.z_PW.gather(-1, first)[:, 0]
    return value, guess.q_PW.scatter_add_(-1, first, guess.q_PW.new_full(first.shape, -1.0))


def topk_slope(count: int) -> Callable[[Taught, Guess], tuple[Tensor, Tensor]]:
    """s·q − p at the k first choices, s·q elsewhere; s is their mass."""

    def slope(taught: Taught, guess: Guess) -> tuple[Tensor, Tensor]:
        best = taught.p_PW.topk(min(count, taught.p_PW.shape[-1]), dim=-1)
        mass = best.values.sum(-1)
        value = guess.lse_P * mass - (best.values * guess.z_PW.gather(-1, best.indices)).sum(-1)
        return value, guess.q_PW.mul_(mass[:, None]).scatter_add_(-1, best.indices, -best.values)

    return slope


def rowdot(a_PW: Tensor, b_PW: Tensor) -> Tensor:
    """Σ a·b of each row [P]."""
    return torch.linalg.vecdot(a_PW, b_PW)


LOSSES: dict[str, Loss] = {
    "kl": Loss(kl, kl_slope),
    "rkl": Loss(rkl, rkl_slope),
    "jsd": Loss(jsd, jsd_slope),
    "tv": Loss(tv, tv_slope),
    "nla": Loss(nla, nla_slope),
    "lk": Loss(lk, lk_slope),
    "ce": Loss(ce, ce_slope),
}


def choose_loss(name: str, top_k: int = 10) -> Loss:
    """A loss by name."""
    if name == "topk":
        return Loss(topk(top_k), topk_slope(top_k))
    if name not in LOSSES:
        raise UserError(f"head.loss {name!r}: there are {', '.join([*LOSSES, 'topk'])}")
    return LOSSES[name]


def mixture(parts: Mapping[Loss, float]) -> Loss:
    """A weighted sum of losses. Raises UserError where there is none to sum."""
    kept = {loss: share for loss, share in parts.items() if share}
    if not kept or min(kept.values()) < 0:
        raise UserError("head.loss: give at least one loss, and positive weights")
    if list(kept.values()) == [1.0]:
        return next(iter(kept))

    def value(probs_PW: Tensor, logq_PW: Tensor) -> Tensor:
        return sum((share * loss.value(probs_PW, logq_PW) for loss, share in kept.items()), torch.zeros(()))

    def slope(taught: Taught, guess: Guess) -> tuple[Tensor, Tensor]:
        total, slopes = torch.zeros_like(guess.lse_P), torch.zeros_like(guess.z_PW)
        for loss, share in kept.items():
            found = loss.slope(taught, replace(guess, q_PW=guess.q_PW.clone()))
            total, slopes = total + share * found[0], slopes.add_(found[1], alpha=share)
        return total, slopes

    return Loss(value, slope)


# Weights of the steps


def decayed(right_PI: Tensor, base: float) -> Tensor:
    """base^i of each step [P, I]; 1 is uniform."""
    steps = torch.arange(right_PI.shape[1], dtype=right_PI.dtype, device=right_PI.device)
    return (base**steps).expand(right_PI.shape)


def dpace(right_PI: Tensor, bears_PI: Tensor, floor: float = 0.5) -> Tensor:
    """Weights of D-PACE (arXiv 2605.18810) [P, I]: w_j = Σ_{m≥j} Π_{i≤m} ((1−a)·r_i + a), over the steps that bear loss.

    r_i is the probability that the head gives to the right token at step i, a the floor. What is likely to be reached, and
    after which much follows, weighs most.
    """
    reached = (floor + (1 - floor) * right_PI).cumprod(1) * bears_PI
    return reached.flip(1).cumsum(1).flip(1)
