"""LoRA on a head's own matrices (arXiv 2106.09685): W + (α / r) · B A, where only A and B are trained; and, of an lm_head
whose draft vocabulary was extended, the new rows.

A rollout reads weights, not modules (half of q_proj is applied at a time, down_proj inside a fused function), which hooks on
modules would miss. So the update is a parametrization of the weight itself, and every reader sees the sum. Saved adapters are
peft's files, and say which head they belong to.

Shapes: O outputs, I inputs of a matrix, r rank.
"""

import fnmatch
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from headwright.configs import UserError
from headwright.configs.schema import LoraConfig
from headwright.data.store import replace_with, save_tensors, write_json
from headwright.heads.base import DraftHead

CONFIG, WEIGHTS, BESIDE = "adapter_config.json", "adapter_model.safetensors", "headwright.json"
PREFIX = "base_model.model."
INSIDE = "parametrizations.weight"


class LowRank(nn.Module):
    """The update of one matrix [O, I]. B begins at zero, so that the adapted head begins as it was. rows_N: rows of the matrix
    that are new, for which an update of the rest says nothing: they are trained in full, as differences C [N, I].
    """

    def __init__(self, weight_OI: Tensor, rank: int, scale: float, rows_N: Tensor | None = None):
        super().__init__()
        outputs, inputs = weight_OI.shape
        self.A = nn.Parameter(weight_OI.new_empty(rank, inputs))
        self.B = nn.Parameter(weight_OI.new_zeros(outputs, rank))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
        self.scale = scale
        self.C = None if rows_N is None else nn.Parameter(weight_OI.new_zeros(len(rows_N), inputs))
        self.register_buffer("rows", rows_N, persistent=False)

    def forward(self, weight_OI: Tensor) -> Tensor:
        """The matrix with its update."""
        return self.updated(weight_OI, self.A, self.B, self.C)

    def updated(self, weight_OI: Tensor, side_a: Tensor, side_b: Tensor, rows_NI: Tensor | None) -> Tensor:
        """The same, of given numbers."""
        whole_OI = torch.addmm(weight_OI, side_b, side_a, alpha=self.scale)
        if rows_NI is None:
            return whole_OI
        return whole_OI.index_add(0, self.get_buffer("rows").to(whole_OI.device), rows_NI)


def matrices(head: nn.Module, patterns: list[str]) -> list[str]:
    """Names of the matrices of a head (no tables of tokens) that the patterns mean. Raises UserError for one without any."""
    there = [name for name, part in head.named_modules() if not isinstance(part, nn.Embedding) and has_matrix(part)]
    for pattern in patterns:
        if not any(fits(name, pattern) for name in there):
            kinds = ", ".join(sorted({name.rpartition(".")[2] for name in there}))
            raise UserError(f"train.lora.modules: {pattern!r} is no matrix of this head; there are {kinds}")
    return [name for name in there if any(fits(name, pattern) for pattern in patterns)]


def has_matrix(part: nn.Module) -> bool:
    """Whether a module's weight is a matrix that is trained."""
    weight = dict(part.named_parameters(recurse=False)).get("weight")
    return weight is not None and weight.ndim == 2 and weight.requires_grad


def fits(name: str, pattern: str) -> bool:
    """By the whole name or its last part."""
    return fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(name.rpartition(".")[2], pattern)


def adapt(head: DraftHead, config: LoraConfig, new_N: Tensor | None = None) -> None:
    """Freeze a head and put an update on each of its chosen matrices. new_N: draft tokens that it did not know before; their
    rows of its lm_heads are trained in full, where these are among the matrices.
    """
    names = matrices(head, config.modules)
    head.requires_grad_(False)
    scale = (config.alpha or 2 * config.rank) / config.rank
    for name in names:
        weight = head.get_parameter(f"{name}.weight")
        if config.rank > min(weight.shape):
            raise UserError(f"train.lora.rank {config.rank}: {name} is a matrix of rank {min(weight.shape)} at most")
        new = new_N if new_N is not None and "lm_head" in name and len(weight) == len(head.vocab) else None
        update = LowRank(weight.detach(), config.rank, scale, new)
        parametrize.register_parametrization(head.get_submodule(name), "weight", update)


def updates(head: nn.Module) -> dict[str, LowRank]:
    """The updates of an adapted head, by their matrices' names."""
    return {name.removesuffix(f".{INSIDE}.0"): part for name, part in head.named_modules() if isinstance(part, LowRank)}


