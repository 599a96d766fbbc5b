"""Reports and studies as they lie on disk."""

import json
from pathlib import Path
from typing import Any

from headwright.configs import UserError

SCHEMA = "headwright.acceptance/1"
STUDY = "headwright.study/1"
ADAPTATION = "headwright.adaptation/2"


def read_report(path: Path) -> dict[str, Any]:
    """A report, by its file or its run's directory. Raises UserError for none, a broken one, or one of another schema."""
    file = path / "report.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{file} is missing: headwright eval first")
    try:
        report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        schema = report.get("schema")
    except (ValueError, AttributeError, OSError) as error:
        raise UserError(f"{file}: not a report: {error}") from None
    if schema != SCHEMA:
        raise UserError(f"{file}: schema {schema!r}, this version reads {SCHEMA}: headwright eval again")
    entries = report.get("entries")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(f"{file}: not a report: it has no entries")
    missing = [key for key in ("entries", "answers", "pooled") if key not in report]
    if missing or not all("per_prompt" in entry for entry in report["entries"]):
        raise UserError(
            f"{file}: written by an earlier version, without {missing or 'per_prompt'}: headwright eval again"
        )
    return report


def facts(path: Path) -> dict[str, Any]:
    """A JSON file, or nothing."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
