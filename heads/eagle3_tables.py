"""What vLLM, SGLang, TensorRT-LLM and llama.cpp load for an EAGLE-3 head, as tables. K taps, D target width, H head width, V
target vocabulary, W draft vocabulary.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwright.data.target import TargetSpec
from headwright.heads.contract import Contract, Key, Shapes, always
from headwright.heads.directory import Config
from headwright.heads.engine_tables import (
    BIASES,
    LLAMA_CPP,
    SGLANG,
    TENSORRT,
    TIED,
    VERSIONS,
    VLLM,
    extra_in_vllm,
    has_architecture,
    is_false,
    is_one_of,
    layer_shapes,
    llama_rules,
    no_biases,
    sglang_arguments,
    sglang_line,
    vllm_arguments,
    vllm_line,
    with_defaults,
)

LLAMA, QWEN3 = "LlamaForCausalLMEagle3", "Eagle3Qwen3ForCausalLM"
IDS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")


def ids_of(config: Config) -> list[int] | None:
    """The taps that a config names, by vLLM's reading: the top-level list; else the nested one, raw."""
    nested = (config.get("eagle_config") or {}).get(IDS)
    return config.get(IDS) or nested


def read_config(config: Config) -> Config:
    """A config with what vLLM and SGLang fill in."""
    read = with_defaults(config)
    nested = config.get("eagle_config") or {}
    return read | {
        "num_aux_hidden_states": config.get("num_aux_hidden_states") or len(nested.get(IDS) or (0, 0, 0)),
        "target_hidden_size": config.get("target_hidden_size") or config["hidden_size"],
        "norm_before_fc": bool(nested.get("norm_before_fc", config.get("norm_before_fc", False))),
        "use_aux_hidden_state": nested.get("use_aux_hidden_state", True),
    }


def shapes_of(config: Config) -> Shapes:
    """Every tensor of a directory and its shape, as our exports have them."""
    H, V, D = config["hidden_size"], config["vocab_size"], config["target_hidden_size"]
    W, taps = config.get("draft_vocab_size"), config["num_aux_hidden_states"]
    shapes: Shapes = {"fc.weight": (H, taps * D), "norm.weight": (H,)}
    for number in range(config["num_hidden_layers"]):
        name = f"layers.{number}" if number else "midlayer"
        shapes |= layer_shapes(config, name, H if number else 2 * H)
        shapes |= {f"{name}.input_layernorm.weight": (H,), f"{name}.hidden_norm.weight": (H,)}
        if config.get("model_type") == "qwen3":
            shapes |= {f"{name}.self_attn.{part}_norm.weight": (config["head_dim"],) for part in "qk"}
    if W is not None or H != D:
        shapes["lm_head.weight"] = (W or V, H)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{k}.weight": (D,) for k in range(taps)}
    if config["norm_before_fc"]:
        shapes["input_norm.weight"] = (taps * D,)
    if H != D or config.get("own_embedding"):
        shapes["embed_tokens.weight"] = (V, H)
    if W not in (None, V):
        shapes |= {"d2t": (W,), "t2d": (V,)}
    return shapes


def needed_by(engine: str, config: Config) -> Shapes:
    """Without which the engine drafts from random memory, or not at all."""
    return {name: shape for name, shape in shapes_of(config).items() if name not in spare_for(engine, config)}


def spare_for(engine: str, config: Config) -> Shapes:
    """What the engine also takes: maps that it does not read, norms under another's name, the target's own embedding."""
    H, V, W = config["hidden_size"], config["vocab_size"], config.get("draft_vocab_size")
    spare: Shapes = {"embed_tokens.weight": (V, H)} if config["target_hidden_size"] == H else {}
    unused = "hidden_norm" if engine == VLLM else "input_layernorm"
    spare |= {f"layers.{number}.{unused}.weight": (H,) for number in range(1, config["num_hidden_layers"])}
    if engine == SGLANG:  # a number asks for an lm_head, null has the target's put in its place
        return spare | {"t2d": (V,)}
    if W in (None, V) and config["target_hidden_size"] == H:
        spare["lm_head.weight"] = (V, H)
    if engine == VLLM and config.get("attention_bias"):
        rows = {
            name: shape[0] for name, shape in shapes_of(config).items() if ".self_attn." in name and len(shape) == 2
        }
        spare |= {f"{name.removesuffix('weight')}bias": (count,) for name, count in rows.items()}
    return spare | {"t2d": (V,)}


