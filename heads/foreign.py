"""Heads in directories of others, and in our own exports: which kind they are, and how they become heads of ours.

A kind that is written by engines or by other projects has a module here with METHODS; nothing else need be told.
"""

import importlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwright.configs import UserError
from headwright.configs.console import size
from headwright.configs.load import build
from headwright.data.target import Target, TargetSpec
from headwright.data.vocab import DraftVocab
from headwright.heads import get_head
from headwright.heads.base import DraftHead, make_head
from headwright.heads.contract import Contract, Finding, Method, check_names, serious
from headwright.heads.directory import Config, Directory
from headwright.heads.engine_tables import other_tokens, other_width

LARGEST = 4  # times the fp32 size that a format asks for; more is another model
UNSAID = 64 << 20  # bytes that are read of a directory whose config gives no sizes
OURS = "head.json"


@cache
def methods() -> tuple[Method, ...]:
    """All kinds of directory: of every module here that defines METHODS."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    modules = [file.stem for file in files if re.search(r"^METHODS = ", file.read_text(encoding="utf-8"), re.MULTILINE)]
    found = [importlib.import_module(f"headwright.heads.{module}").METHODS for module in modules]
    return tuple(method for group in found for method in group)


def identify(directory: Directory) -> Method:
    """Which kind a directory is of. Raises UserError where it is none."""
    told = directory.ours.get("method")
    for method in methods():
        if method.name == told or (told is None and method.knows(directory.config, directory.entries)):
            return method
    shown = ", ".join(sorted(directory.entries)[:4])
    raise UserError(
        f"{directory.path}: no draft head that is known (architectures {directory.config.get('architectures')}, tensors "
        f"{shown}, …): known are {', '.join(method.name for method in methods())}"
    )


def is_foreign(folder: Path) -> bool:
    """Whether a directory is one that engines load, rather than one of ours."""
    return not (folder / OURS).is_file() and (folder / "config.json").is_file()


@dataclass
class Plain:
    """A directory in the layout of our exports."""

    method: Method
    config: Config
    tensors: dict[str, Tensor]


def open_plain(folder: Path) -> Plain:
    """Raises UserError, naming the tensor, where the directory is not whole. Nothing is read before that is known."""
    directory = Directory.open(folder)
    method = identify(directory)
    directory = Directory(folder, method.infer(directory.config, directory.entries), directory.entries)
    refuse_giant(directory, method.contracts)
    refuse_unwhole(directory, method.contracts)
    names = {name: method.spells(name) for name in directory.entries}
    tensors = {spelled: directory.read(name) for name, spelled in names.items() if spelled is not None}
    try:
        return Plain(method, method.plain(directory.config), tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / 'config.json'}: a key is missing or no number: {error}") from None


def expected_bytes(contract: Contract, config: Config) -> int | None:
    """What the tensors of a format take in fp32; None where the config does not say."""
    try:
        read = contract.reads(config)
        shapes = contract.shapes(read) | contract.optional(read)
        return sum(4 * torch.Size(shape).numel() for shape in shapes.values())
    except (KeyError, TypeError, ValueError):
        return None


def refuse_giant(directory: Directory, contracts: Iterable[Contract]) -> None:
    """Files that are far larger than a head of this config. Directories that hold more than a head may be of any size."""
    contracts = [contract for contract in contracts if contract.closed]
    wanted = [expected_bytes(contract, directory.config) for contract in contracts]
    most = max((count for count in wanted if count is not None), default=None)
    if contracts and most is None and directory.bytes > UNSAID:
        raise UserError(
            f"{directory.path}: its weights take {size(directory.bytes)}, and config.json does not say what sizes a head of it "
            "has: nothing of it was read"
        )
    if most is not None and directory.bytes > LARGEST * most + (1 << 20):
        raise UserError(
            f"{directory.path}: its weights take {size(directory.bytes)}, a head of this config {size(most)} at most in fp32: "
            "nothing of it was read. Is it a whole model, or config.json of another head?"
        )


def refuse_unwhole(directory: Directory, contracts: Iterable[Contract]) -> None:
    """Tensors missing or of another shape, by the engine's table that fits best. Extra ones are the kind's own business."""
    found = [structural(contract, directory) for contract in contracts]
    best = min(found, key=len)
    if best:
        words = "; ".join(
            f"{finding.where.removeprefix('model.safetensors: ')}: {finding.what}" for finding in best[:3]
        )
        raise UserError(f"{directory.path}: not a whole head: {words}" + (" …" if len(best) > 3 else ""))


def structural(contract: Contract, directory: Directory) -> list[Finding]:
    """What is missing or of another shape."""
    try:
        findings = serious(check_names(contract, directory.config, directory.entries))
    except (KeyError, TypeError, ValueError) as error:
        return [Finding("error", contract.engine, "config.json", f"a key is missing or no number: {error}")]
    return [finding for finding in findings if finding.what != "not known to the format"]


def adopt(folder: Path, target: Target) -> DraftHead:
    """A head of ours, with the weights of a directory. Raises UserError where ours would compute something else, or where the
    head is for another target.
    """
    rows_VD = target.embed(torch.arange(target.spec.vocab_size, device=target.device)).cpu()
    config, adopted = adopted_from(folder, target.spec, rows_VD)
    vocab = DraftVocab(adopted.ids_W.cpu(), target.spec.vocab_size)
    head = make_head(config, target.spec, adopted.taps, vocab)
    head.attach(target)
    try:
        head.load_state_dict(adopted.tensors)
    except RuntimeError as error:
        raise UserError(f"{folder}: its tensors do not make a head of ours: {error}") from None
    return head


def adopted_from(folder: Path, spec: TargetSpec, rows_VD: Tensor | None) -> tuple[Any, Any]:
    """The Config of a head of ours, and what else it is made of."""
    plain = open_plain(folder)
    refuse_other_sizes(folder, plain.config, spec)
    try:
        adopted = plain.method.adopt(plain.config, plain.tensors, spec, rows_VD)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
    except (KeyError, IndexError) as error:
        raise UserError(f"{folder}: not a whole {plain.method.name} head: {error} is missing") from None
    return build(get_head(adopted.options["kind"]).Config, adopted.options, str(folder)), adopted


def refuse_other_sizes(folder: Path, config: Config, spec: TargetSpec) -> None:
    """A head for a target with other tokens, or with states of another width."""
    for what in (other_tokens(config, spec), other_width(config, spec)):
        if what:
            raise UserError(f"{folder}: not a head for {spec.name}: {what}")
    if config.get("hidden_act") not in (None, "silu"):
        raise UserError(f"{folder}: its MLP is gated by {config['hidden_act']}, those of heads here by silu")


def taps_in(folder: Path, layers: int) -> tuple[int, ...]:
    """The taps that a directory's head reads, of a target of so many layers."""
    directory = Directory.open(folder)
    method = identify(directory)
    config = get_head(method.kind).Config
    try:
        named = method.plain(directory.config).get("eagle_aux_hidden_state_layer_ids")
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / 'config.json'}: a key is missing or no number: {error}") from None
    found: tuple[int, ...] = tuple(named) if named else config().choose_taps(layers)
    return found
