"""A directory against the tables of engines, against what its own export proved, and against its target. Nothing is run."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor

from headwright.data.target import TargetSpec
from headwright.heads.contract import (
    WEIGHTS,
    Contract,
    Finding,
    Method,
    check_config,
    check_names,
    check_values,
    dropping,
    serious,
    setting,
)
from headwright.heads.directory import Directory, pickles
from headwright.heads.engine_tables import TOKEN_MAP
from headwright.heads.foreign import refuse_giant

ALL = "all engines"
RELATED = 0.3  # cosine of an embedding's rows with the target's, above which it is a trained relative of these


def fingerprint(tensor: Tensor) -> str:
    """xxh64 of a tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return xxhash.xxh64_hexdigest(flat.numpy().tobytes())


def examine_directory(
    directory: Directory, method: Method, contracts: Iterable[Contract], spec: TargetSpec | None
) -> dict[str, list[Finding]]:
    """What each engine's table says."""
    return {contract.engine: list(by_table(directory, method, contract, spec)) for contract in contracts}


def by_table(directory: Directory, method: Method, contract: Contract, spec: TargetSpec | None) -> Iterator[Finding]:
    """Keys, then tensors; their shapes by what a config would say if it left nothing out."""
    config = directory.config | {"file_names": {path.name for path in directory.path.iterdir()}}
    config |= {"tensor_names": {contract.spells(name) for name in directory.entries}}
    config |= {"trained_taps": directory.ours["taps"]} if "taps" in directory.ours else {}
    try:
        yield from check_config(contract, config, spec)
        yield from check_names(contract, method.infer(directory.config, directory.entries), directory.entries)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        where = f"a key is missing or of the wrong kind ({type(error).__name__}: {error})"
        yield Finding(
            "error", contract.engine, "config.json", where, "the engine stops when it reads it", "export the head again"
        )


def examine_values(directory: Directory, method: Method, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Numbers, for tensors whose shapes are right. Refuses files that are far larger than the tables want, unread."""
    refuse_giant(directory, method.contracts)
    directory = own_part(directory, method)
    misshapen = {finding.where.removeprefix(f"{WEIGHTS}: ") for finding in serious(findings)}
    sound = {name: entry for name, entry in directory.entries.items() if name not in misshapen}
    numbers = Directory(directory.path, directory.config, sound)
    yield from check_values(numbers, lambda name: method.spells(name) or name, vocabulary(directory, method))
    yield from changed_since_export(directory)


def vocabulary(directory: Directory, method: Method) -> int | None:
    """How many tokens the target has, by the config; None where it does not say."""
    try:
        found: int | None = method.plain(directory.config).get("vocab_size")
    except (KeyError, TypeError, ValueError):
        return None
    return found


def own_part(directory: Directory, method: Method) -> Directory:
    """Without what is not a head's, in directories that hold more."""
    if all(contract.closed for contract in method.contracts):
        return directory
    config = method.infer(directory.config, directory.entries)
    wanted = {name for contract in method.contracts for name in contract.shapes(contract.reads(config))}
    return Directory(directory.path, directory.config, {n: e for n, e in directory.entries.items() if n in wanted})


def changed_since_export(directory: Directory) -> Iterator[Finding]:
    """Tensors and keys that are not those whose drafts were compared with the trained head's."""
    proven = directory.ours.get("tensors") or {}
    so = "what the export proved (drafts equal to the trained head's) does not hold for it"
    for name, wanted in sorted(proven.items()):
        if name in directory.entries and fingerprint(directory.read(name)) != wanted:
            where = f"{WEIGHTS}: {name}"
            yield Finding("error", ALL, where, "is not the tensor that was exported", so, "export the head again")
    written = directory.ours.get("config") or {}
    for key in sorted(written.keys() | directory.config.keys()) if written else ():
        if written.get(key) != directory.config.get(key):
            what = f"is {directory.config.get(key)!r}, was exported as {written.get(key)!r}"
            mend = setting({key: written[key]}) if key in written else None
            yield Finding("error", ALL, f"config.json: {key}", what, so, "write the exported value", mend)


def beside_weights(directory: Directory) -> Iterator[Finding]:
    """Files that engines may unpickle."""
    for name in pickles(directory.path):
        if name == TOKEN_MAP:
            continue  # SGLang wants it so
        yield Finding(
            "warning",
            ALL,
            name,
            "a pickle beside the safetensors files",
            "an engine that reads it runs whatever code is in it",
            "remove it",
        )


@dataclass
class Facts:
    """What a target's checkpoint says without being run: its spec, and its embedding where that was read."""

    spec: TargetSpec
    rows_VD: Tensor | None = None


def against_target(directory: Directory, method: Method, facts: Facts) -> Iterator[Finding]:
    """The chat template that the head was trained with, and an embedding of its own."""
    trained = directory.ours.get("target") or {}
    if trained.get("template_hash") not in (None, facts.spec.template_hash):
        yield Finding(
            "warning",
            ALL,
            "headwright.json: template_hash",
            "the target's chat template is not the one that the head was trained with",
            "prompts look different from training: τ may be lower (`headwright study template` measures by how much)",
            "serve with the same template, or train again",
        )
    yield from prompted_otherwise((directory.ours.get("training") or {}).get("config") or {})
    name = next((name for name in directory.entries if name.endswith("embed_tokens.weight")), None)
    if name is not None and facts.rows_VD is not None and method.own_embedding:
        yield from own_embedding(name, directory.read(name), facts.rows_VD)


def prompted_otherwise(config: dict[str, Any]) -> Iterator[Finding]:
    """What the head's training said before every prompt: a server must be told to say it, too."""
    corpus = config.get("corpus") or {}
    for what, value in (("system prompt", corpus.get("system")), ("template arguments", corpus.get("template"))):
        if value:
            yield Finding(
                "note",
                ALL,
                "headwright.json: training",
                f"the head was trained with the {what} {value!r}",
                "without it prompts look different from training (`headwright study template` measures what that costs)",
                "send it with every request",
            )


def own_embedding(name: str, rows_VH: Tensor, target_VD: Tensor) -> Iterator[Finding]:
    """An embedding that vLLM keeps because it differs from the target's: trained, or left over from an initialisation."""
    if rows_VH.shape != target_VD.shape:
        return
    ours, theirs = rows_VH.float(), target_VD.float()
    if torch.allclose(ours, theirs, rtol=2**-7, atol=1e-6):
        return
    likeness = float(F.cosine_similarity(ours, theirs, dim=-1).mean())
    where, fix = f"{WEIGHTS}: {name}", "leave it out: engines share the target's"
    if likeness < RELATED:
        yield Finding(
            "error",
            "vllm",
            where,
            f"has nothing in common with the target's embedding (mean cosine {likeness:.2f}): left from an initialisation?",
            "vLLM keeps it (“distinct embed_tokens weights”) and drafts badly without a word; SGLang takes the target's",
            fix,
            dropping(name),
        )
    else:
        what = f"differs from the target's embedding (mean cosine {likeness:.2f}): trained with the head"
        yield Finding("warning", "sglang", where, what, "SGLang puts the target's there: τ differs between engines")
