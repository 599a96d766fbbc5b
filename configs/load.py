"""YAML and dotted overrides → dataclasses, strictly."""

import dataclasses
import difflib
import importlib
import re
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from headwright.configs.errors import UserError
from headwright.configs.schema import RunConfig

T = TypeVar("T")


def load(cls: type[T], path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> T:
    """Read `path` into the dataclass `cls`, after applying `section.key=value` overrides.

    Raises UserError for a missing file, broken YAML, an unknown key (with the nearest known one) or a bad value.
    """
    raw = read_yaml(Path(path))
    for override in overrides:
        apply_override(raw, override)
    return build(cls, raw, str(path))


def load_run(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    """A whole run file, every section checked, the head's own section by the head's own Config."""
    run = load(RunConfig, path, overrides)
    check_run(run, str(path))
    run.head = build_head(run.head, str(path))
    return run


def check_run(run: RunConfig, where: str) -> None:
    """Rules that concern more than one key."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", run.name):
        raise UserError(f"{where}: name is {run.name!r}: give a name of letters, digits, '.', '_' and '-'")
    if run.features is not None and not re.fullmatch(r"[A-Za-z0-9][\w.-]*", run.features):
        raise UserError(f"{where}: features is {run.features!r}: give the name of a run in {run.runs}/")
    if not run.target.model:
        raise UserError(f"{where}: target.model is empty: give a hub name or a model directory")
    for index, source in enumerate(run.corpus.sources):
        given = [key for key in ("demo", "path", "hub") if getattr(source, key)]
        if len(given) != 1:
            raise UserError(
                f"{where}: corpus.sources[{index}] names {' and '.join(given) or 'none'} of demo, path and hub: "
                "give exactly one"
            )


def build_head(section: Any, where: str) -> Any:
    """The head's section as an instance of `heads/<kind>.py`'s Config.

    The module is found by name at this moment, the one late binding in the house: shared code never learns
    which heads exist.
    """
    if not isinstance(section, dict) or "kind" not in section:
        raise UserError(f"{where}: head.kind is missing, for example\n  head:\n    kind: eagle3")
    get_head = importlib.import_module("headwright.heads").get_head
    return build(get_head(section["kind"]).Config, section, f"{where}: head")


def build(cls: type[T], raw: Any, where: str) -> T:
    """`raw` (parsed YAML) as `cls`, or UserError."""
    refuse_unknown(cls, raw, where, "")
    try:
        return TypeAdapter(cls).validate_python(raw)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("list[", "literal[")))
        raise UserError(f"{where}: {key} = {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}") from None


def refuse_unknown(kind: Any, raw: Any, where: str, prefix: str) -> None:
    """Walk `raw` beside the dataclass `kind`; the first unknown key is an error with a suggestion."""
    kind = strip_annotation(kind)
    if typing.get_origin(kind) is list and isinstance(raw, list):
        for index, item in enumerate(raw):
            refuse_unknown(typing.get_args(kind)[0], item, where, f"{prefix[:-1]}[{index}].")
    if not dataclasses.is_dataclass(kind) or raw is None:
        return
    if not isinstance(raw, dict):
        raise UserError(f"{where}: {prefix[:-1] or 'the file'} must be a section of keys, not {raw!r}")
    known = typing.get_type_hints(kind, include_extras=True)
    for key, value in raw.items():
        if key not in known:
            raise UserError(f"{where}: unknown key {prefix}{key}; {nearest(str(key), known, prefix, 'known keys')}")
        refuse_unknown(known[key], value, where, f"{prefix}{key}.")


def nearest(given: str, known: Iterable[str], prefix: str = "", words: str = "there are") -> str:
    """What may have been meant, or all that there is."""
    known = list(known)
    near = difflib.get_close_matches(given, known, n=1)
    return f"did you mean {prefix}{near[0]}?" if near else f"{words}: {', '.join(known)}"


def strip_annotation(kind: Any) -> Any:
    """`Annotated[X, …]` and `X | None` → X."""
    if typing.get_origin(kind) is typing.Annotated:
        return strip_annotation(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        inner = [arg for arg in typing.get_args(kind) if arg is not type(None)]
        return strip_annotation(inner[0]) if len(inner) == 1 else kind
    return kind


class Loader(yaml.SafeLoader):
    """YAML 1.1 reads `1e-4` as a string; a run file means a number."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.[\d_]+)([eE][-+]?\d+)$"),
    list("-+.0123456789"),
)


def parse(text: str) -> Any:
    """One YAML value or document."""
    return yaml.load(text, Loader=Loader)


def read_yaml(path: Path) -> dict[str, Any]:
    """The file as a mapping."""
    if not path.is_file():
        raise UserError(f"config {path}: no such file")
    try:
        raw = parse(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"config {path}: not valid YAML: {error}") from None
    if not isinstance(raw, dict):
        raise UserError(f"config {path}: expected sections of keys, found {type(raw).__name__}")
    return raw


def apply_override(raw: dict[str, Any], override: str) -> None:
    """`train.lr=1e-4` or `corpus.sources.0.limit=20`, in place."""
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise UserError(f"override {override!r}: write section.key=value")
    *parents, last = key.split(".")
    node: Any = raw
    for part in parents:
        node = step_into(node, part, key)
    try:
        parsed = parse(value)
    except yaml.YAMLError:
        raise UserError(f"override {override!r}: the value is not valid YAML") from None
    if isinstance(node, list):
        node[list_index(node, last, key)] = parsed
    else:
        node[last] = parsed


def step_into(node: Any, part: str, key: str) -> Any:
    """The child `part` of `node`, made if it is a missing section."""
    place: Any = list_index(node, part, key) if isinstance(node, list) else part
    child = node[place] if isinstance(node, list) else node.setdefault(place, {})
    if child is None:
        child = node[place] = {}
    if not isinstance(child, dict | list):
        raise UserError(f"override {key}: {part} is a value, not a section")
    return child


def list_index(node: list[Any], part: str, key: str) -> int:
    """`part` as an index into `node`."""
    if not part.isdecimal() or int(part) >= len(node):
        raise UserError(f"override {key}: {part!r} is not an index below {len(node)}")
    return int(part)


def dump(config: Any) -> str:
    """A resolved config as YAML, readable by `load`."""
    plain = TypeAdapter(type(config)).dump_python(config, mode="json", warnings=False)
    if isinstance(config, RunConfig) and dataclasses.is_dataclass(config.head) and not isinstance(config.head, type):
        plain["head"] = dataclasses.asdict(config.head)
    return yaml.dump(plain, Dumper=Dumper, sort_keys=False, allow_unicode=True)


class Dumper(yaml.SafeDumper):
    """YAML reads three more characters as line ends; text that holds one is quoted, with escapes."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """A string."""
        return self.represent_scalar("tag:yaml.org,2002:str", text, style='"' if set(text) & set(LINE_ENDS) else None)


LINE_ENDS = "\x85\u2028\u2029"
Dumper.add_representer(str, Dumper.represent_text)
