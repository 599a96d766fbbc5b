"""Where metrics go: metrics.jsonl always, Weights & Biases when asked."""

import json
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headwright.configs import RunConfig, reason
from headwright.configs.console import say
from headwright.data.store import write_text
from headwright.eval.metrics import read_metrics


class Meter:
    """Metrics as numerators and denominators, added up on the device and read once per log line."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[Tensor, Tensor]] = {}

    def add(self, metrics: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Add one batch."""
        for name, (top, bottom) in metrics.items():
            old = self.sums.get(name)
            self.sums[name] = (top, bottom) if old is None else (old[0] + top, old[1] + bottom)

    def read(self, reduce: Any) -> dict[str, float]:
        """Means over all ranks (`reduce` sums a tensor over them); starts anew."""
        if not self.sums:
            return {}
        names = list(self.sums)
        stacked = torch.stack([torch.stack([a.float(), b.float()]) for a, b in self.sums.values()])
        totals = reduce(stacked).tolist()
        self.sums = {}
        return {name: top / bottom for name, (top, bottom) in zip(names, totals) if bottom}


class Tracker:
    """Writes each record to metrics.jsonl, and to W&B. On resuming, what a killed run wrote after its checkpoint is dropped."""

    def __init__(self, run: RunConfig, active: bool, since: int):
        self.file = None
        self.wandb: Any = None
        if not active:
            return
        run.directory.mkdir(parents=True, exist_ok=True)
        path = run.directory / "metrics.jsonl"
        kept = "".join(json.dumps(record) + "\n" for record in read_metrics(path) if record["step"] <= since)
        write_text(path, kept)
        self.file = path.open("a", encoding="utf-8")
        if run.train.track.wandb != "off":
            self.wandb = start_wandb(run)

    def log(self, record: dict[str, Any]) -> None:
        """One record, with its step."""
        if self.file is not None:
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()
        if self.wandb is not None:
            self.attempt(lambda: self.wandb.log(record, step=record["step"]))

    def attempt(self, call: Callable[[], Any]) -> None:
        """A tracker never stops a training: whatever W&B raises, say it once and go on without."""
        try:
            call()
        except Exception as error:
            say(f"W&B is off from here on: {type(error).__name__}: {error}")
            self.wandb = None

    def close(self) -> None:
        """End the file and the W&B run."""
        if self.file is not None:
            self.file.close()
        if self.wandb is not None:
            self.attempt(lambda: self.wandb.finish())


def start_wandb(run: RunConfig) -> Any:
    """A W&B run, or None with one line that says why: a tracker never stops a training."""
    from headwright.configs import dump
    from headwright.configs.load import parse

    os.environ.setdefault("WANDB_SILENT", "true")
    try:
        import wandb

        return wandb.init(
            project=run.train.track.project,
            name=run.name,
            id=run.name,
            resume="allow",
            dir=str(run.directory),
            mode="offline" if run.train.track.wandb == "offline" else "online",
            config=parse(dump(run)),
        )
    except Exception as error:  # no key, no network, a broken install: whatever it is, training goes on
        say(f"W&B is off: {reason(error)}")
        return None
