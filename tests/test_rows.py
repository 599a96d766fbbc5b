"""The plan of a rollout: which rows are computed, what they read, and what they are compared with."""

import itertools
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_batch import MASKS, PACKED, document

from headwright.data.batch import FeatureBatch, pack
from headwright.data.rows import Rows, Spans, plan_rows


def test_rows_by_hand():
    """Two documents; ids 11 … and 20 …; the turns are 12-14, 17-18, 20-21, 23-24 with gaps between."""
    plan = plan_rows(PACKED, 3)
    assert plan.rows_P.tolist() == [1, 2, 6, 11], "row 1 rolls two steps, the others one"
    assert plan.counts == [4, 1, 0]
    assert plan.tokens_U[plan.reads_PI[:, 0]].tolist() == [12, 13, 17, 23]
    assert plan.tokens_U[plan.reads_PI[0, :2]].tolist() == [12, 13]
    assert plan.labels_PI[:, 0].tolist() == [13, 14, 18, 24]
    assert plan.bears_PI.int().tolist() == [[1, 1, 0], [1, 0, 0], [1, 0, 0], [1, 0, 0]]
    # places in last_RD (12, 13, 17, 20, 23) of position t+1+i: row 1 needs 12 and 13, row 2 13, row 6 17, row 11 23
    assert plan.target_PI.tolist() == [[0, 1, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]


@settings(max_examples=60, deadline=None)
@given(masks=MASKS, steps=st.integers(1, 4))
def test_every_loss_has_its_token_label_and_target(masks, steps):
    """The alignment as the contract states it, with loops over one document at a time."""
    packed = pack([document(mask, 100 * i) for i, mask in enumerate(masks)])
    found = {}
    plan = plan_rows(packed, steps)
    for p, t in enumerate(plan.rows_P.tolist()):
        for i in range(steps):
            if plan.bears_PI[p, i]:
                target = packed.last_RD[plan.target_PI[p, i], 0]
                found[t, i] = (int(plan.tokens_U[plan.reads_PI[p, i]]), int(plan.labels_PI[p, i]), int(target))
    wanted, start = {}, 0
    for number, mask in enumerate(masks):
        for t in range(len(mask)):
            for i in range(steps):
                turn = mask[t + 1 : t + 3 + i]
                if len(turn) == i + 2 and all(turn):
                    first = 100 * number + t
                    wanted[start + t, i] = (first + 1 + i, first + 2 + i, first + 1 + i)
        start += len(mask)
    assert found == wanted
    assert packed.loss_rows() == sum(i == 0 for _, i in wanted)


# The plan against a specification in loops, one document at a time. Ids are 100 · document + place, so that each names one.


TURNS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 7)), max_size=3).map(
    lambda turns: [bit for gap, length in turns for bit in [0] * gap + [1] * length] + [0]
)
CHATS = MASKS | st.lists(TURNS, min_size=1, max_size=3)  # long turns


class Specification:
    """What is computed, read and seen, from masks and from what teaches: teaches[document, position of `last`]."""

    def __init__(self, masks: list[list[int]], teaches: dict[tuple[int, int], bool], steps: int):
        self.masks, self.teaches, self.steps = masks, teaches, steps
        self.starts = [0, *itertools.accumulate(len(mask) for mask in masks)]
        self.all = [(d, t) for d, mask in enumerate(masks) for t in range(len(mask))]

    def might(self, d: int, t: int, i: int) -> bool:
        """x_{t+1} … x_{t+2+i} are response tokens of one turn."""
        turn = self.masks[d][t + 1 : t + 3 + i]
        return len(turn) == i + 2 and all(turn)

    def bears(self, d: int, t: int, i: int) -> bool:
        """And the target's word on the last of them teaches something."""
        return self.might(d, t, i) and self.teaches[d, t + 1 + i]

    def lasts(self, d: int, t: int, i: int) -> bool:
        """Bears loss at step i or later."""
        return any(self.bears(d, t, later) for later in range(i, self.steps))

    def computed(self, d: int, t: int, i: int) -> bool:
        """Bears loss at step i or later, or stands between two rows of its turn that do."""
        if not self.might(d, t, 0):
            return False
        first = last = t
        while first > 0 and self.might(d, first - 1, 0):
            first -= 1
        while self.might(d, last + 1, 0):
            last += 1
        return any(self.lasts(d, a, i) for a in range(first, t + 1)) and any(
            self.lasts(d, b, i) for b in range(t, last + 1)
        )

    def rows(self, i: int) -> list[int]:
        """Places in the batch of what step i computes."""
        return [self.starts[d] + t for d, t in self.all if self.computed(d, t, i)]

    def context(self) -> list[int]:
        """Rows of each document up to its last computed one."""
        return [
            self.starts[d] + t
            for d, t in self.all
            if any(self.computed(d, later, 0) for later in range(t, len(self.masks[d])))
        ]


