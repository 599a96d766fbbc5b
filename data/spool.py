"""Records on disk instead of in memory: a corpus of any length costs eight bytes of memory per record."""

import json
import os
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Spool(Generic[T]):
    """A list that lies in an unnamed temporary file. The file is gone when the process is, however it ends."""

    def __init__(self, folder: Path | None, encode: Callable[[T], Any], decode: Callable[[Any], T]):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it lives as long as the list
        self.encode, self.decode = encode, decode
        self.ends = array("Q", [0])

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, index: int) -> T:
        start, end = self.ends[index], self.ends[index + 1]
        return self.decode(json.loads(os.pread(self.file.fileno(), end - start, start)))

    def __iter__(self) -> Iterator[T]:
        return (self[index] for index in range(len(self)))

    def append(self, record: T) -> int:
        """Add a record; returns its number. Records are JSON: text with lone surrogates survives, escaped."""
        blob = json.dumps(self.encode(record)).encode()
        start, done = self.ends[-1], 0
        while done < len(blob):  # a nearly full disk writes a part, and fails at the next
            done += os.pwrite(self.file.fileno(), blob[done:], start + done)
        self.ends.append(start + len(blob))
        return len(self) - 1


class View(Generic[T]):
    """Some records of a spool, by number, in the given order."""

    def __init__(self, spool: Spool[T], numbers: Sequence[int]):
        self.spool, self.numbers = spool, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> T:
        return self.spool[self.numbers[index]]

    def __iter__(self) -> Iterator[T]:
        return (self.spool[number] for number in self.numbers)
