"""Which documents make a batch: first-fit-decreasing within seeded windows, without padding.

The order is a function of (seed, epoch) alone. Documents are shuffled and cut into windows of about WINDOW batches; in each,
longer documents are placed first, each into the first batch that has room; then the batches of the epoch are shuffled. A
document longer than the budget has batches of its own: one, or as many as its loss-bearing rows fill, each with all of the
document before them as context, so that together they are the whole document.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

VERSION = "first-fit-decreasing/1"  # what a resumed run must share
WINDOW = 64

Long = Literal["split", "whole"]


class Piece(NamedTuple):
    """A document, or one of `parts` parts of its loss-bearing rows."""

    document: int
    part: int = 0
    parts: int = 1


def plan_epoch(
    lengths: Sequence[int],
    rows: Sequence[int],
    budget: int,
    seed: int,
    epoch: int,
    long: Long = "split",
    documents: Sequence[int] | None = None,
) -> list[list[Piece]]:
    """The batches of an epoch over documents of `lengths` tokens and at most `rows` loss-bearing rows. Documents without any
    are left out. documents: those of the epoch; default: all.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    asked = range(len(lengths)) if documents is None else documents
    shuffled = (asked[place] for place in torch.randperm(len(asked), generator=generator).tolist())
    order = [document for document in shuffled if rows[document]]
    batches: list[list[Piece]] = []
    for window in windows([d for d in order if lengths[d] <= budget], lengths, budget * WINDOW):
        batches += [[Piece(document) for document in batch] for batch in first_fit(window, lengths, budget)]
    for document in (d for d in order if lengths[d] > budget):
        parts = -(-rows[document] // budget) if long == "split" else 1
        batches += [[Piece(document, part, parts)] for part in range(parts)]
    return [batches[place] for place in torch.randperm(len(batches), generator=generator).tolist()]


def windows(order: Sequence[int], lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Cut an order where each piece has about so many tokens."""
    cut: list[list[int]] = [[]]
    filled = 0
    for document in order:
        if filled + lengths[document] > tokens and cut[-1]:
            cut.append([])
            filled = 0
        cut[-1].append(document)
        filled += lengths[document]
    return cut


def first_fit(documents: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """First-fit-decreasing; documents of one length keep their order."""
    batches: list[list[int]] = []
    room: list[int] = []
    for document in sorted(documents, key=lambda d: -lengths[d]):
        place = next((i for i, left in enumerate(room) if left >= lengths[document]), None)
        if place is None:
            place = len(batches)
            batches.append([])
            room.append(budget)
        batches[place].append(document)
        room[place] -= lengths[document]
    return batches
