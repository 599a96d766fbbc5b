"""The command line that all stages share: one config, overrides, help that explains every key, clean exits."""

import argparse
import contextlib
import dataclasses
import errno
import importlib
import os
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator
from typing import Any

from headwright.configs.errors import UserError
from headwright.configs.load import load_run, strip_annotation
from headwright.configs.schema import RunConfig

Stage = Callable[[RunConfig, bool], object]


def run_stage(prog: str, about: str, sections: tuple[str, ...], stage: Stage, argv: list[str] | None) -> None:
    """Parse the command line of one stage, load and check the whole run file, run `stage(config, dry_run)`."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=about,
        epilog=explain(sections),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the run file (YAML)")
    parser.add_argument("--dry-run", action="store_true", help="check everything that costs nothing, then stop")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="change keys of the run file")
    args = parser.parse_args(argv)
    with clean_exit():
        stage(load_run(args.config, args.overrides), args.dry_run)
        if args.dry_run:
            print(f"dry run: {args.config} is sound as far as can be told without a network or a long computation")


def explain(sections: tuple[str, ...]) -> str:
    """Every key of `sections`, its default and what it means."""
    fields = typing.get_type_hints(RunConfig, include_extras=True)
    words = {name: note for name in ("name", "runs", "seed") for note in fields[name].__metadata__}
    blocks = ["of every stage:\n" + "\n".join(f"  {name}: {about}" for name, about in words.items())]
    for name in sections:
        blocks += explain_heads() if name == "head" else [explain_class(name, strip_annotation(fields[name]))]
    return "\n\n".join(blocks)


def explain_heads() -> list[str]:
    """The keys that kinds of head share, once; then each kind's own, and those where it has another default or meaning."""
    blocks: dict[Any, str] = {}
    for kind in head_configs():
        base, skip = kind.__mro__[1], set()
        if dataclasses.is_dataclass(base):
            skip = {item.name for item in dataclasses.fields(base) if item.name not in vars(kind)["__annotations__"]}
            blocks.setdefault(base, explain_class("head", base))
        blocks[kind] = explain_class("head", kind, skip)
    return list(blocks.values())


def head_configs() -> list[Any]:
    """The Config of every kind of head, found as `load_run` finds them."""
    heads = importlib.import_module("headwright.heads")
    return [heads.get_head(kind).Config for kind in heads.kinds()]


def explain_class(prefix: str, kind: Any, skip: set[str] | None = None) -> str:
    """The keys of one dataclass, one paragraph each."""
    lines = [f"{prefix}: {(kind.__doc__ or '').strip().splitlines()[0]}"]
    hints = typing.get_type_hints(kind, include_extras=True)
    for item in sorted(dataclasses.fields(kind), key=lambda item: item.name != "kind"):
        if item.name in (skip or ()):
            continue
        words = [note for note in getattr(hints[item.name], "__metadata__", ()) if isinstance(note, str)]
        head = f"  {prefix}.{item.name} = {show_default(item)}"
        lines.append(head)
        lines += textwrap.wrap("; ".join(words), 96, initial_indent="      ", subsequent_indent="      ")
        inner = strip_annotation(hints[item.name])
        listed = typing.get_origin(inner) is list
        inner = typing.get_args(inner)[0] if listed else inner
        if dataclasses.is_dataclass(inner):
            nested = explain_class(f"{prefix}.{item.name}" + ("[i]" if listed else ""), inner)
            lines += textwrap.indent(nested, "  ").splitlines()
    return "\n".join(lines)


def show_default(item: Any) -> str:
    """A field's default as a user would write it."""
    if item.default is not dataclasses.MISSING:
        return "null" if item.default is None else str(item.default)
    value = item.default_factory()
    return f"({type(value).__name__})" if dataclasses.is_dataclass(value) else str(value)


@contextlib.contextmanager
def clean_exit() -> Iterator[None]:
    """Turn what a user can mend into one message and an exit code; let real faults show their traceback."""
    try:
        yield
    except UserError as error:
        stop(f"error: {error}", 2)
    except KeyboardInterrupt:
        stop("\ninterrupted: finished work is kept; the same command continues where it stopped", 130)
    except PermissionError as error:
        stop(f"error: {error.filename}: {error.strerror}: choose another place with runs=…", 2)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        stop("error: the disk is full: free some space; the same command continues where it stopped", 28)


def stop(message: str, code: int) -> typing.NoReturn:
    """Print and leave. Daemon threads and progress bars must not hold the process."""
    sys.stdout.flush()
    print(message, file=sys.stderr, flush=True)
    if "torch.distributed" in sys.modules and os.environ.get("WORLD_SIZE", "1") != "1":
        os._exit(code)  # the other ranks wait in a collective that this one will never join
    sys.exit(code)
