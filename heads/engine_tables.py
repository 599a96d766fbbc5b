"""What the directories of all engines share: the keys of config.json and the tensors of a Llama layer (vLLM 0.32, SGLang
0.5.23)."""

from typing import Any

from headwright.data.target import TargetSpec
from headwright.heads.layers import Sizes
from headwright.heads.rotary import served_rope

Shapes = dict[str, tuple[int, ...]]


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
        "rms_norm_eps": spec.rms_norm_eps,
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


def layer_shapes(config: dict[str, Any], name: str, inputs: int) -> Shapes:
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
