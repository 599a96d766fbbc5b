"""Checkpoints: safetensors and JSON, never pickle. A checkpoint is a directory that appears by rename, whole or not at
all.
"""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from headwright.configs import UserError, reason
from headwright.data.store import save_tensors


@dataclass
class Progress:
    """Where a run stands. Data order and learning rate follow from the step."""

    step: int = 0
    total: int = 0
    best_tau: float = 0.0
    best_step: int = -1
    seconds: float = 0.0
    identity: dict[str, Any] = field(default_factory=dict)


def optimizer_tensors(head: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state under the parameters' names: `exp_avg:fc.weight`, …"""
    names: dict[Tensor, str] = {weight: name for name, weight in head.named_parameters()}
    return {
        f"{key}:{names[weight]}": value.detach().cpu().contiguous()
        for weight, state in optimizer.state.items()
        for key, value in state.items()
    }


def restore_optimizer(head: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """The inverse, into a fresh optimizer."""
    weights = dict(head.named_parameters())
    for label, value in tensors.items():
        key, name = label.split(":", 1)
        weight = weights[name]
        optimizer.state[weight][key] = value.to(weight.device)  # the fused optimizer's step count, too


def save_checkpoint(folder: Path, head: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Write `folder/step-N`, then drop older ones."""
    final = folder / f"step-{progress.step:07d}"
    scratch = folder / f".{final.name}.tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        weights = {name: value.detach().cpu().contiguous() for name, value in head.state_dict().items()}
        save_tensors(weights, scratch / "model.safetensors")
        save_tensors(optimizer_tensors(head, optimizer), scratch / "optimizer.safetensors")
        (scratch / "progress.json").write_text(json.dumps(vars(progress), indent=2) + "\n", encoding="utf-8")
        if final.exists():
            shutil.rmtree(final)
        scratch.rename(final)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    for old in folder.glob("step-*"):
        if old != final:
            shutil.rmtree(old)


def newest_checkpoint(folder: Path) -> Path | None:
    """The last whole checkpoint."""
    found = sorted(folder.glob("step-*"))
    return found[-1] if found else None


def load_checkpoint(
    folder: Path, head: nn.Module, optimizer: torch.optim.Optimizer, identity: dict[str, Any]
) -> Progress | None:
    """Restore the newest checkpoint into head and optimizer; None when there is none.

    Raises UserError when it belongs to a run whose features, head or schedule were others.
    """
    path = newest_checkpoint(folder)
    if path is None:
        return None
    try:
        progress = Progress(**json.loads((path / "progress.json").read_text(encoding="utf-8")))
        weights, moments = load_file(path / "model.safetensors"), load_file(path / "optimizer.safetensors")
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise UserError(f"{path}: this checkpoint cannot be read ({reason(error)}); remove it to train anew") from None
    changed = {k: (progress.identity.get(k), v) for k, v in identity.items() if progress.identity.get(k) != v}
    if changed:
        lines = [f"  {key}: was {before!r}, now {now!r}" for key, (before, now) in changed.items()]
        raise UserError(
            f"{path}: this checkpoint is of another run; what changed:\n"
            + "\n".join(lines)
            + f"\nRemove {folder} to train anew, or give the run another name."
        )
    head.load_state_dict(weights)
    restore_optimizer(head, optimizer, moments)
    return progress
