"""Attention of a rollout: every kernel ≡ a dense softmax written out row by row, values and gradients."""

import contextlib
import itertools
from dataclasses import dataclass

import pytest
import torch
from conftest import make_target, make_tiny_head
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ttt import documents_for, make_document
from torch.utils._python_dispatch import TorchDispatchMode

from headwright.data.batch import pack
from headwright.data.rows import Span, Spans, pack_spans, plan_rows
from headwright.heads import attention
from headwright.heads.attention import Blockwise, CpuFlash, CudaFlash, Merged, rollout_attention

# A layout: for each document its number of keys and the runs of its rows that ask, [start, stop) within the document.
LAYOUTS = {
    "whole": [(6, [(0, 6)])],
    "after a prompt": [(9, [(4, 9)])],
    "single rows": [(7, [(0, 1), (3, 4), (6, 7)])],
    "one key": [(1, [(0, 1)])],
    "keys behind": [(8, [(2, 5)])],
    "documents": [(9, [(0, 1), (3, 6), (8, 9)]), (4, []), (12, [(2, 7), (9, 11)]), (1, [(0, 1)]), (3, [(2, 3)])],
    "documents, one run each": [(5, [(0, 5)]), (7, [(2, 7)]), (1, [(0, 1)])],
}
GROUPS = [(1, 1), (6, 2), (5, 5), (9, 3)]
WIDTHS = [2, 8, 24, 80]
DTYPES = {torch.float64: (1e-12, 1e-12), torch.float32: (3e-6, 3e-6)}
HALF = {torch.bfloat16: (8e-3, 2e-2), torch.float16: (1e-3, 2.5e-3)}  # values, gradients; of the largest entry


def spans_of(layout) -> list[Span]:
    """The runs as spans."""
    parts, query, key = [], 0, 0
    for length, runs in layout:
        for start, stop in runs:
            parts.append(Span(query, query + stop - start, key, key + start))
            query += stop - start
        key += length
    return parts


@dataclass
class Case:
    """Inputs of one call."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    spans: Spans
    own: list[tuple[torch.Tensor, torch.Tensor]]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that gradients flow to."""
        return [self.query, self.keys, self.values, *(part for pair in self.own for part in pair)]

    def like(self, dtype: torch.dtype) -> "Case":
        """Copies that are leaves."""
        query, keys, values, *flat = (x.detach().to(dtype, copy=True).requires_grad_() for x in self.tensors)
        return Case(query, keys, values, Spans(self.spans.parts, self.spans.order), list(zip(flat[::2], flat[1::2])))


def make_case(layout, heads=6, groups=2, width=8, own=2, shuffled=True, scale=1.0, dtype=torch.float64, seed=0) -> Case:
    """Random numbers; the rows in any order; own keys that go on behind the rows, the newest the least."""
    generator = torch.Generator().manual_seed(seed)
    parts = spans_of(layout)
    rows, keys = parts[-1].stop if parts else 0, sum(length for length, _ in layout)
    place = torch.randperm(rows, generator=generator)

    def random(count, across, size=1.0):
        return (torch.randn(count, across, width, generator=generator, dtype=torch.float64) * size).to(dtype)

    pairs = [(random(rows + own - j, groups), random(rows + own - j, groups)) for j in range(1, own + 1)]
    order = place.argsort() if shuffled else None
    return Case(random(rows, heads, scale), random(keys, groups), random(keys, groups), Spans(parts, order), pairs)


def dense(case: Case) -> torch.Tensor:
    """One softmax per row over the keys that the definition names."""
    rows = range(len(case.query)) if case.spans.order is None else case.spans.order.tolist()
    out = [None] * len(case.query)
    repeat = case.query.shape[1] // case.keys.shape[1]
    for span in case.spans.parts:
        for asked in range(span.start, span.stop):
            row, seen = rows[asked], span.own + asked - span.start + 1
            keys = torch.cat([case.keys[span.first : seen], *[key[row][None] for key, _ in case.own]])
            values = torch.cat([case.values[span.first : seen], *[value[row][None] for _, value in case.own]])
            keys, values = keys.repeat_interleave(repeat, 1), values.repeat_interleave(repeat, 1)
            weights = (torch.einsum("qe,sqe->sq", case.query[row], keys) / case.query.shape[2] ** 0.5).softmax(0)
            out[row] = torch.einsum("sq,sqe->qe", weights, values)
    return torch.stack(out) if out else case.query + sum(x.sum() * 0 for x in case.tensors)


