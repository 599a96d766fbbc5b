"""One EAGLE-3 training step, ours and that of every peer that is installed, alternating in one run.

    bash scripts/bench_peers.sh                # SpecForge, speculators, ModelOpt, each in an environment of its own
    python scripts/bench_train.py              # one thread; about half an hour with all peers
    python scripts/bench_train.py --sequences 2048 --shares 0.3 --sides ours specforge
    python scripts/bench_train.py --device cuda --dtype bfloat16 --shape qwen3-8b --sequences 2048 8192

A step is the target's distribution, forward, backward, clipping and AdamW over one document, whose last part is learned. Each
side is a process; they take steps in turn, and ratios are taken within a turn. Before anything is timed, our loss and
gradients are compared with the plain dense formulation; afterwards no trainable parameter of any side may lack a gradient.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headwright.configs import UserError
from headwright.configs.command import clean_exit
from headwright.configs.console import say, size, table
from headwright.data.store import write_json

SIDES = Path(__file__).resolve().parent / "bench_sides"
PEERS = Path(__file__).resolve().parents[1] / ".peers"
EXACT = 1e-5  # relative, fp32
DENSE_UP_TO = 1024  # tokens: beyond, the plain formulation's scores do not fit


@dataclass
class Running:
    """A side at work."""

    name: str
    process: subprocess.Popen[str]
    about: dict[str, Any] = field(default_factory=dict)
    first: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)

    def answer(self) -> dict[str, Any]:
        """Its next line."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise UserError(f"{self.name} ended with code {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def step(self, order: str = "step") -> dict[str, Any]:
        """One step."""
        assert self.process.stdin
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()
        return self.answer()

    def middle(self, key: str) -> float:
        """The median over the timed steps."""
        return statistics.median(step[key] for step in self.steps)


def command(name: str, flags: Sequence[str]) -> list[str] | None:
    """How a side is started; None where it is not installed."""
    if name.startswith("ours"):
        own = {"ours": [], "ours, plain": ["--plain"], "ours, recompute": ["--recompute"]}[name]
        return [sys.executable, str(SIDES / "ours.py"), *own, *flags]
    python = PEERS / name / "bin" / "python"
    return [str(python), str(SIDES / f"peer_{name}.py"), *flags] if python.exists() else None


def environment(threads: int) -> dict[str, str]:
    """Limits on threads, before torch is loaded."""
    return os.environ | {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}


def start(name: str, flags: Sequence[str], threads: int) -> Running | None:
    """Start a side and wait until its model is built."""
    line = command(name, flags)
    if line is None:
        say(f"{name} is not installed: bash scripts/bench_peers.sh {name}")
        return None
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(line, text=True, env=environment(threads), **pipes)
    side = Running(name, process)
    side.about = side.answer()
    return side


def compare(flags: Sequence[str], threads: int) -> dict[str, float]:
    """How far our loss and gradients are from the plain formulation. Raises UserError when they are not equal."""
    line = [sys.executable, str(SIDES / "ours.py"), "--check", *flags]
    found: dict[str, float] = json.loads(subprocess.check_output(line, text=True, env=environment(threads)))
    if max(found.values()) > EXACT:
        raise UserError(f"our step is not the plain one: {found}")
    return found


def measure(arguments: argparse.Namespace, sequence: int, share: float) -> dict[str, Any]:
    """All sides on one problem."""
    flags = ["--sequence", str(sequence), "--share", str(share), "--device", arguments.device]
    flags += ["--dtype", arguments.dtype, "--shape", arguments.shape]
    exact = None
    if sequence <= DENSE_UP_TO and arguments.dtype == "float32":
        exact = compare(flags, arguments.threads)
        say(f"loss within {exact['loss']:.1e} and gradients within {exact['gradient']:.1e} of the plain formulation")
    wanted = [name for name in arguments.sides if name != "ours, plain" or sequence <= DENSE_UP_TO]
    sides = [side for name in wanted if (side := start(name, flags, arguments.threads))]
    try:
        for side in sides:
            side.first = side.step("step check")
            if side.first["missing"]:
                raise UserError(f"{side.name}: no gradient for {', '.join(side.first['missing'])}")
        for _ in range(arguments.rounds if sequence < 2000 else min(arguments.rounds, arguments.long_rounds)):
            for side in sides:
                side.steps.append(side.step())
    finally:
        for side in sides:
            side.process.kill()
    show(sides, sequence, share)
    return {"sequence": sequence, "share": share, "exact": exact, "sides": [record(side) for side in sides]}


def ratios(side: Running, ours: Running, key: str) -> list[float]:
    """A side against ours, turn by turn."""
    return [theirs[key] / own[key] for theirs, own in zip(side.steps, ours.steps)]


def spread(values: list[float]) -> str:
    """Median, least and largest."""
    return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def show(sides: list[Running], sequence: int, share: float) -> None:
    """One table, and what the step costs against its own operations."""
    ours = sides[0]
    rows = []
    for side in sides:
        peak = max(step["peak"] for step in side.steps)
        ratio = peak / max(step["peak"] for step in ours.steps)
        rows.append(
            (
                f"{side.name} {side.about['version']}",
                f"{side.middle('cpu'):.2f}",
                f"{side.middle('wall'):.2f}",
                f"{sequence / side.middle('cpu'):.0f}",
                size(int(peak)),
                f"{side.first['wall']:.1f}",
                "1" if side is ours else spread(ratios(side, ours, "cpu")),
                "1" if side is ours else spread(ratios(side, ours, "wall")),
                f"{ratio:.2f}",
            )
        )
    columns = ("side", "CPU-s", "wall s", "tok/CPU-s", "peak above weights", "first step s")
    columns += ("CPU / ours", "wall / ours", "peak / ours")
    table(f"{sequence} tokens, {share:.0%} loss-bearing, {len(ours.steps)} turns", columns, rows)
    floor = ours.about["flops"] / ours.about["rate"]
    say(
        f"ours: {ours.about['flops'] / 1e9:.0f} GFLOP counted; at this process's {ours.about['rate'] / 1e9:.0f} GFLOP/s "
        f"{floor:.2f} s; the step takes {ours.middle('cpu') / floor:.2f} times that; "
        f"{1e3 * ours.middle('cpu') / ours.about['rows']:.2f} ms per loss-bearing row; "
        f"first step {ours.first['wall'] / ours.middle('wall'):.2f} times the median"
    )


def record(side: Running) -> dict[str, Any]:
    """For the result file."""
    return {"name": side.name, "about": side.about, "first": side.first, "steps": side.steps}


def stack() -> str:
    """Where this was measured."""
    processor = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), processor)
    return f"{processor}, Python {platform.python_version()}, torch {torch.__version__}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[512, 2048])
    parser.add_argument(
        "--shares", type=float, nargs="+", default=[1.0, 0.5, 0.3], help="of the tokens that are learned"
    )
    parser.add_argument(
        "--sides",
        nargs="+",
        default=["ours", "ours, plain", "specforge", "speculators", "modelopt"],
        help="ours comes first",
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed turns after the first step")
    parser.add_argument("--long-rounds", type=int, default=2, help="the same from 2000 tokens on")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--shape", default="smollm2-135m", help="smollm2-135m or qwen3-8b")
    parser.add_argument("--out", type=Path, help="write all figures to this JSON file")
    arguments = parser.parse_args()
    with clean_exit():
        say(f"{stack()}; {arguments.shape}, {arguments.dtype}, {arguments.device}, {arguments.threads} thread(s)")
        found = []
        for sequence in arguments.sequences:
            for share in arguments.shares:
                found.append(measure(arguments, sequence, share))
                if arguments.out:
                    write_json(
                        arguments.out, {"stack": stack(), "arguments": vars(arguments) | {"out": None}, "runs": found}
                    )


if __name__ == "__main__":
    main()
