"""Chunked lm_head and loss ≡ all logits at once, log_softmax and autograd: values, gradients and metrics; memory of a chunk."""

import weakref
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import make_target, make_tiny_head
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ttt import documents_for, make_document
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from headwright.data.batch import DocumentFeatures, pack
from headwright.data.rows import plan_rows
from headwright.heads.chunked import COPIES, Task, Weights, chunked_loss, first_choices, plan_pairs, rows_in_memory
from headwright.heads.losses import choose_loss

LOSSES = ["kl", "rkl", "jsd", "tv", "nla", "lk", "ce", "topk"]
WEIGHTS = {"decay": Weights(0.7), "uniform": Weights(1.0), "dpace": Weights(dpace_floor=0.4)}
SHAPES = [  # rows, W, H, rows per chunk
    (13, 7, 5, 3),
    (100, 7, 5, 1),
    (100, 401, 32, 1000),
    (13, 401, 5, 1),
    (100, 1, 32, 3),
    (1, 401, 32, 1),
    (1, 1, 5, 3),
    (0, 7, 32, 3),
]
HALF = {torch.bfloat16: 2e-2, torch.float16: 3e-3}  # of the largest entry; about five roundings


@dataclass
class Case:
    """What a call is given, before it is cut into chunks."""

    rows: SimpleNamespace  # what plan_pairs reads of a plan
    teacher_RW: torch.Tensor
    logz_R: torch.Tensor
    first_R: torch.Tensor
    weight_WH: torch.Tensor
    features: list[torch.Tensor]

    def task(self, loss: str, weights: Weights, per_chunk: int) -> Task:
        """The work of one call. topk counts 3."""
        pairs = plan_pairs(self.rows, per_chunk)
        return Task(
            pairs, lambda where: self.teacher_RW[where], self.logz_R, self.first_R, choose_loss(loss, 3), weights
        )

    def to(self, dtype: torch.dtype) -> "Case":
        """Inputs of the lm_head in `dtype`."""
        return replace(self, weight_WH=self.weight_WH.to(dtype), features=[part.to(dtype) for part in self.features])

    def leaves(self) -> list[torch.Tensor]:
        """Fresh weight and features that want gradients."""
        return [part.detach().clone().requires_grad_() for part in (self.weight_WH, *self.features)]


