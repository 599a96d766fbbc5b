"""The cache against a plain list of tokens per row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwright.data.cache import KVCache

LAYERS, HEADS, WIDTH = 2, 2, 3


def new_cache(batch: int, slots: int) -> KVCache:
    """A small cache."""
    return KVCache(LAYERS, batch, slots, torch.device("cpu"))


def entries(tokens_BN: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that name their token, layer, head and element."""
    batch, new = tokens_BN.shape
    parts = torch.arange(HEADS * WIDTH).view(1, HEADS, 1, WIDTH) * 0.01
    keys = tokens_BN.view(batch, 1, new, 1) + parts + 1000 * layer
    return keys, -keys


class Model:
    """What a cache should hold: a list of (token, position) per row."""

    def __init__(self, batch: int):
        self.rows: list[list[tuple[int, int]]] = [[] for _ in range(batch)]
        self.next_token = 1

    def fresh(self, batch: int, new: int) -> torch.Tensor:
        """Tokens never used before."""
        tokens = torch.arange(self.next_token, self.next_token + batch * new).view(batch, new)
        self.next_token += batch * new
        return tokens


def write(cache: KVCache, tokens_BN: torch.Tensor, positions_BN: torch.Tensor) -> None:
    """All layers of new tokens."""
    cache.place(positions_BN)
    for layer in range(LAYERS):
        keys, values = cache.write(layer, *entries(tokens_BN.float(), layer))
        assert keys.shape == values.shape == (len(cache.lengths), HEADS, cache.room(tokens_BN.shape[1]), WIDTH)


def assert_holds(cache: KVCache, model: Model) -> None:
    """Every row of every layer is the model's row."""
    assert cache.lengths == [len(row) for row in model.rows]
    for index, row in enumerate(model.rows):
        assert cache.positions[index, : len(row)].tolist() == [position for _, position in row]
        tokens = torch.tensor([[float(token) for token, _ in row]])
        for layer in range(LAYERS):
            if cache.keys[layer] is None:  # nothing was ever written
                assert not row
                continue
            keys, values = entries(tokens, layer)
            torch.testing.assert_close(cache.keys[layer][index : index + 1, :, : len(row)], keys, rtol=0, atol=0)
            torch.testing.assert_close(cache.values[layer][index : index + 1, :, : len(row)], values, rtol=0, atol=0)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_history_of_operations(data):
    """write, advance, keep, truncate and select in any order leave what the same list operations leave."""
    batch = data.draw(st.integers(1, 3))
    cache, model = new_cache(batch, 200), Model(batch)
    for _ in range(data.draw(st.integers(1, 8))):
        action = data.draw(st.sampled_from(["advance", "keep", "truncate", "select"]))
        rows = len(model.rows)
        if action in ("advance", "keep"):
            new = data.draw(st.integers(1, 5))
            tokens, positions = model.fresh(rows, new), torch.randint(0, 99, (rows, new))
            write(cache, tokens, positions)
            assert_holds(cache, model)  # written, not yet part of the row
            if action == "advance":
                paths = [list(range(data.draw(st.integers(0, new)))) for _ in range(rows)]
                cache.advance([len(path) for path in paths])
            else:
                paths = [sorted(data.draw(st.sets(st.integers(0, new - 1)))) for _ in range(rows)]
                for row, path in enumerate(paths):
                    cache.keep(row, path)
            for row, path in enumerate(paths):
                model.rows[row] += [(int(tokens[row, i]), int(positions[row, i])) for i in path]
        elif action == "truncate":
            row, length = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, 8))
            cache.truncate(row, length)
            model.rows[row] = model.rows[row][:length]
        else:
            chosen = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=rows, unique=True))
            cache.select(chosen)
            model.rows = [list(model.rows[row]) for row in chosen]
        assert_holds(cache, model)


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=3), new=st.integers(1, 4), data=st.data())
def test_visible_is_the_row_and_what_among_allows(lengths, new, data):
    cache = new_cache(len(lengths), 12)
    cache.advance(lengths)
    bits = data.draw(st.lists(st.booleans(), min_size=len(lengths) * new * new, max_size=len(lengths) * new * new))
    tree = torch.tensor(bits).view(len(lengths), new, new)
    for among in (None, tree):
        mask = cache.visible(new, among)
        assert mask.shape == (len(lengths), new, max(lengths) + new)
        for row, length in enumerate(lengths):
            for query in range(new):
                allowed = [slot for slot in range(new) if (slot <= query if among is None else tree[row, query, slot])]
                seen = [*range(length), *(length + slot for slot in allowed)]
                assert mask[row, query].nonzero()[:, 0].tolist() == seen


def test_full_cache_says_so():
    cache = new_cache(2, 4)
    cache.advance([3, 1])
    for call in (
        lambda: cache.room(2),
        lambda: cache.place(torch.zeros(2, 2, dtype=torch.long)),
        lambda: cache.visible(2),
        lambda: cache.write(0, *entries(torch.zeros(2, 2), 0)),
    ):
        with pytest.raises(ValueError, match="cache of 4 slots is too small: 5 are needed"):
            call()
    assert cache.room(1) == 4


def test_advance_by_one_number_is_every_row():
    cache = new_cache(3, 9)
    cache.advance([0, 1, 2])
    cache.advance(2)
    assert cache.lengths == [2, 3, 4]
    assert cache.next_slots(2).tolist() == [[2, 3], [3, 4], [4, 5]]


def test_truncate_never_lengthens():
    cache = new_cache(1, 9)
    cache.advance(2)
    cache.truncate(0, 5)
    assert cache.lengths == [2]
