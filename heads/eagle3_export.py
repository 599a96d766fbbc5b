"""What engines load for an EAGLE-3 head, and which options each of them computes (vLLM 0.32, SGLang 0.5.23).

portable: one directory for both. vllm: also what SGLang does not compute: residual after the norm, normed queries and keys, a
sliding window.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from headwright.configs import UserError
from headwright.heads.base import Export
from headwright.heads.eagle3_plain import PlainEagle3
from headwright.heads.engine_tables import layer_shapes, llama_keys

if TYPE_CHECKING:
    from headwright.heads.eagle3 import Head


def export_eagle3(head: "Head", engine: str) -> Export:
    """The directory of an engine. Raises UserError where it would compute something else."""
    if engine not in ("portable", "vllm"):
        raise UserError(f"export.engines {engine!r}: an EAGLE-3 head exports as: portable, vllm")
    refuse_unservable(head, engine)
    config = portable_config(head)
    export = Export(tensors_of(head), config, portable_shapes(config), PlainEagle3, launch_lines(engine))
    return replace(export, warnings=newer_options(head), shares=not head.own_embedding)


def newer_options(head: "Head") -> list[str]:
    """Options that earlier engines do not know: they would leave a key unread and serve the head wrongly."""
    names = [name for name in ("fc_norm", "norm_before_fc", "norm_output") if vars(head.config)[name]]
    if not names:
        return []
    return [
        f"head.{', head.'.join(names)}: computed by vLLM 0.32 and SGLang 0.5.23; earlier versions may ignore it without a word"
    ]


def refuse_unservable(head: "Head", engine: str) -> None:
    """What an engine would misread without a word: SGLang skips `fc` for a single state, and can capture neither the embeddings
    nor the last layer's output.
    """
    config = head.config
    if engine == "portable":
        if len(head.taps) < 2 or head.taps[0] < 1 or head.taps[-1] >= head.spec.num_layers:
            raise UserError(
                f"export: taps {list(head.taps)}: the portable format needs two or more, from 1 to "
                f"{head.spec.num_layers - 1}; harvest and train with such taps"
            )
        if head.sizes.width == len(head.taps) * head.spec.hidden_size:
            raise UserError(
                "export: SGLang skips `fc` where the head is as wide as all taps together: another head.hidden_size"
            )
        options = {
            "norm_before_residual": config.norm_before_residual,
            "qk_norm": config.qk_norm,
            "window": config.window,
        }
        only = [name for name, value in options.items() if value]
        if only:
            raise UserError(
                f"export: SGLang does not compute head.{only[0]}: export.engines=[vllm] writes a directory for vLLM"
            )
    elif config.window is not None and not config.qk_norm:
        raise UserError(
            "export: vLLM reads a sliding window of Qwen3-style heads only (head.qk_norm): train with both or neither"
        )


def tensors_of(head: "Head") -> dict[str, Tensor]:
    """Tensors under the engines' names. Layers above the first carry their norm under both names: vLLM reads one, SGLang the
    other.
    """
    tensors = {}
    for name, tensor in head.state_dict().items():
        if name.startswith("layers."):
            number, rest = name.removeprefix("layers.").split(".", 1)
            name = f"layers.{int(number) + 1}.{rest}"
            if rest == "input_layernorm.weight":
                tensors[name.replace("input_layernorm", "hidden_norm")] = tensor.clone()
        tensors[name] = tensor
    if head.config.lm_head == "shared" and not head.vocab.full:
        raise UserError(
            "export: engines share the target's lm_head over the full vocabulary only: train with vocab.size=null, or with "
            "head.lm_head=own"
        )
    if not head.vocab.full:
        tensors |= {"d2t": head.vocab.d2t_W, "t2d": head.vocab.t2d_V}
    return tensors


def portable_config(head: "Head") -> dict[str, Any]:
    """config.json for both engines.

    vLLM numbers captured states by how many layers came before (our taps), SGLang by the layer whose output they are
    (one less); vLLM reads the top-level list first, SGLang only the nested one.
    """
    spec, taps, sizes, options = head.spec, list(head.taps), head.sizes, head.config
    config = llama_keys(spec, sizes) | {
        "architectures": ["Eagle3Qwen3ForCausalLM" if options.qk_norm else "LlamaForCausalLMEagle3"],
        "model_type": "qwen3" if options.qk_norm else "llama",
        "num_hidden_layers": options.layers,
        "draft_vocab_size": None if shares_lm_head(head) else len(head.vocab),
        "num_aux_hidden_states": len(taps),
        "eagle_aux_hidden_state_layer_ids": taps,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps],
            "norm_before_fc": options.norm_before_fc,
        },
        "norm_before_residual": options.norm_before_residual,
        "norm_before_fc": options.norm_before_fc,
        "fc_norm": options.fc_norm,
        "norm_output": options.norm_output,
    }
    if head.own_embedding:
        config["target_hidden_size"] = spec.hidden_size
    if options.qk_norm:
        config["num_aux_layers"] = len(taps)
    if options.window is not None:
        config |= {"sliding_window": options.window, "layer_types": ["sliding_attention"] * options.layers}
    return config


def shares_lm_head(head: "Head") -> bool:
    """Whether an engine is to use the target's lm_head: only over the full vocabulary."""
    return head.config.lm_head == "shared" and head.vocab.full


def portable_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the portable directory and its shape: no less, no more."""
    H, V, D = config["hidden_size"], config["vocab_size"], config.get("target_hidden_size", config["hidden_size"])
    W, taps = config["draft_vocab_size"], config["num_aux_hidden_states"]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, taps * D), "norm.weight": (H,)}
    for number in range(config["num_hidden_layers"]):
        name = f"layers.{number}" if number else "midlayer"
        shapes |= layer_shapes(config, name, H if number else 2 * H)
        shapes |= {f"{name}.input_layernorm.weight": (H,), f"{name}.hidden_norm.weight": (H,)}
        if config["model_type"] == "qwen3":
            shapes |= {f"{name}.self_attn.{part}_norm.weight": (config["head_dim"],) for part in "qk"}
    if W is not None:
        shapes["lm_head.weight"] = (W, H)
    if config["fc_norm"]:
        shapes |= {f"fc_norm.{k}.weight": (D,) for k in range(taps)}
    if config["norm_before_fc"]:
        shapes["input_norm.weight"] = (taps * D,)
    if "target_hidden_size" in config:
        shapes["embed_tokens.weight"] = (V, H)
    if W not in (None, V):
        shapes |= {"d2t": (W,), "t2d": (V,)}
    return shapes


def launch_lines(engine: str) -> Callable[[str, Path, str], str]:
    """How the engines are started with this head."""

    def lines(target: str, folder: Path, dtype: str) -> str:
        speculative = json.dumps({"method": "eagle3", "model": str(folder), "num_speculative_tokens": 3})
        vllm = f"""vLLM (0.32 or later; drafts chains):

    vllm serve {target} --speculative-config '{speculative}'
"""
        sglang = f"""
SGLang (0.5.23 or later; drafts trees when `--speculative-eagle-topk` is above 1):

    python -m sglang.launch_server --model-path {target} --dtype {dtype} --speculative-algorithm EAGLE3 \\
      --speculative-draft-model-path {folder} \\
      --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4
"""
        notes = """
config.json says which norms this head has (`fc_norm`, `norm_before_fc`, `norm_output`: options of EAGLE-3.1). These versions
read the keys; an engine that does not know them would serve such a head wrongly.
"""
        return vllm + (sglang if engine == "portable" else "") + notes

    return lines
