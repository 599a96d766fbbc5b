"""Documents → jobs for the target, sorted by length, cut into batches by tokens and into units (shards) by bytes.

What is cut depends on the corpus and the run alone, never on how many processes there are.
"""

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
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

TEMPLATE_TOKENS = 32  # that a template may write around a turn
PADDING = 0.04  # share of a batch that may be padding
UNITS = 16  # at least so many where there is enough to do, so that processes share it and a kill loses little


@dataclass
class Job:
    """One document to harvest: a question for the target, or (with a mask) a text as it stands."""

    document: Document
    ids: list[int]
    mask: list[bool] | None = None
    sample: int = 0
    widest: int = 0  # tokens of its longest context, at most
    most: int = 0  # tokens of all its documents, at most

    def __post_init__(self) -> None:
        if self.mask is not None:
            self.widest = self.most = len(self.ids)

    def note(self, turn: int = 0) -> dict[str, Any]:
        """What the store remembers of it."""
        place = self.document
        note = {"key": place.key, "source": place.source, "place": place.place, "sample": self.sample}
        return note | {"turn": turn} if turn else note


def encode_job(job: Job) -> dict[str, Any]:
    """For the spool. A text needs its tokens only."""
    document = job.document if job.mask is None else replace(job.document, messages=(), text="", ids=(), mask=())
    mask = None if job.mask is None else [int(on) for on in job.mask]
    sizes = {"widest": job.widest, "most": job.most}
    return {"document": vars(document), "ids": job.ids, "mask": mask, "sample": job.sample} | sizes


def decode_job(raw: dict[str, Any]) -> Job:
    """Out of the spool."""
    mask = None if raw["mask"] is None else [bool(on) for on in raw["mask"]]
    return Job(decode_document(raw["document"]), raw["ids"], mask, raw["sample"], raw["widest"], raw["most"])


class Jobs:
    """All jobs of one side. In memory: a few numbers each."""

    def __init__(self, run: RunConfig, folder: Path | None):
        self.run = run
        self.spool: Spool[Job] = Spool(folder, encode_job, decode_job)
        self.lengths, self.hashes, self.samples = array("L"), array("Q"), array("L")  # what they are sorted by
        self.widths = array("L")  # tokens of the longest context, at most
        self.tokens, self.rows = array("L"), array("L")  # of the finished documents, at most
        self.content = xxhash.xxh64()
        self.asked = False  # questions; otherwise texts
        self.largest = (-1, "")  # token id, and the place where it stands
        self.cut = 0  # texts that were longer than allowed

    def __len__(self) -> int:
        return len(self.spool)

    def add(self, job: Job) -> None:
        """One more."""
        self.asked = job.mask is None
        self.spool.append(job)
        self.lengths.append(len(job.ids))
        self.hashes.append(int(job.document.key, 16))
        self.samples.append(job.sample)
        self.widths.append(job.widest)
        self.tokens.append(job.most)
        self.rows.append(rows_of(job, self.run))
        self.largest = max(self.largest, (max(job.ids, default=-1), job.document.place))
        rounds = job.document.rounds if job.mask is None else None
        self.content.update(f"{job.document.key}:{job.sample}:{job.ids}:{job.mask}:{rounds and rounds[1:]}".encode())

    def batches(self) -> Iterator[list[int]]:
        """Job numbers, shortest first: texts as fill the token budget with the longest of them, questions by number."""
        batch: list[int] = []
        held = 0  # tokens of the batch
        for number in np.lexsort([np.asarray(column) for column in (self.samples, self.hashes, self.lengths)]).tolist():
            if batch and self.full(len(batch), held, self.widths[number]):
                yield batch
                batch, held = [], 0
            batch.append(number)
            held += self.widths[number]
        if batch:
            yield batch

    def full(self, rows: int, held: int, longest: int) -> bool:
        """Whether a batch of so many rows and tokens takes no further one, the longest: answers in the making go by number.

        Texts of other lengths begin another batch where there is enough in this one, so that hardly anything is padding.
        """
        if self.asked:
            return rows >= self.run.answers.rows
        budget = self.run.harvest.tokens_per_batch
        return longest * (rows + 1) > budget or (longest * rows - held > PADDING * held and held > budget / 4)

    def units(self, taps: int, width: int) -> list[list[list[int]]]:
        """Batches grouped to shards of about `harvest.shard_mib`."""
        per_token, per_row = bytes_per_token(taps, width, self.run.harvest.dtype)
        size = min(self.run.harvest.shard_mib * 2**20, self.bytes(taps, width) / UNITS)
        units: list[list[list[int]]] = []
        filled = 0.0
        for batch in self.batches():
            weight = sum(self.tokens[n] * per_token + self.rows[n] * per_row for n in batch)
            if not units or filled + weight / 2 > size:
                units.append([])
                filled = 0
            units[-1].append(batch)
            filled += weight
        return units

    def bytes(self, taps: int, width: int) -> int:
        """What the store will take at most."""
        per_token, per_row = bytes_per_token(taps, width, self.run.harvest.dtype)
        return sum(self.tokens) * per_token + sum(self.rows) * per_row