def outcome(function, case: Case, probe: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients."""
    out = function(case)
    grads = torch.autograd.grad((out * probe.to(out.dtype)).sum(), case.tensors)
    assert all(grad.dtype == tensor.dtype for grad, tensor in zip(grads, case.tensors))
    return [out.detach(), *grads]


def attended(case: Case) -> torch.Tensor:
    """The code under test."""
    return rollout_attention(case.query, case.keys, case.values, case.spans, case.own)


def errors(case: Case, dtype: torch.dtype, device: str = "cpu") -> list[float]:
    """The largest error of the output and of each gradient in `dtype`, relative to the largest entry. The dense softmax gets
    the same rounded inputs, in fp64.
    """
    rounded = case.like(dtype)
    probe = torch.randn(case.query.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    wanted = outcome(dense, rounded.like(torch.float64), probe)
    ours = rounded.like(dtype)
    if device != "cpu":
        order = None if case.spans.order is None else case.spans.order.to(device)
        query, keys, values, *flat = (x.detach().to(device).requires_grad_() for x in ours.tensors)
        ours = Case(query, keys, values, Spans(case.spans.parts, order), list(zip(flat[::2], flat[1::2])))
    found = [x.cpu() for x in outcome(attended, ours, probe.to(device))]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == dtype
        assert ours.isfinite().all()
    largest = [max(float(x.abs().max()), 0.1) if x.numel() else 1.0 for x in wanted]
    return [
        float((a.double() - b).abs().max()) / size if a.numel() else 0.0 for a, b, size in zip(found, wanted, largest)
    ]


def assert_right(case: Case, dtype: torch.dtype, tolerance: tuple[float, float], device: str = "cpu") -> None:
    """Values and gradients within their tolerances."""
    value, *grads = errors(case, dtype, device)
    assert value <= tolerance[0], f"value: {value}"
    assert max(grads) <= tolerance[1], f"gradients: {grads}"


# Kernels. FlashAttention for GPUs runs here on a model of its variable-length interface in plain torch.


def sequences(cum_q: torch.Tensor, cum_k: torch.Tensor):
    """Queries and keys of each sequence, and its mask: causal, aligned at the bottom right."""
    for (q0, q1), (k0, k1) in zip(itertools.pairwise(cum_q.tolist()), itertools.pairwise(cum_k.tolist())):
        later = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).triu(k1 - k0 - (q1 - q0) + 1)
        yield slice(q0, q1), slice(k0, k1), later


def check_layout(query, key, value, cum_q, cum_k, max_q, max_k, dropout, causal) -> None:
    """What the CUDA kernel demands."""
    assert (dropout, causal) == (0.0, True)
    for edges, longest, count in ((cum_q, max_q, len(query)), (cum_k, max_k, len(key))):
        assert edges.dtype == torch.int32
        assert edges.is_contiguous()
        assert (int(edges[0]), int(edges[-1])) == (0, count)
        assert int(edges.diff().max()) == longest
    assert len(key) == len(value)
    assert all(x.stride(-1) == 1 for x in (query, key, value))


def flash_scores(query, key, later):
    """Scaled scores [Q, n, m]."""
    repeat = query.shape[1] // key.shape[1]
    scores = torch.einsum("nqe,mqe->qnm", query, key.repeat_interleave(repeat, 1)) * query.shape[2] ** -0.5
    return scores.masked_fill(later, -torch.inf)


def flash_forward(query, key, value, cum_q, cum_k, max_q, max_k, dropout, causal, debug):
    """aten._flash_attention_forward: output and log-sum-exp [Q, total]."""
    check_layout(query, key, value, cum_q, cum_k, max_q, max_k, dropout, causal)
    out, lse = torch.empty_like(query), query.new_empty(query.shape[1], len(query))
    repeat = query.shape[1] // key.shape[1]
    for rows, seen, later in sequences(cum_q, cum_k):
        scores = flash_scores(query[rows], key[seen], later)
        lse[:, rows] = scores.logsumexp(-1)
        out[rows] = torch.einsum("qnm,mqe->nqe", scores.softmax(-1), value[seen].repeat_interleave(repeat, 1))
    return out, lse, None, None, None


def flash_backward(grad, query, key, value, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, seed, offset):
    """aten._flash_attention_backward: probabilities are made again from the given log-sum-exp."""
    check_layout(query, key, value, cum_q, cum_k, max_q, max_k, dropout, causal)
    assert lse.shape == (query.shape[1], len(query))
    assert lse.is_contiguous()
    found = tuple(torch.zeros_like(x) for x in (query, key, value))
    repeat = query.shape[1] // key.shape[1]
    for rows, seen, later in sequences(cum_q, cum_k):
        weights = (flash_scores(query[rows], key[seen], later) - lse[:, rows, None]).exp()
        delta = (grad[rows] * out[rows]).sum(-1).T[..., None]
        spread = value[seen].repeat_interleave(repeat, 1)
        slope = weights * (torch.einsum("nqe,mqe->qnm", grad[rows], spread) - delta) * query.shape[2] ** -0.5
        found[0][rows] = torch.einsum("qnm,mqe->nqe", slope, key[seen].repeat_interleave(repeat, 1))
        for place, parts in ((1, (slope, query)), (2, (weights, grad))):
            each = torch.einsum("qnm,nqe->mqe", parts[0], parts[1][rows])
            found[place][seen] = each.unflatten(1, (-1, repeat)).sum(2)
    return found


@pytest.fixture(params=["CpuFlash", "CpuFlash, cut", "Blockwise", "CudaFlash"])
def kernel(request, monkeypatch):
    """Each kernel in turn: in pieces of a few rows where it works in pieces, CudaFlash over the model of its interface."""
    name, _, cut = request.param.partition(", ")
    chosen = getattr(attention, name)
    monkeypatch.setattr(attention, "choose_kernel", lambda query, values: chosen)
    monkeypatch.setattr(Blockwise, "ROWS", 3)
    if cut:
        monkeypatch.setattr(CpuFlash, "ROWS", 2)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_forward, raising=False)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash_backward, raising=False)
    return chosen


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_dense_softmax_in_every_layout(kernel, layout, dtype):
    """Documents, runs, prompts, single rows; rows in order and not; 0 … 4 own keys."""
    for own in range(5):
        case = make_case(LAYOUTS[layout], own=own, shuffled=own % 2 == 1, seed=own)
        assert_right(case, dtype, DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "groups"), GROUPS)
def test_equals_dense_softmax_in_every_shape(kernel, heads, groups, dtype):
    """Grouped heads and head widths, in a batch of several documents."""
    for width in WIDTHS:
        assert_right(make_case(LAYOUTS["documents"], heads, groups, width, seed=width), dtype, DTYPES[dtype])


@pytest.mark.parametrize("width", [1, 3])
def test_odd_widths(width):
    """Widths that no vector unit likes."""
    assert_right(make_case(LAYOUTS["documents"], width=width), torch.float64, DTYPES[torch.float64])


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("kernel_name", ["CpuFlash", "Blockwise"])
def test_half_precision_is_near_the_dense_softmax(monkeypatch, kernel_name, dtype):
    """Against fp64 of the same rounded inputs; scores of a few units."""
    monkeypatch.setattr(attention, "choose_kernel", lambda query, values: getattr(attention, kernel_name))
    for (heads, groups), width, own in ((GROUPS[0], 8, 0), (GROUPS[1], 80, 2), (GROUPS[2], 24, 4), (GROUPS[3], 2, 3)):
        assert_right(make_case(LAYOUTS["documents"], heads, groups, width, own, dtype=dtype), dtype, HALF[dtype])


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_own_keys_are_as_exact_as_step_0_keys_in_half_precision(dtype):
    """Scores of ±20, where a log-sum-exp rounded to half precision would scale all weights of a row (0.06 in bfloat16)."""
    for seed in range(4):
        case = make_case(LAYOUTS["whole"], own=3, scale=8.0, seed=seed)
        value, _, *context_and_own = errors(case, dtype)
        context, own = max(context_and_own[:2]), max(context_and_own[2:])
        assert own <= max(3 * context, 1.5 * HALF[dtype][1]), (seed, context, own, value)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_layout_equals_dense_softmax(data):
    """Kernels alike, by random layouts, heads and numbers of own keys."""
    layout = []
    for _ in range(data.draw(st.integers(1, 4))):
        length = data.draw(st.integers(1, 10))
        marks = data.draw(st.lists(st.integers(0, length), max_size=6, unique=True).map(sorted))
        layout.append((length, list(zip(marks[0::2], marks[1::2]))))
    case = make_case(layout, *data.draw(st.sampled_from(GROUPS)), own=data.draw(st.integers(0, 4)), width=4)
    chosen, rows, cut = attention.choose_kernel, Blockwise.ROWS, CpuFlash.ROWS
    try:
        Blockwise.ROWS = CpuFlash.ROWS = data.draw(st.integers(1, 5))
        for name in ("CpuFlash", "Blockwise"):
            attention.choose_kernel = lambda query, values, name=name: getattr(attention, name)
            assert_right(case, torch.float64, DTYPES[torch.float64])
    finally:
        attention.choose_kernel, Blockwise.ROWS, CpuFlash.ROWS = chosen, rows, cut


@pytest.mark.parametrize("own", [0, 1, 3])
@pytest.mark.parametrize("layout", [[(3, [])], [(3, []), (2, [])]], ids=["one document", "two documents"])
def test_no_queries(layout, own):
    """Empty output, zero gradients for keys, values and the own keys of rows that have stopped."""
    case = make_case(layout, own=own, shuffled=False).like(torch.float32)
    out = attended(case)
    assert out.shape == (0, 6, 8)
    for grad, tensor in zip(torch.autograd.grad(out.sum(), case.tensors), case.tensors):
        assert grad.shape == tensor.shape
        assert not grad.any()


def test_no_queries_on_a_gpu(monkeypatch):
    """A step that no row reaches, or a rank without work, in half precision: nothing is launched, nothing raised."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        query, keys = (torch.empty(count, 4, 8, dtype=torch.bfloat16, device="cuda") for count in (0, 3))
        out = rollout_attention(query, keys, keys, Spans([]), [])
        lse_NQ = torch.empty(0, 4, device="cuda")
        grads = attention.context_backward(out, query, keys, keys, out, lse_NQ, Spans([]))
    assert [x.shape for x in (out, *grads)] == [query.shape, query.shape, keys.shape, keys.shape]


def test_flash_for_gpus_is_called_as_pytorch_describes_it(monkeypatch):
    """On PyTorch's own description of the kernel: shapes, dtypes and arguments of both calls."""
    monkeypatch.setattr(attention, "choose_kernel", lambda query, values: CudaFlash)
    for layout in LAYOUTS.values():
        case = make_case(layout, width=16, dtype=torch.bfloat16)
        query, keys, values, *flat = (x.to("meta").requires_grad_() for x in case.tensors)
        spans = Spans(case.spans.parts, case.spans.order.to("meta"))
        out = attended(Case(query, keys, values, spans, list(zip(flat[::2], flat[1::2]))))
        out.sum().backward()
        assert (out.shape, out.dtype) == (query.shape, torch.bfloat16)
        assert all(x.grad.shape == x.shape for x in (query, keys, values, *flat))


def test_rows_that_have_stopped_get_no_gradient():
    """The own keys of more rows than ask: their tail is not read, and its gradient is zero."""
    case = make_case(LAYOUTS["documents"], own=3)
    spoiled = case.like(torch.float64)
    for pair in spoiled.own:
        for part in pair:
            part.data[len(case.query) :] = torch.nan
    assert [len(key) - len(case.query) for key, _ in case.own] == [2, 1, 0]
    probe = torch.ones_like(case.query)
    clean, found = (outcome(attended, one, probe) for one in (case.like(torch.float64), spoiled))
    for ours, theirs in zip(found, clean):
        assert torch.equal(ours, theirs)
    for grad in found[4:]:
        assert grad[: len(case.query)].any()
        assert not grad[len(case.query) :].any()


def test_any_strides(kernel):
    """Transposed, sliced and expanded inputs, and an expanded gradient, give what contiguous ones do."""
    case = make_case(LAYOUTS["documents"], heads=6, groups=2, width=8, own=2)

    def strided(query, keys, values, *flat):
        flat = [part.transpose(0, 2).contiguous().transpose(0, 2) for part in flat]
        query, keys = query.transpose(0, 1).contiguous().transpose(0, 1), torch.stack([keys, keys], 2)[:, :, 1]
        sides = [query, keys, torch.cat([values, values], -1)[..., 8:], *flat]
        assert not any(x.is_contiguous() for x in sides)
        return sides

    found = []
    for view in (lambda *sides: sides, strided):
        leaves = case.like(torch.float64).tensors
        query, keys, values, *flat = view(*leaves)
        out = attended(Case(query, keys, values, case.spans, list(zip(flat[::2], flat[1::2]))))
        found.append([out, *torch.autograd.grad(out.sum(), leaves)])
    for ours, theirs in zip(*found):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_large_scores(kernel, dtype):
    """Scores of ±200: whichever of context and own keys wins takes all, and nothing overflows."""
    for seed in range(3):
        case = make_case(LAYOUTS["documents"], width=8, own=2, scale=60.0, seed=seed)
        with torch.no_grad():
            scores = torch.einsum("nqe,mqe->qnm", case.query, case.keys.repeat_interleave(3, 1)) * 8**-0.5
        assert scores.max() > 150
        assert scores.min() < -150
        assert_right(case, dtype, {torch.float64: (1e-11, 1e-11), torch.float32: (2e-4, 2e-4)}[dtype])


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_a_key_that_takes_all(dtype, sign):
    """All context at +200 and the own key at -200, or the reverse: the output is the winner's value alone."""
    query, keys, values = torch.full((3, 1, 4), 10.0), torch.full((3, 1, 4), 10.0 * sign), torch.ones(3, 1, 4)
    own = (torch.full((3, 1, 4), -10.0 * sign), torch.full((3, 1, 4), 5.0))
    case = Case(query, keys, values, Spans([Span(0, 3, 0, 0)]), [own]).like(dtype)
    out, *grads = outcome(attended, case, torch.ones(3, 1, 4))
    assert (out == (1.0 if sign > 0 else 5.0)).all()
    assert all(grad.isfinite().all() for grad in grads)
    assert grads[4].any() == (sign < 0)


def test_gradients_are_true_to_finite_differences():
    """gradcheck, of a case of every part."""
    case = make_case([(4, [(0, 1), (2, 4)]), (2, [(1, 2)])], heads=2, groups=1, width=2, own=2).like(torch.float64)

    def function(query, keys, values, *flat):
        return rollout_attention(query, keys, values, case.spans, list(zip(flat[::2], flat[1::2])))

    assert torch.autograd.gradcheck(function, case.tensors)


def test_two_backward_passes_and_shared_inputs():
    """The gradient does not spoil what is saved; one tensor as keys and values, and as two own pairs, gets the sum."""
    case = make_case(LAYOUTS["after a prompt"], own=1, shuffled=False).like(torch.float64)
    (key, _), out = case.own[0], None
    shared = Case(case.query, case.keys, case.keys, case.spans, [(key, key), (key, key)])
    out = attended(shared)
    probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    leaves = [case.query, case.keys, key]
    first = torch.autograd.grad(out, leaves, probe, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(out, leaves, probe)))
    for ours, theirs in zip(first, torch.autograd.grad(dense(shared), leaves, probe)):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-13)


