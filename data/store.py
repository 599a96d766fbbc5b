"""The feature store: unpadded safetensors shards, an index and a manifest.

    features/manifest.json       what the features are of; written before the first shard, completed after the last
    features/index.safetensors   places [documents, 5]: shard, first token, first row, end token, end row
    features/shard-00000.safetensors …

A shard is one unit of work. It appears by atomic rename, so a shard that exists is whole; a killed harvest continues
with the units that have none. A shard holds its documents behind each other: ids [T], mask [T], taps [T, K, D]; last
[R, D] with argmax [R] and logz [R] for loss-bearing positions only; offsets [documents + 1, 2] into T and R; and two
checksums of each document (tokens; states), so that what is read can be checked without reading more. fp8 stores e4m3
with one power of two per row (taps_scale [T, K], last_scale [R]): a store reads back as bfloat16, exactly.
"""

import contextlib
import errno
import itertools
import json
import os
import shutil
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from headwright.configs import UserError
from headwright.data.batch import Answer, DocumentFeatures, answers_of
from headwright.data.shard import Shard, ShardError

SCHEMA = "headwright.features/2"
MANIFEST = "manifest.json"
DTYPES = {  # of the features in memory
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8": torch.bfloat16,
    "fp8-taps": torch.bfloat16,
}
FP8 = {"fp8": ("taps", "last"), "fp8-taps": ("taps",)}  # which tensors are stored in e4m3
TOKEN_SIDE = ("ids", "mask", "taps", "taps_scale")
ROW_SIDE = ("last", "last_scale", "argmax", "logz")
CHECKED = (("ids", "mask", "argmax"), ("taps", "taps_scale", "last", "last_scale", "logz"))  # one checksum each
OPEN_SHARDS = 128
SMALLEST_EXPONENT = -118  # of a row's scale: 2^-e must be a float32, and e an int8
STARTED = time.time()


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
    index: str = ""
    shards: list[dict[str, Any]] | None = None


