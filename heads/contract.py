"""What an engine loads of a kind of head, as a table: exports are written from it, and directories are checked against it.

A `Contract` belongs to one method and one engine. It says how the engine reads config.json, which tensors it then wants,
which it also takes, and what it does about anything else, since most engines say nothing and serve a broken head as
τ = 1.0.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from headwright.data.target import TargetSpec
from headwright.heads.directory import Config, Directory, Entry

Shapes = dict[str, tuple[int, ...]]
Level = Literal["error", "warning", "note"]
WEIGHTS = "model.safetensors"
TITLES = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt-llm": "TensorRT-LLM", "llama.cpp": "llama.cpp"}
MAPS = {"d2t": ("I64",), "t2d": ("BOOL",), "token_map": ("I64",)}  # dtypes of what is no weight
SERVED = ("F32", "BF16", "F16")
# Parts of a head: what an engine drops of these is missed.
COUNTS = re.compile(r"(^|\.)(layers\.\d+|midlayer|mtp_\w+)\.|^(model\.)?(fc|norm|input_norm|fc_norm|lm_head)\.")
UNREAD = ".rotary_emb.inv_freq"  # old checkpoints have it; every engine makes its own
FEW = 16  # of more kept tokens some stand side by side, so that their offsets are equal


@dataclass
class Draft:
    """A copy that is being mended."""

    config: Config
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Finding:
    """Something about a directory. `so`: what the engine makes of it; `fix`: what to do; `mend`: does that to a copy."""

    level: Level
    engine: str
    where: str
    what: str
    so: str = ""
    fix: str = ""
    mend: Callable[[Draft], None] | None = None


@dataclass(frozen=True)
class Key:
    """A rule about config.json. `wrong`: what is wrong, given the config and, where it is known, the target; `right`: the keys
    that mend it.
    """

    name: str
    wrong: Callable[[Config, TargetSpec | None], str | None]
    so: str
    fix: str = ""
    right: Callable[[Config, TargetSpec | None], Config] | None = None
    level: Level = "error"


def unchanged(config: Config) -> Config:
    """As it stands."""
    return config


def always(words: str) -> Callable[[str], str]:
    """The same for every tensor."""
    return lambda name: words


def nothing(config: Config) -> Shapes:
    """No further tensors."""
    return {}


@dataclass(frozen=True)
class Contract:
    """One method in one engine.

    reads: the config with the engine's defaults. spells: a tensor's name in the table, for any name that the engine takes for
    it. shapes, optional: of such a config. missing, extra: what the engine does about such a tensor, and how bad that is.
    launch: the line that starts it, for a config, a target, a directory and K. arguments: the same for its Python class.
    """

    method: str
    engine: str
    version: str
    shapes: Callable[[Config], Shapes]
    launch: Callable[[Config, str, Path, int], str]
    missing: Callable[[str], str]
    extra: Callable[[str], str]
    extra_level: Level = "error"
    reads: Callable[[Config], Config] = unchanged
    spells: Callable[[str], str] = str
    optional: Callable[[Config], Shapes] = nothing
    keys: tuple[Key, ...] = ()
    shares_lm_head: bool = False  # whether every head of this kind drafts with the target's
    proven: bool = True  # whether the table was held against the engine itself, not its sources alone
    closed: bool = True  # whether a tensor that the table does not know is looked at
    shape: str = "chain"  # what the engine drafts: chains or trees
    arguments: Callable[[Config, str, Path, int], dict[str, Any]] | None = None

    @property
    def title(self) -> str:
        """The engine and the version that the table was read from."""
        return f"{TITLES[self.engine]} {self.version}"


def check_config(contract: Contract, config: Config, spec: TargetSpec | None) -> Iterator[Finding]:
    """Every key that is not as the engine needs it."""
    for key in contract.keys:
        wrong = key.wrong(config, spec)
        if wrong is None:
            continue
        right = key.right(config, spec) if key.right else None
        mend = None if right is None else setting(right)
        yield Finding(key.level, contract.engine, f"config.json: {key.name}", wrong, key.so, key.fix, mend)


def setting(values: Config) -> Callable[[Draft], None]:
    """Set keys."""

    def mend(draft: Draft) -> None:
        draft.config |= values

    return mend


def check_names(contract: Contract, config: Config, entries: Mapping[str, Entry]) -> Iterator[Finding]:
    """Tensors that are missing, unknown, of another shape or of a dtype that is not served. `config`: as it is in the file,
    with what the tensors tell of it.
    """
    read = contract.reads(config)
    wanted = contract.shapes(read)
    known = wanted | contract.optional(read)
    names = {contract.spells(name): name for name in entries if not name.endswith(UNREAD)}
    for name in sorted(set(wanted) - set(names)):
        yield missing(contract, name, wanted[name], entries)
    for name in sorted(set(names) - set(known)) if contract.closed else ():
        yield Finding(
            "error" if COUNTS.search(name) else contract.extra_level,
            contract.engine,
            f"{WEIGHTS}: {names[name]}",
            "not known to the format",
            contract.extra(names[name]),
            "a head with it is served otherwise than it was trained: train without"
            if COUNTS.search(name)
            else "leave it out",
            dropping(names[name], contract.shares_lm_head),
        )
    for name in sorted(set(names) & set(known)):
        yield from check_entry(contract, names[name], name, entries[names[name]], known[name])


def missing(contract: Contract, name: str, shape: tuple[int, ...], entries: Mapping[str, Entry]) -> Finding:
    """A tensor that is not there; mended where its value follows from the format."""
    mend = None
    if name.endswith(".bias"):
        mend = adding(name, torch.zeros(shape))
    fix = "--fix adds zeros, which is what the head was trained with" if mend else "export the head again"
    if name == "d2t" and "t2d" in entries:
        fix, mend = "--fix makes it of t2d", mapping
    return Finding(
        "error", contract.engine, f"{WEIGHTS}: {name}", f"missing, shape {shape}", contract.missing(name), fix, mend
    )


def mapping(draft: Draft) -> None:
    """d2t of t2d: the kept target ids, less their places."""
    ids_W = torch.nonzero(draft.tensors["t2d"])[:, 0]
    draft.tensors["d2t"] = ids_W - torch.arange(len(ids_W))


def adding(name: str, tensor: Tensor) -> Callable[[Draft], None]:
    """Put a tensor in."""

    def mend(draft: Draft) -> None:
        weights = next(value for value in draft.tensors.values() if value.is_floating_point())
        draft.tensors[name] = tensor.to(weights.dtype) if tensor.is_floating_point() else tensor

    return mend


def dropping(name: str, shared: bool = False) -> Callable[[Draft], None]:
    """Leave a tensor out, unless that would change what the head computes."""

    def mend(draft: Draft) -> None:
        zeros = name.endswith(".bias") and name in draft.tensors and not draft.tensors[name].any()
        if zeros or not COUNTS.search(name) or (shared and name.endswith("lm_head.weight")):
            draft.tensors.pop(name, None)

    return mend


def check_entry(
    contract: Contract, name: str, known_as: str, entry: Entry, shape: tuple[int, ...]
) -> Iterator[Finding]:
    """Shape and dtype."""
    where = f"{WEIGHTS}: {name}"
    if entry.shape != shape:
        turned = entry.shape == shape[::-1]
        yield Finding(
            "error",
            contract.engine,
            where,
            f"has shape {entry.shape}, the format wants {shape}" + (": transposed" if turned else ""),
            f"{TITLES[contract.engine]} stops at start, or reads other numbers than the head's",
            "--fix transposes it" if turned else "export the head again",
            transposing(name) if turned else None,
        )
    allowed = MAPS.get(known_as, SERVED)
    if entry.dtype not in allowed:
        yield Finding(
            "error",
            contract.engine,
            where,
            f"is {entry.dtype}, must be {' or '.join(allowed)}",
            "read as other values, or refused",
            "--fix converts it" if known_as in MAPS else "export the head again",
            converting(name, known_as) if known_as in MAPS else None,
        )


def transposing(name: str) -> Callable[[Draft], None]:
    """Turn a matrix."""

    def mend(draft: Draft) -> None:
        draft.tensors[name] = draft.tensors[name].T.contiguous()

    return mend


def converting(name: str, known_as: str) -> Callable[[Draft], None]:
    """Give a map its dtype."""
    dtype = torch.bool if known_as == "t2d" else torch.int64

    def mend(draft: Draft) -> None:
        draft.tensors[name] = draft.tensors[name].to(dtype)

    return mend


# Values. They are the same for every engine.


def check_values(directory: Directory, spells: Callable[[str], str], vocab: int | None) -> Iterator[Finding]:
    """NaN, infinite and all-zero weights; maps that do not map. Reads every tensor, one at a time."""
    for name, entry in sorted(directory.entries.items()):
        if entry.floating and entry.dtype in SERVED:
            yield from check_weight(name, directory.read(name))
    names = {spells(name): name for name in directory.entries}
    if "d2t" in names:
        t2d = directory.read(names["t2d"]) if "t2d" in names else None
        yield from check_map(names["d2t"], directory.read(names["d2t"]), t2d, vocab)


def check_weight(name: str, tensor: Tensor) -> Iterator[Finding]:
    """What no training leaves behind."""
    where = f"{WEIGHTS}: {name}"
    finite = tensor.isfinite()
    if not finite.all():
        count = int((~finite).sum())
        what = f"holds NaN or infinite values ({count} of {tensor.numel()}): the head is broken"
        yield Finding("error", "all engines", where, what, "every draft after it is noise", "train or export again")
    elif not name.endswith("bias") and not tensor.any():
        yield Finding(
            "error",
            "all engines",
            where,
            "is all zero: the head was not trained",
            "τ = 1.0",
            "train, then export again",
        )


def check_map(name: str, d2t: Tensor, t2d: Tensor | None, vocab: int | None) -> Iterator[Finding]:
    """d2t holds offsets; with them draft ids become ascending target ids, those that t2d marks."""
    if d2t.is_floating_point() or d2t.ndim != 1:
        return
    places, size = torch.arange(len(d2t)), vocab or (len(t2d) if t2d is not None else None)
    ids, where = places + d2t.long(), f"{WEIGHTS}: {name}"
    absolute = maps(d2t.long(), t2d, size) and (t2d is not None or bool((d2t.diff() > 0).all()))
    if maps(ids, t2d, size) and not (absolute and t2d is None and len(d2t) > FEW):
        return
    if absolute:
        yield Finding(
            "error",
            "all engines",
            where,
            "holds target ids, not offsets (target id = draft id + d2t[draft id])",
            "every draft is another token than the head meant, or the engine stops at an id beyond the vocabulary",
            "--fix subtracts the draft ids",
            lambda draft: draft.tensors.update({name: draft.tensors[name] - torch.arange(len(draft.tensors[name]))}),
        )
        return
    so = "drafts are other tokens than the head meant: τ falls, nothing is said"
    what = "d2t and t2d disagree: target id = draft id + d2t[draft id] must be ascending and inside t2d"
    yield Finding("error", "all engines", where, what, so, "export the head again")


def maps(ids: Tensor, t2d: Tensor | None, size: int | None) -> bool:
    """Whether these are ascending target ids, and those of t2d."""
    if not len(ids) or not (ids.diff() > 0).all() or ids[0] < 0 or (size is not None and ids[-1] >= size):
        return False
    return t2d is None or bool(ids[-1] < len(t2d) and t2d.bool()[ids].all() and int(t2d.bool().sum()) == len(ids))


def serious(findings: Iterable[Finding]) -> list[Finding]:
    """The errors among them."""
    return [finding for finding in findings if finding.level == "error"]


@dataclass(frozen=True)
class Change:
    """Something that may be wrong with a directory though names and shapes are right: in words, where, and without it. keys: of
    the plain config; file_keys: the same as config.json has them, where that differs; tensors: functions by plain names.
    """

    words: str
    where: str
    keys: Config = field(default_factory=dict)
    file_keys: Config | None = None
    tensors: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)


def no_changes(config: Config, tensors: Mapping[str, Tensor], spec: TargetSpec) -> Iterable[Change]:
    """None of a kind's own."""
    return ()


