"""Where weights come from: code, versions, command, machine. Written beside them, and given to trackers."""

import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from headwright.data.store import Manifest
from headwright.train.launch import Launch, parents_command

LIBRARIES = ("headwright", "torch", "transformers", "accelerate", "deepspeed", "peft", "safetensors", "datasets")
HIDDEN = "…"
CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")  # of a URL
NAME = (  # of what is not told: whole words, so that tokens_per_batch and api_key_env are
    r"[\w-]*(?:api[_-]?key|access[_-]?key|password|passwd|secret)|"
    r"(?:[\w-]*(?:hf|hub|access|auth|bearer|api|git\w*)[_-])?token"
)
KEY = re.compile(rf"(?i){NAME}")
PAIR = re.compile(
    rf"(?i)((?<![\w-])(?:{NAME})['\"]?\s*[=:]\s*|(?<!\S)--(?:{NAME})\s+)(?:'[^']*'|\"[^\"]*\"|[^\s'\",}}]+)"
)
BARE = re.compile(
    r"(?<![\w/-])(?:hf_|sk-|gh[pousr]_|glpat-)[\w-]{16,}|(?i:(?<=\bbearer )[\w.~+/=-]{8,})"
)  # by their looks


def provenance(launch: Launch, manifest: Manifest) -> dict[str, Any]:
    """Of a training."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command(),
        "revision": revision(),
        "versions": versions(),
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(launch.device) if launch.device.type == "cuda" else platform.machine(),
        "processes": launch.world,
        "strategy": launch.strategy,
        "precision": launch.precision,
        "target": manifest.target["name"],
        "features": xxhash.xxh3_128_hexdigest(repr(sorted(manifest.identity.items())).encode()),
    }


def versions() -> dict[str, str]:
    """Of the libraries that numbers depend on."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def revision() -> str | None:
    """The commit of the code, with a mark where files were changed; None outside a checkout."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    commit = git(root, "rev-parse", "HEAD")
    return commit and commit + ("+changes" if git(root, "status", "--porcelain", "--untracked-files=no") else "")


def git(root: Path, *words: str) -> str | None:
    """What git says."""
    try:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def command() -> str:
    """What the user typed, as far as it can be known, without secrets: a launcher's line, or this process's own."""
    parent = parents_command()
    if "RANK" in os.environ and any("launch" in word or "torch" in Path(word).name for word in parent):
        return clean(shlex.join(typed(parent)))
    words = ["python", *sys.argv] if sys.argv[0].endswith(".py") else [Path(sys.argv[0]).name, *sys.argv[1:]]
    return clean(shlex.join(words))


def typed(words: Sequence[str]) -> list[str]:
    """A process's command line as it was typed: scripts by their names, `python -m` as it is."""
    if "python" not in Path(words[0]).name:
        return [Path(words[0]).name, *words[1:]]
    rest = [word for word in words[1:] if word != "-u"]
    return ["python", *rest] if rest[:1] == ["-m"] else [Path(rest[0]).name, *rest[1:]]


def clean(text: str) -> str:
    """Without passwords and keys."""
    text = CREDENTIALS.sub(f"{HIDDEN}@", text)
    return BARE.sub(HIDDEN, PAIR.sub(lambda found: f"{found[1]}{HIDDEN}", text))


def cleaned(value: Any) -> Any:
    """The same of everything in a config; of what is called a password or key, all."""
    if isinstance(value, dict):
        secret = {key for key, item in value.items() if isinstance(item, str) and KEY.fullmatch(str(key))}
        return {key: HIDDEN if key in secret else cleaned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [cleaned(item) for item in value]
    return clean(value) if isinstance(value, str) else value
