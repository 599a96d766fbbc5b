"""GGUF files as transformers models, in fp32.

A llama-type file is read once and dequantised with the `gguf` package; bit-identical to transformers' own reader at a third of
its time, and the result can be saved (transformers marks what it reads as quantised and refuses to).
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf.quants import dequantize

NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def llama_from_gguf(path: Path) -> transformers.LlamaForCausalLM:
    """The model in `path`. Raises ValueError for another architecture or a tensor that it does not know."""
    reader = gguf.GGUFReader(path)
    if field(reader, "general.architecture") != "llama":
        raise ValueError(f"{path}: a GGUF file of architecture {field(reader, 'general.architecture')}, not llama")
    config = llama_config(reader)
    state = {}
    for tensor in reader.tensors:
        name, weight = rename(tensor.name), dequantize(tensor.data, tensor.tensor_type)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            weight = unpermute(weight, heads or config.num_attention_heads)
        state[name] = torch.from_numpy(np.array(weight, dtype=np.float32))
    model = transformers.LlamaForCausalLM(config)
    missing, extra = model.load_state_dict(state, strict=False)
    if extra or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"{path}: tensors missing {missing}, unknown {extra}")
    model.tie_weights()
    return model.eval()


def any_from_gguf(path: Path) -> Any:
    """The model in `path`, of any kind that transformers reads; such that it can be saved."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    del model.hf_quantizer, model.config.quantization_config
    model.is_quantized = False
    return model.eval()


def llama_config(reader: gguf.GGUFReader) -> transformers.LlamaConfig:
    """The model's shape from the file's metadata."""
    return transformers.LlamaConfig(
        vocab_size=field(reader, "llama.vocab_size"),
        hidden_size=field(reader, "llama.embedding_length"),
        intermediate_size=field(reader, "llama.feed_forward_length"),
        num_hidden_layers=field(reader, "llama.block_count"),
        num_attention_heads=field(reader, "llama.attention.head_count"),
        num_key_value_heads=field(reader, "llama.attention.head_count_kv"),
        max_position_embeddings=field(reader, "llama.context_length"),
        rms_norm_eps=float(f"{field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": field(reader, "llama.rope.freq_base")},
        bos_token_id=field(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=field(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=field(reader, "tokenizer.ggml.padding_token_id"),
        tie_word_embeddings="output.weight" not in {tensor.name for tensor in reader.tensors},
        dtype="float32",
    )


def field(reader: gguf.GGUFReader, key: str):
    """One metadata value."""
    return reader.fields[key].contents()


def rename(name: str) -> str:
    """GGUF tensor name → transformers parameter name."""
    if name in NAMES:
        return NAMES[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's interleaving of the rotary halves in q and k."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
