"""A trained head, taken to another domain or language, with a before and an after. Runnable: `headwright adapt` or
`accelerate launch train/adapt.py`.

Harvest, training and evaluation are the stages that there are; a run with `adapt.head` is what makes them an adaptation. Each
continues where it stopped, and so does this.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from headwright.configs import RunConfig, UserError
from headwright.configs.command import clean_exit, explain
from headwright.configs.console import say
from headwright.configs.load import apply_override, build, build_head, check_run, read_yaml
from headwright.configs.schema import TargetConfig
from headwright.data.corpus import general_sources, label
from headwright.data.harvest import check_offline, harvest, store_path
from headwright.data.store import MANIFEST
from headwright.data.target import Target, read_facts
from headwright.data.vet_corpus import refuse_corpus
from headwright.data.vocab import refuse_vocab
from headwright.eval.acceptance import evaluate
from headwright.eval.records import facts
from headwright.heads.foreign import adopted_from, is_foreign
from headwright.heads.saved import load_head, read_head, taps_of
from headwright.train.before_after import conclude
from headwright.train.launch import Launch, close_launch, open_launch
from headwright.train.trials import Stopped, Trials

SECTIONS = ("adapt", "vocab", "train")
ABOUT = (
    "Take a trained head (ours, or one of others) to a domain or a language: harvest the domain's text beside general text, "
    "extend the draft vocabulary, train with replay, keep the best head that forgets no more than its budget, and measure both "
    "heads in the same turns. Give a run file with adapt.head, or --head and --corpus for a head of ours."
)


def adapt(run: RunConfig, dry_run: bool = False) -> None:
    """All of it."""
    check_adaptation(run)
    if dry_run:
        check_offline(run)
        return
    launch = open_launch(run.train)
    if launch.main:
        refuse(run)
    launch.wait()
    if run.features is None:
        harvest(run)
        launch.wait()
    try:
        run, curve = trained(run, launch)
    except Stopped:
        return
    if launch.world > 1:
        if launch.main:
            say("trained. Speed is measured in one process: headwright adapt with the same config, without a launcher")
        return
    evaluate(replace(run, eval=replace(run.eval, heads=[*run.eval.heads, str(run.adapt.head)])))
    conclude(run, curve)


def trained(run: RunConfig, launch: Launch) -> tuple[RunConfig, list[dict[str, float]]]:
    """Train it, after what must be found out first; the run with what was found, and its learning curve. Raises Stopped."""
    if run.adapt.replay == "search":
        run = replace(run, adapt=replace(run.adapt, replay=Trials(run, launch).replay()))
    trials = Trials(run, launch)
    return run, trials.curve(trials.whole())


def refuse(run: RunConfig) -> None:
    """What can only be known from head, target and corpus, before a harvest; the training asks again. Raises UserError."""
    if run.features is not None or (store_path(run, "train") / MANIFEST).is_file():
        return
    folder = Path(str(run.adapt.head))
    target = Target.load(run.target, lambda layers: taps_of(folder, layers))
    refuse_vocab(run, load_head(folder, target).vocab)
    refuse_corpus(run, target.tokenizer)


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
    both = names & {label(source) for source in run.corpus.sources if not source.general}
    if both:
        raise UserError(
            f"corpus.sources: {', '.join(sorted(both))} is the name of general text and of the domain's: give one a name "
            "(corpus.sources.0.name=…)"
        )
    if run.corpus.sources and all(label(source) in names for source in run.corpus.sources):
        raise UserError(
            "corpus.sources: all are general: the domain's text is missing (a source without general: true)"
        )
    if run.adapt.replay and run.corpus.sources and not names:
        raise UserError(
            f"adapt.replay {run.adapt.replay}: no source of the corpus is general: mark one with general: true, or set "
            "adapt.replay=0"
        )


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
    if where is None or not (args.config or args.corpus):
        raise UserError("give --config FILE with adapt.head in it, or --head DIR and --corpus PATH")
    raw = read_yaml(Path(args.config)) if args.config else made_for(Path(args.head))
    if args.head:
        raw["adapt"] = (raw.get("adapt") or {}) | {"head": args.head}
    if args.corpus:
        raw["corpus"] = with_domain(raw.get("corpus") or {}, args.corpus)
    for override in args.overrides:
        apply_override(raw, override)
    if not raw.get("head") and (raw.get("adapt") or {}).get("head"):
        raw["head"] = head_section(Path(raw["adapt"]["head"]), raw.get("target") or {}, str(where))
    run = build(RunConfig, raw, str(where))
    check_run(run, str(where))
    run.head = build_head(run.head, str(where))
    return run


def made_for(folder: Path) -> dict[str, Any]:
    """The run that made a head, as a file for another: with room for as many new draft tokens as it has. Of a head of others
    nothing is known: the overrides must say it.
    """
    if not folder.is_dir():
        raise UserError(f"--head {folder}: no such directory")
    if is_foreign(folder):
        return {"name": f"{folder.resolve().name}-adapted"}
    told = facts(folder / "provenance.json").get("config")
    if not isinstance(told, dict):
        raise UserError(f"{folder}: it does not say which run made it (provenance.json): give --config")
    kept = {key: value for key, value in told.items() if key not in ("head", "features", "adapt")}
    vocab = told.get("vocab") or {}
    if vocab.get("size"):
        kept["vocab"] = vocab | {"size": 2 * vocab["size"]}
    return kept | {"name": f"{told['name']}-adapted", "train": (told.get("train") or {}) | {"warm_start": None}}


def with_domain(corpus: dict[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """A corpus whose own sources are the general text beside the domain's."""
    general = [
        {**source, "general": True} if isinstance(source, dict) else source for source in corpus.get("sources") or []
    ]
    return corpus | {"sources": [*({"path": path} for path in paths), *general]}


def head_section(folder: Path, target: dict[str, Any], where: str) -> dict[str, Any]:
    """A head's own config, as a section of a run file. What a head of others is can only be said beside its target."""
    if not is_foreign(folder):
        return json.loads(json.dumps(asdict(read_head(folder).config)))
    if not target.get("model"):
        raise UserError(f"{folder}: a head in an engine's format, which does not name its target: give target.model=…")
    spec, _ = read_facts(build(TargetConfig, target, f"{where}: target"))
    config, _ = adopted_from(folder, spec, None)
    return json.loads(json.dumps(asdict(config)))


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
