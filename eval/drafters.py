"""Drafters that need no training and work on the host: the baselines that a head must beat.

Each keeps what it knows of one text in a memory of its own. Guesses are deterministic, so that the verifier walks.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from headwright.heads.base import Context
from headwright.heads.draft_tree import Tree, TreeShape

# A text's guesses: for each its token and its parent (0: the root, then the guesses from 1)
Guesses = list[tuple[int, int]]


class Rows(list[Any]):
    """State of drafters that work on the host: one memory per text."""

    def put(self, row: int, other: "Rows") -> None:
        """Let `row` hold what the only row of `other` holds."""
        self[row] = other[0]

    def select(self, rows: Sequence[int]) -> None:
        """Keep only `rows`."""
        self[:] = [self[row] for row in rows]


class HostDrafter:
    """A drafter by three questions about one text: a new memory, what to learn, what to guess."""

    wants_choices = False
    deepest: int | None = None

    def remember(self) -> Any:
        """The memory of a text that is still empty."""
        raise NotImplementedError

    def learn(self, memory: Any, text: list[int], choices: list[int] | None) -> None:
        """Take in new tokens, and what the target said about the last guesses."""
        raise NotImplementedError

    def guess(self, memory: Any, shape: TreeShape) -> Guesses:
        """Guesses below the last token."""
        raise NotImplementedError

    def start(self, batch: int, slots: int) -> Rows:
        """Empty memories."""
        return Rows(self.remember() for _ in range(batch))

    def absorb(self, state: Rows, context: Context) -> None:
        """Learn the new tokens."""
        for row, (memory, text) in enumerate(zip(state, context.texts)):
            self.learn(memory, text, None if context.choices is None else context.choices[row])

    def propose(self, state: Rows, context: Context, shape: TreeShape) -> Tree:
        """Learn, then guess."""
        self.absorb(state, context)
        return forest(context, [self.guess(memory, shape) for memory in state])


class PromptLookup(HostDrafter):
    """Prompt lookup decoding: what followed the last earlier occurrence of the current n-gram, longest n first."""

    def __init__(self, longest: int = 3):
        self.longest = longest

    def remember(self) -> list[int]:
        """The tokens so far."""
        return []

    def learn(self, memory: list[int], text: list[int], choices: list[int] | None) -> None:
        """Remember them."""
        memory += text

    def guess(self, memory: list[int], shape: TreeShape) -> Guesses:
        """A chain; nothing where nothing matches."""
        return chain_of(self.lookup(memory, shape.depth))

    def lookup(self, tokens: list[int], count: int) -> list[int]:
        """The continuation of the most recent match."""
        for length in range(min(self.longest, len(tokens) - 1), 0, -1):
            ngram = tokens[-length:]
            for start in range(len(tokens) - length - 1, -1, -1):
                if tokens[start : start + length] == ngram:
                    return tokens[start + length : start + length + count]
        return []


def chain_of(tokens: Sequence[int]) -> Guesses:
    """One guess after the other."""
    return [(token, parent) for parent, token in enumerate(tokens)]


def best_first(start: Any, follow: Callable[[Any], Iterable[tuple[int, float, Any]]], shape: TreeShape) -> Guesses:
    """The likeliest tree within a shape: the best node is taken up, then its children compete.

    Args:
        follow: (token, probability, place) of what may come after a place; tokens differ. The `shape.top_k` best are used.
    """
    found: Guesses = []
    heap: list[tuple[float, int, int, int, int, Any]] = []  # ties go to what was found first
    seen = 0

    def offer(place: Any, probability: float, node: int, depth: int) -> None:
        nonlocal seen
        for token, share, below in heapq.nlargest(shape.top_k, follow(place), key=lambda option: option[1]):
            seen += 1
            heapq.heappush(heap, (-probability * share, seen, token, node, depth, below))

    offer(start, 1.0, 0, 1)
    while heap and len(found) < shape.nodes:
        value, _, token, parent, depth, place = heapq.heappop(heap)
        found.append((token, parent))
        if depth < shape.depth:
            offer(place, -value, len(found), depth + 1)
    return found


def forest(context: Context, guesses: Sequence[Guesses]) -> Tree:
    """Trees of deterministic guesses below the roots. Shorter ones are padded with nodes that have no parent, which nothing
    reads or accepts.
    """
    device, width = context.root_B.device, max(map(len, guesses))
    tokens, parents, depths = [], [], []
    for text, below in zip(context.texts, guesses):
        depth = [0]
        for _, parent in below:
            depth.append(depth[parent] + 1)
        padding = [0] * (width - len(below))
        tokens.append([text[-1], *(token for token, _ in below), *padding])
        parents.append([-1, *(parent for _, parent in below), *(-1 for _ in padding)])
        depths.append(depth + padding)
    columns = torch.tensor([tokens, parents, depths]).to(device)
    levels = max(map(max, depths))
    return Tree(columns[0], columns[1], columns[2], torch.zeros(columns.shape[1:], device=device), levels=levels)