# The layout of variable length


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gather_and_scatter_are_adjoint(layout):
    """⟨gather(x), y⟩ = ⟨x, scatter(y)⟩, with keys copied only where the spans do not lie side by side."""
    keys = sum(length for length, _ in LAYOUTS[layout])
    packed = pack_spans(spans_of(LAYOUTS[layout]), keys, torch.device("cpu"))
    assert (packed.index is None) == (layout in ("whole", "after a prompt", "one key", "documents, one run each"))
    x = torch.arange(keys * 6, dtype=torch.float64).view(keys, 2, 3)
    gathered = packed.gather(x)
    y = torch.randn(gathered.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.allclose((gathered * y).sum(), (x * packed.scatter(y, keys)).sum(), rtol=1e-12)
    assert packed.scatter(y, keys).shape == x.shape


def test_packed_by_hand():
    """Two runs in a document of six keys, and one of a document of three: the keys of each, up to its last row."""
    parts = [Span(0, 2, 0, 1), Span(2, 3, 0, 4), Span(3, 5, 6, 7)]
    packed = pack_spans(parts, 9, torch.device("cpu"))
    assert [edges.tolist() for edges in packed.edges] == [[0, 2, 3, 5], [0, 3, 8, 11]]
    assert packed.longest == (2, 5)
    assert packed.index.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 6, 7, 8]


