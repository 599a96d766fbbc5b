"""Attention of a rollout: causal over step-0 keys, plus each row's own later keys, in one softmax; values and gradients
exact, and no matrix of scores.

Shapes: N queries, C context rows, J own keys of a row, Q query heads, G key-value heads (Q = G·F), E head width.

Row t of step j sees the step-0 keys k_s of its document, s ≤ t, and its own keys of steps 1 … j. A flash kernel gives,
for each block of step-0 keys, an output and the log-sum-exp ℓ of its scores; blocks and own keys are merged by theirs:
ℓ* = logsumexp(ℓ_1, ℓ_2, …), o* = Σ exp(ℓ_b − ℓ*) o_b. In the backward pass the probability of a key is
exp(score − ℓ*), so a flash backward that is given the merged o* and ℓ* returns that block's share of the gradients.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwright.data.rows import Span, Spans


def rollout_attention(
    query_NQE: Tensor,
    keys_CGE: Tensor,
    values_CGE: Tensor,
    spans: Spans,
    own: Sequence[tuple[Tensor, Tensor]],
    window: int | None = None,
) -> Tensor:
    """Attention [N, Q, E] of a step's rows. `own`: keys and values of steps 1 … j, of these rows and perhaps more behind.
    `window`: how many of the step-0 keys a row sees, counted back from its own; None: all of its document before it.
    """
    flat = [part for pair in own for part in pair]
    out: Tensor = Merged.apply(query_NQE, keys_CGE, values_CGE, spans, window, *flat)
    return out


class Merged(torch.autograd.Function):
    """`rollout_attention` with its gradient."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys: Tensor, values: Tensor, spans: Spans, window: int | None, *flat: Tensor
    ) -> Tensor:
        mixed, lse_NQ = context_forward(query, keys, values, spans, window)
        if flat:
            mixed, lse_NQ = merge_own(query, mixed, lse_NQ, *stacked(flat, len(query)))
        ctx.spans, ctx.window = spans, window
        ctx.save_for_backward(query, keys, values, mixed, lse_NQ, *flat)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, mixed, lse_NQ, *flat = ctx.saved_tensors
        grad = grad.contiguous()
        for_query, for_keys, for_values = context_backward(
            grad, query, keys, values, mixed, lse_NQ, ctx.spans, ctx.window
        )
        for_own = own_backward(grad, query, mixed, lse_NQ, flat, for_query) if flat else ()
        return for_query, for_keys, for_values, None, None, *for_own


# A row's own keys


def stacked(flat: Sequence[Tensor], count: int) -> tuple[Tensor, Tensor]:
    """Keys and values [N, G, J, E] of the first N rows."""
    keys = torch.stack([part[:count] for part in flat[0::2]], dim=2)
    return keys, torch.stack([part[:count] for part in flat[1::2]], dim=2)


def grouped(x_NQE: Tensor, groups: int) -> Tensor:
    """[N, Q, …] → [N, G, F, …]."""
    return x_NQE.unflatten(1, (groups, -1))


def own_scores(query_NQE: Tensor, keys_NGJE: Tensor) -> Tensor:
    """Scaled scores [N, G, F, J], in fp32 or wider, as a flash kernel keeps those of the step-0 keys."""
    wide = torch.promote_types(query_NQE.dtype, torch.float32)
    query = grouped(query_NQE.to(wide), keys_NGJE.shape[1]) * query_NQE.shape[-1] ** -0.5
    return query @ keys_NGJE.to(wide).transpose(2, 3)


def merge_own(
    query_NQE: Tensor, mixed_NQE: Tensor, lse_NQ: Tensor, keys_NGJE: Tensor, values_NGJE: Tensor
) -> tuple[Tensor, Tensor]:
    """The context's output and log-sum-exp, with the own keys put into the same softmax."""
    scores_NQJ = own_scores(query_NQE, keys_NGJE).flatten(1, 2)
    merged_NQ = torch.logaddexp(lse_NQ, scores_NQJ.logsumexp(-1))
    weights = grouped((scores_NQJ - merged_NQ[..., None]).exp_(), keys_NGJE.shape[1])
    own_NQE = (weights @ values_NGJE.to(weights.dtype)).flatten(1, 2)
    kept_NQ = (lse_NQ - merged_NQ).exp_()
    return own_NQE.addcmul_(mixed_NQE.to(own_NQE.dtype), kept_NQ[..., None]).to(mixed_NQE.dtype), merged_NQ


