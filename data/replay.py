"""Which documents an epoch reads where a domain is learned beside general text that must not be forgotten.

An epoch is all of the domain, and as many general documents as make a given share of its loss-bearing rows. General documents
take turns over the epochs: none comes again before all have come.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

Choice = Callable[[int], list[int]]  # an epoch → its documents


def replaying(general: Sequence[bool], rows: Sequence[int], share: float, seed: int, part: float = 1.0) -> Choice:
    """The documents of each epoch. general: whether a document is general text; rows: its loss-bearing rows; share: of the
    epoch's rows, 0 ≤ share < 1; part: of the domain's documents, 0 < part ≤ 1: the smaller are within the larger.
    """
    domain = some_of([document for document, other in enumerate(general) if not other], part, seed)
    wanted = sum(rows[document] for document in domain) * share / (1 - share)
    pool = [document for document, other in enumerate(general) if other and rows[document]]

    def choose(epoch: int) -> list[int]:
        return domain + (between(pool, rows, seed, epoch * wanted, (epoch + 1) * wanted) if pool else [])

    return choose


def some_of(documents: Sequence[int], part: float, seed: int) -> list[int]:
    """A part of them, at least one, in their order."""
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = sorted(order[: max(1, round(part * len(documents)))])
    return [documents[place] for place in chosen]


def between(pool: Sequence[int], rows: Sequence[int], seed: int, start: float, stop: float) -> list[int]:
    """The documents of an endless reading of `pool` that begin at rows start … stop."""
    found: list[int] = []
    place = 0
    for document in endless(pool, seed):
        if place >= stop:
            return found
        if place >= start:
            found.append(document)
        place += rows[document]
    return found


def endless(pool: Sequence[int], seed: int) -> Iterator[int]:
    """The pool over and over, each time in another order."""
    for again in itertools.count():
        generator = torch.Generator().manual_seed(seed * 1_000_003 + again)
        for place in torch.randperm(len(pool), generator=generator).tolist():
            yield pool[place]