class FeatureWriter:
    """Writes units of a store; any number of processes may share one directory, each with its own units.

    `write` works in the background, one unit at a time, while the target computes the next; `finish` and leaving a
    `with` block wait for it, and tell of its failure.
    """

    def __init__(self, root: Path, manifest: Manifest):
        self.root = root
        self.manifest = manifest
        self.pool: ThreadPoolExecutor | None = None
        self.pending: Future[None] | None = None
        root.mkdir(parents=True, exist_ok=True)
        path = root / MANIFEST
        if path.exists():
            refuse_other(read_manifest(root), manifest, root)
        else:
            write_manifest(root, manifest)

    def __enter__(self) -> "FeatureWriter":
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the unit being written; without a pool, nothing is."""
        if self.pool is not None:
            self.pool.shutdown()
            self.pool = None
        self.wait()

    def path(self, unit: int) -> Path:
        """Where unit `unit` lies."""
        return self.root / shard_name(unit)

    def missing(self) -> list[int]:
        """Units that have no shard, or a truncated one."""
        there = {entry.name: entry.stat().st_size for entry in os.scandir(self.root) if entry.name.startswith("shard-")}
        return [unit for unit in range(self.manifest.units) if not self.whole(unit, there.get(shard_name(unit)))]

    def whole(self, unit: int, size: int | None) -> bool:
        """Whether the file of a unit is as long as its header says."""
        return size is not None and Shard.expected_size(self.path(unit)) == size

    def count(self) -> int:
        """Shards that are there."""
        return sum(entry.name.startswith("shard-") for entry in os.scandir(self.root))

    def write(
        self, unit: int, documents: Sequence[DocumentFeatures], notes: Sequence[dict[str, Any]], seconds: float
    ) -> None:
        """Write one unit whole, behind the caller's back. `notes` describes each document (key, source, place)."""
        self.wait()
        if self.pool is None:
            self.write_now(unit, documents, notes, seconds)
        else:
            self.pending = self.pool.submit(self.write_now, unit, documents, notes, seconds)

    def background(self) -> "FeatureWriter":
        """Write in a thread from now on."""
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="headwright-writer")
        return self

    def wait(self) -> None:
        """Wait for the unit being written; raise what went wrong with it."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def write_now(
        self, unit: int, documents: Sequence[DocumentFeatures], notes: Sequence[dict[str, Any]], seconds: float
    ) -> None:
        """Write one unit."""
        tensors = shard_tensors(documents, notes, self.manifest.dtype)
        # one key: safetensors writes several in any order, and equal shards should be equal files
        metadata = {"headwright": json.dumps({"documents": list(notes), "seconds": round(seconds, 3)})}
        replace_with(self.path(unit), lambda path: save_tensors(tensors, path, metadata))

    def finish(self) -> Manifest | None:
        """Complete index and manifest once every unit has its shard; None while some are missing. Safe to call twice."""
        self.wait()
        if self.missing():
            return None
        shards, places = [], [torch.zeros(0, 5, dtype=torch.long)]
        totals = {"documents": 0, "tokens": 0, "response_tokens": 0, "bytes": 0, "seconds": 0.0}
        for unit in range(self.manifest.units):
            shard, offsets = describe_shard(self.path(unit))
            places.append(torch.cat([torch.full((len(offsets) - 1, 1), unit), offsets[:-1], offsets[1:]], dim=1))
            for key in totals:
                totals[key] += shard[key]
            shards.append({key: value for key, value in shard.items() if key != "seconds"})
        index = {"places": torch.cat(places)}
        replace_with(self.root / "index.safetensors", lambda path: save_tensors(index, path))
        made = {"shards": shards, "complete": True, "index": checksum(self.root / "index.safetensors")}
        done = Manifest(**(asdict(self.manifest) | totals | made))
        write_manifest(self.root, done)
        return done


def shard_name(unit: int) -> str:
    """The file of a unit."""
    return f"shard-{unit:05d}.safetensors"


def shard_tensors(
    documents: Sequence[DocumentFeatures], notes: Sequence[dict[str, Any]], dtype: str
) -> dict[str, Tensor]:
    """Everything that a shard holds. Raises UserError for a state that is not finite."""
    ends = torch.tensor([[0, 0], *([len(d.ids_T), len(d.last_RD)] for d in documents)]).cumsum(0)
    tensors = {
        "ids": torch.cat([d.ids_T for d in documents]).int(),
        "mask": torch.cat([d.mask_T for d in documents]),
        "taps": torch.cat([d.taps_TKD for d in documents]).to(DTYPES[dtype]),
        "last": torch.cat([d.last_RD for d in documents]).to(DTYPES[dtype]),
        "argmax": torch.cat([d.argmax_R for d in documents]).int(),
        "logz": torch.cat([d.logz_R for d in documents]).float(),
    }
    refuse_broken(tensors, notes, ends)
    for name in FP8.get(dtype, ()):
        tensors[name], tensors[f"{name}_scale"] = to_fp8(tensors[name])
    slices = [cut(tensors, *a, *b) for a, b in itertools.pairwise(ends.tolist())]
    checksums = torch.tensor([[digest(part, names) for names in CHECKED] for part in slices], dtype=torch.long)
    return tensors | {"offsets": ends, "checksums": checksums.reshape(-1, len(CHECKED))}


def to_fp8(values_XD: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 values and the exponent [X] of their rows' scale: a power of two, so that nothing but e4m3's rounding is lost."""
    largest_X = values_XD.float().abs().amax(-1)
    share_X, exponent_X = torch.frexp(largest_X / torch.finfo(torch.float8_e4m3fn).max)
    exponent_X = (exponent_X - (share_X == 0.5).int()).clamp_min(SMALLEST_EXPONENT)
    scaled_XD = torch.ldexp(values_XD.float(), -exponent_X[..., None])
    return scaled_XD.to(torch.float8_e4m3fn), exponent_X.to(torch.int8)


