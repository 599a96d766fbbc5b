"""Features made by the target while the head trains: the same documents, the same order, no disk; or kept once made."""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from headwright.data.batch import Answer, DocumentFeatures, answer_of
from headwright.data.generate import read_documents
from headwright.data.jobs import Jobs
from headwright.data.shard import Shard
from headwright.data.store import DTYPES, OPEN_SHARDS, FeatureWriter, Manifest, open_shard, stored_document
from headwright.data.target import Target


class Texts:
    """The tokens of a side, without features."""

    def __init__(self, jobs: Jobs):
        self.jobs = jobs

    def __len__(self) -> int:
        return len(self.jobs)

    def lengths(self) -> list[int]:
        """Tokens of each document."""
        return list(self.jobs.tokens)

    def response_tokens(self) -> Iterator[Tensor]:
        """The response token ids, document by document."""
        return (answer.ids for answer in self.answers())

    def answers(self) -> Iterator[Answer]:
        """The response tokens of each document."""
        for job in self.jobs.spool:
            yield answer_of(job.document.source, torch.tensor(job.ids), torch.tensor(job.mask or []).bool(), None)


class LiveDocuments(Texts):
    """Texts, and the target that reads them when they are asked for. One thread at a time runs the target."""

    def __init__(self, root: Path, manifest: Manifest, jobs: Jobs, target: Target):
        super().__init__(jobs)
        self.root, self.manifest, self.target = root, manifest, target
        self.manifest.documents, self.manifest.tokens = len(jobs), sum(jobs.tokens)
        self.manifest.response_tokens = sum(len(ids) for ids in self.response_tokens())
        self.lock = threading.Lock()

    def read(self, documents: Sequence[int]) -> list[DocumentFeatures]:
        """The target's pass over some documents, together, in the precision that a store would have."""
        with self.lock:
            return self.make(documents)

    def make(self, documents: Sequence[int]) -> list[DocumentFeatures]:
        """`read`, for whoever holds the lock."""
        jobs = [self.jobs.spool[document] for document in documents]
        texts = [(job.ids, job.mask or []) for job in jobs]
        return read_documents(self.target, texts, DTYPES[self.manifest.dtype])


class HybridDocuments(LiveDocuments):
    """Live in the first epoch, from disk afterwards. A batch of the first epoch is a shard; a killed run keeps them."""

    def __init__(self, root: Path, manifest: Manifest, jobs: Jobs, target: Target, batches: Sequence[Sequence[int]]):
        super().__init__(root, manifest, jobs, target)
        self.batches = batches
        self.manifest.units = len(batches)
        self.writer = FeatureWriter(root, manifest)
        self.place = {document: (unit, row) for unit, batch in enumerate(batches) for row, document in enumerate(batch)}
        self.shards: OrderedDict[int, Shard] = OrderedDict()

    def read(self, documents: Sequence[int]) -> list[DocumentFeatures]:
        """From the shards; one that is not there yet is made and kept."""
        return [
            stored_document(self.shard(unit), row, self.manifest.dtype)
            for unit, row in (self.place[document] for document in documents)
        ]

    def shard(self, unit: int) -> Shard:
        """A shard, made if need be."""
        with self.lock:
            if unit not in self.shards:
                if not self.writer.path(unit).exists():
                    self.keep(unit)
                self.shards[unit] = open_shard(self.writer.path(unit))
            self.shards.move_to_end(unit)
            while len(self.shards) > OPEN_SHARDS:
                self.shards.popitem(last=False)
            return self.shards[unit]

    def keep(self, unit: int) -> None:
        """Make one batch and write it."""
        started = time.perf_counter()
        made = self.make(self.batches[unit])
        notes = [self.jobs.spool[document].note() for document in self.batches[unit]]
        self.writer.write_now(unit, made, notes, time.perf_counter() - started)
