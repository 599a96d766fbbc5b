"""The plan of a rollout: which rows are computed, what they read, and what they are compared with."""

from hypothesis import given, settings
from hypothesis import strategies as st
from test_batch import MASKS, PACKED, document

from headwright.data.batch import pack
from headwright.data.rows import plan_rows


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
