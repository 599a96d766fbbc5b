"""Options of a rollout ≡ their plain forms: windows, values of another width, an lm_head per step, mixtures, one stream
for token and feature, curriculum, first drafts, norms of queries and keys; and what a window must not cost.
"""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import make_model, make_target, make_tiny_head, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention import GROUPS, HALF, LAYOUTS, Case, Largest, OneDevice, check_layout, make_case, no_autocast
from test_chunked import Operations, close, gradient_work, plain_loss
from test_chunked import make_case as make_work
from test_losses import NAMES, loss_named, random_logits, taught_and_guess
from test_ttt import MASKS, assert_all_close, documents_for, gradients, make_document, make_layers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config
from transformers.models.qwen3 import modeling_qwen3

import headwright.heads
from headwright.configs import UserError
from headwright.configs.load import build
from headwright.data.batch import loss_masks, pack, runs_of
from headwright.data.rows import Span, Spans, plan_rows
from headwright.data.target import Target
from headwright.data.vocab import DraftVocab
from headwright.heads import attention
from headwright.heads.attention import Blockwise, CpuFlash, CudaFlash, blocks, rollout_attention
from headwright.heads.base import make_head
from headwright.heads.chunked import Task, Weights, chunked_loss, plan_pairs
from headwright.heads.layers import Attention, Block, RMSNorm, Sizes, attend
from headwright.heads.losses import choose_loss, mixture
from headwright.heads.pair import Pair
from headwright.heads.recurrent import Drafting
from headwright.heads.ttt import context_outputs, dense_attention, rollout, rollout_reference, unchanged

assert no_autocast  # a fixture, used by its name
WIDTH = 32
WINDOWS = [1, 2, 3, 5, 8, 100]
# values and gradients, of the largest entry or 0.1: with a window of one key the gradient of a query is the rounding of zero
TOLERANCE = {torch.float64: (1e-12, 1e-12), torch.float32: (2e-6, 3e-5), torch.bfloat16: HALF[torch.bfloat16]}
LATE = LAYOUTS | {
    "late in a document": [(40, [(30, 40)]), (37, [(11, 13), (20, 37)])],
    "late, short runs": [(30, [(25, 26), (28, 30)]), (2, [(1, 2)]), (26, [(24, 26)])],
}


@pytest.fixture(scope="module")
def target64() -> Target:
    """The tiny llama in fp64."""
    return Target(make_model().double(), make_tokenizer(), "tiny-llama", (1, 3, 6))


def random(*shape: int, seed: int = 0, dtype=torch.float64) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# 1. Windows, in every kernel


def visible(spans: Spans, rows: int, keys: int, window: int | None) -> torch.Tensor:
    """Which keys each row sees [N, C], key by key, as the definition says."""
    seen = torch.zeros(rows, keys, dtype=torch.bool)
    place = range(rows) if spans.order is None else spans.order.tolist()
    for start, stop, first, own in spans.parts:
        for asked, key in itertools.product(range(start, stop), range(keys)):
            at = own + asked - start
            seen[place[asked], key] = first <= key <= at and (window is None or at - key < window)
    return seen


def dense(case: Case, window: int | None) -> torch.Tensor:
    """One softmax of each row, over the keys of its window and its own."""
    repeat = case.query.shape[1] // case.keys.shape[1]
    count = len(case.query)
    keys, values = (x.repeat_interleave(repeat, 1) for x in (case.keys, case.values))
    scores = [torch.einsum("nqe,mqe->nqm", case.query, keys)]
    seen = visible(case.spans, count, len(keys), window)
    scores[0] = scores[0].masked_fill(~seen[:, None], -torch.inf)
    scores += [(case.query * key[:count].repeat_interleave(repeat, 1)).sum(-1, keepdim=True) for key, _ in case.own]
    weights = (torch.cat(scores, -1) / case.query.shape[2] ** 0.5).softmax(-1)
    out = torch.einsum("nqm,mqe->nqe", weights[..., : len(keys)], values)
    for place, (_, value) in enumerate(case.own, len(keys)):
        out = out + weights[..., place, None] * value[:count].repeat_interleave(repeat, 1)
    return out


def attended(case: Case, window: int | None) -> torch.Tensor:
    """The code under test."""
    return rollout_attention(case.query, case.keys, case.values, case.spans, case.own, window)


def outcome(function, case: Case, window: int | None, seed: int = 9) -> list[torch.Tensor]:
    """Output, and the gradients of all inputs through a random probe."""
    out = function(case, window)
    probe = random(*out.shape, seed=seed, dtype=out.dtype)
    return [out.detach(), *torch.autograd.grad((out * probe).sum(), case.tensors)]


def assert_right(case: Case, window: int | None, dtype: torch.dtype, tolerance: tuple[float, float]) -> None:
    """Value and gradients near those of the dense softmax of the same rounded inputs in fp64; relative to the largest entry."""
    rounded = case.like(dtype)
    wanted = outcome(dense, rounded.like(torch.float64), window)
    found = outcome(attended, rounded, window)
    for ours, theirs, allowed in zip(found, wanted, [tolerance[0]] + [tolerance[1]] * len(found), strict=False):
        assert (ours.shape, ours.dtype) == (theirs.shape, dtype)
        size = max(float(theirs.abs().max()), 0.1) if theirs.numel() else 1.0
        assert ours.numel() == 0 or float((ours.double() - theirs).abs().max()) <= allowed * size, f"window {window}"


def flash_sequences(query, key, cum_q, cum_k, left, right):
    """Queries and keys of each sequence, and its scores in fp32 or wider: both windows count from the bottom right corner."""
    wide, repeat = torch.promote_types(query.dtype, torch.float32), query.shape[1] // key.shape[1]
    for (q0, q1), (k0, k1) in zip(itertools.pairwise(cum_q.tolist()), itertools.pairwise(cum_k.tolist())):
        at = torch.arange(q1 - q0)[:, None] + k1 - k0 - (q1 - q0)
        keys = torch.arange(k1 - k0)
        hidden = (keys > at + right) | (keys < at - left)
        spread = key[k0:k1].to(wide).repeat_interleave(repeat, 1)
        scores = torch.einsum("nqe,mqe->qnm", query[q0:q1].to(wide), spread) * query.shape[2] ** -0.5
        yield slice(q0, q1), slice(k0, k1), scores.masked_fill(hidden, -torch.inf)


def sides_of(causal: bool, window_size_left: int | None, window_size_right: int | None) -> tuple[int, int]:
    """How the kernel reads its arguments: causal is a right window of 0; none, or a negative one, is no limit."""
    wide_open = 1 << 30
    left, right = (wide_open if x is None or x < 0 else x for x in (window_size_left, window_size_right))
    return left, 0 if causal else right


def flash_forward(query, key, value, cum_q, cum_k, max_q, max_k, dropout, causal, debug, **window):
    """aten._flash_attention_forward: output and log-sum-exp [Q, total]."""
    check_layout(query, key, value, cum_q, cum_k, max_q, max_k, dropout, causal)
    repeat = query.shape[1] // key.shape[1]
    out, lse = torch.empty_like(query), query.new_empty(query.shape[1], len(query), dtype=torch.float64)
    lse = lse.to(torch.promote_types(query.dtype, torch.float32))
    for rows, seen, scores in flash_sequences(query, key, cum_q, cum_k, *sides_of(causal, **window_of(window))):
        lse[:, rows] = scores.logsumexp(-1)
        spread = value[seen].to(scores.dtype).repeat_interleave(repeat, 1)
        out[rows] = torch.einsum("qnm,mqe->nqe", scores.softmax(-1), spread).to(query.dtype)
    return out, lse, None, None, None


