"""Medusa (arXiv 2401.10774): K heads that each guess one of the next tokens from the target's last state alone.

Head i: residual blocks x + silu(W x + b), W starting at zero, then an lm_head, which starts as the target's. All guesses are
made at once, and none knows what the others guess: a tree is the product of their first choices.

Medusa-2: `adapter` trains LoRA on the target as well, after the heads have learned alone for a while; the target is held to
what it said before (self-distillation), and the heads' loss comes in by a ramp.

Shapes: B texts, T packed tokens, P computed rows, K taps, k frontier nodes, D target width, W draft vocabulary.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor, nn

from headwright.data.batch import FeatureBatch, to_device
from headwright.data.rows import Rows, plan_rows
from headwright.data.target import Target, TargetSpec
from headwright.data.vocab import DraftVocab
from headwright.heads.adapter import Adapter, AdapterConfig
from headwright.heads.base import Context, Export, HeadLoss
from headwright.heads.chunked import METRICS, Task, Weights, chunked_loss, plan_pairs, rows_in_memory
from headwright.heads.draft_tree import Tree, TreeShape
from headwright.heads.fan import Fan, Steady
from headwright.heads.grow import grow
from headwright.heads.losses import choose_loss, mixture
from headwright.heads.medusa_export import export_medusa
from headwright.heads.stepwise import StepwiseConfig, shared_rows, step_metrics, untouched


@dataclass
class Config(StepwiseConfig):
    """Keys of Medusa heads."""

    kind: Literal["medusa"] = "medusa"
    steps: Annotated[int, "heads: how many tokens ahead are guessed", Ge(1)] = 4
    blocks: Annotated[int, "residual blocks of each head", Ge(1)] = 1
    bias: Annotated[bool, "of the residual blocks"] = True
    lm_head: Annotated[
        Literal["own", "shared"], "own: one for each head, starting as the target's; shared: the target's"
    ] = "own"
    adapter: Annotated[
        AdapterConfig | None, "LoRA on the target (Medusa-2); null: the target stays as it is (Medusa-1)"
    ] = None

    def choose_taps(self, layers: int, stored: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """The stream after the last layer."""
        return (layers,)


class ResBlock(nn.Module):
    """x + silu(W x + b)."""

    def __init__(self, width: int, bias: bool):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=bias)
        nn.init.zeros_(self.linear.weight)
        if bias:
            nn.init.zeros_(self.linear.bias)

    def forward(self, x_XD: Tensor) -> Tensor:
        return x_XD + F.silu(self.linear(x_XD))


class Head(Fan):
    """The trainable heads."""

    config: Config

    def __init__(self, config: Config, spec: TargetSpec, taps: tuple[int, ...], vocab: DraftVocab):
        super().__init__(config, spec, taps, vocab)
        width = spec.hidden_size
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResBlock(width, config.bias) for _ in range(config.blocks))) for _ in range(config.steps)
        )
        self.live_TD: Tensor | None = None  # the adapted target's states of the batch at hand
        self.everything: Tensor
        self.register_buffer("everything", torch.arange(spec.vocab_size), persistent=False)

    def attach(self, target: Target) -> None:
        """A place for the adapter in the target's layers."""
        super().attach(target)
        if self.config.adapter is not None:
            self.adapter = Adapter(self.config.adapter, target).to(target.device)

    def changes_target(self) -> dict[str, Any] | None:
        """The adapter."""
        return None if self.config.adapter is None else {"adapter": asdict(self.config.adapter)}

    def save_beside(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """The adapter in peft's format."""
        if self.config.adapter is not None:
            self.adapter.save(folder / "adapter", weights)

    def rate_of(self, name: str) -> float:
        """The adapter learns more slowly than the heads."""
        return self.config.adapter.rate if self.config.adapter and name.startswith("adapter.") else 1.0

    def loss(self, batch: FeatureBatch, target: Target) -> HeadLoss:
        """Medusa-1: the heads' loss. Medusa-2: first the same, then λ times that, of the adapted target's states, beside the
        distance of the adapted target from what it was.
        """
        if self.config.adapter is None:
            return super().loss(batch, target)
        if not self.adapter.joint(self.engine.progress):
            heads = super().loss(batch, target)
            return replace(heads, total=heads.total + untouched(self.adapter.parameters()))
        self.live_TD = target.packed(batch.ids_T, batch.segment_T, batch.position_T)
        try:
            heads = super().loss(batch, target)
        finally:
            live_TD, self.live_TD = self.live_TD, None
        kept, metrics = self.distance(batch, target, live_TD)
        strength = (
            self.adapter.strength(self.engine.progress) * self.config.step_weight
        )  # the paper counts heads from 1
        return HeadLoss(kept + strength * heads.total, heads.metrics | metrics)

    def distance(
        self, batch: FeatureBatch, target: Target, live_TD: Tensor
    ) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """Of the adapted target's next-token distributions from those that the features hold, over the whole vocabulary."""
        config, ids_V = self.config.adapter, self.everything
        assert config is not None
        plan, weight = plan_rows(batch, 1), shared_rows(target, ids_V).float()
        device = live_TD.device
        task = Task(
            plan_pairs(plan, rows_in_memory(weight, 1, self.engine.loss_mib)).to(device),
            lambda where: target.logits(batch.last_RD[where]),
            to_device(batch.logz_R, device),
            to_device(batch.argmax_R, device),
            mixture({choose_loss("kl"): config.distil, choose_loss("ce"): config.text}),
            Weights(),
        )
        rows_P = to_device(plan.rows_P, device)
        total, sums = chunked_loss(task, [weight], [live_TD[rows_P + 1].float()])
        return total, {f"target_{name}": pair for name, pair in zip(METRICS, step_metrics(sums, plan, batch).values())}

    def outputs(self, batch: FeatureBatch, target: Target, plan: Rows) -> list[Tensor]:
        """Each head's reading of the rows that reach it."""
        feature_PD = self.features(batch, target, plan)
        return [head(feature_PD[:count]) for head, count in zip(self.heads, plan.counts)]

    def features(self, batch: FeatureBatch, target: Target, plan: Rows) -> Tensor:
        """The target's last states [P, D]: stored ones, or those of the adapted target."""
        if self.live_TD is not None:
            return self.live_TD[plan.rows_P].to(self.dtype)
        if self.config.adapter is not None and not self.training:
            return target.packed(batch.ids_T, batch.segment_T, batch.position_T)[plan.rows_P].to(self.dtype)
        return target.final_norm(batch.taps_TKD[plan.rows_P, -1].to(self.dtype))

    def start(self, batch: int, slots: int) -> Steady:
        """No memory."""
        return Steady()

    @torch.inference_mode()
    def absorb(self, state: Steady, context: Context) -> Tensor:
        """The target's state at each text's last row [B, D]."""
        return context.final(context.last_BMD).to(self.dtype)

    @torch.inference_mode()
    def propose(self, state: Steady, context: Context, shape: TreeShape) -> Tree:
        """All heads at once; every node of a level has the same guesses below it."""
        feature_BD, weights = self.absorb(state, context), self.projections(context.target)
        levels = [
            (head(feature_BD) @ weights[min(i, len(weights) - 1)].T).float()
            for i, head in enumerate(self.heads[: shape.depth])
        ]
        following = iter(levels[1:])

        def step(tokens_Bk: Tensor, parents_Bk: Tensor) -> Tensor:
            return next(following)[:, None].expand(-1, tokens_Bk.shape[1], -1)

        return grow(shape, context, levels[0], step, self.ids_W)

    def export(self, engine: str) -> Export:
        """vllm: a chain of first guesses."""
        return export_medusa(self, engine)
