"""Building blocks against transformers' Llama modules and textbook attention."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama import modeling_llama

from headwright.configs import UserError
from headwright.heads.layers import Attention, RMSNorm, SwiGLU, attend
from headwright.heads.rotary import Rotary, inverse_frequencies

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
}


def llama_config(rope: dict, width: int = 16) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * width,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width,
        intermediate_size=72,
        max_position_embeddings=4096,
        rope_parameters=rope,
    )


def random(*shape, seed: int = 0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rms_norm_is_llamas(dtype):
    ours, theirs = RMSNorm(48, 1e-5).to(dtype), modeling_llama.LlamaRMSNorm(48, 1e-5).to(dtype)
    with torch.no_grad():
        ours.weight.copy_(random(48, seed=1))
    theirs.load_state_dict(ours.state_dict())
    x = random(3, 5, 48, seed=2, dtype=dtype) * 30
    assert ours(x).dtype == dtype
    assert torch.allclose(ours(x), theirs(x), rtol=torch.finfo(dtype).eps * 4, atol=0)


def test_rms_norm_of_zeros_is_zero():
    assert not RMSNorm(8, 1e-6)(torch.zeros(2, 8)).any()


def test_swiglu_is_llamas_mlp():
    ours, theirs = SwiGLU(64, 72), modeling_llama.LlamaMLP(llama_config(ROPES["default"]))
    theirs.load_state_dict(ours.state_dict())
    x = random(3, 64)
    assert torch.allclose(ours(x), theirs(x), atol=1e-6)


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("width", [8, 16, 128])
def test_frequencies_are_those_of_transformers(kind, width):
    config = llama_config(ROPES[kind], width)
    if kind == "default":
        theirs = modeling_llama.LlamaRotaryEmbedding(config).inv_freq
    else:
        theirs, scale = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
        assert scale == 1.0
    assert torch.allclose(inverse_frequencies(ROPES[kind], width), theirs, rtol=1e-6)


def test_llama3_changes_long_wavelengths_only():
    """The parts of the blend: kept, stretched by the factor, and something between."""
    plain = inverse_frequencies(ROPES["llama3"] | {"rope_type": "default"}, 128)
    ratio = plain / inverse_frequencies(ROPES["llama3"], 128)
    assert ratio.min() == 1.0
    assert ratio.max() == pytest.approx(8.0, rel=1e-5)
    assert ((ratio > 1.01) & (ratio < 7.9)).any()


@pytest.mark.parametrize("kind", ROPES)
def test_rotation_is_llamas(kind):
    config = llama_config(ROPES[kind])
    positions = torch.tensor([[0, 1, 2, 500, 4000], [7, 7, 3, 0, 90]])
    q, k = random(2, 5, 4, 16, seed=3), random(2, 5, 2, 16, seed=4)
    cos, sin = modeling_llama.LlamaRotaryEmbedding(config)(q, positions)
    theirs = modeling_llama.apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    rotary = Rotary(ROPES[kind], 16)
    for ours, wanted in zip((rotary(q, positions), rotary(k, positions)), theirs):
        assert torch.allclose(ours, wanted.transpose(1, 2), atol=1e-4)


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    rotary = Rotary(ROPES["default"], 16)
    q, k = random(1, 1, 16, seed=5), random(1, 1, 16, seed=6)
    scores = [(rotary(q, torch.tensor([p])) * rotary(k, torch.tensor([p - 3]))).sum().item() for p in (3, 10, 100)]
    assert scores == pytest.approx([scores[0]] * 3, rel=1e-3)
    assert rotary(q, torch.tensor([99])).norm().item() == pytest.approx(q.norm().item(), rel=1e-5)
    assert torch.equal(rotary(q, torch.tensor([0])), q)


@pytest.mark.parametrize("kind", ["longrope", "proportional"])
def test_unknown_rope_type_is_refused(kind):
    with pytest.raises(UserError, match=rf"'{kind}'.*default, linear, dynamic, yarn, llama3"):
        Rotary({"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}, 8)


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 1), (6, 3)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_attend_equals_dense_attention_with_repeated_keys(heads, groups, dtype, tolerance):
    """Grouped keys, ragged masks: every score written out."""
    batch, new, slots, width = 3, 5, 11, 8
    q = random(batch, new, heads, width, seed=1, dtype=dtype)
    k, v = (random(batch, groups, slots, width, seed=s, dtype=dtype) for s in (2, 3))
    mask = torch.rand(batch, new, slots, generator=torch.Generator().manual_seed(4)) < 0.5
    mask[..., 0] = True
    out = attend(q, k, v, mask)
    assert out.shape == (batch, new, heads, width)
    for b in range(batch):
        for n in range(new):
            for h in range(heads):
                g = h // (heads // groups)
                scores = torch.stack([q[b, n, h] @ k[b, g, s] for s in range(slots) if mask[b, n, s]]) / width**0.5
                values = torch.stack([v[b, g, s] for s in range(slots) if mask[b, n, s]])
                assert torch.allclose(out[b, n, h], scores.softmax(0) @ values, atol=tolerance)


def test_masked_slots_are_not_read():
    q, k, v = random(1, 2, 4, 8), random(1, 2, 6, 8, seed=1), random(1, 2, 6, 8, seed=2)
    mask = torch.ones(1, 2, 6, dtype=torch.bool)
    mask[..., 3:] = False
    before = attend(q, k, v, mask)
    k[:, :, 3:], v[:, :, 3:] = 1e4, -1e4
    assert torch.equal(attend(q, k, v, mask), before)


def test_attention_module_is_llamas():
    """Projections, rotation, grouping and output together, on a causal sequence."""
    config = llama_config(ROPES["llama3"])
    config._attn_implementation = "eager"
    theirs = modeling_llama.LlamaAttention(config, 0)
    ours = Attention(64, 64, 4, 2, 16, Rotary(ROPES["llama3"], 16))
    theirs.load_state_dict(ours.state_dict())
    x, positions = random(1, 9, 64), torch.arange(9)[None]
    causal = torch.ones(9, 9, dtype=torch.bool).tril()[None]
    keys, values = ours.keys_values(x, positions)
    mixed = attend(ours.query(x, positions), keys.transpose(1, 2), values.transpose(1, 2), causal)
    cos_sin = modeling_llama.LlamaRotaryEmbedding(config)(x, positions)
    bias = torch.zeros(9, 9).masked_fill(~causal[0], -torch.inf)[None, None]
    assert torch.allclose(ours.output(mixed), theirs(x, cos_sin, bias)[0], atol=1e-5)
