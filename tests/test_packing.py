"""Packing: every loss-bearing row once per epoch, within the budget, nearly full, whatever the lengths; parts ≡ the whole."""

from dataclasses import replace

import pytest
import torch
from conftest import make_tiny_head
from hypothesis import given, settings
from hypothesis import strategies as st
from test_store import fill, make_documents
from test_ttt import assert_all_close, documents_for, gradients, make_document

from headwright.configs import UserError
from headwright.data.batch import pack
from headwright.data.packing import Piece, first_fit, plan_epoch
from headwright.data.store import FeatureReader
from headwright.data.stream import FeatureStream
from headwright.data.vet import make_vet


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 90), st.integers(0, 90)), min_size=1, max_size=80),
    budget=st.integers(1, 60),
    long=st.sampled_from(["split", "whole"]),
)
def test_every_piece_once_within_the_budget(sizes, budget, long):
    lengths, rows = [a for a, _ in sizes], [min(a, b) for a, b in sizes]
    batches = plan_epoch(lengths, rows, budget, 3, 1, long)
    pieces = [piece for batch in batches for piece in batch]
    wanted = []
    for document, (length, count) in enumerate(zip(lengths, rows)):
        parts = -(-count // budget) if length > budget and long == "split" else min(count, 1)
        wanted += [Piece(document, part, parts) for part in range(parts)]
    assert sorted(pieces) == wanted
    for batch in batches:
        assert batch
        assert len(batch) == 1 or sum(lengths[piece.document] for piece in batch) <= budget


@pytest.mark.parametrize("budget", [1024, 2048, 4096])
@pytest.mark.parametrize("seed", [0, 1])
def test_batches_of_a_chat_like_mix_are_at_least_95_percent_full(budget, seed):
    """Log-normal lengths, as of ShareGPT cut at the budget; in order of arrival the same budget is filled worse."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(5000, generator=generator).mul(0.9).add(6.0).exp()
    lengths = drawn.clamp(24, budget).int().tolist()
    batches = plan_epoch(lengths, [1] * len(lengths), budget, seed, 0)
    assert sum(lengths) / (budget * len(batches)) >= 0.95
    in_order, filled = 1, 0
    for length in lengths:
        if filled + length > budget:
            in_order, filled = in_order + 1, 0
        filled += length
    assert len(batches) < in_order


def test_first_fit_by_hand():
    assert first_fit([0, 1, 2, 3, 4], [3, 9, 7, 1, 3], 10) == [[1, 3], [2, 0], [4]]


def test_epochs_and_seeds_pack_differently_and_repeatably():
    lengths = torch.randint(10, 400, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    plans = {
        (seed, epoch): plan_epoch(lengths, [1] * 300, 1024, seed, epoch) for seed in range(3) for epoch in range(3)
    }
    assert len({str(plan) for plan in plans.values()}) == 9
    assert plans[1, 2] == plan_epoch(lengths, [1] * 300, 1024, 1, 2)


def test_batches_are_shuffled():
    """Long documents, which are packed last, are not learned last."""
    lengths = torch.randint(10, 400, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    batches = plan_epoch(lengths, [1] * 300, 300, 0, 0)
    long = [place for place, batch in enumerate(batches) if lengths[batch[0].document] > 300]
    assert len(long) > 50
    assert 0.4 < sum(long) / len(long) / len(batches) < 0.6


@settings(max_examples=25, deadline=None)
@given(mask=st.lists(st.booleans(), min_size=3, max_size=24), parts=st.integers(1, 4), steps=st.integers(1, 4))
def test_parts_are_the_whole_document(tiny, mask, parts, steps):
    """Loss and gradients of a document are the sums of those of its parts, of which each sees all before it."""
    head = make_tiny_head(tiny, steps=steps)
    document = make_document(mask, 7, tiny)
    whole = head.loss(pack([document]), tiny)
    pieces = [head.loss(pack([document.part(part, parts, head.lookahead)]), tiny) for part in range(parts)]
    total = sum(piece.total for piece in pieces)
    assert torch.allclose(total, whole.total, rtol=1e-5, atol=1e-6)
    assert_all_close(gradients(head, total), gradients(head, whole.total), 1e-5)
    for name, (top, bottom) in whole.metrics.items():
        assert float(sum(piece.metrics[name][1] for piece in pieces)) == float(bottom)
        assert float(sum(piece.metrics[name][0] for piece in pieces)) == pytest.approx(float(top), rel=1e-4, abs=1e-5)


def test_too_short_a_lookahead_would_show(tiny):
    """Negative control: a part that ends with its last row loses the later steps of its last rows."""
    head, document = make_tiny_head(tiny, steps=4), make_document([False] * 2 + [True] * 14, 7, tiny)
    whole = head.loss(pack([document]), tiny).total
    pieces = [head.loss(pack([document.part(part, 2, 2)]), tiny).total for part in range(2)]
    assert float(sum(pieces).detach()) < float(whole.detach()) * 0.99


# Documents that cannot be learned from


FAULTS = {
    "nan in taps": lambda d: d.taps_TKD[4, 1].fill_(float("nan")),
    "inf in last": lambda d: d.last_RD[2, 3].fill_(float("inf")),
    "nan in logz": lambda d: d.logz_R[1:2].fill_(float("nan")),
    "token": lambda d: d.ids_T[3:4].fill_(10**6),
    "negative token": lambda d: d.ids_T[3:4].fill_(-2),
    "choice": lambda d: d.argmax_R[1:2].fill_(999),
}
SAID = {
    "nan in taps": "NaN or infinite feature: taps of row 4",
    "inf in last": "NaN or infinite feature: last of row 2",
    "nan in logz": "NaN or infinite feature: logz of row 1",
    "token": "token 3 is 1000000, the target's vocabulary has 272",
    "negative token": "token 3 is -2",
    "choice": "the target's choice 1 is 999",
}


def spoilt(tiny, fault: str):
    """A document with one fault."""
    document = make_document([False] * 3 + [True] * 7, 1, tiny)
    FAULTS[fault](document)
    return document


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(tiny, fault):
    vet = make_vet(272, 3, "bfloat16")
    assert vet(make_document([False] * 3 + [True] * 7, 1, tiny)) is None
    assert SAID[fault] in vet(spoilt(tiny, fault))


def test_wrong_taps_and_nothing_to_learn_are_named(tiny):
    document = make_document([False] * 3 + [True] * 7, 1, tiny)
    assert "it has 3 taps, the head reads 4" in make_vet(272, 4, "bfloat16")(document)
    for mask in ([False] * 4, [False, True, False, True], [True, True]):
        assert "no row bears loss" in make_vet(272, 3, "bfloat16")(make_document(mask, 1, tiny))
    assert make_vet(272, 3, "bfloat16")(make_document([True, True, True], 1, tiny)) is None


def test_overflow_of_float16_says_what_to_do(tiny):
    assert "harvest.dtype=bfloat16" in make_vet(272, 3, "float16")(spoilt(tiny, "inf in last"))
    assert "bfloat16" not in make_vet(272, 3, "bfloat16")(spoilt(tiny, "inf in last"))


class Spoilt(FeatureReader):
    """A store some of whose documents turn out to hold a NaN, which no writer lets in."""

    bad: tuple[int, ...] = (5,)

    def __getitem__(self, document: int):
        found = super().__getitem__(document)
        if document in self.bad:
            found.taps_TKD = found.taps_TKD.clone().fill_(float("nan"))
        return found


@pytest.fixture
def bad_store(tmp_path) -> FeatureReader:
    """A store whose document 5 holds a NaN."""
    documents = [d for d in make_documents(20, seed=5) if len(d.last_RD) > 1][:9]
    fill(tmp_path, documents, per_unit=4).finish()
    return Spoilt(tmp_path)


def stream_over(reader, **options) -> FeatureStream:
    """A stream that looks at features."""
    taps = reader[0].taps_TKD.shape[1]
    return FeatureStream(reader, 40, vet=make_vet(10**6, taps, "bfloat16"), **options)


def test_a_bad_document_ends_the_run_by_name(bad_store):
    stream = stream_over(bad_store)
    with pytest.raises(UserError, match=r"document 5 \(.+\): NaN or infinite feature.*train\.bad_documents=skip"):
        list(stream.steps(0, stream.steps_per_epoch()))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_document_is_skipped_and_counted(bad_store, workers):
    stream = stream_over(bad_store, skip=True, workers=workers)
    batches = [batch for step in stream.steps(0, stream.steps_per_epoch()) for batch in step]
    assert list(stream.skipped) == [5]
    good = sum(pack([bad_store[d]]).loss_rows() for d in range(9) if d != 5)
    assert sum(batch.loss_rows() for batch in batches) == good > 0


def test_skipped_documents_leave_loss_and_gradients_finite(tiny):
    """What is not learned is not read either: a NaN beside good documents changes nothing."""
    head, good = make_tiny_head(tiny), documents_for(tiny)[:2]
    bad = spoilt(tiny, "nan in taps")
    unread = replace(bad, learn_T=torch.zeros_like(bad.mask_T))
    with_bad, without = (head.loss(pack(documents), tiny) for documents in ([good[0], unread, good[1]], good))
    assert torch.allclose(with_bad.total, without.total, rtol=1e-6)
    assert_all_close(gradients(head, with_bad.total), gradients(head, without.total), 1e-6)


def test_only_bad_documents_end_the_run(bad_store, monkeypatch):
    monkeypatch.setattr(Spoilt, "bad", tuple(range(9)))
    stream = stream_over(bad_store, skip=True)
    with pytest.raises(UserError, match="no document can be learned from"):
        list(stream.steps(0, 99))


def test_a_store_without_anything_to_learn_is_refused(tmp_path):
    documents = [replace(d, mask_T=torch.zeros_like(d.mask_T)) for d in make_documents(3, seed=5)]
    empty = [replace(d, last_RD=d.last_RD[:0], argmax_R=d.argmax_R[:0], logz_R=d.logz_R[:0]) for d in documents]
    fill(tmp_path, empty, per_unit=4).finish()
    with pytest.raises(UserError, match="there is nothing to learn"):
        FeatureStream(FeatureReader(tmp_path), 40)