def spelled(name: str) -> str:
    """layers.0 is the midlayer."""
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def spelled_freely(name: str) -> str:
    """The same, with or without the prefix of a whole model."""
    return spelled(name.removeprefix("model."))


def missing_in_vllm(name: str) -> str:
    """vLLM's EAGLE loader does not count what it was given."""
    if name == "d2t":
        return "vLLM drafts the first ids of the vocabulary, whatever the head means: τ falls, nothing is said"
    if "norm" in name:
        return "vLLM puts ones there without a word"
    if name == "embed_tokens.weight":
        return "widths differ, so that the target's cannot be shared: random memory without a word, or vLLM stops"
    if name == "lm_head.weight":
        return "vLLM drafts with the first rows of the target's lm_head, whatever the head means: τ = 1.0"
    return "vLLM serves uninitialised memory there without a word: τ = 1.0"


def missing_in_sglang(name: str) -> str:
    """SGLang never reports a missing tensor."""
    if name == "d2t":
        return "SGLang takes draft ids for target ids: τ falls, nothing is said"
    if "norm" in name:
        return "SGLang puts ones there without a word"
    return f"SGLang will serve random memory for {name} without a word: accept len 1.00"


def missing_elsewhere(name: str) -> str:
    """Engines that check."""
    return "the engine stops when it loads the head, or when the head is converted"


def layer_ids(engine: str) -> Key:
    """Which states of the target the engine captures: one list for those that count layers before, one for layers' outputs."""

    def wrong(config: Config, spec: TargetSpec | None) -> str | None:
        top, nested = config.get(IDS), (config.get("eagle_config") or {}).get(IDS)
        count = config.get("num_aux_hidden_states") or len(nested or top or (0, 0, 0))
        for ids in (top, nested):
            if ids and (list(ids) != sorted(set(ids)) or len(ids) != count):
                return f"{ids}: must be {count} ascending, distinct numbers"
        if top and nested and list(top) != [i + 1 for i in nested]:
            return f"{top} at the top level and {nested} in eagle_config: the latter must be one less each"
        if nested and not top and engine != SGLANG:
            return f"stands in eagle_config only ({nested}): there it counts layers' outputs, one less than here"
        if top and not nested and engine == SGLANG and (spec is None or list(top) != usual(spec)):
            return f"stands at the top level only ({top})"
        if not top and not nested and count != 3:
            return f"is missing, and the head fuses {count} states"
        taps = top or ([i + 1 for i in nested] if nested else None)
        return beyond(taps, spec, engine) if taps else None

    def right(config: Config, spec: TargetSpec | None) -> Config:
        top, nested = config.get(IDS), (config.get("eagle_config") or {}).get(IDS)
        taps = list(top) if top else [i + 1 for i in nested] if nested else []
        if not taps:
            return {}
        eagle = (config.get("eagle_config") or {"use_aux_hidden_state": True}) | {IDS: [tap - 1 for tap in taps]}
        return {IDS: taps, "eagle_config": eagle, "num_aux_hidden_states": len(taps)}

    so = f"{engine} feeds the head other states than it was trained on, without a word"
    return Key(IDS, wrong, so, "write both lists: taps at the top level, taps − 1 in eagle_config", right)


