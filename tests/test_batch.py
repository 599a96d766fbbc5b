"""Which token goes with which feature: by hand, and packed against one document at a time."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwright.data.batch import DocumentFeatures, last_rows, loss_masks, pack, shift, start_mask


def document(mask: list[int], first_id: int = 0, taps: int = 2, width: int = 3) -> DocumentFeatures:
    """A document whose every number names its place."""
    mask_T = torch.tensor(mask, dtype=torch.bool)
    ids_T = torch.arange(len(mask)) + first_id
    rows = last_rows(mask_T)
    return DocumentFeatures(
        ids_T,
        mask_T,
        ids_T[:, None, None].float() + torch.arange(taps * width).view(taps, width) / 10,
        ids_T[rows][:, None].float() + torch.arange(width) / 10,
        ids_T[rows] + 1000,
        ids_T[rows].float() + 0.5,
    )


# Document A: ids 10..18, two turns (12 13 14) and (17 18). Document B: ids 20..24, begins in an answer: (20 21), (23 24).
MASK_A = [0, 0, 1, 1, 1, 0, 0, 1, 1]
MASK_B = [1, 1, 0, 1, 1]
PACKED = pack([document(MASK_A, 10), document(MASK_B, 20)])


def rows(mask: torch.Tensor) -> list[int]:
    """Where a mask is set."""
    return mask.nonzero()[:, 0].tolist()


def test_packing_by_hand():
    assert PACKED.ids_T.tolist() == [10, 11, 12, 13, 14, 15, 16, 17, 18, 20, 21, 22, 23, 24]
    assert PACKED.mask_T.int().tolist() == MASK_A + MASK_B
    assert PACKED.segment_T.tolist() == [0] * 9 + [1] * 5
    assert PACKED.position_T.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2, 3, 4]
    # `last` stands on response tokens followed by a response token of the same document: 12, 13 (not 14), 17 (not 18,
    # though the next token of the pack is a response token), 20, 23
    assert PACKED.last_index_R.tolist() == [2, 3, 7, 9, 12]
    assert PACKED.last_RD[:, 0].tolist() == [12, 13, 17, 20, 23]
    assert PACKED.argmax_R.tolist() == [1012, 1013, 1017, 1020, 1023]
    assert PACKED.logz_R.tolist() == [12.5, 13.5, 17.5, 20.5, 23.5]
    assert PACKED.taps_TKD[:, 0, 0].tolist() == PACKED.ids_T.tolist()


def test_start_rows_by_hand():
    """Row t starts where x_{t+1} is a response token of its document. Id 20 is no row's next token: nothing precedes it."""
    assert start_mask(PACKED.mask_T, PACKED.segment_T).int().tolist() == [0, 1, 1, 1, 0, 0, 1, 1, 0, 1, 0, 1, 1, 0]


def test_loss_rows_by_hand():
    masks = loss_masks(PACKED.mask_T, PACKED.segment_T, 4).T.int().tolist()
    # step 0: x_{t+1}, x_{t+2} in one turn: (12 13) (13 14) | (17 18) | - | (23 24); step 1 needs three: (12 13 14)
    assert masks[0] == [0, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0]
    assert masks[1] == [0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    assert masks[2] == masks[3] == [0] * 14
    assert PACKED.loss_rows() == 4


def test_shift():
    values = torch.tensor([1, 2, 3])
    assert shift(values, 0).tolist() == [1, 2, 3]
    assert shift(values, 2, -1).tolist() == [3, -1, -1]
    assert shift(values, 3).tolist() == shift(values, 9).tolist() == [0, 0, 0]


MASKS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(masks=MASKS, steps=st.integers(1, 4))
def test_packed_is_each_document_alone(masks, steps):
    documents = [document(mask, 100 * i) for i, mask in enumerate(masks)]
    packed = pack(documents)
    start, place = 0, 0
    for number, one in enumerate(documents):
        length = len(one.ids_T)
        alone = pack([one])
        own = slice(start, start + length)
        assert (packed.segment_T[own] == number).all()
        for name in ("ids_T", "mask_T", "position_T", "taps_TKD"):
            assert torch.equal(getattr(packed, name)[own], getattr(alone, name))
        assert torch.equal(start_mask(packed.mask_T, packed.segment_T)[own], start_mask(alone.mask_T, alone.segment_T))
        together = loss_masks(packed.mask_T, packed.segment_T, steps)[own]
        assert torch.equal(together, loss_masks(alone.mask_T, alone.segment_T, steps))
        assert torch.equal(packed.last_index_R[place : place + len(alone.last_RD)] - start, alone.last_index_R)
        start, place = start + length, place + len(alone.last_RD)
    assert place == len(packed.last_RD)


def test_without_loss():
    idle = PACKED.without_loss()
    assert idle.loss_rows() == 0
    assert torch.equal(idle.ids_T, PACKED.ids_T)
    assert PACKED.loss_rows() == 4


def test_to_changes_the_states_only():
    moved = PACKED.to("cpu", torch.bfloat16)
    assert moved.taps_TKD.dtype == moved.last_RD.dtype == torch.bfloat16
    assert (moved.ids_T.dtype, moved.mask_T.dtype, moved.logz_R.dtype) == (torch.int64, torch.bool, torch.float32)
