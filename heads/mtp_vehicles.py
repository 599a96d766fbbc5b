"""What engines load for an MTP head that was trained for an ordinary target: dressed as the MTP layer of another family.

mimo: MiMo's (vLLM 0.32 and SGLang 0.5.23), norm after the layer, which is handed on, biases on queries, keys and values, the
feature's half of the projection first. ernie: ERNIE-4.5's (vLLM 0.32), no norm after the layer. Both build the layer from the
target's own sizes, so that it must be a Llama layer of these; one module, applied to its own output.
"""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwright.configs import UserError
from headwright.data.target import TargetSpec
from headwright.heads.base import Adopted, Case, Drafts, Export, Tables
from headwright.heads.contract import Contract, Key, Method, Shapes, always, nothing
from headwright.heads.directory import Config
from headwright.heads.engine_tables import (
    MAP_RULE,
    SGLANG,
    VERSIONS,
    VLLM,
    has_architecture,
    is_one_of,
    layer_shapes,
    llama_keys,
    llama_rules,
    sglang_arguments,
    sglang_line,
    token_map_flag,
    unlike_target,
    vllm_arguments,
    vllm_line,
    with_defaults,
    write_token_map,
)
from headwright.heads.layers import Sizes
from headwright.heads.mtp_native import ERNIE, MIMO, PARTS, Family, theirs
from headwright.heads.plain import Chain, PlainLlama

if TYPE_CHECKING:
    from headwright.heads.mtp import Head

FAMILIES = {"mimo": MIMO, "ernie": ERNIE}
BIASES = tuple(f"self_attn.{part}_proj.bias" for part in "qkv")
TARGET_KEY = "num_nextn_predict_layers"


# The tables


def launch_sglang(config: Config, target: str, folder: Path, count: int) -> str:
    """A chain, over the tokens of a map where there is one."""
    dtype, mapped = str(config.get("dtype", "bfloat16")), token_map_flag(config, folder)
    return sglang_line(target, folder, "NEXTN", dtype, count, tree=False, more=mapped)


def heads_fill_width(config: Config, spec: TargetSpec | None) -> str | None:
    """MiMo's layer has no head_dim of its own."""
    read = with_defaults(config)
    full = read["num_attention_heads"] * read["head_dim"] == config["hidden_size"]
    return (
        None
        if full
        else f"{read['num_attention_heads']} heads of {read['head_dim']} do not fill {config['hidden_size']}"
    )


def same_layer(config: Config, spec: TargetSpec | None) -> str | None:
    """vLLM builds the layer from the target's config."""
    if spec is None:
        return None
    read = with_defaults(config)
    pairs = {
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
    }
    other = [f"{name} {read.get(name)} for {value}" for name, value in pairs.items() if read.get(name) != value]
    return f"another layer than the target's: {', '.join(other)}" if other else None


TYPED = ("Qwen2", "Qwen3", "Gemma", "SmolLM3", "GptOss", "Cohere2")  # families whose configs list layer_types


def typed_layers(config: Config, spec: TargetSpec | None) -> str | None:
    """vLLM's ERNIE layer looks itself up in the target's list of layers, and is not in it."""
    return f"{spec.architecture} lists its layers' types" if spec and spec.architecture.startswith(TYPED) else None


def stretched(config: Config, spec: TargetSpec | None) -> str | None:
    """vLLM rotates by the target's own parameters."""
    return "the target's are dynamic" if spec and spec.rope["rope_type"] == "dynamic" else None


VLLMS = (
    Key(
        "rope_parameters",
        stretched,
        "vLLM turns the module by angles that it was not trained with",
        "the format eagle3",
    ),
)


