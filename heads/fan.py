"""Heads that stand side by side, one for each of the next tokens: Medusa and Hydra. D target width, W draft vocabulary."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwright.data.target import Target, TargetSpec
from headwright.data.vocab import DraftVocab
from headwright.heads.stepwise import SharedOrOwn, Stepwise


class Fan(Stepwise):
    """`heads`, made by the subclass, and an lm_head for each of them, or the target's for all."""

    heads: nn.ModuleList

    def __init__(self, config: Any, spec: TargetSpec, taps: tuple[int, ...], vocab: DraftVocab):
        super().__init__(config, spec, taps, vocab)
        own, width = config.lm_head == "own", spec.hidden_size
        self.lm_heads = nn.ModuleList(SharedOrOwn(own, width, vocab) for _ in range(config.steps if own else 1))
        self.deepest = config.steps

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next(self.heads.parameters()).dtype

    def initialise(self, target: Target) -> None:
        """Every lm_head starts as the target's."""
        for lm_head in self.projectors():
            lm_head.initialise(target, self.ids_W)

    def projectors(self) -> list[SharedOrOwn]:
        """One lm_head per step, or one for all."""
        return list(self.lm_heads)  # type: ignore[arg-type]

    def projections(self, target: Target) -> list[Tensor]:
        """Their rows."""
        return [lm_head.rows(target, self.ids_W) for lm_head in self.projectors()]


class Steady:
    """The state of a head that reads the last confirmed row alone."""

    def __init__(self) -> None:
        self.lengths: list[int] = []  # of rows that it keeps: none

    def put(self, row: int, other: Any) -> None:
        """Nothing to take over."""

    def select(self, rows: Sequence[int]) -> None:
        """Nothing to keep."""
