"""A decoder layer of the target's own class, run on rows with an attention that the caller gives: what MTP modules are made of.

Beside target.py and gguf_model.py the only code that knows Hugging Face model classes. Shapes: B rows, N tokens, Q query heads,
G key-value heads, E head width, D width.
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn

from headwright.configs import UserError
from headwright.data.target import ATTENTION, BorrowedAttention, Target, TargetSpec

# (query [B, Q, N, E], keys [B, G, N, E], values [B, G, N, F]), rotated → [B, N, Q, F]; the query comes scaled for 1 / √E
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Kind = Literal["target", "llama"]


class DecoderBlock(nn.Module):
    """The layer, with its rotary embedding."""

    def __init__(self, layer: nn.Module, rotary: nn.Module, layer_type: str | None):
        super().__init__()
        self.layer, self.layer_type = layer, layer_type
        self.rotary = rotary
        self.by_type = "layer_type" in inspect.signature(rotary.forward).parameters

    def forward(self, x_BND: Tensor, positions_BN: Tensor, attend: Attend) -> Tensor:
        """The layer's output [B, N, D]."""
        typed = {"layer_type": self.layer_type} if self.by_type else {}
        turned = self.rotary(x_BND, positions_BN, **typed)
        plan = BorrowedAttention(attend)
        out = self.layer(x_BND, attention_mask=None, position_ids=positions_BN, position_embeddings=turned, plan=plan)
        return out if isinstance(out, Tensor) else out[0]

    def _apply(self, fn: Any, recurse: bool = True) -> "DecoderBlock":
        """Casts reach weights only: rotary frequencies and routers' corrections stay in their own precision."""
        kept = {name: buffer for name, buffer in self.named_buffers() if buffer.is_floating_point()}
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            owner, _, last = name.rpartition(".")
            part = self.get_submodule(owner)
            setattr(part, last, buffer.to(getattr(part, last).device))
        return self

    @torch.no_grad()
    def start_as(self, target: Target) -> None:
        """Take over the tensors of the target's last full-attention layer that this one has too, in the same shape."""
        target.want_layers("head.block")
        full, _ = full_layers(target)
        weights = target.body.layers[full[-1]].state_dict()
        own = self.layer.state_dict()
        shared = {name: weights[name] for name in own if name in weights and weights[name].shape == own[name].shape}
        self.layer.load_state_dict(shared, strict=False)


def full_layers(target: Target) -> tuple[list[int], list[str]]:
    """The target's layers with full attention, and the kind of each layer."""
    types = getattr(target.text, "layer_types", None) or ["full_attention"] * target.spec.num_layers
    return [place for place, name in enumerate(types) if name == "full_attention"], types


def make_block(target: Target, kind: Kind, place: int | None = None) -> DecoderBlock:
    """A trainable copy of one of the target's layers with full attention, the last by default; or a Llama layer of the target's
    sizes, its weights random. In fp32.
    """
    return llama_block(target.spec) if kind == "llama" else own_block(target, place)


def own_block(target: Target, place: int | None = None) -> DecoderBlock:
    """The target's own kind. Raises UserError where its attention does more than a head's can."""
    full, types = full_layers(target)
    target.want_layers("head.block")
    if not full or not hasattr(target.body.layers[full[-1]], "self_attn"):
        raise UserError(f"{target.spec.name}: none of its layers has full attention: set head.block=llama")
    place = full[-1] if place is None else place
    layer, rotary = copy.deepcopy(target.body.layers[place]), copy.deepcopy(target.body.rotary_emb)
    for module in layer.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    layer.self_attn.config._attn_implementation = ATTENTION
    block = DecoderBlock(layer.float().train(), rotary, types[place])
    for name, weight in block.layer.named_parameters():
        weight.requires_grad_(not name.endswith("e_score_correction_bias"))  # moved by rule, never by gradients
    probe(block, target)
    return block


@torch.no_grad()
def probe(block: DecoderBlock, target: Target) -> None:
    """Run two rows: an attention that a head cannot compute says so."""

    def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return query.new_zeros(*query.shape[:3], values.shape[-1]).transpose(1, 2)

    rows = torch.zeros(1, 2, target.spec.hidden_size, device=next(block.layer.parameters()).device)
    block(rows, torch.arange(2, device=rows.device)[None], attend)


def llama_block(spec: TargetSpec) -> DecoderBlock:
    """A Llama layer."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = transformers.LlamaConfig(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters=dict(spec.rope),
        max_position_embeddings=spec.max_positions,
    )
    config._attn_implementation = ATTENTION
    block = DecoderBlock(LlamaDecoderLayer(config, 0), LlamaRotaryEmbedding(config), None)
    renew(block, spec)
    return block


@torch.no_grad()
def renew(block: DecoderBlock, spec: TargetSpec) -> None:
    """Random weights: matrices of the usual scale; norms and biases are left."""
    for weight in block.layer.parameters():
        if weight.ndim > 1:
            weight.normal_(std=0.02 if spec.hidden_size > 256 else spec.hidden_size**-0.5)
