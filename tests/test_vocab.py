"""The draft vocabulary: the most frequent tokens, and maps that agree with each other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwright.configs import UserError
from headwright.data.vocab import DraftVocab, build_vocab, count_tokens, coverage, full_vocab


@settings(max_examples=100, deadline=None)
@given(counts=st.lists(st.integers(0, 5), min_size=2, max_size=30), data=st.data())
def test_most_frequent_with_ties_to_the_lower_id(counts, data):
    pinned = sorted(data.draw(st.sets(st.integers(0, len(counts) - 1), max_size=3)))
    usable = [i for i, count in enumerate(counts) if count or i in pinned]
    rest = sorted((i for i in usable if i not in pinned), key=lambda i: (-counts[i], i))
    if not usable:
        return
    size = data.draw(st.integers(max(1, len(pinned)), len(usable)))
    vocab = build_vocab(torch.tensor(counts), size, pinned)
    wanted = range(len(counts)) if size == len(counts) else sorted(pinned + rest[: size - len(pinned)])
    assert vocab.ids_W.tolist() == list(wanted)
    assert len(vocab) == size


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 40), data=st.data())
def test_maps_agree(size, data):
    ids = sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1)))
    vocab = DraftVocab(torch.tensor(ids), size)
    draft = torch.arange(len(ids))
    assert (draft + vocab.d2t_W).tolist() == ids
    assert vocab.d2t_W.dtype == torch.int64
    assert vocab.t2d_V.nonzero()[:, 0].tolist() == ids
    assert vocab.t2d_V.dtype == torch.bool
    assert vocab.index_V[vocab.ids_W].tolist() == draft.tolist()
    assert torch.equal(vocab.index_V >= 0, vocab.t2d_V)
    assert len(vocab.t2d_V) == len(vocab.index_V) == size
    assert vocab.full == (len(ids) == size)


def test_full_vocabulary():
    for vocab in (full_vocab(9), build_vocab(torch.zeros(9), None, [3]), build_vocab(torch.zeros(9), 9, [])):
        assert vocab.full
        assert vocab.ids_W.tolist() == vocab.index_V.tolist() == list(range(9))
        assert vocab.d2t_W.tolist() == [0] * 9
        assert vocab.t2d_V.all()


def test_pinned_tokens_are_kept_even_if_never_seen():
    counts = torch.tensor([5, 0, 4, 0, 3])
    assert build_vocab(counts, 2, [3]).ids_W.tolist() == [0, 3]
    assert build_vocab(counts, 4, [3, 1]).ids_W.tolist() == [0, 1, 2, 3]
    assert counts.tolist() == [5, 0, 4, 0, 3]


def test_more_pinned_than_size_is_refused():
    """A head that cannot say the end of a turn would never stop: pinned tokens are never dropped silently."""
    with pytest.raises(UserError, match=r"vocab\.size 1"):
        build_vocab(torch.tensor([5, 4, 3]), 1, [1, 2])


@pytest.mark.parametrize(("size", "pinned", "distinct"), [(4, [], 3), (5, [1], 4), (6, [], 3), (100, [], 3)])
def test_more_than_was_seen_is_refused(size, pinned, distinct):
    counts = torch.tensor([5, 0, 4, 0, 3, 0, 0])
    with pytest.raises(UserError, match=rf"vocab\.size {size}: .* only {distinct} distinct .* to {distinct} or less"):
        build_vocab(counts, size, pinned)
    assert len(build_vocab(counts, distinct, pinned)) == distinct


def test_counts():
    pieces = [torch.tensor([1, 1, 4]), torch.tensor([], dtype=torch.long), torch.tensor([4, 0])]
    assert count_tokens(pieces, 6).tolist() == [1, 2, 0, 0, 2, 0]
    assert count_tokens([], 3).tolist() == [0, 0, 0]


@settings(max_examples=40, deadline=None)
@given(counts=st.lists(st.integers(0, 9), min_size=2, max_size=20).filter(lambda c: sum(c) > 0), data=st.data())
def test_coverage_is_the_share_and_grows_with_size(counts, data):
    counts_V = torch.tensor(counts)
    distinct = sum(count > 0 for count in counts)
    shares = [coverage(build_vocab(counts_V, size, []), counts_V) for size in range(1, distinct + 1)]
    assert shares == sorted(shares)
    assert shares[0] == pytest.approx(max(counts) / sum(counts))
    assert shares[-1] == pytest.approx(1.0)


def test_coverage_of_nothing():
    assert coverage(full_vocab(3), torch.zeros(3, dtype=torch.long)) == 0.0
