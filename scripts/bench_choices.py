"""Which choice trains the better head: the same harvest, one key changed, several seeds, τ on held-out text.

    headwright harvest --config configs/smollm2-eagle3-quick.yaml
    python scripts/bench_choices.py --config configs/smollm2-eagle3-quick.yaml --seeds 3 \\
        --choices head.out_of_vocab=drop head.out_of_vocab=renormalise

A choice may be several keys: head.step_weights=dpace,head.loss=lk. The first one is what the others are compared with, seed by
seed. Best held-out τ of a greedy chain, exact, without decoding.
"""

import argparse
import json
import os
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from headwright.configs import RunConfig
from headwright.configs.command import clean_exit
from headwright.configs.console import say, table
from headwright.configs.load import load_run
from headwright.data.harvest import store_path
from headwright.eval.metrics import read_metrics
from headwright.train.run import train


def fresh(base: RunConfig, name: str, seed: int) -> RunConfig:
    """A run of its own with the base's held-out features."""
    run = replace(base, name=f"{base.name}-{name}-{seed}", seed=seed)
    shutil.rmtree(run.directory, ignore_errors=True)
    run.directory.mkdir(parents=True)
    shutil.copytree(store_path(base, "held-out"), store_path(run, "held-out"))
    return run


def outcome(run: RunConfig) -> dict[str, Any]:
    """Train, and see how the head came out."""
    train(run)
    records = [record for record in read_metrics(run.directory / "metrics.jsonl") if "loss_0" in record]
    last = records[-max(1, len(records) // 10) :]
    result = json.loads((run.directory / "training.json").read_text(encoding="utf-8"))
    loss = statistics.fmean(record["loss_0"] for record in last)
    return {"tau": result["best_tau"], "loss_0": loss, "seconds": result["seconds"]}


def measure(arguments: argparse.Namespace, choice: str, seed: int) -> dict[str, Any]:
    """One training."""
    changed = load_run(arguments.config, [*arguments.overrides, *choice.split(",")])
    base = load_run(arguments.config, arguments.overrides)
    run = fresh(base, "choice", seed)
    shutil.copytree(store_path(base, "train"), store_path(run, "train"))
    found = outcome(replace(changed, name=run.name, seed=seed))
    shutil.rmtree(run.directory)
    return found


def show(choices: list[str], found: list[list[dict[str, Any]]]) -> None:
    """One row a choice."""
    rows = []
    for choice, results in zip(choices, found):
        apart = [result["tau"] - first["tau"] for result, first in zip(results, found[0])]
        rows.append(
            (
                choice,
                f"{statistics.fmean(result['tau'] for result in results):.3f}",
                ", ".join(f"{result['tau']:.3f}" for result in results),
                f"{statistics.fmean(apart):+.3f} [{min(apart):+.3f}, {max(apart):+.3f}]",
                f"{statistics.fmean(result['seconds'] for result in results):.0f} s",
            )
        )
    table("best held-out τ", ("choice", "mean", "by seed", "against the first", "training"), rows)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--choices", nargs="+", required=True, help="overrides to compare")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write all figures to this JSON file")
    parser.add_argument("--overrides", nargs="*", default=[], metavar="section.key=value", help="of all runs")
    arguments = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with clean_exit():
        found: list[list[dict[str, Any]]] = []
        for choice in arguments.choices:
            found.append([measure(arguments, choice, seed) for seed in range(arguments.seeds)])
            say(f"{choice}: τ {', '.join(format(result['tau'], '.3f') for result in found[-1])}")
            if arguments.out:
                arguments.out.write_text(json.dumps(dict(zip(arguments.choices, found)), indent=2) + "\n")
        show(arguments.choices, found)


if __name__ == "__main__":
    main()
