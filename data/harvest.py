"""Corpus → target → feature store. Runnable: `accelerate launch data/harvest.py --config …` or `headwright harvest`.

Work is cut into units of a few documents; each unit becomes one shard, whole or absent. Any number of processes share
the units; a harvest that was killed continues with those that are missing.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from accelerate import PartialState

from headwright.configs import RunConfig, UserError, dump
from headwright.configs.command import run_stage
from headwright.configs.console import duration, progress, say, size, table
from headwright.configs.schema import Source
from headwright.data.batch import DocumentFeatures
from headwright.data.corpus import (
    Corpus,
    Document,
    check_sources,
    describe,
    encode_document,
    encode_prompt,
    read_corpus,
)
from headwright.data.demo import SETS, check_embedded
from headwright.data.regenerate import Question, answer, read_documents
from headwright.data.sampling import Policy
from headwright.data.store import DTYPES, FeatureWriter, Manifest, read_manifest, sweep, write_text
from headwright.data.target import Target, choose_taps, locate

SECTIONS = ("target", "corpus", "answers", "harvest")
ABOUT = "Run the target over the corpus and store its hidden states."


@dataclass
class Job:
    """One document to harvest: a question for the target, or a text as it stands."""

    document: Document
    ids: list[int]
    mask: list[bool] | None = None
    sample: int = 0

    def note(self) -> dict[str, Any]:
        """What the store remembers of it."""
        place = self.document
        return {"key": place.key, "source": place.source, "place": place.place, "sample": self.sample}


def store_path(run: RunConfig, side: str) -> Path:
    """Where the features of `train` or `held-out` lie."""
    return run.directory / ("features" if side == "train" else "features-held-out")


def harvest(run: RunConfig, dry_run: bool = False) -> None:
    """Both sides of the corpus, each into its own store."""
    if dry_run:
        check_offline(run)
        return
    state = PartialState(cpu=not torch.cuda.is_available())
    corpus = read_corpus(run.corpus, run.seed)
    if state.is_main_process:
        show_corpus(corpus, run.corpus.sources)
    target = Target.load(run.target, run.harvest.taps, state.device)
    sides = [open_side(run, target, "train", corpus.train), open_side(run, target, "held-out", corpus.held_out)]
    save_config(run)  # only now: a run that the stores refuse must not change what lies beside them
    for side in sides:
        harvest_side(run, target, side, state)
    if state.is_main_process:
        show_stores(run)


def check_offline(run: RunConfig) -> None:
    """What can be known without a network: local files and the names of embedded things."""
    check_sources(run.corpus.sources)
    if isinstance(run.harvest.taps, list):
        choose_taps(run.harvest.taps, max([*run.harvest.taps, 0]), run.target.model)
    if run.target.model.startswith("embedded:"):
        check_embedded(run.target.model.removeprefix("embedded:"))
    else:
        locate(run.target.model)


@dataclass
class Side:
    """One store and the work that fills it."""

    name: str
    units: list[list[Job]]
    writer: FeatureWriter


def open_side(run: RunConfig, target: Target, name: str, documents: Sequence[Document]) -> Side:
    """The work of one side. Raises UserError when its store holds something else."""
    jobs = make_jobs(run, target, documents, held_out=name == "held-out")
    units = cut(jobs, run.harvest.documents_per_shard)
    return Side(name, units, FeatureWriter(store_path(run, name), make_manifest(run, target, jobs, len(units))))


def harvest_side(run: RunConfig, target: Target, side: Side, state: PartialState) -> None:
    """One store, this process's share of it. A unit belongs to the same process whatever is done already."""
    units, writer = side.units, side.writer
    if state.num_processes == 1:
        sweep(writer.root)  # with others at work, their scratch files are alive
    mine = [unit for unit in writer.missing() if unit % state.num_processes == state.process_index]
    with progress(quiet=not state.is_main_process) as bar:
        task = bar.add_task(
            f"harvest {side.name}", total=len(units), completed=len(units) - len(writer.missing()), note=""
        )
        for unit in mine:
            started = time.perf_counter()
            documents_done = run_unit(run, target, units[unit])
            seconds = time.perf_counter() - started
            writer.write(unit, documents_done, [job.note() for job in units[unit]], seconds)
            rate = f"{sum(len(d.ids_T) for d in documents_done) / seconds:.0f} tokens/s"
            done = len(units) - len(writer.missing())  # by all processes
            bar.update(task, completed=done, note=rate)
            if bar.disable:
                say(f"harvest {side.name}: {done} of {len(units)} shards, {rate}")
    writer.finish()


def make_jobs(run: RunConfig, target: Target, documents: Sequence[Document], held_out: bool) -> list[Job]:
    """What to do, sorted by length so that a unit's rows are alike. Documents that cannot be used are counted."""
    jobs: list[Job] = []
    skipped: dict[str, int] = {}
    limit = min(run.corpus.max_length, target.spec.max_positions)
    for document in documents:
        try:
            jobs += document_jobs(run, target, document, held_out, limit)
        except ValueError as error:
            reason = str(error)
            skipped[reason] = skipped.get(reason, 0) + 1
    for reason, count in skipped.items():
        say(f"skipped {count} documents: {reason}")
    if not jobs:
        raise UserError(
            f"harvest: no usable {'held-out' if held_out else 'training'} document; the reasons stand above"
        )
    return sorted(jobs, key=lambda job: (len(job.ids), job.document.key, job.sample))


