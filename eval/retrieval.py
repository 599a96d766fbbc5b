"""Retrieval drafting (REST, arXiv 2311.08252): continuations of the text's last tokens in a datastore of the user's own texts.

A datastore is all tokens of its documents and the order of their suffixes, by the first 16 tokens: 8 bytes a token, built by
sorting, searched by bisection.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from headwright.configs import UserError
from headwright.data.store import replace_with
from headwright.eval.drafters import Guesses, HostDrafter, best_first
from headwright.heads.draft_tree import TreeShape

COMPARED = 16  # tokens by which suffixes are ordered; the longest match and its draft lie within them
BREAK = -1  # stands after each document

Tokens = NDArray[np.int32]


class Datastore:
    """Documents and the order of their suffixes."""

    def __init__(self, tokens_T: Tokens, order_T: Tokens):
        self.tokens_T, self.order_T = tokens_T, order_T

    @classmethod
    def of(cls, documents: Iterable[Sequence[int]]) -> "Datastore":
        """Build one. Raises UserError where there is nothing in it."""
        parts = [np.asarray([*document, BREAK], dtype=np.int32) for document in documents if len(document)]
        if not parts:
            raise UserError("a datastore needs at least one document")
        tokens_T = np.concatenate(parts)
        return cls(tokens_T, suffix_order(tokens_T))

    def save(self, path: Path) -> None:
        """One safetensors file, by atomic rename."""
        replace_with(path, lambda file: save_file({"tokens": self.tokens_T, "order": self.order_T}, file))

    @classmethod
    def open(cls, path: Path) -> "Datastore":
        """Read one. Raises UserError."""
        try:
            tensors = load_file(path)
            tokens_T, order_T = tensors["tokens"], tensors["order"]
        except (OSError, SafetensorError, KeyError) as error:
            raise UserError(f"{path}: not a datastore: {error}") from None
        if not in_order(tokens_T, order_T):
            raise UserError(
                f"{path}: not a datastore: the order of its suffixes does not fit its tokens; build it again"
            )
        return cls(tokens_T, order_T)

    def matches(self, ngram: Sequence[int]) -> tuple[int, int]:
        """The range of suffixes that begin with an n-gram of at most 16 tokens."""
        key, count = tuple(ngram), len(ngram)

        def beginning(place: int) -> tuple[int, ...]:
            start = self.order_T[place]
            return tuple(self.tokens_T[start : start + count].tolist())

        places = range(len(self.order_T))
        low = bisect_left(places, key, key=beginning)
        return low, bisect_left(places, (*key[:-1], key[-1] + 1), lo=low, key=beginning)

    def longest(self, tokens: Sequence[int], longest: int) -> tuple[int, tuple[int, int]]:
        """The longest suffix of `tokens` that occurs, and where. What holds for a suffix holds for shorter ones."""
        low, high, found = 0, min(longest, len(tokens)), (0, 0)
        while low < high:
            middle = (low + high + 1) // 2
            first, stop = self.matches(tokens[-middle:])
            if stop > first:
                low, found = middle, (first, stop)
            else:
                high = middle - 1
        return low, found

    def after(self, found: tuple[int, int], length: int, depth: int, most: int) -> Iterator[tuple[int, ...]]:
        """What follows the matches, up to the end of their documents; of many matches an even selection."""
        first, stop = found
        for place in range(first, stop, max(1, -(-(stop - first) // most))):
            start = int(self.order_T[place]) + length
            text = self.tokens_T[start : start + depth].tolist()
            yield tuple(text[: text.index(BREAK)] if BREAK in text else text)


def in_order(tokens_T: Tokens, order_T: Tokens) -> bool:
    """Whether an order names every suffix once, none before a smaller one by its first 16 tokens."""
    if tokens_T.shape != order_T.shape or not np.array_equal(np.sort(order_T), np.arange(len(order_T))):
        return False
    padded = np.concatenate([tokens_T, np.full(COMPARED, BREAK - 1, dtype=np.int32)])  # what has ended comes first
    equal = np.ones(max(len(order_T) - 1, 0), dtype=bool)
    for offset in range(COMPARED):
        left, right = padded[order_T[:-1] + offset], padded[order_T[1:] + offset]
        if (equal & (left > right)).any():
            return False
        equal &= left == right
    return True


def suffix_order(tokens_T: Tokens) -> Tokens:
    """Starts of all suffixes in the order of their first 16 tokens, by doubling (Manber and Myers)."""
    ranks = np.unique(tokens_T, return_inverse=True)[1].astype(np.int64)
    width = 1
    while width < COMPARED:
        behind = np.full_like(ranks, -1)
        behind[:-width] = ranks[width:]
        pairs = ranks * (len(ranks) + 1) + behind + 1
        ranks = np.unique(pairs, return_inverse=True)[1].astype(np.int64)
        width *= 2
    return np.argsort(ranks, kind="stable").astype(np.int32)


class Retrieval(HostDrafter):
    """The likeliest continuations of the longest match in a datastore."""

    def __init__(self, store: Datastore, longest: int = 8, most: int = 256):
        self.store, self.most = store, most
        self.longest = min(longest, COMPARED)

    def remember(self) -> list[int]:
        """The last tokens."""
        return []

    def learn(self, memory: list[int], text: list[int], choices: list[int] | None) -> None:
        """Keep the last ones."""
        memory[:] = (memory + text)[-self.longest :]

    def guess(self, memory: list[int], shape: TreeShape) -> Guesses:
        """A tree of the matches' continuations, weighed by how many share them."""
        length, found = self.store.longest(memory, self.longest)
        if not length:
            return []
        texts = list(self.store.after(found, length, shape.depth, self.most))

        def follow(place: tuple[int, ...]) -> Iterator[tuple[int, float, tuple[int, ...]]]:
            here = [text for text in texts if text[: len(place)] == place]
            counts: dict[int, int] = {}
            for text in here:
                if len(text) > len(place):
                    counts[text[len(place)]] = counts.get(text[len(place)], 0) + 1
            for token, count in counts.items():
                yield token, count / len(here), (*place, token)

        return best_first((), follow, shape)
