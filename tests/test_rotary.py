"""Rotary positions ≡ transformers' own, for every type that heads know; and what an export says of them, read back."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import make_target, make_tiny_head
from hypothesis import given, settings
from hypothesis import strategies as st
from test_export import random_cases
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama import modeling_llama

from headwright.configs import UserError
from headwright.data.target import read_rope
from headwright.data.vocab import DraftVocab
from headwright.heads.base import make_head
from headwright.heads.eagle3_plain import PlainEagle3
from headwright.heads.export import head_drafts, read_back, shared_tables, with_dtype, write_directory
from headwright.heads.rotary import KNOWN, Rotary, TurnFunction, attention_scale, inverse_frequencies, served_rope

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": YARN,
    "yarn, whole theta": YARN | {"rope_theta": 1000000, "factor": 4},
    "yarn, attention_factor": YARN | {"attention_factor": 0.7},
    "yarn, mscale": YARN | {"mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn, mscale alone": YARN | {"mscale": 0.707},
    "yarn, mscale 0": YARN | {"mscale": 0.5, "mscale_all_dim": 0},
    "yarn, attention_factor before mscale": YARN | {"attention_factor": 1.3, "mscale": 2.0, "mscale_all_dim": 1.0},
    "yarn, betas": YARN | {"beta_fast": 4.0, "beta_slow": 2.0},
    "yarn, no betas": YARN | {"beta_fast": None, "beta_slow": None},
    "yarn, one step": YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    "yarn, not truncated": YARN | {"truncate": False},
    "yarn, factor 1": YARN | {"factor": 1.0},
    "yarn, factor null": YARN | {"factor": None},
}
POSITIONS = torch.tensor([[0, 1, 2, 63, 64], [7, 511, 300, 0, 90]])  # original context 64, now 512
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def llama_config(rope: dict, width: int = 16) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * width,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width,
        intermediate_size=72,
        max_position_embeddings=512,
        rope_parameters=dict(rope),
    )


def random(*shape, seed: int = 0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# The rotation itself


def plain_rotation(x, cos, sin):
    """Pairs (x_j, x_{j+E/2}) turned, every intermediate kept by autograd."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


