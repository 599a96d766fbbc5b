"""One safetensors file, memory-mapped: tensors are views of the file, and nothing is read before it is used."""

import json
import mmap
import struct
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TYPES = {
    "BOOL": torch.bool,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
}
LONGEST_HEADER = 100 << 20


class ShardError(ValueError):
    """What is wrong with a file."""


class Shard:
    """A mapped file. Pages are shared with every other reader; views stay valid when the shard is dropped.

    (`safe_open` copies each slice; here a document costs one copy, when it is packed.) Raises ShardError for a file that
    is missing, truncated or not of this form.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with path.open("rb") as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ShardError(f"cannot be read ({error})") from None
        length = read_length(self.map[:8], len(self.map))
        self.header = self.map[8 : 8 + length]
        self.start = 8 + length
        self.table = parse_header(self.header)
        if self.start + data_length(self.table) != len(self.map):
            raise ShardError(f"{len(self.map)} bytes, {self.start + data_length(self.table)} expected: truncated?")

    @staticmethod
    def expected_size(path: Path) -> int | None:
        """The size that a file's header speaks of; None where it has no readable one."""
        try:
            with path.open("rb") as file:
                length = read_length(file.read(8), path.stat().st_size)
                return 8 + length + data_length(parse_header(file.read(length)))
        except (OSError, ShardError):
            return None

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """What the writer noted."""
        found: dict[str, Any] = json.loads(self.table["__metadata__"]["headwright"])
        return found

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return {name: self.tensor(name) for name in self.table if name != "__metadata__"}

    def tensor(self, name: str) -> Tensor:
        """A view of the file."""
        entry = self.table[name]
        dtype, shape = TYPES[entry["dtype"]], entry["shape"]
        start, end = entry["data_offsets"]
        if start == end:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self.map, dtype=torch.uint8, count=end - start, offset=self.start + start)
        return flat.view(dtype).view(shape)


def read_length(raw: bytes, size: int) -> int:
    """The header's length."""
    if len(raw) < 8 or (length := struct.unpack("<Q", raw)[0]) > min(size - 8, LONGEST_HEADER):
        raise ShardError("its header cannot be read")
    return length


def parse_header(raw: bytes) -> dict[str, Any]:
    """Names, types, shapes and offsets, each checked against the others."""
    try:
        table: dict[str, Any] = json.loads(raw)
        for name, entry in table.items():
            if name == "__metadata__":
                json.loads(entry["headwright"])
                continue
            start, end = entry["data_offsets"]
            count = 1
            for extent in entry["shape"]:
                count *= extent
            if not 0 <= start <= end or count * TYPES[entry["dtype"]].itemsize != end - start:
                raise ShardError(f"{name} is not of the shape that its header gives")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise error if isinstance(error, ShardError) else ShardError("its header cannot be read") from None
    return table


def data_length(table: dict[str, Any]) -> int:
    """Bytes behind the header."""
    return max((entry["data_offsets"][1] for name, entry in table.items() if name != "__metadata__"), default=0)
