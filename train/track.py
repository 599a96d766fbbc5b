"""Where metrics go: metrics.jsonl always; Weights & Biases where there is a key; others by Accelerate's tracker interface.

A tracker never stops a training: what it raises is said once, and the run goes on without it.
"""

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from headwright.configs import RunConfig, dump, reason
from headwright.configs.console import say
from headwright.configs.load import parse
from headwright.data.store import write_json, write_text
from headwright.eval.metrics import read_metrics
from headwright.train.provenance import cleaned

NAMES = {"tensorboard": "TensorBoard", "mlflow": "MLflow", "trackio": "trackio"}


class Meter:
    """Metrics as numerators and denominators, added up on the device and read once per log line. A batch with anything that
    is not finite counts for nothing: its step is left out, too.
    """

    def __init__(self) -> None:
        self.sums: dict[tuple[str, ...], Tensor] = {}

    def add(self, metrics: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Add one batch."""
        if not metrics:
            return
        names = tuple(metrics)
        pairs = torch.stack([torch.stack([top.float(), bottom.float()]) for top, bottom in metrics.values()])
        pairs = torch.where(torch.isfinite(pairs).all(), pairs, 0.0)
        self.sums[names] = self.sums[names] + pairs if names in self.sums else pairs

    def read(self, reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Means over all ranks (`reduce` sums a tensor over them); starts anew."""
        totals: dict[str, list[float]] = {}
        for names, pairs in self.sums.items():
            for name, (top, bottom) in zip(names, reduce(pairs).tolist()):
                sums = totals.setdefault(name, [0.0, 0.0])
                sums[0], sums[1] = sums[0] + top, sums[1] + bottom
        self.sums = {}
        return {name: top / bottom for name, (top, bottom) in totals.items() if bottom}


class Sink(Protocol):
    """A tracker."""

    name: str

    def log(self, record: dict[str, Any]) -> None:
        """One record, with its step."""

    def artifact(self, name: str, kind: str, *paths: Path) -> None:
        """A directory or files of the run."""

    def finish(self) -> None:
        """The run has ended."""


class Tracker:
    """Writes each record to metrics.jsonl, and to trackers. On resuming, what a killed run wrote after its checkpoint is
    dropped.
    """

    def __init__(self, run: RunConfig, active: bool, since: int, facts: dict[str, Any] | None = None):
        self.file = None
        self.sinks: list[Sink] = []
        if not active:
            return
        run.directory.mkdir(parents=True, exist_ok=True)
        path = run.directory / "metrics.jsonl"
        kept = "".join(json.dumps(record) + "\n" for record in read_metrics(path) if record["step"] <= since)
        write_text(path, kept)
        self.file = path.open("a", encoding="utf-8")
        self.sinks = open_sinks(run, facts or {})

    def log(self, record: dict[str, Any]) -> None:
        """One record, with its step."""
        if self.file is not None:
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()
        self.each(lambda sink: sink.log(record))

    def artifact(self, name: str, kind: str, path: Path) -> None:
        """A file or directory, where a tracker keeps such."""
        if path.exists():
            self.each(lambda sink: sink.artifact(name, kind, path))

    def each(self, call: Callable[[Sink], Any]) -> None:
        """Ask every tracker; one that fails is dropped."""
        for sink in list(self.sinks):
            try:
                call(sink)
            except Exception as error:
                say(f"{sink.name} is off from here on: {type(error).__name__}: {reason(error)}")
                self.sinks.remove(sink)

    def close(self) -> None:
        """End the file and the trackers' runs."""
        if self.file is not None:
            self.file.close()
        self.each(lambda sink: sink.finish())


def open_sinks(run: RunConfig, facts: dict[str, Any]) -> list[Sink]:
    """The trackers that the run asks for and that start. Each that does not says why, in one line."""
    config = cleaned(parse(dump(run))) | {"provenance": facts}
    opened: list[Sink] = []
    for name, start in (("W&B", start_wandb), *((NAMES[key], start_other(key)) for key in run.train.track.also)):
        try:
            sink = start(run, config)
        except Exception as error:  # no key, no network, a broken install: whatever it is, training goes on
            say(f"{name} is off: {reason(error)}")
            continue
        if sink is not None:
            opened.append(sink)
    return opened


# Weights & Biases


class Wandb:
    """A W&B run."""

    name = "W&B"

    def __init__(self, run: Any):
        self.run = run

    def log(self, record: dict[str, Any]) -> None:
        """One record."""
        self.run.log(record, step=record["step"])

    def artifact(self, name: str, kind: str, *paths: Path) -> None:
        """A directory, or files."""
        import wandb

        made = wandb.Artifact(name, type=kind)
        for path in paths:
            made.add_dir(str(path)) if path.is_dir() else made.add_file(str(path))
        self.run.log_artifact(made)

    def finish(self) -> None:
        """Upload the rest."""
        self.run.finish()


def start_wandb(run: RunConfig, config: dict[str, Any]) -> Sink | None:
    """The run's W&B run, continued where there is one; None where none is wanted. Never asks for a key."""
    mode = wandb_mode(run.train.track.wandb)
    if mode == "off":
        return None
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    if mode == "online" and wandb.api.api_key is None:
        say("W&B is off: no key (`wandb login`, or train.track.wandb=offline); metrics are in metrics.jsonl")
        return None
    started = wandb.init(
        project=run.train.track.project,
        name=run.name,
        id=wandb_id(run),
        resume="allow",
        dir=str(run.directory),
        mode="offline" if mode == "offline" else "online",
        config=config,
    )
    return Wandb(started)


def wandb_mode(asked: str) -> str:
    """off, online or offline. auto: online where wandb is installed; what WANDB_MODE says goes first."""
    if asked != "auto":
        return asked
    said = os.environ.get("WANDB_MODE", "online")
    return said if said in ("online", "offline") else "off"


def wandb_id(run: RunConfig) -> str:
    """The same whenever this run directory is continued, and another one for a new directory of the same name."""
    path = run.directory / "wandb.json"
    found = kept_id(path) or f"{secrets.token_hex(4)}-{run.name}"
    write_json(path, {"id": found})
    return found


def kept_id(path: Path) -> str | None:
    """The run at a tracker that this directory's training was logged to before."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(path.read_text(encoding="utf-8"))["id"])
    return None


def share(run: RunConfig, name: str, kind: str, paths: list[Path]) -> None:
    """Files of a later stage as an artifact of the training's W&B run, where it has one."""
    found = [path for path in paths if path.is_file()]
    if not found or not (run.directory / "wandb.json").is_file():
        return
    try:
        sink = start_wandb(run, {})
        if sink is not None:
            sink.artifact(name, kind, *found)
            sink.finish()
    except Exception as error:
        say(f"W&B is off: {reason(error)}")


# TensorBoard, MLflow, trackio: Accelerate's classes


class Other:
    """A tracker of Accelerate's."""

    def __init__(self, name: str, tracker: Any):
        self.name, self.tracker = name, tracker

    def log(self, record: dict[str, Any]) -> None:
        """One record."""
        self.tracker.log({key: value for key, value in record.items() if key != "step"}, step=record["step"])

    def artifact(self, name: str, kind: str, *paths: Path) -> None:
        """These keep numbers."""

    def finish(self) -> None:
        """End it."""
        self.tracker.finish()


def start_other(key: str) -> Callable[[RunConfig, dict[str, Any]], Sink]:
    """How a tracker of Accelerate's starts. TensorBoard and MLflow write under the run's directory, unless MLFLOW_TRACKING_URI
    names another place; trackio where it keeps all its runs (TRACKIO_DIR).
    """

    def start(run: RunConfig, config: dict[str, Any]) -> Sink:
        made = {"tensorboard": tensorboard, "mlflow": mlflow, "trackio": trackio}[key](run)
        made.store_init_configuration(flat(config))
        return Other(NAMES[key], made)

    return start


def tensorboard(run: RunConfig) -> Any:
    """Event files."""
    from accelerate.tracking import TensorBoardTracker

    made = TensorBoardTracker(run.name, str(run.directory / "tensorboard"))
    made.start()
    return made


def mlflow(run: RunConfig) -> Any:
    """An MLflow run, which goes on where the training does."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow
    from accelerate.tracking import MLflowTracker

    if "MLFLOW_TRACKING_URI" not in os.environ:
        mlflow.set_tracking_uri(f"sqlite:///{run.directory.resolve() / 'mlflow.db'}")
    path, folder = run.directory / "mlflow.json", str(run.directory / "mlflow")
    made = MLflowTracker(run.train.track.project, run_id=kept_id(path), run_name=run.name, logging_dir=folder)
    made.start()
    write_json(path, {"id": made.active_run.info.run_id})
    return made


def trackio(run: RunConfig) -> Any:
    """A trackio run, likewise."""
    from accelerate.tracking import TrackioTracker

    made = TrackioTracker(run.train.track.project, name=run.name, resume="allow")
    made.start()
    return made


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys: trackers want plain values."""
    if isinstance(config, dict):
        found: dict[str, Any] = {}
        for key, value in config.items():
            found |= flat(value, f"{prefix}{key}.")
        return found
    plain = config if isinstance(config, bool | int | float | str) else json.dumps(config)
    return {prefix[:-1]: plain}


__all__ = ["Meter", "Tracker", "read_metrics", "start_wandb"]