def document_jobs(run: RunConfig, target: Target, document: Document, held_out: bool, limit: int) -> list[Job]:
    """The jobs of one document. Raises ValueError where it cannot be used.

    Held-out prompts are always answered by the target, greedily: τ is about its text, whoever wrote the training text.
    """
    if run.answers.by == "corpus" and not held_out:
        encoded = encode_document(document, target.tokenizer)
        ids, mask = encoded.ids[:limit], encoded.mask[:limit]
        if sum(mask) < 2:
            raise ValueError(f"no response tokens within corpus.max_length {limit}")
        return [Job(document, ids, mask)]
    ids = encode_prompt(document, target.tokenizer)
    if len(ids) + run.answers.max_new_tokens > limit:
        raise ValueError(
            f"prompt and answer are longer than {limit} tokens (corpus.max_length, or the target's context)"
        )
    return [Job(document, ids, None, sample) for sample in range(1 if held_out else document.samples)]


def cut(jobs: Sequence[Job], count: int) -> list[list[Job]]:
    """Units of at most `count` jobs."""
    return [list(jobs[start : start + count]) for start in range(0, len(jobs), count)]


def run_unit(run: RunConfig, target: Target, jobs: Sequence[Job]) -> list[DocumentFeatures]:
    """The features of one unit."""
    store = DTYPES[run.harvest.dtype]
    texts = [(job.ids, job.mask) for job in jobs if job.mask is not None]
    if texts:
        return read_documents(target, texts, store)
    questions = [Question(job.ids, policy_of(run, job), seed_of(run, job)) for job in jobs]
    return answer(target, questions, run.answers.max_new_tokens, store)


def policy_of(run: RunConfig, job: Job) -> Policy:
    """A prompt's first answer is greedy, the others are drawn."""
    if job.sample == 0 or run.answers.temperature == 0:
        return Policy()
    return Policy(run.answers.temperature, top_p=run.answers.top_p)


def seed_of(run: RunConfig, job: Job) -> int:
    """A seed that belongs to the document and the sample, not to the batch."""
    return xxhash.xxh64_intdigest(f"{job.document.key}:{job.sample}".encode(), seed=run.seed) >> 1


def make_manifest(run: RunConfig, target: Target, jobs: Sequence[Job], units: int) -> Manifest:
    """The manifest of a store that is about to be filled."""
    content = xxhash.xxh64()
    for job in jobs:
        content.update(f"{job.document.key}:{job.sample}:{job.ids}:{job.mask}".encode())
    identity = {
        "target": target.spec.fingerprint,
        "template": target.spec.template_hash,
        "taps": list(target.taps),
        "corpus": content.hexdigest(),
        "answers": asdict(run.answers),
        "documents_per_shard": run.harvest.documents_per_shard,
        "dtype": run.harvest.dtype,
        "seed": run.seed,
    }
    return Manifest(identity, asdict(target.spec), list(target.taps), run.harvest.dtype, units)


def save_config(run: RunConfig) -> None:
    """The resolved config beside what it made."""
    run.directory.mkdir(parents=True, exist_ok=True)
    write_text(run.directory / "config.yaml", dump(run))


def show_corpus(corpus: Corpus, sources: Sequence[Source]) -> None:
    """Documents by source and side."""
    names = dict.fromkeys(d.source for d in [*corpus.train, *corpus.held_out])
    rows = []
    for name in names:
        train = [d for d in corpus.train if d.source == name]
        rows.append((name, len(train), sum(d.samples for d in train), sum(d.source == name for d in corpus.held_out)))
    table("corpus", ("source", "training documents", "answers", "held out"), rows)
    demos = [f"{source.demo} ({SETS[source.demo].licence})" for source in sources if source.demo in SETS]
    if demos:
        say(f"licences of the demo sets: {', '.join(demos)}")
    if corpus.skipped:
        say(f"left out: {describe(corpus.skipped)}")


def show_stores(run: RunConfig) -> None:
    """What was harvested."""
    rows = []
    for side in ("train", "held-out"):
        m = read_manifest(store_path(run, side))
        if not m.complete:
            say(f"{store_path(run, side)}: other processes are still at work")
            continue
        rate = m.tokens / m.seconds if m.seconds else 0
        per_token = m.bytes / m.tokens if m.tokens else 0
        rows.append(
            (
                side,
                m.documents,
                m.tokens,
                m.response_tokens,
                size(m.bytes),
                f"{per_token:.0f}",
                duration(m.seconds),
                f"{rate:.0f}",
            )
        )
    table(
        f"features in {run.directory}",
        ("store", "documents", "tokens", "response tokens", "size", "bytes/token", "time", "tokens/s"),
        rows,
    )


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    run_stage("headwright harvest", ABOUT, SECTIONS, harvest, argv)


if __name__ == "__main__":
    main()
