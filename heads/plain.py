"""What independent readers of exported directories share: a Llama layer from plain tensors and config.json, nothing of the
trainer's modules.

They see what an engine sees and draft greedily without a cache. If they draft the tokens that the trained head drafts, the
files say what the head is. T rows of context, H head width.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from headwright.heads.base import Case, Drafts


class Chain:
    """Greedy drafts after a case's tokens, as a reader makes them one by one."""

    def __init__(self, case: Case):
        self.tokens, self.scores, self.start = list(case.following), [0.0], len(case.following)

    def take(self, logits_W: Tensor, ids_W: Tensor) -> None:
        """The most likely token."""
        best = int(logits_W.argmax())
        self.scores.append(self.scores[-1] + float(logits_W.log_softmax(-1)[best]))
        self.tokens.append(int(ids_W[best]))

    def drafts(self) -> Drafts:
        """All of them."""
        return Drafts(self.tokens[self.start :], self.scores[1:])


def written(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and the tensors of a directory."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config, load_file(folder / "model.safetensors")


class PlainLlama:
    """The tensors and the config of a directory, in the layout of our exports."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor]):
        self.config = config
        self.w = {name: w.float() if w.is_floating_point() else w for name, w in tensors.items()}

    @classmethod
    def read(cls, folder: Path, *more: Any, **named: Any) -> Any:
        """A written directory."""
        return cls(*written(folder), *more, **named)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm in fp32 with the weight of that name."""
        wide = x.float()
        scale = wide.square().mean(-1, keepdim=True).add(self.config["rms_norm_eps"]).rsqrt()
        return (wide * scale).to(x.dtype) * self.w[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        """x · Wᵀ, and the bias where the file has one."""
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0)

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

    def window(self) -> int | None:
        """Tokens that a row sees; a Qwen3 config must switch it on."""
        sliding = "sliding_attention" in (self.config.get("layer_types") or ())
        on = self.config.get("use_sliding_window") or self.config["model_type"] != "qwen3"
        return self.config.get("sliding_window") if sliding and on else None

    def heads_of(self, x: Tensor, name: str, count: int, norm: str | None) -> Tensor:
        """A projection split into heads, normed where the head has such a norm."""
        found = self.linear(x, name).view(len(x), count, self.config["head_dim"])
        return self.norm(found, norm) if norm and f"{norm}.weight" in self.w else found

    def layer(self, name: str, x: Tensor, residual_TH: Tensor) -> Tensor:
        """A decoder layer from its attention's input and its residual."""
        heads, groups = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        attention, positions = f"{name}.self_attn", torch.arange(len(x))
        q = self.rotate(self.heads_of(x, f"{attention}.q_proj", heads, f"{attention}.q_norm"), positions)
        k = self.rotate(self.heads_of(x, f"{attention}.k_proj", groups, f"{attention}.k_norm"), positions)
        v = self.heads_of(x, f"{attention}.v_proj", groups, None)
        k, v = (part.repeat_interleave(heads // groups, dim=1) for part in (k, v))
        scores = torch.einsum("inw,jnw->nij", q, k) / self.config["head_dim"] ** 0.5
        unseen = positions[None, :] > positions[:, None]
        window = self.window()
        if window is not None:
            unseen |= positions[None, :] <= positions[:, None] - window
        weights = scores.float().masked_fill(unseen, -torch.inf).softmax(-1).to(v.dtype)
        mixed = torch.einsum("nij,jnw->inw", weights, v).flatten(1)
        middle = residual_TH + self.linear(mixed, f"{attention}.o_proj")
        inner = self.norm(middle, f"{name}.post_attention_layernorm")
        gate = torch.nn.functional.silu(self.linear(inner, f"{name}.mlp.gate_proj"))
        return middle + self.linear(gate * self.linear(inner, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")
