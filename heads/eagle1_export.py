"""EAGLE-1 heads as directories, and out of them: vllm and sglang, whose formats differ in one tensor (vLLM 0.32, SGLang
0.5.23).

Both draft with the target's own lm_head and want none in the file; SGLang over the tokens of a map, where it is given one
(FR-Spec, arXiv 2502.14856), vLLM over the whole vocabulary.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwright.configs import UserError
from headwright.data.target import TargetSpec
from headwright.heads.base import Adopted, Case, Drafts, Export, Tables
from headwright.heads.contract import Contract, Method, Shapes, always
from headwright.heads.directory import Config
from headwright.heads.engine_tables import (
    BIASES,
    MAP_RULE,
    SGLANG,
    VERSIONS,
    VLLM,
    extra_in_vllm,
    has_architecture,
    is_one_of,
    layer_shapes,
    llama_keys,
    llama_rules,
    no_biases,
    sglang_arguments,
    sglang_line,
    token_map_flag,
    unlike_target,
    vllm_arguments,
    vllm_line,
    with_defaults,
    write_token_map,
)
from headwright.heads.plain import Chain, PlainLlama

if TYPE_CHECKING:
    from headwright.heads.eagle1 import Head

ARCHITECTURES = {VLLM: "LlamaForCausalLM", SGLANG: "LlamaForCausalLMEagle"}
SHARED = ("embed_tokens.weight", "lm_head.weight")


# The tables


def layer_and_fc(config: Config) -> Shapes:
    """What both engines need."""
    width = config["hidden_size"]
    return {"fc.weight": (width, 2 * width)} | layer_shapes(config, "layers.0", width)


def with_bias(config: Config) -> Shapes:
    """SGLang's fc has a bias in any case."""
    return layer_and_fc(config) | {"fc.bias": (config["hidden_size"],)}


def embedding(config: Config) -> Shapes:
    """A copy of the target's, which engines put theirs in place of."""
    return {"embed_tokens.weight": (config["vocab_size"], config["hidden_size"])}


def shared_tables(config: Config) -> Shapes:
    """SGLang skips both."""
    return embedding(config) | {"lm_head.weight": (config["vocab_size"], config["hidden_size"])}


def missing_in_vllm(name: str) -> str:
    """The loader does not count."""
    kind = "ones" if "norm" in name else "uninitialised memory"
    return f"vLLM serves {kind} there without a word" + ("" if "norm" in name else ": τ = 1.0")


def missing_in_sglang(name: str) -> str:
    """Neither does SGLang's."""
    if name == "fc.bias":
        return "SGLang adds random numbers to every feature (its fc always has a bias), without a word"
    if "norm" in name:
        return "SGLang puts ones there without a word"
    return f"SGLang will serve random memory for {name} without a word: accept len 1.00"


def launch_sglang(config: Config, target: str, folder: Path, count: int) -> str:
    """EAGLE-2's tree, over the tokens of a map where there is one."""
    dtype, mapped = str(config.get("dtype", "bfloat16")), token_map_flag(config, folder)
    return sglang_line(target, folder, "EAGLE", dtype, count, tree=True, more=mapped)


ONE_LAYER = is_one_of("num_hidden_layers", (1, None), "the engine makes as many layers, of random memory", 1)
ARGUMENTS = vllm_arguments("eagle")
IN_VLLM = Contract(
    method="eagle1",
    engine=VLLM,
    version=VERSIONS[VLLM],
    shapes=layer_and_fc,
    optional=embedding,
    reads=with_defaults,
    shares_lm_head=True,
    launch=vllm_line(ARGUMENTS),
    arguments=ARGUMENTS,
    missing=missing_in_vllm,
    extra=extra_in_vllm,
    keys=(
        has_architecture((ARCHITECTURES[VLLM], "EagleLlamaForCausalLM"), "vLLM stops: no such class"),
        is_one_of(
            "model_type", ("llama",), "vLLM builds another class; it has no other EAGLE-1 layer for this kind", "llama"
        ),
        ONE_LAYER,
        *(no_biases(name) for name in BIASES),
        *llama_rules(VLLM),
    ),
)
IN_SGLANG = Contract(
    method="eagle1",
    engine=SGLANG,
    version=VERSIONS[SGLANG],
    shapes=with_bias,
    optional=shared_tables,
    reads=with_defaults,
    shares_lm_head=True,
    launch=launch_sglang,
    missing=missing_in_sglang,
    extra=always("SGLang drops it without a word"),
    extra_level="warning",
    keys=(
        has_architecture((ARCHITECTURES[SGLANG],), "SGLang builds a whole model instead of a head, and stops"),
        is_one_of("model_type", ("llama",), "SGLang reads another config", "llama"),
        ONE_LAYER,
        MAP_RULE,
        *llama_rules(SGLANG, "SGLang stops: AttributeError", "error"),
    ),
    shape="tree",
    arguments=sglang_arguments("EAGLE"),
)
CONTRACTS = {VLLM: IN_VLLM, SGLANG: IN_SGLANG}