@pytest.mark.parametrize("shape", [(5, 4, 16), (2, 5, 1, 16), (0, 4, 16), (1, 1, 2)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_turn_is_the_plain_rotation(dtype, shape):
    """Values and gradients, with a scale on top; for a gradient that autograd expands; for heads that lie behind each other."""
    angles = random(*shape[:-2], 1, shape[-1] // 2, seed=1) * 100
    cos, sin = (1.3 * angles.cos()).to(dtype), (1.3 * angles.sin()).to(dtype)
    for x in (
        random(*shape, dtype=dtype),
        random(*shape, dtype=dtype).transpose(-2, -3).contiguous().transpose(-2, -3),
    ):
        for probe in (random(*shape, seed=2, dtype=dtype), torch.ones((), dtype=dtype).expand(shape)):
            found = []
            for rotation in (TurnFunction.apply, plain_rotation):
                leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
                out = rotation(leaf, cos, sin)
                found.append((out.detach(), *torch.autograd.grad(out, leaf, probe)))
            for ours, theirs in zip(*found):
                assert ours.dtype == theirs.dtype == dtype
                assert ours.shape == theirs.shape == shape
                assert torch.allclose(ours, theirs, rtol=TOLERANCE[dtype], atol=5 * TOLERANCE[dtype])


def test_turn_passes_gradcheck_and_keeps_the_angles_alone():
    x = random(3, 2, 6, dtype=torch.float64).requires_grad_()
    angles = random(3, 1, 3, seed=1, dtype=torch.float64)
    cos, sin = angles.cos(), angles.sin()
    assert torch.autograd.gradcheck(TurnFunction.apply, (x, cos, sin))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda part: kept.append(part.data_ptr()), lambda part: part):
        TurnFunction.apply(x, cos, sin)
    assert kept == [cos.data_ptr(), sin.data_ptr()]


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    rotary = Rotary(ROPES["default"], 16)
    q, k = random(1, 1, 16, seed=5), random(1, 1, 16, seed=6)
    scores = [(rotary(q, torch.tensor([p])) * rotary(k, torch.tensor([p - 3]))).sum().item() for p in (3, 10, 100)]
    assert scores == pytest.approx([scores[0]] * 3, rel=1e-3)
    assert rotary(q, torch.tensor([99])).norm().item() == pytest.approx(q.norm().item(), rel=1e-5)
    assert torch.equal(rotary(q, torch.tensor([0])), q)


def test_rotation_of_no_rows():
    out = Rotary(YARN, 16)(torch.zeros(0, 4, 16, requires_grad=True), torch.zeros(0, dtype=torch.long))
    assert out.shape == (0, 4, 16)
    out.sum().backward()


class Moves(TorchDispatchMode):
    """Counts copies from the host to another device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.device.type != "cpu":
            self.count += any(isinstance(part, torch.Tensor) and part.device.type == "cpu" for part in args)
        return out


def test_frequencies_are_moved_to_a_device_once():
    rotary, x, positions = Rotary(YARN, 16), torch.zeros(5, 4, 16, device="meta"), torch.arange(5, device="meta")
    rotary(x, positions)
    with Moves() as moves:
        rotary(x, positions)
    assert moves.count == 0


# Every type is transformers' own


@pytest.mark.parametrize("width", [8, 16, 128])
@pytest.mark.parametrize("kind", ROPES)
def test_frequencies_and_scale_are_those_of_transformers(kind, width):
    config = llama_config(ROPES[kind], width)
    if kind == "default":
        theirs, scale = modeling_llama.LlamaRotaryEmbedding(config).inv_freq, 1.0
    else:
        theirs, scale = ROPE_INIT_FUNCTIONS[ROPES[kind]["rope_type"]](config, "cpu")
    rope = read_rope(config)
    assert torch.allclose(inverse_frequencies(rope, width), theirs, rtol=1e-6, atol=0)
    assert attention_scale(rope) == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize("kind", ROPES)
def test_rotation_is_llamas(kind):
    """Queries and keys at positions up to the target's context, the real module's cos and sin."""
    config = llama_config(ROPES[kind])
    q, k = random(2, 5, 4, 16, seed=3), random(2, 5, 2, 16, seed=4)
    cos, sin = modeling_llama.LlamaRotaryEmbedding(config)(q, POSITIONS)
    theirs = modeling_llama.apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    rotary = Rotary(read_rope(config), 16)
    for ours, wanted in zip((rotary(q, POSITIONS), rotary(k, POSITIONS)), theirs):
        assert torch.allclose(ours, wanted.transpose(1, 2), atol=1e-4)


@settings(max_examples=80, deadline=None)
@given(
    width=st.sampled_from([4, 16, 64, 128]),
    theta=st.sampled_from([100, 10000.0, 5e6]),
    factor=st.sampled_from([1, 2.5, 40]),
    context=st.sampled_from([16, 512, 32768]),
    others=st.fixed_dictionaries(
        {},
        optional={
            "attention_factor": st.sampled_from([None, 0.5, 1.0]),
            "mscale": st.sampled_from([0, 0.7, 1.0]),
            "mscale_all_dim": st.sampled_from([0, 0.5, 1.0]),
            "beta_fast": st.sampled_from([None, 1, 4, 32, 64.0]),
            "beta_slow": st.sampled_from([None, 0.5, 1, 32]),
            "truncate": st.booleans(),
        },
    ),
)
def test_any_yarn_is_that_of_transformers(width, theta, factor, context, others):
    rope = {"rope_type": "yarn", "rope_theta": theta, "factor": factor, "original_max_position_embeddings": context}
    rope |= others
    theirs, scale = ROPE_INIT_FUNCTIONS["yarn"](llama_config(rope, width), "cpu")
    assert torch.allclose(inverse_frequencies(rope, width), theirs, rtol=1e-5, atol=0)
    assert attention_scale(rope) == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_long_wavelengths_alone_are_stretched(kind):
    """The parts of the blend: kept, stretched by the factor, and something between."""
    plain = inverse_frequencies(ROPES[kind] | {"rope_type": "default"}, 128)
    ratio = plain / inverse_frequencies(ROPES[kind], 128)
    assert ratio.min() == 1.0
    assert ratio.max() == pytest.approx(8.0, rel=1e-5)
    assert ((ratio > 1.01) & (ratio < 7.9)).any()
    assert bool((ratio.diff() >= -1e-5).all())


# What is read of a target


def test_a_null_factor_is_the_ratio_of_the_contexts():
    """As DeepSeek writes it; the target's own config is left as it was."""
    config = llama_config(ROPES["yarn, factor null"])
    assert read_rope(config) == YARN | {"factor": 512 / 64}
    assert config.rope_parameters["factor"] is None


def test_rope_of_layer_types_is_that_of_full_attention():
    parts = {"full_attention": dict(YARN, factor=None), "sliding_attention": dict(ROPES["default"])}
    config = llama_config(ROPES["default"])
    config.rope_parameters = parts
    assert read_rope(config) == YARN
    assert parts["full_attention"]["factor"] is None


def test_a_target_without_rope_parameters_rotates_plainly():
    config = llama_config(ROPES["default"])
    config.rope_parameters = None
    assert read_rope(config) == ROPES["default"]


# Refusals


@pytest.mark.parametrize("kind", ["longrope", "proportional"])
def test_unknown_rope_type_is_refused(kind):
    with pytest.raises(UserError, match=rf"'{kind}'.*known: default, linear, dynamic, yarn, llama3"):
        Rotary({"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}, 8)


@pytest.mark.parametrize("odd", [{"partial_rotary_factor": 0.5}, {"mrope_section": [2, 1, 1]}])
@pytest.mark.parametrize("kind", KNOWN)
def test_partial_and_multimodal_rotation_is_refused(kind, odd):
    """For every type, with what stands in the config."""
    with pytest.raises(UserError, match=rf"rotates in a way that heads do not know yet: .*{next(iter(odd))}"):
        Rotary(ROPES[kind] | odd, 8)


def test_a_whole_partial_factor_is_none():
    rope = ROPES["llama3"] | {"partial_rotary_factor": 1.0}
    assert torch.equal(inverse_frequencies(rope, 16), inverse_frequencies(ROPES["llama3"], 16))


def test_a_head_of_such_a_target_is_refused(tiny):
    spec = replace(tiny.spec, rope={"rope_type": "longrope", "rope_theta": 10000.0})
    with pytest.raises(UserError, match="longrope"):
        make_head(make_tiny_head(tiny).config, spec, tiny.taps, DraftVocab(torch.arange(9), tiny.spec.vocab_size))


# Exports


@pytest.mark.parametrize("kind", ROPES)
def test_served_rope(kind):
    """Dynamic is written as the plain rotation that was trained; whatever is written turns and scales as the head does."""
    rope = read_rope(llama_config(ROPES[kind]))
    served = served_rope(rope)
    assert served["rope_type"] == ("default" if kind == "dynamic" else rope["rope_type"])
    assert served["rope_theta"] == rope["rope_theta"]
    assert ("factor" in served) == (kind not in ("default", "dynamic"))
    assert torch.equal(inverse_frequencies(served, 16), inverse_frequencies(rope, 16))
    assert attention_scale(served) == attention_scale(rope)


def sharp_head(rope: dict):
    """A target with this rotation, and a head whose attention is sharp, so that positions matter."""
    target = make_target(rope_parameters=dict(rope))
    head = make_tiny_head(target)
    with torch.no_grad():
        for projection in (head.midlayer.self_attn.q_proj, head.midlayer.self_attn.k_proj):
            projection.weight.mul_(8)
    return target, head


@pytest.mark.parametrize("kind", ROPES)
def test_exports_are_read_back(tmp_path, kind):
    """An independent reader drafts what the head drafts, for contexts of up to 100 tokens."""
    target, head = sharp_head(ROPES[kind])
    export = with_dtype(head.export("portable"), torch.float32)
    rope = served_rope(head.spec.rope)
    assert export.config["rope_parameters"] == rope
    assert export.config["rope_theta"] == rope["rope_theta"]
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    assert export.config["rope_scaling"] == (None if kind in ("default", "dynamic") else scaling)
    write_directory(tmp_path, export)
    reader, shared = PlainEagle3.read(tmp_path), shared_tables(target)
    for case in random_cases(head):
        drafts, ours = reader.draft(shared, case, 5), head_drafts(head, target, case)
        assert drafts.tokens == ours.tokens
        assert drafts.logprobs == pytest.approx(ours.logprobs, abs=2e-3)


FAULTS = {  # what an engine would misread without a word
    "another factor": lambda rope: rope | {"factor": 2.0},
    "no scale": lambda rope: rope | {"attention_factor": 1.0},
    "another ramp": lambda rope: rope | {"beta_fast": 2.0, "beta_slow": 0.1},
    "another context": lambda rope: rope | {"original_max_position_embeddings": 16},
    "no scaling": lambda _: None,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_config_that_turns_otherwise_is_found(tmp_path, fault):
    """Negative control: with another rope_scaling, drafts differ."""
    target, head = sharp_head(YARN)
    export = with_dtype(head.export("portable"), torch.float32)
    export.config["rope_scaling"] = FAULTS[fault](export.config["rope_scaling"])
    write_directory(tmp_path, export)
    with pytest.raises(UserError, match="do not serve this"):
        read_back(PlainEagle3.read(tmp_path), head, target, random_cases(head), torch.float32)


def sglang_scale(rope: dict) -> float:
    """What SGLang 0.5.23 multiplies queries and keys by (layers/rotary_embedding/yarn.py and factory.py)."""
    assert rope.get("beta_fast", 32) is not None, "it would divide by None"
    assert rope.get("beta_slow", 1) is not None
    grown = 0.1 * math.log(rope["factor"])
    scale = 1 + grown
    if rope.get("mscale") is not None and rope.get("mscale_all_dim") is not None:
        scale = (1 + grown * rope["mscale"]) / (1 + grown * rope["mscale_all_dim"])
    return scale * rope.get("attn_factor", 1)


@pytest.mark.parametrize("kind", [kind for kind in ROPES if kind.startswith("yarn") and ROPES[kind]["factor"]])
def test_sglang_scales_as_the_head_was_trained(kind):
    """It does not know attention_factor (its own key is attn_factor, on top of what the factor gives), nor null or zero."""
    assert sglang_scale(served_rope(ROPES[kind])) == pytest.approx(attention_scale(ROPES[kind]))


# The target's lm_head


def test_lm_head_rows_of_a_full_vocabulary_are_the_weight_itself(tiny):
    weight, bias = tiny.lm_head_rows(torch.arange(tiny.spec.vocab_size))
    assert weight.data_ptr() == tiny.lm_head.weight.data_ptr()
    assert bias is tiny.lm_head.bias
    head = make_tiny_head(tiny, None)
    last = random(3, 32)
    assert torch.equal(tiny.logits(last, head.ids_W), tiny.logits(last))


def test_lm_head_rows_of_some_tokens_are_copied_once(tiny):
    first, second = torch.tensor([3, 5, 260]), torch.tensor([0, 7])
    weight, _ = tiny.lm_head_rows(first)
    assert tiny.lm_head_rows(first)[0] is weight
    assert torch.equal(weight, tiny.lm_head.weight[first])
    last = random(3, 32)
    for ids in (second, first):
        assert torch.allclose(tiny.logits(last, ids), tiny.logits(last)[:, ids], atol=1e-6)
