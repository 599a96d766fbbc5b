"""lm_head and loss as one function, chunk by chunk: no matrix [rows, W] outlives its chunk, at any vocabulary size.

Shapes: N loss-bearing (row, step) pairs, n of them in a chunk, P rows, I steps, R positions of the target, H head width, W
draft vocabulary.

A chunk is a range of rows with all their steps. Its target distributions are made once and serve all steps; the gradient is
formed on the way, since it needs one number from above: ∂L/∂z is known with z. What lives on is ∂L/∂features and ∂L/∂W.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwright.data.batch import to_device
from headwright.data.rows import Rows
from headwright.heads.losses import Guess, Loss, Taught, decayed, dpace, rowdot

METRICS = ("loss", "alpha", "agree")
LEAST_MIB = 32.0
COPIES = 5  # of a step's [rows, W] in fp32 at a time, besides logits and slopes of all steps: p and what a slope makes


@dataclass
class Chunk:
    """Pairs step by step (`edges`, I + 1 of them); the target's positions that they need, [first, last) of `positions_M`; and
    for each step the range of these that is its own, where it is one.
    """

    edges: list[int]
    first: int
    last: int
    ranges: list[slice | None]


@dataclass
class Pairs:
    """Loss-bearing pairs, ordered by chunk, step and row: a pair's step, its row among the step's (row_N) and among the chunk's
    (local_N), and the target's position among the chunk's (target_N). positions_M: those of all chunks, one after the other.
    """

    step_N: Tensor
    row_N: Tensor
    local_N: Tensor
    target_N: Tensor
    positions_M: Tensor
    chunks: list[Chunk]
    rows_per_chunk: int

    def to(self, device: torch.device | str) -> "Pairs":
        """On `device`."""
        names = ("step_N", "row_N", "local_N", "target_N", "positions_M")
        moved: dict[str, Any] = {name: to_device(getattr(self, name), device) for name in names}
        return replace(self, **moved)


def plan_pairs(rows: Rows, rows_per_chunk: int) -> Pairs:
    """Chunks of consecutive rows. On the host."""
    rank_P = torch.argsort(torch.argsort(rows.rows_P))
    row_N, step_N = torch.nonzero(rows.bears_PI, as_tuple=True)
    group_N = rank_P[row_N] // rows_per_chunk * rows.steps + step_N
    order = torch.argsort(group_N * max(len(rank_P), 1) + rank_P[row_N])
    row_N, step_N = row_N[order], step_N[order]
    target_N = rows.target_PI[row_N, step_N]
    chunks, positions_M = plan_chunks(group_N[order], target_N, rows.steps)
    return Pairs(step_N, row_N, rank_P[row_N] % rows_per_chunk, target_N, positions_M, chunks, rows_per_chunk)


def plan_chunks(group_N: Tensor, target_N: Tensor, steps: int) -> tuple[list[Chunk], Tensor]:
    """Cut the ordered pairs; makes `target_N` relative to each chunk, and gives all chunks' positions."""
    count = int(group_N[-1]) // steps + 1 if len(group_N) else 0
    edges = [0, *torch.bincount(group_N, minlength=count * steps).cumsum(0).tolist()]
    chunks: list[Chunk] = []
    positions = [target_N[:0]]
    for place in range(count):
        mine = edges[place * steps : (place + 1) * steps + 1]
        if mine[0] < mine[-1]:
            needed, place_n = target_N[mine[0] : mine[-1]].unique(return_inverse=True)
            target_N[mine[0] : mine[-1]] = place_n
            first = chunks[-1].last if chunks else 0
            ranges = [as_range(target_N[a:b]) for a, b in itertools.pairwise(mine)]
            chunks.append(Chunk(mine, first, first + len(needed), ranges))
            positions.append(needed)
    return chunks, torch.cat(positions)


def as_range(places: Tensor) -> slice | None:
    """Consecutive places as a slice, which needs no copy."""
    if not len(places) or not bool((torch.diff(places) == 1).all()):
        return None
    return slice(int(places[0]), int(places[-1]) + 1)


def rows_in_memory(weight_WH: Tensor, steps: int, mib: float | None) -> int:
    """Rows of a chunk, from its memory. The default is that of the lm_head itself: smaller chunks would spend their time adding
    to its gradient.
    """
    budget = (mib or max(LEAST_MIB, weight_WH.numel() * 4 / 2**20)) * 2**20
    return max(1, int(budget / (4 * len(weight_WH) * (2 * steps + COPIES))))


@dataclass
class Weights:
    """Weights of a row's steps: base^i, or D-PACE with its floor."""

    base: float = 0.8
    dpace_floor: float | None = None

    def of(self, right_CI: Tensor, bears_CI: Tensor) -> Tensor:
        """[C, I], from the probability of the right token."""
        if self.dpace_floor is not None:
            return dpace(right_CI, bears_CI, self.dpace_floor)
        return decayed(right_CI, self.base)


