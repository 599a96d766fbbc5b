"""Building blocks of heads. Shapes: N rows, S keys, Q query heads, G key-value heads, E head width, H head width of a
layer.

Parameter names are those of Llama layers, because engines load them by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from headwright.data.target import TargetSpec
from headwright.heads.fused import fused
from headwright.heads.rotary import Rotary


class RMSNorm(nn.Module):
    """x / rms(x) · (offset + weight), computed in fp32 or wider. Families that count gains from zero have an offset of 1."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps, self.offset = eps, 0.0

    def forward(self, x_XH: Tensor) -> Tensor:
        weight = self.weight + self.offset if self.offset else self.weight
        out: Tensor = NormFunction.apply(x_XH, weight, self.eps)
        return out


class NormFunction(torch.autograd.Function):
    """RMSNorm that keeps its input and one number per row for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x_XH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        out, scale_X1 = normed(x_XH, weight_H, eps)
        ctx.save_for_backward(x_XH, weight_H, scale_X1)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_XH, weight_H, scale_X1 = ctx.saved_tensors
        for_x, for_weight = normed_backward(grad, x_XH, weight_H, scale_X1, ctx.needs_input_grad[0])
        return for_x, for_weight if ctx.needs_input_grad[1] else None, None


@fused
def normed(x_XH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / rms(x) · weight, and 1 / rms(x)."""
    wide = x_XH.to(torch.promote_types(x_XH.dtype, torch.float32))
    scale_X1 = torch.rsqrt(torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / x_XH.shape[-1] + eps)
    return weight_H * (wide * scale_X1).to(x_XH.dtype), scale_X1


@fused
def normed_backward(
    grad: Tensor, x_XH: Tensor, weight_H: Tensor, scale_X1: Tensor, x_wanted: bool
) -> tuple[Tensor | None, Tensor]:
    """Gradients of x and weight."""
    unit, grad = x_XH.to(scale_X1.dtype) * scale_X1, grad.to(scale_X1.dtype)
    slope = grad * unit
    for_weight = slope.reshape(-1, len(weight_H)).sum(0).to(weight_H.dtype)
    if not x_wanted:
        return None, for_weight
    shared_X1 = (slope @ weight_H.to(slope.dtype))[..., None] / x_XH.shape[-1]
    return ((grad * weight_H).addcmul_(unit, shared_X1, value=-1).mul_(scale_X1)).to(x_XH.dtype), for_weight


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x_XH: Tensor) -> Tensor:
        out: Tensor = GatedFunction.apply(self.gate_proj(x_XH), self.up_proj(x_XH), self.down_proj.weight)
        return out


