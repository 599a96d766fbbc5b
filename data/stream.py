"""Stored features as a resumable stream of packed batches. The order is a function of (seed, epoch) alone."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from headwright.configs import UserError
from headwright.data.batch import FeatureBatch, pack
from headwright.data.store import FeatureReader


@dataclass
class FeatureStream:
    """Steps of micro-batches for one of `world` ranks.

    One optimizer step takes `world · accumulate` consecutive batches of the epoch's order; rank r takes its share.
    Which documents make a step depends neither on `world` nor on `accumulate` alone, only on their product.
    """

    reader: FeatureReader
    tokens_per_batch: int
    accumulate: int = 1
    rank: int = 0
    world: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        self.lengths = self.reader.lengths()
        if not self.lengths:
            raise UserError(f"{self.reader.root}: the store holds no documents")
        self.group = self.world * self.accumulate

    def epoch_batches(self, epoch: int) -> list[list[int]]:
        """Documents of each batch of an epoch: shuffled, then packed in order up to the token budget."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        batches: list[list[int]] = []
        filled = self.tokens_per_batch
        for document in torch.randperm(len(self.reader), generator=generator).tolist():
            if filled + self.lengths[document] > self.tokens_per_batch:
                batches.append([])
                filled = 0
            batches[-1].append(document)
            filled += self.lengths[document]
        return batches

    def steps_per_epoch(self) -> int:
        """Optimizer steps of epoch 0; the packing of others may differ by a few, and schedules use this one."""
        return math.ceil(len(self.epoch_batches(0)) / self.group)

    def steps(self, start: int, stop: int) -> Iterator[list[FeatureBatch]]:
        """Micro-batches of this rank for the steps start … stop-1. Step s is the same however one arrives there."""
        step, epoch = 0, 0
        while step < stop:
            batches = self.epoch_batches(epoch)
            count = math.ceil(len(batches) / self.group)
            for local in range(max(start - step, 0), min(count, stop - step)):
                yield self.micro_batches(batches, local)
            step, epoch = step + count, epoch + 1

    def micro_batches(self, batches: list[list[int]], step: int) -> list[FeatureBatch]:
        """This rank's share of one step. Where the epoch ends unevenly, a rank repeats a batch without loss."""
        mine = []
        for place in range(self.accumulate):
            index = step * self.group + self.rank * self.accumulate + place
            batch = pack([self.reader[document] for document in batches[min(index, len(batches) - 1)]])
            mine.append(batch if index < len(batches) else batch.without_loss())
        return mine


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
