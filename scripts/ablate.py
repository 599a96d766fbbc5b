"""Which choice trains the better head: the same features, a grid of settings, one seed or several, τ with intervals.

    headwright harvest --config configs/smollm2-eagle3.yaml
    python scripts/ablate.py --config configs/smollm2-eagle3.yaml --sweep head.loss=kl,lk,tv 'head.taps=[2,15,27],[27]' --each

--sweep names keys and their values; the first values together are what all others are compared with. Without --each every
combination is trained, with it each key alone is changed. What is printed is the exact τ of a greedy chain on the held-out
answers (by rollout, without decoding), with 95 % bootstrap intervals over the answers, those of differences paired. Each
training's result is kept in runs/NAME/ablations.json: the same command continues where it stopped, and --table prints what is
there.
"""

import argparse
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import filelock
import yaml

from headwright.configs import RunConfig, UserError, dump
from headwright.configs.command import clean_exit
from headwright.configs.console import cpu_seconds, say, table
from headwright.configs.load import load_run, parse
from headwright.data.harvest import open_store
from headwright.data.store import write_json, write_text
from headwright.data.target import Target
from headwright.eval.metrics import bootstrap
from headwright.eval.metrics import pooled_tau as tau
from headwright.eval.rollout_tau import cycles_of_documents
from headwright.heads.saved import load_head
from headwright.train.run import measured_depth, train

Setting = tuple[str, ...]
Answer = tuple[int, int]  # tokens emitted and cycles of one held-out answer


def values_of(sweep: str) -> list[str]:
    """`key=a,b,[c,d]` → overrides of the key. Raises UserError."""
    key, separator, text = sweep.partition("=")
    try:
        values = parse(f"[{text}]") if separator and text else []
    except yaml.YAMLError:
        values = []
    if not key or not isinstance(values, list) or not values:
        raise UserError(f"--sweep {sweep!r}: write key=value,value,…; lists in brackets: head.taps=[2,15,27],[27]")
    return [f"{key}={json.dumps(value)}" for value in values]


def grid(sweeps: Sequence[str], each: bool) -> list[Setting]:
    """All combinations, or one change at a time. The first is what others are compared with."""
    values = [values_of(sweep) for sweep in sweeps]
    if not each:
        return list(itertools.product(*values))
    first = tuple(part[0] for part in values)
    single = [(*first[:place], value, *first[place + 1 :]) for place, part in enumerate(values) for value in part[1:]]
    return [first, *single]


def changes(arguments: argparse.Namespace, settings: Sequence[Setting]) -> list[Setting]:
    """What each setting changes of the run file: results are kept by that, so that other sweeps find them again. Raises
    UserError where a setting is not sound, before the first is trained.
    """
    base = load_run(arguments.config, arguments.overrides)
    alone: dict[str, bool] = {}
    for part in {part for setting in settings for part in setting}:
        try:
            alone[part] = load_run(arguments.config, [*arguments.overrides, part]) != base
        except UserError:  # sound together with others, perhaps
            alone[part] = True
    for setting in settings:
        load_run(arguments.config, [*arguments.overrides, *setting])
    return [tuple(part for part in setting if alone[part]) for setting in settings]


def trained(arguments: argparse.Namespace, setting: Setting, seed: int) -> dict[str, Any]:
    """Train a setting and measure its best head. Its run directory is removed afterwards, unless --keep."""
    base = load_run(arguments.config, arguments.overrides)
    changed = load_run(arguments.config, [*arguments.overrides, *setting])
    digest = hashlib.blake2b(" ".join(setting).encode(), digest_size=4).hexdigest()
    run = replace(
        changed, name=f"{base.name}-ablate-{digest}-{seed}", features=changed.features or base.name, seed=seed
    )
    before = cpu_seconds()
    train(run)
    spent = cpu_seconds() - before
    found = {"answers": answers_of(run), "cpu_seconds": spent, "steps": steps_of(run)}
    if not arguments.keep:
        shutil.rmtree(run.directory)
    return found


def steps_of(run: RunConfig) -> int:
    """Optimizer steps of a finished training."""
    return int(json.loads((run.directory / "training.json").read_text(encoding="utf-8"))["step"])


def answers_of(run: RunConfig) -> list[Answer]:
    """The best head's cycles on each held-out answer."""
    reader = open_store(run, "held-out")
    target = Target.load(run.target, reader.manifest.taps, "cpu")
    head = load_head(run.directory / "head", target).eval()
    depth = measured_depth(run)
    cycles = cycles_of_documents(head, target, reader, [depth], run.train.tokens_per_batch)
    return [(sum(found[depth].emitted), len(found[depth].emitted)) for found in cycles]