def check_spans(spans: Spans, rows: list[int], plan: Rows, batch: FeatureBatch) -> None:
    """Each row once, in ascending order; its keys are the context rows of its document up to itself."""
    ordered = rows if spans.order is None else [rows[place] for place in spans.order.tolist()]
    assert ordered == sorted(rows)
    context, stop = plan.context_C.tolist(), 0
    for span in spans.parts:
        assert span.start == stop < span.stop
        stop = span.stop
        for query in range(span.start, span.stop):
            row = ordered[query]
            seen = context[span.first : span.own + query - span.start + 1]
            assert seen == list(range(row - int(batch.position_T[row]), row + 1))
    assert stop == len(rows)
    for a, b in itertools.pairwise(spans.parts):
        assert (ordered[a.stop - 1] + 1, a.first) != (ordered[b.start], b.first), "two spans where one would do"


@settings(max_examples=150, deadline=None)
@given(masks=CHATS, steps=st.integers(1, 5), data=st.data())
def test_plan_is_the_specification(masks, steps, data):
    """Any turns, any steps, and any choice of what teaches."""
    batch = pack([document(mask, 100 * d) for d, mask in enumerate(masks)])
    stored = [(int(i) // 100, int(i) % 100) for i in batch.ids_T[batch.last_index_R]]
    flags = data.draw(st.lists(st.booleans(), min_size=len(stored), max_size=len(stored)))
    given_R = torch.tensor(flags, dtype=torch.bool) if data.draw(st.booleans()) else None
    spec = Specification(masks, dict(zip(stored, flags if given_R is not None else [True] * len(stored))), steps)
    plan = plan_rows(batch, steps, given_R)
    ids, rows, tokens = batch.ids_T.tolist(), plan.rows_P.tolist(), plan.tokens_U.tolist()

    assert plan.counts == [len(spec.rows(i)) for i in range(steps)]
    assert plan.steps == steps
    for i, count in enumerate(plan.counts):
        assert sorted(rows[:count]) == spec.rows(i)
    assert plan.context_C.tolist() == spec.context()
    assert plan.context_C[plan.place_P].tolist() == rows
    assert torch.equal(plan.position_C, batch.position_T[plan.context_C])
    assert torch.equal(plan.position_P, batch.position_T[plan.rows_P])

    asked, read = set(), {ids[row + 1] for row in spec.context()}
    assert [tokens[u] for u in plan.reads_C.tolist()] == [ids[row + 1] for row in spec.context()]
    for i, count in enumerate(plan.counts):
        for p in range(count):
            token = ids[rows[p] + 1 + i]
            asked.add(token)
            assert tokens[plan.reads_PI[p, i]] == token
            assert plan.asks_X[plan.asks_PI[p, i]] == plan.reads_PI[p, i]
    assert sorted(tokens) == sorted(asked | read)
    assert sorted(tokens[u] for u in plan.asks_X.tolist()) == sorted(asked)

    for p, row in enumerate(rows):
        d, t = ids[row] // 100, ids[row] % 100
        for i in range(steps):
            assert bool(plan.bears_PI[p, i]) == spec.bears(d, t, i)
            if spec.bears(d, t, i):
                assert plan.labels_PI[p, i] == ids[row] + 2 + i
                assert stored[plan.target_PI[p, i]] == (d, t + 1 + i)
    assert int(plan.bears_PI.sum()) == sum(spec.bears(d, t, i) for d, t in spec.all for i in range(steps))

    assert len(plan.spans) == steps
    for count, spans in zip(plan.counts, plan.spans):
        check_spans(spans, rows[:count], plan, batch)
    check_spans(plan.everything, plan.context_C.tolist(), plan, batch)


def test_holes_are_filled_by_hand():
    """A turn of eight tokens, 1 … 8, of which the target teaches at 1, 2 and 6: rows 0 … 5 bear loss until steps 2, 1, 0, 3, 2
    and 1. Rows between others roll as far as the nearer of these.
    """
    batch = pack([document([0, 1, 1, 1, 1, 1, 1, 1, 1], 0)])
    assert batch.ids_T[batch.last_index_R].tolist() == [1, 2, 3, 4, 5, 6, 7]
    taught_R = torch.tensor([True, True, False, False, False, True, False])
    plan = plan_rows(batch, 3, taught_R)
    reach = {row: sum(place < count for count in plan.counts) for place, row in enumerate(plan.rows_P.tolist())}
    # row t bears at step i when t + 1 + i is taught: (0, 0) (0, 1) (1, 0) (3, 2) (4, 1) (5, 0)
    assert plan.bears_PI.sum() == 6
    assert reach == {0: 2, 1: 2, 2: 2, 3: 3, 4: 2, 5: 1}


@settings(max_examples=60, deadline=None)
@given(masks=CHATS, steps=st.integers(1, 5), data=st.data())
def test_rows_of_a_turn_are_one_run_at_every_step(masks, steps, data):
    """Whatever teaches: no step computes a row, leaves out the next, and computes one after it in the same turn."""
    batch = pack([document(mask, 100 * d) for d, mask in enumerate(masks)])
    flags = data.draw(st.lists(st.booleans(), min_size=len(batch.last_RD), max_size=len(batch.last_RD)))
    plan = plan_rows(batch, steps, torch.tensor(flags, dtype=torch.bool))
    might_T = batch.loss_masks(1)[:, 0].tolist()
    for count in plan.counts:
        rows = sorted(plan.rows_P[:count].tolist())
        for a, b in itertools.pairwise(rows):
            assert b == a + 1 or not all(might_T[a : b + 1])


def test_documents_without_loss_cost_nothing():
    """Prompts alone, a turn of one token, and what no target teaches: not even keys."""
    masks = [[0] * 7, [0, 0, 1], [0, 1, 1, 1, 0], [1], [0, 0, 1, 1, 1, 1]]
    batch = pack([document(mask, 100 * d) for d, mask in enumerate(masks)])
    teaches_R = batch.ids_T[batch.last_index_R] >= 400
    plan = plan_rows(batch, 3, teaches_R)
    assert set(batch.segment_T[plan.context_C].tolist()) == {4}
    assert sorted(plan.tokens_U.tolist()) == [401, 402, 403, 404], "nor the token that is predicted last"


def empty_batch() -> FeatureBatch:
    """A batch of no tokens."""
    return replace(PACKED, **{field.name: getattr(PACKED, field.name)[:0] for field in fields(FeatureBatch)})


@pytest.mark.parametrize(
    "batch",
    [empty_batch(), PACKED.without_loss(), pack([document([]), document([])]), pack([document([1])])],
    ids=["no tokens", "without loss", "empty documents", "one token"],
)
def test_nothing_to_learn(batch):
    """A plan of no rows, no context, no tokens and no spans, in the shapes that a rollout expects."""
    for teaches_R in (None, torch.ones(len(batch.last_RD), dtype=torch.bool)):
        plan = plan_rows(batch, 3, teaches_R)
        assert plan.counts == [0, 0, 0]
        for name in ("context_C", "position_C", "place_P", "rows_P", "position_P", "tokens_U", "reads_C", "asks_X"):
            assert getattr(plan, name).shape == (0,), name
        for name in ("reads_PI", "asks_PI", "labels_PI", "bears_PI", "target_PI"):
            assert getattr(plan, name).shape == (0, 3), name
        assert [spans.parts for spans in [*plan.spans, plan.everything]] == [[], [], [], []]


def test_empty_documents_between_others_change_nothing():
    masks = [[0, 1, 1, 1], [1, 1, 1, 0, 1, 1]]
    alone = [document(mask, 100 * d) for d, mask in enumerate(masks)]
    with_empty = plan_rows(pack([document([]), alone[0], document([]), document([]), alone[1], document([])]), 3)
    plan = plan_rows(pack(alone), 3)
    for field in fields(Rows):
        if isinstance(getattr(plan, field.name), torch.Tensor):
            assert torch.equal(getattr(plan, field.name), getattr(with_empty, field.name)), field.name
    assert plan.counts == with_empty.counts
    assert [spans.parts for spans in plan.spans] == [spans.parts for spans in with_empty.spans]


def tensors_of(plan: Rows) -> list[torch.Tensor]:
    """Every tensor of a plan, spans included."""
    own = [getattr(plan, field.name) for field in fields(Rows)]
    orders = [spans.order for spans in [*plan.spans, plan.everything]]
    return [value for value in own + orders if isinstance(value, torch.Tensor)]


def test_moving_keeps_everything():
    """On another device: the same shapes, counts, spans and orders, and nothing left behind; where it was: equal."""
    plan = plan_rows(PACKED, 3)
    assert plan.spans[0].order is None
    plan = plan_rows(pack([document([0, 1, 1, 1, 0, 1, 1, 1, 1, 1]), document([1, 1, 1, 1])]), 3)
    assert plan.spans[0].order is not None
    for device in ("meta", "cpu"):
        moved = plan.to(device)
        assert all(x.device.type == device for x in tensors_of(moved))
        assert [x.shape for x in tensors_of(moved)] == [x.shape for x in tensors_of(plan)]
        assert moved.counts == plan.counts
        assert [spans.parts for spans in moved.spans] == [spans.parts for spans in plan.spans]
        assert moved.everything.parts == plan.everything.parts
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(plan.to("cpu")), tensors_of(plan), strict=True))
    assert all(x.device.type == "cpu" for x in tensors_of(plan)), "the plan on the host stays there"


def test_moving_a_plan_that_was_packed():
    """What variable-length kernels read is on the device that they ask for."""
    plan = plan_rows(PACKED, 3)
    plan.spans[0].packed_on(torch.device("cpu"), len(plan.context_C))
    packed = plan.to("meta").spans[0].packed_on(torch.device("meta"), len(plan.context_C))
    assert packed.edges[0].device.type == "meta"
