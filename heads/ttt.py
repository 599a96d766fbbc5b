"""The training-time test of EAGLE-3 (arXiv 2503.01840): a rollout in which the head reads its own output.

Shapes: T packed tokens, P live rows, I steps, H head width, Q query heads, G key-value heads, E head width.

In a rollout, row t of step i attends to the step-0 keys up to its own position and to its own keys of steps 1 … i:
those are the entries that serving would find in its cache. So attention is causal over step-0 keys plus a diagonal of i
single keys.

`rollout` computes live rows only (rows that start a rollout, see data/batch.py): in a one-layer head the others
contribute their step-0 keys and values and nothing else, so loss and gradients are unchanged. `rollout_reference`
computes every row with one dense mask over all T·i keys, beside the paper; the tests hold the two together.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from headwright.data.batch import FeatureBatch, LiveRows, live_rows, shift
from headwright.heads.layers import Attention

Embed = Callable[[Tensor], Tensor]


class RolloutLayer(Protocol):
    """The one decoder layer that a rollout runs."""

    self_attn: Attention

    def mix(self, embedding_XH: Tensor, feature_XH: Tensor) -> Tensor:
        """The attention's input from a token's embedding and a feature."""
        ...

    def finish(self, feature_XH: Tensor, mixed_XQE: Tensor) -> Tensor:
        """The layer's output from its input feature and the attention's result."""
        ...


def rollout(
    layer: RolloutLayer, embed: Embed, feature_TH: Tensor, batch: FeatureBatch, steps: int
) -> tuple[list[Tensor], LiveRows]:
    """Layer outputs [P, H] of each step for the live rows, and those rows."""
    live = live_rows(batch, steps)
    next_T = shift(batch.ids_T, 1)
    keys_TGE, values_TGE = layer.self_attn.keys_values(layer.mix(embed(next_T), feature_TH), batch.position_T)
    mask_PT = context_mask(batch, live.rows_P)
    position_P, feature_PH = batch.position_T[live.rows_P], feature_TH[live.rows_P]
    own: list[tuple[Tensor, Tensor]] = []
    outputs = []
    for i in range(steps):
        mixed_PI = layer.mix(embed(live.tokens_PI[:, i]), feature_PH)
        query_PQE = layer.self_attn.query(mixed_PI, position_P + i)
        if i > 0:
            own.append(layer.self_attn.keys_values(mixed_PI, position_P + i))
        attended = attend_rollout(query_PQE, keys_TGE, values_TGE, mask_PT, own)
        feature_PH = layer.finish(feature_PH, attended)
        outputs.append(feature_PH)
    return outputs, live


def context_mask(batch: FeatureBatch, rows_P: Tensor) -> Tensor:
    """Mask [P, T]: step-0 keys of the same document up to the row's own position."""
    same = batch.segment_T[rows_P][:, None] == batch.segment_T[None, :]
    return same & (torch.arange(len(batch.ids_T), device=rows_P.device)[None, :] <= rows_P[:, None])


def attend_rollout(
    query_PQE: Tensor, keys_TGE: Tensor, values_TGE: Tensor, mask_PT: Tensor, own: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """Attention [P, Q, E] over the step-0 keys that `mask` allows and the row's own later keys, in one softmax."""
    rows, heads, width = query_PQE.shape
    groups = keys_TGE.shape[1]
    query_PGFE = query_PQE.reshape(rows, groups, heads // groups, width) * width**-0.5
    query_G = query_PGFE.transpose(0, 1).reshape(groups, -1, width)
    context_GPFT = (query_G @ keys_TGE.permute(1, 2, 0)).view(groups, rows, heads // groups, keys_TGE.shape[0])
    context_GPFT = context_GPFT.masked_fill(~mask_PT[None, :, None], -torch.inf)
    own_GPFI = [torch.einsum("pgfe,pge->gpf", query_PGFE, keys)[..., None] for keys, _ in own]
    weights = torch.cat([context_GPFT, *own_GPFI], -1).softmax(-1)
    count = keys_TGE.shape[0]
    mixed_G = weights[..., :count].reshape(groups, -1, count) @ values_TGE.transpose(0, 1)
    mixed_PGFE = mixed_G.view(groups, rows, heads // groups, width).transpose(0, 1)
    for i, (_, values) in enumerate(own):
        mixed_PGFE = mixed_PGFE + weights[..., count + i].transpose(0, 1)[..., None] * values[:, :, None]
    return mixed_PGFE.reshape(rows, heads, width)


def rollout_reference(
    layer: RolloutLayer, embed: Embed, feature_TH: Tensor, batch: FeatureBatch, steps: int
) -> list[Tensor]:
    """Layer outputs [T, H] of each step for every row, by one dense mask over the keys of all steps so far."""
    total = len(batch.ids_T)
    rows_T = torch.arange(total, device=batch.ids_T.device)
    causal_TT, own_TT = context_mask(batch, rows_T), torch.eye(total, dtype=torch.bool, device=rows_T.device)
    keys, values, masks, outputs = [], [], [], []
    for i in range(steps):
        mixed_TI = layer.mix(embed(shift(batch.ids_T, i + 1)), feature_TH)
        key_TGE, value_TGE = layer.self_attn.keys_values(mixed_TI, batch.position_T + i)
        keys.append(key_TGE)
        values.append(value_TGE)
        masks.append(causal_TT if i == 0 else own_TT)
        query_TQE = layer.self_attn.query(mixed_TI, batch.position_T + i)
        attended = dense_attention(query_TQE, torch.cat(keys), torch.cat(values), torch.cat(masks, 1))
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
