"""Small causal language models to be trained as drafters: made out of the target's own layers, or loaded.

Beside target.py, block.py and gguf_model.py the only code that knows Hugging Face model classes.
"""

import copy
import json
from collections.abc import Sequence
from typing import Any

import tokenizers
import torch
import transformers

from headwright.configs import UserError
from headwright.configs.schema import TargetConfig
from headwright.data.target import Taps, Target


def cut_target(target: Target, layers: int) -> Target:
    """A model of the target's class with some of its layers, evenly spread, its embeddings, norm and lm_head; in fp32."""
    if not 0 < layers < target.spec.num_layers:
        raise UserError(
            f"head.layers {layers}: the target has {target.spec.num_layers}, a draft model needs fewer, and one at least"
        )
    target.want_layers("head.layers")
    step = (target.spec.num_layers - 1) / max(1, layers - 1)
    kept = [round(place * step) for place in range(layers)] if layers > 1 else [0]
    model = from_config(shortened(target.model.config, kept))
    own = dict(target.model.state_dict())
    inside = next(name for name, part in target.model.named_modules() if part is target.body.layers)
    renamed = {}
    for name, value in own.items():
        if name.startswith(f"{inside}."):
            number, rest = name.removeprefix(f"{inside}.").split(".", 1)
            if int(number) not in kept:
                continue
            name = f"{inside}.{kept.index(int(number))}.{rest}"
        renamed[name] = value.float()
    model.load_state_dict(renamed)
    return Target(model, target.tokenizer, f"{layers} layers of {target.spec.name}", (0,))


def shortened(config: Any, kept: list[int]) -> Any:
    """The configuration of the same model with some of its layers."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = len(kept)
    types = getattr(config, "layer_types", None)
    if types:
        config.layer_types = [types[place] for place in kept]
    return config


def from_config(config: Any) -> Any:
    """An untrained model in fp32."""
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def from_description(described: dict[str, Any], target: Target, name: str) -> Target:
    """An untrained model from a configuration as a dictionary, with the target's tokenizer."""
    kind = described["model_type"]
    config = transformers.AutoConfig.for_model(kind, **{k: v for k, v in described.items() if k != "model_type"})
    return Target(from_config(config), target.tokenizer, name, (0,))


def load_small(name: str, target: Target) -> Target:
    """A small model from a directory or the hub, in fp32 on the target's device."""
    return Target.load(TargetConfig(model=name, dtype="float32"), (0,), target.device)


def description(model: Target) -> dict[str, Any]:
    """Its configuration, as JSON keeps it."""
    found: dict[str, Any] = json.loads(model.model.config.to_json_string(use_diff=False))
    return found


def is_tied(model: Target) -> bool:
    """Whether embeddings and lm_head are one tensor."""
    return model.lm_head.weight is model.model.get_input_embeddings().weight


def load_written(folder: str) -> Any:
    """A written directory, as transformers reads it."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def random_target(size: Sequence[int], dtype: torch.dtype, device: str, taps: Taps = (0,)) -> Target:
    """A Llama with random weights, for measuring costs: hidden, layers, heads, key-value heads, MLP, vocabulary."""
    hidden, layers, heads, groups, inner, vocabulary = size
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        intermediate_size=inner,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config)
    torch.set_default_dtype(before)
    empty = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=empty)
    return Target(model, tokenizer, "random", taps)
