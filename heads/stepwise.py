"""Heads that guess step by step: what their lm_head reads at each step of a rollout is all that they must say.

Loss, metrics, agreement and ranks follow from it. Shapes: T packed tokens, P computed rows, R positions of the target, I steps,
H head width, W draft vocabulary.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor, nn

from headwright.configs import UserError
from headwright.data.batch import FeatureBatch, to_device
from headwright.data.rows import Rows, plan_rows
from headwright.data.target import Target, TargetSpec
from headwright.data.vocab import DraftVocab
from headwright.heads.base import DraftHead, HeadLoss
from headwright.heads.chunked import (
    METRICS,
    Task,
    Weights,
    chunked_loss,
    first_choices,
    plan_pairs,
    ranks_of,
    rows_in_memory,
)
from headwright.heads.losses import LossName, choose_loss, mixture


@dataclass
class StepwiseConfig:
    """Keys of every head that guesses step by step."""

    steps: Annotated[int, "length of the rollout: how many tokens ahead the head learns", Ge(1)] = 3
    curriculum: Annotated[
        float,
        "share of the training in which the rollout grows from 1 to `steps`; 0: whole from the start",
        Ge(0),
        Le(1),
    ] = 0.0
    step_weights: Annotated[
        Literal["decay", "dpace"], "of the steps: powers of step_weight, or D-PACE (what is likely to be reached)"
    ] = "decay"
    step_weight: Annotated[float, "decay: weight of step i is step_weight**i; 1 is uniform", Gt(0), Le(1)] = 0.8
    dpace_floor: Annotated[float, "dpace: the least probability with which a step counts as passed", Ge(0), Le(1)] = 0.5
    loss: Annotated[
        LossName | dict[LossName, float],
        "kl (soft cross-entropy); rkl: reverse; jsd; tv (1 - acceptance); nla (-log acceptance); lk: kl early, tv late; "
        "ce: of the target's first choice; topk: soft cross-entropy over its first choices; or weights of several: "
        "{kl: 0.1, topk: 1}",
    ] = "kl"
    loss_top_k: Annotated[int, "topk: how many", Ge(1)] = 10
    first_draft: Annotated[
        bool, "learn the first draft of each answer, which is what serving asks for first; false: as peers mask it"
    ] = True
    out_of_vocab: Annotated[
        Literal["drop", "renormalise"],
        "rows where the target's first choice is outside the draft vocabulary: no loss, or loss on the rest of the mass",
    ] = "drop"


class Stepwise(DraftHead):
    """A head with `outputs` and `projections`."""

    config: Any

    def __init__(self, config: Any, spec: TargetSpec, taps: tuple[int, ...], vocab: DraftVocab):
        super().__init__(config, spec, taps, vocab)
        mix = config.loss if isinstance(config.loss, dict) else {config.loss: 1.0}
        self.measure = mixture({choose_loss(name, config.loss_top_k): share for name, share in mix.items()})
        self.weights = Weights(config.step_weight, config.dpace_floor if config.step_weights == "dpace" else None)

    @property
    def lookahead(self) -> int:
        """Row t of step i predicts x_{t+2+i}."""
        return int(self.config.steps) + 1

    def outputs(self, batch: FeatureBatch, target: Target, plan: Rows) -> list[Tensor]:
        """What the lm_head reads at each step, [counts[i], H]."""
        raise NotImplementedError

    def projections(self, target: Target) -> list[Tensor]:
        """The lm_head's rows of the draft vocabulary [W, H]: one for all steps, or one per step."""
        raise NotImplementedError

    def extra_loss(
        self, batch: FeatureBatch, target: Target, plan: Rows, outputs: list[Tensor]
    ) -> tuple[Tensor | None, dict[str, tuple[Tensor, Tensor]]]:
        """A further loss of the same rows, and its metrics."""
        return None, {}

    def steps_now(self) -> int:
        """Length of the rollout at this point of the training."""
        steps, share = int(self.config.steps), self.config.curriculum
        if not share:
            return steps
        return min(steps, 1 + int(self.engine.progress / share * steps))

    def loss(self, batch: FeatureBatch, target: Target) -> HeadLoss:
        """Σ_i weight_i Σ_rows loss(p, q_i), with per-step metrics.

        loss_i: mean loss; alpha_i: Σ min(p, q), the acceptance of a sampled draft; agree_i: head's and target's first
        choices are the same. What the head cannot say counts as a miss in both. Rows that are left out (out_of_vocab,
        first_draft) still count in the run's normaliser: it is that of the text, whatever a head makes of it.
        """
        first_R = self.choices_V[batch.argmax_R]
        steps = self.steps_now()
        if not self.config.first_draft:
            batch = replace(batch, learn_T=batch.learn_T & batch.mask_T)
        plan = plan_rows(batch, steps, first_R >= 0 if self.config.out_of_vocab == "drop" else None)
        device = batch.last_RD.device
        moved = plan.to(device)
        outputs = self.outputs(batch, target, moved)
        weights = self.projections(target)
        task = Task(
            plan_pairs(plan, rows_in_memory(weights[0], steps, self.engine.loss_mib)).to(device),
            lambda where: target.logits(batch.last_RD[where], self.ids_W),
            to_device(batch.logz_R, device),
            to_device(first_R, device),
            self.measure,
            self.weights,
        )
        total, sums = chunked_loss(task, weights[:steps], outputs)
        extra, metrics = self.extra_loss(batch, target, moved, outputs)
        if steps < self.config.steps or not plan.counts[-1]:
            total = total + untouched(self.parameters())
        return HeadLoss(total if extra is None else total + extra, step_metrics(sums, plan, batch) | metrics)

    def guesses(self, batch: FeatureBatch, target: Target, steps: int) -> tuple[Rows, list[tuple[Tensor, Tensor]]]:
        """The plan on the host, and (the lm_head's input, its weight) of each step."""
        plan = plan_rows(batch, steps)
        outputs = self.outputs(batch, target, plan.to(batch.last_RD.device))
        weights = self.projections(target)
        return plan, [(output, weights[min(i, len(weights) - 1)]) for i, output in enumerate(outputs)]

    @torch.no_grad()
    def agreement(self, batch: FeatureBatch, target: Target, steps: int) -> Tensor:
        """Greedy guesses against the text, [T, steps], on the host."""
        plan, found = self.guesses(batch, target, min(steps, self.deepest or steps))
        right_TI = torch.zeros(len(batch.ids_T), steps, dtype=torch.bool)
        for i, (output, weight) in enumerate(found):
            said = self.vocab.ids_W[first_choices(output, weight, self.engine.loss_mib).cpu()]
            count = len(said)
            right_TI[plan.rows_P[:count], i] = (said == plan.labels_PI[:count, i]) & plan.bears_PI[:count, i]
        return right_TI

    @torch.no_grad()
    def ranks(self, batch: FeatureBatch, target: Target, steps: int) -> Tensor:
        """Where the text's token stands among the guesses, [T, steps], on the host."""
        plan, found = self.guesses(batch, target, min(steps, self.deepest or steps))
        ranks_TI = torch.full((len(batch.ids_T), steps), -1)
        for i, (output, weight) in enumerate(found):
            count = len(output)
            label_P = self.choices_V[plan.labels_PI[:count, i]]
            rank_P = ranks_of(output, weight, label_P.clamp_min(0), self.engine.loss_mib)
            known_P = plan.bears_PI[:count, i] & (label_P >= 0)
            ranks_TI[plan.rows_P[:count], i] = torch.where(known_P, rank_P.cpu(), -1)
        return ranks_TI


