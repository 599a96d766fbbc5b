"""Building blocks of heads. Shapes: N rows, S keys, Q query heads, G key-value heads, E head width, H head width of a
layer.

Parameter names are those of Llama layers, because engines load them by name.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwright.configs import UserError


class RMSNorm(nn.Module):
    """x / rms(x) · weight, computed in fp32."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x_XH: Tensor) -> Tensor:
        wide = x_XH.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x_XH.dtype)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x_XH: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_XH)) * self.up_proj(x_XH))


class Rotary:
    """Rotary positions from a target's rope parameters: types default, linear and llama3."""

    def __init__(self, rope: dict[str, Any], width: int):
        self.frequencies_E2 = inverse_frequencies(rope, width)

    def __call__(self, x_XNE: Tensor, positions_N: Tensor) -> Tensor:
        """Rotate [..., N, heads, E] by [..., N] positions (half-split pairs, as Llama)."""
        angles = positions_N.to(torch.float32)[..., None] * self.frequencies_E2.to(x_XNE.device)
        cos, sin = angles.cos().to(x_XNE.dtype)[..., None, :], angles.sin().to(x_XNE.dtype)[..., None, :]
        left, right = x_XNE.chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def inverse_frequencies(rope: dict[str, Any], width: int) -> Tensor:
    """Inverse frequencies [E/2] in fp32. Raises UserError for a rope type that heads do not know yet."""
    kind = rope.get("rope_type", "default")
    if rope.get("partial_rotary_factor", 1.0) != 1.0 or "mrope_section" in rope:
        raise UserError(f"the target rotates in a way that heads do not know yet: {rope}")
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / rope["factor"]
    if kind == "llama3":
        return llama3_frequencies(rope, frequencies)
    raise UserError(f"the target's rope type {kind!r} is not known to heads yet; known: default, linear, llama3")


def llama3_frequencies(rope: dict[str, Any], frequencies: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    length = 2 * math.pi / frequencies
    context, low, high = (
        rope["original_max_position_embeddings"],
        rope["low_freq_factor"],
        rope["high_freq_factor"],
    )
    blend = ((context / length - low) / (high - low)).clamp(0, 1)
    return blend * frequencies + (1 - blend) * frequencies / rope["factor"]


class Attention(nn.Module):
    """Projections of grouped-query attention. The input may be wider than the layer (EAGLE-3: [embedding ; feature])."""

    def __init__(self, inputs: int, width: int, heads: int, kv_heads: int, head_dim: int, rotary: Rotary):
        super().__init__()
        self.q_proj = nn.Linear(inputs, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)
        self.head_dim, self.rotary = head_dim, rotary

    def split(self, x_XN: Tensor) -> Tensor:
        """[..., N, heads·E] → [..., N, heads, E]."""
        return x_XN.unflatten(-1, (-1, self.head_dim))

    def query(self, x_XNI: Tensor, positions_XN: Tensor) -> Tensor:
        """Rotated queries [..., N, Q, E]."""
        return self.rotary(self.split(self.q_proj(x_XNI)), positions_XN)

    def keys_values(self, x_XNI: Tensor, positions_XN: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [..., N, G, E]."""
        keys = self.rotary(self.split(self.k_proj(x_XNI)), positions_XN)
        return keys, self.split(self.v_proj(x_XNI))

    def output(self, mixed_XNQE: Tensor) -> Tensor:
        """Back to the layer's width."""
        return self.o_proj(mixed_XNQE.flatten(-2))


def attend(query_BNQE: Tensor, keys_BGSE: Tensor, values_BGSE: Tensor, mask_BNS: Tensor) -> Tensor:
    """Masked attention [B, N, Q, E]; keys are shared by the query heads of a group and never repeated."""
    batch, new, heads, width = query_BNQE.shape
    groups = heads // keys_BGSE.shape[1]
    folded = query_BNQE.transpose(1, 2).reshape(batch, -1, groups * new, width)
    mask = mask_BNS.repeat(1, groups, 1)[:, None]
    mixed = F.scaled_dot_product_attention(folded, keys_BGSE, values_BGSE, attn_mask=mask)
    return mixed.reshape(batch, heads, new, width).transpose(1, 2)
