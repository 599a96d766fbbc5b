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


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_history_of_operations(data):
    """write, advance, keep, keep_paths, put, make_room, truncate and select in any order leave what the same list operations
    leave.
    """
    batch = data.draw(st.integers(1, 3))
    cache, model = new_cache(batch, 4), Model(batch)
    for _ in range(data.draw(st.integers(1, 8))):
        action = data.draw(st.sampled_from(["advance", "keep", "keep_paths", "put", "truncate", "select"]))
        rows = len(model.rows)
        if action in ("advance", "keep", "keep_paths"):
            new = data.draw(st.integers(1, 5))
            tokens, positions = model.fresh(rows, new), torch.randint(0, 99, (rows, new))
            cache.make_room(new)
            assert_holds(cache, model)
            write(cache, tokens, positions)
            assert_holds(cache, model)  # written, not yet part of the row
            if action == "advance":
                paths = [list(range(data.draw(st.integers(0, new)))) for _ in range(rows)]
                cache.advance([len(path) for path in paths])
            else:
                paths = [sorted(data.draw(st.sets(st.integers(0, new - 1)))) for _ in range(rows)]
                if action == "keep_paths":
                    cache.keep_paths(paths)
                else:
                    for row, path in enumerate(paths):
                        cache.keep(row, path)
            for row, path in enumerate(paths):
                model.rows[row] += [(int(tokens[row, i]), int(positions[row, i])) for i in path]
        elif action == "put":
            row, length = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, min(4, cache.slots)))
            model.rows[row] = put_text(cache, row, model, length)
        elif action == "truncate":
            row, length = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, 8))
            cache.truncate(row, length)
            model.rows[row] = model.rows[row][:length]
        else:
            chosen = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=rows, unique=True))
            cache.select(chosen)
            model.rows = [list(model.rows[row]) for row in chosen]
        assert_holds(cache, model)


def put_text(cache: KVCache, row: int, model: Model, length: int) -> list[tuple[int, int]]:
    """Another text in place of a row's; what the row then holds."""
    other, tokens, positions = new_cache(1, length + 2), model.fresh(1, length), torch.randint(0, 99, (1, length))
    if length:
        write(other, tokens, positions)
        other.advance(length)
    cache.put(row, other)
    return list(zip(tokens[0].tolist(), positions[0].tolist()))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), lengths=st.lists(st.integers(0, 4), min_size=1, max_size=4), new=st.integers(1, 6))
def test_keep_paths_is_keep_row_by_row(data, lengths, new):
    """Lengths, positions, keys and values of all that is kept, whatever the rows' paths and lengths."""
    paths = [sorted(data.draw(st.sets(st.integers(0, new - 1)))) for _ in lengths]
    caches = [new_cache(len(lengths), 4 + new) for _ in range(2)]
    for cache in caches:
        write(
            cache, torch.arange(1, 4 * len(lengths) + 1).view(len(lengths), 4), torch.arange(4).expand(len(lengths), 4)
        )
        cache.advance(lengths)
        tokens = torch.arange(100, 100 + new * len(lengths)).view(len(lengths), new)
        write(cache, tokens, tokens % 17)
    caches[0].keep_paths(paths)
    for row, path in enumerate(paths):
        caches[1].keep(row, path)
    assert caches[0].lengths == caches[1].lengths == [length + len(path) for length, path in zip(lengths, paths)]
    for row, length in enumerate(caches[0].lengths):
        assert torch.equal(caches[0].positions[row, :length], caches[1].positions[row, :length])
        for layer in range(LAYERS):
            for left, right in ((caches[0].keys, caches[1].keys), (caches[0].values, caches[1].values)):
                assert torch.equal(left[layer][row, :, :length], right[layer][row, :, :length])


