"""A head for others: an engine directory with a model card, to the Hugging Face Hub or into a folder.

Runnable: `headwright push runs/NAME --to owner/name`. What is pushed was measured: the report must be of this very head,
and the export made of it.
"""

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError
from jinja2 import Environment, FileSystemLoader

from headwright.configs import RunConfig, UserError, dump, load_run, reason
from headwright.configs.command import clean_exit
from headwright.configs.console import say
from headwright.configs.load import parse
from headwright.data.store import checksum, write_text
from headwright.eval.records import read_report
from headwright.heads.export import target_name
from headwright.train.provenance import cleaned
from headwright.train.summary import read

REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
SIGN = "library_name: headwright"  # by which a card of ours is known
BESIDE = ("report.html", "report.json", "training.json", "provenance.json")


def build(folder: Path, run: RunConfig, engine: str, repository: str | None, licence: str | None) -> None:
    """Everything that is pushed, into `folder`. Raises UserError where something is missing, or is not of this head."""
    export = run.directory / "export" / engine
    report, made = read_report(run.directory), read(export / "headwright.json")
    refuse_stale(run, report, made, export)
    scratch = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(export, scratch)
    for name in BESIDE:
        if (run.directory / name).is_file():
            shutil.copy(run.directory / name, scratch / name)
    write_text(scratch / "run.yaml", as_yaml(cleaned(parse(dump(run)))))
    serve = (export / "SERVE.md").read_text(encoding="utf-8")
    serve = served_as(serve, run, export, repository or folder.name)
    write_text(scratch / "SERVE.md", serve)
    write_text(scratch / "README.md", card(run, report, made, serve, repository or run.name, licence))
    hide_places(scratch, run)
    if folder.exists():
        shutil.rmtree(folder)
    scratch.rename(folder)


def refuse_stale(run: RunConfig, report: dict[str, Any], made: dict[str, Any], export: Path) -> None:
    """Report and export must be of the head that is there."""
    head = checksum(run.directory / "head" / "model.safetensors")
    if report.get("head") != head:
        raise UserError(
            f"{run.directory / 'report.json'}: of another head than {run.directory / 'head'}: headwright eval again"
        )
    if made.get("head_file") != head:
        raise UserError(f"{export}: made of another head than {run.directory / 'head'}: headwright export again")


def hide_places(folder: Path, run: RunConfig) -> None:
    """Directories of this machine as the last part of their path: nobody else has them, and they are the maker's business."""
    told = [run.target.model, run.runs, run.target.tokenizer, *(source.path for source in run.corpus.sources)]
    places = {str(Path(place)) for place in told if place and Path(place).is_absolute()}
    places |= {str(run.directory.resolve()), str(Path(run.runs).resolve()), str(Path.cwd()), str(Path.home())} - {"/"}
    for path in folder.iterdir():
        if path.suffix in (".json", ".md", ".yaml", ".html"):
            text = path.read_text(encoding="utf-8")
            for place in sorted(places, key=len, reverse=True):
                text = text.replace(place, Path(place).name)
            write_text(path, text)


def as_yaml(config: dict[str, Any]) -> str:
    """A run file."""
    import yaml

    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True)


def served_as(serve: str, run: RunConfig, export: Path, repository: str) -> str:
    """SERVE.md with names that others can use in place of this machine's directories."""
    names = {str(export.resolve()): repository, str(export): repository, target_name(run): public_target(run)}
    for place, name in names.items():
        serve = serve.replace(place, name)
    return serve


def public_target(run: RunConfig) -> str:
    """The target's name."""
    name = run.export.name_or_path or run.target.model
    return Path(name).name if Path(name).is_absolute() else name


def card(
    run: RunConfig, report: dict[str, Any], made: dict[str, Any], serve: str, name: str, licence: str | None
) -> str:
    """README.md: method, target, data, τ with its five answers, launch lines."""
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, lstrip_blocks=True)
    facts = read(run.directory / "provenance.json") if (run.directory / "provenance.json").is_file() else {}
    sources = [source.hub or source.demo or Path(source.path or "").name for source in run.corpus.sources]
    return environment.get_template("card.md").render(
        name=name,
        sign=SIGN,
        licence=licence,
        kind=run.head.kind,
        target=public_target(run),
        target_is_public=bool(REPOSITORY.fullmatch(public_target(run))),
        revision=run.target.revision,
        hub=[source.hub for source in run.corpus.sources if source.hub],
        sources=sources,
        by=run.answers.by,
        training=read(run.directory / "training.json"),
        report=report,
        made=made,
        facts=facts,
        serve=serve,
    )


def upload(folder: Path, repository: str, private: bool) -> str:
    """To the Hub. Raises UserError with the reason; the folder stays."""
    api = huggingface_hub.HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        return str(
            api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Draft head, with its card")
        )
    except (HfHubHTTPError, huggingface_hub.errors.LocalTokenNotFoundError, OSError, ValueError) as error:
        raise UserError(
            f"{repository}: cannot be pushed: {reason(error)}. Everything is in {folder}; log in (`hf auth login`) or check "
            "the network, and call the same command again"
        ) from None


def push(args: argparse.Namespace) -> None:
    """Build the folder, and push it where it is asked for."""
    if args.to and not REPOSITORY.fullmatch(args.to):
        raise UserError(f"--to {args.to}: give owner/name")
    config = args.run / "config.yaml"
    if not config.is_file():
        raise UserError(
            f"{args.run}: no run there (config.yaml is missing): give a directory such as runs/smollm2-eagle3"
        )
    run = load_run(config, [f"runs={json.dumps(str(args.run.resolve().parent))}", f"name={args.run.resolve().name}"])
    folder = args.output or args.run / "push"
    if folder.exists() and not ours(folder):
        raise UserError(f"{folder}: is there already, and is not a pushed head: give another --output")
    build(folder, run, args.engine or run.export.engines[0], args.to, args.license)
    say(f"model card and files: {folder}")
    if args.to:
        say(f"pushed: {upload(folder, args.to, args.private)}")


def ours(folder: Path) -> bool:
    """Whether a folder is one that this command made, or an empty one."""
    readme = folder / "README.md"
    return not any(folder.iterdir()) or (readme.is_file() and SIGN in readme.read_text(encoding="utf-8"))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(
        prog="headwright push",
        description="A head for others: an export of a run with a model card (method, target, data, τ with its five answers, "
        "launch lines), as a folder, and with --to on the Hugging Face Hub. The head must have been evaluated and exported.",
    )
    out.add_argument("run", type=Path, metavar="DIR", help="directory of a run, such as runs/smollm2-eagle3")
    out.add_argument("--to", metavar="OWNER/NAME", help="repository on the Hub; it is made where it is not there")
    out.add_argument("--private", action="store_true", help="a new repository is private")
    out.add_argument("--engine", metavar="FORMAT", help="which export; default: the run's first")
    out.add_argument("--license", metavar="NAME", help="of the head, as the Hub calls it, such as apache-2.0")
    out.add_argument("--output", type=Path, metavar="DIR", help="the folder; default: push/ in the run's directory")
    return out


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    args = parser().parse_args(argv)
    with clean_exit():
        push(args)


if __name__ == "__main__":
    main()
