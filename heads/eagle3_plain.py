"""An independent reader of exported EAGLE-3 directories: plain tensors and the engines' equations, nothing of the
trainer's module.

It sees what an engine sees, config.json and model.safetensors, and drafts greedily without a cache. If it drafts the
tokens that the trained head drafts, the files say what the head is. T rows of context, H head width, W draft
vocabulary.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from headwright.heads.base import Drafts


class PlainEagle3:
    """The head in a directory."""

    def __init__(self, folder: Path):
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "model.safetensors")
        self.w = {name: w.float() if w.is_floating_point() else w for name, w in tensors.items()}

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm in fp32 with the weight of that name."""
        wide = x.float()
        scale = wide.square().mean(-1, keepdim=True).add(self.config["rms_norm_eps"]).rsqrt()
        return (wide * scale).to(x.dtype) * self.w[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        """x · Wᵀ."""
        return x @ self.w[f"{name}.weight"].T

    def rotate(self, x_TNE: Tensor, positions_T: Tensor) -> Tensor:
        """Llama's rotary embedding from the config's legacy keys."""
        width = x_TNE.shape[-1]
        frequencies = self.frequencies(width)
        angles = positions_T[:, None].float() * frequencies
        turn = torch.polar(torch.full_like(angles, self.stretch()), angles)[:, None]
        half = torch.complex(x_TNE[..., : width // 2].float(), x_TNE[..., width // 2 :].float()) * turn
        return torch.cat([half.real, half.imag], -1).to(x_TNE.dtype)

    def frequencies(self, width: int) -> Tensor:
        """Inverse frequencies, from `rope_theta` and `rope_scaling`."""
        base = self.config["rope_theta"] ** -(torch.arange(0, width, 2).float() / width)
        scaling = self.config["rope_scaling"]
        if scaling is None:
            return base
        if scaling["rope_type"] == "linear":
            return base / scaling["factor"]
        if scaling["rope_type"] == "yarn":
            return self.yarn(base, scaling)
        turns = scaling["original_max_position_embeddings"] * base / (2 * torch.pi)
        share = (turns - scaling["low_freq_factor"]) / (scaling["high_freq_factor"] - scaling["low_freq_factor"])
        share = share.clamp(0, 1)
        return base * (share + (1 - share) / scaling["factor"])

    def yarn(self, base: Tensor, scaling: dict[str, Any]) -> Tensor:
        """Pairs blended between their own frequency and the interpolated one, by a ramp over their number."""
        context, width, theta = scaling["original_max_position_embeddings"], 2 * len(base), self.config["rope_theta"]
        ends = []
        for key, usual in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            wavelength = context / (scaling.get(key) or usual)  # a pair of this wavelength turns so often
            ends.append(width / 2 * math.log(wavelength / math.tau, theta))
        if scaling.get("truncate", True):
            ends = [math.floor(ends[0]), math.ceil(ends[1])]
        start, stop = max(ends[0], 0), min(ends[1], width - 1)
        ramp = (torch.arange(len(base)) - start) / ((stop - start) or 0.001)
        return torch.lerp(base, base / scaling["factor"], ramp.clamp(0, 1))

    def stretch(self) -> float:
        """YaRN's factor on queries and keys."""
        scaling = self.config["rope_scaling"] or {}
        if scaling.get("rope_type") != "yarn":
            return 1.0
        if scaling.get("attention_factor") is not None:
            return float(scaling["attention_factor"])
        grown = math.log(max(scaling["factor"], 1)) / 10
        both = scaling.get("mscale") and scaling.get("mscale_all_dim")
        return (1 + grown * scaling["mscale"]) / (1 + grown * scaling["mscale_all_dim"]) if both else 1 + grown

    def fuse(self, taps_TKD: Tensor) -> Tensor:
        """fc over the captured states, each normed first where the config says so."""
        parts = list(taps_TKD.unbind(1))
        if self.config["fc_norm"]:
            parts = [self.norm(part, f"fc_norm.{k}") for k, part in enumerate(parts)]
        return self.linear(torch.cat(parts, -1), "fc")

    def layer(self, embedding_TH: Tensor, feature_TH: Tensor) -> Tensor:
        """The decoder layer on a whole causal sequence; output before the final norm."""
        heads, groups = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        width, count = self.config["head_dim"], len(feature_TH)
        x = torch.cat(
            [
                self.norm(embedding_TH, "midlayer.input_layernorm"),
                self.norm(feature_TH, "midlayer.hidden_norm"),
            ],
            -1,
        )
        positions = torch.arange(count)
        q = self.rotate(self.linear(x, "midlayer.self_attn.q_proj").view(count, heads, width), positions)
        k = self.rotate(self.linear(x, "midlayer.self_attn.k_proj").view(count, groups, width), positions)
        v = self.linear(x, "midlayer.self_attn.v_proj").view(count, groups, width)
        k, v = (part.repeat_interleave(heads // groups, dim=1) for part in (k, v))
        scores = torch.einsum("inw,jnw->nij", q, k) / width**0.5
        future = torch.ones(count, count, dtype=torch.bool).triu(1)
        weights = scores.float().masked_fill(future, -torch.inf).softmax(-1).to(v.dtype)
        mixed = torch.einsum("nij,jnw->inw", weights, v).reshape(count, heads * width)
        middle = feature_TH + self.linear(mixed, "midlayer.self_attn.o_proj")
        inner = self.norm(middle, "midlayer.post_attention_layernorm")
        gate = torch.nn.functional.silu(self.linear(inner, "midlayer.mlp.gate_proj"))
        return middle + self.linear(gate * self.linear(inner, "midlayer.mlp.up_proj"), "midlayer.mlp.down_proj")

    def draft(self, embedding_VD: Tensor, following_T: list[int], taps_TKD: Tensor, count: int) -> Drafts:
        """`count` greedy tokens after the last of `following` (the token after each row), by full recomputation."""
        feature = self.fuse(taps_TKD)
        tokens, scores = list(following_T), [0.0]
        for _ in range(count):
            hidden = self.layer(embedding_VD[torch.tensor(tokens)], feature)
            logits = self.linear(self.norm(hidden[-1], "norm"), "lm_head")
            draft = int(logits.argmax())
            scores.append(scores[-1] + float(logits.log_softmax(-1)[draft]))
            tokens.append(draft + int(self.w["d2t"][draft]) if "d2t" in self.w else draft)
            feature = torch.cat([feature, hidden[-1:]])
        return Drafts(tokens[len(following_T) :], scores[1:])
