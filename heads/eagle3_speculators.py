"""EAGLE-3 in the format of the speculators library, whose directory vLLM serves by itself: the tensors of eagle3_tables.py, a
layer's keys nested.
"""

import shlex
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from headwright.data.target import TargetSpec
from headwright.heads.contract import Contract, Key
from headwright.heads.directory import Config
from headwright.heads.eagle3_tables import (
    FLAGS,
    IDS,
    QWEN3,
    missing_in_vllm,
    needed_by,
    read_config,
    spare_for,
    spelled,
)
from headwright.heads.engine_tables import VERSIONS, VLLM, extra_in_vllm, is_one_of, llama_rules


def flat(config: Config) -> Config:
    """A config of speculators' format as vLLM rewrites it. norm_before_residual is true there when nothing is said."""
    layer = dict(config.get("transformer_layer_config") or {})
    names = ("draft_vocab_size", "fc_norm", "norm_before_fc", "norm_output", IDS)
    top = {name: config[name] for name in names if config.get(name) is not None}
    if config.get("target_hidden_size"):
        top["target_hidden_size"] = config["target_hidden_size"]
    architecture = QWEN3 if layer.get("model_type") == "qwen3" else "Eagle3LlamaForCausalLM"
    ids = config.get(IDS)
    return (
        layer
        | {key: value for key, value in config.items() if key in ("dtype", "torch_dtype", "trained_taps")}
        | top
        | {
            "architectures": [architecture],
            "norm_before_residual": config.get("norm_before_residual", True),
            "tie_word_embeddings": bool(config.get("tie_word_embeddings")),
            "num_hidden_layers": layer.get("num_hidden_layers", 1),
        }
        | ({"num_aux_hidden_states": len(ids)} if ids else {})
    )


def inside(path: str, name: str) -> Any:
    """Whether a nested key is missing."""

    def wrong(config: Config, spec: TargetSpec | None) -> str | None:
        found: Any = config
        for part in path.split("."):
            found = found[int(part)] if isinstance(found, list) and found else (found or {}).get(part)
        return "is missing" if not found else None

    return Key(name, wrong, "vLLM cannot read the directory by itself: it stops", "export again as speculators")


def four_states(config: Config, spec: TargetSpec | None) -> str | None:
    """vLLM 0.32 sizes fc of a Llama head for three states, unless the layer's own keys count them (its issue 54526)."""
    layer = config.get("transformer_layer_config") or {}
    count, told = len(config.get(IDS) or (0, 0, 0)), layer.get("num_aux_hidden_states")
    return f"the head fuses {count} states" if count != (told or 3) and layer.get("model_type") == "llama" else None


def counted_states(config: Config, spec: TargetSpec | None) -> Config:
    """With the count where vLLM finds it."""
    return {
        "transformer_layer_config": config["transformer_layer_config"] | {"num_aux_hidden_states": len(config[IDS])}
    }


def residual_unsaid(config: Config, spec: TargetSpec | None) -> str | None:
    """norm_before_residual is written."""
    return "is missing: true here, false in other formats" if "norm_before_residual" not in config else None


def nested(keys: Iterable[Key]) -> tuple[Key, ...]:
    """Rules about a layer's keys, read where this format has them. What they would mend stays: it lies elsewhere."""

    def read(key: Key) -> Key:
        return replace(key, wrong=lambda config, spec: key.wrong(flat(config), spec), right=None)

    return tuple(read(key) for key in keys)


SPECULATORS = Contract(
    method="speculators",
    engine=VLLM,
    version=VERSIONS[VLLM],
    shapes=lambda config: needed_by(VLLM, config),
    optional=lambda config: spare_for(VLLM, config),
    reads=lambda config: read_config(flat(config)),
    spells=spelled,
    launch=lambda config, target, folder, count: f"vllm serve {shlex.quote(str(folder))}",
    arguments=lambda config, target, folder, count: {"model": str(folder)},
    missing=missing_in_vllm,
    extra=extra_in_vllm,
    keys=(
        is_one_of("speculators_model_type", ("eagle3",), "not an EAGLE-3 head: vLLM reads other keys"),
        inside("speculators_config.verifier.name_or_path", "speculators_config.verifier.name_or_path"),
        inside("speculators_config.proposal_methods.0.speculative_tokens", "speculators_config.proposal_methods"),
        inside("transformer_layer_config", "transformer_layer_config"),
        Key(
            "num_aux_hidden_states",
            four_states,
            "vLLM 0.32 makes fc for three states and stops (its issue 54526)",
            "write num_aux_hidden_states into transformer_layer_config",
            counted_states,
        ),
        Key(
            "norm_before_residual",
            residual_unsaid,
            "readers disagree about the residual",
            "write it",
            lambda config, spec: {"norm_before_residual": True},
            "warning",
        ),
        *nested(llama_rules(VLLM)),
    ),
)


def speculators_config(config: Config, target: TargetSpec, name: str, count: int) -> Config:
    """The same head in speculators' format. Only its reader in vLLM 0.32 wants a whole config of the layer."""
    own = ("draft_vocab_size", "target_hidden_size", *FLAGS, IDS, "dtype", "torch_dtype", "eagle_config")
    layer = {key: value for key, value in config.items() if key not in own}
    layer["architectures"] = ["Qwen3ForCausalLM" if config["model_type"] == "qwen3" else "LlamaForCausalLM"]
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": count,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": name, "architectures": [target.architecture]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": config["draft_vocab_size"] or config["vocab_size"],
        "target_hidden_size": config.get("target_hidden_size"),
        **{flag: config[flag] for flag in FLAGS},
        IDS: config[IDS],
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
    }
