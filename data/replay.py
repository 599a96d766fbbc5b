"""Which documents an epoch reads where a domain is learned beside general text that must not be forgotten.

An epoch is all of the domain, and as many general documents as make a given share of its loss-bearing rows. General documents
take turns over the epochs: none comes again before all have come.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

Choice = Callable[[int], list[int]]  # an epoch → its documents


def replaying(general: Sequence[bool], rows: Sequence[int], share: float, seed: int) -> Choice:
    """The documents of each epoch. general: whether a document is general text; rows: its loss-bearing rows; share: of the
    epoch's rows, 0 ≤ share < 1.
    """
    domain = [document for document, other in enumerate(general) if not other]
    wanted = sum(rows[document] for document in domain) * share / (1 - share)
    pool = [document for document, other in enumerate(general) if other and rows[document]]

    def choose(epoch: int) -> list[int]:
        return domain + (between(pool, rows, seed, epoch * wanted, (epoch + 1) * wanted) if pool else [])

    return choose


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
