"""A trained head, taken to another domain or language, with a before and an after. Runnable: `headwright adapt` or
`accelerate launch train/adapt.py`.

Harvest, training and evaluation are the stages that there are; a run with `adapt.head` is what makes them an adaptation. Each
continues where it stopped, and so does this.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from headwright.configs import RunConfig, UserError
from headwright.configs.command import clean_exit, explain
from headwright.configs.console import say, table
from headwright.configs.load import apply_override, build, build_head, check_run, read_yaml
from headwright.data.corpus import general_sources, label
from headwright.data.coverage import cover
from headwright.data.harvest import check_offline, harvest, open_store
from headwright.data.store import write_json
from headwright.data.target import Target, TargetSpec, load_tokenizer
from headwright.data.vocab import grouped
from headwright.eval.acceptance import evaluate
from headwright.eval.compare import Line, compared, lines_of
from headwright.eval.records import ADAPTATION, facts, read_report
from headwright.eval.report import write_html
from headwright.heads.foreign import is_foreign
from headwright.heads.saved import load_head, read_head, taps_of, target_of, vocab_of
from headwright.train.launch import close_launch, open_launch
from headwright.train.run import head_path, train

SECTIONS = ("adapt", "vocab", "train")
ABOUT = (
    "Take a trained head (ours, or one of others) to a domain or a language: harvest the domain's text beside general text, "
    "extend the draft vocabulary, train with replay, keep the best head that forgets no more than its budget, and measure both "
    "heads in the same turns. Give a run file with adapt.head, or --head and --corpus for a head of ours."
)
GROUPS = ("domain", "language")


def adapt(run: RunConfig, dry_run: bool = False) -> None:
    """All of it."""
    check_adaptation(run)
    if dry_run:
        check_offline(run)
        return
    launch = open_launch(run.train)
    refuse_other_head(run)
    if run.features is None:
        harvest(run)
        launch.wait()
    train(run)
    if launch.world > 1:
        if launch.main:
            say("trained. Speed is measured in one process: headwright adapt with the same config, without a launcher")
        return
    if not (head_path(run) / "head.json").is_file():
        raise UserError(
            f"{run.directory}: no head lost less than adapt.budget ({run.adapt.budget:.0%}) of its accepted drafts on general "
            "text: raise adapt.replay or adapt.budget, or give it more general text"
        )
    evaluate(replace(run, eval=replace(run.eval, heads=[*run.eval.heads, str(run.adapt.head)])))
    conclude(run)


def check_adaptation(run: RunConfig) -> None:
    """What can be known before anything is computed."""
    if not run.adapt.head:
        raise UserError("adapt.head is missing: the directory of the head that is to be adapted")
    folder = Path(run.adapt.head)
    if not folder.is_dir():
        raise UserError(f"adapt.head {folder}: no such directory")
    if not is_foreign(folder):
        read_head(folder)
    if run.train.warm_start:
        raise UserError("adapt.head and train.warm_start both name a head to start from: leave train.warm_start empty")
    names = general_sources(run.corpus)
    if run.corpus.sources and all(label(source) in names for source in run.corpus.sources):
        raise UserError(
            "corpus.sources: all are general: the domain's text is missing (a source without general: true)"
        )
    if run.adapt.replay and run.corpus.sources and not names:
        raise UserError(
            f"adapt.replay {run.adapt.replay:g}: no source of the corpus is general: mark one with general: true, or set "
            "adapt.replay=0"
        )


def refuse_other_head(run: RunConfig) -> None:
    """Before anything is spent: the head must be of this target, as it is."""
    folder = Path(str(run.adapt.head))
    target = Target.load(run.target, lambda layers: taps_of(folder, layers))
    load_head(folder, target)


# Before and after


def conclude(run: RunConfig) -> None:
    """adaptation.json, its place in the report, and the table."""
    report = read_report(run.directory)
    found = {
        "schema": ADAPTATION,
        "head": str(run.adapt.head),
        "adapt": asdict(run.adapt),
        "lora": asdict(run.train.lora) if run.train.lora else None,
        "general": sorted(general_sources(run.corpus)),
        "groups": changes(run, str(run.adapt.head)),
        "coverage": coverages(run),
        "cost": cost(run),
    }
    write_json(run.directory / "adaptation.json", found)
    write_html(run.directory, report)
    show(found)


def changes(run: RunConfig, before: str) -> list[dict[str, Any]]:
    """The adapted head against the head as it was, by domain and by language, paired over prompts."""
    lines = lines_of([run.directory], lambda entry: True)
    rows = []
    for after in (line for line in lines if line.head):
        base = next(line for line in lines if alike(line, after, before))
        for kind in GROUPS:
            for name in dict.fromkeys(row[kind] for row in after.entry["per_prompt"]):
                first, second = (part(line, lambda row: row[kind] == name) for line in (base, after))  # noqa: B023
                rows.append(
                    {"by": kind, "group": name, "shape": after.entry["shape"]["name"]} | compared(first, second)
                )
    return rows


def alike(line: Line, after: Line, before: str) -> bool:
    """Whether it is the head as it was, measured as `after` was."""
    keys = ("prompt_set", "temperature")
    same = all(line.entry[key] == after.entry[key] for key in keys) and line.entry["shape"] == after.entry["shape"]
    return same and line.entry["drafter"].endswith(f" {before}")


def part(line: Line, wanted: Callable[[dict[str, Any]], bool]) -> Line:
    """A line over some of its prompts."""
    rows = [row for row in line.entry["per_prompt"] if wanted(row)]
    return replace(line, entry=line.entry | {"per_prompt": rows})


def coverages(run: RunConfig) -> dict[str, dict[str, float]]:
    """How much of the held-out answers both vocabularies can say, by source and by script."""
    held_out, tokenizer = open_store(run, "held-out"), load_tokenizer(run.target)
    spec = TargetSpec(**held_out.manifest.target)
    sides = [cover(vocab_of(folder, spec), grouped(held_out.answers(), tokenizer), 1) for folder in heads_of(run)]
    return {
        name: {
            "tokens": now.tokens,
            "before": sides[0][kind, name].inside / now.tokens,
            "after": now.inside / now.tokens,
        }
        for (kind, name), now in sides[1].items()
    }


def heads_of(run: RunConfig) -> tuple[Path, Path]:
    """Before and after."""
    return Path(str(run.adapt.head)), head_path(run)


def cost(run: RunConfig) -> dict[str, Any]:
    """Seconds, tokens and bytes."""
    made, trained = open_store(run, "train").manifest, facts(run.directory / "training.json")
    return {
        "tokens": made.tokens,
        "response_tokens": made.response_tokens,
        "feature_bytes": made.bytes,
        "harvest_seconds": made.seconds,
        "training_seconds": trained.get("seconds"),
        "steps": trained.get("step"),
    }


def show(found: dict[str, Any]) -> None:
    """The table at the end."""
    rows = []
    for row in found["groups"]:
        low, high = row["tau_gain_ci95"]
        ratio = "–" if row["speed_ratio"] is None else f"{row['speed_ratio']:.2f}"
        rows.append(
            (
                row["group"],
                row["shape"],
                row["prompts"],
                f"{row['tau_base']:.2f}",
                f"{row['tau']:.2f}",
                f"{row['tau_gain']:+.2f} [{low:+.2f}, {high:+.2f}]",
                f"{row['tau_p']:.3f}",
                ratio,
            )
        )
    columns = ("", "shape", "prompts", "τ before", "τ after", "gain [95 %]", "p", "speed ÷ before")
    table(f"{found['head']} before and after", columns, rows)


# The command line


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(
        prog="headwright adapt",
        description=ABOUT,
        epilog=explain(SECTIONS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out.add_argument(
        "--config", metavar="FILE", help="the run file (YAML); without a head section, the head's own is taken"
    )
    out.add_argument("--head", metavar="DIR", help="adapt.head; without --config, the run that made it says the rest")
    out.add_argument(
        "--corpus", metavar="PATH", action="append", default=[], help="a file or pattern of the domain's text"
    )
    out.add_argument("--dry-run", action="store_true", help="check everything that costs nothing, then stop")
    out.add_argument("overrides", nargs="*", metavar="section.key=value", help="change keys of the run file")
    return out


def run_of(args: argparse.Namespace) -> RunConfig:
    """The run that a command line asks for."""
    where = args.config or args.head
    if where is None:
        raise UserError("give --config FILE with adapt.head in it, or --head DIR and --corpus PATH")
    raw = read_yaml(Path(args.config)) if args.config else made_for(Path(args.head))
    if args.head:
        raw.setdefault("adapt", {})["head"] = args.head
    if args.corpus:
        raw["corpus"] = with_domain(raw.get("corpus") or {}, args.corpus)
    for override in args.overrides:
        apply_override(raw, override)
    if not raw.get("head") and (raw.get("adapt") or {}).get("head"):
        raw["head"] = head_section(Path(raw["adapt"]["head"]))
    run = build(RunConfig, raw, str(where))
    check_run(run, str(where))
    run.head = build_head(run.head, str(where))
    return run


def made_for(folder: Path) -> dict[str, Any]:
    """The run that made a head, as a file for another."""
    told = facts(folder / "provenance.json").get("config")
    if not isinstance(told, dict):
        raise UserError(f"{folder}: it does not say which run made it (provenance.json): give --config")
    kept = {key: value for key, value in told.items() if key not in ("head", "features")}
    return kept | {"name": f"{told['name']}-adapted", "train": (told.get("train") or {}) | {"warm_start": None}}


def with_domain(corpus: dict[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """A corpus whose own sources are the general text beside the domain's."""
    general = [source | {"general": True} for source in corpus.get("sources") or []]
    return corpus | {"sources": [*({"path": path} for path in paths), *general]}


def head_section(folder: Path) -> dict[str, Any]:
    """The config of a head of ours, as a section of a run file."""
    if is_foreign(folder):
        raise UserError(f"{folder}: a head of {target_of(folder)} in an engine's format: give the run a head section")
    return json.loads(json.dumps(asdict(read_head(folder).config)))


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    args = parser().parse_args(argv)
    with clean_exit():
        adapt(run_of(args), args.dry_run)
        if args.dry_run:
            say("dry run: sound as far as can be told without a network or a long computation")
    close_launch()


if __name__ == "__main__":
    main()
