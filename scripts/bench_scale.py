"""How training scales: tokens per second of one process and of several, the share of the time in which they wait for data,
what checkpoints and measurements cost. Real launches of train/eagle3.py, in turn, several rounds.

    python scripts/bench_scale.py                                   # 1 and 2 processes, DDP, one thread each
    python scripts/bench_scale.py --strategies ddp fsdp2 zero2      # beside each other
    python scripts/bench_scale.py --whole                           # a whole run at the config's own evals and saves

Features are harvested first where they are not there.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headwright.configs.console import say, table
from headwright.configs.load import load_run
from headwright.data.store import write_json
from headwright.eval.metrics import read_metrics
from headwright.train.provenance import versions

ROOT = Path(__file__).resolve().parents[1]
SKIPPED = 2  # log lines of a run's start


@dataclass
class Side:
    """Some processes under a strategy, with so many threads each."""

    strategy: str
    processes: int
    threads: int
    speeds: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        """In tables."""
        return f"{self.strategy} × {self.processes}, {self.threads} thread{'s' if self.threads > 1 else ''} each"


def launch_line(side: Side) -> list[str]:
    """How a user starts it."""
    if side.processes == 1:
        return [sys.executable]
    config = ROOT / "configs" / f"accelerate-{side.strategy}.yaml"
    options = ["--config_file", str(config), "--num_processes", str(side.processes), "--mixed_precision", "no"]
    return [sys.executable, "-m", "accelerate.commands.launch", *options]


def train(arguments: argparse.Namespace, side: Side, name: str, changes: list[str]) -> dict[str, Any]:
    """One run; its records, and what training.json says."""
    folder = Path(arguments.runs) / name
    shutil.rmtree(folder, ignore_errors=True)
    line = [
        *launch_line(side),
        str(ROOT / "train" / "eagle3.py"),
        "--config",
        arguments.config,
        f"runs={arguments.runs}",
        f"name={name}",
        f"features={arguments.features}",
        *changes,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": str(side.threads), "WANDB_MODE": "disabled"}
    done = subprocess.run(line, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(f"{' '.join(line)}\n{done.stdout}")
    finished = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    records = read_metrics(folder / "metrics.jsonl")
    shutil.rmtree(folder)
    return {"records": records, "finished": finished}


def harvested(arguments: argparse.Namespace) -> None:
    """Features, where they are not there."""
    manifest = Path(arguments.runs) / arguments.features / "features" / "manifest.json"
    if not manifest.is_file():
        line = [sys.executable, "-m", "headwright.train.cli", "harvest", "--config", arguments.config]
        subprocess.run([*line, f"runs={arguments.runs}", f"name={arguments.features}"], check=True)


def compare(arguments: argparse.Namespace) -> list[Side]:
    """Speed of each side, in turn. The same number of batches a step on all, and so the same steps."""
    most = arguments.processes[-1]
    sides = [Side("single", 1, arguments.threads)]
    sides += [
        Side(name, count, arguments.threads)
        for name in arguments.strategies
        for count in arguments.processes
        if count > 1
    ]
    if arguments.threads == 1:
        sides.append(Side("single", 1, most))
    for turn in range(arguments.rounds):
        for side in sides:
            changes = [
                f"train.accumulate={max(1, most // side.processes)}",
                f"train.epochs={arguments.epochs}",
                "train.log_every=2",
                "train.evals=1",
                "train.decode.evals=0",
                "train.saves=1",
            ]
            found = train(arguments, side, "bench-scale", changes)
            records = [record for record in found["records"] if "tokens_per_second" in record][SKIPPED:]
            side.speeds.append(statistics.median(record["tokens_per_second"] for record in records))
            side.waits.append(statistics.mean(record["data_wait"] for record in records))
            say(f"round {turn + 1}, {side.name}: {side.speeds[-1]:.0f} tokens/s, data wait {side.waits[-1]:.2%}")
    return sides


def show(sides: list[Side]) -> None:
    """One row each; ratios to the first side, round by round."""
    rows = []
    for side in sides:
        ratios = [ours / one for ours, one in zip(side.speeds, sides[0].speeds)]
        middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
        rows.append(
            [
                side.name,
                f"{statistics.median(side.speeds):.0f}",
                f"{middle:.2f} [{low:.2f}, {high:.2f}]",
                f"{statistics.median(side.waits):.2%}",
            ]
        )
    table("training speed", ["side", "tokens/s", "ratio to the first", "waiting for data"], rows)


def whole(arguments: argparse.Namespace) -> dict[str, float]:
    """A run at the config's own evals and saves: which share of it they take."""
    side = Side("single", 1, arguments.threads if arguments.threads > 1 else os.cpu_count() or 1)
    found = train(arguments, side, "bench-scale-whole", [])
    finished = found["finished"]
    waits = [record["data_wait"] for record in found["records"] if "data_wait" in record]
    shares = {
        "seconds": finished["seconds"],
        "steps": finished["total"],
        "measuring": finished["seconds_measuring"] / finished["seconds"],
        "waiting for checkpoints": finished["seconds_saving"] / finished["seconds"],
        "waiting for data": statistics.mean(waits),
    }
    say(f"a whole run of {arguments.config}, {side.name}:")
    table(
        "its time",
        ["what", "measured"],
        [
            (name, f"{value:.2%}" if name.startswith(("meas", "wait")) else f"{value:.0f}")
            for name, value in shares.items()
        ],
    )
    return shares


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/smollm2-eagle3-quick.yaml")
    parser.add_argument("--runs", default="runs")
    parser.add_argument("--features", help="run whose features are used; default: the config's own name")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--strategies", nargs="+", default=["ddp"])
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--whole", action="store_true", help="measure a whole run instead")
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    arguments = parser.parse_args()
    arguments.features = arguments.features or load_run(arguments.config).name
    harvested(arguments)
    say(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    figures: dict[str, Any] = {"versions": versions()}
    if arguments.whole:
        figures["whole"] = whole(arguments)
    else:
        sides = compare(arguments)
        show(sides)
        figures["sides"] = [vars(side) for side in sides]
    if arguments.json:
        write_json(Path(arguments.json), figures)


if __name__ == "__main__":
    main()
