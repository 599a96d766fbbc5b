"""The feature store: unpadded safetensors shards and a manifest.

    features/manifest.json       what the features are of; written before the first shard, completed after the last
    features/shard-00000.safetensors …

A shard is one unit of work. It appears by atomic rename, so a shard that exists is whole; a killed harvest continues
with the units that have none. A shard holds its documents behind each other: ids [T], mask [T], taps [T, K, D], last
[R, D] with argmax [R] and logz [R] for loss-bearing positions only, and offsets [documents + 1, 2] into T and R.
"""

import errno
import itertools
import json
import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headwright.configs import UserError
from headwright.data.batch import DocumentFeatures

SCHEMA = "headwright.features/1"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass
class Manifest:
    """What a store holds. `identity` must be equal for a harvest to continue in it."""

    identity: dict[str, Any]
    target: dict[str, Any]
    taps: list[int]
    dtype: str
    units: int
    schema: str = SCHEMA
    complete: bool = False
    documents: int = 0
    tokens: int = 0
    response_tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0
    shards: list[dict[str, Any]] | None = None


class FeatureWriter:
    """Writes units of a store; any number of processes may share one directory, each with its own units."""

    def __init__(self, root: Path, manifest: Manifest):
        self.root = root
        self.manifest = manifest
        root.mkdir(parents=True, exist_ok=True)
        path = root / "manifest.json"
        if path.exists():
            refuse_other(read_manifest(root), manifest, root)
        else:
            write_json(path, asdict(manifest))

    def path(self, unit: int) -> Path:
        """Where unit `unit` lies."""
        return self.root / f"shard-{unit:05d}.safetensors"

    def missing(self) -> list[int]:
        """Units that still have no shard."""
        return [unit for unit in range(self.manifest.units) if not self.path(unit).exists()]

    def write(
        self,
        unit: int,
        documents: Sequence[DocumentFeatures],
        notes: Sequence[dict[str, Any]],
        seconds: float,
    ) -> None:
        """Write one unit whole. `notes` describes each document (key, source, place)."""
        ends = torch.tensor([[0, 0], *([len(d.ids_T), len(d.last_RD)] for d in documents)]).cumsum(0)
        dtype = DTYPES[self.manifest.dtype]
        tensors = {
            "ids": torch.cat([d.ids_T for d in documents]).int(),
            "mask": torch.cat([d.mask_T for d in documents]),
            "taps": torch.cat([d.taps_TKD for d in documents]).to(dtype),
            "last": torch.cat([d.last_RD for d in documents]).to(dtype),
            "argmax": torch.cat([d.argmax_R for d in documents]).int(),
            "logz": torch.cat([d.logz_R for d in documents]).float(),
            "offsets": ends,
        }
        refuse_broken(tensors, notes, ends)
        # one key: safetensors writes several in any order, and equal shards should be equal files
        metadata = {"headwright": json.dumps({"documents": list(notes), "seconds": round(seconds, 3)})}
        replace_with(self.path(unit), lambda path: save_tensors(tensors, path, metadata))

    def finish(self) -> Manifest | None:
        """Complete the manifest once every unit has its shard; None while some are missing. Safe to call twice."""
        if self.missing():
            return None
        shards, totals = [], {"documents": 0, "tokens": 0, "response_tokens": 0, "bytes": 0}
        seconds = 0.0
        for unit in range(self.manifest.units):
            shard = describe_shard(self.path(unit))
            seconds += shard.pop("seconds")
            shards.append(shard)
            for key in totals:
                totals[key] += shard[key]
        done = Manifest(**(asdict(self.manifest) | totals | {"shards": shards, "complete": True, "seconds": seconds}))
        write_json(self.root / "manifest.json", asdict(done))
        return done


def describe_shard(path: Path) -> dict[str, Any]:
    """Counts and checksum of one shard."""
    with open_shard(path) as shard:
        mask = shard.get_tensor("mask")
        metadata = json.loads(shard.metadata()["headwright"])
        documents = shard.get_slice("offsets").get_shape()[0] - 1
    return {
        "file": path.name,
        "documents": documents,
        "tokens": len(mask),
        "response_tokens": int(mask.sum()),
        "bytes": path.stat().st_size,
        "xxh64": checksum(path),
        "seconds": metadata["seconds"],
    }


