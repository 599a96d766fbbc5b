"""What a long measurement has finished, on disk, so that an interrupted one need not repeat it."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headwright.configs.console import say
from headwright.data.store import write_text


class Kept:
    """Named results, one JSON object a line, each written when it is there; a line that a kill has torn is forgotten.

    The first line says what they belong to: another identity starts anew.
    """

    def __init__(self, path: Path, identity: dict[str, Any]):
        self.path = path
        self.parts: dict[str, Any] = {}
        self.spent: dict[str, float] = {}
        first = json.dumps({"identity": identity}, sort_keys=True)
        lines = path.read_text(encoding="utf-8").split("\n") if path.is_file() else []
        if lines and lines[0] == first:
            self.take(lines[1:-1])
            if self.parts:
                say(f"continuing {path}; remove it to measure again")
        write_text(path, "\n".join([first, *(self.line(name) for name in self.parts), ""]))

    def take(self, lines: list[str]) -> None:
        """Results of an earlier run, up to what is no result."""
        for line in lines:
            try:
                found = json.loads(line)
                self.parts[found["name"]], self.spent[found["name"]] = found["value"], found["seconds"]
            except (ValueError, KeyError, TypeError):
                return

    def line(self, name: str) -> str:
        """A result as it stands in the file."""
        return json.dumps({"name": name, "seconds": self.spent[name], "value": self.parts[name]})

    def recall(self, name: str, work: Callable[[], Any]) -> Any:
        """The result kept under `name`, or that of `work`, kept from now on. Both are what JSON makes of them."""
        if name not in self.parts:
            begun = time.perf_counter()
            self.parts[name] = json.loads(json.dumps(work()))
            self.spent[name] = time.perf_counter() - begun
            with self.path.open("a", encoding="utf-8") as file:
                file.write(self.line(name) + "\n")
        return self.parts[name]

    def seconds(self) -> float:
        """Time of all that was measured."""
        return sum(self.spent.values())
