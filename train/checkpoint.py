"""Checkpoints: safetensors and JSON, never pickle. A checkpoint is a directory that appears by rename, whole or not at
all.

What is in it does not depend on how the head was spread: whole tensors under the head's own names. So a run can be
continued by another number of processes, or under another strategy.
"""

import contextlib
import json
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from headwright.configs import UserError, reason
from headwright.data.store import save_tensors, write_json
from headwright.train.strategy import Strategy

SHOWN = 12  # keys that changed
BEST = "head"  # directory of the best head so far, in the run's


@dataclass
class Progress:
    """Where a run stands. Data order, learning rate and random numbers follow from the step.

    since_best: measurements without a better τ. left_out: steps that were not finite. seconds, cpu_seconds: of the whole
    training, on the clock and of this process; of the former, those in which it waited for measurements and checkpoints.
    config: the run file as it was, for showing what changed.
    """

    step: int = 0
    total: int = 0
    best_tau: float = 0.0
    best_step: int = -1
    since_best: int = 0
    left_out: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    seconds_measuring: float = 0.0
    seconds_saving: float = 0.0
    identity: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


@dataclass
class Checkpoint:
    """What was read."""

    progress: Progress
    weights: dict[str, Tensor]
    moments: dict[str, Tensor]


class Saver:
    """Writes checkpoints behind the training: ranks wait until tensors are copied to the host, not until they are written."""

    def __init__(self, folder: Path, keep: int, beside: dict[str, Any]):
        self.folder, self.keep, self.beside = folder, keep, beside
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="headwright-saver")
        self.writing: Future[None] | None = None

    def save(self, strategy: Strategy, progress: Progress) -> None:
        """All ranks call it; the main one writes. Raises what the last writing raised."""
        weights, moments = strategy.weights(), strategy.moments()
        if strategy.launch.main:
            self.wait()
            described = json.dumps(vars(progress), indent=2) + "\n"
            self.writing = self.pool.submit(self.write, weights, moments, described, progress.step)

    def write(self, weights: dict[str, Tensor], moments: dict[str, Tensor], described: str, step: int) -> None:
        """`folder/step-N`; then older ones are dropped."""
        final = self.folder / f"step-{step:07d}"
        scratch = self.folder / f".{final.name}.tmp"
        sweep(self.folder)
        scratch.mkdir(parents=True)
        try:
            save_tensors(weights, scratch / "model.safetensors")
            save_tensors(moments, scratch / "optimizer.safetensors")
            write_json(scratch / "provenance.json", self.beside)
            (scratch / "progress.json").write_text(described, encoding="utf-8")
            if final.exists():
                shutil.rmtree(final)
            scratch.rename(final)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        point(self.folder / "last", final.name)
        if (self.folder.parent / BEST).is_dir():
            point(self.folder / "best", f"../{BEST}")
        for old in whole(self.folder)[: -self.keep]:
            shutil.rmtree(old)

    def wait(self) -> None:
        """Until nothing is being written."""
        if self.writing is not None:
            self.writing.result()
            self.writing = None

    def close(self) -> None:
        """At the end of the training, however it ends."""
        self.pool.shutdown(wait=True)


def sweep(folder: Path) -> None:
    """Remove what a killed run was writing."""
    for scratch in folder.glob(".step-*.tmp"):
        shutil.rmtree(scratch, ignore_errors=True)


def point(link: Path, name: str) -> None:
    """A symbolic link beside the checkpoints, for people. File systems without links do without."""
    with contextlib.suppress(OSError):
        fresh = link.with_name(f".{link.name}.link")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(name)
        os.replace(fresh, link)


def whole(folder: Path) -> list[Path]:
    """The checkpoints, oldest first."""
    return sorted(folder.glob("step-*"))


def read_checkpoint(folder: Path, identity: dict[str, Any]) -> Checkpoint | None:
    """The newest checkpoint; None when there is none.

    Raises UserError when it cannot be read, or belongs to a run whose features, head or schedule were others.
    """
    found = whole(folder)
    if not found:
        return None
    path = found[-1]
    try:
        progress = Progress(**json.loads((path / "progress.json").read_text(encoding="utf-8")))
        refuse_other(progress.identity, identity, path)
        weights, moments = load_file(path / "model.safetensors"), load_file(path / "optimizer.safetensors")
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        then = f"go on from {found[-2].name}" if len(found) > 1 else "train anew"
        raise UserError(f"{path}: this checkpoint cannot be read ({reason(error)}); remove it to {then}") from None
    return Checkpoint(progress, weights, moments)


def refuse_other(before: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    """A checkpoint is continued by the run that made it."""
    changed = differences(before, now)
    if not changed:
        return
    hint = ""
    if "batches per step" in changed and set(changed) <= {"batches per step", "total steps"}:
        hint = (
            f"\nThat is train.accumulate times the number of processes. With train.accumulate and the launch such that it is "
            f"{before['batches per step']} again, the same batches make a step, and the run goes on."
        )
    raise UserError(
        f"{path}: this checkpoint is of another run; what changed:\n"
        + "\n".join(show(changed))
        + f"{hint}\nRemove {path.parent} to train anew, or give the run another name."
    )


def differences(before: Any, now: Any, prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ, with dots for what lies deeper: (before, now)."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return {} if before == now else {prefix.rstrip("."): (before, now)}
    found: dict[str, tuple[Any, Any]] = {}
    for key in [*before, *(key for key in now if key not in before)]:
        found |= differences(before.get(key), now.get(key), f"{prefix}{key}.")
    return found


def show(changed: dict[str, tuple[Any, Any]]) -> list[str]:
    """One line for each."""
    lines = [f"  {key}: was {before!r}, now {now!r}" for key, (before, now) in changed.items()]
    return lines if len(lines) <= SHOWN else [*lines[:SHOWN], f"  … and {len(lines) - SHOWN} more"]
