"""Any causal LM that transformers loads: our states, batches and trees are Hugging Face's own, family by family."""

import pytest
import torch
import transformers
from conftest import TAPS, make_tokenizer

from headwright.configs import UserError
from headwright.configs.schema import TargetConfig
from headwright.data.generate import Question, answer
from headwright.data.sampling import Policy
from headwright.data.target import Target

TEXT = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": 258,
    "initializer_range": 0.2,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
MLA = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
CAUSAL = {  # family: config class, what differs from TEXT
    "mixtral": ("MixtralConfig", {"num_local_experts": 2}),
    "qwen3-moe": ("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "deepseek-v3": ("DeepseekV3Config", MLA),  # keys and values of different width
    "gpt-oss": ("GptOssConfig", {"num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": 9, "head_dim": 8}),
    "phi3": ("Phi3Config", {}),
    "olmo2": ("Olmo2Config", {}),
    "granite": ("GraniteConfig", {"logits_scaling": 2.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0}),
    "cohere": ("CohereConfig", {}),
    "glm4": ("Glm4Config", {}),
    "smollm3": ("SmolLM3Config", {}),
    "starcoder2": ("Starcoder2Config", {}),
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def causal(family: str) -> transformers.PreTrainedModel:
    """A random model of a text family."""
    name, changes = CAUSAL[family]
    config = getattr(transformers, name)(**(TEXT | {"rope_parameters": ROPE} | changes))
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def seeing(family: str) -> transformers.PreTrainedModel:
    """A random model that also sees, whose text part has a config of its own."""
    t = transformers
    clip, llama = t.CLIPVisionConfig(**VISION, projection_dim=16), t.LlamaConfig(**TEXT)
    siglip = VISION | {"model_type": "siglip_vision_model"}
    gemma = TEXT | {"head_dim": 8, "sliding_window": 9, "query_pre_attn_scalar": 8}
    qwen = TEXT | {"rope_parameters": ROPE | {"mrope_section": [1, 1, 2]}}
    pixtral, mistral = t.PixtralVisionConfig(**VISION), t.MistralConfig(**TEXT, head_dim=8)
    torch.manual_seed(0)
    if family == "llava":
        return t.LlavaForConditionalGeneration(
            t.LlavaConfig(text_config=llama, vision_config=clip, image_token_index=270)
        )
    if family == "gemma3":
        config = t.Gemma3Config(text_config=gemma, vision_config=siglip, mm_tokens_per_image=4, image_token_index=270)
        return t.Gemma3ForConditionalGeneration(config)
    if family == "mistral3":
        config = t.Mistral3Config(text_config=mistral, vision_config=pixtral, image_token_index=270)
        return t.Mistral3ForConditionalGeneration(config)
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
    return t.Qwen2_5_VLForConditionalGeneration(t.Qwen2_5_VLConfig(text_config=qwen, vision_config=vision))


def loaded(model: transformers.PreTrainedModel, folder, **config) -> Target:
    """A target, as a user loads it."""
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return Target.load(TargetConfig(model=str(folder), **config), TAPS)


def assert_answers(target: Target) -> None:
    """Ragged batches of cached greedy decoding say what transformers' own generate says."""
    prompts = [list(range(40, 40 + length)) for length in (3, 17, 11)]
    documents = answer(target, [Question(ids, Policy()) for ids in prompts], 8)
    for ids, document in zip(prompts, documents, strict=True):
        assert document.ids_T[len(ids) :].tolist() == target.generate_hf(torch.tensor([ids]), 8)


@pytest.mark.parametrize("family", CAUSAL)
def test_text_families(family, tmp_path):
    assert_answers(loaded(causal(family), tmp_path))


@pytest.mark.parametrize("family", ["llava", "gemma3", "mistral3", "qwen2.5-vl"])
def test_text_part_of_models_that_see(family, tmp_path):
    target = loaded(seeing(family), tmp_path)
    assert target.spec.hidden_size == 32
    assert_answers(target)


def test_device_map_gives_the_same_states(tmp_path):
    plain = loaded(causal("phi3"), tmp_path)
    spread = Target.load(TargetConfig(model=str(tmp_path), device_map="auto"), TAPS)
    ids = torch.arange(30)[None]
    torch.testing.assert_close(plain.features(ids).taps_BNKD, spread.features(ids).taps_BNKD.to("cpu"))
    assert spread.spec == plain.spec


def test_family_that_cannot_be_run_is_one_message(tmp_path):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.StableLmConfig(**TEXT))
    with pytest.raises(UserError, match="StableLmForCausalLM cannot be run"):
        loaded(model, tmp_path)