def make_rows(rows: int, steps: int, places: int, ranged: bool, generator) -> SimpleNamespace:
    """A plan in which rows stand in no order, bear loss here and there, and read the target anywhere (or row + step)."""
    rows_P = torch.randperm(2 * rows, generator=generator)[:rows]
    counts = [rows - (i * rows) // (steps + 1) for i in range(steps)]
    computed = torch.arange(rows)[:, None] < torch.tensor(counts)
    bears_PI = computed & (torch.rand(rows, steps, generator=generator) < (1.0 if ranged else 0.7))
    target_PI = torch.randint(places, (rows, steps), generator=generator)
    if ranged:
        target_PI = torch.argsort(torch.argsort(rows_P))[:, None] + torch.arange(steps)
    return SimpleNamespace(
        rows_P=rows_P, bears_PI=bears_PI, target_PI=torch.where(bears_PI, target_PI, 0), steps=steps, counts=counts
    )


def make_case(rows: int, width: int, inner: int, steps: int = 3, ranged: bool = False, seed: int = 0) -> Case:
    """Random inputs in fp64. Some mass lies outside the draft vocabulary, and some first choices cannot be said."""
    generator = torch.Generator().manual_seed(seed)
    places = rows + steps

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    plan = make_rows(rows, steps, places, ranged, generator)
    teacher_RW = 2 * normal(places, width)
    logz_R = teacher_RW.logsumexp(-1) + normal(places).clamp_min(0)
    first_R = torch.where(torch.rand(places, generator=generator) < 0.2, -1, teacher_RW.argmax(-1))
    features = [normal(count, inner) for count in plan.counts]
    return Case(plan, teacher_RW, logz_R, first_R, 2 * normal(width, inner) / inner**0.5, features)


def right_and_weights(case: Case, logits: list[torch.Tensor], weights: Weights):
    """The weight of each pair [P, I], row by row, step by step."""
    wanted = torch.zeros(case.rows.bears_PI.shape, dtype=torch.float64)
    for row, bears in enumerate(case.rows.bears_PI.tolist()):
        reached, passed = [], 1.0
        for step, counts in enumerate(bears):
            first, right = int(case.first_R[case.rows.target_PI[row, step]]), 0.0
            if counts and first >= 0:
                right = float(logits[step][row].double().softmax(-1)[first])
            passed *= (weights.dpace_floor or 0) + (1 - (weights.dpace_floor or 0)) * right
            reached.append(passed if counts else 0.0)
        for step in range(len(bears)):
            wanted[row, step] = weights.base**step if weights.dpace_floor is None else sum(reached[step:])
    return wanted


def plain_loss(case: Case, loss: str, weights: Weights, leaves):
    """The same sum and metrics from the logits of all rows at once; loss in fp64, logits as the leaves' dtype gives them."""
    weight_WH, *features = leaves
    logits = [F.linear(part, weight_WH) for part in features]
    weight_PI = right_and_weights(case, [part.detach() for part in logits], weights)
    total, metrics = torch.zeros((), dtype=torch.float64), []
    for step, z_PW in enumerate(logits):
        rows = torch.nonzero(case.rows.bears_PI[:, step])[:, 0]
        places = case.rows.target_PI[rows, step]
        p, logq = case.teacher_RW[places].double().softmax(-1), z_PW[rows].double().log_softmax(-1)
        value = choose_loss(loss, 3).value(p, logq)
        total = total + value @ weight_PI[rows, step]
        of_all = (case.teacher_RW[places].double() - case.logz_R[places, None].double()).exp()
        alpha = torch.minimum(of_all, logq.exp()).sum()
        agree = (z_PW[rows].argmax(-1) == case.first_R[places]).sum()
        metrics.append(torch.stack([value.sum(), alpha, agree.double()]).detach())
    return total, torch.stack(metrics, 1)


def close(found, wanted, tolerance: float) -> bool:
    """Relative to the largest entry, or to one."""
    found, wanted = found.double(), wanted.double()
    scale = float(wanted.abs().max()) if wanted.numel() else 1.0
    return found.shape == wanted.shape and bool(((found - wanted).abs() <= tolerance * max(scale, 1.0)).all())


def compare(case: Case, loss: str, weights: Weights, per_chunk: int, tolerance: float) -> None:
    """Total, metrics, and gradients of the weight and of every step's features."""
    ours, theirs = case.leaves(), case.leaves()
    total, sums = chunked_loss(case.task(loss, weights, per_chunk), ours[:1], ours[1:])
    wanted_total, wanted_sums = plain_loss(case, loss, weights, theirs)
    assert close(total.detach(), wanted_total.detach(), tolerance)
    assert close(sums, wanted_sums, tolerance)
    assert not sums.requires_grad
    found = torch.autograd.grad(total, ours)
    wanted = torch.autograd.grad(wanted_total, theirs, allow_unused=True)
    for leaf, mine, their in zip(ours, found, wanted):
        assert mine.dtype == leaf.dtype
        assert close(mine, torch.zeros_like(leaf) if their is None else their, tolerance)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_equals_all_logits_at_once_fp64(loss, weights, shape):
    rows, width, inner, per_chunk = shape
    compare(make_case(rows, width, inner), loss, WEIGHTS[weights], per_chunk, 1e-12)


@pytest.mark.parametrize("ranged", [False, True])
@pytest.mark.parametrize("weights", ["decay", "dpace"])
@pytest.mark.parametrize("loss", LOSSES)
def test_equals_all_logits_at_once_fp32(loss, weights, ranged):
    """Also where each step's target positions are a range, which is read without a copy."""
    compare(make_case(40, 401, 32, ranged=ranged).to(torch.float32), loss, WEIGHTS[weights], 7, 1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_tokens_that_the_target_forbids(loss):
    """Logits of -inf: a probability of zero counts nothing."""
    case = make_case(13, 7, 5)
    case.teacher_RW[:, 2] = -torch.inf
    case.logz_R = case.teacher_RW.logsumexp(-1)
    compare(case, loss, Weights(), 3, 1e-12)


def test_the_draft_vocabulary_never_has_more_than_all_of_the_mass():
    """A log-sum-exp that was rounded down when it was stored does not raise the acceptance."""
    case = make_case(13, 7, 5)
    found = []
    for below in (0.0, 0.3):
        case.logz_R = case.teacher_RW.logsumexp(-1) - below
        found.append(chunked_loss(case.task("kl", Weights(), 3), [case.weight_WH], case.features)[1])
    assert torch.allclose(*found, rtol=1e-12)


# Half precision


@pytest.mark.parametrize("weights", ["decay", "dpace"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_half_precision(loss, dtype, weights):
    """Features and weight in half: gradients in half, within a few roundings of autograd through the same half logits."""
    compare(make_case(30, 101, 32).to(dtype), loss, WEIGHTS[weights], 4, HALF[dtype])


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_sums_are_kept_in_fp32(dtype):
    """600 equal rows in 600 chunks are 600 times one row; in half a sum of so many would stand still."""
    one = make_case(1, 7, 5, steps=1).to(dtype)
    rows = 600
    plan = SimpleNamespace(
        rows_P=torch.arange(rows),
        bears_PI=torch.ones(rows, 1, dtype=torch.bool),
        target_PI=torch.zeros(rows, 1, dtype=torch.long),
        steps=1,
    )
    one.rows.bears_PI[:], one.rows.target_PI[:] = True, 0
    many = replace(one, rows=plan, features=[one.features[0].expand(rows, -1)])
    found = []
    for case in (one, many):
        leaves = case.leaves()
        total, sums = chunked_loss(case.task("kl", Weights(), 1), leaves[:1], leaves[1:])
        assert total.dtype == sums.dtype == torch.float32
        found.append((total.detach(), sums[:2], torch.autograd.grad(total, leaves[0])[0].float()))
    for single, all_of_them in zip(*found):
        assert torch.allclose(all_of_them, rows * single, rtol=2 * torch.finfo(dtype).eps if single.dim() > 1 else 1e-4)


@pytest.mark.parametrize("loss", LOSSES)
def test_autocast_is_half_precision_with_gradients_of_the_weights_own_kind(loss):
    """fp32 inputs under autocast give what the same inputs in bf16 give; gradients come back in fp32, not rounded again."""
    case = make_case(30, 101, 32).to(torch.float32)
    ours, theirs = case.leaves(), case.to(torch.bfloat16).leaves()
    task = case.task(loss, Weights(), 4)
    with torch.autocast("cpu", torch.bfloat16):
        total, sums = chunked_loss(task, ours[:1], ours[1:])
    wanted, wanted_sums = chunked_loss(task, theirs[:1], theirs[1:])
    assert total.dtype == torch.float32
    assert torch.equal(total, wanted)
    assert torch.equal(sums, wanted_sums)
    for mine, their in zip(torch.autograd.grad(total, ours), torch.autograd.grad(wanted, theirs)):
        assert mine.dtype == torch.float32
        assert torch.equal(mine.bfloat16(), their)
    exact, _ = plain_loss(case, loss, Weights(), case.leaves())
    assert float(total.detach()) == pytest.approx(float(exact.detach()), rel=2e-2)
    assert float(total.detach()) != pytest.approx(float(exact.detach()), rel=1e-7), "it was not computed in bf16"


def test_a_tie_is_agreement():
    """The metric says so. What the head drafts is the first of the tokens that tie (`first_choices`)."""
    case = make_case(1, 7, 5, steps=1)
    case.rows.bears_PI[:], case.rows.target_PI[:] = True, 0
    case.features[0][:], case.weight_WH[:] = 1.0, torch.tensor([0.0, 1, 3, 1, 3, 0, 2])[:, None]
    assert first_choices(case.features[0], case.weight_WH).tolist() == [2]
    found = []
    for said in (2, 4):
        case.first_R[:] = said
        found.append(int(chunked_loss(case.task("kl", Weights(), 1), [case.weight_WH], case.features)[1][2, 0]))
    assert found == [1, 1]


# How it is called


def run(case: Case, leaves, loss: str = "lk", per_chunk: int = 4):
    """The total under D-PACE."""
    return chunked_loss(case.task(loss, WEIGHTS["dpace"], per_chunk), leaves[:1], leaves[1:])[0]


def straight(case: Case, scale: float = 1.0):
    """Total and gradients of a plain call."""
    leaves = case.leaves()
    total = run(case, leaves)
    return total.detach(), torch.autograd.grad(total * scale, leaves)


@pytest.fixture(scope="module")
def case() -> Case:
    """A small case in fp32."""
    return make_case(13, 33, 8).to(torch.float32)


def test_inside_a_checkpoint(case):
    leaves = case.leaves()
    total = checkpoint(lambda *parts: run(case, parts), *leaves, use_reentrant=False)
    wanted, gradients = straight(case)
    assert torch.equal(total.detach(), wanted)
    assert all(map(torch.equal, torch.autograd.grad(total, leaves), gradients))


def test_inside_a_compiled_function(case):
    """What stands around it may be compiled."""
    task = case.task("lk", WEIGHTS["dpace"], 4)
    theirs = case.leaves()

    def around(weight_WH, *features):
        return 3.0 * chunked_loss(task, [weight_WH], [part * 2.0 for part in features])[0]

    leaves = case.leaves()
    total, wanted = torch.compile(around, backend="eager")(*leaves), around(*theirs)
    assert torch.equal(total, wanted)
    assert all(map(torch.equal, torch.autograd.grad(total, leaves), torch.autograd.grad(wanted, theirs)))


def test_gradient_is_scaled_by_what_comes_from_above(case):
    """And may be asked for twice."""
    total, gradients = straight(case)
    scaled_total, scaled = straight(case, 3.5)
    assert torch.equal(total, scaled_total)
    for mine, one in zip(scaled, gradients):
        assert torch.allclose(mine, 3.5 * one, rtol=1e-6)
    leaves = case.leaves()
    total = run(case, leaves)
    for _ in range(2):
        assert all(map(torch.equal, torch.autograd.grad(total, leaves, retain_graph=True), gradients))


def test_a_grad_scalers_factor_does_not_overflow_where_the_gradient_is_small(case):
    """65536 is beyond fp16; 65536 times a gradient of 1e-3 is not."""
    small = replace(case, weight_WH=case.weight_WH * 1e-3, features=[part * 1e-3 for part in case.features])
    small = small.to(torch.float16)
    _, scaled = straight(small, 65536.0)
    exact = replace(small, weight_WH=small.weight_WH.float(), features=[part.float() for part in small.features])
    _, wanted = straight(exact)
    for mine, their in zip(scaled, wanted):
        assert float(their.abs().max()) * 65536 < 65504
        assert bool(mine.isfinite().all())
        assert float((mine.float() / 65536 - their).abs().max()) < 5e-3 * float(their.abs().max())


def test_other_gradients_are_the_same_where_the_weight_or_the_features_are_frozen(case):
    _, wanted = straight(case)
    for frozen in ({0}, {1, 2, 3}, {2}):
        leaves = [part.requires_grad_(place not in frozen) for place, part in enumerate(case.leaves())]
        run(case, leaves).backward()
        for place, (leaf, gradient) in enumerate(zip(leaves, wanted)):
            assert leaf.grad is None if place in frozen else torch.equal(leaf.grad, gradient)


class Operations(TorchDispatchMode):
    """What was called, and the most elements that one floating-point result had."""

    def __init__(self):
        super().__init__()
        self.names, self.most = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.names.append(function.__name__)
        for part in out if isinstance(out, tuple | list) else [out]:
            if isinstance(part, torch.Tensor) and part.is_floating_point():
                self.most = max(self.most, part.numel())
        return out


def gradient_work(operations: Operations) -> list[str]:
    """Operations that only a gradient needs."""
    return [name for name in operations.names if name.startswith(("addmm_", "index_copy_"))]


def test_without_gradients_the_values_are_the_same(case):
    wanted, _ = straight(case)
    frozen = [part.requires_grad_(False) for part in case.leaves()]
    with Operations() as operations:
        total = run(case, frozen)
    assert torch.equal(total, wanted)
    assert not total.requires_grad
    assert not gradient_work(operations)
    with torch.no_grad():
        total = run(case, case.leaves())
    assert torch.equal(total, wanted)
    assert not total.requires_grad


def test_no_grad_forms_no_gradient(case):
    with torch.no_grad(), Operations() as operations:
        run(case, case.leaves())
    assert not gradient_work(operations)


def test_frozen_features_cost_no_gradient(case):
    weight, *features = case.leaves()
    with Operations() as operations:
        run(case, [weight, *(part.requires_grad_(False) for part in features)])
    assert [name for name in gradient_work(operations) if name.startswith("addmm_")]
    assert not [name for name in gradient_work(operations) if name.startswith("index_copy_")]


# Memory


class Live(TorchDispatchMode):
    """The most bytes that the results of all operations held at a time, beside those of `known` tensors."""

    def __init__(self, known):
        super().__init__()
        self.held, self.now, self.most = {part.untyped_storage()._cdata: None for part in known}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for part in out if isinstance(out, tuple | list) else [out]:
            if isinstance(part, torch.Tensor) and part.untyped_storage()._cdata not in self.held:
                self.take(part.untyped_storage())
        return out

    def take(self, storage) -> None:
        """Count it until it is freed."""
        key, size = storage._cdata, storage.nbytes()
        self.held[key] = weakref.finalize(storage, self.give, key, size)
        self.now += size
        self.most = max(self.most, self.now)

    def give(self, key: int, size: int) -> None:
        del self.held[key]
        self.now -= size


@pytest.mark.parametrize("loss", LOSSES)
def test_no_matrix_of_all_rows_is_ever_made(loss):
    """300 rows of 3 steps over 5000 tokens, a few rows at a time: no result is larger than a chunk's logits, and together they
    keep to the memory that was asked for (a chunk's steps look at a few more rows of the target than it has).
    """
    mib = 2.0
    case = make_case(300, 5000, 4, ranged=True).to(torch.float32)
    case = replace(case, teacher_RW=case.teacher_RW.float(), logz_R=case.logz_R.float())
    per_chunk = rows_in_memory(case.weight_WH, 3, mib)
    assert 4 < per_chunk < 15
    leaves = case.leaves()
    task = case.task(loss, Weights(), per_chunk)
    task.teacher = lambda where: case.teacher_RW[where].clone()
    with Operations() as operations, Live([case.teacher_RW, *leaves]) as live:
        chunked_loss(task, leaves[:1], leaves[1:])[0].backward()
    assert operations.most <= 3 * per_chunk * 5000
    logits_of_teacher = 3 * 2 * 5000 * 4
    gradients = 3 * sum(part.numel() for part in leaves) * 4
    assert 0.5 * mib * 2**20 < live.most <= mib * 2**20 + logits_of_teacher + gradients


@pytest.mark.parametrize("steps", [1, 3])
def test_a_chunk_asks_the_target_for_little_more_than_its_rows(tiny, steps):
    """Long answers one behind the other: each chunk's positions are its rows' own and those of the steps ahead."""
    plan = plan_rows(pack(documents_for(tiny, [[True] * 50, [False, True] * 20, [False] * 9 + [True] * 30])), steps)
    for chunk in plan_pairs(plan, 4).chunks:
        assert chunk.last - chunk.first <= 4 + steps + 4  # and the two last positions of a turn, which bear no loss


def test_a_text_that_teaches_nothing_is_not_asked_for(tiny):
    """Between two turns stands one whose tokens the head cannot say: dropped rows must not come back as the target's logits."""
    batch = pack(documents_for(tiny, [[True] * 4, [True] * 500, [True] * 4]))
    teaches_R = torch.ones(len(batch.last_index_R), dtype=torch.bool)
    teaches_R[batch.segment_T[batch.last_index_R] == 1] = False
    pairs = plan_pairs(plan_rows(batch, 1, teaches_R), 100)
    assert len(pairs.row_N) == 4
    assert sum(chunk.last - chunk.first for chunk in pairs.chunks) < 100


@pytest.mark.parametrize("loss", ["lk", "topk"])
@pytest.mark.parametrize("weights", ["decay", "dpace"])
def test_a_heads_loss_does_not_depend_on_the_memory(tiny, loss, weights):
    """Total, metrics and every gradient: chunks of one row, of a few, of all."""
    head, batch = make_tiny_head(tiny, loss=loss, step_weights=weights), pack(documents_for(tiny))
    found = []
    for mib in (1e-6, 0.02, None):
        head.engine.loss_mib = mib
        head.zero_grad()
        out = head.loss(batch, tiny)
        out.total.backward()
        gradients = torch.cat([part.grad.flatten() for part in head.parameters()])
        found.append((out.total.detach()[None], torch.stack([top for top, _ in out.metrics.values()]), gradients))
    for parts in zip(*found):
        assert close(parts[0], parts[2], 1e-5)
        assert close(parts[1], parts[2], 1e-5)


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(1, 300_000),
    inner=st.integers(1, 64),
    steps=st.integers(1, 8),
    mib=st.one_of(st.none(), st.floats(0.01, 4096)),
)
def test_rows_in_memory(width, inner, steps, mib):
    """At least one row; more memory or fewer steps never give less; within the budget where one row is."""
    weight = torch.empty(width, inner, device="meta")
    rows = rows_in_memory(weight, steps, mib)
    row = 4 * width * (2 * steps + COPIES)
    budget = (mib or max(32, width * inner * 4 / 2**20)) * 2**20
    assert rows >= 1
    assert rows == 1 or rows * row <= budget
    assert (rows + 1) * row > budget
    assert rows_in_memory(weight, steps + 1, mib) <= rows
    if mib is not None:
        assert rows_in_memory(weight, steps, 2 * mib) >= rows


# The plan


@st.composite
def plans(draw) -> SimpleNamespace:
    """Rows in any order, bearing loss at any of their steps, with targets anywhere or in a run."""
    rows, steps, places = draw(st.integers(0, 12)), draw(st.integers(1, 4)), draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99_999)))
    plan = make_rows(rows, steps, places, draw(st.booleans()), generator)
    plan.bears_PI &= torch.rand(rows, steps, generator=generator) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    return plan


