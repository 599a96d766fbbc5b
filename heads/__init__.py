"""Draft heads. A head is one file: the module's name is its kind; there is no registry to edit.

A head module defines `Config` (a dataclass with its own keys) and `Head` (a `base.DraftHead`).
"""

import importlib
import re
from pathlib import Path
from types import ModuleType

from headwright.configs.errors import UserError
from headwright.configs.load import nearest


def kinds() -> list[str]:
    """The kinds of head that exist: every module here that defines a class Head."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return [file.stem for file in files if re.search(r"^class Head\(", file.read_text(encoding="utf-8"), re.MULTILINE)]


def get_head(kind: str) -> ModuleType:
    """The module of a kind, with its `Config` and `Head`. Raises UserError with the nearest kind."""
    known = kinds()
    if kind not in known:
        raise UserError(f"head.kind {kind!r}: {nearest(str(kind), known)}")
    return importlib.import_module(f"headwright.heads.{kind}")