def usual(spec: TargetSpec) -> list[int]:
    """What engines capture when nothing is said."""
    return [2, spec.num_layers // 2, spec.num_layers - 3]


def beyond(taps: Sequence[int], spec: TargetSpec | None, engine: str) -> str | None:
    """Taps that a target does not have, or an engine never captures: SGLang and llama.cpp read the input of a layer."""
    if engine != VLLM and taps[0] < 1:
        return f"{list(taps)}: the embeddings are no layer's output, and are not captured"
    if spec is None or taps[-1] <= spec.num_layers - (engine != VLLM):
        return None
    return f"{list(taps)}: the target has {spec.num_layers} layers" + (
        ", the last output is not captured" if engine != VLLM else ""
    )


def captured(config: Config, engine: str, spec: TargetSpec | None) -> list[int] | None:
    """The taps that an engine captures: SGLang reads the nested list alone, others the top-level one first."""
    nested = (config.get("eagle_config") or {}).get(IDS)
    if engine == SGLANG:
        found = [i + 1 for i in nested] if nested else None
    else:
        found = config.get(IDS) or nested
    return found or (usual(spec) if spec else None)


def other_taps(engine: str) -> Key:
    """Taps that the head was trained on, where headwright.json says so, against those that the engine will capture."""

    def wrong(config: Config, spec: TargetSpec | None) -> str | None:
        trained, found = config.get("trained_taps"), captured(config, engine, spec)
        same = trained is None or found == trained
        return None if same else f"the engine captures {found}, the head was trained on {trained}"

    return Key(IDS, wrong, "other states than in training, without a word", "write the taps", trained_taps)


def count_of_states(config: Config, spec: TargetSpec | None) -> str | None:
    """num_aux_hidden_states, which sizes fc."""
    ids = ids_of(config)
    counted = (
        config.get("num_aux_hidden_states") is not None or config.get("model_type") == "qwen3"
    )  # that class counts ids
    if not counted and ids is not None and len(ids) != 3:
        return f"is missing, and the head fuses {len(ids)} states"
    return None


def states_counted(config: Config, spec: TargetSpec | None) -> Config:
    """The number of taps."""
    return {"num_aux_hidden_states": len(ids_of(config) or (0, 0, 0))}


def no_draft_vocabulary(config: Config, spec: TargetSpec | None) -> str | None:
    """The key exists, null or a number."""
    return None if "draft_vocab_size" in config else "is missing"


def flat_fc(config: Config, spec: TargetSpec | None) -> str | None:
    """SGLang applies fc only where widths differ."""
    read = read_config(config)
    if read["hidden_size"] == read["num_aux_hidden_states"] * read["target_hidden_size"]:
        return "the head is as wide as all captured states together"
    return None


def null_width(config: Config, spec: TargetSpec | None) -> str | None:
    """target_hidden_size is a number or absent."""
    return "is null" if "target_hidden_size" in config and config["target_hidden_size"] is None else None


def window_of(config: Config) -> int | None:
    """Tokens that the layers see, as vLLM reads it. Of a Qwen3 config transformers drops a window that is not switched on."""
    if "sliding_attention" not in (config.get("layer_types") or ()):
        return None
    on = config.get("use_sliding_window") or config.get("model_type") != "qwen3"
    return config.get("sliding_window") if on else None


def window_unread(config: Config, spec: TargetSpec | None) -> str | None:
    """A window that is not switched on."""
    windowed = config.get("sliding_window") and "sliding_attention" in (config.get("layer_types") or ())
    return "is missing or false beside sliding_window" if windowed and window_of(config) is None else None


def windowed(config: Config, spec: TargetSpec | None) -> str | None:
    """A head that sees a window only."""
    return f"the head sees {window_of(config)} tokens" if window_of(config) else None


CLASSES = (LLAMA, "Eagle3LlamaForCausalLM", QWEN3, "LlamaForCausalLM", "Qwen3ForCausalLM")


def no_class(config: Config, spec: TargetSpec | None) -> str | None:
    """A class of vLLM's is named."""
    found = config.get("architectures") or []
    return None if any(name in CLASSES for name in found) else f"{found or 'missing'}: none of {', '.join(CLASSES)}"


def class_of(config: Config, spec: TargetSpec | None) -> Config:
    """The class of the layer."""
    return {"architectures": [QWEN3 if config.get("model_type") == "qwen3" else LLAMA]}


def vllm_rules() -> tuple[Key, ...]:
    """vLLM's reading of config.json."""
    return (
        Key("architectures", no_class, "vLLM stops: no such class", "name one", class_of),
        is_one_of("model_type", ("llama", "qwen3"), "vLLM builds another class, or stops"),
        Key(
            "use_sliding_window",
            window_unread,
            "transformers then drops the window: vLLM attends to everything, the head was trained to see less",
            "set it to true",
            lambda config, spec: {"use_sliding_window": True, "max_window_layers": 0},
        ),
        layer_ids(VLLM),
        Key(
            "num_aux_hidden_states",
            count_of_states,
            "vLLM makes fc for three states and stops at the shapes (its issue 54526)",
            "write the number of taps",
            states_counted,
        ),
        other_taps(VLLM),
        Key("draft_vocab_size", no_draft_vocabulary, "SGLang stops without it", "write it", vocab_of, "note"),
        Key(
            "target_hidden_size",
            null_width,
            "vLLM stops: TypeError",
            "leave the key out",
            lambda config, spec: {"target_hidden_size": config["hidden_size"]},
        ),
        *(no_biases(name) for name in BIASES),
        *llama_rules(VLLM),
    )


def trained_taps(config: Config, spec: TargetSpec | None) -> Config:
    """Both lists as the head was trained."""
    taps = list(config["trained_taps"])
    eagle = (config.get("eagle_config") or {"use_aux_hidden_state": True}) | {IDS: [tap - 1 for tap in taps]}
    return {IDS: taps, "eagle_config": eagle, "num_aux_hidden_states": len(taps)}


def vocab_of(config: Config, spec: TargetSpec | None) -> Config:
    """The whole vocabulary: null for the target's lm_head, a number for the head's own."""
    own = "lm_head.weight" in config.get("tensor_names", ())
    return {"draft_vocab_size": config.get("vocab_size") if own else None}


def sglang_rules() -> tuple[Key, ...]:
    """SGLang's reading."""
    return (
        has_architecture((LLAMA,), "SGLang builds another class and stops: KeyError midlayer… or fc…"),
        is_one_of("model_type", ("llama",), "SGLang has the Llama layer alone: normed queries and keys are dropped"),
        Key("draft_vocab_size", no_draft_vocabulary, "SGLang stops: AttributeError", "write it", vocab_of),
        Key(
            "target_hidden_size",
            null_width,
            "SGLang stops: TypeError",
            "leave the key out",
            lambda config, spec: {"target_hidden_size": config["hidden_size"]},
        ),
        Key("fc", flat_fc, "SGLang skips fc where widths are equal: accept len 1.00", "another head.hidden_size"),
        is_false(
            "norm_before_residual", "SGLang does not read it: the residual is another than in training", mend=False
        ),
        Key(
            "sliding_window",
            windowed,
            "SGLang does not read it: the head sees more than in training",
            "serve with vLLM",
        ),
        layer_ids(SGLANG),
        other_taps(SGLANG),
        *llama_rules(SGLANG, f"SGLang: {TIED}", "error"),
    )


def tensorrt_rules() -> tuple[Key, ...]:
    """TensorRT-LLM's."""
    return (
        is_one_of("model_type", ("llama",), "no class for it"),
        is_false("norm_before_residual", "not read: the residual is another than in training", mend=False),
        Key("draft_vocab_size", no_draft_vocabulary, "AttributeError (its issue 6492)", "write it", vocab_of),
        Key("layers", few_layers, "refused", "another target"),
        layer_ids(TENSORRT),
        other_taps(TENSORRT),
        *llama_rules(TENSORRT),
    )


def few_layers(config: Config, spec: TargetSpec | None) -> str | None:
    """TensorRT-LLM's default capture needs them."""
    return f"the target has {spec.num_layers}, more than 5 are needed" if spec and spec.num_layers <= 5 else None


def llama_cpp_rules() -> tuple[Key, ...]:
    """llama.cpp's converter and graph."""
    refused = "the converter drops it, or stops: llama.cpp computes the plain EAGLE-3 alone"
    return (
        is_one_of("model_type", ("llama",), refused),
        is_false("fc_norm", refused, mend=False),
        is_false("norm_output", refused, mend=False),
        is_false("attention_bias", refused, mend=False),
        is_one_of("num_hidden_layers", (1, None), "more than one layer is not known"),
        Key("num_aux_hidden_states", not_three, "exactly three states are known", "train with three taps"),
        layer_ids(LLAMA_CPP),
        other_taps(LLAMA_CPP),
        *llama_rules(LLAMA_CPP),
    )


def not_three(config: Config, spec: TargetSpec | None) -> str | None:
    """Three captured states."""
    count = read_config(config)["num_aux_hidden_states"]
    return f"the head fuses {count}" if count != 3 else None


def launch_sglang(config: Config, target: str, folder: Path, count: int) -> str:
    """A chain."""
    return sglang_line(target, folder, "EAGLE3", str(config.get("dtype", "bfloat16")), count, tree=False)


def launch_tensorrt(config: Config, target: str, folder: Path, count: int) -> str:
    """The captured layers are an argument there, counted as outputs."""
    nested = (config.get("eagle_config") or {}).get(IDS)
    layers = [tap - 1 for tap in config[IDS]] if config.get(IDS) else list(nested or ())
    speculative = {"decoding_type": "Eagle3", "max_draft_len": count, "speculative_model_dir": str(folder)}
    if layers:
        speculative["eagle3_layers_to_capture"] = layers
    return (
        f"trtllm-serve {target} --extra_llm_api_options options.yaml\n  # options.yaml: speculative_config: "
        + json.dumps(speculative)
    )


def launch_llama_cpp(config: Config, target: str, folder: Path, count: int) -> str:
    """Converted first, with llama.cpp's own script."""
    return (
        f"python convert_hf_to_gguf.py {folder} --target-model-dir {target} --outfile head.gguf\n"
        f"llama-server -m target.gguf -md head.gguf --spec-type draft-eagle3 --spec-draft-n-max {min(count, 3)}"
    )


def contract(engine: str, keys: tuple[Key, ...], launch: Any, missing: Any, extra: Any, **more: Any) -> Contract:
    """The table of one engine."""
    return Contract(
        method="eagle3",
        engine=engine,
        version=VERSIONS[engine],
        shapes=lambda config: needed_by(engine, config),
        optional=lambda config: spare_for(engine, config),
        reads=read_config,
        launch=launch,
        missing=missing,
        extra=extra,
        keys=keys,
        **{"spells": spelled} | more,
    )


ARGUMENTS = vllm_arguments("eagle3")
CONTRACTS = (
    contract(
        VLLM,
        vllm_rules(),
        vllm_line(ARGUMENTS),
        missing_in_vllm,
        extra_in_vllm,
        arguments=ARGUMENTS,
    ),
    contract(
        SGLANG,
        sglang_rules(),
        launch_sglang,
        missing_in_sglang,
        always("SGLang drops it without a word"),
        spells=spelled_freely,
        extra_level="warning",
        shape="tree",
        arguments=sglang_arguments("EAGLE3"),
    ),
    contract(
        TENSORRT,
        tensorrt_rules(),
        launch_tensorrt,
        missing_elsewhere,
        always("TensorRT-LLM stops at an unknown name"),
        proven=False,
    ),
    contract(
        LLAMA_CPP,
        llama_cpp_rules(),
        launch_llama_cpp,
        missing_elsewhere,
        always("the converter stops at an unknown name"),
        proven=False,
    ),
)
