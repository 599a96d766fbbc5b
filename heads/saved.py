"""Heads on disk: our own directories (head.json, model.safetensors), and those of others, wherever a head is read."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from headwright.configs import UserError
from headwright.configs.load import build
from headwright.data.store import replace_with, save_tensors, write_json
from headwright.data.target import Target, TargetSpec
from headwright.data.vocab import DraftVocab
from headwright.heads import get_head
from headwright.heads.base import DraftHead, make_head
from headwright.heads.directory import Directory
from headwright.heads.foreign import adopt, adopted_from, is_foreign, taps_in

FORMAT = "headwright.head/1"
SHOWN = 12  # names of tensors that a warm start left as they were


def save_head(head: DraftHead, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
    """head.json and model.safetensors, each by atomic rename. `weights`: in place of those that the head holds."""
    folder.mkdir(parents=True, exist_ok=True)
    held = head.state_dict() if weights is None else weights
    tensors = {name: value.detach().cpu().contiguous() for name, value in held.items()}
    tensors["vocab.ids"] = head.vocab.ids_W.cpu()
    replace_with(folder / "model.safetensors", lambda path: save_tensors(tensors, path, {"format": FORMAT}))
    described = {
        "format": FORMAT,
        "head": asdict(head.config),
        "target": asdict(head.spec),
        "taps": list(head.taps),
    }
    write_json(folder / "head.json", described)
    head.save_beside(folder, tensors)


def load_head(folder: Path, target: Target | None = None, dtype: torch.dtype | None = None) -> DraftHead:
    """A saved head, or one in a directory that engines load, on the target's device and in `dtype` (default: the target's).

    Raises UserError where something is missing, broken, or of another target.
    """
    if is_foreign(folder):
        return load_foreign(folder, target, dtype)
    saved = read_head(folder)
    if target is not None:
        refuse_other_target(saved.spec, saved.taps, target, folder)
    head = make_head(saved.config, saved.spec, saved.taps, saved.vocab)
    if target is not None:
        head.attach(target)
        head = head.to(target.device, dtype or target.dtype)
    try:
        head.load_state_dict(saved.tensors)
    except RuntimeError as error:
        raise UserError(f"{folder}: weights and head.json do not fit together: {error}") from None
    return head


def load_foreign(folder: Path, target: Target | None, dtype: torch.dtype | None) -> DraftHead:
    """A head that others made, or that we exported."""
    if target is None:
        raise UserError(f"{folder}: a head in an engine's format: give its target")
    head = adopt(folder, target)
    refuse_other_taps(head.taps, target, folder)
    return head.to(target.device, dtype or target.dtype)


@dataclass
class Saved:
    """What lies in a head's directory."""

    config: Any
    spec: TargetSpec
    taps: tuple[int, ...]
    vocab: DraftVocab
    tensors: dict[str, Tensor]


def read_head(folder: Path) -> Saved:
    """A head's directory, or UserError."""
    path = config_path(folder)
    if not path.is_file():
        raise UserError(f"{folder}: no head there (head.json is missing): train first")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        tensors = load_file(folder / "model.safetensors")
        tensors.setdefault("vocab.ids", load_file(path.with_name("model.safetensors"))["vocab.ids"])
    except (ValueError, OSError, SafetensorError) as error:
        raise UserError(f"{folder}: the head cannot be read: {error}") from None
    if raw.get("format") != FORMAT:
        raise UserError(f"{path}: format {raw.get('format')!r}, this version reads {FORMAT}")
    spec = TargetSpec(**raw["target"] | {"eos_token_ids": tuple(raw["target"]["eos_token_ids"])})
    config = build(get_head(raw["head"]["kind"]).Config, raw["head"], str(path))
    vocab = DraftVocab(tensors.pop("vocab.ids"), spec.vocab_size)
    return Saved(config, spec, tuple(raw["taps"]), vocab, tensors)


def config_path(folder: Path) -> Path:
    """Where a head's config stands: beside its weights, or of a checkpoint with the run's best head."""
    path = folder / "head.json"
    if not path.is_file() and (folder / "progress.json").is_file():
        return folder.resolve().parents[1] / "head" / "head.json"
    return path


def read_foreign(folder: Path, spec: TargetSpec) -> Saved:
    """The same of a directory that engines load, for a target."""
    config, adopted = adopted_from(folder, spec, None)
    return Saved(config, spec, adopted.taps, DraftVocab(adopted.ids_W, spec.vocab_size), adopted.tensors)


def read_any(folder: Path, spec: TargetSpec) -> Saved:
    """A head of ours, or in a directory that engines load, for a target."""
    return read_foreign(folder, spec) if is_foreign(folder) else read_head(folder)