def rules(engine: str, architecture: str, kind: str) -> tuple[Key, ...]:
    """Of both vehicles."""
    mixed = (Key("target", typed_layers, "vLLM stops: AssertionError", "the vehicle mimo"),)
    alike = "vLLM builds the layer from the target's own sizes, and stops at the shapes"
    mimo = (Key("head_dim", heads_fill_width, "MiMo's layer has no head_dim: other shapes", "the vehicle ernie"),)
    built = (
        Key("sizes", same_layer, alike, "train the head for this target"),
        *(mimo if kind == "qwen2" else ()),
        *VLLMS,
    )
    return (
        has_architecture((architecture,), f"{engine} takes the directory for another kind of head, and stops"),
        is_one_of("model_type", (kind,), f"{engine} reads another config", kind),
        is_one_of(TARGET_KEY, (1,), "the engine finds no MTP layer", 1),
        *(built if engine == VLLM else (MAP_RULE,)),
        *(mixed if kind != "qwen2" else ()),
        *llama_rules(engine),
    )


def missing_in_vllm(name: str) -> str:
    """vLLM counts what MTP layers were given, but for the projections of attention and MLP."""
    if ".self_attn." in name or ".mlp." in name:
        return "vLLM serves uninitialised memory there without a word: τ = 1.0"
    return "vLLM stops: the weight was not initialized from checkpoint"


def missing_in_sglang(name: str) -> str:
    """SGLang does not."""
    if "norm" in name or name.endswith(".bias"):
        return f"SGLang puts {'zeros' if name.endswith('.bias') else 'ones'} there without a word"
    return f"SGLang will serve random memory for {name} without a word: accept len 1.00"


def shared_tables(config: Config) -> Shapes:
    """The target's, which engines put theirs in place of."""
    size = (config["vocab_size"], config["hidden_size"])
    return {"model.embed_tokens.weight": size, "lm_head.weight": size}


def contract(engine: str, vehicle: str, launch: Any, missing: Any, extra: Any, **more: Any) -> Contract:
    """The table of a vehicle in an engine."""
    architecture, kind = CLASSES[vehicle]
    return Contract(
        method=f"mtp-{vehicle}",
        engine=engine,
        version=VERSIONS[engine],
        shapes=lambda config: vehicle_shapes(config, FAMILIES[vehicle]),
        optional=shared_tables if engine == VLLM else nothing,
        reads=with_defaults,
        launch=launch,
        missing=missing,
        extra=extra,
        keys=rules(engine, architecture, kind),
        **more,
    )


def vehicle_shapes(config: dict[str, Any], family: Family) -> Shapes:
    """Every tensor and its shape."""
    width, prefix = config["hidden_size"], family.layer.format(i=0)
    shapes: Shapes = {family.enorm: (width,), family.hnorm: (width,), family.eh_proj: (width, 2 * width)}
    if family.norm is not None:
        shapes[family.norm] = (width,)
    shapes = {name.format(i=0): shape for name, shape in shapes.items()}
    shapes |= layer_shapes(config, prefix[:-1], width) | {f"{prefix}input_layernorm.weight": (width,)}
    if family is MIMO:
        heads = {
            "q": config["num_attention_heads"],
            "k": config["num_key_value_heads"],
            "v": config["num_key_value_heads"],
        }
        shapes |= {
            f"{prefix}self_attn.{part}_proj.bias": (count * config["head_dim"],) for part, count in heads.items()
        }
    return shapes


CLASSES = {"mimo": ("MiMoForCausalLM", "qwen2"), "ernie": ("Ernie4_5_MoeForCausalLM", "ernie4_5_moe")}
IGNORED = always("vLLM drops it without a word")
LOST = always("SGLang stops: KeyError, or drops it without a word")
ARGUMENTS = vllm_arguments("mtp", {TARGET_KEY: 1})  # the target must be told that it has an MTP layer


def in_vllm(vehicle: str) -> Contract:
    """The same for both vehicles."""
    more = {"extra_level": "warning", "arguments": ARGUMENTS}
    return contract(VLLM, vehicle, vllm_line(ARGUMENTS), missing_in_vllm, IGNORED, **more)


CONTRACTS = {
    "mimo": (
        in_vllm("mimo"),
        contract(SGLANG, "mimo", launch_sglang, missing_in_sglang, LOST, arguments=sglang_arguments("NEXTN")),
    ),
    "ernie": (
        contract(
            VLLM, "ernie", vllm_line(ARGUMENTS), missing_in_vllm, IGNORED, extra_level="warning", arguments=ARGUMENTS
        ),
    ),
}


