"""Lookahead decoding (arXiv 2402.02057): the target itself fills a pool of n-grams, by Jacobi iteration beside each pass.

A pass reads two branches. One checks n-grams of the pool that begin with the root. The other is a window of guesses at later
positions: `window` columns of n − 1 levels, each level one Jacobi iteration older than the next. What the target says at the
end of a column continues it by a token, which makes an n-gram for the pool; then the oldest level is dropped. Both branches are
trees below the root, so they go through the same verifier, and a guess of the window that happens to be right is accepted too.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from headwright.configs import UserError
from headwright.eval.drafters import Guesses, HostDrafter
from headwright.heads.draft_tree import TreeShape


@dataclass
class Memory:
    """One text: its last tokens, the window (levels of columns, oldest first), the pool, and the nodes of the last
    tree at which the columns ended.
    """

    text: list[int] = field(default_factory=list)
    window: list[list[int]] = field(default_factory=list)
    pool: dict[int, "OrderedDict[tuple[int, ...], None]"] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)


class Lookahead(HostDrafter):
    """W columns, n-grams of N tokens, at most G of them checked per pass."""

    wants_choices = True

    def __init__(self, window: int = 5, ngram: int = 3, guesses: int = 5):
        if window < 1 or ngram < 2 or guesses < 1:
            raise UserError(f"lookahead: window {window}, ngram {ngram}, guesses {guesses}: at least 1, 2 and 1")
        self.window, self.ngram, self.guesses = window, ngram, guesses

    @property
    def shape(self) -> TreeShape:
        """The trees that it makes."""
        width, below = self.window, self.ngram - 1
        label = f"lookahead-{width}-{self.ngram}-{self.guesses}"
        return TreeShape("free", width + below - 1, width, (width + self.guesses) * below, label=label)

    def remember(self) -> Memory:
        """No window yet: it starts from the text's own tokens."""
        return Memory()

    def learn(self, memory: Memory, text: list[int], choices: list[int] | None) -> None:
        """Continue each column by what the target said at its end."""
        if choices is not None and memory.ends:
            newest = [choices[node] for node in memory.ends]
            for column in range(self.window):
                self.keep(memory, [level[column] for level in memory.window] + [newest[column]])
            memory.window = [*memory.window[1:], newest]
        memory.ends = []
        memory.text = (memory.text + text)[-self.window * self.ngram :]

    def keep(self, memory: Memory, ngram: list[int]) -> None:
        """Into the pool, the latest last; it forgets the oldest of each first token."""
        tails = memory.pool.setdefault(ngram[0], OrderedDict())
        tails[tuple(ngram[1:])] = None
        tails.move_to_end(tuple(ngram[1:]))
        if len(tails) > self.guesses:
            tails.popitem(last=False)

    def guess(self, memory: Memory, shape: TreeShape) -> Guesses:
        """The pool's n-grams and the window, as one tree without equal siblings. It has the drafter's own shape."""
        if not memory.window:
            seeds = [memory.text[-1 - place % len(memory.text)] for place in range(self.window * (self.ngram - 1))]
            memory.window = [seeds[level :: self.ngram - 1] for level in range(self.ngram - 1)]
        tree = Branches()
        for tail in reversed(memory.pool.get(memory.text[-1], OrderedDict())):
            tree.add(tail)
        oldest, rest = memory.window[0], memory.window[1:]
        for column in range(self.window):
            memory.ends.append(tree.add([*oldest[: column + 1], *(level[column] for level in rest)]))
        return tree.guesses


class Branches:
    """Paths of tokens grown into one tree."""

    def __init__(self) -> None:
        self.guesses: Guesses = []
        self.place: dict[tuple[int, int], int] = {}  # (parent, token) → node

    def add(self, path: Sequence[int]) -> int:
        """Add a path from the root; returns its last node."""
        node = 0
        for token in path:
            below = self.place.get((node, token))
            if below is None:
                self.guesses.append((token, node))
                below = self.place[node, token] = len(self.guesses)
            node = below
        return node
