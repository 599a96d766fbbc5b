"""Features, stored or live, as one resumable stream of packed batches. The order is a function of (seed, epoch) alone."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from headwright.configs import UserError
from headwright.data.batch import Answer, DocumentFeatures, FeatureBatch, pack
from headwright.data.packing import Long, Piece, plan_epoch
from headwright.data.replay import Choice
from headwright.data.store import FeatureReader, Manifest

T = TypeVar("T")


class Answers(Protocol):
    """Tokens without features: all that a draft vocabulary needs."""

    def response_tokens(self) -> Iterator[Tensor]:
        """The response token ids."""
        ...

    def answers(self) -> Iterator[Answer]:
        """The response tokens of each turn, and what the target itself would have said in their places."""
        ...


class Documents(Answers, Protocol):
    """Where features come from: a store (FeatureReader), or the target itself (live.py)."""

    root: Path
    manifest: Manifest

    def __len__(self) -> int: ...

    def lengths(self) -> list[int]:
        """Tokens of each document, without making it."""
        ...

    def loss_rows(self) -> list[int]:
        """Loss-bearing rows of each document, at most, without making it."""
        ...

    def sources(self) -> list[str]:
        """The source of each document."""
        ...

    def place(self, document: int) -> str:
        """Where a document came from: a file and line, where these are known."""
        ...

    def read(self, documents: Sequence[int]) -> list[DocumentFeatures]:
        """Several documents, in the given order. Called from threads, when `workers` are more than one."""
        ...


@dataclass
class FeatureStream:
    """Steps of micro-batches for one of `world` ranks.

    One optimizer step takes `world · accumulate` consecutive batches of the epoch's order; rank r takes its share.
    Which documents make a step depends neither on `world` nor on `accumulate` alone, only on their product. `vet` says what
    is wrong with a document; with `skip` such a document bears no loss and is noted, else it ends the run. `lookahead`: tokens
    after a row that its loss reads. choose: the documents of an epoch, where it is not all of them (replay.py).
    """

    reader: Documents
    tokens_per_batch: int
    accumulate: int = 1
    rank: int = 0
    world: int = 1
    seed: int = 0
    workers: int = 0
    long: Long = "split"
    lookahead: int = 16
    vet: Callable[[DocumentFeatures], str | None] = lambda document: None
    skip: bool = False
    choose: Choice | None = None

    def __post_init__(self) -> None:
        self.lengths, self.rows = self.reader.lengths(), self.reader.loss_rows()
        self.skipped: dict[int, str] = {}
        if not self.lengths:
            raise UserError(f"{self.reader.root}: the store holds no documents")
        if not any(self.rows):
            raise UserError(
                f"{self.reader.root}: no document has two response tokens in a row: there is nothing to learn"
            )
        self.group = self.world * self.accumulate

    def epoch_batches(self, epoch: int) -> list[list[Piece]]:
        """Documents of each batch of an epoch."""
        documents = self.choose(epoch) if self.choose else None
        return plan_epoch(self.lengths, self.rows, self.tokens_per_batch, self.seed, epoch, self.long, documents)

    def steps_per_epoch(self) -> int:
        """Optimizer steps of epoch 0; the packing of others may differ by a few, and schedules use this one."""
        return math.ceil(len(self.epoch_batches(0)) / self.group)

    def steps(self, start: int, stop: int) -> Iterator[list[FeatureBatch]]:
        """Micro-batches of this rank for the steps start … stop-1. Step s is the same however one arrives there.

        With workers, the next steps are made in threads while this one is used; at most `2 · workers` wait.
        """
        calls = self.calls(start, stop)
        return ahead(calls, self.workers) if self.workers else (call() for call in calls)

    def calls(self, start: int, stop: int) -> Iterator[Callable[[], list[FeatureBatch]]]:
        """What makes each step, not yet called."""
        step, epoch = 0, 0
        while step < stop:
            batches = self.epoch_batches(epoch)
            count = math.ceil(len(batches) / self.group)
            for local in range(max(start - step, 0), min(count, stop - step)):
                yield lambda batches=batches, local=local: self.micro_batches(batches, local)  # type: ignore[misc]
            step, epoch = step + count, epoch + 1

    def micro_batches(self, batches: list[list[Piece]], step: int) -> list[FeatureBatch]:
        """This rank's share of one step. Where the epoch ends unevenly, a rank repeats a batch without loss."""
        mine = []
        for place in range(self.accumulate):
            index = step * self.group + self.rank * self.accumulate + place
            batch = self.batch(batches[min(index, len(batches) - 1)])
            mine.append(batch if index < len(batches) else batch.without_loss())
        return mine

    def documents(self, step: int) -> list[int]:
        """What this rank reads in a step."""
        epoch = 0
        while step >= (count := math.ceil(len(batches := self.epoch_batches(epoch)) / self.group)):
            step, epoch = step - count, epoch + 1
        first = step * self.group + self.rank * self.accumulate
        return [piece.document for batch in batches[first : first + self.accumulate] for piece in batch]

    def batch(self, pieces: Sequence[Piece]) -> FeatureBatch:
        """One packed batch."""
        documents = self.reader.read([piece.document for piece in pieces])
        return pack([self.checked(piece, document) for piece, document in zip(pieces, documents)])

    def checked(self, piece: Piece, document: DocumentFeatures) -> DocumentFeatures:
        """A piece of a document that can be learned from; one without loss where it cannot."""
        wrong = self.vet(document)
        if wrong is None:
            return document.part(piece.part, piece.parts, self.lookahead) if piece.parts > 1 else document
        if not self.skip:
            raise UserError(
                f"{self.reader.root}: document {piece.document} ({self.reader.place(piece.document)}): {wrong}; "
                "train.bad_documents=skip leaves such documents out"
            )
        self.skipped[piece.document] = wrong
        if len(self.skipped) == len(self.lengths) - self.rows.count(0):
            raise UserError(f"{self.reader.root}: no document can be learned from; the last one: {wrong}")
        return replace(document, learn_T=torch.zeros_like(document.mask_T))


def ahead(calls: Iterator[Callable[[], T]], workers: int) -> Iterator[T]:
    """Results of `calls` in their order, made in threads; at most `2 · workers` are made or waiting at a time."""
    with ThreadPoolExecutor(workers, thread_name_prefix="headwright-reader") as pool:
        waiting: deque[Future[T]] = deque()
        try:
            for call in calls:
                waiting.append(pool.submit(call))
                if len(waiting) >= 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def whole_batches(
    reader: FeatureReader, tokens_per_batch: int, documents: Iterable[int] | None = None
) -> Iterator[list[int]]:
    """Documents (default: all) in stored order, grouped by token budget: for measuring, where nothing is shuffled."""
    group: list[int] = []
    filled = 0
    lengths = reader.lengths()
    for document in range(len(reader)) if documents is None else documents:
        if group and filled + lengths[document] > tokens_per_batch:
            yield group
            group, filled = [], 0
        group.append(document)
        filled += lengths[document]
    if group:
        yield group
