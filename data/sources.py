"""Files and data sets → rows. A row that cannot be read is handed on as `Malformed`, with its place, and never ends the run.

Every reader streams: a source of any length needs the memory of a few rows.
"""

import csv
import glob
import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from headwright.configs import UserError, reason
from headwright.configs.schema import Source
from headwright.data.demo import demo_rows

Row = tuple[str, Any]  # (place, a parsed row or Malformed)
LONGEST = 8 << 20  # bytes of one row; a longer one is no chat
BLOCK = 1 << 18  # bytes of plain text read at once
SHUFFLE = 10_000  # rows among which a streamed data set is shuffled
LISTS = ("messages", "conversations", "turns", "tools", "input_ids", "loss_mask", "mask")
BOM = b"\xef\xbb\xbf"


class Malformed(ValueError):
    """Why a row cannot be read."""


def source_rows(source: Source, seed: int) -> Iterator[Row]:
    """(place, row) of a source."""
    if source.demo:
        yield from demo_rows(source.demo)
    elif source.path:
        for path in matching(source.path):
            yield from file_rows(path)
    else:
        yield from hub_rows(source, seed)


def matching(pattern: str) -> list[Path]:
    """The files that a path or pattern names, in the order of their names. Raises UserError for none, or an unknown kind."""
    path = Path(pattern).expanduser()
    if path.is_file():
        found = [path]
    else:
        found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if Path(name).is_file()]
    if not found:
        raise UserError(f"corpus path {pattern}: no such file")
    for file in found:
        kind_of(file)
    return found


def kind_of(path: Path) -> str:
    """The suffix that says how a file is read, without that of its compression."""
    packed = path.suffix in (".gz", ".zst")
    kind = Path(path.stem).suffix if packed else path.suffix
    if kind not in READERS or (packed and kind in (".parquet", ".arrow")):
        raise UserError(
            f"corpus path {path}: expected {', '.join(READERS)}; all but .parquet and .arrow also as .gz and .zst"
        )
    return kind


def file_rows(path: Path) -> Iterator[Row]:
    """Rows of one file. What breaks in its middle (a torn archive, say) is reported there, and ends the file."""
    place = str(path)
    try:
        with open_file(path) as file:
            for place, row in READERS[kind_of(path)](path, file):
                yield place, row
    except PermissionError as error:
        raise UserError(f"corpus path {path}: {error.strerror}") from None
    except (EOFError, OSError, ValueError, zlib.error, csv.Error) as error:
        yield f"{place} and after", Malformed(f"the file breaks off: {reason(error)}")


def open_file(path: Path) -> IO[bytes]:
    """The bytes of a file, unpacked."""
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.suffix == ".zst":
        return io.BufferedReader(Unpacked(path))
    return path.open("rb")


class Unpacked(io.RawIOBase):
    """A .zst file, frame by frame. (The package's own reader takes a file that was cut off for a whole one.)"""

    def __init__(self, path: Path):
        try:
            import zstandard
        except ImportError:
            raise UserError(f"corpus path {path}: .zst needs a package: pip install zstandard") from None
        self.zstandard, self.file = zstandard, path.open("rb")
        self.frame: Any = None
        self.held = b""

    def readable(self) -> bool:
        """As BufferedReader asks."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer`; 0 at the end. Raises EOFError for a frame without end."""
        while not self.held:
            packed = self.frame.unused_data if self.frame is not None and self.frame.eof else b""
            if self.frame is None or self.frame.eof:
                self.frame = self.zstandard.ZstdDecompressor().decompressobj()
            if not (packed := packed or self.file.read(1 << 16)):
                if self.started:
                    raise EOFError("the compressed file is cut off")
                return 0
            self.started = True
            try:
                self.held = self.frame.decompress(packed)
            except self.zstandard.ZstdError as error:
                raise ValueError(str(error)) from None
            self.started = not self.frame.eof
        count = min(len(buffer), len(self.held))
        buffer[:count], self.held = self.held[:count], self.held[count:]
        return count

    started = False

    def close(self) -> None:
        """Close the file, too."""
        self.file.close()
        super().close()


def read_json_lines(path: Path, file: IO[bytes]) -> Iterator[Row]:
    """One JSON value a line."""
    for number, line in lines_of(file):
        place = f"{path}:{number}"
        if line is None:
            yield place, Malformed(f"longer than {LONGEST >> 20} MiB")
        elif line.strip():
            yield place, parse(line)


