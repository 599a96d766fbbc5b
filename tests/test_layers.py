"""Building blocks against transformers' Llama modules, autograd of the plain formulas, and textbook attention."""

import pytest
import torch
import torch.nn.functional as F
from test_rotary import llama_config
from transformers.models.llama import modeling_llama

from headwright.heads.layers import Attention, GatedFunction, NormFunction, RMSNorm, Sizes, SwiGLU, attend

DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-6,
    torch.bfloat16: 2e-2,
    torch.float16: 3e-3,
}  # of the largest entry
SHAPES = [(5, 24), (2, 3, 24), (2, 1, 3, 24), (0, 24), (0, 3, 24)]


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
    ours, theirs = SwiGLU(64, 72), modeling_llama.LlamaMLP(llama_config(DEFAULT))
    theirs.load_state_dict(ours.state_dict())
    x = random(3, 64)
    assert torch.allclose(ours(x), theirs(x), atol=1e-6)


# Functions with a backward pass of their own


def plain_norm(x, weight, eps=1e-5):
    """RMSNorm, every intermediate kept by autograd."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def plain_gated(gate, up, weight):
    """The second half of SwiGLU."""
    return F.linear(F.silu(gate) * up, weight.to(gate.dtype))


def norm(x, weight):
    return NormFunction.apply(x, weight, 1e-5)


gated = GatedFunction.apply


def norm_inputs(shape, dtype, weight_dtype=None):
    """Rows of several sizes."""
    x = random(*shape, seed=1, dtype=dtype)
    return [x * torch.linspace(0.01, 30, shape[-1]).to(dtype), random(shape[-1], seed=2, dtype=weight_dtype or dtype)]


def gated_inputs(shape, dtype, weight_dtype=None):
    """Gates from shut to open."""
    gate, up = (random(*shape, seed=seed, dtype=torch.float64) for seed in (3, 4))
    weight = random(10, shape[-1], seed=5, dtype=weight_dtype or dtype)
    return [(5 * gate).to(dtype), up.to(dtype), weight]


FUNCTIONS = {"norm": (norm, plain_norm, norm_inputs), "gated": (gated, plain_gated, gated_inputs)}


def value_and_gradients(function, inputs, wanted=(True, True, True)):
    """The result, and the gradient of each input through a random probe."""
    leaves = [part.detach().clone().requires_grad_(want) for part, want in zip(inputs, wanted)]
    out = function(*leaves)
    out.backward(random(*out.shape, seed=9, dtype=out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def assert_same(found, wanted, tolerance: float) -> None:
    """Dtype, shape and values, relative to the largest entry."""
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    apart = (found.double() - wanted.double()).abs()
    assert apart.numel() == 0 or float(apart.max()) <= tolerance * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_is_autograd_of_the_plain_formula(name, dtype, shape):
    ours, plain, make = FUNCTIONS[name]
    inputs = make(shape, dtype)
    for found, wanted in zip(value_and_gradients(ours, inputs), value_and_gradients(plain, inputs)):
        assert_same(found, wanted, TOLERANCE[dtype])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_of_a_single_row(name):
    """One dimension: as the plain formula."""
    ours, plain, make = FUNCTIONS[name]
    inputs = make((24,), torch.float64)
    for found, wanted in zip(value_and_gradients(ours, inputs), value_and_gradients(plain, inputs)):
        assert_same(found, wanted, 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_weights_in_fp32_under_rows_in_half(name, dtype):
    """Gradients come back in each input's own dtype."""
    ours, plain, make = FUNCTIONS[name]
    inputs = make((6, 24), dtype, torch.float32)
    for found, wanted in zip(value_and_gradients(ours, inputs), value_and_gradients(plain, inputs)):
        assert_same(found, wanted, TOLERANCE[dtype])


