"""Plots of reports and studies, as inline SVG. Each is small enough for a phone; the page lays them side by side."""

import html
import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from headwright.eval.metrics import read_metrics

matplotlib.use("svg")
from matplotlib import pyplot as plt

matplotlib.rcParams["svg.hashsalt"] = "headwright"  # the same report gives the same file
matplotlib.rcParams["text.parse_math"] = False  # names with dollar signs are names
LEGEND = 9  # points
LONGEST = 26  # letters of a name; more would take the plot's place
MANY = 5  # lines of a plot
SIZE = (4.6, 3.1)
COLOURS = {
    "draft": "#4c78a8",
    "verify": "#f58518",
    "select": "#54a24b",
    "commit": "#b279a2",
    "other": "#9d9da1",
}
PLAIN = "#72b7b2"
Entry = dict[str, Any]


def label(entry: Entry) -> str:
    """An entry's name in plots."""
    warm = f" T={entry['temperature']:g}" if entry["temperature"] else ""
    return short(f"{entry['drafter']} {entry['shape']['name']}{warm}")


def short(name: str) -> str:
    """A long name without its middle: paths and shapes differ at their ends."""
    if len(name) <= LONGEST:
        return name
    end = 2 * LONGEST // 3
    return f"{name[: LONGEST - end - 1]}…{name[-end:]}"


def svg(figure: Any) -> str:
    """A figure as inline SVG."""
    buffer = io.StringIO()
    title = figure.get_suptitle() or figure.axes[0].get_title()
    # text stays text: it can be searched, and a browser has every alphabet's letters
    with warnings.catch_warnings(), matplotlib.rc_context({"svg.fonttype": "none"}):
        warnings.filterwarnings("ignore", "Glyph")  # matplotlib's own font lacks it; a browser draws the text
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    text = buffer.getvalue()
    return f'<svg role="img" aria-label="{html.escape(title)}"{text[text.index("<svg") + 4 :]}'


def whole_numbers(axis: Any) -> None:
    """There is no depth 2.5."""
    axis.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))


def standalone(picture: str) -> str:
    """As a file of its own."""
    return f'<?xml version="1.0" encoding="utf-8"?>\n{picture}'


def rates(entries: Sequence[Entry]) -> str:
    """Conditional (full) and joint (dotted) acceptance by depth."""
    figure, axis = plt.subplots(figsize=SIZE)
    for number, entry in enumerate(first_set(entries)):
        depth = range(1, len(entry["accepted_per_position"]) + 1)
        colour = f"C{number % 10}"
        axis.plot(depth, entry["conditional_per_position"], marker="o", color=colour, label=label(entry))
        axis.plot(depth, entry["accepted_per_position"], marker=".", ls=":", color=colour)
    axis.set(title="accepted, if all before were; dotted: joint", xlabel="draft position", ylim=(0, 1.03))
    whole_numbers(axis)
    axis.legend(fontsize=LEGEND)
    return svg(figure)


def first_set(entries: Sequence[Entry]) -> list[Entry]:
    """The entries of the first prompt set."""
    return [entry for entry in entries if entry["prompt_set"] == entries[0]["prompt_set"]]


def histogram(entry: Entry) -> str:
    """Cycles by accepted tokens."""
    figure, axis = plt.subplots(figsize=SIZE)
    axis.bar(range(len(entry["histogram"])), entry["histogram"], color=COLOURS["draft"])
    axis.set(title=label(entry), xlabel="drafts accepted in a cycle", ylabel="cycles")
    whole_numbers(axis)
    return svg(figure)


