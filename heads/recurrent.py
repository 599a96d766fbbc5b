"""Heads that run decoder layers over a cache and read their own output: EAGLE and MTP.

Shapes: B rows, M new rows, k frontier nodes, T packed tokens, C context rows, K taps, D target width, H head width, W draft
vocabulary.
"""

from functools import partial

import torch
from torch import Tensor

from headwright.data.batch import FeatureBatch
from headwright.data.cache import KVCache
from headwright.data.rows import Rows
from headwright.data.target import Target
from headwright.heads.base import Context
from headwright.heads.draft_tree import Tree, TreeShape
from headwright.heads.grow import Frontier, grow
from headwright.heads.layers import attend
from headwright.heads.stepwise import SharedOrOwn, Stepwise
from headwright.heads.ttt import Entry, PlainLayer, rollout


class Recurrent(Stepwise):
    """A head with `stack`, `lm_head` and `read`; `entry`, `feed`, `ready` and `window` where it differs from EAGLE-3."""

    lm_head: SharedOrOwn
    entry: Entry | None = None  # how token and feature become one stream, for heads whose layers read one
    window: int | None = None  # keys that a row sees, its own included

    @property
    def stack(self) -> list[PlainLayer]:
        """The layers."""
        raise NotImplementedError

    def read(self, taps_XKD: Tensor, target: Target) -> Tensor:
        """The target's states → the feature of the first step [..., H]."""
        raise NotImplementedError

    def feed(self, hidden_XH: Tensor) -> Tensor:
        """What the next step reads of an output."""
        return hidden_XH

    def ready(self, hidden_XH: Tensor) -> Tensor:
        """What the lm_head reads of an output."""
        return hidden_XH

    def disturb(self, feature_CH: Tensor, batch: FeatureBatch, plan: Rows) -> Tensor:
        """The features that training reads."""
        return feature_CH

    def embed(self, target: Target, ids_X: Tensor) -> Tensor:
        """Token embeddings."""
        return target.embed(ids_X)

    def read_context(self, context: Context) -> Tensor:
        """`read`, of the rows that the target has confirmed."""
        return self.read(context.taps_BMKD, context.target)

    # Training

    def outputs(self, batch: FeatureBatch, target: Target, plan: Rows) -> list[Tensor]:
        """The lm_head's inputs at each step."""
        return [self.ready(output) for output in self.rollout(batch, target, plan)]

    def projections(self, target: Target) -> list[Tensor]:
        """One lm_head for all steps."""
        return [self.lm_head.rows(target, self.ids_W)]

    def rollout(self, batch: FeatureBatch, target: Target, plan: Rows) -> list[Tensor]:
        """Outputs of every step, of the rows that are computed."""
        taps = batch.taps_TKD
        if len(plan.context_C) < len(taps):
            taps = taps[plan.context_C]
        feature_CH = self.disturb(self.read(taps.to(self.dtype), target), batch, plan)
        embed = partial(self.embed, target)
        return rollout(self.stack, embed, feature_CH, plan, self.engine.recompute, self.entry, self.feed, self.window)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.stack[0].self_attn.q_proj.weight.dtype

    # Drafting

    def logits(self, hidden_XH: Tensor, target: Target) -> Tensor:
        """Logits over the draft vocabulary [..., W], in fp32: paths are compared by sums of their log-softmax."""
        return (self.ready(hidden_XH) @ self.lm_head.rows(target, self.ids_W).T).float()

    def start(self, batch: int, slots: int) -> KVCache:
        """The head's own cache: a slot per token."""
        return KVCache(len(self.stack), batch, slots, self.ids_W.device)

    @torch.inference_mode()
    def absorb(self, state: KVCache, context: Context) -> Tensor:
        """Confirmed rows into the cache; the output [B, 1, H] of each text's last one."""
        feature_BMH = self.read_context(context)
        new = feature_BMH.shape[1]
        state.make_room(new)
        embedding_BMH = self.embed(context.target, context.tokens_BM)
        mask = state.seen(new) if self.window is None else state.visible(new)
        hidden_BMH = self.run(state, embedding_BMH, feature_BMH, state.next_slots(new), mask)
        state.advance(context.counts)
        return context.final(hidden_BMH)[:, None]

    @torch.inference_mode()
    def propose(self, state: KVCache, context: Context, shape: TreeShape) -> Tree:
        """Take in the rows that the target has confirmed, then draft below the root."""
        drafting = Drafting(self, state, context.target, self.absorb(state, context), shape.rows)
        first_BW = self.logits(drafting.hidden_BkH[:, 0], context.target)
        tree = grow(shape, context, first_BW, drafting.step, self.ids_W)
        drafting.frontier.forget()
        return tree

    def run(self, cache: KVCache, embedding: Tensor, feature: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """The layers on new rows [B, M, H] with a cache; the caller advances it."""
        embedding = embedding.to(feature.dtype)  # a half-precision target's table under a head in fp32
        if mask is not None and self.window is not None:
            mask = self.near(mask, positions, self.window)
        if self.entry:
            feature = self.entry.join(self.entry.token(embedding), feature, positions)
        for depth, layer in enumerate(self.stack):
            mixed = layer.mix(embedding, feature) if depth == 0 else layer.normed(feature)
            keys, values = layer.self_attn.keys_values(mixed, positions)
            keys, values = cache.write(depth, keys.transpose(1, 2), values.transpose(1, 2))
            attended = attend(layer.self_attn.query(mixed, positions), keys, values, mask)
            feature = layer.finish(feature, attended)
        return feature

    @staticmethod
    def near(mask_BNS: Tensor, positions_BN: Tensor, window: int) -> Tensor:
        """The slots that are seen, cut to the window. A draft's own slots lie within it: it is deeper than any draft."""
        slots_S = torch.arange(mask_BNS.shape[-1], device=mask_BNS.device)
        return mask_BNS & (slots_S > positions_BN[..., None] - window)


class Drafting:
    """One draft: each new node reads its parent's output."""

    def __init__(self, head: Recurrent, cache: KVCache, target: Target, hidden_B1H: Tensor, rows: int):
        self.head, self.target, self.hidden_BkH = head, target, hidden_B1H
        self.frontier = Frontier(cache, rows)

    def step(self, tokens_Bk: Tensor, parents_Bk: Tensor) -> Tensor:
        """Run the head on a new frontier."""
        hidden_BkH = self.hidden_BkH.gather(1, parents_Bk[..., None].expand(-1, -1, self.hidden_BkH.shape[2]))
        with self.frontier.level(parents_Bk) as (positions_Bk, mask_BkS):
            embedding_BkH, cache = self.head.embed(self.target, tokens_Bk), self.frontier.cache
            self.hidden_BkH = self.head.run(cache, embedding_BkH, self.head.feed(hidden_BkH), positions_Bk, mask_BkS)
        return self.head.logits(self.hidden_BkH, self.target)