def from_fp8(values_XD: Tensor, exponent_X: Tensor) -> Tensor:
    """Back to bfloat16, which holds every such value exactly."""
    largest = torch.finfo(torch.bfloat16).max  # e4m3 may have rounded a number near it up
    return torch.ldexp(values_XD.float(), exponent_X[..., None].int()).clamp(-largest, largest).bfloat16()


def cut(tensors: dict[str, Tensor], token: int, row: int, token_end: int, row_end: int) -> dict[str, Tensor]:
    """One document's part of a shard's tensors, as views."""
    tokens = {name: tensors[name][token:token_end] for name in TOKEN_SIDE if name in tensors}
    return tokens | {name: tensors[name][row:row_end] for name in ROW_SIDE if name in tensors}


def digest(parts: dict[str, Tensor], names: Sequence[str]) -> int:
    """Checksum of some tensors of one document, as a signed 64-bit number."""
    state = xxhash.xxh3_64()
    for name in names:
        if name in parts and parts[name].numel():
            state.update(raw(parts[name]))
    return state.intdigest() - (1 << 63)


def raw(tensor: Tensor) -> Any:
    """A tensor's bytes, without a copy where it is contiguous."""
    return tensor.contiguous().view(torch.uint8).numpy()


def describe_shard(path: Path) -> tuple[dict[str, Any], Tensor]:
    """Counts of one shard, a checksum of its index, and its offsets. The features themselves are not read."""
    shard = open_shard(path)
    offsets = shard.tensor("offsets")
    found = {
        "file": path.name,
        "documents": len(offsets) - 1,
        "tokens": int(offsets[-1, 0]),
        "response_tokens": int(shard.tensor("mask").sum()),
        "bytes": path.stat().st_size,
        "xxh64": index_digest(shard),
        "seconds": shard.metadata["seconds"],
    }
    return found, offsets.clone()


def index_digest(shard: Shard) -> str:
    """Checksum of the header and of the two tensors that say where documents lie and what their checksums are."""
    state = xxhash.xxh64(shard.header)
    for name in ("offsets", "checksums"):
        state.update(raw(shard.tensor(name)))
    return state.hexdigest()


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


class OpenShards(OrderedDict[int, Shard]):
    """The shards in use; the least recently used is closed when there are too many. Several threads may take them."""

    def __init__(self, make: Callable[[int], Shard]):
        super().__init__()
        self.make, self.lock = make, threading.Lock()

    def take(self, index: int) -> Shard:
        """A shard, made if it is not open. One thread at a time makes one."""
        with self.lock:
            shard = self.pop(index, None)
            self[index] = shard = self.make(index) if shard is None else shard
            while len(self) > OPEN_SHARDS:
                self.popitem(last=False)
            return shard


