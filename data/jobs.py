"""Documents → jobs for the target, sorted by length, cut into batches by tokens and into units (shards) by bytes.

What is cut depends on the corpus and the run alone, never on how many processes there are.
"""

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash

from headwright.configs import RunConfig, UserError
from headwright.configs.console import say
from headwright.data.batch import last_rows
from headwright.data.chat import Renderer
from headwright.data.corpus import Document, Skipped, decode_document, encode_document, encode_prompt
from headwright.data.sampling import Policy
from headwright.data.spool import Spool
from headwright.data.store import bytes_per_token

UNITS = 16  # at least so many where there is enough to do, so that processes share it and a kill loses little


@dataclass
class Job:
    """One document to harvest: a question for the target, or (with a mask) a text as it stands."""

    document: Document
    ids: list[int]
    mask: list[bool] | None = None
    sample: int = 0

    def note(self, turn: int = 0) -> dict[str, Any]:
        """What the store remembers of it."""
        place = self.document
        note = {"key": place.key, "source": place.source, "place": place.place, "sample": self.sample}
        return note | {"turn": turn} if turn else note


def encode_job(job: Job) -> dict[str, Any]:
    """For the spool. A text needs its tokens only."""
    document = job.document if job.mask is None else replace(job.document, messages=(), text="", ids=(), mask=())
    mask = None if job.mask is None else [int(on) for on in job.mask]
    return {"document": asdict(document), "ids": job.ids, "mask": mask, "sample": job.sample}


def decode_job(raw: dict[str, Any]) -> Job:
    """Out of the spool."""
    mask = None if raw["mask"] is None else [bool(on) for on in raw["mask"]]
    return Job(decode_document(raw["document"]), raw["ids"], mask, raw["sample"])


class Jobs:
    """All jobs of one side. In memory: a few numbers each."""

    def __init__(self, run: RunConfig, folder: Path | None):
        self.run = run
        self.spool: Spool[Job] = Spool(folder, encode_job, decode_job)
        self.keys: list[tuple[int, int, int]] = []  # prompt length, document's hash, sample
        self.tokens, self.rows = array("L"), array("L")  # of the finished document, at most
        self.content = xxhash.xxh64()
        self.cut = 0  # texts that were longer than allowed

    def __len__(self) -> int:
        return len(self.spool)

    def add(self, job: Job) -> None:
        """One more."""
        self.spool.append(job)
        self.keys.append((len(job.ids), int(job.document.key, 16), job.sample))
        tokens, rows = expected_size(job, self.run)
        self.tokens.append(tokens)
        self.rows.append(rows)
        rounds = job.document.rounds if job.mask is None else None
        self.content.update(f"{job.document.key}:{job.sample}:{job.ids}:{job.mask}:{rounds and rounds[1:]}".encode())

    def batches(self) -> Iterator[list[int]]:
        """Job numbers, shortest first, as many as fill the token budget with the longest of them."""
        batch: list[int] = []
        longest = 0
        for number in sorted(range(len(self)), key=self.keys.__getitem__):
            longest = max(longest, self.tokens[number])
            if batch and longest * (len(batch) + 1) > self.run.harvest.tokens_per_batch:
                yield batch
                batch, longest = [], self.tokens[number]
            batch.append(number)
        if batch:
            yield batch

    def units(self, taps: int, width: int) -> list[list[list[int]]]:
        """Batches grouped to shards of about `harvest.shard_mib`."""
        per_token, per_row = bytes_per_token(taps, width, self.run.harvest.dtype)
        size = min(self.run.harvest.shard_mib * 2**20, self.bytes(taps, width) / UNITS)
        units: list[list[list[int]]] = []
        filled = size
        for batch in self.batches():
            weight = sum(self.tokens[n] * per_token + self.rows[n] * per_row for n in batch)
            if filled + weight / 2 > size:
                units.append([])
                filled = 0
            units[-1].append(batch)
            filled += weight
        return units

    def bytes(self, taps: int, width: int) -> int:
        """What the store will take at most."""
        per_token, per_row = bytes_per_token(taps, width, self.run.harvest.dtype)
        return sum(self.tokens) * per_token + sum(self.rows) * per_row


