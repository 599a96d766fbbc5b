"""The training-time test of EAGLE-3 (arXiv 2503.01840): a rollout in which the head reads its own output.

Shapes: T packed tokens, C context rows, P computed rows, N rows of a step, I steps, H head width, Q query heads, G key-value
heads, E head width.

In a rollout, row t of step i attends to the step-0 keys up to its own position and to its own keys of steps 1 … i: those are
the entries that serving would find in its cache. So attention is causal over step-0 keys plus a diagonal of i single keys
(attention.py).

`rollout` computes what the loss needs and nothing else (data/rows.py): loss-bearing rows, and the step-0 keys and values of
their context; in a head of several layers, all that the last layer's keys need of the layers below, at step 0 only. The token
half of queries, keys and values is projected once for all steps. `rollout_reference` computes every row with one dense mask
over all T·i keys, beside the paper; the tests hold the two together.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headwright.configs import UserError
from headwright.data.batch import FeatureBatch, shift
from headwright.data.rows import Rows, Spans
from headwright.heads.attention import rollout_attention
from headwright.heads.layers import Attention

Embed = Callable[[Tensor], Tensor]
Feed = Callable[[Tensor], Tensor]
Pair = tuple[Tensor, Tensor]


class Entry(Protocol):
    """How token and feature become the one stream that a head's layers read (EAGLE-1, MTP)."""

    def token(self, embedding_XD: Tensor) -> Tensor:
        """The token's share of the stream."""
        ...

    def join(self, token_XH: Tensor, feature_XH: Tensor, positions_X: Tensor) -> Tensor:
        """The stream."""
        ...


class RolloutLayer(Protocol):
    """A decoder layer. Its attention reads [normed embedding ; normed feature], or the normed feature alone."""

    self_attn: Attention

    def embedded(self, embedding_XH: Tensor) -> Tensor:
        """The token half of the attention's input. Asked of the first layer only."""
        ...

    def normed(self, feature_XH: Tensor) -> Tensor:
        """The feature half."""
        ...

    def finish(self, feature_XH: Tensor, mixed_XQE: Tensor) -> Tensor:
        """The layer's output from its input feature and the attention's result."""
        ...


def unchanged(feature_XH: Tensor) -> Tensor:
    """What most heads hand to their next step: their output as it is."""
    return feature_XH


def rollout(
    layers: Sequence[RolloutLayer],
    embed: Embed,
    feature_CH: Tensor,
    rows: Rows,
    recompute: bool = False,
    entry: Entry | None = None,
    feed: Feed = unchanged,
    window: int | None = None,
) -> list[Tensor]:
    """Outputs of the last layer at each step, [counts[i], H], from the features of the context rows.

    `recompute`: keep the steps' outputs only, and run each step again in the backward pass. `entry`: for heads whose layers
    read one stream. `feed`: what the next step reads of an output. `window`: keys that a row may see, its own included.
    """
    if window is not None and rows.steps > window:
        raise UserError(
            f"a rollout of {rows.steps} steps in a window of {window} tokens: it would not see all of itself"
        )
    run = Rollout(layers, embed, feature_CH, rows, entry, feed, window)
    outputs = [run.first(feature_CH)]
    for step in range(1, rows.steps):
        before = outputs[-1][: rows.counts[step]]
        if recompute and torch.is_grad_enabled():
            output, *own = checkpoint(run.later, step, before, use_reentrant=False)
        else:
            output, *own = run.later(step, before)
        run.keep(own)
        outputs.append(output)
    return outputs


