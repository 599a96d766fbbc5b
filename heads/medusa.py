"""Medusa (arXiv 2401.10774): K heads that each guess one of the next tokens from the target's last state alone.

Head i: residual blocks x + silu(W x + b), W starting at zero, then an lm_head, which starts as the target's. All guesses are
made at once, and none knows what the others guess: a tree is the product of their first choices.

Shapes: B texts, T packed tokens, P computed rows, K taps, k frontier nodes, D target width, W draft vocabulary.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor, nn

from headwright.configs import UserError
from headwright.data.batch import FeatureBatch
from headwright.data.rows import Rows
from headwright.data.target import Target, TargetSpec
from headwright.data.vocab import DraftVocab
from headwright.heads.base import Context, Export
from headwright.heads.draft_tree import Tree, TreeShape
from headwright.heads.grow import grow
from headwright.heads.steady import Steady
from headwright.heads.stepwise import SharedOrOwn, Stepwise, StepwiseConfig


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


class Head(Stepwise):
    """The trainable heads."""

    config: Config

    def __init__(self, config: Config, spec: TargetSpec, taps: tuple[int, ...], vocab: DraftVocab):
        super().__init__(config, spec, taps, vocab)
        width, own = spec.hidden_size, config.lm_head == "own"
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResBlock(width, config.bias) for _ in range(config.blocks))) for _ in range(config.steps)
        )
        self.lm_heads = nn.ModuleList(SharedOrOwn(own, width, vocab) for _ in range(config.steps if own else 1))
        self.deepest = config.steps

    def initialise(self, target: Target) -> None:
        """Every lm_head starts as the target's."""
        for lm_head in self.lm_heads:
            lm_head.initialise(target, self.ids_W)

    def projections(self, target: Target) -> list[Tensor]:
        """One lm_head per step, or the target's for all."""
        return [lm_head.rows(target, self.ids_W) for lm_head in self.lm_heads]

    def outputs(self, batch: FeatureBatch, target: Target, plan: Rows) -> list[Tensor]:
        """Each head's reading of the rows that reach it."""
        taps_PD = batch.taps_TKD[plan.rows_P, -1].to(self.heads[0][0].linear.weight.dtype)
        feature_PD = target.final_norm(taps_PD)
        return [head(feature_PD[:count]) for head, count in zip(self.heads, plan.counts)]

    def start(self, batch: int, slots: int) -> Steady:
        """No memory."""
        return Steady()

    @torch.inference_mode()
    def absorb(self, state: Steady, context: Context) -> Tensor:
        """The target's state at each text's last row [B, D]."""
        return context.final(context.last_BMD).to(self.heads[0][0].linear.weight.dtype)

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
        """Not yet: see the message."""
        raise UserError(f"export.engines {engine!r}: Medusa heads are not exported yet")