def own_backward(
    grad_NQE: Tensor, query_NQE: Tensor, mixed_NQE: Tensor, lse_NQ: Tensor, flat: Sequence[Tensor], for_query: Tensor
) -> list[Tensor]:
    """Gradients of the own keys and values, in the order of `flat`; that of the query is added to `for_query`."""
    wide, scale = lse_NQ.dtype, query_NQE.shape[-1] ** -0.5
    keys, values = (part.to(wide) for part in stacked(flat, len(query_NQE)))
    groups = keys.shape[1]
    delta_NQ = (grad_NQE.to(wide) * mixed_NQE).sum(-1)
    weights = (own_scores(query_NQE, keys) - grouped(lse_NQ, groups)[..., None]).exp_()
    grad = grouped(grad_NQE.to(wide), groups)
    slope = weights * (grad @ values.transpose(2, 3) - grouped(delta_NQ, groups)[..., None]) * scale
    for_query += (slope @ keys).flatten(1, 2)
    for_keys = slope.transpose(2, 3) @ grouped(query_NQE.to(wide), groups)
    for_values = weights.transpose(2, 3) @ grad
    pairs = zip(for_keys.unbind(2), for_values.unbind(2))
    return [spread(part, whole) for part, whole in zip((part for pair in pairs for part in pair), flat)]


def spread(part_NGE: Tensor, whole_PGE: Tensor) -> Tensor:
    """The gradient of all rows, in their dtype: zero for those that had already stopped."""
    part_NGE = part_NGE.to(whole_PGE.dtype)
    if len(part_NGE) == len(whole_PGE):
        return part_NGE
    return torch.cat([part_NGE, part_NGE.new_zeros(len(whole_PGE) - len(part_NGE), *part_NGE.shape[1:])])


# Step-0 keys