@torch.no_grad()
def merged(head: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An adapted head's state under the names of a plain one, with the updates in it. `weights`: its state as it is."""
    found = {name: value for name, value in weights.items() if f".{INSIDE}." not in name}
    for name, update in updates(head).items():
        own = [weights.get(f"{name}.{INSIDE}.{key}") for key in ("original", "0.A", "0.B", "0.C")]
        found[f"{name}.weight"] = update.updated(*own)  # type: ignore[arg-type]
    return found


# On disk


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """Of a head's weights, whatever file they lie in."""
    state = xxhash.xxh64()
    for name in sorted(weights):
        state.update(name.encode())
        state.update(weights[name].detach().float().cpu().contiguous().numpy().tobytes())
    return state.hexdigest()


def save_adapter(head: DraftHead, folder: Path, weights: Mapping[str, Tensor], config: LoraConfig, base: str) -> None:
    """As peft reads it. `weights`: the adapted head's state; base: the fingerprint of the head that is adapted."""
    folder.mkdir(parents=True, exist_ok=True)
    found = updates(head)
    tensors = {
        f"{PREFIX}{name}.lora_{side}.weight": weights[f"{name}.{INSIDE}.0.{side}"].detach().cpu().contiguous()
        for name in found
        for side in "AB"
    }
    replace_with(folder / WEIGHTS, lambda path: save_tensors(tensors, path, {"format": "pt"}))
    described = {
        "peft_type": "LORA",
        "r": config.rank,
        "lora_alpha": config.alpha or 2 * config.rank,
        "target_modules": sorted(found),
        "inference_mode": True,
    }
    write_json(folder / CONFIG, described)
    write_json(folder / BESIDE, {"base": base})  # peft warns of keys that it does not know


def read_adapter(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """An adapter's config and its tensors by matrix and side (`fc.A`). Raises UserError."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS)
        scale = config["lora_alpha"] / config["r"]
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError, SafetensorError) as error:
        raise UserError(f"{folder}: no adapter that can be read ({error})") from None
    plain = {
        name.removeprefix(PREFIX).replace(".lora_", ".").removesuffix(".weight"): value
        for name, value in tensors.items()
    }
    return config | {"scale": scale, "base": base_of(folder)}, plain


def base_of(folder: Path) -> str | None:
    """The head that an adapter says it belongs to."""
    path = folder / BESIDE
    return json.loads(path.read_text(encoding="utf-8")).get("base") if path.is_file() else None


class Adapters:
    """Adapters of one head, of which one at a time is in force, or none. Switching costs one product per matrix.

    base: the fingerprint of the head's weights as they lie on disk.
    """

    def __init__(self, head: DraftHead, base: str, folders: Mapping[str, Path]):
        self.head, self.now = head, ""
        self.known = {name: self.checked(folder, base) for name, folder in folders.items()}
        touched = {name for deltas in self.known.values() for name in deltas}
        self.plain = {name: head.get_parameter(name).detach().clone() for name in touched}

    def checked(self, folder: Path, base: str) -> dict[str, tuple[Tensor, Tensor, float]]:
        """An adapter's matrices by parameter. Raises UserError where it belongs to another head."""
        config, tensors = read_adapter(folder)
        if config["base"] not in (None, base):
            raise UserError(f"{folder}: an adapter for another head ({config['base']}), not for this one ({base})")
        state, found = self.head.state_dict(), {}
        for name in sorted({key.rpartition(".")[0] for key in tensors}):
            side_a, side_b = tensors.get(f"{name}.A"), tensors.get(f"{name}.B")
            weight = state.get(f"{name}.weight")
            if weight is None or side_a is None or side_b is None or weight.shape != (len(side_b), side_a.shape[1]):
                raise UserError(f"{folder}: {name} does not fit this {self.head.config.kind} head")
            found[f"{name}.weight"] = (side_a.to(weight), side_b.to(weight), config["scale"])
        return found

    @torch.no_grad()
    def use(self, name: str = "") -> None:
        """Put one in force; "" is the head as it is. Raises UserError for an unknown name."""
        if name == self.now:
            return
        if name and name not in self.known:
            raise UserError(f"no adapter {name!r}; there are {', '.join(self.known)}")
        for place, weight in self.plain.items():
            self.head.get_parameter(place).copy_(weight)
        for place, (side_a, side_b, scale) in self.known.get(name, {}).items():
            self.head.get_parameter(place).copy_(torch.addmm(self.plain[place], side_b, side_a, alpha=scale))
        self.now = name