def test_packed_is_made_once():
    spans = Spans(spans_of(LAYOUTS["documents"]))
    assert spans.packed_on(torch.device("cpu"), 29) is spans.packed_on(torch.device("cpu"), 29)


# Memory


class Largest(TorchDispatchMode):
    """The number of entries of the largest tensor that any operation gives back."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for part in out if isinstance(out, tuple | list) else [out]:
            if isinstance(part, torch.Tensor):
                self.entries = max(self.entries, part.untyped_storage().nbytes() // part.element_size())
        return out


@pytest.mark.parametrize(("name", "most"), [("CpuFlash", 16), ("Blockwise", 64)])
def test_no_matrix_of_scores(monkeypatch, name, most):
    """1500 rows over 1500 keys and four own: nothing that is made has more entries per row than the own keys together, or a
    block of scores; nothing that is kept has more than an input.
    """
    rows, width = 1500, 4
    monkeypatch.setattr(attention, "choose_kernel", lambda query, values: getattr(attention, name))
    monkeypatch.setattr(Blockwise, "ROWS", 64)
    case = make_case([(rows, [(0, rows)])], 1, 1, width, own=4, shuffled=False).like(torch.float32)
    kept = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x),
        Largest() as watch,
    ):
        flat = [part for pair in case.own for part in pair]
        Merged.apply(case.query, case.keys, case.values, case.spans, None, *flat).sum().backward()
    assert case.keys.grad.any()
    assert max(kept) <= (rows + 4) * width
    assert rows * width <= watch.entries <= most * rows


# A device that answers no questions


class OneDevice(TorchDispatchMode):
    """Refuses what would copy from the host on the way: an operation on tensors of the host and the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [
            x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.dim()
        ]
        if len({x.device.type for x in tensors}) > 1 and "copy" not in func.__name__:
            raise RuntimeError(f"{func} on {[x.device.type for x in tensors]}")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def no_autocast(monkeypatch):
    """Autocast for devices that have none."""
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("learned", [True, False], ids=["learned", "nothing to learn"])
def test_nothing_is_asked_of_the_device(no_autocast, monkeypatch, kind, learned):
    """A whole loss with its gradients on the meta device, where a value that the host waits for is an error; in bf16 with
    FlashAttention as PyTorch describes it.
    """
    target = make_target()
    head = make_tiny_head(target, steps=3).to(getattr(torch, kind))
    batch = pack(documents_for(target))
    if kind == "bfloat16" and learned:
        monkeypatch.setattr(attention, "choose_kernel", lambda query, values: CudaFlash if len(query) else Blockwise)
    target.model.to("meta")
    batch = (batch if learned else batch.without_loss()).to("meta", getattr(torch, kind))
    head.to("meta")
    with OneDevice():
        out = head.loss(batch, target)
        out.total.backward()
    assert out.total.device.type == "meta"
    assert all(top.device.type == bottom.device.type == "meta" for top, bottom in out.metrics.values())
    assert all(weight.grad is not None for weight in head.parameters())