class FeatureReader:
    """Random access to the documents of a complete store.

    `taps`: those of the stored ones that are wanted. Opening reads the index only. Shards are memory-mapped when they are first
    needed; a document's checksum is compared when it is first read. What is returned are views of the mapped file.
    """

    def __init__(self, root: Path, taps: Sequence[int] | None = None):
        self.root = root
        self.manifest = read_manifest(root)
        self.columns: list[int] | None = None
        if taps is not None and list(taps) != self.manifest.taps:
            self.columns = [self.manifest.taps.index(tap) for tap in taps]
            self.manifest = replace(self.manifest, taps=list(taps))
        if not self.manifest.complete:
            raise UserError(f"{root}: the harvest is not finished: run it again, it continues where it stopped")
        self.places = read_index(root, self.manifest.index)
        owners = self.places[:, 0].contiguous()
        self.first = torch.searchsorted(owners, torch.arange(self.manifest.units)).tolist()
        self.shards = OpenShards(self.open)
        self.checked = bytearray(len(self.places))

    def __len__(self) -> int:
        return len(self.places)

    def shard(self, index: int) -> Shard:
        """A shard, opened if need be."""
        return self.shards.take(index)

    def open(self, index: int) -> Shard:
        """A shard whose index is what was written."""
        entry = (self.manifest.shards or [])[index]
        shard = open_shard(self.root / entry["file"])
        if index_digest(shard) != entry["xxh64"]:
            raise damaged(shard.path, "its index is not what was written")
        return shard

    def __getitem__(self, document: int) -> DocumentFeatures:
        index = int(self.places[document, 0])
        row = document - self.first[index]
        found = stored_document(self.shard(index), row, self.manifest.dtype, check=not self.checked[document])
        self.checked[document] = 1
        return found if self.columns is None else replace(found, taps_TKD=found.taps_TKD[:, self.columns])

    def __iter__(self) -> Iterator[DocumentFeatures]:
        return (self[document] for document in range(len(self)))

    def read(self, documents: Sequence[int]) -> list[DocumentFeatures]:
        """Several documents, in the given order."""
        return [self[document] for document in documents]

    @cached_property
    def notes(self) -> list[dict[str, Any]]:
        """What the store remembers of each document: key, source, place, sample, turn."""
        return [note for index in range(self.manifest.units) for note in self.shard(index).metadata["documents"]]

    def lengths(self) -> list[int]:
        """Tokens of each document, without reading it."""
        return (self.places[:, 3] - self.places[:, 1]).tolist()

    def loss_rows(self) -> list[int]:
        """Loss-bearing rows of each document."""
        return (self.places[:, 4] - self.places[:, 2]).tolist()

    def sources(self) -> list[str]:
        """The source of each document."""
        return [note["source"] for note in self.notes]

    def place(self, document: int) -> str:
        """Where a document came from."""
        index = int(self.places[document, 0])
        return origin(self.shard(index).metadata["documents"][document - self.first[index]])

    def response_tokens(self) -> Iterator[Tensor]:
        """The response token ids, turn by turn."""
        return (answer.ids for answer in self.answers())

    def answers(self) -> Iterator[Answer]:
        """The response tokens of each turn. Features are not read."""
        for index in range(self.manifest.units):
            shard = self.shard(index)
            places = itertools.pairwise(shard.tensor("offsets").tolist())
            for number, ((token, row), (token_end, row_end)) in enumerate(places):
                wrong = document_damage(shard, number, [0])
                if wrong:
                    raise damaged(shard.path, wrong)
                note = shard.metadata["documents"][number]
                ids_T, mask_T = shard.tensor("ids")[token:token_end].long(), shard.tensor("mask")[token:token_end]
                yield from answers_of(note["source"], ids_T, mask_T, shard.tensor("argmax")[row:row_end].long())


def origin(note: dict[str, Any]) -> str:
    """The place of a document's note, for messages."""
    sample = f", answer {note['sample']}" if note.get("sample") else ""
    return f"{note['place']}{sample}"


def stored_document(shard: Shard, row: int, dtype: str, check: bool = True) -> DocumentFeatures:
    """One document of a shard, as views of the file. Raises UserError when it is not as it was written."""
    wrong = document_damage(shard, row, range(len(CHECKED))) if check else None
    if wrong:
        raise damaged(shard.path, wrong)
    parts = cut(shard.tensors, *shard.tensor("offsets")[row : row + 2].flatten().tolist())
    for name in FP8.get(dtype, ()):
        parts[name] = from_fp8(parts[name], parts[f"{name}_scale"])
    return DocumentFeatures(
        parts["ids"].long(), parts["mask"], parts["taps"], parts["last"], parts["argmax"].long(), parts["logz"]
    )


def store_damage(root: Path) -> Iterator[tuple[str, str | None]]:
    """(file, what is wrong with it or None) of every shard that is or should be there. Reads everything."""
    manifest = read_manifest(root)
    known = {entry["file"]: entry for entry in manifest.shards or []} if manifest.complete else {}
    for file in sorted({*known, *(path.name for path in root.glob("shard-*"))}):
        yield file, shard_damage(root / file, known.get(file))