@dataclass
class Task:
    """What is to be learned. teacher: the target's logits [r, W] at some of its R positions; logz_R their log-sum-exp over the
    whole vocabulary; first_R: its first choice as a draft id, -1 where the head cannot say it.
    """

    pairs: Pairs
    teacher: Callable[[Tensor], Tensor]
    logz_R: Tensor
    first_R: Tensor
    loss: Loss
    weights: Weights


def chunked_loss(task: Task, weights: Sequence[Tensor], features: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The weighted sum of all losses, and per step the sums of METRICS [3, I]. `features`: the lm_head's inputs of each step;
    `weights` [W, H]: one lm_head for all steps, or one per step.

    loss: the loss itself; alpha: Σ min(p, q) with p over the whole vocabulary; agree: the target's first choice is the head's,
    or one of several that tie.
    """
    if not torch.is_grad_enabled():  # else gradients would be formed for nobody
        weights, features = [part.detach() for part in weights], [part.detach() for part in features]
    total, sums = ChunkedFunction.apply(task, len(weights), *weights, *features)
    return total, sums


class ChunkedFunction(torch.autograd.Function):
    """`chunked_loss` with its gradient."""

    @staticmethod
    @torch.compiler.disable
    def forward(ctx: Any, task: Task, heads: int, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        weights, features = tensors[:heads], tensors[heads:]
        kind = features[0].device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else features[0].dtype
        wanted, weight_wanted = any(ctx.needs_input_grad[2 + heads :]), any(ctx.needs_input_grad[2 : 2 + heads])
        with torch.autocast(kind, enabled=False):
            work = Work(task, weights, features, dtype, wanted, weight_wanted)
            for chunk in task.pairs.chunks:
                work.run(chunk)
        ctx.save_for_backward(*work.for_weights, *work.for_features)
        ctx.mark_non_differentiable(work.sums)
        ctx.weight_dtypes, ctx.kept = [weight.dtype for weight in weights], len(work.for_weights)
        return work.total, work.sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # asked for once: checkpointing allows no more
        for_weights, for_features = saved[: ctx.kept], saved[ctx.kept :]
        heads = len(ctx.weight_dtypes)
        weights = [(part * grad).to(dtype) for part, dtype in zip(for_weights, ctx.weight_dtypes)]
        # in the dtype of `grad`: a loss scale of 65536 is infinite in fp16
        features = [(part.to(grad.dtype) * grad).to(part.dtype) for part in for_features]
        unwanted = len(ctx.needs_input_grad) - 2 - heads
        return None, None, *(weights or [None] * heads), *(features or [None] * unwanted)


class Work:
    """The running sums of one call."""

    def __init__(
        self,
        task: Task,
        weights: tuple[Tensor, ...],
        features: tuple[Tensor, ...],
        dtype: torch.dtype,
        wanted: bool,
        weight_wanted: bool,
    ):
        self.task, self.features, self.weights = task, features, [weight.to(dtype) for weight in weights]
        self.wide = wide = torch.promote_types(dtype, torch.float32)
        first = self.weights[0]
        self.total = first.new_zeros((), dtype=wide)
        self.sums = first.new_zeros(len(METRICS), len(features), dtype=wide)
        most = max((chunk.edges[-1] - chunk.edges[0] for chunk in task.pairs.chunks), default=0)
        # logits and their slopes, for one chunk after the other: fresh memory would cost a twentieth of the products
        self.buffers = [first.new_empty(most, len(first), dtype=wide) for _ in range(2)]
        self.for_features = [torch.zeros_like(part) for part in features] if wanted else []
        self.for_weights = [torch.zeros_like(weight, dtype=wide) for weight in weights] if weight_wanted else []

    def run(self, chunk: Chunk) -> None:
        """One chunk: its losses, and its share of the gradients."""
        pairs, edges = self.task.pairs, chunk.edges
        picked = slice(edges[0], edges[-1])
        parts = [slice(a - edges[0], b - edges[0]) for a, b in itertools.pairwise(edges)]
        row_n, target_n = pairs.row_N[picked], pairs.target_N[picked]
        h_nH = torch.cat([part[row_n[where]] for part, where in zip(self.features, parts)]).to(self.weights[0].dtype)
        z_nW, slope_nW = (buffer[: len(h_nH)] for buffer in self.buffers)
        for place, where in self.by_weight(parts):
            if h_nH.dtype == self.wide:
                torch.mm(h_nH[where], self.weights[place].T, out=z_nW[where])
            else:
                z_nW[where] = (h_nH[where] @ self.weights[place].T).to(self.wide)
        taught, said = self.teach(chunk)
        first = self.task.first_R[pairs.positions_M[chunk.first : chunk.last]]
        value_n, right_n = z_nW.new_empty(len(z_nW)), z_nW.new_empty(len(z_nW))
        for step, (where, target) in enumerate(zip(parts, chunk.ranges)):
            rows = target_n[where] if target is None else target
            guess = self.guess(z_nW[where], slope_nW[where])
            right_n[where] = self.measure(step, guess, said[rows], first[rows])
            value_n[where], slope = self.task.loss.slope(taught.rows(rows), guess)
            self.sums[0, step] += value_n[where].sum()
            if slope is not guess.q_PW:
                slope_nW[where] = slope
        weight_n = self.weigh(pairs.local_N[picked], pairs.step_N[picked], right_n)
        self.total += value_n @ weight_n
        self.differentiate(slope_nW.to(h_nH.dtype), h_nH, weight_n.to(h_nH.dtype)[:, None], row_n, parts)

    def by_weight(self, parts: list[slice]) -> list[tuple[int, slice]]:
        """Which pairs of a chunk each lm_head serves."""
        return [(0, slice(None))] if len(self.weights) == 1 else list(enumerate(parts))

    def teach(self, chunk: Chunk) -> tuple[Taught, Tensor]:
        """The target's distributions over the draft vocabulary, renormalised to it, and with the mass that they have."""
        where = self.task.pairs.positions_M[chunk.first : chunk.last]
        logits = self.task.teacher(where).to(self.wide)
        lse = logits.logsumexp(-1)
        mass = (lse - self.task.logz_R[where]).exp_().clamp_max_(1)
        probs = torch.softmax(logits, -1)
        negentropy = rowdot(probs, logits.clamp_min_(torch.finfo(logits.dtype).min)) - lse  # 0 · −∞ is no number
        return Taught(probs, negentropy), probs * mass[:, None]

    def guess(self, z_nW: Tensor, q_nW: Tensor) -> Guess:
        """Softmax, into `q_nW`, and log-sum-exp."""
        torch.softmax(z_nW, -1, out=q_nW)
        top_n = z_nW.amax(-1)  # with its place it would take seventeen times as long on a CPU
        return Guess(z_nW, q_nW, top_n, top_n - q_nW.amax(-1).log())

    def measure(self, step: int, guess: Guess, said_nW: Tensor, first_n: Tensor) -> Tensor:
        """The probability of the right token; adds to the metrics."""
        sayable, place = first_n >= 0, first_n.clamp_min(0)[:, None]
        agree = ((guess.z_PW.gather(-1, place)[:, 0] == guess.top_P) & sayable).sum()
        alpha = torch.minimum(said_nW, guess.q_PW).sum()
        self.sums[1:, step] += torch.stack([alpha, agree.to(alpha.dtype)])
        return guess.q_PW.gather(-1, place)[:, 0] * sayable

    def weigh(self, local_n: Tensor, step_n: Tensor, right_n: Tensor) -> Tensor:
        """The weight of each pair."""
        right_CI = right_n.new_zeros(self.task.pairs.rows_per_chunk, len(self.features))
        bears_CI = torch.zeros_like(right_CI)
        right_CI[local_n, step_n], bears_CI[local_n, step_n] = right_n, 1.0
        return self.task.weights.of(right_CI, bears_CI)[local_n, step_n]

    def differentiate(
        self, slope_nW: Tensor, h_nH: Tensor, weight_n1: Tensor, row_n: Tensor, parts: list[slice]
    ) -> None:
        """∂L/∂h = w · (slope W) and ∂L/∂W = Σ slopeᵀ (w · h)."""
        served = self.by_weight(parts)
        if self.for_features:
            back = [slope_nW[where] @ self.weights[place] for place, where in served]
            back_nH = (back[0] if len(back) == 1 else torch.cat(back)) * weight_n1
            for grad, where in zip(self.for_features, parts):
                grad.index_copy_(0, row_n[where], back_nH[where].to(grad.dtype))
        if not self.for_weights:
            return
        weighted_nH = h_nH * weight_n1
        for place, where in served:
            into = self.for_weights[place]
            if into.dtype == h_nH.dtype:
                into.addmm_(slope_nW[where].T, weighted_nH[where])
            else:
                into += slope_nW[where].T @ weighted_nH[where]


def first_choices(feature_XH: Tensor, weight_WH: Tensor, mib: float | None = None) -> Tensor:
    """The most likely draft id of each row [X]."""
    rows = rows_in_memory(weight_WH, 1, mib)
    return torch.cat([F.linear(part, weight_WH).argmax(-1) for part in feature_XH.split(rows)])


def ranks_of(feature_XH: Tensor, weight_WH: Tensor, label_X: Tensor, mib: float | None = None) -> Tensor:
    """How many draft ids stand before `label` in each row [X]; of equal logits the lower id comes first."""
    found = []
    rows = rows_in_memory(weight_WH, 1, mib)
    for part, labels in zip(feature_XH.split(rows), label_X.to(feature_XH.device).split(rows)):
        logits_XW = F.linear(part, weight_WH)
        own_X1 = logits_XW.gather(1, labels[:, None])
        before = torch.arange(logits_XW.shape[1], device=labels.device) < labels[:, None]
        found.append(((logits_XW > own_X1) | ((logits_XW == own_X1) & before)).sum(1))
    return torch.cat(found) if found else label_X
