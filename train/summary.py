"""One table over a finished run: what it cost and what it gave. Runnable: `headwright summary --config …`."""

import json
from pathlib import Path
from typing import Any

from headwright.configs import RunConfig, UserError
from headwright.configs.command import run_stage
from headwright.configs.console import duration, say, size, table
from headwright.data.harvest import store_path
from headwright.data.store import Manifest, read_manifest, write_json
from headwright.eval.records import read_report
from headwright.heads.serve import sampling
from headwright.train.track import share

ABOUT = "One table over a finished run."


def read(path: Path) -> dict[str, Any]:
    """A JSON file of the run."""
    if not path.is_file():
        raise UserError(f"{path} is missing: run the stages first")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def same_text(lossless: dict[str, Any] | None) -> str:
    """Identity is a question for greedy text only."""
    return "sampled" if lossless is None else f"{lossless['identical']} of {lossless['prompts']} prompts"


def label(entry: dict[str, Any]) -> str:
    """Drafter, shape and sampling of an entry."""
    return f"{entry['drafter']} {entry['shape']['name']} ({sampling(entry)})"


def tau(entry: dict[str, Any]) -> str:
    """τ with its interval."""
    low, high = entry["acceptance_length_ci95"]
    return f"{entry['acceptance_length']:.2f} [{low:.2f}, {high:.2f}]"


def summarise(run: RunConfig, dry_run: bool = False) -> None:
    """Print the summary."""
    if dry_run:
        return
    sides = stored_sides(run)
    training, report = read(run.directory / "training.json"), read_report(run.directory)
    first = report["entries"][0]
    size_of, seconds = size(sides[0].bytes), duration(sides[0].seconds)
    made = f"{size_of}, {seconds}" if len(sides) == 2 else "live"
    even = f"break-even τ {first['speedup_model']['break_even_tau_here']:.2f}"
    rows: list[tuple[str, str]] = [
        ("target", sides[-1].target["name"]),
        ("features", f"{training['response_tokens']} response tokens, {made}"),
        ("training", f"{training['step']} steps, {duration(training['seconds'])}"),
        ("draft vocabulary", f"holds {training['coverage']:.1%} of held-out response tokens"),
        *((f"τ {label(entry)}", tau(entry)) for entry in report["entries"]),
        ("speed here", f"{first['speedup']:.2f}× plain decoding ({even})"),
        ("speed on a GPU", f"{first['speedup_model']['modelled_gpu']:.2f}×, modelled, not measured"),
        ("same text as plain decoding", same_text(first["lossless"])),
        ("report", str(run.directory / "report.html")),
        *((f"export {engine}", str(run.directory / "export" / engine)) for engine in run.export.engines),
    ]
    table(f"run {run.name}", ("what", "result"), rows)
    write_json(run.directory / "summary.json", dict(rows) | {"plan": compare(run, training, report)})
    show_plan(run, training, report)
    share(run, f"{run.name}-report", "report", [run.directory / name for name in ("report.html", "report.json")])
    say(f"Serve it: {run.directory / 'export' / run.export.engines[0] / 'SERVE.md'}")


def stored_sides(run: RunConfig) -> list[Manifest]:
    """The manifests of training and held-out features; of the latter alone where the others were live."""
    names = ("held-out",) if run.harvest.features == "live" else ("train", "held-out")
    return [read_manifest(store_path(run, name)) for name in names]


def compare(run: RunConfig, training: dict[str, Any], report: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Predicted and actual, where the run was planned."""
    path = run.directory / "plan.json"
    if not path.is_file():
        return {}
    predicted, sides = read(path), stored_sides(run)
    actual = {"train_seconds": training["seconds"], "eval_seconds": report["seconds"]}
    if run.harvest.features != "live":
        actual |= {
            "tokens": sum(side.tokens for side in sides),
            "features_bytes": sum(side.bytes for side in sides),
            "harvest_seconds": sum(side.seconds for side in sides),
        }
    return {name: {"predicted": predicted[name], "actual": value} for name, value in actual.items()}


def show_plan(run: RunConfig, training: dict[str, Any], report: dict[str, Any]) -> None:
    """What `headwright plan` said, and what came of it."""
    units = {"tokens": lambda count: f"{count:.0f}", "features_bytes": size}
    rows = []
    for name, pair in compare(run, training, report).items():
        show = units.get(name, duration)
        off = f"{pair['predicted'] / pair['actual'] - 1:+.0%}" if pair["actual"] else "–"
        rows.append((name.replace("_", " "), show(pair["predicted"]), show(pair["actual"]), off))
    if rows:
        table("plan", ("what", "predicted", "actual", "off by"), rows)


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    run_stage("headwright summary", ABOUT, (), summarise, argv)


if __name__ == "__main__":
    main()