def shard_damage(path: Path, entry: dict[str, Any] | None) -> str | None:
    """What is wrong with a shard, or None. Without an entry (the store is not complete) its index is taken as it is."""
    try:
        shard = load_shard(path)
    except ShardError as error:
        return str(error)
    if entry is not None and index_digest(shard) != entry["xxh64"]:
        return "its index is not what was written"
    for row in range(len(shard.tensor("checksums"))):
        wrong = document_damage(shard, row, range(len(CHECKED)))
        if wrong:
            return wrong
    return None


def document_damage(shard: Shard, row: int, which: Iterable[int]) -> str | None:
    """What is wrong with one document of a shard: its tokens (0), its states (1), or nothing."""
    parts = cut(shard.tensors, *shard.tensor("offsets")[row : row + 2].flatten().tolist())
    checksums = shard.tensor("checksums")[row].tolist()
    if all(digest(parts, CHECKED[index]) == checksums[index] for index in which):
        return None
    return f"{shard.metadata['documents'][row]['place']} does not match its checksum"


def load_shard(path: Path) -> Shard:
    """A mapped shard with all that a shard has. Raises ShardError."""
    shard = Shard(path)
    missing = {"offsets", "checksums", "ids", "mask", "taps", "last", "argmax", "logz", "__metadata__"} - set(
        shard.table
    )
    if missing:
        raise ShardError(f"its header lacks {', '.join(sorted(missing))}")
    return shard


def read_index(root: Path, expected: str) -> Tensor:
    """Where each document lies."""
    path = root / "index.safetensors"
    try:
        if checksum(path) != expected:
            raise ValueError("it is not what was written")
        return load_file(path)["places"]
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise UserError(f"{path}: cannot be used ({error}); run the harvest again, it makes a new one") from None


def damaged(path: Path, what: str) -> UserError:
    """A shard cannot be trusted."""
    return UserError(f"{path}: {what}. Run headwright verify, then the harvest again: only this shard is made anew")


def open_shard(path: Path) -> Shard:
    """A shard, memory-mapped, or UserError."""
    try:
        return load_shard(path)
    except ShardError as error:
        raise damaged(path, str(error)) from None


def read_manifest(root: Path) -> Manifest:
    """The manifest of a store, or UserError."""
    path = root / MANIFEST
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


def write_manifest(root: Path, manifest: Manifest) -> None:
    """The manifest of a store, by atomic rename."""
    write_json(root / MANIFEST, asdict(manifest))


def bytes_per_token(taps: int, width: int, dtype: str) -> tuple[int, int]:
    """Bytes of a stored token, and of a loss-bearing row on top."""
    element = DTYPES[dtype].itemsize
    taps_bytes = taps * (width + 1) if "taps" in FP8.get(dtype, ()) else taps * width * element
    last_bytes = width + 1 if "last" in FP8.get(dtype, ()) else width * element
    return taps_bytes + 5, last_bytes + 8


def refuse_full_disk(root: Path, needed: float, there: float) -> None:
    """A harvest that cannot fit is refused before it starts."""
    root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(root).free
    if needed - there > free:
        raise UserError(
            f"{root}: the features may need {needed / 2**30:.2f} GiB ({there / 2**30:.2f} GiB of it are there), and "
            f"{free / 2**30:.2f} GiB are free. Make room, put runs=… elsewhere, lower corpus.sources[i].limit or "
            "answers.max_new_tokens, take harvest.dtype=fp8, or set harvest.check_disk=false"
        )


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


def sweep(root: Path, pattern: str = ".*.tmp", before: float | None = STARTED) -> None:
    """Remove what a killed process left half-written: files that nobody has touched since this process began."""
    for scratch in root.glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            if before is None or scratch.stat().st_mtime < before:
                scratch.unlink()
