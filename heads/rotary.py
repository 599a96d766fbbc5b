"""Rotary positions from a target's rope parameters: types default, linear, dynamic, yarn and llama3.

`served_rope` is what an export carries, so that every engine computes what was trained. `dynamic` stretches the base by the
length of the text (transformers) or once for all (vLLM): up to the target's context the former is the plain rotation, which a
head of such a target uses and exports. Of YaRN's scale transformers reads `attention_factor` or `mscale`, SGLang and vLLM a
factor of their own, `attn_factor`, on the usual scale: an unusual one is exported in both spellings. N rows, E head width.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwright.configs import UserError
from headwright.heads.fused import fused

KNOWN = ("default", "linear", "dynamic", "yarn", "llama3")


class Rotary:
    """Turns queries and keys by their positions (half-split pairs, as Llama)."""

    def __init__(self, rope: dict[str, Any], width: int):
        self.frequencies_E2 = inverse_frequencies(rope, width)
        self.scale = attention_scale(rope)

    def __call__(self, x_XNE: Tensor, positions_N: Tensor) -> Tensor:
        """Rotate [..., N, heads, E] by [..., N] positions."""
        if self.frequencies_E2.device != x_XNE.device:  # kept: a copy in every call would wait for the device
            self.frequencies_E2 = self.frequencies_E2.to(x_XNE.device)
        angles = positions_N.to(torch.float32)[..., None] * self.frequencies_E2
        cos, sin = ((part * self.scale).to(x_XNE.dtype)[..., None, :] for part in (angles.cos(), angles.sin()))
        out: Tensor = TurnFunction.apply(x_XNE, cos, sin)
        return out


class TurnFunction(torch.autograd.Function):
    """The rotation; its gradient is the rotation back, so that nothing but the angles is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return turned(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return turned(grad, cos, -sin), None, None


@fused
def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(left, right) → (left·cos − right·sin, right·cos + left·sin)."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat([(left * cos).addcmul_(right, sin, value=-1), (right * cos).addcmul_(left, sin)], dim=-1)


def inverse_frequencies(rope: dict[str, Any], width: int) -> Tensor:
    """Inverse frequencies [E/2] in fp32. Raises UserError for a rotation that heads do not know."""
    kind = rope.get("rope_type", "default")
    if rope.get("partial_rotary_factor", 1.0) != 1.0 or "mrope_section" in rope:
        raise UserError(f"the target rotates in a way that heads do not know yet: {rope}")
    if kind not in KNOWN:
        raise UserError(f"the target's rope type {kind!r} is not known to heads yet; known: {', '.join(KNOWN)}")
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    if kind == "linear":
        return frequencies / rope["factor"]
    if kind == "llama3":
        return llama3_frequencies(rope, frequencies)
    return yarn_frequencies(rope, frequencies) if kind == "yarn" else frequencies


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


def yarn_frequencies(rope: dict[str, Any], frequencies: Tensor) -> Tensor:
    """YaRN (arXiv 2309.00071): pairs that turn more than `beta_fast` times within the original context are kept, those that
    turn less than `beta_slow` times are stretched by `factor`, those between are blended by their place.
    """
    width, theta, context = 2 * len(frequencies), rope["rope_theta"], rope["original_max_position_embeddings"]
    turns = (rope.get("beta_fast") or 32, rope.get("beta_slow") or 1)
    low, high = (width * math.log(context / (count * 2 * math.pi)) / (2 * math.log(theta)) for count in turns)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    place = torch.arange(len(frequencies), dtype=torch.float32)
    stretched = ((place - low) / (high - low or 0.001)).clamp(0, 1)
    return frequencies * (1 - stretched) + frequencies / rope["factor"] * stretched


def attention_scale(rope: dict[str, Any]) -> float:
    """What YaRN multiplies queries and keys by; 1 elsewhere."""
    if rope.get("rope_type") != "yarn":
        return 1.0
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    top, bottom = rope.get("mscale"), rope.get("mscale_all_dim")
    if top and bottom:
        return yarn_scale(rope["factor"], top) / yarn_scale(rope["factor"], bottom)
    return yarn_scale(rope["factor"], 1.0)


def yarn_scale(factor: float, weight: float) -> float:
    """0.1 · weight · ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def served_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """The parameters that an export carries."""
    if rope["rope_type"] == "dynamic":
        return {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    if rope["rope_type"] != "yarn":
        return rope
    spoken = ("mscale", "mscale_all_dim", "attention_factor")
    served = {key: value for key, value in rope.items() if value is not None and key not in spoken}
    scale, usual = attention_scale(rope), yarn_scale(rope["factor"], 1.0)
    return served if scale == usual else served | {"attention_factor": scale, "attn_factor": scale / usual}