@torch.no_grad()
def warm_start(head: DraftHead, folder: Path, whole: bool = False) -> str:
    """Take over what fits of another head's weights: equal names and shapes, and rows of the draft vocabulary token by token.

    Returns what was taken. Raises UserError where nothing fits (with `whole`: where something does not), or the other head's
    target has other tokens or another width.
    """
    saved = read_any(folder, head.spec)
    if (saved.spec.hidden_size, saved.spec.vocab_size) != (head.spec.hidden_size, head.spec.vocab_size):
        raise UserError(
            f"train.warm_start {folder}: a head for {saved.spec.name} (width {saved.spec.hidden_size}, {saved.spec.vocab_size} "
            f"tokens), not for {head.spec.name} ({head.spec.hidden_size}, {head.spec.vocab_size})"
        )
    here, there = matching_rows(head.vocab.ids_W, saved.vocab.ids_W)
    taken, left, sizes = [], [], (len(head.vocab), len(saved.vocab))
    for name, own in head.state_dict().items():
        theirs = saved.tensors.get(name)
        if theirs is None:
            left.append(name)
        elif "lm_head" in name and own.shape[1:] == theirs.shape[1:] and (len(own), len(theirs)) == sizes:
            own[here.to(own.device)] = theirs[there].to(own)
            taken.append(name)
        elif own.shape == theirs.shape:
            own.copy_(theirs)
            taken.append(name)
        else:
            left.append(name)
    if whole and saved.taps != head.taps:
        raise UserError(
            f"{folder}: its head reads taps {list(saved.taps)}, this run's {list(head.taps)}: set head.taps, or give the run "
            "the head section of that head"
        )
    if whole and left:
        raise UserError(
            f"{folder}: its {saved.config.kind} head is not the {head.config.kind} head of this run: {', '.join(left[:SHOWN])} "
            "would be new. Give the run the head section of that head, or start from it by train.warm_start"
        )
    if not taken:
        raise UserError(
            f"train.warm_start {folder}: no tensor of that {saved.config.kind} head fits this {head.config.kind} head"
        )
    return (
        f"warm start from {folder}: {len(taken)} of {len(taken) + len(left)} tensors"
        + (
            f" (new: {', '.join(left[:SHOWN])}{f' and {len(left) - SHOWN} more' if len(left) > SHOWN else ''})"
            if left
            else ""
        )
        + f"; {len(here)} of {len(head.vocab)} draft tokens were known to it"
    )


def matching_rows(ours_W: Tensor, theirs_W: Tensor) -> tuple[Tensor, Tensor]:
    """Places (here, there) of the tokens that two draft vocabularies share. Both ascend."""
    ours_W, theirs_W = ours_W.cpu(), theirs_W.cpu()
    place_W = torch.searchsorted(theirs_W, ours_W).clamp_max(len(theirs_W) - 1)
    here = torch.nonzero(theirs_W[place_W] == ours_W)[:, 0]
    return here, place_W[here]


def refuse_other_target(spec: TargetSpec, taps: tuple[int, ...], target: Target, folder: Path) -> None:
    """A head serves the target that it was trained for, with the states that it was trained on."""
    if spec.fingerprint != target.spec.fingerprint:
        raise UserError(
            f"{folder}: a head for {spec.name} ({spec.fingerprint}), not for {target.spec.name} ({target.spec.fingerprint})"
        )
    refuse_other_taps(taps, target, folder)


def refuse_other_taps(taps: tuple[int, ...], target: Target, folder: Path) -> None:
    """A head reads what its target gives."""
    if taps != target.taps:
        raise UserError(
            f"{folder}: trained on taps {list(taps)}, the target gives {list(target.taps)}: set head.taps or harvest.taps"
        )


def taps_of(folder: Path, layers: int) -> tuple[int, ...]:
    """The taps that a head in a directory reads, of a target of so many layers. Raises UserError."""
    if is_foreign(folder):
        return taps_in(folder, layers)
    return read_head(folder).taps


def vocab_of(folder: Path, spec: TargetSpec) -> DraftVocab:
    """What a head in a directory can say, of a target. Raises UserError."""
    return read_any(folder, spec).vocab


def target_of(folder: Path) -> str:
    """The name of the target that a head was trained for. Raises UserError where a foreign directory does not say."""
    if not is_foreign(folder):
        return read_head(folder).spec.name
    name = Directory.open(folder).ours.get("target", {}).get("name")
    if name is None:
        raise UserError(f"{folder}: a head in an engine's format, which does not name its target: give --target")
    return str(name)
