"""The house: imports go one way, the package list is what is on disk, and no file hides a library."""

import ast
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ORDER = ("configs", "data", "heads", "eval", "train")
TAKEN = set(sys.stdlib_module_names) | set(packages_distributions())
FILES = sorted(path for folder in ORDER for path in (ROOT / folder).glob("*.py"))


def imported_folders(path: Path) -> set[str]:
    """Folders of the house that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found |= {name.split(".")[1] for name in names if name.startswith("headwright.")}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_to_the_left(path):
    allowed = set(ORDER[: ORDER.index(path.parent.name) + 1])
    assert imported_folders(path) <= allowed


def test_package_list_is_what_is_on_disk():
    tomllib = pytest.importorskip("tomllib")
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert tool["packages"] == [f"headwright.{folder}" for folder in ORDER]
    assert tool["package-dir"] == {f"headwright.{folder}": folder for folder in ORDER}
    on_disk = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert on_disk == set(ORDER)
    assert not [p for folder in ORDER for p in (ROOT / folder).iterdir() if p.is_dir() and p.name != "__pycache__"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_hides_a_library(path):
    """Launching a file puts its folder first on sys.path: a file named like a module would be imported in its place."""
    assert path.stem == "__init__" or path.stem not in TAKEN


def test_only_four_files_know_model_classes():
    for path in FILES:
        if path.name in ("target.py", "block.py", "small_model.py", "gguf_model.py"):
            continue
        text = path.read_text(encoding="utf-8")
        assert "ForCausalLM(" not in text
        assert "AutoModel" not in text


def test_only_its_own_file_knows_a_head():
    """Shared code never branches on a head's name."""
    kinds = [path.stem for path in (ROOT / "heads").glob("*.py") if "class Head(" in path.read_text(encoding="utf-8")]
    assert kinds
    for path in FILES:
        if path.stem in kinds:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                constants = {c.value for c in ast.walk(node) if isinstance(c, ast.Constant)}
                assert not constants & set(kinds), f"{path}:{node.lineno} compares with a head's name"