def rows_of(job: Job, run: RunConfig) -> int:
    """Loss-bearing rows of the finished documents: exact for a text, an upper bound for a question."""
    if job.mask is not None:
        return len(last_rows(torch.tensor(job.mask)))
    return max(1, len(job.document.rounds[: run.answers.turns])) * run.answers.max_new_tokens


def sizes_of(run: RunConfig, renderer: Renderer, document: Document, ids: list[int], longest: int) -> tuple[int, int]:
    """(widest, most) of a question: what each later turn can grow to, and whether each becomes a document of its own."""
    rounds = document.rounds[: run.answers.turns]
    contexts = [len(ids) + run.answers.max_new_tokens]
    for turns in rounds[1:]:
        words = sum(len(renderer.tokenizer(turn["content"], add_special_tokens=False)["input_ids"]) for turn in turns)
        grown = contexts[-1] + words + TEMPLATE_TOKENS * (len(turns) + 1) + run.answers.max_new_tokens
        if grown > longest + run.answers.max_new_tokens:
            break
        contexts.append(min(grown, longest))
    kept = len(contexts) == 1 or keeps_turns(renderer, document)
    return contexts[-1], contexts[-1] if kept else sum(contexts)


def keeps_turns(renderer: Renderer, document: Document) -> bool:
    """Whether the template leaves an answer as it was when another turn follows."""
    first, second = document.rounds[:2]
    said = [*first, {"role": "assistant", "content": "answer"}, *second]
    try:
        before = renderer.text(first, document.tools, prompt=True)
        return renderer.text(said, document.tools, prompt=True).startswith(before + "answer")
    except ValueError:
        return False


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
    asked: set[int] = set()
    answered_anew = held_out or run.answers.by == "target"
    for document in documents:
        if answered_anew and int(document.key, 16) in asked:
            continue  # another answer to the same prompt
        asked.add(int(document.key, 16))
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
        return [Job(document, ids, mask, document.version)], len(encoded.ids) > longest
    ids = encode_prompt(document, renderer)
    if len(ids) + run.answers.max_new_tokens > longest:
        raise ValueError(
            f"prompt and answer are longer than {longest} tokens (corpus.max_length, or the target's context)"
        )
    widest, most = sizes_of(run, renderer, document, ids, longest)
    samples = range(1 if held_out else document.samples)
    return [Job(document, ids, None, sample, widest, most) for sample in samples], False


def check_ids(jobs: Jobs, vocabulary: int) -> None:
    """Tokens that were given as such may be another tokenizer's."""
    largest, place = jobs.largest
    if largest >= vocabulary:
        raise UserError(
            f"{place}: token id {largest}, but the target's vocabulary has {vocabulary}: input_ids of another tokenizer?"
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