def context_forward(
    query: Tensor, keys: Tensor, values: Tensor, spans: Spans, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Output [N, Q, E] and log-sum-exp [N, Q] over the step-0 keys that each row sees."""
    kernel = choose_kernel(query, values)
    in_order = query if spans.order is None else query[spans.order]
    mixed, lse_NQ = kernel.forward(in_order, keys, values, spans, window)
    if spans.order is None:
        return mixed, lse_NQ
    return back_in_place(mixed, spans.order), back_in_place(lse_NQ, spans.order)


def context_backward(
    grad: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mixed: Tensor,
    lse_NQ: Tensor,
    spans: Spans,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, keys and values, given the merged output and log-sum-exp."""
    kernel, rows = choose_kernel(query, values), (grad, query, mixed, lse_NQ)
    if spans.order is not None:
        grad, query, mixed, lse_NQ = (part[spans.order] for part in rows)
    for_query, for_keys, for_values = kernel.backward(grad, query, keys, values, mixed, lse_NQ, spans, window)
    return for_query if spans.order is None else back_in_place(for_query, spans.order), for_keys, for_values


def back_in_place(ordered: Tensor, order: Tensor) -> Tensor:
    """Undo x[order]."""
    return torch.empty_like(ordered).index_copy_(0, order, ordered)


class Part(NamedTuple):
    """Queries and keys that one flash call brings together; `flipped`: both in reverse order."""

    rows: slice
    keys: slice
    causal: bool
    flipped: bool = False

    def rows_of(self, x_NQE: Tensor) -> Tensor:
        """The queries' side, heads first."""
        picked = x_NQE[self.rows]
        return heads_first(picked.flip(0) if self.flipped else picked)

    def keys_of(self, x_CGE: Tensor) -> Tensor:
        """The keys' side, heads first."""
        picked = x_CGE[self.keys]
        return heads_first(picked.flip(0) if self.flipped else picked)

    def back(self, x_1QNE: Tensor) -> Tensor:
        """A result [1, Q, N, …] in the order of the rows, [N, Q, …]."""
        found = x_1QNE[0].transpose(0, 1)
        return found.flip(0) if self.flipped else found


def blocks(span: Span, window: int | None = None) -> list[Part]:
    """The keys of a span: those before its first row that all rows see; those of its own rows, causal; and where rows see
    `window` keys (no fewer than there are rows), those that its first rows see and its last do not, causal in reverse.
    """
    count, first = span.stop - span.start, span.first
    rows = slice(span.start, span.stop)
    parts = [Part(rows, slice(span.own, span.own + count), True)]
    seen_by_all = first if window is None else max(first, min(span.own, span.own + count - window))
    if span.own > seen_by_all:
        parts.insert(0, Part(rows, slice(seen_by_all, span.own), False))
    if window is not None and seen_by_all > (edge := max(first, span.own - window + 1)):
        parts.append(Part(slice(span.start, span.stop - 1), slice(edge, seen_by_all), True, True))
    return parts


def heads_first(x_NQE: Tensor) -> Tensor:
    """[N, Q, E] → [1, Q, N, E], a view."""
    return x_NQE.transpose(0, 1)[None]


class CpuFlash:
    """PyTorch's flash attention for the CPU: any floating dtype, grouped heads without repeating them.

    Its causal form multiplies whole blocks of 512 keys, up to twice what a triangle needs, so spans are cut; those with many
    keys into fewer parts, since each part adds to the gradient of all keys before it.
    """

    ROWS, MANY, ROWS_OF_MANY = 192, 4096, 1024

    @classmethod
    def cut(cls, spans: Spans, window: int | None) -> Iterator[Span]:
        """The same rows as spans of at most ROWS, and no more than the window."""
        for start, stop, first, own in spans.parts:
            rows = cls.ROWS if own + stop - start - first < cls.MANY or window else cls.ROWS_OF_MANY
            rows = min(rows, window or rows)
            for row in range(start, stop, rows):
                yield Span(row, min(row + rows, stop), first, own + row - start)

    @staticmethod
    def forward(
        query: Tensor, keys: Tensor, values: Tensor, spans: Spans, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of queries in the order of the spans."""
        out = torch.empty_like(query)
        lse_NQ = query.new_empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))
        for span in CpuFlash.cut(spans, window):
            for number, part in enumerate(blocks(span, window)):
                sides = (part.rows_of(query), part.keys_of(keys), part.keys_of(values))
                mixed, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*sides, 0.0, part.causal)
                found = part.back(mixed), part.back(lse)
                if number:
                    found = merge(out[part.rows], lse_NQ[part.rows], *found)
                out[part.rows], lse_NQ[part.rows] = found
        return out, lse_NQ

    @staticmethod
    def backward(
        grad: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        lse_NQ: Tensor,
        spans: Spans,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, keys and values."""
        for_query, for_keys, for_values = (torch.zeros_like(x, dtype=lse_NQ.dtype) for x in (query, keys, values))
        for span in CpuFlash.cut(spans, window):
            for part in blocks(span, window):
                found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    part.rows_of(grad),
                    part.rows_of(query),
                    part.keys_of(keys),
                    part.keys_of(values),
                    part.rows_of(out),
                    part.rows_of(lse_NQ).contiguous(),
                    0.0,
                    part.causal,
                )
                for_query[part.rows] += part.back(found[0])
                for_keys[part.keys] += part.back(found[1])
                for_values[part.keys] += part.back(found[2])
        return for_query.to(query.dtype), for_keys.to(keys.dtype), for_values.to(values.dtype)


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Two blocks [N, Q, E], [N, Q] in one softmax."""
    lse = torch.logaddexp(lse_a, lse_b)
    share_a, share_b = ((part - lse).exp()[..., None] for part in (lse_a, lse_b))
    return (out_a * share_a + out_b * share_b).to(out_a.dtype), lse


class CudaFlash:
    """FlashAttention for GPUs, fp16 and bf16, one call for all spans of a step."""

    @staticmethod
    def forward(
        query: Tensor, keys: Tensor, values: Tensor, spans: Spans, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of queries in the order of the spans."""
        packed, seen = spans.packed_on(query.device, len(keys)), within(window)
        sides = (query, packed.gather(keys), packed.gather(values))
        found = torch.ops.aten._flash_attention_forward(
            *sides, *packed.edges, *packed.longest, 0.0, True, False, **seen
        )
        return found[0], found[1].T.contiguous()

    @staticmethod
    def backward(
        grad: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        lse_NQ: Tensor,
        spans: Spans,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, keys and values."""
        packed, seen = spans.packed_on(query.device, len(keys)), within(window)
        off = torch.zeros(2, dtype=torch.uint64, device=query.device)  # the state of a dropout that is not used
        sides = (grad, query, packed.gather(keys), packed.gather(values), out, lse_NQ.T.contiguous())
        found = torch.ops.aten._flash_attention_backward(
            *sides, *packed.edges, *packed.longest, 0.0, True, off, off, **seen
        )
        return found[0], packed.scatter(found[1], len(keys)), packed.scatter(found[2], len(keys))


def within(window: int | None) -> dict[str, int]:
    """A window as FlashAttention's keywords; its causal mask and ours count from the same corner."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


class Blockwise:
    """Plain matrix products over `ROWS` queries at a time: any device and dtype, for where there is no flash kernel."""

    ROWS = 256

    @classmethod
    def pieces(cls, spans: Spans) -> Iterator[tuple[slice, slice, int]]:
        """Queries, the keys they may see, and how many of these the first of them sees."""
        for span in spans.parts:
            for start in range(span.start, span.stop, cls.ROWS):
                stop = min(start + cls.ROWS, span.stop)
                seen = span.own + start - span.start + 1
                yield slice(start, stop), slice(span.first, seen + stop - start - 1), seen - span.first

    @staticmethod
    def scores(query: Tensor, keys: Tensor, seen: int, window: int | None) -> Tensor:
        """Scaled scores [G, F, n, m]; -inf where a key comes later, or too long before. In fp32 or wider."""
        wide = torch.promote_types(query.dtype, torch.float32)
        raw = torch.einsum("ngfe,mge->gfnm", grouped(query.to(wide), keys.shape[1]), keys.to(wide))
        every = torch.ones(raw.shape[2:], dtype=torch.bool, device=raw.device)
        hidden = every.triu(seen) if window is None else every.triu(seen) | every.tril(seen - 1 - window)
        return (raw * query.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)

    @classmethod
    def forward(
        cls, query: Tensor, keys: Tensor, values: Tensor, spans: Spans, window: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of queries in the order of the spans."""
        out = query.new_empty(*query.shape[:2], values.shape[-1])
        lse_NQ = query.new_empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))
        for rows, places, seen in cls.pieces(spans):
            scores = cls.scores(query[rows], keys[places], seen, window)
            lse = scores.logsumexp(-1, keepdim=True)
            weights = (scores - lse).exp()
            out[rows] = torch.einsum("gfnm,mge->ngfe", weights, values[places].to(weights.dtype)).flatten(1, 2)
            lse_NQ[rows] = lse[..., 0].permute(2, 0, 1).flatten(1)
        return out, lse_NQ

    @classmethod
    def backward(
        cls,
        grad: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        lse_NQ: Tensor,
        spans: Spans,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, keys and values."""
        groups, scale, wide = keys.shape[1], query.shape[-1] ** -0.5, lse_NQ.dtype
        for_query, (for_keys, for_values) = (
            torch.empty_like(query),
            (torch.zeros_like(x, dtype=wide) for x in (keys, values)),
        )
        delta_NQ = (grad.to(wide) * out.to(wide)).sum(-1)
        for rows, places, seen in cls.pieces(spans):
            lse, delta = (grouped(x[rows], groups).permute(1, 2, 0)[..., None] for x in (lse_NQ, delta_NQ))
            weights = (cls.scores(query[rows], keys[places], seen, window) - lse).exp()
            g, q = (grouped(x[rows].to(wide), groups) for x in (grad, query))
            slope = weights * (torch.einsum("ngfe,mge->gfnm", g, values[places].to(wide)) - delta) * scale
            for_query[rows] = torch.einsum("gfnm,mge->ngfe", slope, keys[places].to(wide)).flatten(1, 2).to(query.dtype)
            for_keys[places] += torch.einsum("gfnm,ngfe->mge", slope, q)
            for_values[places] += torch.einsum("gfnm,ngfe->mge", weights, g)
        return for_query, for_keys.to(keys.dtype), for_values.to(values.dtype)


Kernel = type[CpuFlash] | type[CudaFlash] | type[Blockwise]


def choose_kernel(query: Tensor, values: Tensor) -> Kernel:
    """The fastest kernel that returns its log-sum-exp and takes the merged one back."""
    if not len(query) or query.shape[-1] != values.shape[-1]:
        return Blockwise  # flash kernels refuse, or divide by, no queries at all; and values of another width (MLA)
    if query.device.type == "cpu":
        return CpuFlash
    return CudaFlash if query.device.type == "cuda" and flash_can(query) else Blockwise


def flash_can(query: Tensor) -> bool:
    """Whether FlashAttention takes queries on this GPU: half precision, Ampere or later, heads of a usual width."""
    half, width = query.dtype in (torch.float16, torch.bfloat16), query.shape[-1]
    newer = torch.version.hip is None and torch.cuda.get_device_capability(query.device) >= (8, 0)
    return half and newer and width % 8 == 0 and width <= 256