class Rollout:
    """The state of a rollout: token halves, step-0 keys and values of each layer, and the rows' own of later steps."""

    def __init__(
        self,
        layers: Sequence[RolloutLayer],
        embed: Embed,
        feature_CH: Tensor,
        rows: Rows,
        entry: Entry | None,
        feed: Feed,
        window: int | None,
    ):
        self.layers, self.rows, self.entry, self.feed, self.window = layers, rows, entry, feed, window
        embedding_UD = embed(rows.tokens_U).to(feature_CH.dtype)
        # width of the token half
        self.cut = 0 if entry else layers[0].self_attn.q_proj.in_features - feature_CH.shape[-1]
        # below the last layer, all context rows ask at step 0
        deep = len(layers) > 1
        self.asks_PI, self.asks_C = (rows.reads_PI if deep else rows.asks_PI), rows.reads_C
        if entry:
            self.token_UH = entry.token(embedding_UD)
        else:
            token_UH = layers[0].embedded(embedding_UD)
            project, half = layers[0].self_attn.project, slice(self.cut)
            self.token_keys, self.token_values = project(token_UH, "kv", half)
            (self.token_queries,) = project(token_UH if deep else token_UH[rows.asks_X], "q", half)
        self.context: list[Pair] = []
        self.own: list[list[Pair]] = [[] for _ in layers]

    def stream(self, feature_NH: Tensor, reads_N: Tensor, positions_N: Tensor) -> Tensor:
        """What the layers read."""
        return self.entry.join(self.token_UH[reads_N], feature_NH, positions_N) if self.entry else feature_NH

    def first(self, feature_CH: Tensor) -> Tensor:
        """Step 0: keys and values of the whole context, and the rows' outputs."""
        rows = self.rows
        feature_CH = self.stream(feature_CH, rows.reads_C, rows.position_C)
        for depth, layer in enumerate(self.layers):
            last = depth == len(self.layers) - 1
            normed_CH = layer.normed(feature_CH)
            keys_CGE, values_CGE = self.keys_values(depth, normed_CH, rows.reads_C, rows.position_C)
            self.context.append((keys_CGE, values_CGE))
            picked = rows.place_P if last else slice(None)
            asks, positions = (self.asks_PI[:, 0], rows.position_P) if last else (self.asks_C, rows.position_C)
            query = self.query(depth, normed_CH[picked], asks, positions)
            spans = rows.spans[0] if last else rows.everything
            feature_CH = layer.finish(feature_CH[picked], self.attend(query, depth, spans, ()))
        return feature_CH

    def later(self, step: int, feature_NH: Tensor) -> list[Tensor]:
        """A later step: its output, and the rows' own keys and values of each layer. May be run twice: it changes nothing."""
        rows, count = self.rows, len(feature_NH)
        made: list[Tensor] = []
        positions = rows.position_P[:count] + step
        feature_NH = self.stream(self.feed(feature_NH), rows.reads_PI[:count, step], positions)
        for depth, layer in enumerate(self.layers):
            normed_NH = layer.normed(feature_NH)
            own = self.keys_values(depth, normed_NH, rows.reads_PI[:count, step], positions)
            query = self.query(depth, normed_NH, self.asks_PI[:count, step], positions)
            mixed = self.attend(query, depth, rows.spans[step], [*self.own[depth][: step - 1], own])
            feature_NH = layer.finish(feature_NH, mixed)
            made += own
        return [feature_NH, *made]

    def attend(self, query_NQE: Tensor, depth: int, spans: Spans, own: Sequence[Pair]) -> Tensor:
        """Over a layer's step-0 keys and the rows' own later ones."""
        window = None if self.window is None else self.window - len(own)
        return rollout_attention(query_NQE, *self.context[depth], spans, own, window)

    def keep(self, made: Sequence[Tensor]) -> None:
        """Own keys and values for the steps to come."""
        for depth, own in enumerate(self.own):
            own.append((made[2 * depth], made[2 * depth + 1]))

    def keys_values(self, depth: int, normed_NH: Tensor, reads_N: Tensor, positions_N: Tensor) -> Pair:
        """Rotated keys and values [N, G, E]; the first layer adds the token halves."""
        attention = self.layers[depth].self_attn
        keys, values = attention.project(normed_NH, "kv", slice(self.cut if depth == 0 else 0, None))
        if depth == 0 and self.cut:
            keys, values = keys.add_(self.token_keys[reads_N]), values.add_(self.token_values[reads_N])
        return attention.turned_keys(keys, positions_N), attention.split(values)

    def query(self, depth: int, normed_NH: Tensor, asks_N: Tensor, positions_N: Tensor) -> Tensor:
        """Rotated queries [N, Q, E]."""
        attention = self.layers[depth].self_attn
        (query,) = attention.project(normed_NH, "q", slice(self.cut if depth == 0 else 0, None))
        if depth == 0 and self.cut:
            query = query.add_(self.token_queries[asks_N])
        return attention.turned_query(query, positions_N)