def flash_backward(
    grad, query, key, value, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, seed, offset, **window
):
    """aten._flash_attention_backward: probabilities are made again from the given log-sum-exp."""
    check_layout(query, key, value, cum_q, cum_k, max_q, max_k, dropout, causal)
    assert lse.is_contiguous()
    wide, repeat = lse.dtype, query.shape[1] // key.shape[1]
    found = tuple(torch.zeros_like(x, dtype=wide) for x in (query, key, value))
    for rows, seen, scores in flash_sequences(query, key, cum_q, cum_k, *sides_of(causal, **window_of(window))):
        weights = (scores - lse[:, rows, None]).exp()
        above = grad[rows].to(wide)
        delta = (above * out[rows].to(wide)).sum(-1).T[..., None]
        spread_keys, spread = (x[seen].to(wide).repeat_interleave(repeat, 1) for x in (key, value))
        slope = weights * (torch.einsum("nqe,mqe->qnm", above, spread) - delta) * query.shape[2] ** -0.5
        found[0][rows] = torch.einsum("qnm,mqe->nqe", slope, spread_keys)
        for place, parts in ((1, (slope, query[rows].to(wide))), (2, (weights, above))):
            found[place][seen] = torch.einsum("qnm,nqe->mqe", *parts).unflatten(1, (-1, repeat)).sum(2)
    return tuple(part.to(query.dtype) for part in found)


def window_of(keywords: dict) -> dict:
    """The keywords that a window may come in, and no others."""
    assert keywords.keys() <= {"window_size_left", "window_size_right"}
    return {"window_size_left": None, "window_size_right": None} | keywords


def use_kernel(patch, name: str) -> None:
    """One kernel, in pieces of a few rows where it works in pieces; CudaFlash over the model of its interface."""
    name, _, cut = name.partition(", ")
    patch.setattr(attention, "choose_kernel", lambda query, values: getattr(attention, name))
    patch.setattr(Blockwise, "ROWS", 3)
    if cut:
        patch.setattr(CpuFlash, "ROWS", 2)
    patch.setattr(torch.ops.aten, "_flash_attention_forward", flash_forward, raising=False)
    patch.setattr(torch.ops.aten, "_flash_attention_backward", flash_backward, raising=False)


KERNELS = ["CpuFlash", "CpuFlash, cut", "Blockwise", "CudaFlash"]


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch) -> str:
    """Each kernel in turn."""
    use_kernel(monkeypatch, request.param)
    return request.param


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("layout", LATE)
def test_window_equals_dense_softmax(kernel, layout, dtype):
    """Windows of one key, of fewer and of more than spans and documents hold; 0 … 3 own keys; rows in order and not."""
    for number, window in enumerate(WINDOWS):
        heads = GROUPS[number % len(GROUPS)]
        case = make_case(LATE[layout], *heads, own=number % 4, shuffled=number % 2 == 1, seed=number, dtype=dtype)
        assert_right(case, window, dtype, TOLERANCE[dtype])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_window_in_any_layout(data):
    """All kernels alike, in pieces of 1 … 5 rows."""
    layout = []
    for _ in range(data.draw(st.integers(1, 4))):
        length = data.draw(st.integers(1, 16))
        marks = data.draw(st.lists(st.integers(0, length), max_size=6, unique=True).map(sorted))
        layout.append((length, list(zip(marks[0::2], marks[1::2]))))
    window, rows = data.draw(st.integers(1, 18)), data.draw(st.integers(1, 5))
    shape = {"own": data.draw(st.integers(0, 3)), "shuffled": data.draw(st.booleans())}
    case = make_case(layout, *data.draw(st.sampled_from(GROUPS)), **shape, width=4, seed=data.draw(st.integers(0, 99)))
    for name in KERNELS[1:] if len(case.query) else KERNELS[1:3]:
        with pytest.MonkeyPatch.context() as patch:
            use_kernel(patch, name)
            patch.setattr(Blockwise, "ROWS", rows)
            patch.setattr(CpuFlash, "ROWS", rows)
            assert_right(case, window, torch.float64, TOLERANCE[torch.float64])


def test_a_window_larger_than_every_document_is_none(kernel):
    """Also one that is just as long as the longest, and none that is shorter."""
    case = make_case(LATE["late in a document"])
    wanted, *near = (outcome(attended, case.like(torch.float64), window) for window in (None, 40, 1000, 39))
    for found in near[:2]:
        for ours, theirs in zip(found, wanted):
            assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-13)
    assert not torch.allclose(near[2][0], wanted[0], rtol=1e-6)


def test_what_lies_before_every_window_is_not_read(kernel):
    """Whatever stands there changes no bit, and gets no gradient."""
    case, window = make_case(LATE["late in a document"], own=2), 4
    seen = visible(case.spans, len(case.query), len(case.keys), window).any(0)
    assert 0 < int(seen.sum()) < len(seen)
    found = []
    for factor in (1.0, 1e3):
        changed = case.like(torch.float64)
        for part in (changed.keys, changed.values):
            part.data[~seen] *= factor
        found.append(outcome(attended, changed, window))
    assert all(map(torch.equal, *found))
    assert not any(grad[~seen].any() for grad in found[0][2:4])


def test_a_window_of_one_key_and_no_own_ones_gives_that_keys_value(kernel):
    case = make_case([(9, [(2, 9)]), (4, [(0, 4)])], 6, 2, own=0, shuffled=False)
    found, for_query, for_keys, _ = outcome(attended, case.like(torch.float64), 1)
    mine = torch.cat([case.values[2:9], case.values[9:13]]).repeat_interleave(3, 1)
    assert torch.allclose(found, mine, rtol=1e-12)
    assert max(float(for_query.abs().max()), float(for_keys.abs().max())) < 1e-13


@settings(max_examples=60, deadline=None)
@given(first=st.integers(0, 4), own=st.integers(0, 12), count=st.integers(1, 9), extra=st.integers(0, 9))
def test_blocks_bring_every_visible_pair_together_once(first, own, count, extra):
    """The parts of a span: what each lets through, added up, is the window; what is causal is so from its first pair on."""
    span = Span(3, 3 + count, first, first + own)
    for window in (count + extra, None):
        met = torch.zeros(3 + count, first + own + count, dtype=torch.long)
        for part in blocks(span, window):
            rows, keys = torch.arange(len(met))[part.rows], torch.arange(met.shape[1])[part.keys]
            passes = torch.ones(len(rows), len(keys), dtype=torch.long)
            passes = passes.tril() if part.causal else passes
            met[part.rows, part.keys] += passes.flip(0, 1) if part.flipped else passes
        if window is not None and part.flipped:
            assert len(keys) <= len(rows)
        place = Spans([Span(0, count, *span[2:])])
        assert torch.equal(met[3:], visible(place, count, met.shape[1], window).long())
        assert not met[:3].any()


class Flash(TorchDispatchMode):
    """The (query, key) pairs that PyTorch's flash kernel for the CPU was handed, forward and backward."""

    def __init__(self):
        super().__init__()
        self.forward, self.backward = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "flash_attention_for_cpu_backward" in func.__name__:
            self.backward += args[1].shape[2] * args[2].shape[2]
        elif "flash_attention_for_cpu" in func.__name__:
            self.forward += args[0].shape[2] * args[1].shape[2]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows_per_part", [7, 192])
def test_the_work_grows_with_the_window_and_not_with_the_text(monkeypatch, rows_per_part):
    """As many pairs late in a long text as in a short one; linear in rows and window."""
    monkeypatch.setattr(CpuFlash, "ROWS", rows_per_part)
    monkeypatch.setattr(CpuFlash, "MANY", 500)
    count, found = 300, {}
    for length, window in itertools.product((400, 900, 3000), (5, 40, 80)):
        case = make_case([(length, [(length - count, length)])], 2, 1, 2, 0, shuffled=False).like(torch.float32)
        with Flash() as flash:
            attended(case, window).sum().backward()
        parts = [part for span in CpuFlash.cut(case.spans, window) for part in blocks(span, window)]
        planned = sum((p.rows.stop - p.rows.start) * (p.keys.stop - p.keys.start) for p in parts)
        assert flash.forward == flash.backward == planned
        assert count * window <= planned <= 2 * count * window
        found.setdefault(window, set()).add(planned)
    assert all(len(planned) == 1 for planned in found.values()), found
    with Flash() as flash:
        attended(case, None)
    assert flash.forward > 10 * max(found[80])


