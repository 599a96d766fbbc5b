"""What an adaptation changed: adaptation.json, its section of the report, and the table at its end."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from headwright.configs import RunConfig
from headwright.configs.console import table
from headwright.data.corpus import general_sources
from headwright.data.coverage import cover
from headwright.data.harvest import open_store
from headwright.data.store import write_json
from headwright.data.target import TargetSpec, load_tokenizer
from headwright.data.vocab import grouped
from headwright.eval.compare import Line, Pair, Row, compared, lines_of, speedup
from headwright.eval.metrics import bootstrap
from headwright.eval.records import ADAPTATION, facts, read_report
from headwright.eval.report import write_html
from headwright.heads.saved import vocab_of
from headwright.train.run import head_path
from headwright.train.trials import expected

GROUPS = ("domain", "language")
DRAWS = 400  # of a bootstrap over prompts, for every depth of every group


def conclude(run: RunConfig, curve: Sequence[dict[str, float]]) -> None:
    """adaptation.json, its place in the report, and the table. curve: τ with parts of the domain's text."""
    found = {
        "schema": ADAPTATION,
        "head": str(run.adapt.head),
        "adapt": asdict(run.adapt),
        "lora": asdict(run.train.lora) if run.train.lora else None,
        "general": sorted(general_sources(run.corpus)),
        "groups": changes(run, str(run.adapt.head)),
        "coverage": coverages(run),
        "cost": cost(run),
        "curve": with_forecast(curve) if curve else None,
    }
    write_json(run.directory / "adaptation.json", found)
    write_html(run.directory, read_report(run.directory))
    show(found)


def changes(run: RunConfig, before: str) -> list[Row]:
    """The adapted head against the head as it was, by domain and by language, paired over prompts."""
    lines = lines_of([run.directory], lambda entry: True)
    rows = []
    for after in (line for line in lines if line.head):
        base = next(line for line in lines if alike(line, after, before))
        for kind in GROUPS:
            for name in dict.fromkeys(row[kind] for row in after.entry["per_prompt"]):
                first, second = (part(line, lambda row: row[kind] == name) for line in (base, after))  # noqa: B023
                named = {"by": kind, "group": name, "shape": after.entry["shape"]["name"]}
                details = both(first.entry["per_prompt"], second.entry["per_prompt"])
                rows.append(named | compared(first, second) | details)
    return rows


def alike(line: Line, after: Line, before: str) -> bool:
    """Whether it is the head as it was, measured as `after` was."""
    keys = ("prompt_set", "temperature")
    same = all(line.entry[key] == after.entry[key] for key in keys) and line.entry["shape"] == after.entry["shape"]
    return same and line.entry["drafter"].endswith(f" {before}")


def part(line: Line, wanted: Callable[[Row], bool]) -> Line:
    """A line over some of its prompts."""
    rows = [row for row in line.entry["per_prompt"] if wanted(row)]
    return replace(line, entry=line.entry | {"per_prompt": rows})


def both(before: Sequence[Row], after: Sequence[Row]) -> Row:
    """What the comparison of τ does not say, of either side."""
    timed = [row for row in before if "plain_seconds_per_token" in row]
    return {
        "speedup_base": speedup(timed) if timed else None,
        "conditional": conditional(after),
        "conditional_base": conditional(before),
        "conditional_gain_ci95": gain_intervals(list(zip(before, after)), 0),
        "chars_per_second": chars_per_second(after),
        "chars_per_second_base": chars_per_second(before),
        "chars_per_token": sum(row["characters"] for row in after) / max(1, sum(row["tokens"] for row in after)),
    }


def gains(pairs: Sequence[Pair]) -> list[float]:
    """Of each conditional rate, after less before."""
    before, after = (conditional([pair[side] for pair in pairs]) for side in (0, 1))
    return [now - then for then, now in zip(before, after)]