def context_outputs(layers: Sequence[RolloutLayer], feature_CH: Tensor, rows: Rows) -> Tensor:
    """Layers over the context that read no tokens, run once: outputs of the computed rows [P, H]."""

    def nothing(ids_X: Tensor) -> Tensor:
        return feature_CH.new_zeros(*ids_X.shape, 0)

    return Rollout(layers, nothing, feature_CH, rows, None, unchanged, None).first(feature_CH)


class PlainLayer(RolloutLayer, Protocol):
    """A layer as the reference runs it."""

    def mix(self, embedding_XH: Tensor, feature_XH: Tensor) -> Tensor:
        """The attention's input."""
        ...


def rollout_reference(
    layers: Sequence[PlainLayer],
    embed: Embed,
    feature_TH: Tensor,
    batch: FeatureBatch,
    steps: int,
    entry: Entry | None = None,
    feed: Feed = unchanged,
    window: int | None = None,
) -> list[Tensor]:
    """Outputs [T, H] of each step for every row, by one dense mask over the keys of all steps so far."""
    rows_T = torch.arange(len(batch.ids_T), device=feature_TH.device)
    ids_T, segment_T, position_T = (x.to(rows_T.device) for x in (batch.ids_T, batch.segment_T, batch.position_T))
    causal_TT = (segment_T[:, None] == segment_T[None, :]) & (rows_T[None, :] <= rows_T[:, None])
    own_TT = torch.eye(len(rows_T), dtype=torch.bool, device=rows_T.device)
    keys: list[list[Tensor]] = [[] for _ in layers]
    values: list[list[Tensor]] = [[] for _ in layers]
    outputs = []
    for i in range(steps):
        near_TT = causal_TT if window is None else causal_TT & (rows_T[:, None] + i - rows_T[None, :] < window)
        mask = torch.cat([near_TT, *[own_TT] * i], 1)
        embedding_TD = embed(shift(ids_T, i + 1)).to(feature_TH.dtype)
        feature_TH = feed(feature_TH) if i else feature_TH
        if entry:
            feature_TH = entry.join(entry.token(embedding_TD), feature_TH, position_T + i)
        for depth, layer in enumerate(layers):
            attention = layer.self_attn
            mixed_TI = layer.mix(embedding_TD, feature_TH) if depth == 0 else layer.normed(feature_TH)
            key_TGE, value_TGE = attention.keys_values(mixed_TI, position_T + i)
            keys[depth].append(key_TGE)
            values[depth].append(value_TGE)
            query_TQE = attention.query(mixed_TI, position_T + i)
            attended = dense_attention(query_TQE, torch.cat(keys[depth]), torch.cat(values[depth]), mask)
            feature_TH = layer.finish(feature_TH, attended)
        outputs.append(feature_TH)
    return outputs


def dense_attention(query_TQE: Tensor, keys_SGE: Tensor, values_SGE: Tensor, mask_TS: Tensor) -> Tensor:
    """softmax(q·k / √E) · v with every score written out."""
    repeat = query_TQE.shape[1] // keys_SGE.shape[1]
    keys, values = keys_SGE.repeat_interleave(repeat, 1), values_SGE.repeat_interleave(repeat, 1)
    scores = torch.einsum("tqe,sqe->qts", query_TQE, keys) * query_TQE.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask_TS, -torch.inf).softmax(-1)
    return torch.einsum("qts,sqe->tqe", weights, values)