# 2. Values of another width


def with_values(case: Case, width: int) -> Case:
    """The same queries and keys, with values of another width."""
    values = random(*case.values.shape[:2], width, seed=1)
    own = [(key, random(*key.shape[:2], width, seed=2 + place)) for place, (key, _) in enumerate(case.own)]
    return Case(case.query, case.keys, values, case.spans, own)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [1, 5, 24])
@pytest.mark.parametrize("layout", ["documents", "late in a document"])
def test_values_of_another_width_equal_dense_softmax(monkeypatch, layout, width, dtype):
    """Narrower and wider than queries and keys (MLA), with windows and own keys; the scale is that of the queries."""
    monkeypatch.setattr(Blockwise, "ROWS", 3)
    for own, window in itertools.product(range(3), (None, 1, 4)):
        case = with_values(make_case(LATE[layout], *GROUPS[own], own=own, shuffled=own == 1, seed=own), width)
        assert attention.choose_kernel(case.query, case.values) is Blockwise
        assert attended(case, window).shape == (*case.query.shape[:2], width)
        assert_right(case, window, dtype, TOLERANCE[dtype])


def test_values_of_another_width_without_queries():
    case = with_values(make_case([(3, [])], own=2, shuffled=False), 5).like(torch.float32)
    out = attended(case, 2)
    assert out.shape == (0, 6, 5)
    grads = torch.autograd.grad(out.sum(), case.tensors)
    assert all(grad.shape == x.shape and not grad.any() for grad, x in zip(grads, case.tensors))


# 3. An lm_head per step


WEIGHTS = {"decay": Weights(0.7), "dpace": Weights(dpace_floor=0.4)}


def with_heads(case) -> list[torch.Tensor]:
    """A weight for each step."""
    like = case.weight_WH
    return [
        like.new_tensor(2 / like.shape[1] ** 0.5) * random(*like.shape, seed=50 + i, dtype=like.dtype)
        for i in range(case.rows.steps)
    ]


def plain_of(case, loss: str, weights: Weights, heads, features):
    """All logits at once: one wide lm_head, of which every step's features reach their own columns only."""
    width = heads[0].shape[1]
    wide = [torch.nn.functional.pad(part, (i * width, (len(heads) - 1 - i) * width)) for i, part in enumerate(features)]
    return plain_loss(case, loss, weights, [torch.cat(heads, 1), *wide])


def leaves_of(*parts) -> list[torch.Tensor]:
    return [part.detach().clone().requires_grad_() for part in itertools.chain(*parts)]


def compare_heads(case, loss: str, weights: Weights, per_chunk: int, tolerance: float) -> None:
    """Total, metrics, and the gradients of every weight and of every step's features."""
    heads, count = with_heads(case), case.rows.steps
    ours, theirs = leaves_of(heads, case.features), leaves_of(heads, case.features)
    total, sums = chunked_loss(case.task(loss, weights, per_chunk), ours[:count], ours[count:])
    wanted, wanted_sums = plain_of(case, loss, weights, theirs[:count], theirs[count:])
    assert close(total.detach(), wanted.detach(), tolerance)
    assert close(sums, wanted_sums, tolerance)
    found = torch.autograd.grad(total, ours)
    for leaf, mine, their in zip(ours, found, torch.autograd.grad(wanted, theirs, allow_unused=True)):
        assert mine.dtype == leaf.dtype
        assert close(mine, torch.zeros_like(leaf) if their is None else their, tolerance)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("loss", [*NAMES[:7], "topk"])
def test_a_weight_per_step_equals_autograd(loss, weights):
    """All losses; chunks of one row, of a few, of all."""
    for per_chunk, ranged in ((1, False), (4, True), (5, False), (1000, True)):
        compare_heads(make_work(13, 17, 5, ranged=ranged, seed=per_chunk), loss, WEIGHTS[weights], per_chunk, 1e-12)


@pytest.mark.parametrize("progress", [0.0, 0.5, 1.0])
def test_every_head_of_medusa_has_its_own(target64, progress):
    """The loss by hand, head by head; as many as the curriculum has reached."""
    head, batch = own_head("medusa", target64, steps=3, curriculum=1.0, step_weight=0.5), pack(documents_for(target64))
    head.engine.progress = progress
    out, steps, wanted = head.loss(batch, target64), head.steps_now(), 0.0
    assert steps == 1 + int(2.5 * progress)
    plan = plan_rows(batch, steps, head.choices_V[batch.argmax_R] >= 0)
    with torch.no_grad():
        for i, output in enumerate(head.outputs(batch, target64, plan)):
            rows = torch.nonzero(plan.bears_PI[:, i])[:, 0]
            p = target64.logits(batch.last_RD[plan.target_PI[rows, i]], head.ids_W).softmax(-1)
            logq = (output[rows] @ head.lm_heads[i].weight.T).log_softmax(-1)
            wanted += 0.5**i * float((p * (p.log() - logq)).sum())
    assert float(out.total.detach()) == pytest.approx(wanted, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 14),
    steps=st.integers(1, 5),
    per_chunk=st.integers(1, 16),
    loss=st.sampled_from(["kl", "jsd", "lk", "topk"]),
    weights=st.sampled_from(list(WEIGHTS)),
    seed=st.integers(0, 999),
)
def test_a_weight_per_step_in_any_chunks(rows, steps, per_chunk, loss, weights, seed):
    compare_heads(make_work(rows, 9, 4, steps, seed=seed), loss, WEIGHTS[weights], per_chunk, 1e-11)