# Writing


def export_eagle1(head: "Head", engine: str) -> Export:
    """The directory of an engine. Raises UserError where it would compute something else."""
    if engine not in CONTRACTS:
        raise UserError(f"export.engines {engine!r}: an EAGLE-1 head exports as: {', '.join(CONTRACTS)}")
    if engine == VLLM and head.config.fc_bias:
        raise UserError("export: vLLM's EAGLE-1 has no bias in fc: train with head.fc_bias=false, or export for sglang")
    contract, ids_W = CONTRACTS[engine], head.vocab.ids_W
    config = llama_keys(head.spec, head.sizes) | {"architectures": [ARCHITECTURES[engine]]}
    export = Export(
        dict(head.state_dict()),
        config,
        contract.shapes(config),
        lambda folder: PlainEagle1.read(folder, ids_W),
        (contract,),
    )
    if engine == SGLANG:  # it has the bias in any case, and leaves random memory there where the file has none
        export.tensors.setdefault("fc.bias", torch.zeros(head.sizes.width))
    if not head.vocab.full and engine == SGLANG:
        config["hot_vocab_size"] = len(ids_W)
        export.beside = partial(write_token_map, ids_W)
    elif not head.vocab.full:
        export.warnings = [
            f"this head was measured over {len(ids_W)} tokens; vLLM drafts over all {head.spec.vocab_size}"
        ]
    return export


class PlainEagle1(PlainLlama):
    """The head in a directory. `ids_W`: the tokens that it is compared over; default: all."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor], ids_W: Tensor | None = None):
        super().__init__(config, tensors)
        self.ids_W = torch.arange(config["vocab_size"]) if ids_W is None else ids_W

    def draft(self, tables: Tables, case: Case, count: int) -> Drafts:
        """`count` greedy tokens after the last of the case's, by full recomputation."""
        feature, chain = case.last_TD, Chain(case)
        for _ in range(count):
            pair = torch.cat([tables.embedding_VD[torch.tensor(chain.tokens)], feature], -1)
            stream = self.linear(pair, "fc")
            hidden = self.layer("layers.0", stream, stream)
            chain.take(tables.lm_head_VD[self.ids_W] @ hidden[-1], self.ids_W)
            feature = torch.cat([feature, hidden[-1:]])
        return chain.drafts()


# Reading


def knows(config: Config, names: Iterable[str]) -> bool:
    """An fc over [embedding ; feature] before a layer without a norm of the feature."""
    there = set(names)
    return {"fc.weight", "layers.0.mlp.up_proj.weight"} <= there and not any("hidden_norm" in name for name in there)


def spells(name: str) -> str | None:
    """The embeddings and the lm_head are the target's."""
    return None if name in SHARED else name


def adopt(config: Config, tensors: dict[str, Tensor], spec: TargetSpec, shared: Tensor | None) -> Adopted:
    """A head of ours from a plain directory."""
    bias = tensors.get("fc.bias")
    biased = bias is not None and bool(bias.any())
    strange = sorted(set(tensors) - set(layer_and_fc(config)) - {"fc.bias"})
    if strange:
        raise UserError(
            f"the head has {strange[0]}, which EAGLE-1 has not (a variant of it, or the biases of another family's layer)"
        )
    options = {"kind": "eagle1", "fc_bias": biased} | unlike_target(config, spec)
    if "hidden_size" in options:
        raise UserError(
            f"the head has width {config['hidden_size']}, the target {spec.hidden_size}: EAGLE-1 needs the same"
        )
    own = {name: tensor for name, tensor in tensors.items() if name != "fc.bias" or biased}
    return Adopted(options, own, (spec.num_layers,), torch.arange(spec.vocab_size))


METHODS = (
    Method(
        "eagle1",
        "eagle1",
        tuple(CONTRACTS.values()),
        knows,
        with_defaults,
        spells,
        PlainEagle1,
        adopt,
        portable=False,
        halves=("fc.weight",),
    ),
)