def gain_intervals(pairs: Sequence[Pair], seed: int) -> list[list[float]]:
    """Their 95 % bootstrap intervals over prompts."""
    depth = len(gains(pairs))
    return [bootstrap(pairs, lambda chosen: gains(chosen)[place], seed, DRAWS) for place in range(depth)]  # noqa: B023


def conditional(rows: Sequence[Row]) -> list[float]:
    """Share of the cycles that accept token k, of those that accepted k-1."""
    counts = [sum(column) for column in zip(*(row["histogram"] for row in rows))]
    reached = [sum(counts[place:]) for place in range(len(counts))]
    return [now / before if before else 0.0 for before, now in itertools.pairwise(reached)]


def chars_per_second(rows: Sequence[Row]) -> float:
    """What readers of different languages can compare; of the prompts on which speed was measured."""
    timed = [row for row in rows if "plain_seconds_per_token" in row]
    return sum(row["characters"] for row in timed) / max(sum(row["seconds"] for row in timed), 1e-9)


def coverages(run: RunConfig) -> dict[str, dict[str, float]]:
    """How much of the held-out answers both vocabularies can say, by source and by script."""
    held_out, tokenizer = open_store(run, "held-out"), load_tokenizer(run.target)
    spec = TargetSpec(**held_out.manifest.target)
    sides = [
        cover(vocab_of(folder, spec), grouped(held_out.answers(), tokenizer), 1)
        for folder in (Path(str(run.adapt.head)), head_path(run))
    ]
    return {
        name: {
            "tokens": now.tokens,
            "before": sides[0][kind, name].inside / now.tokens,
            "after": now.inside / now.tokens,
        }
        for (kind, name), now in sides[1].items()
    }


def cost(run: RunConfig) -> Row:
    """Seconds, tokens and bytes."""
    made, trained = open_store(run, "train").manifest, facts(run.directory / "training.json")
    launch = facts(run.directory / "provenance.json").get("strategy")
    return {
        "tokens": made.tokens,
        "response_tokens": made.response_tokens,
        "feature_bytes": made.bytes,
        "run_bytes": sum(path.stat().st_size for path in run.directory.rglob("*") if path.is_file()),
        "harvest_seconds": made.seconds,
        "training_seconds": trained.get("seconds"),
        "training_cpu_seconds": trained.get("cpu_seconds"),
        "trained_parameters": trained.get("trained_parameters"),
        "steps": trained.get("step"),
        "kept_step": trained.get("best_step"),
        "launch": launch,
    }


def with_forecast(curve: Sequence[dict[str, float]]) -> Row:
    """The curve, and what twice the text would give."""
    twice = expected([(point["rows"], point["tau"]) for point in curve], 2 * curve[-1]["rows"])
    return {"points": list(curve), "twice": twice}


def show(found: Row) -> None:
    """The table at the end."""
    columns = ("", "shape", "prompts", "τ before", "τ after", "gain [95 %]", "p", "speed ÷ before", "characters/s")
    table(f"{found['head']} before and after", columns, [line_of(row) for row in found["groups"]])
    if found["curve"]:
        points = [(point["rows"], f"{point['tau']:.3f}") for point in found["curve"]["points"]]
        twice = (f"{2 * points[-1][0]:.0f} (expected)", f"about {found['curve']['twice']:.3f}")
        table("τ by text, domain", ("loss-bearing rows", "τ"), [*points, twice])


def line_of(row: Row) -> tuple[object, ...]:
    """A group in a shape."""
    low, high = row["tau_gain_ci95"]
    return (
        row["group"],
        row["shape"],
        row["prompts"],
        f"{row['tau_base']:.2f}",
        f"{row['tau']:.2f}",
        f"{row['tau_gain']:+.2f} [{low:+.2f}, {high:+.2f}]",
        f"{row['tau_p']:.3f}",
        "–" if row["speed_ratio"] is None else f"{row['speed_ratio']:.2f}",
        f"{row['chars_per_second']:.0f}" if row["timed_prompts"] else "–",
    )
