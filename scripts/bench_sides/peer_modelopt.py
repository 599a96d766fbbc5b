"""ModelOpt's EAGLE-3 step, offline: a Llama model converted by it, fed with stored states. It runs unmodified.

Attention is sdpa on a CPU, since flex has no backward there. Its torch.compile, on as shipped, is off on a CPU: at 512 tokens
it saves 5 % of a step and takes minutes before the first.
"""

from importlib.metadata import version
from typing import Any

import torch
from common import Data, Problem, Side, main


def make_target(problem: Problem, data: Data) -> Any:
    """A Llama model of four layers, which the conversion drops, with the target's embedding and lm_head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=problem.hidden,
        intermediate_size=problem.intermediate,
        num_hidden_layers=4,
        num_attention_heads=problem.heads,
        num_key_value_heads=problem.kv_heads,
        head_dim=problem.head_dim,
        vocab_size=problem.vocabulary,
        max_position_embeddings=problem.longest,
    )
    target = LlamaForCausalLM(config)
    target.model.embed_tokens.weight.data = data.embedding_VH
    target.lm_head.weight.data = data.lm_head_VH
    return target


def make_settings(problem: Problem, data: Data) -> dict[str, Any]:
    """What a run file of theirs would say."""
    layer = {
        "intermediate_size": problem.intermediate,
        "num_attention_heads": problem.heads,
        "num_key_value_heads": problem.kv_heads,
        "head_dim": problem.head_dim,
        "rms_norm_eps": problem.epsilon,
        "rope_theta": problem.rope_theta,
        "rope_scaling": {"rope_type": "default", "rope_theta": problem.rope_theta},
        "draft_vocab_size": len(data.ids_W),
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        "_attn_implementation": "sdpa" if problem.device == "cpu" else "flex_attention",
    }
    return {
        "eagle_offline": True,
        "eagle_ttt_steps": problem.steps,
        "eagle_loss_decay_factor": problem.decay,
        "eagle_use_torch_compile": problem.device != "cpu",
        "eagle_architecture_config": layer,
    }


def build(problem: Problem, data: Data) -> Side:
    """One document, as their offline reader hands it over."""
    import modelopt.torch.speculative as speculative

    model = speculative.convert(make_target(problem, data), [("eagle", make_settings(problem, data))])
    model.eagle_module.d2t.copy_(data.ids_W.cpu() - torch.arange(len(data.ids_W)))
    batch = {
        "input_ids": data.ids_T[None],
        "attention_mask": torch.ones_like(data.ids_T)[None],
        "loss_mask": data.mask_T.long()[None],
        "base_model_outputs": {
            "base_model_hidden_states": data.last_TH[None],
            "aux_hidden_states": data.taps_T3H.flatten(1)[None],
        },
    }
    return Side(version("nvidia-modelopt"), model, lambda: model(**batch).loss)


if __name__ == "__main__":
    main("modelopt", build)
