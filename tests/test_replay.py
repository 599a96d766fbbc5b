"""General text beside a domain's: its share of each epoch, and that it takes turns."""

from hypothesis import given
from hypothesis import strategies as st

from headwright.data.packing import plan_epoch
from headwright.data.replay import replaying

ROWS = st.lists(st.tuples(st.booleans(), st.integers(1, 30)), min_size=2, max_size=40)


@given(ROWS, st.sampled_from([0.1, 0.25, 0.5, 0.8]), st.integers(0, 9))
def test_every_epoch_has_the_whole_domain_and_the_share_of_general_rows(documents, share, seed):
    """To within one document; over many epochs to within one document in all."""
    general, rows = [g for g, _ in documents], [r for _, r in documents]
    choose, epochs = replaying(general, rows, share, seed), 6
    domain = [place for place, other in enumerate(general) if not other]
    replayed = []
    for epoch in range(epochs):
        found = choose(epoch)
        assert [place for place in found if not general[place]] == domain
        replayed += [place for place in found if general[place]]
        assert choose(epoch) == found
    if any(general):
        wanted = epochs * sum(rows[place] for place in domain) * share / (1 - share)
        assert abs(sum(rows[place] for place in replayed) - wanted) <= max(rows)
    else:
        assert replayed == []


@given(st.lists(st.integers(1, 9), min_size=3, max_size=20), st.integers(0, 5))
def test_none_comes_again_before_all_have_come(rows, seed):
    general = [False] + [True] * len(rows)
    choose = replaying(general, [20, *rows], 0.3, seed)
    replayed = [place for epoch in range(8) for place in choose(epoch) if general[place]]
    for start in range(0, len(replayed), len(rows)):
        part = replayed[start : start + len(rows)]
        assert len(set(part)) == len(part)


def test_nothing_is_replayed_at_share_zero():
    assert replaying([False, True, False], [3, 5, 4], 0.0, 0)(7) == [0, 2]


def test_documents_without_rows_are_not_replayed():
    choose = replaying([False, True, True], [10, 0, 4], 0.5, 0)
    assert {place for epoch in range(5) for place in choose(epoch)} == {0, 2}


def test_an_epoch_of_some_documents_packs_those_alone():
    lengths, rows = [10, 20, 30, 40, 50], [5, 5, 5, 5, 5]
    batches = plan_epoch(lengths, rows, 64, 0, 0, "split", [1, 3, 3, 4])
    assert sorted(piece.document for batch in batches for piece in batch) == [1, 3, 3, 4]
    assert plan_epoch(lengths, rows, 64, 3, 2) == plan_epoch(lengths, rows, 64, 3, 2, "split", range(5))
