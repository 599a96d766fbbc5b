"""report.html: one self-contained file, with the verdict first."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from headwright.configs import UserError
from headwright.data.store import write_text
from headwright.eval import plots
from headwright.eval.calculator import answer, measured
from headwright.eval.records import ADAPTATION, STUDY, facts


def write_html(directory: Path, report: dict[str, Any]) -> None:
    """Render `report` (and what studies and training have left beside it) into directory/report.html."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    head = [entry for entry in report["entries"] if entry["drafter"] == report["entries"][0]["drafter"]]
    page = environment.get_template("report.html").render(
        report=report,
        first=report["entries"][0],
        head=head,
        advice=advice(head),
        figures=figures(directory, report, head),
        formula=formula(report),
        provenance=facts(directory / "provenance.json"),
        studies=studies(directory),
        place=directory,
        adaptation=adaptation(directory),
        sure=sure,
        depth_of=lambda groups: max(len(group["conditional"]) for group in groups),
    )
    write_text(directory / "report.html", page)


def adaptation(directory: Path) -> dict[str, Any]:
    """Before and after, where that was measured by this version."""
    found = facts(directory / "adaptation.json")
    return found if found.get("schema") == ADAPTATION else {}


def sure(found: dict[str, Any]) -> str:
    """What the interval of a speed-up says: of an entry, or of a group of its prompts."""
    if found["speedup_ci95"] is None:
        return "not timed"
    if found["timed_prompts"] < 2:
        return "one prompt says little"
    low, high = found["speedup_ci95"]
    return "faster" if low > 1 else "slower" if high < 1 else "no clear difference"


def advice(head: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Whether it is worth it, in which shape, for which traffic: by greedy entries, if there are any."""
    greedy = [entry for entry in head if entry["temperature"] == 0] or list(head)
    names = dict.fromkeys((entry["shape"]["name"], entry["temperature"]) for entry in greedy)
    rows = {
        name: [entry for entry in greedy if (entry["shape"]["name"], entry["temperature"]) == name] for name in names
    }
    best = max(rows.values(), key=lambda found: sum(entry["speedup"] for entry in found) / len(found))
    return {
        "shape": best[0]["shape"]["name"],
        "temperature": best[0]["temperature"],
        "entry": best[0],
        "entries": best,
        "verdict": sure(best[0]),
        "traffic": [
            (entry["prompt_set"], name, group, sure(group))
            for entry in best
            for name, group in entry["by_domain"].items()
        ],
    }


def formula(report: dict[str, Any]) -> dict[str, Any] | None:
    """The calculator's table, from the first chain."""
    try:
        known = measured(report)
    except UserError:
        return None
    return answer(known.alpha, known.costs, known.depth, 10) | {"name": known.name, "measured": known.speedup}


def figures(directory: Path, report: dict[str, Any], head: Sequence[dict[str, Any]]) -> dict[str, str]:
    """All plots as SVG, by name; those without data are left out."""
    best = advice(head)["entry"]
    made = {
        "groups": plots.groups(whole(report, best), plots.label(best)),
        "rates": plots.rates(report["entries"]),
        "histogram": plots.histogram(report["entries"][0]),
        "phases": plots.phases(report["entries"]),
        "model": plots.predicted(report["entries"]),
        "coverage": plots.coverage(report.get("coverage", {})),
        "training": plots.training(directory / "metrics.jsonl"),
    }
    return {name: picture for name, picture in made.items() if picture}


def whole(report: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    """An entry's side over all sets."""
    keys = (entry["drafter"], entry["shape"]["name"], entry["temperature"])
    sides = report["pooled"]
    return next((side for side in sides if (side["drafter"], side["shape"], side["temperature"]) == keys), sides[0])


def studies(directory: Path) -> list[dict[str, Any]]:
    """Those that have been made, with their plots."""
    found = [facts(path) for path in sorted((directory / "studies").glob("*.json"))]
    complete = [study for study in found if study.get("schema") == STUDY and {"plot", "rows", "says"} <= study.keys()]
    return [study | {"picture": plots.study(study)} for study in complete]