class GatedFunction(torch.autograd.Function):
    """(silu(gate) · up) Wᵀ, whose product is made again in the backward pass instead of being kept."""

    @staticmethod
    def forward(ctx: Any, gate_XI: Tensor, up_XI: Tensor, weight_HI: Tensor) -> Tensor:
        ctx.save_for_backward(gate_XI, up_XI, weight_HI)
        with torch.autocast(gate_XI.device.type, enabled=False):
            return F.linear(gated(gate_XI, up_XI), weight_HI.to(gate_XI.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        gate, up, weight_HI = ctx.saved_tensors
        for_gate, for_up, product = gated_backward(grad @ weight_HI.to(grad.dtype), gate, up)
        for_weight = None
        if ctx.needs_input_grad[2]:
            for_weight = (rows_of(grad).T @ rows_of(product)).to(weight_HI.dtype)
        return for_gate, for_up, for_weight


def rows_of(x_XH: Tensor) -> Tensor:
    """[…, H] → [X, H]."""
    return x_XH.reshape(-1, x_XH.shape[-1])


@fused
def gated(gate_XI: Tensor, up_XI: Tensor) -> Tensor:
    """silu(gate) · up."""
    return F.silu(gate_XI) * up_XI


@fused
def gated_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gate and up, and the product."""
    share = torch.sigmoid(gate)
    passed = gate * share  # silu(gate)
    slope = torch.add(share, passed).addcmul_(passed, share, value=-1)
    return slope.mul_(up).mul_(grad), grad * passed, passed * up


@dataclass(frozen=True)
class Sizes:
    """Of a decoder layer: width H, width of the MLP, heads, and what its norms and rotary embedding need."""

    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope: dict[str, Any]
    qk_norm: bool = False

    @classmethod
    def of(
        cls,
        spec: TargetSpec,
        width: int | None = None,
        inner: int | None = None,
        qk_norm: bool = False,
        layout: Mapping[str, Any] | None = None,
    ) -> "Sizes":
        """Those of the target's layers, or of another width with heads of the same width and as many to a group. `layout`: what
        an imported head has otherwise.
        """
        heads, kv_heads, width = spec.num_heads, spec.num_kv_heads, width or spec.hidden_size
        if width != spec.hidden_size:
            heads = max(1, width // spec.head_dim)
            kv_heads = max(
                kv for kv in range(1, heads + 1) if heads % kv == 0 and kv <= max(1, heads * kv_heads // spec.num_heads)
            )
            inner = inner or max(1, spec.intermediate_size * width // spec.hidden_size)
        inner = inner or spec.intermediate_size
        found = cls(width, inner, heads, kv_heads, spec.head_dim, spec.rms_norm_eps, spec.rope, qk_norm)
        return replace(found, **(layout or {}))


class Attention(nn.Module):
    """Projections of grouped-query attention. The input may be wider than the layer (EAGLE-3: [embedding ; feature])."""

    def __init__(self, inputs: int, sizes: Sizes):
        super().__init__()
        self.q_proj = nn.Linear(inputs, sizes.heads * sizes.head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, sizes.kv_heads * sizes.head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, sizes.kv_heads * sizes.head_dim, bias=False)
        self.o_proj = nn.Linear(sizes.heads * sizes.head_dim, sizes.width, bias=False)
        if sizes.qk_norm:  # Qwen3: every head's queries and keys, before they are rotated
            self.q_norm, self.k_norm = (RMSNorm(sizes.head_dim, sizes.eps) for _ in range(2))
        self.head_dim, self.qk_norm = sizes.head_dim, sizes.qk_norm
        self.rotary = Rotary(sizes.rope, sizes.head_dim)

    def split(self, x_XN: Tensor) -> Tensor:
        """[..., N, heads·E] → [..., N, heads, E]."""
        return x_XN.unflatten(-1, (-1, self.head_dim))

    def project(self, x_XN: Tensor, names: str, columns: slice) -> list[Tensor]:
        """Projections [..., heads·E] for each letter of `names` (q, k, v), by some columns of their weights: an input of two
        halves is projected half by half where one of them is known before the other.
        """
        weights = {"q": self.q_proj.weight, "k": self.k_proj.weight, "v": self.v_proj.weight}
        return [F.linear(x_XN, weights[name][:, columns]) for name in names]

    def turned_query(self, query_XN: Tensor, positions_XN: Tensor) -> Tensor:
        """Projected queries [..., N, Q·E] split into heads, normed where the head norms them, and rotated."""
        query = self.split(query_XN)
        return self.rotary(self.q_norm(query) if self.qk_norm else query, positions_XN)

    def turned_keys(self, keys_XN: Tensor, positions_XN: Tensor) -> Tensor:
        """The same for keys [..., N, G·E]."""
        keys = self.split(keys_XN)
        return self.rotary(self.k_norm(keys) if self.qk_norm else keys, positions_XN)

    def query(self, x_XNI: Tensor, positions_XN: Tensor) -> Tensor:
        """Rotated queries [..., N, Q, E]."""
        return self.turned_query(self.q_proj(x_XNI), positions_XN)

    def keys_values(self, x_XNI: Tensor, positions_XN: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [..., N, G, E]."""
        return self.turned_keys(self.k_proj(x_XNI), positions_XN), self.split(self.v_proj(x_XNI))

    def output(self, mixed_XNQE: Tensor) -> Tensor:
        """Back to the layer's width."""
        return self.o_proj(mixed_XNQE.flatten(-2))


class Block(nn.Module):
    """A Llama decoder layer over one stream. EAGLE-1's first has no norm before its attention."""

    def __init__(self, sizes: Sizes, input_norm: bool = True):
        super().__init__()
        self.self_attn = Attention(sizes.width, sizes)
        self.mlp = SwiGLU(sizes.width, sizes.inner)
        self.input_layernorm = RMSNorm(sizes.width, sizes.eps) if input_norm else nn.Identity()
        self.post_attention_layernorm = RMSNorm(sizes.width, sizes.eps)

    def embedded(self, embedding_XH: Tensor) -> Tensor:
        """No token half of its own: it enters with the stream."""
        return embedding_XH[..., :0]

    def normed(self, stream_XH: Tensor) -> Tensor:
        """The attention's input."""
        out: Tensor = self.input_layernorm(stream_XH)
        return out

    def mix(self, embedding_XH: Tensor, stream_XH: Tensor) -> Tensor:
        """The same, as heads with a token half ask for it."""
        return self.normed(stream_XH)

    def finish(self, stream_XH: Tensor, mixed_XQE: Tensor) -> Tensor:
        """Output projection, residual, MLP, residual."""
        middle_XH = stream_XH + self.self_attn.output(mixed_XQE)
        return middle_XH + self.mlp(self.post_attention_layernorm(middle_XH))


def attend(query_BNQE: Tensor, keys_BGSE: Tensor, values_BGSE: Tensor, mask_BNS: Tensor | None) -> Tensor:
    """Masked attention [B, N, Q, E], or causal without a mask; keys are shared by the query heads of a group and never
    repeated.
    """
    batch, new, heads, width = query_BNQE.shape
    groups = heads // keys_BGSE.shape[1]
    if mask_BNS is None:
        query = query_BNQE.transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, keys_BGSE, values_BGSE, is_causal=True, enable_gqa=groups > 1)
        return mixed.transpose(1, 2)
    folded = query_BNQE.transpose(1, 2).reshape(batch, -1, groups * new, width)
    mask = mask_BNS.repeat(1, groups, 1)[:, None]
    mixed = F.scaled_dot_product_attention(folded, keys_BGSE, values_BGSE, attn_mask=mask)
    return mixed.reshape(batch, heads, new, -1).transpose(1, 2)  # values may be narrower than keys (MLA)
