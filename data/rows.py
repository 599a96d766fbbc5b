"""Which rows a rollout computes: decided on the host, before the step, so that no step waits for the device.

Shapes: T packed tokens, C context rows, P computed rows, I steps, U token places that are read, X those of queries.

A row is computed at step i when it, or a row of its turn on either side, bears loss at step i or later: the rows of a
turn stay one unbroken run, and every step's rows are among the last step's. Ordered by how far they roll, the rows of
step i are the first `counts[i]`. All others give their step-0 keys and values, and only where a computed row of their
document comes after them.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwright.data.batch import FeatureBatch, runs_of, to_device


class Span(NamedTuple):
    """Consecutive queries of one document, [start, stop): they see keys [first, own) and, causally, as many from `own` on."""

    start: int
    stop: int
    first: int
    own: int


@dataclass
class Packed:
    """Spans as the variable-length batch of FlashAttention, whose causal mask lets the last query see the last key: that is
    what a span is. Spans of one document see the same keys, so keys are gathered (index None: they lie as they are).
    """

    edges: tuple[Tensor, Tensor]
    longest: tuple[int, int]
    index: Tensor | None

    def gather(self, keys_CGE: Tensor) -> Tensor:
        """The keys that the spans see, one span after the other."""
        return keys_CGE if self.index is None else keys_CGE[self.index]

    def scatter(self, grad: Tensor, keys: int) -> Tensor:
        """The gradient of `keys` keys."""
        if self.index is None:
            return grad
        return grad.new_zeros(keys, *grad.shape[1:]).index_add_(0, self.index, grad)


@dataclass
class Spans:
    """The queries of a step as spans; `order` brings the step's rows into the order of the spans (None: they are)."""

    parts: list[Span]
    order: Tensor | None = None
    packed: Packed | None = None

    def to(self, device: torch.device | str) -> "Spans":
        """On `device`."""
        return Spans(self.parts, None if self.order is None else to_device(self.order, device))

    def packed_on(self, device: torch.device, keys: int) -> Packed:
        """For kernels of variable length, made once."""
        if self.packed is None:
            self.packed = pack_spans(self.parts, keys, device)
        return self.packed


def pack_spans(parts: Sequence[Span], keys: int, device: torch.device) -> Packed:
    """Spans over `keys` keys."""
    queries = [span.stop - span.start for span in parts]
    seen = [(span.first, span.own + count) for span, count in zip(parts, queries)]
    widths = [stop - first for first, stop in seen]
    straight = seen[:1] and seen[0][0] == 0 and seen[-1][1] == keys
    straight = straight and all(a[1] == b[0] for a, b in itertools.pairwise(seen))
    index = None if straight else to_device(torch.cat([torch.arange(*part) for part in seen]), device)
    edges = tuple(to_device(torch.tensor([0, *counts]).cumsum(0).int(), device) for counts in (queries, widths))
    return Packed((edges[0], edges[1]), (max(queries), max(widths)), index)