def expected_size(job: Job, run: RunConfig) -> tuple[int, int]:
    """Tokens and loss-bearing rows of the finished document: exact for a text, an upper bound for a question."""
    if job.mask is not None:
        return len(job.ids), len(last_rows(torch.tensor(job.mask)))
    rounds = job.document.rounds[: run.answers.turns]
    answers = max(1, len(rounds)) * run.answers.max_new_tokens
    later = sum(len(turn["content"].encode()) // 3 + 8 for turns in rounds[1:] for turn in turns)
    longest = max(run.corpus.max_length, len(job.ids) + run.answers.max_new_tokens)
    return min(len(job.ids) + answers + later, longest), answers


def collect_jobs(
    run: RunConfig,
    renderer: Renderer,
    longest: int,
    documents: Iterable[Document],
    skipped: Skipped,
    held_out: bool,
    folder: Path | None = None,
) -> Jobs:
    """What to do for one side. Documents that cannot be used are counted, with their places."""
    jobs = Jobs(run, folder)
    for document in documents:
        try:
            made, was_cut = document_jobs(run, renderer, document, held_out, longest)
            jobs.cut += was_cut
            for job in made:
                jobs.add(job)
        except ValueError as error:
            why = str(error)
            skipped.add(re.sub(r"^turn \d+: ", "", why), document.place, why)
    if not jobs:
        raise UserError(
            f"harvest: no usable {'held-out' if held_out else 'training'} document; the reasons stand above"
        )
    if jobs.cut:
        say(f"{jobs.cut} {'held-out' if held_out else 'training'} documents were cut at {longest} tokens")
    return jobs


def document_jobs(
    run: RunConfig, renderer: Renderer, document: Document, held_out: bool, longest: int
) -> tuple[list[Job], bool]:
    """The jobs of one document, and whether it was cut. Raises ValueError where it cannot be used.

    Held-out prompts are always answered by the target, greedily: τ is about its text, whoever wrote the training text.
    """
    if run.answers.by == "corpus" and not held_out:
        encoded = encode_document(document, renderer)
        ids, mask = encoded.ids[:longest], encoded.mask[:longest]
        if sum(mask) < 2:
            raise ValueError(f"no response tokens within corpus.max_length {longest}")
        return [Job(document, ids, mask)], len(encoded.ids) > longest
    ids = encode_prompt(document, renderer)
    if len(ids) + run.answers.max_new_tokens > longest:
        raise ValueError(
            f"prompt and answer are longer than {longest} tokens (corpus.max_length, or the target's context)"
        )
    return [Job(document, ids, None, sample) for sample in range(1 if held_out else document.samples)], False


def check_ids(jobs: Jobs, vocabulary: int) -> None:
    """Tokens that were given as such may be another tokenizer's."""
    for job in jobs.spool:
        if job.ids and max(job.ids) >= vocabulary:
            raise UserError(
                f"{job.document.place}: token id {max(job.ids)}, but the target's vocabulary has {vocabulary}: "
                "input_ids of another tokenizer?"
            )


def policy_of(run: RunConfig, sample: int) -> Policy:
    """A prompt's first answer is greedy, the others are drawn."""
    if sample == 0 or run.answers.temperature == 0:
        return Policy()
    return Policy(run.answers.temperature, top_k=run.answers.top_k or 0, top_p=run.answers.top_p)


def seed_of(run: RunConfig, key: str, sample: int) -> int:
    """A seed that belongs to the document and the sample, not to the batch."""
    return xxhash.xxh64_intdigest(f"{key}:{sample}".encode(), seed=run.seed) >> 1


def flat(unit: Sequence[Sequence[int]]) -> list[int]:
    """Job numbers of a unit."""
    return [number for batch in unit for number in batch]
