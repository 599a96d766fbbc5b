"""What the tables of all engines share: the keys and tensors of a Llama layer, and rules about them (vLLM 0.32, SGLang 0.5.23,
TensorRT-LLM's PyTorch backend of late 2026, llama.cpp b11434).
"""

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwright.data.target import TargetSpec
from headwright.heads.contract import TITLES, Key, Shapes
from headwright.heads.directory import Config
from headwright.heads.layers import Sizes
from headwright.heads.rotary import served_rope

VLLM, SGLANG, TENSORRT, LLAMA_CPP = "vllm", "sglang", "tensorrt-llm", "llama.cpp"
VERSIONS = {VLLM: "0.32", SGLANG: "0.5.23", TENSORRT: "1.x (PyTorch backend)", LLAMA_CPP: "b11434"}
ENGINES = tuple(VERSIONS)
THETA = 10000.0  # what engines assume where a config is silent
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


def llama_keys(spec: TargetSpec, sizes: Sizes) -> dict[str, Any]:
    """Sizes, rotary embedding in both spellings, and the context: the target's, never that of the training."""
    rope = served_rope(dict(sizes.rope))
    scaling = None if rope["rope_type"] == "default" else {k: v for k, v in rope.items() if k != "rope_theta"}
    return {
        "model_type": "llama",
        "hidden_size": sizes.width,
        "intermediate_size": sizes.inner,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": sizes.eps,
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": spec.max_positions,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling,
        "rope_parameters": rope,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": spec.eos_token_ids[0] if spec.eos_token_ids else None,
    }


