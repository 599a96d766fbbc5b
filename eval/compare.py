"""Evaluations side by side, paired over prompts, with a test of the difference. Runnable: `headwright compare A B …`."""

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headwright.configs import UserError
from headwright.configs.command import clean_exit
from headwright.configs.console import say, table
from headwright.eval.metrics import bootstrap
from headwright.eval.records import read_report

FLIPS = 10_000  # sign patterns of the test, where there are more than can be enumerated
ENUMERATED = 14  # pairs up to which all are

Row = dict[str, Any]
Pair = tuple[Row, Row]


@dataclass
class Line:
    """One entry of one report: its name, its prompts, and whether it is of the run's own head."""

    run: str
    entry: dict[str, Any]
    stack: str
    head: bool

    @property
    def kind(self) -> tuple[Any, ...]:
        """What is alike in several reports."""
        entry = self.entry
        drafter = "" if self.head else entry["drafter"]
        return entry["prompt_set"], drafter, entry["shape"]["name"], entry["temperature"]

    @property
    def name(self) -> str:
        """In tables."""
        entry = self.entry
        warm = f" T={entry['temperature']:g}" if entry["temperature"] else ""
        return f"{self.run}: {entry['drafter']} {entry['shape']['name']}{warm}"

    @property
    def prompts(self) -> dict[str, Row]:
        """By place; a place that stands twice (one prompt asked twice) by its count."""
        found: dict[str, Row] = {}
        for row in self.entry["per_prompt"]:
            place = row["place"]
            while place in found:
                place += "'"
            found[place] = row
        return found


def lines_of(paths: Sequence[Path], wanted: Callable[[dict[str, Any]], bool]) -> list[Line]:
    """The entries of some reports that are to be compared."""
    reports = [read_report(path) for path in paths]
    names = [report["name"] for report in reports]
    lines: list[Line] = []
    for path, report in zip(paths, reports):
        name = report["name"] if names.count(report["name"]) == 1 else str(path)
        own = report["entries"][0]["drafter"]
        lines += [
            Line(name, entry, report["answers"]["stack"], entry["drafter"] == own)
            for entry in report["entries"]
            if wanted(entry)
        ]
    return lines


def pairs_of(base: Line, line: Line) -> list[Pair]:
    """The prompts that both have, in the base's order."""
    theirs = line.prompts
    return [(row, theirs[place]) for place, row in base.prompts.items() if place in theirs]


def tau(rows: Sequence[Row]) -> float:
    """Micro average."""
    cycles = sum(row["cycles"] for row in rows)
    return sum(row["emitted"] for row in rows) / cycles if cycles else float("nan")


def tau_gain(pairs: Sequence[Pair]) -> float:
    """τ of the second less τ of the first, over the same prompts."""
    return tau([b for _, b in pairs]) - tau([a for a, _ in pairs])


def speed_ratio(pairs: Sequence[Pair]) -> float:
    """Speed-up of the second over that of the first, each over its own plain baseline of the same prompts."""
    first, second = ([row for pair in pairs for row in pair[side : side + 1]] for side in (0, 1))
    return speedup(second) / speedup(first)


def speedup(rows: Sequence[Row]) -> float:
    """Over plain decoding, summed over prompts."""
    return sum(row["plain_seconds_per_token"] for row in rows) / sum(
        row["seconds"] / max(row["tokens"], 1) for row in rows
    )


def sign_test(differences: Sequence[float], seed: int) -> float:
    """p of a paired permutation test: how often the mean difference is as large when each prompt's sign is drawn anew.

    All sign patterns where they are few; else a sample, with the observed pattern among them.
    """
    values = np.array([value for value in differences if value != 0])
    if not len(values):
        return 1.0
    if len(values) <= ENUMERATED:
        signs = np.array(list(itertools.product((-1, 1), repeat=len(values))))
        return float((np.abs(signs @ values) >= abs(values.sum()) - 1e-12).mean())
    signs = np.random.default_rng(seed).choice((-1, 1), size=(FLIPS, len(values)))
    return float((1 + (np.abs(signs @ values) >= abs(values.sum()) - 1e-12).sum()) / (1 + FLIPS))


def prompt_gains(pairs: Sequence[Pair]) -> list[float]:
    """τ of each prompt, the second's less the first's."""
    return [b["emitted"] / b["cycles"] - a["emitted"] / a["cycles"] for a, b in pairs if a["cycles"] and b["cycles"]]