def phases(entries: Sequence[Entry]) -> str:
    """Where a cycle's time goes, beside one plain step."""
    shown = first_set(entries)
    figure, axis = plt.subplots(figsize=(SIZE[0], 0.8 + 0.4 * (len(shown) + 1)))
    names, start = [label(entry) for entry in shown], [0.0] * len(shown)
    for phase, colour in COLOURS.items():
        widths = [entry["phases_ms"][phase] for entry in shown]
        axis.barh(names, widths, left=start, color=colour, label=phase)
        start = [a + b for a, b in zip(start, widths)]
    axis.barh(["one plain step"], [shown[0]["speedup_model"]["plain_step_ms"]], color=PLAIN)
    axis.invert_yaxis()
    axis.set(xlabel="milliseconds")
    axis.set_title("a cycle by phase, and a plain step", pad=40)  # above the legend
    axis.legend(fontsize=LEGEND, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return svg(figure)


def groups(pooled: dict[str, Any], name: str) -> str:
    """τ and speed-up of a side, whose name is told, by domain and language, with intervals."""
    rows = [(name, found) for kind in ("by_domain", "by_language") for name, found in pooled[kind].items()]
    figure, (left, right) = plt.subplots(1, 2, figsize=(SIZE[0], 0.9 + 0.34 * len(rows)), sharey=True)
    for place, (_, found) in enumerate(rows):
        whisker(left, place, found["acceptance_length"], found["acceptance_length_ci95"], COLOURS["draft"])
        if found["speedup"] is not None:
            whisker(right, place, found["speedup"], found["speedup_ci95"], COLOURS["verify"])
    left.set_yticks(range(len(rows)), [f"{short(group)} ({found['prompts']})" for group, found in rows])
    left.invert_yaxis()
    left.set(xlabel="τ")
    right.axvline(1, color="#999", lw=1, ls="--")
    right.set(xlabel="speed-up")
    figure.suptitle(name)
    return svg(figure)


def whisker(axis: Any, place: int, value: float, interval: Sequence[float], colour: str) -> None:
    """A value with its interval."""
    axis.plot(interval, [place, place], color=colour, lw=2)
    axis.plot([value], [place], marker="o", color=colour)


def predicted(entries: Sequence[Entry]) -> str:
    """Speed-up by the model from measured phases, against the clock."""
    figure, axis = plt.subplots(figsize=SIZE)
    for entry in first_set(entries):
        axis.plot(entry["speedup_model"]["predicted_here"], entry["speedup"], marker="o", ls="", label=label(entry))
    diagonal(axis)
    axis.set(xlabel="τ · plain step / cycle", ylabel="measured, prefill included", title="model and clock")
    axis.legend(fontsize=LEGEND)
    return svg(figure)


def diagonal(axis: Any) -> None:
    """Where both are equal, and 10 % beside it."""
    low, high = min(*axis.get_xlim(), *axis.get_ylim()), max(*axis.get_xlim(), *axis.get_ylim())
    axis.plot([low, high], [low, high], color="#999", lw=1)
    axis.fill_between([low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high], color="#999", alpha=0.15, lw=0)


def coverage(found: dict[str, Any]) -> str:
    """Share of the answers' tokens that the head can guess at all, by language."""
    if not found:
        return ""
    figure, axis = plt.subplots(figsize=(SIZE[0], 0.8 + 0.4 * len(found)))
    axis.barh(
        [short(name) for name in found], [100 * row["coverage"] for row in found.values()], color=COLOURS["draft"]
    )
    axis.invert_yaxis()
    axis.set(xlim=(0, 100), title="what the draft vocabulary can say", xlabel="% of the tokens of plain answers")
    return svg(figure)


def training(path: Path) -> str:
    """Loss per rollout step and τ on held-out text."""
    records = read_metrics(path)
    losses, taus = [r for r in records if "loss_0" in r], [r for r in records if "tau" in r]
    if not losses or not taus:
        return ""
    figure, (left, right) = plt.subplots(2, 1, figsize=(SIZE[0], 4.4), sharex=True)
    for name in sorted(key for key in losses[-1] if key.startswith("loss_")):
        steps = [r["step"] for r in losses]
        left.plot(steps, [r.get(name) for r in losses], lw=1, label=name.replace("_", " of step "))
    left.set(title="loss on training text")
    left.legend(fontsize=LEGEND)
    right.plot([r["step"] for r in taus], [r["tau"] for r in taus], marker="o")
    right.set(title="τ on held-out text", xlabel="optimizer step")
    return svg(figure)


def study(found: dict[str, Any]) -> str:
    """The plot that a study describes: lines over a column, a diagonal of two columns, or a map."""
    names = {column: heading.strip() for column, heading in found.get("columns", {}).items()}
    plot, rows = found["plot"] | {"names": names}, found["rows"]
    figure, axis = plt.subplots(figsize=SIZE)
    {"lines": lines, "diagonal": against, "map": grid}[plot["kind"]](axis, plot, rows)
    axis.set(
        title=plot.get("title", found["study"]), xlabel=plot.get("xlabel", plot["x"]), ylabel=plot.get("ylabel", "")
    )
    return svg(figure)


def lines(axis: Any, plot: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Columns over another, a line for each group."""
    names = dict.fromkeys(row.get(plot["by"]) for row in rows) if plot.get("by") else {None: None}
    for number, name in enumerate(names):
        mine = [row for row in rows if name is None or row.get(plot["by"]) == name]
        for style, column in zip(("-", ":", "--"), plot["y"]):
            points = [(row[plot["x"]], row[column]) for row in mine if row.get(column) is not None]
            heading = plot.get("names", {}).get(column, column)
            words = " ".join(str(word) for word in (name, heading if len(plot["y"]) > 1 else None) if word is not None)
            if points:
                axis.plot(*zip(*points), marker="o", ls=style, color=f"C{number % 10}", label=words or heading)
    if all(isinstance(row[plot["x"]], int) for row in rows):
        whole_numbers(axis)
    if plot.get("break_even"):
        axis.axhline(1, color="#999", lw=1, ls="--")
    several = len(axis.get_legend_handles_labels()[0])
    if several > MANY:  # more than fit beside the lines
        axis.legend(fontsize=LEGEND, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    elif several:
        axis.legend(fontsize=LEGEND)


def against(axis: Any, plot: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """One column against another."""
    column = plot["y"][0]
    for row in (row for row in rows if row[plot["x"]] is not None and row[column] is not None):
        axis.plot(row[plot["x"]], row[column], marker="o", ls="", label=str(row.get(plot["by"], "")))
    diagonal(axis)
    axis.legend(fontsize=7)


def grid(axis: Any, plot: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Gain (blue) or loss (red) over two columns."""
    across, down = (sorted({row[plot[key]] for row in rows}) for key in ("x", "by"))
    column = plot["y"][0]
    cells = {(row[plot["x"]], row[plot["by"]]): row[column] for row in rows if row[column] is not None}
    values = [[cells.get((x, y), float("nan")) for x in across] for y in down]
    shown = axis.imshow(
        values, origin="lower", aspect="auto", cmap="RdBu", norm=matplotlib.colors.TwoSlopeNorm(1, 0, 3)
    )
    axis.set_xticks(range(len(across)), [f"{x:g}" for x in across])
    axis.set_yticks(range(len(down)), [f"{y:g}" for y in down])
    plt.colorbar(shown, ax=axis, label=plot.get("names", {}).get(column, column))