# A GPU

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.cuda
@GPU
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_flash_on_a_gpu_equals_dense_softmax(layout, dtype):
    """FlashAttention itself, in every layout and width that it takes."""
    for own in range(3):
        for (heads, groups), width in zip(GROUPS, (8, 24, 80, 128)):
            case = make_case(LAYOUTS[layout], heads, groups, width, own, shuffled=own == 1)
            assert attention.choose_kernel(*[case.query.to("cuda", dtype)] * 2) is CudaFlash
            assert_right(case, dtype, HALF[dtype], "cuda")


@pytest.mark.cuda
@GPU
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blockwise_on_a_gpu_equals_dense_softmax(layout):
    """fp32, for which there is no flash kernel."""
    for own in range(3):
        case = make_case(LAYOUTS[layout], 6, 2, 24, own, shuffled=own == 1)
        assert attention.choose_kernel(*[case.query.to("cuda", torch.float32)] * 2) is Blockwise
        assert_right(case, torch.float32, (2e-5, 2e-5), "cuda")


@pytest.mark.cuda
@GPU
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_no_step_waits_for_the_gpu(autocast):
    """A loss and its gradients with every wait an error, equal to those of the CPU."""
    target = make_target()
    head = make_tiny_head(target, steps=3)
    batch = pack(documents_for(target))
    wanted = head.loss(batch, target).total
    wanted.backward()
    grads = {name: weight.grad.clone() for name, weight in head.named_parameters()}
    head.zero_grad()
    target.model.to("cuda")
    head, batch = head.to("cuda"), batch.to("cuda")
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        head.loss(batch, target).total.backward()  # the first call may set libraries up
    head.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            total = head.loss(batch, target).total
        total.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert float(total) == pytest.approx(float(wanted), rel=3e-2 if autocast else 1e-4)
    for name, weight in head.named_parameters():
        near = torch.cosine_similarity(weight.grad.cpu().flatten(), grads[name].flatten(), 0)
        assert near > (0.99 if autocast else 0.9999), name


