"""Suffix decoding: what followed the longest suffix of the text that occurred before, in the text itself or in a corpus.

A suffix automaton (Blumer et al., 1985) holds every substring of what it has read, and how often each occurred;
reading on costs amortised constant time. Drafting by one is SAM-Decoding (arXiv 2411.10666); weighing continuations by
their counts is SuffixDecoding (arXiv 2411.04975).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from headwright.eval.drafters import Guesses, HostDrafter, best_first
from headwright.heads.draft_tree import TreeShape

ROOT, NOWHERE = 0, -1
BREAK = -1  # stands between documents; no token
COUNTED = 64  # suffixes of each place whose counts are kept exact: in a loop of one token there are as many as tokens


class Automaton:
    """The substrings of a growing text. State s stands for substrings that end at the same places; the longest of them has
    `length[s]` tokens, `link[s]` stands for the longest suffix that also occurs elsewhere, `count[s]` is how often they occur.
    """

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link, self.length, self.count = [NOWHERE], [0], [0]
        self.last = ROOT

    def state(self, length: int, link: int, following: dict[int, int], count: int) -> int:
        """A new state."""
        self.next.append(following)
        self.link.append(link)
        self.length.append(length)
        self.count.append(count)
        return len(self.next) - 1

    def push(self, token: int) -> None:
        """Read one more token."""
        new = self.state(self.length[self.last] + 1, ROOT, {}, 0)
        place = self.last
        while place != NOWHERE and token not in self.next[place]:
            self.next[place][token] = new
            place = self.link[place]
        if place != NOWHERE:
            self.link[new] = self.suffix(place, token)
        self.last = new
        for _ in range(COUNTED):
            self.count[new] += 1
            new = self.link[new]
            if new == ROOT:
                return

    def suffix(self, place: int, token: int) -> int:
        """The state of exactly the substring at `place` and `token`, split off from longer ones if need be."""
        found = self.next[place][token]
        if self.length[found] == self.length[place] + 1:
            return found
        apart = self.state(self.length[place] + 1, self.link[found], dict(self.next[found]), self.count[found])
        while place != NOWHERE and self.next[place].get(token) == found:
            self.next[place][token] = apart
            place = self.link[place]
        self.link[found] = apart
        return apart

    def advance(self, place: int, length: int, token: int) -> tuple[int, int]:
        """Where a text that matched `length` tokens at `place` stands after `token`: the longest suffix that occurs here."""
        while place != ROOT and token not in self.next[place]:
            place = self.link[place]
            length = self.length[place]
        if token in self.next[place]:
            return self.next[place][token], length + 1
        return ROOT, 0

    def follow(self, place: int) -> Iterator[tuple[int, float, int]]:
        """What came after a substring, and how often."""
        options = [(token, self.count[state], state) for token, state in self.next[place].items() if token != BREAK]
        total = sum(count for _, count, _ in options)
        for token, count, state in options:
            if count:
                yield token, count / total, state


def read_corpus(documents: Iterable[Sequence[int]]) -> Automaton:
    """An automaton over documents. Memory: some hundred bytes per token; larger corpora are for retrieval.py."""
    automaton = Automaton()
    for document in documents:
        for token in document:
            automaton.push(token)
        automaton.push(BREAK)
    return automaton


@dataclass
class Memory:
    """One text: its own automaton, and where its end stands in the corpus."""

    own: Automaton = field(default_factory=Automaton)
    place: int = ROOT
    matched: int = 0


class SuffixDrafter(HostDrafter):
    """The continuation of the longest match, in the text or the corpus; of equal ones the text's own."""

    def __init__(self, corpus: Automaton | None = None, shortest: int = 1):
        self.corpus, self.shortest = corpus, shortest

    def remember(self) -> Memory:
        """Nothing read yet."""
        return Memory()

    def learn(self, memory: Memory, text: list[int], choices: list[int] | None) -> None:
        """Read on."""
        for token in text:
            memory.own.push(token)
            if self.corpus is not None:
                memory.place, memory.matched = self.corpus.advance(memory.place, memory.matched, token)

    def guess(self, memory: Memory, shape: TreeShape) -> Guesses:
        """The likeliest continuations by count."""
        own = memory.own
        place = own.link[own.last]  # the longest suffix that occurred before
        length = own.length[place] if place != NOWHERE else 0
        if self.corpus is not None and memory.matched > length:
            return best_first(memory.place, self.corpus.follow, shape) if memory.matched >= self.shortest else []
        return best_first(place, own.follow, shape) if length >= self.shortest else []
