"""Small reports made by hand, with what `headwright compare`, `speedup` and `watch` read of them."""

import copy
import json
from pathlib import Path
from typing import Any

from headwright.eval.records import SCHEMA

Row = dict[str, Any]


def row(place: str, cycles: int, emitted: int, spent: float = 0.1, plain: float | None = 0.2) -> Row:
    """A prompt. spent: seconds per token; plain: of plain decoding, None where it was not timed."""
    found = {"place": place, "tokens": emitted + 1, "seconds": spent * (emitted + 1)}
    found |= {"cycles": cycles, "emitted": emitted, "accepted": emitted - cycles}
    return found if plain is None else found | {"plain_seconds_per_token": plain}


def entry(rows: list[Row] | None = None, drafter: str = "eagle3", name: str = "chain-5", **more: Any) -> dict[str, Any]:
    """An entry; by default a chain of five that costs 1.7 plain steps a cycle and emits 2.5 tokens. more: other keys."""
    kind, depth = ("chain", int(name.removeprefix("chain-"))) if name.startswith("chain") else ("dynamic", 3)
    found = {
        "drafter": drafter,
        "shape": {"kind": kind, "depth": depth, "name": name},
        "prompt_set": "held-out",
        "temperature": 0.0,
        "acceptance_length": 2.5,
        "acceptance_length_ci95": [2.25, 2.75],
        "speedup": 1.4,
        "speedup_model": model(2.5, 0.25, 1.4, 0.05),
        "per_prompt": [row("a:1", 10, 25)] if rows is None else rows,
    }
    return found | more


def model(tau: float, draft: float, verify: float, overhead: float) -> dict[str, float]:
    """A speed-up model; all but τ in plain steps of a cycle."""
    cycle = draft + verify + overhead
    costs = {"draft_in_steps": draft, "verify_in_steps": verify, "overhead_in_steps": overhead}
    return costs | {"predicted_here": tau / cycle, "break_even_tau_here": cycle}


def report(*entries: dict[str, Any], name: str = "first", stack: str = "one core") -> dict[str, Any]:
    """A report."""
    found = {"schema": SCHEMA, "name": name, "answers": {"stack": stack}, "pooled": [], "entries": list(entries)}
    return copy.deepcopy(found)


def save(folder: Path, found: Any) -> str:
    """Write it as a run's report.json; the run's directory, as a command line has it."""
    folder.mkdir(parents=True, exist_ok=True)
    text = found if isinstance(found, str) else json.dumps(found)
    (folder / "report.json").write_text(text, encoding="utf-8")
    return str(folder)


def refused(main: Any, capsys: Any, *words: str) -> str:
    """The one message with which a command line ends, exit code 2."""
    code = 0
    try:
        main(list(words))
    except SystemExit as ended:
        code = ended.code
    shown = capsys.readouterr()
    assert code == 2, shown
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert len(shown.err.splitlines()) == 1
    return shown.err