@pytest.mark.parametrize("wanted", [(True, False, True), (False, True, True), (True, True, False)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(name, wanted):
    ours, _, make = FUNCTIONS[name]
    inputs = make((6, 24), torch.float64)
    free, frozen = value_and_gradients(ours, inputs), value_and_gradients(ours, inputs, wanted)
    for want, one, other in zip((True, *wanted), free, frozen):
        assert other is None if not want else torch.equal(one, other)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_passes_gradcheck(name):
    """Also for a gradient that autograd expands from one number, and for rows that do not lie behind each other."""
    ours, plain, make = FUNCTIONS[name]
    inputs = [part.requires_grad_() for part in make((3, 5), torch.float64)]
    assert torch.autograd.gradcheck(ours, inputs)
    moved = [part.detach().T.contiguous().T.requires_grad_() if part.dim() > 1 else part for part in inputs]
    for found, wanted in zip(
        torch.autograd.grad(ours(*moved).sum(), moved), torch.autograd.grad(plain(*inputs).sum(), inputs)
    ):
        assert_same(found, wanted, 1e-12)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gates_far_from_zero(dtype):
    """Shut, open, and beyond what exp can hold."""
    gate = torch.tensor([[-200.0, -90.0, -20.0, 0.0, 20.0, 90.0, 200.0]], dtype=dtype)
    inputs = [gate, torch.ones_like(gate), torch.eye(7, dtype=dtype)]
    for found, wanted in zip(value_and_gradients(gated, inputs), value_and_gradients(plain_gated, inputs)):
        assert bool(found.isfinite().all())
        assert_same(found, wanted, TOLERANCE[dtype])


def test_swiglu_under_autocast():
    """fp32 weights, bf16 inside: what the three projections give, and gradients in fp32."""
    ours = SwiGLU(24, 40)
    x = random(6, 24)

    def plain(x):
        return ours.down_proj(F.silu(ours.gate_proj(x)) * ours.up_proj(x))

    found, wanted = [], []
    for function, results in ((ours, found), (plain, wanted)):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = function(leaf)
        assert out.dtype == torch.bfloat16
        results.append(out.detach())
        results += torch.autograd.grad(out, [leaf, *ours.parameters()], random(6, 24, dtype=torch.bfloat16))
    assert torch.equal(found[0], wanted[0])
    for mine, their in zip(found[1:], wanted[1:]):
        assert_same(mine, their, TOLERANCE[torch.bfloat16])
        assert mine.dtype == torch.float32


def kept(function, inputs) -> int:
    """Bytes that autograd keeps of a call, beside the inputs."""
    known = {part.untyped_storage().data_ptr() for part in inputs}
    sizes = {}

    def pack(part):
        if part.untyped_storage().data_ptr() not in known:
            sizes[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
        return part

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda part: part):
        out = function(*(part.requires_grad_() for part in inputs))
    assert out.grad_fn is not None
    return sum(sizes.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_functions_keep_their_inputs_and_little_else(dtype):
    """The norm one number in fp32 per row, the gate nothing; the plain formulas keep rows of their own."""
    rows, width = 50, 24
    assert kept(norm, norm_inputs((rows, width), dtype)) == 4 * rows
    assert kept(gated, gated_inputs((rows, width), dtype)) == 0
    for name in FUNCTIONS:
        _, plain, make = FUNCTIONS[name]
        assert kept(plain, make((rows, width), dtype)) >= rows * width * dtype.itemsize


# Attention


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


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 3), (5, 1)])
@pytest.mark.parametrize("values", [8, 5])
@pytest.mark.parametrize("new", [1, 7])
def test_attend_without_a_mask_is_causal(heads, groups, values, new):
    """Values may be narrower than keys."""
    q, k = random(2, new, heads, 8, seed=1, dtype=torch.float64), random(2, groups, new, 8, seed=2, dtype=torch.float64)
    v = random(2, groups, new, values, seed=3, dtype=torch.float64)
    causal = torch.ones(2, new, new, dtype=torch.bool).tril()
    torch.testing.assert_close(attend(q, k, v, None), attend(q, k, v, causal), rtol=0, atol=1e-12)


def test_masked_slots_are_not_read():
    q, k, v = random(1, 2, 4, 8), random(1, 2, 6, 8, seed=1), random(1, 2, 6, 8, seed=2)
    mask = torch.ones(1, 2, 6, dtype=torch.bool)
    mask[..., 3:] = False
    before = attend(q, k, v, mask)
    k[:, :, 3:], v[:, :, 3:] = 1e4, -1e4
    assert torch.equal(attend(q, k, v, mask), before)


def test_attention_module_is_llamas():
    """Projections, rotation, grouping and output together, on a causal sequence."""
    config = llama_config(LLAMA3)
    config._attn_implementation = "eager"
    theirs = modeling_llama.LlamaAttention(config, 0)
    ours = Attention(64, Sizes(64, 128, 4, 2, 16, 1e-6, LLAMA3))
    theirs.load_state_dict(ours.state_dict())
    x, positions = random(1, 9, 64), torch.arange(9)[None]
    causal = torch.ones(9, 9, dtype=torch.bool).tril()[None]
    keys, values = ours.keys_values(x, positions)
    mixed = attend(ours.query(x, positions), keys.transpose(1, 2), values.transpose(1, 2), causal)
    cos_sin = modeling_llama.LlamaRotaryEmbedding(config)(x, positions)
    bias = torch.zeros(9, 9).masked_fill(~causal[0], -torch.inf)[None, None]
    assert torch.allclose(ours.output(mixed), theirs(x, cos_sin, bias)[0], atol=1e-5)
