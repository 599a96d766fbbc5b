"""Short trainings beside an adaptation: how much general text must be replayed, and what more of the domain's text would give.

A trial is a run of its own over the same features. What came of it is kept in runs/NAME/trials/, its weights are not.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from headwright.configs import RunConfig, UserError
from headwright.configs.console import say, table
from headwright.data.corpus import general_sources
from headwright.data.harvest import open_store
from headwright.data.replay import some_of
from headwright.data.store import write_json
from headwright.eval.metrics import read_metrics
from headwright.eval.records import facts
from headwright.train.launch import Launch
from headwright.train.run import train

POWERS = np.linspace(0.02, 2.0, 100)  # exponents of the learning curve that are tried
ASKED = ("target", "corpus", "answers", "vocab", "head", "train", "adapt", "seed", "features")


class Stopped(Exception):
    """A trial was asked to stop, and has left a checkpoint."""


@dataclass
class Trials:
    """Those of a run, on a launch."""

    run: RunConfig
    launch: Launch

    def replay(self) -> float:
        """The share of general text with the best τ on the domain, of those that keep the budget; else what forgets least."""
        run, found = self.run, {}
        for share in run.adapt.shares:
            adapt = replace(run.adapt, replay=share, curve=[])
            epochs = replace(run.train, epochs=run.train.epochs * run.adapt.trial)
            found[share] = self.trial(f"replay-{share:g}", replace(run, adapt=adapt, train=epochs))
        chosen = choose(found)
        show_search(found, chosen)
        return chosen

    def curve(self) -> list[dict[str, float]]:
        """τ of the domain by its loss-bearing rows, at the end of trainings with parts of the text; the last is the run's."""
        run, points = self.run, []
        for part in sorted(run.adapt.curve):
            adapt = replace(run.adapt, part=part, curve=[])
            made = self.trial(f"part-{part:g}", replace(run, adapt=adapt))
            points.append({"part": part, "rows": domain_rows(run, part), "tau": made["last"]["tau"]})
        whole = last_measured(run)["tau"]
        return (
            [*points, {"part": run.adapt.part, "rows": domain_rows(run, run.adapt.part), "tau": whole}]
            if points
            else []
        )

    def trial(self, label: str, run: RunConfig) -> dict[str, Any]:
        """What came of a training, made once. Raises Stopped."""
        path = self.run.directory / "trials" / f"{label}.json"
        run = replace(run, name=f"{self.run.name}-trial-{label}", features=self.run.features or self.run.name)
        asked = json.loads(json.dumps({key: value for key, value in asdict(run).items() if key in ASKED}))
        found = facts(path)
        self.launch.wait()  # nobody writes while another still looks
        if found.get("asked") == asked:
            return found
        say(f"trial {label}")
        if not train(run):
            raise Stopped
        if self.launch.main:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, facts(run.directory / "training.json") | {"asked": asked, "last": last_measured(run)})
            shutil.rmtree(run.directory)
        self.launch.wait()
        return facts(path)


def last_measured(run: RunConfig) -> dict[str, Any]:
    """What a finished training measured at its end."""
    return [record for record in read_metrics(run.directory / "metrics.jsonl") if "tau" in record][-1]


def choose(found: dict[float, dict[str, Any]]) -> float:
    """Of shares and their trials. Raises UserError where no general text was measured."""
    if not all("tau_general" in made["last"] for made in found.values()):
        raise UserError("adapt.replay search: no general text is held out, so nothing says what is forgotten")
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


def domain_rows(run: RunConfig, part: float) -> int:
    """Loss-bearing rows of a part of the domain's training text."""
    features, names = open_store(run, "train"), general_sources(run.corpus)
    domain = [document for document, source in enumerate(features.sources()) if source not in names]
    rows = features.loss_rows()
    return sum(rows[document] for document in some_of(domain, part, run.seed))


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