def refuse_broken(tensors: dict[str, Tensor], notes: Sequence[dict[str, Any]], ends: Tensor) -> None:
    """A NaN or infinite state never enters the store."""
    for name, column in (("taps", 0), ("last", 1)):
        finite = tensors[name].isfinite().flatten(1).all(1)
        if not finite.all():
            row = int(finite.int().argmin())
            document = int(torch.searchsorted(ends[1:, column].contiguous(), row, right=True))
            raise UserError(
                f"harvest: {notes[document]['place']}: {name} is not finite as {tensors[name].dtype}, row {row}; "
                "if harvest.dtype is float16, use bfloat16"
            )


def refuse_other(found: Manifest, wanted: Manifest, root: Path) -> None:
    """A store of another target, corpus or policy is never mixed with."""
    for key, value in wanted.identity.items():
        if found.identity.get(key) != value:
            raise UserError(
                f"{root} holds features of another run: {key} was {found.identity.get(key)!r}, now it is {value!r}\n"
                "Give the run another name, or remove that directory."
            )


class FeatureReader:
    """Random access to the documents of a complete store. Tensors are memory-mapped and copied on access."""

    def __init__(self, root: Path):
        self.root = root
        self.manifest = read_manifest(root)
        if not self.manifest.complete:
            raise UserError(f"{root}: the harvest is not finished: run it again, it continues where it stopped")
        self.shards = [open_shard(root / shard["file"]) for shard in self.manifest.shards or []]
        self.places: list[tuple[int, int, int, int, int]] = []
        self.notes: list[dict[str, Any]] = []
        for index, shard in enumerate(self.shards):
            offsets = shard.get_tensor("offsets").tolist()
            self.places += [(index, *a, *b) for a, b in itertools.pairwise(offsets)]
            self.notes += json.loads(shard.metadata()["headwright"])["documents"]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, document: int) -> DocumentFeatures:
        index, token, row, token_end, row_end = self.places[document]
        shard = self.shards[index]
        tokens = {name: shard.get_slice(name)[token:token_end] for name in ("ids", "mask", "taps")}
        rows = {name: shard.get_slice(name)[row:row_end] for name in ("last", "argmax", "logz")}
        return DocumentFeatures(
            tokens["ids"].long(),
            tokens["mask"],
            tokens["taps"],
            rows["last"],
            rows["argmax"].long(),
            rows["logz"],
        )

    def __iter__(self) -> Iterator[DocumentFeatures]:
        return (self[document] for document in range(len(self)))

    def lengths(self) -> list[int]:
        """Tokens of each document, without reading it."""
        return [end - start for _, start, _, end, _ in self.places]

    def response_tokens(self) -> Iterator[Tensor]:
        """The response token ids, shard by shard."""
        for shard in self.shards:
            yield shard.get_tensor("ids")[shard.get_tensor("mask")].long()

    def verify(self) -> list[str]:
        """Names of shards whose checksum is wrong."""
        return [s["file"] for s in self.manifest.shards or [] if checksum(self.root / s["file"]) != s["xxh64"]]


def open_shard(path: Path) -> Any:
    """A shard, memory-mapped."""
    try:
        return safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({error}); remove it and harvest again") from None


def read_manifest(root: Path) -> Manifest:
    """The manifest of a store, or UserError."""
    path = root / "manifest.json"
    if not path.is_file():
        raise UserError(f"{root}: no feature store there: run the harvest first")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise UserError(f"{path}: not valid JSON; remove {root} and harvest again") from None
    schema = raw.get("schema") if isinstance(raw, dict) else None
    if schema != SCHEMA:
        raise UserError(f"{path}: schema {schema!r}, this version reads {SCHEMA}; remove {root} and harvest again")
    try:
        return Manifest(**raw)
    except TypeError as error:
        raise UserError(f"{path}: not a manifest ({error}); remove {root} and harvest again") from None


def checksum(path: Path, state: Any = None) -> str:
    """Hash of a file; by default xxh64."""
    state = state or xxhash.xxh64()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            state.update(block)
    return state.hexdigest()


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """safetensors' save_file, with a full disk told as the OSError that it is."""
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:
        for code in (errno.ENOSPC, errno.EDQUOT):
            if f"os error {code}" in str(error):
                raise OSError(code, os.strerror(code), str(path)) from None
        raise


def write_json(path: Path, value: Any) -> None:
    """JSON by atomic rename."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Text by atomic rename."""
    replace_with(path, lambda scratch: scratch.write_text(text, encoding="utf-8"))


def replace_with(path: Path, write: Any) -> None:
    """Let `write(scratch)` make a file beside `path`, then rename it: whole or absent, even when killed."""
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        write(scratch)
        with scratch.open("rb") as file:
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def sweep(root: Path) -> None:
    """Remove what a killed process left half-written."""
    for scratch in root.glob(".*.tmp"):
        scratch.unlink(missing_ok=True)
