"""EAGLE-3 heads out of directories: of SafeAILab's EAGLE, SpecForge, AngelSlim, speculators, in vLLM's and SGLang's layouts,
and our own exports.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from headwright.configs import UserError
from headwright.data.target import TargetSpec
from headwright.heads.base import Adopted
from headwright.heads.contract import WEIGHTS, Change, Method
from headwright.heads.directory import Config, Directory
from headwright.heads.eagle3_plain import PlainEagle3
from headwright.heads.eagle3_speculators import SPECULATORS, flat
from headwright.heads.eagle3_tables import CONTRACTS, FLAGS, IDS, read_config, spelled, spelled_freely, usual, window_of
from headwright.heads.engine_tables import unlike_target

MARKS = {"midlayer.hidden_norm.weight", "d2t", "t2d"}


def knows(config: Config, names: Iterable[str]) -> bool:
    """A class or a key of its own, or a layer that norms both of its halves."""
    if "speculators_config" in config:
        return False
    if "draft_vocab_size" in config or any("Eagle3" in name for name in config.get("architectures") or ()):
        return True
    there = [name.removeprefix("model.") for name in names]
    return any(name.startswith("midlayer.") or spelled(name) in MARKS for name in there)


def knows_speculators(config: Config, names: Iterable[str]) -> bool:
    """The self-describing format, of whatever algorithm: its table says which it serves."""
    return "speculators_config" in config


def plain_config(config: Config) -> Config:
    """As our exports have it: flags written, taps at the top level, in vLLM's counting."""
    flattened = flat(config) if "speculators_model_type" in config else config
    read = read_config(flattened)
    nested_ids = (flattened.get("eagle_config") or {}).get(IDS)
    taps = flattened.get(IDS) or ([i + 1 for i in nested_ids] if nested_ids else None)
    return dict.fromkeys(FLAGS, False) | read | {IDS: taps}


def plain_of(folder: Path) -> tuple[Config, dict[str, Tensor]]:
    """Config and tensors of a written directory, for its reader."""
    found = Directory.open(folder)
    return plain_config(found.config), {spelled_freely(name): found.read(name) for name in found.entries}


def adopt(config: Config, tensors: dict[str, Tensor], spec: TargetSpec, shared: Tensor | None) -> Adopted:
    """A head of ours from a plain directory. `shared`: the target's embeddings, to tell a copy from the head's own."""
    refuse_unknown(config, tensors)
    W, layers = config.get("draft_vocab_size") or spec.vocab_size, config["num_hidden_layers"]
    taps = config[IDS] or usual(spec)
    own = "embed_tokens.weight" in tensors and not is_copy(tensors["embed_tokens.weight"], shared)
    options = {
        "kind": "eagle3",
        "taps": list(taps),
        "fc_norm": bool(config["fc_norm"]),
        "norm_before_fc": bool(config["norm_before_fc"]),
        "norm_output": bool(config["norm_output"]),
        "norm_before_residual": bool(config["norm_before_residual"]),
        "qk_norm": config.get("model_type") == "qwen3",
        "layers": layers,
        "lm_head": "own" if "lm_head.weight" in tensors else "shared",
        "embeddings": "own" if own else "shared",
        "window": window_of(config),
    }
    options |= unlike_target(config, spec)
    ids_W = torch.arange(W) + tensors["d2t"].long() if "d2t" in tensors else torch.arange(W)
    return Adopted(options, {ours(n): t for n, t in tensors.items() if kept(n, own, layers)}, tuple(taps), ids_W)


def is_copy(rows_VH: Tensor, shared_VD: Tensor | None) -> bool:
    """Whether embeddings in a file are the target's, up to the precision that they were written in."""
    if shared_VD is None or rows_VH.shape != shared_VD.shape:
        return False
    return torch.allclose(rows_VH.float(), shared_VD.float(), rtol=2**-7, atol=1e-6)


def refuse_unknown(config: Config, tensors: dict[str, Tensor]) -> None:
    """What our head does not compute."""
    if not config["use_aux_hidden_state"]:
        raise UserError("the head reads the target's last state instead of fused ones (use_aux_hidden_state: false)")
    biased = sorted(name for name in tensors if name.endswith(".bias") and tensors[name].any())
    if biased:
        raise UserError(f"the head has biases, such as {biased[0]}, which EAGLE-3 heads here do not")


def kept(name: str, own: bool, layers: int) -> bool:
    """What a head of ours holds."""
    if name in ("d2t", "t2d") or name.endswith(".bias") or (name == "embed_tokens.weight" and not own):
        return False
    return not (name.startswith("layers.") and "hidden_norm" in name)


def ours(name: str) -> str:
    """Layers above the first are counted from the second."""
    if not name.startswith("layers."):
        return name
    number, rest = name.removeprefix("layers.").split(".", 1)
    return f"layers.{int(number) - 1}.{rest}"


def changes(config: Config, tensors: Mapping[str, Tensor], spec: TargetSpec) -> Iterator[Change]:
    """What may be wrong with a directory though names and shapes are right."""
    taps = list(config[IDS] or usual(spec))
    for other in ([tap - 1 for tap in taps], [tap + 1 for tap in taps], usual(spec)):
        if len(other) == len(taps) and other != taps and other[0] >= 0 and other[-1] <= spec.num_layers:
            nested = {"use_aux_hidden_state": True, IDS: [tap - 1 for tap in other]}
            words = f"taps {other} for {taps}"
            yield Change(words, f"config.json: {IDS}", {IDS: other}, {IDS: other, "eagle_config": nested})

    def reversed_states(weight: Tensor) -> Tensor:
        return torch.cat(list(reversed(weight.chunk(len(taps), 1))), 1).contiguous()

    words = "states concatenated from the last to the first"
    yield Change(words, f"{WEIGHTS}: fc.weight", tensors={"fc.weight": reversed_states})
    for flag in ("norm_before_residual", "norm_output"):
        switched = {flag: not config[flag]}
        yield Change(f"{flag} {str(switched[flag]).lower()}", f"config.json: {flag}", switched, switched)
    d2t = tensors.get("d2t")
    if d2t is not None and (d2t.diff() > 0).all():
        yield Change("d2t read as target ids", f"{WEIGHTS}: d2t", tensors={"d2t": offsets})


def offsets(ids_W: Tensor) -> Tensor:
    """Of target ids."""
    return ids_W.long() - torch.arange(len(ids_W))


HALVES = tuple(f"midlayer.self_attn.{part}_proj.weight" for part in "qkv")
METHODS = tuple(
    Method(
        name,
        "eagle3",
        contracts,
        known,
        plain_config,
        spelled_freely,
        PlainEagle3,
        adopt,
        section=section,
        halves=HALVES,
        own_embedding=True,
        changes=changes,
    )
    for name, contracts, known, section in (
        ("speculators", (SPECULATORS,), knows_speculators, "transformer_layer_config"),
        ("eagle3", CONTRACTS, knows, None),
    )
)
