"""Trainings of an adaptation: the run itself, and short ones beside it, which say how much general text must be replayed and
what more of the domain's text would give.

A trial is a run of its own over the same features. What came of a training is kept in runs/NAME/trials/, of trials without
their weights, with all that it depends on: what was made is not made again, by however many processes.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from headwright.configs import RunConfig, UserError
from headwright.configs.console import say, table
from headwright.configs.schema import TrackConfig
from headwright.data.corpus import general_sources
from headwright.data.harvest import open_store
from headwright.data.store import checksum, write_json
from headwright.eval.metrics import read_metrics
from headwright.eval.records import facts
from headwright.train.launch import Launch
from headwright.train.measure import measured_depth
from headwright.train.run import TRIALS, UNBOUND, head_path, train

POWERS = np.linspace(0.02, 2.0, 100)  # exponents of the learning curve that are tried
SECTIONS = ("target", "answers", "vocab", "head", "seed")
WHOLE = "whole"  # the run itself


class Stopped(Exception):
    """A training was asked to stop, and has left a checkpoint."""


@dataclass
class Trials:
    """Those of a run, on a launch."""

    run: RunConfig
    launch: Launch

    def whole(self) -> dict[str, Any]:
        """What came of the run itself. Raises Stopped, and UserError where it kept no head."""
        made = self.record(WHOLE, self.run)
        if not (head_path(self.run) / "head.json").is_file():
            raise UserError(
                f"{self.run.directory}: no head lost less than adapt.budget ({self.run.adapt.budget:.0%}) of its accepted "
                "drafts on general text: raise adapt.replay or adapt.budget, or give it more general text"
            )
        return made

    def replay(self) -> float:
        """The share of general text with the best τ on the domain, of those that keep the budget; else what forgets least."""
        run, found = self.run, {}
        refuse_unmeasured(run)
        for share in run.adapt.shares:
            epochs = replace(run.train, epochs=run.train.epochs * run.adapt.trial)
            found[share] = self.trial(f"replay-{share:g}", replace(run, train=epochs), replay=share)
        chosen = choose(found)
        show_search(found, chosen)
        return chosen

    def curve(self, whole: dict[str, Any]) -> list[dict[str, float]]:
        """τ of the domain by its loss-bearing rows, at the end of trainings with parts of the text; the last is the run's."""
        parts = [share * self.run.adapt.part for share in sorted(self.run.adapt.curve)]
        made = {part: self.trial(f"part-{part:g}", self.run, part=part) for part in parts}
        made |= {self.run.adapt.part: whole} if parts else {}
        return [{"part": part, "rows": one["domain_rows"], "tau": one["last"]["tau"]} for part, one in made.items()]

    def trial(self, label: str, run: RunConfig, **changes: Any) -> dict[str, Any]:
        """What came of a training beside the run: nothing of it is tracked, decoded or kept. Raises Stopped."""
        quiet = replace(run.train, track=TrackConfig(wandb="off"), decode=replace(run.train.decode, evals=0))
        name, features = f"{self.run.name}-trial-{label}", self.run.features or self.run.name
        trial = replace(run, name=name, features=features, train=quiet, adapt=replace(run.adapt, **changes))
        made = self.record(label, trial)
        if self.launch.main:
            shutil.rmtree(trial.directory, ignore_errors=True)
        return made

    def record(self, label: str, run: RunConfig) -> dict[str, Any]:
        """What came of a training that is made where it has not been made. Raises Stopped."""
        path = self.run.directory / "trials" / f"{label}.json"
        asked, found = asked_of(run), facts(path)
        self.launch.wait()  # nobody writes while another still looks
        if found.get("asked") == asked:
            return found
        if label != WHOLE:
            say(f"trial {label}")
        if not train(run):
            raise Stopped
        if self.launch.main:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, facts(run.directory / "training.json") | {"asked": asked, "last": last_measured(run)})
        self.launch.wait()
        return facts(path)


def asked_of(run: RunConfig) -> dict[str, Any]:
    """All that the weights of an adaptation depend on, as JSON: not how many processes make them, nor what they print."""
    found = {key: value for key, value in asdict(run).items() if key in SECTIONS}
    found["train"] = {key: value for key, value in asdict(run.train).items() if key not in UNBOUND}
    found["adapt"] = {key: value for key, value in asdict(run.adapt).items() if key not in TRIALS}
    found["general"] = sorted(general_sources(run.corpus))
    found["features"] = open_store(run, "held-out").manifest.identity
    found["depth"] = measured_depth(run)
    found["weights"] = weights_of(Path(str(run.adapt.head)))
    return dict(json.loads(json.dumps(found)))


def weights_of(folder: Path) -> str:
    """A checksum over the weights of a head's directory."""
    state = xxhash.xxh64()
    for path in sorted(folder.glob("*.safetensors")):
        checksum(path, state)
    return state.hexdigest()


def refuse_unmeasured(run: RunConfig) -> None:
    """A search needs general text that is held out. Raises UserError."""
    if not general_sources(run.corpus) & set(open_store(run, "held-out").sources()):
        raise UserError(
            "adapt.replay search: no general text is held out, so nothing says what is forgotten: raise corpus.held_out, or "
            "give adapt.replay a number"
        )


def last_measured(run: RunConfig) -> dict[str, Any]:
    """What a finished training measured at its end."""
    return [record for record in read_metrics(run.directory / "metrics.jsonl") if "tau" in record][-1]


def choose(found: dict[float, dict[str, Any]]) -> float:
    """Of shares and their trials."""
    kept = {share: made for share, made in found.items() if made["last"]["tau_general"] >= made["general_floor"]}
    if kept:
        return max(kept, key=lambda share: kept[share]["last"]["tau"])
    best = max(found, key=lambda share: found[share]["last"]["tau_general"])
    say(f"no share of replay kept the budget (adapt.budget) in its trial: going on with {best:g}, which forgets least")
    return best


def show_search(found: dict[float, dict[str, Any]], chosen: float) -> None:
    """The trials of a search."""
    rows = []
    for share, made in found.items():
        last, floor = made["last"], made["general_floor"]
        kept = "yes" if last["tau_general"] >= floor else "no"
        mark = " (chosen)" if share == chosen else ""
        rows.append((f"{share:g}{mark}", made["step"], f"{last['tau']:.3f}", f"{last['tau_general']:.3f}", kept))
    table("trials of replay", ("share", "steps", "τ domain", "τ general", "within the budget"), rows)


def expected(points: Sequence[tuple[float, float]], size: float) -> float | None:
    """τ at another size of text, by τ = a - b · n^-c through (n, τ) points: c where three or more show how gains shrink, and
    for two the limit of small c, equal gains by doubling, which is a bound rather than a forecast. None for fewer.
    """
    if len(points) < 2:
        return None
    sizes, taus = (np.array(values, dtype=float) for values in zip(*points))
    fits = [fit(sizes, taus, power, size) for power in (POWERS if len(points) > 2 else POWERS[:1])]
    return min(fits)[1]


def fit(sizes: np.ndarray, taus: np.ndarray, power: float, size: float) -> tuple[float, float]:
    """Squared error of the best curve with an exponent, and its value at a size."""
    shapes = np.stack([np.ones_like(sizes), -((sizes / sizes[-1]) ** -power)], axis=1)
    (a, b), *_ = np.linalg.lstsq(shapes, taus, rcond=None)
    error = float(((shapes @ (a, b) - taus) ** 2).sum())
    return round(error, 12), float(a - b * (size / sizes[-1]) ** -power)
