"""The curves of runs without any tracker. Runnable: `headwright plot runs/NAME …`."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from headwright.configs import UserError
from headwright.configs.command import clean_exit
from headwright.configs.console import say
from headwright.data.store import replace_with
from headwright.eval.metrics import read_metrics

matplotlib.use("agg")
from matplotlib import pyplot as plt

FORMATS = (".svg", ".png", ".pdf")
Records = list[dict[str, Any]]
Panel = Callable[[Any, str, Records], None]


def curve(axis: Any, records: Records, key: str, label: str, **style: Any) -> None:
    """One key over the steps, where it is there."""
    points = [(record["step"], record[key]) for record in records if key in record]
    if points:
        axis.plot(*zip(*points), label=label, **style)


def by_step(prefix: str, label: str = "step {}") -> Panel:
    """A metric of each rollout step."""

    def panel(axis: Any, run: str, records: Records) -> None:
        names = sorted({key for record in records for key in record if key.removeprefix(prefix).isdecimal()})
        for name in names:
            curve(axis, records, name, run + label.format(name.removeprefix(prefix)), lw=1)

    return panel


def of(*keys: tuple[str, str], **style: Any) -> Panel:
    """Some keys, by their labels."""

    def panel(axis: Any, run: str, records: Records) -> None:
        for key, label in keys:
            curve(axis, records, key, f"{run}{label}", **{"lw": 1} | style)

    return panel


PANELS: dict[str, Panel] = {
    "loss on training text": by_step("loss_"),
    "acceptance of sampled drafts, Σ min(p, q)": by_step("alpha_"),
    "τ on held-out text": of(
        ("tau", "from stored features"), ("tau_decoded", "decoded"), ("tau_proxy", "teacher-forced proxy"), marker="o"
    ),
    "cycles that accept at least so many drafts": by_step("accepted_", "≥ {}"),
    "learning rate": of(("lr", "of the run")),
    "gradient norm, before clipping": of(("grad_norm", "global")),
    "tokens per second, all processes": of(("tokens_per_second", "training alone")),
    "share of the time waiting for data": of(("data_wait", "mean of the processes")),
}


def draw(runs: dict[str, Records]) -> Any:
    """All panels, two in a row; runs over each other."""
    figure, axes = plt.subplots(-(-len(PANELS) // 2), 2, figsize=(11, 3 * -(-len(PANELS) // 2)))
    for axis, (title, panel) in zip(axes.flat, PANELS.items()):
        for name, records in runs.items():
            panel(axis, f"{name}: " if len(runs) > 1 else "", records)
        axis.set(title=title, xlabel="optimizer step")
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=7)
        else:
            axis.text(0.5, 0.5, "not logged", ha="center", transform=axis.transAxes)
    figure.tight_layout()
    return figure


def read_run(folder: Path) -> Records:
    """metrics.jsonl of a run, or UserError."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise UserError(
            f"{path}: no such file: give the directory of a run that was trained, such as runs/smollm2-eagle3"
        )
    records = read_metrics(path)
    if not records:
        raise UserError(f"{path}: holds no record yet")
    return records


def plot(folders: Sequence[Path], output: Path | None) -> Path:
    """Draw the runs into `output`, by default curves.svg in the first one's directory."""
    output = output or folders[0] / "curves.svg"
    if output.suffix not in FORMATS:
        raise UserError(f"--output {output}: give a name that ends in {', '.join(FORMATS)}")
    figure = draw({folder.resolve().name: read_run(folder) for folder in folders})
    output.parent.mkdir(parents=True, exist_ok=True)
    replace_with(output, lambda path: figure.savefig(path, format=output.suffix[1:]))
    plt.close(figure)
    return output


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="headwright plot",
        description="The curves of a run, out of its metrics.jsonl: loss, acceptance, τ, learning rate, speed. Several runs "
        "are drawn over each other.",
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="DIR", help="directory of a run, such as runs/smollm2-eagle3"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="svg, png or pdf; default: curves.svg in the first DIR"
    )
    args = parser.parse_args(argv)
    with clean_exit():
        say(f"curves: {plot(args.runs, args.output)}")


if __name__ == "__main__":
    main()