# Writing


def export_vehicle(head: "Head", engine: str) -> Export:
    """The directory. Raises UserError where the engine would compute something else."""
    family, sizes = FAMILIES[engine], Sizes.of(head.spec)
    refuse_unservable(head, engine, sizes)
    config = vehicle_config(head, engine, sizes)
    shapes = vehicle_shapes(config, family)
    tensors = vehicle_tensors(head, family)
    for name in set(shapes) - set(tensors):
        if name.endswith("bias"):
            tensors[name] = torch.zeros(shapes[name])
    warnings, ids_W = [], head.vocab.ids_W
    if not head.vocab.full:
        warnings = [f"this head was measured over {len(ids_W)} tokens; vLLM drafts over all {head.spec.vocab_size}"]
    reader = partial(PlainMtp.read, family=family, ids_W=ids_W)
    export = Export(tensors, config, shapes, reader, CONTRACTS[engine], warnings=warnings)
    if not head.vocab.full and family is MIMO:
        config["hot_vocab_size"] = len(ids_W)
        export.beside = partial(write_token_map, ids_W)
    return export


def refuse_unservable(head: "Head", engine: str, sizes: Sizes) -> None:
    """Options that the vehicle does not compute."""
    config, normed = head.config, engine == "mimo"
    if config.modules != 1:
        raise UserError(f"export.engines {engine}: engines serve one module, applied to its own output: head.modules=1")
    if config.norm != normed or (config.feed == "normed") != normed or not config.mask_first:
        wanted = "head.norm=true head.feed=normed" if normed else "head.norm=false head.feed=raw"
        raise UserError(
            f"export.engines {engine}: computes {wanted} head.mask_first=true: train so, or take the other vehicle"
        )
    known = {*layer_shapes(llama_keys(head.spec, sizes), "", 0), ".input_layernorm.weight"}
    known |= {f".{name}" for name in BIASES} if normed else set()
    strange = sorted(f".{name}" for name in head.links[0].block.layer.state_dict() if f".{name}" not in known)
    if strange:
        raise UserError(
            f"export.engines {engine}: its layer has no {strange[0][1:]}, which this target's kind of layer has: train with "
            "head.block=llama"
        )
    if normed and sizes.head_dim * sizes.heads != sizes.width:
        raise UserError(
            f"export.engines mimo: wants heads that fill the width; this target's {sizes.heads} of {sizes.head_dim} do not"
        )


def vehicle_config(head: "Head", engine: str, sizes: Sizes) -> dict[str, Any]:
    """config.json: it chooses the class; the sizes that count are the target's."""
    architecture, kind = CLASSES[engine]
    keys = llama_keys(head.spec, sizes) | {TARGET_KEY: 1, "architectures": [architecture], "model_type": kind}
    if engine == "mimo":
        return keys
    return keys | {"use_bias": False, "moe_num_experts": 2, "moe_k": 1, "num_hidden_layers": head.spec.num_layers}


def vehicle_tensors(head: "Head", family: Family) -> dict[str, Tensor]:
    """The module's tensors under the family's names."""
    module, prefix = head.links[0], family.layer.format(i=0)
    tensors = {prefix + name: tensor for name, tensor in module.block.layer.state_dict().items()}
    for part in PARTS:
        source = getattr(family, part)
        if source is not None:
            weight = module.get_submodule(part).get_parameter("weight").detach()
            tensors[source.format(i=0)] = theirs(part, weight, family)
    return tensors


