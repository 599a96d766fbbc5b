"""A head's directory as engines find it: config.json and safetensors files, looked at without trusting them.

Names, dtypes and shapes come from the files' headers; numbers are read only when asked for. Nothing is ever unpickled, and no
file outside the directory is named by one inside it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headwright.configs import UserError, reason
from headwright.configs.console import size
from headwright.heads.values import refuse_strange

Config = dict[str, Any]
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
LONGEST_JSON = 64 << 20
CONVERT = (
    'weights = torch.load("{name}", weights_only=True); safetensors.torch.save_file({{k: v.contiguous() for k, v in '
    'weights.items()}}, "model.safetensors")'
)


@dataclass(frozen=True)
class Entry:
    """A tensor as a file's header has it. dtype: safetensors' name, such as BF16."""

    file: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numbers(self) -> int:
        """How many."""
        return torch.Size(self.shape).numel()

    @property
    def floating(self) -> bool:
        """Whether it holds weights, not a map."""
        return "F" in self.dtype


class Directory:
    """config.json and the headers of all weights."""

    def __init__(self, path: Path, config: Config, entries: Mapping[str, Entry]):
        self.path, self.config, self.entries = path, config, dict(entries)

    @classmethod
    def open(cls, path: Path) -> "Directory":
        """Raises UserError, with one message, for what is no head's directory, or is broken or unsafe."""
        if not path.is_dir():
            raise UserError(f"{path}: no such directory")
        config = read_json(path / "config.json")
        refuse_strange(path / "config.json", config)
        return cls(path, config, read_entries(path))

    @cached_property
    def bytes(self) -> int:
        """Of all weight files."""
        return sum((self.path / file).stat().st_size for file in {entry.file for entry in self.entries.values()})

    def read(self, name: str) -> Tensor:
        """One tensor. Raises UserError where the file turns out to be broken."""
        file = self.path / self.entries[name].file
        try:
            with safe_open(file, "pt") as opened:
                tensor: Tensor = opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file}: {name} cannot be read: {reason(error)}") from None
        return tensor

    def load(self) -> dict[str, Tensor]:
        """All of them."""
        return {name: self.read(name) for name in self.entries}

    @property
    def ours(self) -> dict[str, Any]:
        """What an export of ours wrote beside the weights; empty in other directories."""
        path = self.path / "headwright.json"
        found = read_json(path) if path.is_file() else {}
        for key in ("tensors", "config", "measured", "target"):
            if not isinstance(found.get(key) or {}, dict):
                raise UserError(f"{path}: {key} is no object: not written by Headwright")
        return found


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file, or UserError."""
    try:
        if path.stat().st_size > LONGEST_JSON:
            raise UserError(f"{path}: {size(path.stat().st_size)} of JSON: this is not a head's")
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: not a directory that an engine loads") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not readable as JSON: {reason(error)}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: holds a {type(found).__name__}, an object is expected")
    return found


def read_entries(folder: Path) -> dict[str, Entry]:
    """The headers of all safetensors files, or of those that an index names."""
    entries: dict[str, Entry] = {}
    wanted = indexed(folder)
    for file in sorted(set(wanted.values())) if wanted else sorted(path.name for path in folder.glob("*.safetensors")):
        entries |= header(folder / file)
    refuse_pickles(folder, entries)
    lost = sorted(set(wanted) - set(entries))
    if lost:
        raise UserError(f"{folder / INDEX}: names {lost[0]}, which {wanted[lost[0]]} does not hold")
    return entries


def indexed(folder: Path) -> dict[str, str]:
    """Files by tensor, as an index has them; empty where there is none. Every file must lie in the directory itself."""
    if not (folder / INDEX).is_file():
        return {}
    where = read_json(folder / INDEX).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise UserError(f"{folder / INDEX}: has no weight_map of tensors and files")
    outside = [file for file in where.values() if Path(file).name != file or not file.endswith(".safetensors")]
    if outside:
        raise UserError(
            f"{folder / INDEX}: names a file outside the directory, or no safetensors file: {outside[0]}: not read"
        )
    return where


def header(path: Path) -> dict[str, Entry]:
    """Names, dtypes and shapes. No tensor is read."""
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, a file is no mapping
            return {n: Entry(path.name, part.get_dtype(), tuple(part.get_shape())) for n, part in slices.items()}
    except RuntimeError:  # too large to be mapped here
        return header_alone(path)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path}: not a whole safetensors file ({reason(error)}): truncated? copy or export it again"
        ) from None


def header_alone(path: Path) -> dict[str, Entry]:
    """The same from the first bytes of a file, for one that cannot be mapped."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            found = json.loads(file.read(min(length, LONGEST_JSON)))
        return {n: Entry(path.name, e["dtype"], tuple(e["shape"])) for n, e in found.items() if n != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a safetensors file that can be read here: {reason(error)}") from None


def refuse_pickles(folder: Path, entries: Mapping[str, Entry]) -> None:
    """Weights that only unpickling would give: that runs whatever code is in the file."""
    if entries:
        return
    found = pickles(folder)
    if found:
        raise UserError(
            f"{folder}: its weights are a pickle ({found[0]}), which is never unpickled here: it can run any code. If you "
            f"trust where it comes from, convert it once: {CONVERT.format(name=found[0])}"
        )
    raise UserError(f"{folder}: no *.safetensors in it")


def pickles(folder: Path) -> list[str]:
    """Files that would have to be unpickled."""
    return sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