@pytest.mark.parametrize("loss", ["kl", "nla", "topk"])
def test_the_same_weight_for_each_step_is_one_weight(loss):
    """Its gradient is the sum of theirs."""
    case = make_work(13, 17, 5)
    ours, theirs = leaves_of([case.weight_WH] * 3, case.features), case.leaves()
    total, sums = chunked_loss(case.task(loss, WEIGHTS["dpace"], 4), ours[:3], ours[3:])
    wanted, wanted_sums = chunked_loss(case.task(loss, WEIGHTS["dpace"], 4), theirs[:1], theirs[1:])
    assert torch.allclose(total, wanted, rtol=1e-12)
    assert torch.allclose(sums, wanted_sums, rtol=1e-12)
    found, whole = torch.autograd.grad(total, ours), torch.autograd.grad(wanted, theirs)
    for mine, their in zip([sum(found[:3]), *found[3:]], whole):
        assert torch.allclose(mine, their, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("loss", [*NAMES[:7], "topk"])
def test_a_weight_per_step_in_bf16_under_autocast(loss, weights):
    """fp32 features beside weights in bf16 or fp32: what the same inputs in bf16 give, and near the plain form of these."""
    case = make_work(30, 101, 16).to(torch.float32)
    heads, half = with_heads(case), case.to(torch.bfloat16)
    low = leaves_of([part.bfloat16() for part in heads], half.features)
    wanted, wanted_sums = chunked_loss(case.task(loss, WEIGHTS[weights], 4), low[:3], low[3:])
    wanted_grads = torch.autograd.grad(wanted, low)
    plain = leaves_of(low)
    by_hand, _ = plain_of(half, loss, WEIGHTS[weights], plain[:3], plain[3:])
    assert float(wanted.detach()) == pytest.approx(float(by_hand.detach()), rel=2e-2)
    for mine, their in zip(wanted_grads, torch.autograd.grad(by_hand, plain)):
        assert close(mine, their, 2e-2)
    for dtype in (torch.bfloat16, torch.float32):
        ours = leaves_of([part.to(dtype) for part in heads], case.features)
        with torch.autocast("cpu", torch.bfloat16):
            total, sums = chunked_loss(case.task(loss, WEIGHTS[weights], 4), ours[:3], ours[3:])
        assert torch.equal(total, wanted)
        assert torch.equal(sums, wanted_sums)
        for leaf, mine, their in zip(ours, torch.autograd.grad(total, ours), wanted_grads):
            assert mine.dtype == leaf.dtype
            assert torch.equal(mine.bfloat16(), their)


def test_frozen_weights_cost_no_gradient_and_change_no_other():
    """All of them, one of them; and none of the features."""
    case = make_work(13, 17, 5).to(torch.float32)
    whole = leaves_of(with_heads(case), case.features)
    task = case.task("lk", WEIGHTS["dpace"], 4)
    wanted_total = chunked_loss(task, whole[:3], whole[3:])[0]
    wanted = torch.autograd.grad(wanted_total, whole)
    for frozen in ({0, 1, 2}, {0}, {1}, {3, 4, 5}, {3}, {0, 1, 2, 4}, set(range(6))):
        leaves = leaves_of(whole)
        for place in frozen:
            leaves[place].requires_grad_(False)
        with Operations() as operations:
            total = chunked_loss(task, leaves[:3], leaves[3:])[0]
        assert torch.equal(total, wanted_total)
        work = gradient_work(operations)
        assert any(name.startswith("addmm_") for name in work) == (not frozen >= {0, 1, 2})
        assert any(name.startswith("index_copy_") for name in work) == (not frozen >= {3, 4, 5})
        if frozen == set(range(6)):
            assert not total.requires_grad
            continue
        total.backward()
        for place, (leaf, gradient) in enumerate(zip(leaves, wanted)):
            assert leaf.grad is None if place in frozen else torch.equal(leaf.grad, gradient)
    with torch.no_grad(), Operations() as operations:
        chunked_loss(task, whole[:3], whole[3:])
    assert not gradient_work(operations)


# 4. Mixtures of losses

SHARES = st.dictionaries(st.sampled_from(NAMES), st.sampled_from([0.0, 0.1, 0.7, 1.0, 2.5]), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(shares=SHARES, seed=st.integers(0, 999), width=st.integers(1, 40), order=st.randoms(use_true_random=False))
def test_a_mixture_is_the_sum_of_its_parts(shares, seed, width, order):
    """Value and slope, in any order; nothing that is handed in is changed but what a single loss may change."""
    logits, z = random_logits((5, width), seed)
    parts = {loss_named(name): share for name, share in shares.items()}
    if not any(shares.values()):
        with pytest.raises(UserError, match="at least one loss"):
            mixture(parts)
        return
    mixed = mixture(parts)
    taught, guess = taught_and_guess(logits, z, torch.float64)
    before = [x.clone() for x in (taught.p_PW, taught.negentropy_P, guess.z_PW, guess.lse_P, guess.top_P, guess.q_PW)]
    value, slope = mixed.slope(taught, guess)
    after = [taught.p_PW, taught.negentropy_P, guess.z_PW, guess.lse_P, guess.top_P, guess.q_PW]
    kept = sum(share > 0 for share in shares.values())
    assert all(map(torch.equal, before[:5], after))
    assert kept == 1 or torch.equal(before[5], after[5])
    wanted_value, wanted_slope = torch.zeros(5, dtype=torch.float64), torch.zeros(5, width, dtype=torch.float64)
    for name, share in shares.items():
        alone = loss_named(name).slope(*taught_and_guess(logits, z, torch.float64))
        wanted_value, wanted_slope = wanted_value + share * alone[0], wanted_slope + share * alone[1]
    assert torch.allclose(value, wanted_value, rtol=1e-12, atol=1e-13)
    assert torch.allclose(slope, wanted_slope, rtol=1e-12, atol=1e-13)
    again = list(parts.items())
    order.shuffle(again)
    moved = mixture(dict(again)).slope(*taught_and_guess(logits, z, torch.float64))
    assert torch.allclose(moved[1], slope, rtol=1e-12, atol=1e-13)
    leaf = z.clone().requires_grad_()
    plain = mixed.value(taught.p_PW, leaf.log_softmax(-1))
    assert plain.dtype == torch.float64
    assert torch.allclose(plain, value, rtol=1e-10, atol=1e-11)
    assert torch.allclose(torch.autograd.grad(plain.sum(), leaf)[0], slope, rtol=1e-9, atol=1e-10)


def test_mixtures_that_are_none():
    kl, tv = choose_loss("kl"), choose_loss("tv")
    for parts in ({}, {kl: 0.0}, {kl: 0.0, tv: 0.0}, {kl: -1.0}, {kl: 1.0, tv: -0.1}, {kl: 0.0, tv: -1.0}):
        with pytest.raises(UserError, match=r"head\.loss: give at least one loss, and positive weights"):
            mixture(parts)
    assert mixture({kl: 1.0, tv: 0.0}) is kl
    assert mixture({tv: 1.0}) is tv


@pytest.mark.parametrize("share", [0.25, 3.0])
def test_a_single_loss_keeps_its_weight(share):
    """Also where it alone is left: only a weight of one is the loss itself."""
    sides = taught_and_guess(*random_logits((4, 9)), torch.float64)
    found = mixture({choose_loss("kl"): share, choose_loss("tv"): 0.0}).slope(*sides)
    alone = choose_loss("kl").slope(*sides)
    assert all(torch.allclose(mine, share * theirs) for mine, theirs in zip(found, alone))


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(
    "shares", [{"kl": 0.1, "topk": 1.0}, {"tv": 0.5, "ce": 0.5, "jsd": 2.0}, {"nla": 0.3}], ids=str
)
def test_a_mixture_in_chunks_is_autograd_of_its_plain_form(shares, weights):
    """Through the buffers that a loss may write into: total, metrics, gradients, D-PACE's weights."""
    case = make_work(13, 17, 5)
    mixed = mixture({choose_loss(name, 3): share for name, share in shares.items()})
    for per_chunk in (1, 4, 1000):
        ours = case.leaves()
        total, sums = chunked_loss(
            replace(case.task("kl", WEIGHTS[weights], per_chunk), loss=mixed), ours[:1], ours[1:]
        )
        theirs, wanted, wanted_sums = case.leaves(), 0.0, 0.0
        for name, share in shares.items():
            part, part_sums = plain_loss(case, name, WEIGHTS[weights], theirs)
            wanted, wanted_sums = wanted + share * part, wanted_sums + share * part_sums[0]
        assert close(total.detach(), wanted.detach(), 1e-12)
        assert close(sums[0], wanted_sums, 1e-12)
        assert close(sums[1:], part_sums[1:], 1e-12)
        for mine, their in zip(torch.autograd.grad(total, ours), torch.autograd.grad(wanted, theirs)):
            assert close(mine, their, 1e-12)


def test_a_heads_mixture_is_the_sum_of_its_heads(tiny):
    """By the config, with topk's count; a single name is a weight of one."""
    batch, shares = pack(documents_for(tiny)), {"kl": 0.1, "topk": 1.0, "tv": 0.5}
    mixed = make_tiny_head(tiny, loss=shares, loss_top_k=2)
    total = mixed.loss(batch, tiny).total
    alone = [make_tiny_head(tiny, loss=name, loss_top_k=2).loss(batch, tiny).total for name in shares]
    assert float(total.detach()) == pytest.approx(
        sum(s * float(part.detach()) for s, part in zip(shares.values(), alone)), rel=1e-5
    )
    assert torch.equal(make_tiny_head(tiny, loss={"kl": 1.0, "tv": 0.0}).loss(batch, tiny).total, alone[0])
    by_hand = make_tiny_head(tiny)
    by_hand.measure = choose_loss("topk", 2)
    assert torch.equal(by_hand.loss(batch, tiny).total, alone[1])


# 5. Rollouts over one stream, with feeds and windows


class Stream(torch.nn.Module):
    """Everything that a head of this kind has: the entry, its norms, the layers, and the norm of what is handed on."""

    def __init__(self, spec, depth: int, bias: bool, mask_first: bool, qk_norm: bool = False):
        super().__init__()
        sizes = Sizes.of(spec, inner=24, qk_norm=qk_norm)
        self.linear = torch.nn.Linear(2 * WIDTH, WIDTH, bias=bias)
        self.enorm, self.hnorm, self.norm = (RMSNorm(WIDTH, 1e-6) for _ in range(3))
        self.layers = torch.nn.ModuleList(Block(sizes, input_norm=place > 0) for place in range(depth))
        self.double()
        with torch.no_grad():
            for place, weight in enumerate(self.parameters()):
                drawn = 0.3 * random(*weight.shape, seed=place)
                weight.copy_(drawn if weight.dim() > 1 else 1 + drawn)
        self.entry = Pair(self.linear, self.enorm, self.hnorm, mask_first)


def compare_rollouts(layers, parameters, target, batch, steps: int, tolerance: float, recompute=False, **options):
    """Values at the computed rows, and the gradients of all parameters and features through the loss-bearing ones, which it
    returns.
    """
    plan = plan_rows(batch, steps)
    feature_TH = random(len(batch.ids_T), WIDTH, seed=1).requires_grad_()
    trimmed = rollout(layers, target.embed, feature_TH[plan.context_C], plan, recompute, **options)
    whole = rollout_reference(layers, target.embed, feature_TH, batch, steps, **options)
    sides = {**dict(parameters), "features": feature_TH}
    losses = [sum(x.sum() * 0.0 for x in sides.values()) for _ in range(2)]
    for i, count in enumerate(plan.counts):
        computed, bears = plan.rows_P[:count], plan.bears_PI[:count, i]
        assert trimmed[i].shape == (count, WIDTH)
        assert torch.allclose(trimmed[i], whole[i][computed], rtol=tolerance, atol=tolerance * 10), f"step {i}"
        probe = random(count, WIDTH, seed=20 + i)[bears]
        parts = (trimmed[i][bears], whole[i][computed[bears]])
        losses = [loss + (part * probe).sum() for loss, part in zip(losses, parts)]
    found, wanted = (dict(zip(sides, torch.autograd.grad(loss, list(sides.values())))) for loss in losses)
    assert_all_close(found, wanted, tolerance * 100)
    return found


FEEDS = {
    "as it is": lambda stream: unchanged,
    "normed": lambda stream: stream.norm,
    "detached": lambda stream: torch.Tensor.detach,
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("feed", FEEDS)
@pytest.mark.parametrize(("depth", "bias", "mask_first"), [(1, True, True), (1, False, False), (3, True, True)])
def test_rollout_over_one_stream_equals_dense_reference(target64, depth, bias, mask_first, feed, recompute):
    """Several documents and turns, with and without a window; every parameter that takes part has a gradient."""
    stream = Stream(target64.spec, depth, bias, mask_first)
    batch, made = pack(documents_for(target64)), {}
    for window in (None, 5, 6, 100):
        options = {"entry": stream.entry, "feed": FEEDS[feed](stream), "window": window}
        made[window] = compare_rollouts(
            stream.layers, stream.named_parameters(), target64, batch, 4, 1e-12, recompute, **options
        )
    for name, grad in made[None].items():
        assert grad.any() == (feed == "normed" or not name.startswith("norm")), name
    assert_all_close(made[100], made[None], 1e-10)
    assert not torch.allclose(made[5]["features"], made[None]["features"], rtol=1e-3)


@settings(max_examples=25, deadline=None)
@given(
    masks=st.lists(st.lists(st.booleans(), min_size=1, max_size=14), min_size=1, max_size=4),
    depth=st.integers(1, 3),
    steps=st.integers(1, 5),
    beyond=st.one_of(st.none(), st.integers(1, 9)),
    feed=st.sampled_from(list(FEEDS)),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
    seed=st.integers(0, 99),
)
def test_rollout_over_one_stream_on_any_batch(target64, masks, depth, steps, beyond, feed, flags, seed):
    """Any lengths and turns; windows from the smallest that a config allows."""
    bias, mask_first, recompute, qk_norm = flags
    batch = pack([make_document(mask, seed + i, target64) for i, mask in enumerate(masks)])
    stream = Stream(target64.spec, depth, bias, mask_first, qk_norm)
    options = {
        "entry": stream.entry,
        "feed": FEEDS[feed](stream),
        "window": None if beyond is None else steps + beyond,
    }
    compare_rollouts(stream.layers, stream.named_parameters(), target64, batch, steps, 1e-11, recompute, **options)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("depth", [1, 3])
def test_windows_and_feeds_over_embedding_and_feature(target64, depth, recompute):
    """EAGLE-3's layers: [embedding ; feature], no entry."""
    layers, norm = make_layers(target64.spec, depth), RMSNorm(WIDTH, 1e-6).double()
    long = make_document([False] * 20 + [True] * 9 + [False] * 3 + [True] * 5, 7, target64)
    batch = pack([long, *documents_for(target64)])
    names = [*layers.named_parameters(), ("norm", norm.weight)]
    found = [
        compare_rollouts(layers, names, target64, batch, 3, 1e-12, recompute, feed=norm, window=window)
        for window in (None, 4, 7, 25)
    ]
    assert all(grad.any() for grads in found for grad in grads.values())
    assert not torch.allclose(found[1]["features"], found[0]["features"], rtol=1e-3)


def near_mask(batch, window: int | None) -> torch.Tensor:
    """Rows of the same document, not later, and at most `window` of them [T, T]; place by place."""
    document, length = batch.segment_T.tolist(), len(batch.ids_T)
    return torch.tensor(
        [[document[t] == document[s] and 0 <= t - s < (window or length) for s in range(length)] for t in range(length)]
    )


@pytest.mark.parametrize("window", [None, 1, 2, 4, 50])
@pytest.mark.parametrize("depth", [1, 3])
def test_step_0_is_a_plain_windowed_decoder(target64, depth, window):
    """The reference itself: its first step is the layers under a banded mask, over the joined stream."""
    stream, batch = Stream(target64.spec, depth, True, True), pack(documents_for(target64))
    feature_TH = random(len(batch.ids_T), WIDTH, seed=1)
    (found,) = rollout_reference(stream.layers, target64.embed, feature_TH, batch, 1, entry=stream.entry, window=window)
    token_TD = target64.embed(torch.cat([batch.ids_T[1:], torch.zeros(1, dtype=torch.long)]))
    token_TD = stream.enorm(token_TD) * (batch.position_T > 0)[:, None]
    x_TH = stream.linear(torch.cat([token_TD, stream.hnorm(feature_TH)], -1))
    assert torch.allclose(found, plain_layers(stream.layers, x_TH, batch, window), rtol=1e-11, atol=1e-12)
    plan = plan_rows(batch, 1)
    (ours,) = rollout(
        stream.layers, target64.embed, feature_TH[plan.context_C], plan, entry=stream.entry, window=window
    )
    assert torch.allclose(ours, found[plan.rows_P], rtol=1e-11, atol=1e-12)


def plain_layers(layers, x_TH, batch, window: int | None):
    """Decoder layers under a banded mask."""
    mask_TT = near_mask(batch, window)
    for layer in layers:
        normed, attn = layer.input_layernorm(x_TH), layer.self_attn
        query = attn.query(normed, batch.position_T)
        mixed = dense_attention(query, *attn.keys_values(normed, batch.position_T), mask_TT)
        x_TH = x_TH + attn.o_proj(mixed.flatten(1))
        x_TH = x_TH + layer.mlp(layer.post_attention_layernorm(x_TH))
    return x_TH


@pytest.mark.parametrize("depth", [1, 3])
def test_context_outputs_equal_a_dense_causal_layer(target64, depth):
    """Values and gradients of layers that read no tokens, at the rows that are computed."""
    layers, batch = Stream(target64.spec, depth, False, False).layers, pack(documents_for(target64))
    for steps in (1, 3):
        plan, feature_TH = plan_rows(batch, steps), random(len(batch.ids_T), WIDTH, seed=1).requires_grad_()
        found = context_outputs(layers, feature_TH[plan.context_C], plan)
        wanted = plain_layers(layers, feature_TH, batch, None)[plan.rows_P]
        assert torch.allclose(found, wanted, rtol=1e-11, atol=1e-12)
        probe = random(*wanted.shape, seed=3)
        sides = {**dict(layers.named_parameters()), "features": feature_TH}
        ours, theirs = (torch.autograd.grad((x * probe).sum(), list(sides.values())) for x in (found, wanted))
        assert_all_close(dict(zip(sides, ours)), dict(zip(sides, theirs)), 1e-10)
        assert all(grad.any() for grad in ours)


@pytest.mark.parametrize("shape", [(7, WIDTH), (2, 7, WIDTH)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_pair_is_one_linear_layer_over_both(target64, shape, bias):
    """W [enorm(token) ; hnorm(feature)] + b; at position 0 the token may count as zeros, bias and feature still count."""
    for mask_first in (False, True):
        stream = Stream(target64.spec, 1, bias, mask_first)
        token, feature = random(*shape, seed=1), random(*shape, seed=2)
        positions = torch.tensor([3, 0, 1, 2, 0, 9, 1]).expand(shape[:-1])
        found = stream.entry.join(stream.entry.token(token), feature, positions)
        shown = stream.enorm(token) * (positions > 0)[..., None] if mask_first else stream.enorm(token)
        assert torch.allclose(found, stream.linear(torch.cat([shown, stream.hnorm(feature)], -1)), rtol=1e-12)


@pytest.mark.parametrize("mask_first", [False, True])
def test_the_token_of_position_0_reaches_later_steps_alone(target64, mask_first):
    """x_1 is the token of position 0 at step 0 only: masked there, another x_1 leaves every document's step 0 as it is. At
    later steps nothing stands at position 0.
    """
    stream, document = Stream(target64.spec, 2, True, mask_first), make_document([True] * 6, 3, target64)
    other = replace(document, ids_T=document.ids_T.clone())
    other.ids_T[1] += 1
    found = []
    for changed in (document, other):
        batch = pack([documents_for(target64)[1], changed])
        plan = plan_rows(batch, 3)
        feature_CH = random(len(batch.ids_T), WIDTH, seed=1)[plan.context_C]
        steps = rollout(stream.layers, target64.embed, feature_CH, plan, entry=stream.entry)
        found.append([out[batch.segment_T[plan.rows_P[: len(out)]] == 1] for out in steps])
    assert torch.equal(found[0][0], found[1][0]) == mask_first
    assert torch.equal(found[0][1], found[1][1]) == mask_first  # row 0 of step 1 reads x_2, at position 1


def own_head(kind: str, target: Target, size: int | None = 100, **config):
    """A random head of a kind, every weight random."""
    torch.manual_seed(1)
    ids = torch.arange(target.spec.vocab_size)
    ids = ids if size is None else torch.randperm(target.spec.vocab_size)[:size].sort().values
    settings = build(headwright.heads.get_head(kind).Config, {"kind": kind, **config}, "test")
    head = make_head(settings, target.spec, target.taps, DraftVocab(ids, target.spec.vocab_size))
    head.attach(target)
    head.initialise(target)
    with torch.no_grad():
        for place, (name, weight) in enumerate(head.named_parameters()):
            drawn = 0.3 * random(*weight.shape, seed=place)
            if name.startswith("lm_head"):
                weight.add_(drawn)
            else:
                weight.copy_(drawn if weight.dim() > 1 else 1 + drawn)
    return head.to(target.dtype).eval()


HEADS = {  # windows of four and six tokens, over drafts of three
    "window": ("eagle3", {"window": 4}),
    "window, layers": ("eagle3", {"window": 6, "layers": 3, "norm_output": True}),
    "window, norms": ("eagle3", {"window": 4, "qk_norm": True, "norm_before_residual": True, "layers": 2}),
    "one stream": ("eagle1", {"fc_bias": True}),
}


@pytest.mark.parametrize("name", HEADS)
def test_rollout_with_options_equals_sequential_draft_steps(target64, name):
    """Row t of step i is what i steps of drafting give after t + 1 committed rows, by a cache and its masks."""
    kind, config = HEADS[name]
    head, compared = own_head(kind, target64, steps=3, **config), 0
    long = make_document([False] * 9 + [True] * 6, 5, target64)
    for document in (long, *documents_for(target64, MASKS[:5])):
        batch = pack([document])
        plan = plan_rows(batch, 3)
        with torch.no_grad():
            outputs = head.rollout(batch, target64, plan)
            for place, row in enumerate(plan.rows_P.tolist()):
                reach = sum(place < count for count in plan.counts)
                for i, hidden in enumerate(drafted(head, target64, document, row, reach)):
                    assert torch.allclose(outputs[i][place], hidden, rtol=1e-11, atol=1e-11), (row, i)
                    compared += i > 0
    assert compared > 12


def drafted(head, target, document, row: int, steps: int):
    """Outputs of `steps` draft steps after rows 0 … row are committed, fed the document's own tokens."""
    state = head.start(1, row + 1 + steps)
    feature = head.read(document.taps_TKD[None, : row + 1], target)
    embedding = head.embed(target, document.ids_T[None, 1 : row + 2])
    hidden = head.run(state, embedding, feature, state.next_slots(row + 1), state.visible(row + 1))
    state.advance(row + 1)
    drafting = Drafting(head, state, target, hidden[:, -1:], steps)
    yield hidden[0, -1]
    for i in range(1, steps):
        drafting.step(document.ids_T[None, row + 1 + i : row + 2 + i], torch.zeros(1, 1, dtype=torch.long))
        yield drafting.hidden_BkH[0, 0]


def test_a_rollout_deeper_than_its_window_is_refused(target64):
    """There the window leaves out the oldest of the row's own keys. A head says so, and agreement asks for no more."""
    head, batch = own_head("eagle3", target64, steps=3, window=4), pack(documents_for(target64))
    assert head.deepest == 4
    with pytest.raises(UserError, match=r"5 steps in a window of 4"):
        head.rollout(batch, target64, plan_rows(batch, 5))
    assert not head.agreement(batch, target64, 7)[:, 4:].any()


# 6. Curriculum, first drafts, lookahead


def loss_and_gradients(head, batch, target):
    """The loss, and its gradients by name."""
    out = head.loss(batch, target)
    return out, gradients(head, out.total)


def same_loss(ours, theirs, batch, target, tolerance: float = 1e-6) -> None:
    """Total, metrics and gradients. Parameters of `ours` alone get none."""
    (found, grads), (wanted, wanted_grads) = (loss_and_gradients(head, batch, target) for head in (ours, theirs))
    assert torch.allclose(found.total, wanted.total, rtol=tolerance)
    assert found.metrics.keys() == wanted.metrics.keys()
    for name, pair in wanted.metrics.items():
        assert torch.allclose(torch.stack(found.metrics[name]), torch.stack(pair), rtol=tolerance), name
    assert_all_close({name: grads[name] for name in wanted_grads}, wanted_grads, tolerance)
    assert not any(grad.any() for name, grad in grads.items() if name not in wanted_grads)


@pytest.mark.parametrize(("kind", "config"), [("eagle3", {"layers": 2}), ("medusa", {}), ("hydra", {}), ("eagle1", {})])
def test_a_curriculum_is_a_shorter_head(target64, kind, config):
    """Steps 1, 2, 3, 4 in four equal parts of the first half, then all: the loss, metrics and gradients of such a head."""
    head, batch = own_head(kind, target64, steps=4, curriculum=0.5, **config), pack(documents_for(target64))
    lengths = []
    for progress in (0.0, 0.12, 0.13, 0.3, 0.4, 0.5, 1.0):
        head.engine.progress = progress
        steps = head.steps_now()
        metrics = head.loss(batch, target64).metrics
        names = {f"{name}_{i}" for name in ("loss", "alpha", "agree") for i in range(steps)}
        names |= {f"feature_{i}" for i in range(steps)} if kind == "eagle1" else set()
        assert metrics.keys() == names
        if steps not in lengths:
            short = own_head(kind, target64, steps=steps, **config)
            weights = short.state_dict()
            short.load_state_dict({name: part for name, part in head.state_dict().items() if name in weights})
            same_loss(head, short, batch, target64)
        lengths.append(steps)
    assert lengths == [1, 1, 2, 3, 4, 4, 4]
    assert head.lookahead == 5


SHORT = "heads beyond the steps of now take no part: data-parallel training wants a gradient of every parameter"


@pytest.mark.parametrize(
    "kind",
    [
        "eagle3",
        "eagle1",
        "medusa",
        "hydra",
    ],
)
def test_every_parameter_takes_part_at_every_point_of_a_curriculum(target64, kind):
    """Be it with a gradient of zero."""
    head, batch = own_head(kind, target64, steps=3, curriculum=1.0), pack(documents_for(target64))
    for progress in (0.0, 0.5, 1.0):
        head.engine.progress = progress
        head.zero_grad()
        head.loss(batch, target64).total.backward()
        assert not [name for name, weight in head.named_parameters() if weight.grad is None], progress


@settings(max_examples=60, deadline=None)
@given(
    steps=st.integers(1, 9),
    share=st.floats(0.01, 1.0),
    progress=st.lists(st.floats(0.0, 1.0), min_size=2, max_size=6).map(sorted),
)
def test_the_rollout_grows_from_one_step_to_all(steps, share, progress):
    """Never shrinks; one at the start, all from `share` on; without a curriculum all from the start."""
    found = {}
    for curriculum in (share, 0.0):
        like = torch.nn.Module()
        like.config = build(
            headwright.heads.get_head("eagle3").Config, {"steps": steps, "curriculum": curriculum}, "test"
        )
        like.engine = headwright.heads.base.Engine()
        steps_now = partial(headwright.heads.get_head("eagle3").Head.steps_now, like)
        found[curriculum] = []
        for done in (0.0, *progress, 1.0):
            like.engine.progress = done
            now = steps_now()
            found[curriculum].append(now)
            assert now == steps or (curriculum and done < curriculum)
            assert not curriculum or abs(now - min(steps, 1 + done / curriculum * steps)) <= 1
    assert found[share] == sorted(found[share])
    assert found[share][0] == 1
    assert found[share][-1] == steps


def learning_by_hand(document):
    """Only rows whose own token is of the answer: what serving asks first, after the prompt's last token, is left out."""
    learn = [bool(document.mask_T[t]) for t in range(len(document.mask_T))]
    return replace(document, learn_T=torch.tensor(learn))


@pytest.mark.parametrize("out_of_vocab", ["drop", "renormalise"])
@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_without_first_drafts_is_masking_by_hand(target64, kind, out_of_vocab):
    documents = documents_for(target64)
    ours, theirs = (
        own_head(kind, target64, steps=3, out_of_vocab=out_of_vocab, first_draft=first) for first in (False, True)
    )
    batch, masked = pack(documents), pack([learning_by_hand(document) for document in documents])
    (found, grads), (wanted, wanted_grads) = (
        loss_and_gradients(ours, batch, target64),
        loss_and_gradients(theirs, masked, target64),
    )
    assert torch.allclose(found.total, wanted.total, rtol=1e-6)
    assert_all_close(grads, wanted_grads, 1e-6)
    assert found.metrics.keys() == wanted.metrics.keys()
    assert all(torch.allclose(torch.stack(found.metrics[n]), torch.stack(wanted.metrics[n])) for n in found.metrics)
    everything = theirs.loss(batch, target64)
    answers = [run for d in documents for run in runs_of(d.mask_T) if run[0] > 0 and run[1] - run[0] > 1]
    assert int(everything.metrics["agree_0"][1]) - int(found.metrics["agree_0"][1]) == len(answers) == 4
    assert float(everything.total.detach()) > float(found.total.detach()) > 0
    same_loss(ours, theirs, masked, target64)  # masked already: nothing more to leave out


@pytest.mark.parametrize("first_draft", [True, False])
@pytest.mark.parametrize("curriculum", [0.0, 1.0])
@pytest.mark.parametrize("parts", [2, 5])
def test_parts_of_a_document_with_the_lookahead_add_up(target64, parts, curriculum, first_draft):
    """Each part reads as many tokens behind its rows as the loss does: the parts' losses are the whole's. With one token less,
    the longest rollouts of a whole head end early.
    """
    head = own_head(
        "eagle3", target64, steps=3, curriculum=curriculum, first_draft=first_draft, out_of_vocab="renormalise"
    )
    document = make_document([False] * 4 + [True] * 12 + [False, False] + [True] * 5, 5, target64)
    assert head.lookahead == 4

    def total(lookahead):
        losses = [head.loss(pack([document.part(part, parts, lookahead)]), target64) for part in range(parts)]
        rows = sum(int(loss.metrics["agree_0"][1]) for loss in losses)
        return sum(loss.total for loss in losses), rows

    whole = head.loss(pack([document]), target64)
    found, rows = total(head.lookahead)
    assert rows == int(whole.metrics["agree_0"][1])
    assert torch.allclose(found, whole.total, rtol=1e-6)
    assert torch.allclose(total(head.lookahead + 3)[0], whole.total, rtol=1e-6)
    less, _ = total(head.lookahead - 1)
    assert torch.allclose(less, whole.total, rtol=1e-6) == (curriculum > 0)


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_what_cannot_be_said_bears_no_loss_at_the_step_that_should_say_it(target64, kind):
    """By hand, pair by pair: the counts of each step's loss, and the loss that the dropped pairs would have had."""
    documents, floor = documents_for(target64), {"steps": 3, "step_weights": "decay", "step_weight": 0.5}
    dropped, kept = (own_head(kind, target64, out_of_vocab=way, **floor) for way in ("drop", "renormalise"))
    batch, found = pack(documents), {}
    sayable = set(dropped.vocab.ids_W.tolist())
    counts = [[0, 0], [0, 0], [0, 0]]
    for document in documents:
        first = dict(zip((t for t in range(len(document.mask_T) - 1) if document.mask_T[t] & document.mask_T[t + 1]),
                         document.argmax_R.tolist()))  # fmt: skip
        bears = loss_masks(document.mask_T, torch.zeros_like(document.ids_T), 3)
        for row, i in torch.nonzero(bears).tolist():
            counts[i][0] += 1
            counts[i][1] += first[row + 1 + i] in sayable
    for name, head in (("drop", dropped), ("renormalise", kept)):
        metrics = head.loss(batch, target64).metrics
        found[name] = metrics
        for i, (might, can) in enumerate(counts):
            assert int(metrics[f"loss_{i}"][1]) == (can if name == "drop" else might)
            assert int(metrics[f"agree_{i}"][1]) == int(metrics[f"alpha_{i}"][1]) == might
            assert torch.equal(metrics[f"agree_{i}"][0], found["drop"][f"agree_{i}"][0])
    assert 0 < counts[0][1] < counts[0][0]
    assert float(found["renormalise"]["loss_0"][0]) > float(found["drop"]["loss_0"][0])


# 7. Norms of queries and keys; sizes

ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def test_qk_norm_is_qwen3s():
    """Projections, norms before the rotation, grouping and output together, on a causal sequence."""
    config = Qwen3Config(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        rms_norm_eps=1e-5,
        rope_parameters=ROPE,
        attention_bias=False,
    )
    config._attn_implementation = "eager"
    theirs = modeling_qwen3.Qwen3Attention(config, 0).double()
    ours = Attention(64, Sizes(64, 128, 4, 2, 24, 1e-5, ROPE, qk_norm=True)).double()
    with torch.no_grad():
        for place, weight in enumerate(theirs.parameters()):
            weight.copy_(random(*weight.shape, seed=place) * 0.3 + (weight.dim() == 1))
    ours.load_state_dict(theirs.state_dict())
    x, positions = random(1, 9, 64), torch.arange(9)[None]
    causal = torch.ones(9, 9, dtype=torch.bool).tril()[None]
    cos_sin = modeling_qwen3.Qwen3RotaryEmbedding(config)(x, positions)
    bias = torch.zeros(9, 9, dtype=torch.float64).masked_fill(~causal[0], -torch.inf)[None, None]

    def mixed(query, keys, values):
        return ours.output(attend(query[None], *(x[None].transpose(1, 2) for x in (keys, values)), causal))

    whole = mixed(ours.query(x[0], positions[0]), *ours.keys_values(x[0], positions[0]))
    assert torch.allclose(whole, theirs(x, cos_sin, bias)[0], rtol=1e-5, atol=1e-5)  # it norms in fp32
    halves = [sum(p) for p in zip(*(ours.project(x[0][:, cut], "qkv", cut) for cut in (slice(40), slice(40, None))))]
    turned = ours.turned_query(halves[0], positions[0]), ours.turned_keys(halves[1], positions[0])
    assert torch.allclose(mixed(*turned, ours.split(halves[2])), whole, rtol=1e-9, atol=1e-10)
    names = {name for name, _ in ours.named_parameters()} - {f"{n}_proj.weight" for n in "qkvo"}
    assert names == {"q_norm.weight", "k_norm.weight"}
    assert not hasattr(Attention(64, Sizes(64, 128, 4, 2, 24, 1e-5, ROPE)), "q_norm")


@settings(max_examples=200, deadline=None)
@given(
    head_dim=st.sampled_from([2, 8, 64, 128]),
    groups=st.integers(1, 8),
    per_group=st.integers(1, 8),
    share=st.floats(0.02, 4.0),
    inner=st.one_of(st.none(), st.integers(1, 999)),
    qk_norm=st.booleans(),
)
def test_sizes_of_another_width(tiny, head_dim, groups, per_group, share, inner, qk_norm):
    """Heads as wide as the target's, a whole number of query heads per key-value head, about as many as the target has; the
    target's own width is the target's own shape.
    """
    heads = groups * per_group
    width = head_dim * heads
    spec = replace(
        tiny.spec,
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=head_dim,
        intermediate_size=3 * width,
    )
    same = Sizes.of(spec, None, inner, qk_norm)
    assert same == Sizes.of(spec, width, inner, qk_norm)
    assert (same.heads, same.kv_heads, same.head_dim, same.width) == (heads, groups, head_dim, width)
    assert same.inner == (inner or 3 * width)
    other = max(1, int(share * width))
    sizes = Sizes.of(spec, other, inner, qk_norm)
    assert (sizes.width, sizes.head_dim, sizes.qk_norm) == (other, head_dim, qk_norm)
    assert (sizes.eps, sizes.rope) == (spec.rms_norm_eps, spec.rope)
    assert sizes.inner == (inner or 3 * other)
    assert sizes.heads % sizes.kv_heads == 0
    assert sizes.kv_heads >= 1
    if other != width:
        assert other - head_dim < sizes.heads * head_dim <= max(other, head_dim)
        assert sizes.heads >= sizes.kv_heads * per_group or sizes.kv_heads == 1
        if other % (head_dim * per_group) == 0:
            assert sizes.heads == sizes.kv_heads * per_group, "as many to a group"
    block = Block(replace(sizes, inner=4)) if other < 300 else None
    if block is not None:
        x, at = random(3, other, dtype=torch.float32), torch.arange(3)
        query, (keys, values) = block.self_attn.query(x, at), block.self_attn.keys_values(x, at)
        assert block.finish(x, dense_attention(query, keys, values, torch.ones(3, 3).tril() > 0)).shape == (3, other)


@pytest.mark.parametrize(
    "config", [{"hidden_size": 16}, {"hidden_size": 40, "qk_norm": True}, {"layers": 2, "window": 4}], ids=str
)
def test_a_head_with_options_learns_with_all_its_parameters(tiny, config):
    """A width of its own, norms, layers, a window: every gradient is finite, and none is zero."""
    head = make_tiny_head(tiny, steps=3, **config)
    out = head.loss(pack(documents_for(tiny)), tiny)
    for name, grad in gradients(head, out.total).items():
        assert grad.isfinite().all(), name
        assert grad.any(), name


# 8. What it costs


@pytest.mark.parametrize(("name", "most"), [("CpuFlash", 16), ("Blockwise", 64)])
def test_a_window_makes_no_matrix_of_scores(monkeypatch, name, most):
    """1500 rows over 1500 keys and four own, a window of 200: nothing has more entries per row than a block of scores, and
    nothing that is kept more than an input.
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
        attended(case, 200).sum().backward()
    assert case.keys.grad.any()
    assert max(kept) <= (rows + 4) * width
    assert rows * width <= watch.entries <= most * rows


@pytest.mark.parametrize("learned", [True, False], ids=["learned", "nothing to learn"])
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("eagle3", {"window": 4, "qk_norm": True, "layers": 2, "loss": {"kl": 0.1, "topk": 1.0}}),
        (
            "eagle3",
            {"window": 5, "norm_output": True, "curriculum": 0.5, "first_draft": False, "step_weights": "dpace"},
        ),
        ("eagle3", {"hidden_size": 16, "window": 6}),
        ("medusa", {"loss": {"ce": 1.0, "jsd": 0.5}, "out_of_vocab": "renormalise"}),
        ("hydra", {"prefix": True}),
        ("eagle1", {"detach": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_is_asked_of_the_device(no_autocast, monkeypatch, kind, config, learned, dtype):
    """Loss and gradients on the meta device, where a value that the host waits for is an error; in bf16 by FlashAttention as
    PyTorch describes it, windows included.
    """
    target = make_target()
    head = own_head(kind, target, steps=3, **config).to(getattr(torch, dtype))
    head.engine.progress = 0.2
    batch = pack(documents_for(target))
    if dtype == "bfloat16" and learned:
        monkeypatch.setattr(attention, "choose_kernel", lambda query, values: CudaFlash if len(query) else Blockwise)
    target.model.to("meta")
    batch = (batch if learned else batch.without_loss()).to("meta", getattr(torch, dtype))
    head.to("meta")
    with OneDevice():
        out = head.loss(batch, target)
        out.total.backward()
    assert out.total.device.type == "meta"
    assert all(top.device.type == bottom.device.type == "meta" for top, bottom in out.metrics.values())
    assert all(weight.grad is not None for weight in head.parameters())


def test_windows_and_values_of_another_width_ask_nothing_of_the_device():
    """Every kernel's own arithmetic, forward and backward."""
    for width, name in ((16, "CudaFlash"), (16, "Blockwise"), (8, "Blockwise")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "choose_kernel", lambda query, values, name=name: getattr(attention, name))
            case = with_values(make_case(LATE["late in a document"], width=16, own=2), width)
            leaves = [x.to("meta", torch.bfloat16).requires_grad_() for x in case.tensors]
            spans = Spans(case.spans.parts, case.spans.order.to("meta"))
            with OneDevice():
                out = attended(Case(*leaves[:3], spans, list(zip(leaves[3::2], leaves[4::2]))), 4)
                out.sum().backward()
            assert (out.shape, out.dtype) == ((*case.query.shape[:2], width), torch.bfloat16)
            assert all(leaf.grad.shape == leaf.shape for leaf in leaves)


def test_parts_of_a_task_are_made_once(tiny):
    """The target is asked once per chunk, however many lm_heads there are."""
    case, asked = make_work(13, 17, 5), []
    task = case.task("kl", Weights(), 4)
    task = Task(task.pairs, lambda where: asked.append(where) or case.teacher_RW[where], *[
        getattr(task, name) for name in ("logz_R", "first_R", "loss", "weights")])  # fmt: skip
    chunked_loss(task, with_heads(case), case.features)
    assert len(asked) == len(plan_pairs(case.rows, 4).chunks)