def with_defaults(config: Config) -> Config:
    """A Llama config with what engines fill in, and its rotary embedding in both spellings."""
    heads = config.get("num_attention_heads") or 1
    rope = rope_of(config)
    scaling = None if rope["rope_type"] == "default" else {k: v for k, v in rope.items() if k != "rope_theta"}
    return (
        {"num_hidden_layers": 1, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
        | config
        | {
            "num_key_value_heads": config.get("num_key_value_heads") or heads,
            "head_dim": config.get("head_dim") or config.get("hidden_size", 0) // heads,
            "rope_theta": rope["rope_theta"],
            "rope_scaling": scaling,
            "rope_parameters": rope,
        }
    )


def rope_of(config: Config) -> dict[str, Any]:
    """The rotary parameters of a config as transformers reads them: a rope_scaling that is not null wins over rope_parameters,
    whose base wins over rope_theta.
    """
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    kind = rope.pop("type", None)
    found = {"rope_type": kind or "default", "rope_theta": config.get("rope_theta") or THETA} | rope
    return {key: value for key, value in found.items() if value is not None}


def layer_shapes(config: Config, name: str, inputs: int) -> Shapes:
    """The matrices of one decoder layer and the norm before its MLP."""
    H, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    shapes: Shapes = {
        "self_attn.q_proj": (queries, inputs),
        "self_attn.k_proj": (keys, inputs),
        "self_attn.v_proj": (keys, inputs),
        "self_attn.o_proj": (H, queries),
        "mlp.gate_proj": (inner, H),
        "mlp.up_proj": (inner, H),
        "mlp.down_proj": (H, inner),
        "post_attention_layernorm": (H,),
    }
    return {f"{name}.{part}.weight": shape for part, shape in shapes.items()}


def unlike_target(config: Config, spec: TargetSpec) -> dict[str, Any]:
    """The options that make a head's layer that of a config (with its defaults), where the target's layers are otherwise."""
    options: dict[str, Any] = {}
    if config["hidden_size"] != spec.hidden_size:
        options["hidden_size"] = config["hidden_size"]
    if config["intermediate_size"] != spec.intermediate_size:
        options["intermediate_size"] = config["intermediate_size"]
    usual = Sizes.of(spec, options.get("hidden_size"), config["intermediate_size"])
    layout = {
        "heads": config["num_attention_heads"],
        "kv_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
        "eps": config["rms_norm_eps"],
        "rope": config["rope_parameters"],
    }
    here = {"rope": served_rope(dict(usual.rope))}
    layout = {name: value for name, value in layout.items() if value != here.get(name, getattr(usual, name))}
    return options | ({"layout": layout} if layout else {})


def extra_in_vllm(name: str) -> str:
    """Its loaders stop at names that they do not know, but for biases and a norm before fc."""
    if name.endswith(".bias") or name.startswith("input_norm"):
        return "vLLM drops it without a word: it computes another head than was trained"
    return "vLLM stops: no module or parameter of that name"


# Rules about config.json


def is_one_of(name: str, allowed: Sequence[Any], so: str, right: Any = None) -> Key:
    """A key with one of some values; `right` mends it."""

    def wrong(config: Config, spec: TargetSpec | None) -> str | None:
        if config.get(name) in allowed:
            return None
        return f"is {json.dumps(config.get(name))}, must be {' or '.join(json.dumps(value) for value in allowed)}"

    mend = None if right is None else (lambda config, spec: {name: right})
    return Key(name, wrong, so, f"set it to {json.dumps(right)}" if right is not None else "", mend)


def is_false(name: str, so: str, level: Any = "error", mend: bool = True) -> Key:
    """A switch that must be off."""

    def wrong(config: Config, spec: TargetSpec | None) -> str | None:
        return "is true, must be false" if config.get(name) else None

    return Key(name, wrong, so, "set it to false" if mend else "", off(name) if mend else None, level)


def off(name: str) -> Any:
    """Switch a key off."""
    return lambda config, spec: {name: False}


def no_biases(name: str) -> Key:
    """vLLM makes biases where a config asks for them, and the file has none."""

    def wrong(config: Config, spec: TargetSpec | None) -> str | None:
        there = any(found.endswith("_proj.bias") for found in config.get("tensor_names", ()))
        return "is true, and there are no biases in the file" if config.get(name) and not there else None

    return Key(
        name, wrong, "vLLM adds uninitialised memory to every projection, without a word", "set it to false", off(name)
    )


BIASES = ("attention_bias", "bias", "qkv_bias", "mlp_bias")


def has_architecture(names: Sequence[str], so: str) -> Key:
    """`architectures` names a class of the engine's."""

    def wrong(config: Config, spec: TargetSpec | None) -> str | None:
        found = config.get("architectures") or []
        if any(name in names for name in found):
            return None
        return f"{found or 'missing'}: none of {', '.join(names)}"

    return Key(
        "architectures", wrong, so, f"set it to [{names[0]}]", lambda config, spec: {"architectures": [names[0]]}
    )


def sizes_are_there(config: Config, spec: TargetSpec | None) -> str | None:
    """What every tensor's shape follows from."""
    absent = [name for name in SIZES if not isinstance(config.get(name), int) or config[name] < 1]
    return f"missing or no number: {', '.join(absent)}" if absent else None


def other_tokens(config: Config, spec: TargetSpec | None) -> str | None:
    """vocab_size against the target's."""
    if spec is None or config.get("vocab_size") == spec.vocab_size:
        return None
    return f"is {config.get('vocab_size')}, the target has {spec.vocab_size} tokens"


def other_width(config: Config, spec: TargetSpec | None) -> str | None:
    """The width of the states that the head reads against the target's."""
    width = config.get("target_hidden_size") or config.get("hidden_size")
    if spec is None or width == spec.hidden_size:
        return None
    return f"the head reads states of width {width}, the target's have {spec.hidden_size}"


def short_context(config: Config, spec: TargetSpec | None) -> str | None:
    """max_position_embeddings against the target's."""
    found = config.get("max_position_embeddings")
    if found is None:
        return "is missing: engines assume 2048"
    if spec is None or found >= spec.max_positions:
        return None
    return f"is {found}, the target's context is {spec.max_positions}"


def other_rotation(config: Config, spec: TargetSpec | None) -> str | None:
    """The rotary embedding: given at all, and the same in both spellings."""
    new, old = (config.get("rope_parameters") or {}).get("rope_theta"), config.get("rope_theta")
    if new is None and old is None:
        return f"is missing: engines assume {THETA:g}" + (
            f", the target has {spec.rope['rope_theta']:g}" if spec is not None else ""
        )
    theta = old if new is None else new
    if spec is not None and theta != spec.rope["rope_theta"]:
        return f"is {theta:g}, the target has {spec.rope['rope_theta']:g}"
    return None


def two_rotations(config: Config, spec: TargetSpec | None) -> str | None:
    """The old and the new spelling, where both are there, say the same."""
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    theta, kind = config.get("rope_theta"), new.get("rope_type", "default")
    if not new or (theta is None and not old):
        return None
    if theta is not None and new.get("rope_theta") not in (None, theta):
        return f"rope_theta is {theta:g}, and {new['rope_theta']:g} in rope_parameters"
    other = {
        key: value for key, value in old.items() if key not in ("type", "rope_theta") and new.get(key, value) != value
    }
    if other or (old.get("rope_type", old.get("type", "default")) != kind and (old or kind != "default")):
        return f"{old or 'missing'} beside {new} in rope_parameters"
    return None


def one_spelling(config: Config, spec: TargetSpec | None) -> str | None:
    """Both spellings of the rotary embedding are there."""
    if config.get("rope_theta") is None and (config.get("rope_parameters") or {}).get("rope_theta") is not None:
        return "stands in rope_parameters only"
    return None


def targets_rope(config: Config, spec: TargetSpec | None) -> Config:
    """The rotary embedding in both spellings: the target's where the config has none."""
    has_own = config.get("rope_theta") is not None or (config.get("rope_parameters") or {}).get("rope_theta")
    read = with_defaults(config if has_own or spec is None else config | {"rope_parameters": served_rope(spec.rope)})
    return {key: read[key] for key in ("rope_theta", "rope_scaling", "rope_parameters")}


def no_dtype(config: Config, spec: TargetSpec | None) -> str | None:
    """The dtype is written, in either spelling."""
    return None if config.get("dtype") or config.get("torch_dtype") else "is missing"


def full_precision(config: Config, spec: TargetSpec | None) -> str | None:
    """SGLang serves fp32 as fp16."""
    found = config.get("dtype") or config.get("torch_dtype")
    return "is float32" if found == "float32" else None


def other_dtype(config: Config, spec: TargetSpec | None) -> str | None:
    """Head and target in one dtype."""
    found = config.get("dtype") or config.get("torch_dtype")
    return f"is {found}, the target's is {spec.dtype}" if spec and found and found != spec.dtype else None


def dtype_of_target(config: Config, spec: TargetSpec | None) -> Config:
    """Both spellings."""
    name = config.get("dtype") or config.get("torch_dtype") or (spec.dtype if spec else "bfloat16")
    return {"dtype": name, "torch_dtype": name}


def both_dtypes(config: Config, spec: TargetSpec | None) -> str | None:
    """Both spellings are there."""
    lacks = [name for name in ("dtype", "torch_dtype") if not config.get(name)]
    return f"{lacks[0]} is missing" if len(lacks) == 1 else None


TIED = "the head's lm_head is thrown away, and drafts are made with rows of the embedding"
CONTEXT = {
    SGLANG: "SGLang refuses to start",
    VLLM: "vLLM stops drafting beyond it; before the fix of its issue 48894 it reads beyond its tables",
}


def llama_rules(engine: str, tied: str = "", tied_level: Any = "warning") -> tuple[Key, ...]:
    """Rules about the keys of every head with a Llama layer. `tied`: what the engine makes of tied embeddings."""
    rules = [
        Key("sizes", sizes_are_there, f"{engine} builds another model, or none"),
        Key(
            "vocab_size",
            other_tokens,
            "drafts are other tokens than the head meant, or the engine stops",
            "use this head with its own target",
        ),
        Key("hidden_size", other_width, "stops at the first draft, shapes differ", "use this head with its own target"),
        Key(
            "max_position_embeddings",
            short_context,
            CONTEXT.get(engine, "long texts draft badly"),
            "write the target's",
            lambda config, spec: {"max_position_embeddings": spec.max_positions} if spec else {},
        ),
        Key(
            "rope_theta",
            other_rotation,
            "if the head was trained with another, its attention turns by wrong angles: τ falls, most in long texts",
            "write what it was trained with: the target's as a rule (EAGLE's and AngelSlim's trainers: 10000); --probe tells",
            level="warning",
        ),
        Key(
            "rope_scaling",
            two_rotations,
            "engines read one or the other: some turn by other angles than the head was trained with",
            "write the same in both",
            targets_rope,
        ),
        Key(
            "rope_parameters",
            one_spelling,
            f"engines with transformers 4 do not read them, and assume {THETA:g}",
            "write rope_theta and rope_scaling as well",
            targets_rope,
            "warning",
        ),
        Key(
            "tie_word_embeddings",
            lambda config, spec: "is true, must be false" if config.get("tie_word_embeddings") else None,
            tied or f"{engine} does not honour it for a head",
            "set it to false",
            off("tie_word_embeddings"),
            tied_level,
        ),
    ]
    rules.append(is_one_of("hidden_act", ("silu", None), f"{TITLES[engine]} stops, or computes another MLP"))
    if engine == SGLANG:
        rules += [
            Key(
                "dtype",
                no_dtype,
                "SGLang runs the head in float16, its inputs come in the target's dtype: it stops, or drafts badly",
                "write the target's",
                dtype_of_target,
            ),
            Key(
                "dtype",
                full_precision,
                "SGLang runs such a head in float16, unless it is started with --dtype",
                "export in the target's dtype, or start with --dtype float32",
                level="warning",
            ),
            Key(
                "dtype",
                other_dtype,
                "SGLang computes head and target in one dtype each: states of another stop it",
                "start with --dtype, as the launch line does, or export in the target's",
                level="warning",
            ),
        ]
    else:
        rules.append(
            Key("dtype", no_dtype, "SGLang would run this head in float16", "write it", dtype_of_target, "warning")
        )
    rules.append(Key("dtype", both_dtypes, "engines read one or the other", "write both", dtype_of_target, "note"))
    return tuple(rules)


# Launch lines


Arguments = Callable[[Config, str, Path, int], dict[str, Any]]


def vllm_arguments(method: str, overrides: dict[str, Any] | None = None) -> Arguments:
    """What vLLM is given: the target, the head with the method named (it otherwise guesses from the path), and overrides of the
    target's config.
    """

    def arguments(config: Config, target: str, folder: Path, count: int) -> dict[str, Any]:
        speculative = {"method": method, "model": str(folder), "num_speculative_tokens": count}
        return {"model": target, "speculative_config": speculative} | ({"hf_overrides": overrides} if overrides else {})

    return arguments


def vllm_line(arguments: Arguments) -> Callable[[Config, str, Path, int], str]:
    """The same as a command."""

    def line(config: Config, target: str, folder: Path, count: int) -> str:
        given = arguments(config, target, folder, count)
        options = [
            f"--{key.replace('_', '-')} {shlex.quote(json.dumps(value))}"
            for key, value in given.items()
            if key != "model"
        ]
        return " ".join(["vllm", "serve", shlex.quote(given["model"]), *sorted(options)])

    return line


def sglang_arguments(algorithm: str) -> Arguments:
    """What SGLang's classes are given: the algorithm, and a map of tokens where there is one."""

    def arguments(config: Config, target: str, folder: Path, count: int) -> dict[str, Any]:
        token_map = str(folder / TOKEN_MAP) if config.get("hot_vocab_size") else None
        return {"algorithm": algorithm, "token_map": token_map}

    return arguments


TOKEN_MAP = "token_map.pt"


def write_token_map(ids_W: Tensor, folder: Path) -> None:
    """The tokens that a head drafts among, as SGLang wants them: a pickled list of target ids. Nothing here reads it back."""
    torch.save(ids_W.tolist(), folder / TOKEN_MAP)


def absent_map(config: Config, spec: TargetSpec | None) -> str | None:
    """The map that the launch line names is there."""
    absent = config.get("hot_vocab_size") and TOKEN_MAP not in config.get("file_names", {TOKEN_MAP})
    return f"{TOKEN_MAP} is missing beside it" if absent else None


MAP_RULE = Key(
    "hot_vocab_size", absent_map, "SGLang stops at its flag --speculative-token-map", "export the head again"
)


def token_map_flag(config: Config, folder: Path) -> str:
    """SGLang's flag for it."""
    return f" --speculative-token-map {shlex.quote(str(folder / TOKEN_MAP))}" if config.get("hot_vocab_size") else ""


def sglang_line(target: str, folder: Path, algorithm: str, dtype: str, steps: int, tree: bool, more: str = "") -> str:
    """SGLang with a head: a chain of `steps`, or a tree for the same budget as our tree of four levels."""
    top_k, tokens = (4, 13) if tree else (1, steps + 1)
    other = "" if tree or algorithm == "NEXTN" else TREE
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} --dtype {dtype} "
        f"--speculative-algorithm {algorithm} \\\n"
        f"  --speculative-draft-model-path {shlex.quote(str(folder))} \\\n"
        f"  --speculative-num-steps {4 if tree else steps} --speculative-eagle-topk {top_k} "
        f"--speculative-num-draft-tokens {tokens}{more}{other}"
    )


TREE = (
    "\n  # a tree of 12 drafts: --speculative-num-steps 4 --speculative-eagle-topk 4 --speculative-num-draft-tokens 13"
)
