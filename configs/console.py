"""What stages print: tables, progress bars, numbers with units."""

import os
import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def speaks() -> bool:
    """Whether this is the process of a launch that talks to the user."""
    return os.environ.get("RANK", "0") == "0"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; the first column is left-aligned, the others right."""
    if not speaks():
        return
    grid = Table(title=Text(title), title_justify="left", title_style="bold", header_style="bold")
    for index, column in enumerate(columns):
        grid.add_column(Text(column), justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(str(cell)) for cell in row))  # names are not markup
    console.print(grid)


def say(message: str) -> None:
    """One line for the user. Broken on terminals only: what stands in a log can be searched and copied."""
    if speaks():
        console.print(message, markup=False, emoji=False, soft_wrap=not console.is_terminal)


def show_command(words: str) -> None:
    """A command that can be copied, however narrow the terminal is."""
    if speaks():
        console.print(f"  {words}", markup=False, emoji=False, soft_wrap=True)


def progress(quiet: bool = False) -> Progress:
    """A progress bar on a terminal; nothing where there is none, so that logs stay readable."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        disable=quiet or not console.is_terminal,
    )


def size(count: float) -> str:
    """Bytes as KiB, MiB, …"""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def peak_memory() -> int:
    """Bytes of host memory that this process held at most; 0 where the system does not say."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def cpu_seconds() -> float:
    """CPU time of this process and its threads."""
    spent = os.times()
    return spent.user + spent.system


def duration(seconds: float) -> str:
    """Seconds as 3.2 s, 4 min 10 s, 2 h 5 min."""
    if seconds < 90:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
