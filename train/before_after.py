"""What an adaptation changed: adaptation.json, its section of the report, and the table at its end."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from headwright.configs import RunConfig, UserError
from headwright.configs.console import say, table
from headwright.data.corpus import general_sources
from headwright.data.coverage import cover
from headwright.data.harvest import open_store
from headwright.data.store import write_json
from headwright.data.target import TargetSpec, load_tokenizer
from headwright.data.vocab import grouped
from headwright.eval.compare import Line, Pair, Row, compared, lines_of, pairs_of, speedup, tau
from headwright.eval.metrics import bootstrap, rates
from headwright.eval.prompts import label
from headwright.eval.records import ADAPTATION, facts, read_report
from headwright.eval.report import write_html
from headwright.heads.saved import vocab_of
from headwright.train.run import head_path
from headwright.train.trials import expected

GROUPS = ("domain", "language")
DRAWS = 400  # of a bootstrap over prompts, for every depth of every group
COSTS = ("seconds", "cpu_seconds")


def conclude(run: RunConfig, curve: Sequence[dict[str, float]]) -> None:
    """adaptation.json, its place in the report, and the table. curve: τ with parts of the domain's text."""
    sides = sides_of(run)
    found = {
        "schema": ADAPTATION,
        "head": str(run.adapt.head),
        "adapt": asdict(run.adapt),
        "lora": asdict(run.train.lora) if run.train.lora else None,
        "general": sorted(general_sources(run.corpus)),
        "groups": [row for before, after in sides for row in changes(before, after)],
        "forgotten": [row for before, after in sides for row in forgotten(run, before, after)],
        "coverage": coverages(run),
        "cost": cost(run),
        "curve": with_forecast(curve) if curve else None,
    }
    write_json(run.directory / "adaptation.json", found)
    write_html(run.directory, read_report(run.directory))
    show(found)


# Both heads, over the same prompts


def sides_of(run: RunConfig) -> list[tuple[Line, Line]]:
    """The head as it was and as it is, in each shape and at each temperature, over the prompts of all sets."""
    lines = lines_of([run.directory], lambda entry: True)
    before = [line for line in lines if line.entry["drafter"].endswith(f" {run.adapt.head}")]
    after = [line for line in lines if line.head]
    if [setting(line) for line in before] != [setting(line) for line in after]:
        raise UserError(f"{run.directory}: the report does not have both heads in the same shapes: remove report.json")
    kinds = dict.fromkeys(setting(line)[1:] for line in after)
    return [(pooled(before, kind), pooled(after, kind)) for kind in kinds]


def setting(line: Line) -> tuple[str, str, float]:
    """Prompt set, shape and temperature."""
    entry = line.entry
    return entry["prompt_set"], entry["shape"]["name"], entry["temperature"]


def pooled(lines: Sequence[Line], kind: tuple[str, float]) -> Line:
    """The lines of a shape and a temperature as one, over the prompts of all sets."""
    mine = [line for line in lines if setting(line)[1:] == kind]
    rows = [
        row | {"place": f"{line.entry['prompt_set']}: {row['place']}"}
        for line in mine
        for row in line.entry["per_prompt"]
    ]
    return replace(mine[0], entry=mine[0].entry | {"per_prompt": rows})


def changes(before: Line, after: Line) -> list[Row]:
    """By domain and by language, paired over prompts."""
    rows = []
    for kind in GROUPS:
        for name in dict.fromkeys(row[kind] for row in after.entry["per_prompt"]):
            sides = [part(line, lambda row: row[kind] == name) for line in (before, after)]  # noqa: B023
            first, second = sides
            rows.append(named(after) | {"by": kind, "group": name} | compared(first, second) | both(first, second))
    return rows


def named(line: Line) -> Row:
    """What a row is of."""
    _, shape, temperature = setting(line)
    return {"shape": shape, "temperature": temperature}


def part(line: Line, wanted: Callable[[Row], bool]) -> Line:
    """A line over some of its prompts."""
    rows = [row for row in line.entry["per_prompt"] if wanted(row)]
    return replace(line, entry=line.entry | {"per_prompt": rows})


def both(first: Line, second: Line) -> Row:
    """What the comparison of τ does not say, of either side."""
    before, after = first.entry["per_prompt"], second.entry["per_prompt"]
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
    return rates([sum(column) for column in zip(*(row["histogram"] for row in rows))])[1]


def chars_per_second(rows: Sequence[Row]) -> float:
    """What readers of different languages can compare; of the prompts on which speed was measured."""
    timed = [row for row in rows if "plain_seconds_per_token" in row]
    return sum(row["characters"] for row in timed) / max(sum(row["seconds"] for row in timed), 1e-9)


