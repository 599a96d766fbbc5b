"""EAGLE-3 heads as directories.

portable: one for vLLM, SGLang, TensorRT-LLM and, without the norms of 3.1, llama.cpp. vllm: also what SGLang does not compute:
residual after the norm, normed queries and keys, a sliding window. speculators: the self-describing format that vLLM serves by
the directory alone.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from headwright.configs import UserError
from headwright.heads.base import Export
from headwright.heads.eagle3_import import plain_of
from headwright.heads.eagle3_plain import PlainEagle3
from headwright.heads.eagle3_speculators import SPECULATORS, speculators_config
from headwright.heads.eagle3_tables import CONTRACTS, read_config, shapes_of
from headwright.heads.engine_tables import LLAMA_CPP, SGLANG, TENSORRT, VLLM, llama_keys

if TYPE_CHECKING:
    from headwright.heads.eagle3 import Head

ENGINES_OF = {"portable": (VLLM, SGLANG, TENSORRT, LLAMA_CPP), "vllm": (VLLM,), "speculators": (VLLM,)}


def export_eagle3(head: "Head", engine: str) -> Export:
    """The directory of an engine. Raises UserError where it would compute something else."""
    if engine not in ENGINES_OF:
        raise UserError(f"export.engines {engine!r}: an EAGLE-3 head exports as: {', '.join(ENGINES_OF)}")
    refuse_unservable(head, engine)
    config, tensors = head_config(head), tensors_of(head)
    shapes = shapes_of(read_config(config) | {"own_embedding": head.own_embedding})
    export = Export(tensors, config, shapes, lambda folder: PlainEagle3(*plain_of(folder)))
    if engine == "speculators":
        served = ("lm_head.weight", head.vocab.ids_W) if shares_lm_head(head) else None
        return replace(
            export,
            config=speculators_config(config, head.spec, head.spec.name, 3),
            contracts=(SPECULATORS,),
            warnings=newer_options(head),
            shares=not head.own_embedding,
            from_target=dict([served]) if served else {},
            shapes=shapes | ({"lm_head.weight": (len(head.vocab), head.sizes.width)} if served else {}),
        )
    contracts = tuple(table for table in CONTRACTS if table.engine in ENGINES_OF[engine])
    return replace(
        export, contracts=contracts, warnings=newer_options(head), shares=not head.own_embedding, strict=(VLLM, SGLANG)
    )


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
            "embeddings": config.embeddings == "own" and head.sizes.width == head.spec.hidden_size,
        }
        only = [name for name, value in options.items() if value]
        if only:
            raise UserError(
                f"export: SGLang does not compute head.{only[0]}: export.engines=[vllm] writes a directory for vLLM"
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


def head_config(head: "Head") -> dict[str, Any]:
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
    if head.sizes.width != spec.hidden_size:
        config["target_hidden_size"] = spec.hidden_size
    if options.qk_norm:
        config["num_aux_layers"] = len(taps)
    if options.window is not None:
        # transformers drops a window that is not switched on, without a word
        window = {"sliding_window": options.window, "use_sliding_window": True, "max_window_layers": 0}
        config |= window | {"layer_types": ["sliding_attention"] * options.layers}
    return config


def shares_lm_head(head: "Head") -> bool:
    """Whether an engine is to use the target's lm_head: only over the full vocabulary."""
    return head.config.lm_head == "shared" and head.vocab.full