def lines_of(file: IO[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines; None for one that is too long, which is read past without being held."""
    number = 0
    while line := file.readline(LONGEST):
        number += 1
        if line.endswith(b"\n") or len(line) < LONGEST:
            yield number, line.removeprefix(BOM) if number == 1 else line
            continue
        while (line := file.readline(LONGEST)) and not line.endswith(b"\n"):
            pass
        yield number, None


def parse(line: bytes) -> Any:
    """A JSON value, or Malformed."""
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Malformed(f"not UTF-8 at byte {error.start}")
    except json.JSONDecodeError as error:
        return Malformed(f"not JSON: {error.msg} at column {error.colno}")
    except RecursionError:
        return Malformed("not JSON: nested too deeply")
    except ValueError as error:  # an integer of thousands of digits
        return Malformed(f"not JSON: {error}")


def read_json(path: Path, file: IO[bytes]) -> Iterator[Row]:
    """A list of rows, or an object that holds one under `data` or `rows`; a single object is one row.

    Files of JSON lines are often called .json, too.
    """
    found = parse(file.read().removeprefix(BOM))
    if isinstance(found, Malformed):
        file.seek(0)
        if not isinstance(parse(next((line or b"" for _, line in lines_of(file)), b"")), Malformed):
            file.seek(0)
            yield from read_json_lines(path, file)
            return
    if isinstance(found, dict):
        found = next((found[key] for key in ("data", "rows") if isinstance(found.get(key), list)), [found])
    if not isinstance(found, list):
        yield str(path), found
        return
    for number, row in enumerate(found):
        yield f"{path}[{number}]", row


def read_table(delimiter: str) -> Callable[[Path, IO[bytes]], Iterator[Row]]:
    """A reader of separated values with a header line. Bytes that are not UTF-8 show as lone surrogates, refused later."""

    def read(path: Path, file: IO[bytes]) -> Iterator[Row]:
        csv.field_size_limit(LONGEST)
        too_long: list[int] = []
        rows = csv.reader(text_lines(file, too_long), delimiter=delimiter)
        header: list[str] | None = None
        while True:
            place = f"{path}:{rows.line_num + 1}"
            try:
                fields = next(rows, None)
            except csv.Error as error:
                yield place, Malformed(str(error))
                continue
            while too_long:
                yield f"{path}:{too_long.pop(0)}", Malformed(f"longer than {LONGEST >> 20} MiB")
            if fields is None:
                return
            if header is None:
                header = fields or None
            elif fields:
                yield place, table_row(header, fields)

    return read


def text_lines(file: IO[bytes], too_long: list[int]) -> Iterator[str]:
    """Lines of a table. One that is too long is noted, and empty."""
    for number, line in lines_of(file):
        if line is None:
            too_long.append(number)
        yield (line or b"\n").decode("utf-8", "surrogateescape")


def table_row(header: list[str], fields: list[str]) -> Any:
    """The fields by name; missing ones are empty."""
    if len(fields) > len(header):
        return Malformed("more fields than the header has")
    return unpacked(dict(zip(header, fields + [""] * (len(header) - len(fields)))))


def unpacked(row: dict[str, Any]) -> dict[str, Any]:
    """Lists, which tables must write as JSON text, as lists."""
    out = {}
    for key, value in row.items():
        looks = key in LISTS and isinstance(value, str) and value.lstrip().startswith("[")
        found = parse(value.encode("utf-8", "surrogateescape")) if looks else value
        out[key] = found if isinstance(found, list) else value
    return out


def read_parquet(path: Path, file: IO[bytes]) -> Iterator[Row]:
    """Parquet, a few rows at a time."""
    import pyarrow.parquet

    yield from numbered(path, pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=64))


def read_arrow(path: Path, file: IO[bytes]) -> Iterator[Row]:
    """An Arrow file, or a stream, as `datasets` writes it."""
    import pyarrow

    try:
        reader = pyarrow.ipc.open_file(file)
    except pyarrow.ArrowInvalid:
        file.seek(0)
        yield from numbered(path, pyarrow.ipc.open_stream(file))
        return
    yield from numbered(path, (reader.get_batch(index) for index in range(reader.num_record_batches)))


def numbered(path: Path, batches: Any) -> Iterator[Row]:
    """Rows of Arrow batches."""
    number = 0
    for batch in batches:
        batch.validate(full=True)  # a damaged file must not be read beyond its buffers
        for index in range(batch.num_rows):
            row: Any
            try:
                row = unpacked(batch.slice(index, 1).to_pylist()[0])
            except (ValueError, OverflowError) as error:  # a string that is not UTF-8, a date that is none
                row = Malformed(reason(error))
            yield f"{path}[{number}]", row
            number += 1


def read_text(path: Path, file: IO[bytes]) -> Iterator[Row]:
    """Plain text in blocks of whole lines. A line that is not UTF-8 is left out and reported."""
    start, held, length = 1, [], 0
    for number, line in lines_of(file):
        try:
            text = (line or b"").decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            yield f"{path}:{number}", Malformed(f"not UTF-8 at byte {error.start}")
            continue
        if line is None:
            yield f"{path}:{number}", Malformed(f"longer than {LONGEST >> 20} MiB")
        held.append(text)
        length += len(text)
        if length >= BLOCK:
            yield f"{path}:{start}", {"text": "".join(held)}
            start, held, length = number + 1, [], 0
    if held:
        yield f"{path}:{start}", {"text": "".join(held)}


def hub_rows(source: Source, seed: int) -> Iterator[Row]:
    """Rows of a hub data set, through `datasets`."""
    import datasets

    try:
        rows = datasets.load_dataset(
            source.hub, source.config, split=source.split, revision=source.revision, streaming=source.streaming
        )
        if source.streaming:
            rows = rows.shuffle(seed=seed, buffer_size=SHUFFLE).take(source.limit or sys.maxsize)
        for number, row in enumerate(rows):
            yield f"{source.hub}[{number}]", row
    except Exception as error:  # datasets raises many kinds: no network, no such set, a gated one
        raise UserError(f"corpus hub {source.hub}: {reason(error)}") from None


READERS: dict[str, Callable[[Path, IO[bytes]], Iterator[Row]]] = {
    ".jsonl": read_json_lines,
    ".json": read_json,
    ".csv": read_table(","),
    ".tsv": read_table("\t"),
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".txt": read_text,
    ".md": read_text,
}