def compared(base: Line, line: Line, seed: int = 0) -> dict[str, Any]:
    """One line against the base."""
    pairs = pairs_of(base, line)
    if not pairs:
        raise UserError(f"{line.name}: no prompt in common with {base.name}")
    timed = [pair for pair in pairs if all("plain_seconds_per_token" in row for row in pair)]
    return {
        "base": base.name,
        "name": line.name,
        "prompt_set": line.entry["prompt_set"],
        "prompts": len(pairs),
        "tau": tau([b for _, b in pairs]),
        "tau_base": tau([a for a, _ in pairs]),
        "tau_gain": tau_gain(pairs),
        "tau_gain_ci95": bootstrap(pairs, tau_gain, seed),
        "tau_p": sign_test(prompt_gains(pairs), seed),
        "timed_prompts": len(timed),
        "speedup": speedup([b for _, b in timed]) if timed else None,
        "speed_ratio": speed_ratio(timed) if timed else None,
        "speed_ratio_ci95": bootstrap(timed, speed_ratio, seed) if timed else None,
    }


def compare(args: argparse.Namespace) -> None:
    """Read, pair, print."""

    def wanted(entry: dict[str, Any]) -> bool:
        return all(
            (
                not args.shape or entry["shape"]["name"] == args.shape,
                not args.drafter or entry["drafter"].startswith(args.drafter),
                not args.set or entry["prompt_set"] == args.set,
                args.temperature is None or entry["temperature"] == args.temperature,
            )
        )

    lines = lines_of([Path(path) for path in args.reports], wanted)
    found = [row for alike in alike_of(lines, len(args.reports) > 1) for row in compare_set(alike)]
    if not found:
        raise UserError("nothing to compare: give two reports, or one with several drafters or shapes (eval.heads)")
    if args.json:
        print(json.dumps(found, indent=2))
        return
    show(found)
    stacks = {line.stack for line in lines}
    if len(stacks) > 1:
        say("Speeds were measured on different stacks, each over its own baseline: " + " | ".join(sorted(stacks)))


def alike_of(lines: Sequence[Line], several: bool) -> list[list[Line]]:
    """Of several reports: the same drafter (or each report's head), shape and temperature. Of one: all lines of a set."""
    found: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        found.setdefault(line.kind if several else line.kind[:1], []).append(line)
    return list(found.values())


def compare_set(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """All lines of a set against its first."""
    return [compared(lines[0], line) for line in lines[1:]]


def show(found: Sequence[dict[str, Any]]) -> None:
    """A table for each set."""
    for name, base in dict.fromkeys((row["prompt_set"], row["base"]) for row in found):
        rows = [row for row in found if (row["prompt_set"], row["base"]) == (name, base)]
        cells = [
            (
                row["name"],
                row["prompts"],
                f"{row['tau']:.2f}",
                f"{row['tau_gain']:+.2f} [{row['tau_gain_ci95'][0]:+.2f}, {row['tau_gain_ci95'][1]:+.2f}]",
                f"{row['tau_p']:.3f}",
                ratio_of(row),
            )
            for row in rows
        ]
        title = f"{name}: against {base} (τ {rows[0]['tau_base']:.2f})"
        table(title, ("", "prompts", "τ", "τ − base [95 %]", "p", "speed ÷ base [95 %]"), cells)
    say("Paired over the same prompts; p by sign flips of each prompt's difference. Of many p, one is small by chance.")


def ratio_of(row: dict[str, Any]) -> str:
    """The speed column."""
    if row["speed_ratio"] is None:
        return "–"
    low, high = row["speed_ratio_ci95"]
    return f"{row['speed_ratio']:.2f} [{low:.2f}, {high:.2f}]"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(
        prog="headwright compare",
        description="Evaluations side by side. The first is the base; every other is paired with it over the prompts that both "
        "have: difference of τ with a bootstrap interval and a sign-flip test, ratio of speed-ups. To compare heads or "
        "checkpoints in the same turns, on the same machine load, measure them in one run: headwright eval "
        "eval.heads='[runs/a/head, runs/b/checkpoints/last]', and give that one report.",
    )
    out.add_argument("reports", nargs="+", metavar="RUN", help="runs' directories, or report.json files")
    out.add_argument("--shape", metavar="NAME", help="only this shape, such as chain-5")
    out.add_argument("--drafter", metavar="NAME", help="only drafters whose name begins so")
    out.add_argument("--set", metavar="NAME", help="only this prompt set")
    out.add_argument("--temperature", type=float, metavar="T", help="only this temperature")
    out.add_argument("--json", action="store_true", help="for machines")
    return out


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    args = parser().parse_args(argv)
    with clean_exit():
        compare(args)


if __name__ == "__main__":
    main()
