"""Sweeps that show when a head pays, each a table and a plot. Runnable: `headwright study NAME --config FILE`.

Writes `runs/<name>/studies/<study>.json` and `.svg`; finished rows lie in `<study>.jsonl` meanwhile, so that an interrupted
study goes on where it stopped. The run's report.html, where there is one, shows them.
"""

import argparse
import math
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwright.configs import UserError
from headwright.configs.command import clean_exit, explain
from headwright.configs.console import duration, say, table
from headwright.configs.load import load_run, nearest
from headwright.data.harvest import check_offline
from headwright.data.store import write_json, write_text
from headwright.eval import plots
from headwright.eval.costs import parse_size
from headwright.eval.prompts import check_sets
from headwright.eval.records import STUDY, facts
from headwright.eval.report import write_html
from headwright.eval.scene import Scene
from headwright.eval.studies import STUDIES, Study


def conduct(scene: Scene, name: str) -> dict[str, Any]:
    """One study, from its rows to its files."""
    study, begun = STUDIES[name], time.perf_counter()
    say(f"study {name}: {study.about}")
    scene.begin(name)
    rows = study.work(scene)
    if not rows:
        raise UserError(f"study {name}: nothing to measure with these settings")
    found: dict[str, Any] = {
        "schema": STUDY,
        "study": name,
        "about": study.about,
        "answers": scene.answers(),
        "rows": [{key: known(value) for key, value in row.items()} for row in rows],
        "plot": study.plot,
        "columns": study.columns,
        "says": study.says(rows),
        "seconds": scene.kept.seconds(),
    }
    write_json(scene.folder / f"{name}.json", found)
    write_text(scene.folder / f"{name}.svg", plots.standalone(plots.study(found)))
    show(study, rows)
    say(found["says"])
    say(f"{scene.folder / name}.json, .svg ({duration(time.perf_counter() - begun)})")
    return found


def conduct_all(scene: Scene) -> None:
    """Every study; one that has nothing to measure here does not end the others."""
    for name in STUDIES:
        try:
            conduct(scene, name)
        except UserError as error:
            say(f"left out: {error}")


def known(value: Any) -> Any:
    """A value for JSON, which has no NaN."""
    if isinstance(value, list | tuple):
        return [known(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show(study: Study, rows: Sequence[dict[str, Any]]) -> None:
    """The table; of a map, one column across."""
    if study.plot["kind"] == "map":
        show_map(study, rows)
        return
    table(study.about, list(study.columns.values()), [[cell(row.get(key)) for key in study.columns] for row in rows])


def show_map(study: Study, rows: Sequence[dict[str, Any]]) -> None:
    """A column for each place across."""
    x, y, [value] = study.plot["x"], study.plot["by"], study.plot["y"]
    across = sorted({row[x] for row in rows})
    found = {(row[y], row[x]): row[value] for row in rows}
    columns = [f"{study.columns[y]} \\ {study.columns[x]}", *map(cell, across)]
    lines = [
        [cell(place), *(cell(found.get((place, at))) for at in across)] for place in sorted({row[y] for row in rows})
    ]
    table(study.about, columns, lines)


def cell(value: Any) -> str:
    """A number as it is read."""
    if isinstance(value, float):
        return (
            f"{value:.0f}"
            if abs(value) >= 100
            else f"{value:.2f}"
            if abs(value) >= 0.1 or value == 0
            else f"{value:.2g}"
        )
    if isinstance(value, list):
        return "–".join(cell(item) for item in value)
    return "–" if value is None else str(value)


def render_again(folder: Path) -> None:
    """The run's page, with the studies in it."""
    report = facts(folder / "report.json")
    if "pooled" in report:
        write_html(folder, report)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    lines = [f"  {name:12} {study.about}" for name, study in STUDIES.items()]
    out = argparse.ArgumentParser(
        prog="headwright study",
        description=textwrap.dedent(__doc__ or "")
        + "\nstudies:\n"
        + "\n".join(lines)
        + "\n  all          every one of them",
        epilog=explain(("study",)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out.add_argument("name", metavar="NAME", help="a study, or all")
    out.add_argument("--config", required=True, metavar="FILE", help="the run file (YAML)")
    out.add_argument("--dry-run", action="store_true", help="check everything that costs nothing, then stop")
    out.add_argument("overrides", nargs="*", metavar="section.key=value", help="change keys of the run file")
    return out


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    args = parser().parse_intermixed_args(argv)  # overrides may stand behind --config
    with clean_exit():
        if args.name != "all" and args.name not in STUDIES:
            raise UserError(f"no study {args.name!r}; {nearest(args.name, STUDIES)}")
        run = load_run(args.config, args.overrides)
        check_offline(run)
        check_sets(run.eval.sets)
        for size in run.study.sizes:
            parse_size(size)
        if args.dry_run:
            print(f"dry run: {args.config} is sound as far as can be told without a network or a long computation")
            return
        scene = Scene.open(run)
        if args.name != "all":
            conduct(scene, args.name)
        else:
            conduct_all(scene)
        render_again(run.directory)


if __name__ == "__main__":
    main()