def untouched(weights: Iterable[Tensor]) -> Tensor:
    """Zero, which depends on all of them: data-parallel training wants a gradient of every parameter in every step."""
    return torch.stack([weight.sum() for weight in weights if weight.requires_grad]).sum() * 0.0


def step_metrics(sums: Tensor, plan: Rows, batch: FeatureBatch) -> dict[str, tuple[Tensor, Tensor]]:
    """Numerators and denominators by name and step: the loss over the rows that bear it, the others over all that might."""
    device = sums.device
    kept = to_device(plan.bears_PI.sum(0).to(sums.dtype), device)
    might = to_device(batch.loss_masks(plan.steps).sum(0).to(sums.dtype), device)
    bottoms = {"loss": kept, "alpha": might, "agree": might}
    return {
        f"{name}_{i}": (sums[place, i], bottoms[name][i])
        for i in range(plan.steps)
        for place, name in enumerate(METRICS)
    }


class SharedOrOwn(nn.Module):
    """An lm_head: the target's frozen rows of the draft vocabulary, or the head's own, which start as these.

    The target's own soft cap is not applied to a head's logits (no engine does); its scale is.
    """

    def __init__(self, own: bool, width: int, vocab: DraftVocab):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(len(vocab), width)) if own else None
        if self.weight is not None:
            nn.init.normal_(self.weight, std=width**-0.5)

    def rows(self, target: Target, ids_W: Tensor) -> Tensor:
        """Its weight [W, H]."""
        return shared_rows(target, ids_W) if self.weight is None else self.weight

    @torch.no_grad()
    def initialise(self, target: Target, ids_W: Tensor) -> None:
        """Start as the target's rows."""
        if self.weight is not None and self.weight.shape[1] == target.spec.hidden_size:
            self.weight.copy_(shared_rows(target, ids_W))


def shared_rows(target: Target, ids_W: Tensor) -> Tensor:
    """The target's lm_head rows, scaled as its logits are. Raises UserError where a head cannot share them."""
    weight, bias = target.lm_head_rows(ids_W.to(target.device))
    if bias is not None:
        raise UserError(
            f"{target.spec.name}: its lm_head has a bias, so that heads cannot share it: set head.lm_head to own"
        )
    return weight if target.logit_scale == 1.0 else weight * target.logit_scale
