"""report.html: one self-contained file with the verdict, the five answers, tables and plots."""

import io
from pathlib import Path
from typing import Any

import jinja2
import matplotlib

from headwright.data.store import write_text
from headwright.eval.metrics import read_metrics

matplotlib.use("svg")
from matplotlib import pyplot as plt

COLOURS = {
    "draft": "#4c78a8",
    "verify": "#f58518",
    "select": "#54a24b",
    "commit": "#b279a2",
    "other": "#9d9da1",
}


def write_html(directory: Path, report: dict[str, Any]) -> None:
    """Render `report` (and the training curve, where there is one) into directory/report.html."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    plots = {
        "rates": plot_rates(report["entries"]),
        "histogram": plot_histogram(report["entries"][0]),
        "phases": plot_phases(report["entries"]),
        "training": plot_training(directory / "metrics.jsonl"),
    }
    page = environment.get_template("report.html").render(report=report, plots=plots, first=report["entries"][0])
    write_text(directory / "report.html", page)


def label(entry: dict[str, Any]) -> str:
    """An entry's name in plots."""
    return f"{entry['drafter']} {entry['shape']['name']}" + (
        f" T={entry['temperature']:g}" if entry["temperature"] else ""
    )


def svg(figure: Any) -> str:
    """A figure as inline SVG."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def plot_rates(entries: list[dict[str, Any]]) -> str:
    """Conditional and joint acceptance by depth."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), sharey=True)
    for entry in entries:
        depth = range(1, len(entry["accepted_per_position"]) + 1)
        left.plot(depth, entry["conditional_per_position"], marker="o", label=label(entry))
        right.plot(depth, entry["accepted_per_position"], marker="o", label=label(entry))
    left.set(title="accepted, if all before were", xlabel="draft position", ylim=(0, 1))
    right.set(title="accepted (joint)", xlabel="draft position")
    right.legend(fontsize=7)
    return svg(figure)


def plot_histogram(entry: dict[str, Any]) -> str:
    """Cycles by accepted tokens."""
    figure, axis = plt.subplots(figsize=(4.5, 2.6))
    axis.bar(range(len(entry["histogram"])), entry["histogram"], color=COLOURS["draft"])
    axis.set(title=f"{label(entry)}: accepted drafts per cycle", xlabel="accepted", ylabel="cycles")
    return svg(figure)


def plot_phases(entries: list[dict[str, Any]]) -> str:
    """Where a cycle's time goes, beside one plain step."""
    figure, axis = plt.subplots(figsize=(8, 0.6 + 0.45 * (len(entries) + 1)))
    names = [label(entry) for entry in entries]
    start = [0.0] * len(entries)
    for phase, colour in COLOURS.items():
        widths = [entry["phases_ms"][phase] for entry in entries]
        axis.barh(names, widths, left=start, color=colour, label=phase)
        start = [a + b for a, b in zip(start, widths)]
    axis.barh(["one plain step"], [entries[0]["speedup_model"]["plain_step_ms"]], color="#72b7b2")
    axis.invert_yaxis()
    axis.set(xlabel="milliseconds per cycle")
    axis.legend(fontsize=7, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return svg(figure)


def plot_training(path: Path) -> str:
    """Loss per rollout step and τ on held-out text."""
    records = read_metrics(path)
    losses, taus = [r for r in records if "loss_0" in r], [r for r in records if "tau" in r]
    if not losses or not taus:
        return ""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.8))
    for name in sorted(key for key in losses[-1] if key.startswith("loss_")):
        left.plot(
            [r["step"] for r in losses],
            [r.get(name) for r in losses],
            lw=1,
            label=name.replace("_", " of step "),
        )
    left.set(title="loss on training text", xlabel="optimizer step")
    left.legend(fontsize=7)
    right.plot([r["step"] for r in taus], [r["tau"] for r in taus], marker="o")
    right.set(title="τ on held-out text", xlabel="optimizer step")
    return svg(figure)