class PlainMtp(PlainLlama):
    """An independent reader. `ids_W`: the tokens that the head is compared over; default: all."""

    def __init__(
        self, config: dict[str, Any], tensors: dict[str, Tensor], ids_W: Tensor | None = None, family: Family = MIMO
    ):
        super().__init__(config, tensors)
        self.family = family
        self.ids_W = torch.arange(config["vocab_size"]) if ids_W is None else ids_W

    def draft(self, tables: Tables, case: Case, count: int) -> Drafts:
        """`count` greedy tokens after the last of the case's, by full recomputation."""
        feature, chain = case.last_TD, Chain(case)
        for _ in range(count):
            state = self.module(tables.embedding_VD[torch.tensor(chain.tokens)], feature)[-1]
            chain.take(tables.lm_head_VD[self.ids_W] @ state, self.ids_W)
            feature = torch.cat([feature, state[None]])
        return chain.drafts()

    def module(self, embedding_TD: Tensor, feature_TD: Tensor) -> Tensor:
        """The module over a whole text: what the lm_head reads, and the next step."""

        def name(part: str) -> str:
            return part.format(i=0).removesuffix(".weight")

        token = embedding_TD.clone()
        token[0] = 0.0
        sides = [self.norm(token, name(self.family.enorm)), self.norm(feature_TD, name(self.family.hnorm))]
        if self.family.feature_first:
            sides.reverse()
        stream, prefix = self.linear(torch.cat(sides, -1), name(self.family.eh_proj)), self.family.layer.format(i=0)
        out = self.layer(prefix[:-1], self.norm(stream, f"{prefix}input_layernorm"), stream)
        return out if self.family.norm is None else self.norm(out, name(self.family.norm))


# Reading


def knows(vehicle: str) -> Callable[[Config, Iterable[str]], bool]:
    """The class of a family, and a tensor of its first module."""
    family, architecture = FAMILIES[vehicle], CLASSES[vehicle][0]
    marks = (family.layer.format(i=0), family.eh_proj.format(i=0))

    def known(config: Config, names: Iterable[str]) -> bool:
        there = list(names)
        whole = any(name.startswith("model.layers.0.") for name in there)  # a checkpoint of the family itself
        told = architecture in (config.get("architectures") or ())
        return told and not whole and any(name.startswith(marks) for name in there)

    return known


def spells(name: str) -> str | None:
    """The embeddings and the lm_head are the target's."""
    return None if name in ("model.embed_tokens.weight", "lm_head.weight") else name


def adopt(
    config: Config, tensors: dict[str, Tensor], spec: TargetSpec, shared: Tensor | None, family: Family
) -> Adopted:
    """A head of ours from a plain directory. Its layer is the target's, without biases."""
    prefix, state = family.layer.format(i=0), {}
    biased = [name for name in tensors if name.endswith(".bias") and tensors[name].any()]
    unlike = {
        key for name, value in unlike_target(config, spec).items() for key in (value if name == "layout" else [name])
    }
    if biased or unlike:
        what = (
            f"biases, such as {biased[0]}" if biased else f"other {', '.join(sorted(unlike))} than the target's layers"
        )
        raise UserError(f"the module has {what}: a Llama layer of the target's is needed")
    for name, tensor in tensors.items():
        if name.startswith(prefix) and not name.endswith(".bias") and name not in parts_of(family):
            state[f"mtp.0.block.layer.{name.removeprefix(prefix)}"] = tensor
    for source, part in parts_of(family).items():
        state[f"mtp.0.{part}.weight"] = theirs(part, tensors[source], family)
    normed = family.norm is not None
    options = {"kind": "mtp", "block": "llama", "norm": normed, "feed": "normed" if normed else "raw"}
    return Adopted(options, state, (spec.num_layers,), torch.arange(spec.vocab_size))


def parts_of(family: Family) -> dict[str, str]:
    """Our parts by the names of a family."""
    return {getattr(family, part).format(i=0): part for part in PARTS if getattr(family, part) is not None}


METHODS = tuple(
    Method(
        f"mtp-{vehicle}",
        "mtp",
        CONTRACTS[vehicle],
        knows(vehicle),
        with_defaults,
        spells,
        partial(PlainMtp, family=family),
        partial(adopt, family=family),
        halves=(family.eh_proj.format(i=0),),
    )
    for vehicle, family in FAMILIES.items()
)