def as_written(config: Config, entries: Mapping[str, Entry]) -> Config:
    """Nothing is inferred."""
    return config


@dataclass(frozen=True)
class Method:
    """A kind of head as directories have it.

    knows: whether a directory's config and names are of this kind. plain, spells: its config and names in the layout that our
    exports have (None: no part of the head), for an independent reader (`reader`) and for making a head of ours (`adopt`).
    portable: whether one directory can serve all engines. section: where config.json has the keys of the layer, if not at
    its top. halves: matrices that read two vectors side by side. own_embedding: an embedding in the file is used where it
    differs from the target's. changes: what else may be wrong. infer: a config with what it leaves out and the tensors'
    shapes tell.
    """

    name: str
    kind: str
    contracts: tuple[Contract, ...]
    knows: Callable[[Config, Iterable[str]], bool]
    plain: Callable[[Config], Config]
    spells: Callable[[str], str | None]
    reader: Callable[..., Any]
    adopt: Callable[..., Any]
    portable: bool = True
    section: str | None = None
    halves: tuple[str, ...] = ()
    own_embedding: bool = False
    changes: Callable[[Config, Mapping[str, Tensor], TargetSpec], Iterable[Change]] = no_changes
    infer: Callable[[Config, Mapping[str, Entry]], Config] = as_written

    def contract(self, engine: str) -> Contract | None:
        """The table of an engine; None where it does not serve this kind."""
        return next((contract for contract in self.contracts if contract.engine == engine), None)