def test_keep_paths_of_the_last_slots():
    """A short path is padded within the row, also where the longest ends with the cache."""
    cache, model = new_cache(2, 5), Model(2)
    tokens, positions = model.fresh(2, 5), torch.arange(5).expand(2, 5)
    write(cache, tokens, positions)
    cache.keep_paths([[1, 2, 3, 4], [4]])
    model.rows = [[(int(tokens[0, i]), i) for i in (1, 2, 3, 4)], [(int(tokens[1, 4]), 4)]]
    assert_holds(cache, model)


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(0, 4), min_size=1, max_size=3), new=st.integers(0, 9), slots=st.integers(4, 8))
def test_make_room_keeps_what_is_there(lengths, new, slots):
    """As many slots as are needed or more, and none where there are enough."""
    cache, model = new_cache(len(lengths), slots), Model(len(lengths))
    tokens, positions = model.fresh(len(lengths), 4), torch.randint(0, 99, (len(lengths), 4))
    write(cache, tokens, positions)
    cache.advance(lengths)
    model.rows = [list(zip(t, p))[:n] for t, p, n in zip(tokens.tolist(), positions.tolist(), lengths)]
    cache.make_room(new)
    assert_holds(cache, model)
    needed = max(lengths) + new
    assert cache.slots == slots if needed <= slots else cache.slots >= max(needed, slots + slots // 4)
    assert cache.room(new) == needed
    for store in (*cache.keys, *cache.values):
        assert store.shape == (len(lengths), HEADS, cache.slots, WIDTH)
    if new:
        write(cache, model.fresh(len(lengths), new), torch.zeros(len(lengths), new, dtype=torch.long))


def test_make_room_grows_by_a_quarter_at_least():
    """Or every draft near the end of a text would copy the cache again."""
    cache = new_cache(1, 40)
    cache.advance(40)
    cache.make_room(1)
    assert cache.slots == 50
    cache.make_room(10)
    assert cache.slots == 50


def test_make_room_before_anything_is_written():
    cache, model = new_cache(2, 1), Model(2)
    cache.make_room(3)
    tokens = model.fresh(2, 3)
    write(cache, tokens, torch.arange(3).expand(2, 3))
    cache.advance(3)
    model.rows = [[(int(token), place) for place, token in enumerate(row)] for row in tokens]
    assert_holds(cache, model)


def test_paths_are_kept_outside_inference_mode_after_more_room_was_made():
    """As they are in a cache that was large enough from the start."""
    for slots in (9, 2):
        cache = new_cache(1, slots)
        with torch.inference_mode():
            cache.make_room(3)
            write(cache, torch.tensor([[1, 2, 3]]), torch.arange(3)[None])
        cache.keep(0, [0, 2])
        assert cache.positions[0, :2].tolist() == [0, 2]


def test_put_into_a_fresh_cache_and_over_a_longer_text():
    """Other rows are not touched, and what was behind the new text is gone."""
    cache, model = new_cache(3, 9), Model(3)
    model.rows[1] = put_text(cache, 1, model, 4)
    assert_holds(cache, model)
    tokens = model.fresh(3, 2)
    write(cache, tokens, torch.zeros(3, 2, dtype=torch.long))
    cache.advance([2, 2, 0])
    for row in range(2):
        model.rows[row] += [(int(token), 0) for token in tokens[row]]
    assert_holds(cache, model)
    model.rows[1] = put_text(cache, 1, model, 3)
    assert_holds(cache, model)
    model.rows[0] = put_text(cache, 0, model, 0)
    assert_holds(cache, model)
    assert cache.lengths == [0, 3, 0]
    assert cache.visible(1)[1, 0].tolist() == [True, True, True, True]
    assert cache.visible(1)[0, 0].tolist() == [True, False, False, False]


def test_select_may_repeat_and_reorder_rows():
    cache, model = new_cache(3, 9), Model(3)
    for row in range(3):
        model.rows[row] = put_text(cache, row, model, row + 1)
    cache.select([2, 0, 2])
    model.rows = [model.rows[row] for row in (2, 0, 2)]
    assert_holds(cache, model)
    tokens = model.fresh(3, 1)
    write(cache, tokens, torch.full((3, 1), 5))
    cache.advance(1)
    for row in range(3):
        model.rows[row] = [*model.rows[row], (int(tokens[row, 0]), 5)]
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