def check_plan(plan, per_chunk: int) -> None:
    """Every loss-bearing pair exactly once, in its place; consecutive rows in a chunk; targets relative to the chunk."""
    pairs = plan_pairs(plan, per_chunk)
    bearing = torch.nonzero(plan.bears_PI).tolist()
    assert sorted(map(list, zip(pairs.row_N.tolist(), pairs.step_N.tolist()))) == bearing
    order = torch.argsort(plan.rows_P).tolist()
    end, before = 0, -1
    for chunk in pairs.chunks:
        assert chunk.edges[0] == end
        assert chunk.edges == sorted(chunk.edges)
        assert len(chunk.edges) == len(chunk.ranges) + 1 == plan.bears_PI.shape[1] + 1
        end = chunk.edges[-1]
        ranks = [order.index(row) for row in pairs.row_N[chunk.edges[0] : end].tolist()]
        assert len({rank // per_chunk for rank in ranks}) == 1, "rows of one block"
        assert min(ranks) > before, "blocks ascend"
        before = max(ranks)
        assert pairs.local_N[chunk.edges[0] : end].tolist() == [rank % per_chunk for rank in ranks]
        targets = []
        for step, (first, last, span) in enumerate(zip(chunk.edges, chunk.edges[1:], chunk.ranges)):
            rows, target = pairs.row_N[first:last], pairs.target_N[first:last]
            assert pairs.step_N[first:last].tolist() == [step] * (last - first)
            assert [order.index(row) for row in rows.tolist()] == sorted(order.index(row) for row in rows.tolist())
            assert torch.equal(pairs.positions_M[chunk.first : chunk.last][target], plan.target_PI[rows, step])
            targets += target.tolist()
            consecutive = last > first and torch.equal(target, torch.arange(last - first) + target[0])
            assert span == (slice(int(target[0]), int(target[-1]) + 1) if consecutive else None)
        assert sorted(set(targets)) == list(range(chunk.last - chunk.first)), "no position that no pair needs"
    assert end == len(bearing)


@settings(max_examples=150, deadline=None)
@given(plan=plans(), per_chunk=st.sampled_from([1, 2, 3, 5, 1000]))
def test_plan_of_pairs(plan, per_chunk):
    check_plan(plan, per_chunk)


@settings(max_examples=60, deadline=None)
@given(
    masks=st.lists(st.lists(st.booleans(), min_size=1, max_size=14), min_size=1, max_size=4),
    per_chunk=st.integers(1, 9),
)
def test_plan_of_real_rows(tiny, masks, per_chunk):
    """Of packed documents with any masks, some rows dropped."""
    batch = pack([make_document(mask, seed, tiny) for seed, mask in enumerate(masks)])
    check_plan(plan_rows(batch, 3, batch.argmax_R % 4 > 0), per_chunk)


def test_pairs_move_with_their_chunks(case):
    pairs = plan_pairs(case.rows, 4)
    moved = pairs.to("cpu")
    assert (moved.chunks, moved.rows_per_chunk) == (pairs.chunks, 4)
    for name in ("step_N", "row_N", "local_N", "target_N", "positions_M"):
        assert torch.equal(getattr(moved, name), getattr(pairs, name))


# Greedy guesses, and large vocabularies


@pytest.mark.parametrize("mib", [None, 0.001, 1.0])
@pytest.mark.parametrize("shape", [(0, 7, 5), (1, 401, 5), (100, 401, 32), (13, 1, 5)], ids=str)
def test_first_choices_are_the_argmax(shape, mib):
    rows, width, inner = shape
    feature, weight = torch.randn(rows, inner), torch.randn(width, inner)
    with Operations() as operations:
        found = first_choices(feature, weight, mib)
    assert torch.equal(found, (feature @ weight.T).argmax(-1))
    assert operations.most <= max(rows_in_memory(weight, 1, mib) * width, feature.numel(), weight.numel())


def test_a_vocabulary_of_260_000_tokens():
    """Target and head over the whole of it, a few rows at a time: the loss is that of the full logits, and the target's own
    lm_head is read without a copy.
    """
    sizes = {
        "hidden_size": 8,
        "head_dim": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 8,
    }
    target = make_target(vocab=260_000, **sizes)
    head = make_tiny_head(target, None, steps=2)
    batch = pack([narrow_document(target, 12), narrow_document(target, 5)])
    head.engine.loss_mib = 40.0
    with Operations() as operations:
        out = head.loss(batch, target)
    assert operations.most <= 10 * 260_000
    plan = plan_rows(batch, 2)
    assert plan.bears_PI.sum() == 13 + 11
    wanted = torch.zeros(())
    with torch.no_grad():
        for step, output in enumerate(head.rollout(batch, target, plan)):
            rows = torch.nonzero(plan.bears_PI[:, step])[:, 0]
            p = target.logits(batch.last_RD[plan.target_PI[rows, step]]).softmax(-1)
            logq = head.logits(output[rows], target).log_softmax(-1)
            wanted += 0.8**step * (p * (p.log() - logq)).sum()
    assert float(out.total.detach()) == pytest.approx(float(wanted), rel=1e-4)
    out.total.backward()
    assert head.lm_head.weight.grad.shape == (260_000, 8)


def narrow_document(target, length: int):
    """Random states of a target of width 8; all of it an answer."""
    generator = torch.Generator().manual_seed(length)
    ids_T = torch.randint(target.spec.vocab_size, (length,), generator=generator)
    last = torch.randn(length - 1, 8, generator=generator)
    logits = target.logits(last)
    taps = torch.randn(length, 3, 8, generator=generator)
    return DocumentFeatures(
        ids_T, torch.ones(length, dtype=torch.bool), taps, last, logits.argmax(-1), logits.logsumexp(-1)
    )