@pytest.mark.cuda
@GPU
def test_a_rank_without_work_on_a_gpu():
    """Turns too short for the last steps, and nothing to learn, in bf16: a loss as on the CPU, and finite gradients."""
    target = make_target()
    head = make_tiny_head(target, steps=5)
    short = pack([make_document([False, True, True, True, False, True, True], 1, target)])
    batches = (short, short.without_loss())
    wanted = [float(head.loss(batch, target).total.detach()) for batch in batches]
    target.model.to("cuda")
    head.to("cuda")
    for batch, total in zip(batches, wanted):
        with torch.autocast("cuda", torch.bfloat16):
            out = head.loss(batch.to("cuda"), target).total
        out.backward()
        assert float(out) == pytest.approx(total, rel=3e-2)
        assert all(weight.grad.isfinite().all() for weight in head.parameters())


def test_the_plan_of_a_batch_is_what_the_kernels_expect():
    """Spans of a real plan through the variable-length layout: as many keys as a dense mask would let through."""
    target = make_target()
    batch = pack(documents_for(target))
    plan = plan_rows(batch, 3)
    for spans in [*plan.spans, plan.everything]:
        packed = pack_spans(spans.parts, len(plan.context_C), torch.device("cpu"))
        seen = sum(int((~later).sum()) for _, _, later in sequences(*packed.edges))
        rows = plan.context_C if spans is plan.everything else plan.rows_P[: packed.edges[0][-1]]
        assert seen == int((batch.position_T[rows] + 1).sum())