def forgotten(run: RunConfig, before: Line, after: Line) -> list[Row]:
    """What is kept of the accepted drafts on general text, all of it together."""
    names = general_sources(run.corpus) | {label(wanted) for wanted in run.eval.sets if wanted.general}

    def general(row: Row) -> bool:
        return bool(names & {row["domain"], row["place"].split(": ")[0]})

    pairs = pairs_of(part(before, general), part(after, general))
    if not pairs or tau([pair[0] for pair in pairs]) <= 1:  # nothing there, or nothing to forget
        return []
    return [named(after) | {"prompts": len(pairs), "kept": kept(pairs), "kept_ci95": bootstrap(pairs, kept, run.seed)}]


def kept(pairs: Sequence[Pair]) -> float:
    """τ - 1 after over τ - 1 before."""
    first, second = (tau([pair[side] for pair in pairs]) - 1 for side in (0, 1))
    return second / first if first > 0 else float("nan")


# Besides


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
    """Seconds, tokens and bytes. CPU time is that of the main process."""
    trained, made = facts(run.directory / "training.json"), facts(run.directory / "provenance.json")
    store = open_store(run, "train").manifest if run.harvest.features == "stored" else None
    trials = [facts(path) for path in sorted((run.directory / "trials").glob("*.json")) if path.stem != "whole"]
    return {
        "response_tokens": trained.get("response_tokens"),
        "harvest_seconds": store.seconds if store else None,
        "feature_bytes": store.bytes if store else None,
        "run_bytes": sum(path.stat().st_size for path in run.directory.rglob("*") if path.is_file()),
        **{f"training_{key}": trained.get(key) for key in COSTS},
        **{f"trials_{key}": sum(one.get(key, 0.0) for one in trials) for key in COSTS},
        "trials": len(trials),
        "processes": made.get("processes"),
        "device": made.get("device"),
        "trained_parameters": trained.get("trained_parameters"),
        "steps": trained.get("step"),
        "kept_step": trained.get("best_step"),
    }


def with_forecast(curve: Sequence[dict[str, float]]) -> Row:
    """The curve, and what twice the text would give; beside it what the same would have foretold of its last point."""
    points = [(point["rows"], point["tau"]) for point in curve]
    return {
        "points": list(curve),
        "twice": expected(points, 2 * points[-1][0]),
        "last_foretold": expected(points[:-1], points[-1][0]),
    }


# Showing


def show(found: Row) -> None:
    """The table at the end."""
    columns = ("", "shape", "prompts", "τ before", "τ after", "gain [95 %]", "p", "speed ÷ before", "characters/s")
    table(f"{found['head']} before and after", columns, [line_of(row) for row in found["groups"]])
    for row in found["forgotten"]:
        low, high = row["kept_ci95"]
        say(
            f"general text, {shape_of(row)}: {row['kept']:.1%} [{low:.1%}, {high:.1%}] of the accepted drafts are kept "
            f"({row['prompts']} prompts; budget: {1 - found['adapt']['budget']:.0%} on all held-out answers)"
        )
    if found["curve"]:
        show_curve(found["curve"])


def show_curve(curve: Row) -> None:
    """The learning curve."""
    points = [(point["rows"], f"{point['tau']:.3f}") for point in curve["points"]]
    twice = (f"{2 * points[-1][0]} (expected)", f"about {curve['twice']:.2f}")
    table("τ by text, domain", ("loss-bearing rows", "τ"), [*points, twice])
    if curve["last_foretold"] is not None:
        say(
            f"the last but all points foretell τ {curve['last_foretold']:.2f} for the last: {points[-1][1]} was measured"
        )


def shape_of(row: Row) -> str:
    """With the temperature, where there is one."""
    return f"{row['shape']} T={row['temperature']:g}" if row["temperature"] else str(row["shape"])


def line_of(row: Row) -> tuple[object, ...]:
    """A group in a shape."""
    low, high = row["tau_gain_ci95"]
    return (
        row["group"],
        shape_of(row),
        row["prompts"],
        f"{row['tau_base']:.2f}",
        f"{row['tau']:.2f}",
        f"{row['tau_gain']:+.2f} [{low:+.2f}, {high:+.2f}]",
        f"{row['tau_p']:.3f}",
        "–" if row["speed_ratio"] is None else f"{row['speed_ratio']:.2f}",
        f"{row['chars_per_second']:.0f}" if row["timed_prompts"] else "–",
    )
