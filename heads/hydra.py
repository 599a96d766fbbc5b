"""Hydra (arXiv 2402.05109): heads that know what the heads before them guessed.

Head i reads c = [h ; e_0 ; …; e_i]: the target's state at a row, the token after it, and the i tokens guessed since, each by
its embedding. x = R c + silu(W c + b), residual blocks, lm_head. R starts by picking out h and W at zero, so that every head
starts as the target's own next-token guess.

Hydra++: `prefix` puts a decoder layer over the target's states in front, run once per confirmed row (the authors' code has a
norm after it, which would take the heads off that start: there is none here); deeper heads; the target as teacher.

Shapes: B texts, C context rows, P computed rows, k frontier nodes, D target width, W draft vocabulary.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, Le
from torch import Tensor, nn

from headwright.configs import UserError
from headwright.data.batch import FeatureBatch
from headwright.data.cache import KVCache
from headwright.data.rows import Rows
from headwright.data.target import Target, TargetSpec
from headwright.data.vocab import DraftVocab
from headwright.heads.base import Context, Export
from headwright.heads.draft_tree import Tree, TreeShape
from headwright.heads.fan import Fan, Steady
from headwright.heads.grow import grow
from headwright.heads.layers import Block, Sizes, attend
from headwright.heads.medusa import ResBlock
from headwright.heads.stepwise import StepwiseConfig
from headwright.heads.ttt import context_outputs


@dataclass
class Config(StepwiseConfig):
    """Keys of Hydra heads."""

    kind: Literal["hydra"] = "hydra"
    steps: Annotated[int, "heads: how many tokens ahead are guessed", Ge(1)] = 4
    layers: Annotated[
        int, "layers of each head's MLP, the one that reads state and tokens included; Hydra++: 4", Ge(1)
    ] = 1
    prefix: Annotated[bool, "a decoder layer over the target's states in front of all heads (Hydra++)"] = False
    dropout: Annotated[float, "of what a head's layers and its lm_head read, while it is trained", Ge(0), Le(1)] = 0.0
    lm_head: Annotated[
        Literal["own", "shared"], "own: one for each head, starting as the target's; shared: the target's"
    ] = "own"

    def choose_taps(self, layers: int, stored: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """The stream after the last layer."""
        return (layers,)


class HydraHead(nn.Module):
    """One head."""

    def __init__(self, width: int, tokens: int, layers: int, dropout: float):
        super().__init__()
        self.enter = nn.Linear((1 + tokens) * width, width)
        nn.init.zeros_(self.enter.weight)
        nn.init.zeros_(self.enter.bias)
        self.residual = nn.Linear((1 + tokens) * width, width, bias=False)
        nn.init.zeros_(self.residual.weight)
        nn.init.eye_(self.residual.weight[:, :width])
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(ResBlock(width, True) for _ in range(layers - 1))

    def forward(self, feature_XD: Tensor, path_XMD: Tensor) -> Tensor:
        """What the lm_head reads, from the state and the tokens since."""
        read = self.drop(torch.cat([feature_XD[..., None, :], path_XMD], -2).flatten(-2))
        out_XD: Tensor = self.residual(read) + F.silu(self.enter(read))
        for block in self.blocks:
            out_XD = block(self.drop(out_XD))
        return self.drop(out_XD)


class Head(Fan):
    """The trainable heads."""

    config: Config

    def __init__(self, config: Config, spec: TargetSpec, taps: tuple[int, ...], vocab: DraftVocab):
        super().__init__(config, spec, taps, vocab)
        width = spec.hidden_size
        self.heads = nn.ModuleList(HydraHead(width, i + 1, config.layers, config.dropout) for i in range(config.steps))
        if config.prefix:
            self.prefix = Block(Sizes.of(spec))

    def outputs(self, batch: FeatureBatch, target: Target, plan: Rows) -> list[Tensor]:
        """Each head's reading of the rows that reach it, with the text's own tokens as the path."""
        feature_PD = self.features(batch, target, plan)
        embedding_UD = target.embed(plan.tokens_U).to(feature_PD.dtype)
        found = []
        for i, (head, count) in enumerate(zip(self.heads, plan.counts)):
            path_NMD = embedding_UD[plan.reads_PI[:count, : i + 1]]
            found.append(head(feature_PD[:count], path_NMD))
        return found

    def features(self, batch: FeatureBatch, target: Target, plan: Rows) -> Tensor:
        """What the heads read of the target [P, D]."""
        if not self.config.prefix:
            return target.final_norm(batch.taps_TKD[plan.rows_P, -1].to(self.dtype))
        context_CD = target.final_norm(batch.taps_TKD[plan.context_C, -1].to(self.dtype))
        return context_outputs([self.prefix], context_CD, plan)

    def start(self, batch: int, slots: int) -> KVCache | Steady:
        """The prefix layer's cache, where there is one."""
        return KVCache(1, batch, slots, self.ids_W.device) if self.config.prefix else Steady()

    @torch.inference_mode()
    def absorb(self, state: KVCache | Steady, context: Context) -> Tensor:
        """What the heads read at each text's last row [B, D]."""
        last_BMD = context.last_BMD.to(self.dtype)
        if isinstance(state, Steady):
            return context.final(last_BMD)
        new, layer = last_BMD.shape[1], self.prefix
        state.make_room(new)
        positions, mask, normed = state.next_slots(new), state.seen(new), layer.normed(last_BMD)
        keys, values = layer.self_attn.keys_values(normed, positions)
        keys, values = state.write(0, keys.transpose(1, 2), values.transpose(1, 2))
        out_BMD = layer.finish(last_BMD, attend(layer.self_attn.query(normed, positions), keys, values, mask))
        state.advance(context.counts)
        return context.final(out_BMD)

    @torch.inference_mode()
    def propose(self, state: KVCache | Steady, context: Context, shape: TreeShape) -> Tree:
        """Level by level: each node's head reads the tokens on its path."""
        feature_BD, weights = self.absorb(state, context), self.projections(context.target)
        path_BkMD = context.target.embed(context.root_B).to(self.dtype)[:, None, None]

        def guess(path_BkMD: Tensor) -> Tensor:
            i, count = path_BkMD.shape[2] - 1, path_BkMD.shape[1]
            read_BkD = self.heads[i](feature_BD[:, None].expand(-1, count, -1), path_BkMD)
            return (read_BkD @ weights[min(i, len(weights) - 1)].T).float()

        def step(tokens_Bk: Tensor, parents_Bk: Tensor) -> Tensor:
            nonlocal path_BkMD
            index = parents_Bk[..., None, None].expand(-1, -1, *path_BkMD.shape[2:])
            own_Bk1D = context.target.embed(tokens_Bk).to(self.dtype)[:, :, None]
            path_BkMD = torch.cat([path_BkMD.gather(1, index), own_Bk1D], 2)
            return guess(path_BkMD)

        return grow(shape, context, guess(path_BkMD)[:, 0], step, self.ids_W)

    def export(self, engine: str) -> Export:
        """No engine serves Hydra heads."""
        raise UserError(
            f"export.engines {engine!r}: no engine serves Hydra heads; EAGLE-3 and MTP heads, which also know their own "
            "guesses, are served"
        )
