"""Features made by the target while the head trains: the same documents, the same order, no disk; or kept once made."""

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from headwright.data.batch import Answer, DocumentFeatures, answers_of
from headwright.data.generate import read_documents
from headwright.data.jobs import Job, Jobs, flat
from headwright.data.shard import Shard
from headwright.data.store import DTYPES, FeatureWriter, Manifest, OpenShards, open_shard, origin, stored_document
from headwright.data.target import Target


class Texts:
    """The tokens of a side, without features, numbered as a store numbers them."""

    def __init__(self, jobs: Jobs):
        self.jobs = jobs
        self.order = flat(list(jobs.batches()))

    def job(self, document: int) -> Job:
        """The job of a document."""
        return self.jobs.spool[self.order[document]]

    def __len__(self) -> int:
        return len(self.order)

    def lengths(self) -> list[int]:
        """Tokens of each document."""
        return [self.jobs.tokens[number] for number in self.order]

    def loss_rows(self) -> list[int]:
        """Loss-bearing rows of each document."""
        return [self.jobs.rows[number] for number in self.order]

    def sources(self) -> list[str]:
        """The source of each document."""
        return [self.job(document).document.source for document in range(len(self))]

    def place(self, document: int) -> str:
        """Where a document came from."""
        return origin(self.job(document).note())

    def response_tokens(self) -> Iterator[Tensor]:
        """The response token ids, turn by turn."""
        return (answer.ids for answer in self.answers())

    def answers(self) -> Iterator[Answer]:
        """The response tokens of each turn."""
        for job in map(self.job, range(len(self))):
            mask = torch.tensor(job.mask or []).bool()
            yield from answers_of(job.document.source, torch.tensor(job.ids), mask, None)


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
        """`read`, for whoever runs the target alone."""
        jobs = [self.job(document) for document in documents]
        texts = [(job.ids, job.mask or []) for job in jobs]
        return read_documents(self.target, texts, DTYPES[self.manifest.dtype])


class HybridDocuments(LiveDocuments):
    """Live in the first epoch, from disk afterwards. A batch of the first epoch is a shard; a killed run keeps them."""

    def __init__(self, root: Path, manifest: Manifest, jobs: Jobs, target: Target, batches: Sequence[Sequence[int]]):
        super().__init__(root, manifest, jobs, target)
        self.batches = first_asked(batches)
        self.manifest.units = len(self.batches)
        self.writer = FeatureWriter(root, manifest)
        self.where = {d: (unit, row) for unit, batch in enumerate(self.batches) for row, d in enumerate(batch)}
        self.shards = OpenShards(self.open)

    def read(self, documents: Sequence[int]) -> list[DocumentFeatures]:
        """From the shards; one that is not there yet is made and kept."""
        return [
            stored_document(self.shards.take(unit), row, self.manifest.dtype)
            for unit, row in (self.where[document] for document in documents)
        ]

    def open(self, unit: int) -> Shard:
        """A shard, made if need be."""
        if not self.writer.path(unit).exists():
            self.keep(unit)
        return open_shard(self.writer.path(unit))

    def keep(self, unit: int) -> None:
        """Make one batch and write it."""
        started = time.perf_counter()
        made = self.make(self.batches[unit])
        notes = [self.job(document).note() for document in self.batches[unit]]
        self.writer.write_now(unit, made, notes, time.perf_counter() - started)


def first_asked(batches: Sequence[Sequence[int]]) -> list[list[int]]:
    """Each document in the batch that asks for it first: a long one is asked for in parts."""
    seen: set[int] = set()
    kept = []
    for batch in batches:
        kept.append([document for document in dict.fromkeys(batch) if document not in seen])
        seen.update(batch)
    return [batch for batch in kept if batch]