def difference(pairs: Sequence[tuple[Answer, Answer]]) -> float:
    """τ of the second less τ of the first, over the same answers."""
    return tau([after for _, after in pairs]) - tau([before for before, _ in pairs])


def label(setting: Setting, first: Setting) -> str:
    """What a setting changes."""
    if setting == first:
        return "compared with: " + (", ".join(setting) or "the run file as it is").replace('"', "")
    back = [part.partition("=")[0] + " as in the run file" for part in first if not has(setting, part)]
    return ", ".join([part for part in setting if part not in first] + back).replace('"', "")


def has(setting: Setting, part: str) -> bool:
    """Whether a setting gives a value to the same key."""
    return any(other.partition("=")[0] == part.partition("=")[0] for other in setting)


def rows_of(settings: Sequence[Setting], kept: dict[str, Any], seeds: int) -> Iterator[list[str]]:
    """One row for each setting that is trained with all seeds."""
    usual = [kept.get(key_of(settings[0], seed)) for seed in range(seeds)]
    for setting in settings:
        found = [kept.get(key_of(setting, seed)) for seed in range(seeds)]
        if None in found or None in usual:
            continue
        answers = [tuple(answer) for result in found for answer in result["answers"]]  # type: ignore[index]
        before = [tuple(answer) for result in usual for answer in result["answers"]]  # type: ignore[index]
        low, high = bootstrap(answers, tau, 0)
        apart = list(zip(before, answers))
        least, most = bootstrap(apart, difference, 0)
        by_seed = [f"{tau(result['answers']):.3f}" for result in found]  # type: ignore[index]
        yield [
            label(setting, settings[0]),
            f"{tau(answers):.3f} [{low:.3f}, {high:.3f}]",
            "–" if setting == settings[0] else f"{difference(apart):+.3f} [{least:+.3f}, {most:+.3f}]",
            f"{sum(result['cpu_seconds'] for result in found) / seeds:.0f}",  # type: ignore[index]
            *([", ".join(by_seed)] if seeds > 1 else []),
        ]


def key_of(setting: Setting, seed: int) -> str:
    """Where a result is kept."""
    return f"{' '.join(setting)} seed={seed}"


def show(settings: Sequence[Setting], kept: dict[str, Any], seeds: int, out: Path | None) -> None:
    """The table, and as Markdown where asked."""
    columns = ["setting", "τ [95 %]", "against the first", "CPU s", *(["by seed"] if seeds > 1 else [])]
    rows = list(rows_of(settings, kept, seeds))
    table("held-out τ of a greedy chain", columns, rows)
    if out is not None:
        lines = ["| " + " | ".join(cells) + " |" for cells in [columns, ["---"] * len(columns), *rows]]
        write_text(out, "\n".join(lines) + "\n")


def results(path: Path) -> dict[str, Any]:
    """All that is kept, by run file and overrides."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def keep(path: Path, context: str, kept: dict[str, Any]) -> None:
    """Add results to those that are there: another sweep of the same run may have finished some meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(path.with_suffix(".lock")):
        everything = results(path)
        everything[context] = everything.get(context, {}) | kept
        write_json(path, everything)


def ablate(arguments: argparse.Namespace) -> None:
    """Train what is missing, then show all."""
    base = load_run(arguments.config, arguments.overrides)
    settings = changes(arguments, grid(arguments.sweep, arguments.each))
    path = base.directory / "ablations.json"
    digest = hashlib.blake2b(dump(base).encode(), digest_size=4).hexdigest()  # another run file is another context
    context = f"{arguments.config} {' '.join(arguments.overrides)} {digest}".strip()
    kept = results(path).get(context, {})
    for seed, setting in itertools.product(range(arguments.seeds), settings):
        if arguments.table or key_of(setting, seed) in kept:
            continue
        say(f"{label(setting, settings[0])}, seed {seed}")
        kept[key_of(setting, seed)] = trained(arguments, setting, seed)
        keep(path, context, kept)
    show(settings, kept, arguments.seeds, arguments.out)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="the run file; its features must be harvested")
    parser.add_argument("--sweep", nargs="+", required=True, metavar="KEY=VALUES", help="a key and its values")
    parser.add_argument("--each", action="store_true", help="change one key at a time instead of all combinations")
    parser.add_argument(
        "--seeds", type=int, choices=range(1, 100), default=1, metavar="N", help="trainings of each setting"
    )
    parser.add_argument("--keep", action="store_true", help="keep every training's run directory")
    parser.add_argument("--table", action="store_true", help="train nothing, print what is there")
    parser.add_argument("--out", type=Path, help="also write the table as Markdown")
    parser.add_argument(
        "--set",
        nargs="*",
        default=[],
        dest="overrides",
        metavar="section.key=value",
        help="change keys of the run file",
    )
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with clean_exit():
        ablate(parser.parse_args())


if __name__ == "__main__":
    main()
