"""Features, stored or live, as one resumable stream of packed batches. The order is a function of (seed, epoch) alone."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from headwright.configs import UserError
from headwright.data.batch import Answer, DocumentFeatures, FeatureBatch, pack
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

    def read(self, documents: Sequence[int]) -> list[DocumentFeatures]:
        """Several documents, in the given order. Called from threads, when `workers` are more than one."""
        ...


@dataclass
class FeatureStream:
    """Steps of micro-batches for one of `world` ranks.

    One optimizer step takes `world · accumulate` consecutive batches of the epoch's order; rank r takes its share.
    Which documents make a step depends neither on `world` nor on `accumulate` alone, only on their product.
    """

    reader: Documents
    tokens_per_batch: int
    accumulate: int = 1
    rank: int = 0
    world: int = 1
    seed: int = 0
    workers: int = 0

    def __post_init__(self) -> None:
        self.lengths = self.reader.lengths()
        if not self.lengths:
            raise UserError(f"{self.reader.root}: the store holds no documents")
        self.group = self.world * self.accumulate

    def epoch_batches(self, epoch: int) -> list[list[int]]:
        """Documents of each batch of an epoch."""
        return pack_in_order(self.lengths, self.tokens_per_batch, self.seed, epoch)

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

    def micro_batches(self, batches: list[list[int]], step: int) -> list[FeatureBatch]:
        """This rank's share of one step. Where the epoch ends unevenly, a rank repeats a batch without loss."""
        mine = []
        for place in range(self.accumulate):
            index = step * self.group + self.rank * self.accumulate + place
            batch = pack(self.reader.read(batches[min(index, len(batches) - 1)]))
            mine.append(batch if index < len(batches) else batch.without_loss())
        return mine


def pack_in_order(lengths: Sequence[int], tokens_per_batch: int, seed: int, epoch: int) -> list[list[int]]:
    """Documents of each batch of an epoch: shuffled, then packed in order up to the token budget."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    batches: list[list[int]] = []
    filled = tokens_per_batch
    for document in torch.randperm(len(lengths), generator=generator).tolist():
        if filled + lengths[document] > tokens_per_batch:
            batches.append([])
            filled = 0
        batches[-1].append(document)
        filled += lengths[document]
    return batches


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


def whole_batches(reader: FeatureReader, tokens_per_batch: int) -> Iterator[list[int]]:
    """Documents in stored order, grouped by token budget: for measuring, where nothing is shuffled."""
    group: list[int] = []
    filled = 0
    lengths = reader.lengths()
    for document in range(len(reader)):
        if group and filled + lengths[document] > tokens_per_batch:
            yield group
            group, filled = [], 0
        group.append(document)
        filled += lengths[document]
    if group:
        yield group