@dataclass
class Rows:
    """The plan of a rollout of I steps.

    context_C: rows whose step-0 keys are needed, ascending; place_P: where the computed rows are among them.
    rows_P: the computed rows, far-rolling ones first; counts: how many of them each step computes.
    tokens_U: every token that is read; reads_C, reads_PI: its place for a context row and for a row at a step.
    asks_X: the places among U whose queries are needed; asks_PI: the same for a row at a step.
    labels_PI: the token to be predicted; bears_PI: it bears loss; target_PI: the place in `last_RD` of what the target
    says there (0 where nothing is asked of it).
    everything, spans: attention of all context rows at step 0 (layers below the last), and of each step's rows.
    """

    context_C: Tensor
    position_C: Tensor
    place_P: Tensor
    rows_P: Tensor
    position_P: Tensor
    counts: list[int]
    tokens_U: Tensor
    reads_C: Tensor
    reads_PI: Tensor
    asks_X: Tensor
    asks_PI: Tensor
    labels_PI: Tensor
    bears_PI: Tensor
    target_PI: Tensor
    everything: Spans
    spans: list[Spans]

    @property
    def steps(self) -> int:
        """I."""
        return len(self.counts)

    def to(self, device: torch.device | str) -> "Rows":
        """On `device`."""
        moved: dict[str, Any] = {
            field.name: to_device(value, device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(
            self, spans=[spans.to(device) for spans in self.spans], everything=self.everything.to(device), **moved
        )


def plan_rows(batch: FeatureBatch, steps: int, teaches_R: Tensor | None = None) -> Rows:
    """The plan for a batch on the host. Where what the target says teaches nothing (teaches_R false), no loss is borne."""
    bears_TI = batch.loss_masks(steps)
    end = len(batch.ids_T) - 1
    ahead_TI = torch.arange(len(batch.ids_T))[:, None] + torch.arange(steps)
    target_TI = torch.where(bears_TI, target_places(batch)[(ahead_TI + 1).clamp(0, max(end, 0))], 0)
    kept_TI = bears_TI if teaches_R is None or not len(teaches_R) else bears_TI & teaches_R[target_TI]
    reach_T = unbroken(reach(kept_TI), runs_of(bears_TI[:, 0]))
    rows_P = torch.argsort(reach_T, descending=True, stable=True)[: int((reach_T > 0).sum())]
    context_T = needed_context(reach_T > 0, batch.segment_T)
    context_C, place_T = torch.nonzero(context_T)[:, 0], context_T.cumsum(0) - 1
    ahead_PI = ahead_TI[rows_P] + 1
    asked_T = mark(len(batch.ids_T) + steps, ahead_PI[reach_T[rows_P, None] > torch.arange(steps)])
    read_T = asked_T | mark(len(batch.ids_T) + steps, context_C + 1)
    reads_T, asks_T = read_T.cumsum(0) - 1, asked_T.cumsum(0) - 1
    first_T = place_T[document_starts(batch.segment_T)]
    return Rows(
        context_C=context_C,
        position_C=batch.position_T[context_C],
        place_P=place_T[rows_P],
        rows_P=rows_P,
        position_P=batch.position_T[rows_P],
        counts=[int((reach_T > i).sum()) for i in range(steps)],
        tokens_U=batch.ids_T[torch.nonzero(read_T)[:, 0].clamp_max(end)],
        reads_C=reads_T[context_C + 1],
        reads_PI=reads_T[ahead_PI].clamp_min(0),
        asks_X=reads_T[torch.nonzero(asked_T)[:, 0]],
        asks_PI=asks_T[ahead_PI].clamp_min(0),
        labels_PI=batch.ids_T[(ahead_PI + 1).clamp_max(end)],
        bears_PI=kept_TI[rows_P],
        target_PI=target_TI[rows_P],
        everything=Spans(spans_of(context_C, place_T, first_T)),
        spans=[step_spans(reach_T > i, rows_P, place_T, first_T) for i in range(steps)],
    )


def target_places(batch: FeatureBatch) -> Tensor:
    """The place in `last_RD` of each position [T]; 0 for those without one."""
    place_T = torch.zeros_like(batch.ids_T)
    place_T[batch.last_index_R] = torch.arange(len(batch.last_index_R))
    return place_T


def reach(kept_TI: Tensor) -> Tensor:
    """The number of steps that a row must roll to reach its last loss [T]."""
    return (kept_TI * torch.arange(1, kept_TI.shape[1] + 1)).amax(1)


def unbroken(reach_T: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
    """Rows between two that roll further roll as far as the nearer of them: each step's rows of a turn are one run."""
    filled_T = reach_T.clone()
    for start, end in runs:
        part = reach_T[start:end]
        filled_T[start:end] = torch.minimum(part.cummax(0).values, part.flip(0).cummax(0).values.flip(0))
    return filled_T


def needed_context(computed_T: Tensor, segment_T: Tensor) -> Tensor:
    """Rows of each document up to its last computed one [T]."""
    after_T = torch.cat([computed_T.flip(0).cumsum(0).flip(0), torch.zeros(1, dtype=torch.long)])  # from here on
    ends_T = torch.diff(segment_T, append=torch.full((1,), -1)) != 0
    rows_T = torch.arange(len(segment_T))
    end_T = torch.where(ends_T, rows_T, len(rows_T)).flip(0).cummin(0).values.flip(0)
    return after_T[rows_T] > after_T[end_T + 1]


def document_starts(segment_T: Tensor) -> Tensor:
    """The first row of each row's document [T]."""
    begins_T = torch.diff(segment_T, prepend=torch.full((1,), -1)) != 0
    return torch.where(begins_T, torch.arange(len(segment_T)), 0).cummax(0).values


def mark(count: int, places: Tensor) -> Tensor:
    """True at some places."""
    marked = torch.zeros(count, dtype=torch.bool)
    marked[places] = True
    return marked


def step_spans(computed_T: Tensor, rows_P: Tensor, place_T: Tensor, first_T: Tensor) -> Spans:
    """One step's rows as spans."""
    order = torch.argsort(rows_P[: int(computed_T.sum())])
    in_order = bool((order == torch.arange(len(order))).all())
    return Spans(spans_of(torch.nonzero(computed_T)[:, 0], place_T, first_T), None if in_order else order)


def spans_of(rows_N: Tensor, place_T: Tensor, first_T: Tensor) -> list[Span]:
    """Ascending rows, cut where they are not consecutive: so between documents, whose last row never bears loss."""
    edges = torch.nonzero(torch.diff(rows_N) != 1)[:, 0] + 1
    starts = [0, *edges.tolist()] if len(rows_N) else []
    stops = [*edges.tolist(), len(rows_N)]
    own, first = place_T[rows_N[starts]].tolist(), first_T[rows_N[starts]].tolist()
    return [Span(*part) for part in zip(starts, stops, first, own)]
