"""Corpus → target → feature store. Runnable: `accelerate launch data/harvest.py --config …` or `headwright harvest`.

Work is cut into units; each unit becomes one shard, whole or absent. Any number of processes share the units; a harvest
that was killed continues with those that are missing.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import filelock
import torch

from headwright.configs import RunConfig, UserError, dump
from headwright.configs.command import run_stage
from headwright.configs.console import duration, progress, say, size, table
from headwright.configs.schema import Source
from headwright.data.batch import DocumentFeatures
from headwright.data.chat import Renderer
from headwright.data.conversation import begin, converse
from headwright.data.corpus import Corpus, Document, Skipped, check_sources, read_corpus
from headwright.data.demo import licence_of
from headwright.data.embedded import PREFIX, check_embedded
from headwright.data.generate import read_documents
from headwright.data.jobs import Job, Jobs, check_ids, collect_jobs, flat
from headwright.data.store import (
    DTYPES,
    FeatureReader,
    FeatureWriter,
    Manifest,
    read_manifest,
    refuse_full_disk,
    replace_with,
    sweep,
    write_text,
)
from headwright.data.target import Target, choose_taps, locate

SECTIONS = ("target", "corpus", "answers", "harvest")
LAUNCH = {  # what launchers set: torchrun and accelerate; MPI
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
}
ABOUT = "Run the target over the corpus and store its hidden states."


@dataclass(frozen=True)
class Process:
    """One of the processes of a launch. They share units and no messages: none waits for another, or dies with it."""

    process_index: int
    num_processes: int
    device: torch.device

    @property
    def is_main_process(self) -> bool:
        """Whether it is the one that speaks."""
        return self.process_index == 0


def this_process() -> Process:
    """As its launcher tells it."""
    rank, world, local = (launched(name, default) for name, default in zip(LAUNCH, (0, 1, 0)))
    if not torch.cuda.is_available():
        return Process(rank, world, torch.device("cpu"))
    torch.cuda.set_device(local)
    return Process(rank, world, torch.device("cuda", local))


def launched(name: str, default: int) -> int:
    """A number that the launcher set."""
    return next((int(os.environ[key]) for key in (name, *LAUNCH[name]) if key in os.environ), default)


def store_path(run: RunConfig, side: str) -> Path:
    """Where the features of `train` or `held-out` lie."""
    owner = run.directory if run.features is None else Path(run.runs) / run.features
    return owner / ("features" if side == "train" else "features-held-out")


def taps_to_harvest(run: RunConfig) -> Any:
    """The run file's taps, or a function from the number of layers to those that the head reads."""
    return run.harvest.taps if isinstance(run.harvest.taps, list) else run.head.choose_taps


def open_store(run: RunConfig, side: str) -> FeatureReader:
    """A store of the run, with the taps that its head reads. Raises UserError where it lacks one."""
    root = store_path(run, side)
    manifest = read_manifest(root)
    source = f"{root}: holds taps {manifest.taps} ({root.parent / 'config.yaml'} made it)"
    return FeatureReader(root, wanted_taps(run, manifest.target["num_layers"], manifest.taps, source))


def wanted_taps(run: RunConfig, layers: int, there: Sequence[int], source: str) -> tuple[int, ...]:
    """The taps of those that are there which the head reads. Raises UserError, with what `source` says, where it lacks one."""
    wanted: tuple[int, ...] = run.head.choose_taps(layers, tuple(there))
    if wanted[-1] > layers:
        raise UserError(f"head.taps {list(wanted)}: the target has {layers} layers (tap i = after i layers)")
    if not set(wanted) <= set(there):
        raise UserError(
            f"{source}, and the {run.head.kind} head reads {list(wanted)}: harvest with "
            f"harvest.taps={sorted({*there, *wanted})}, or train on taps that are there"
        )
    return wanted


def harvest(run: RunConfig, dry_run: bool = False) -> None:
    """Both sides of the corpus, each into its own store. With live features the training side is left to training."""
    check_features(run)
    if run.features is not None:
        raise UserError(f"this run uses the features of {run.features}: harvest that run, or set features to null")
    if dry_run:
        check_offline(run)
        return
    state = this_process()
    with alone(run, state.is_main_process):
        corpus = read_corpus(run.corpus, run.seed, run.directory)
        if state.is_main_process:
            show_corpus(corpus, run.corpus.sources)
        target = Target.load(run.target, taps_to_harvest(run), state.device)
        names = ["train", "held-out"] if run.harvest.features == "stored" else ["held-out"]
        sides = [open_side(run, target, name, side_of(corpus, name), corpus.skipped) for name in names]
        if run.harvest.check_disk:
            refuse_full_disk(run.directory, sum(side.bytes for side in sides), sum(side.written() for side in sides))
        if state.is_main_process:
            save_config(run)  # only now: a run that the stores refuse must not change what lies beside them
            save_skipped(run, corpus.skipped)
        for side in sides:
            harvest_side(run, target, side, state)
        if state.is_main_process:
            show_stores(run, names)


@contextlib.contextmanager
def alone(run: RunConfig, is_main_process: bool = True) -> Iterator[None]:
    """A second launch on the same run is refused. The lock is the main process's, and dies with it."""
    run.directory.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(run.directory / "harvest.lock", timeout=0)
    if is_main_process:
        try:
            lock.acquire()
        except filelock.Timeout:
            raise UserError(
                f"{run.directory}: another harvest is at work there: let it finish, stop it, or give this run another name"
            ) from None
    try:
        yield
    finally:
        lock.release()


def side_of(corpus: Corpus, name: str) -> Any:
    """The documents of a side."""
    return corpus.train if name == "train" else corpus.held_out


def check_offline(run: RunConfig) -> None:
    """What can be known without a network: local files and the names of embedded things."""
    check_sources(run.corpus.sources)
    check_features(run)
    if isinstance(run.harvest.taps, list):
        choose_taps(run.harvest.taps, max([*run.harvest.taps, 0]), run.target.model)
    if run.target.model.startswith(PREFIX):
        check_embedded(run.target.model.removeprefix(PREFIX))
    else:
        locate(run.target.model)


def check_features(run: RunConfig) -> None:
    """Live features are of texts that exist; an answer that is yet to be written has none."""
    if run.harvest.features != "stored" and run.answers.by == "target":
        raise UserError(
            f"harvest.features is {run.harvest.features}, and answers.by is target: live features need texts. Run "
            "headwright regenerate first, name its chats.jsonl as a corpus source, and set answers.by: corpus"
        )


@dataclass
class Side:
    """One store and the work that fills it."""

    name: str
    jobs: Jobs
    units: list[list[list[int]]]
    writer: FeatureWriter
    bytes: int

    def written(self) -> int:
        """Bytes that are there already."""
        return sum(path.stat().st_size for path in self.writer.root.glob("shard-*"))


def renderer_of(run: RunConfig, tokenizer: Any) -> Renderer:
    """How this run renders chats."""
    return Renderer(tokenizer, run.corpus.learn, run.corpus.template)


def jobs_of(
    run: RunConfig, tokenizer: Any, longest: int, name: str, documents: Any, skipped: Skipped | None = None
) -> Jobs:
    """The work of one side."""
    limit = min(run.corpus.max_length, longest)
    skipped = skipped or Skipped()
    return collect_jobs(run, renderer_of(run, tokenizer), limit, documents, skipped, name == "held-out", run.directory)


def open_side(
    run: RunConfig, target: Target, name: str, documents: Sequence[Document] | Any, skipped: Skipped | None = None
) -> Side:
    """The work of one side. Raises UserError when its store holds something else."""
    jobs = jobs_of(run, target.tokenizer, target.spec.max_positions, name, documents, skipped)
    check_ids(jobs, target.spec.vocab_size)
    units = jobs.units(len(target.taps), target.spec.hidden_size)
    writer = FeatureWriter(store_path(run, name), make_manifest(run, target, jobs, len(units)))
    return Side(name, jobs, units, writer, jobs.bytes(len(target.taps), target.spec.hidden_size))


def harvest_side(run: RunConfig, target: Target, side: Side, state: Process) -> None:
    """One store, this process's share of it. A unit belongs to the same process whatever is done already."""
    units, missing = side.units, side.writer.missing()
    # a manifest is written in a moment, by whoever is last: what is older than this process is of one that was killed
    sweep(side.writer.root, ".*.tmp" if state.is_main_process else ".manifest*.tmp")
    mine = [unit for unit in missing if unit % state.num_processes == state.process_index]
    pace = Pace(expected(side.jobs, [units[unit] for unit in mine]))
    with progress(quiet=not state.is_main_process) as bar, side.writer.background() as writer:
        task = bar.add_task(f"harvest {side.name}", total=len(units), completed=len(units) - len(missing), note="")
        for made, unit in enumerate(mine, 1):
            started = time.perf_counter()
            documents, notes = run_unit(run, target, side.jobs, units[unit])
            seconds = time.perf_counter() - started
            writer.write(unit, documents, notes, seconds)
            pace.add(expected(side.jobs, [units[unit]]), documents, seconds)
            # by all processes; the last of this one is still being written
            done = max(side.writer.count(), len(units) - len(missing) + made)
            bar.update(task, completed=done, note=str(pace))
            if bar.disable and state.is_main_process:
                say(f"harvest {side.name}: {done} of {len(units)} shards, {pace}")
    if side.writer.finish() is not None:  # every shard is there: nobody is writing one
        sweep(side.writer.root, ".shard-*.tmp", before=None)


class Pace:
    """Tokens per second, bytes so far, and the time that is left."""

    def __init__(self, expected: int):
        self.left, self.expected, self.tokens, self.seconds, self.bytes = expected, 0, 0, 0.0, 0

    def add(self, expected: int, documents: Sequence[DocumentFeatures], seconds: float) -> None:
        """Count one unit."""
        self.left -= expected
        self.expected += expected
        self.seconds += seconds
        self.tokens += sum(len(d.ids_T) for d in documents)
        self.bytes += sum(d.taps_TKD.nbytes + d.last_RD.nbytes for d in documents)

    def __str__(self) -> str:
        left = self.left * self.seconds / max(self.expected, 1)
        rate = self.tokens / max(self.seconds, 1e-9)
        return f"{rate:.0f} tokens/s, {size(self.bytes)}, {duration(left)} left"


def expected(jobs: Jobs, units: Sequence[Sequence[Sequence[int]]]) -> int:
    """Tokens of some units, at most."""
    return sum(jobs.tokens[number] for unit in units for number in flat(unit))


def run_unit(
    run: RunConfig, target: Target, jobs: Jobs, unit: Sequence[Sequence[int]]
) -> tuple[list[DocumentFeatures], list[dict[str, Any]]]:
    """The features of one unit, batch by batch, and their notes."""
    documents: list[DocumentFeatures] = []
    notes: list[dict[str, Any]] = []
    for batch in unit:
        these = [jobs.spool[number] for number in batch]
        for job, made in zip(these, run_batch(run, target, these)):
            documents += made
            notes += [job.note(turn) for turn in range(len(made))]
    return documents, notes


def run_batch(run: RunConfig, target: Target, jobs: Sequence[Job]) -> list[list[DocumentFeatures]]:
    """The documents of each job of one batch."""
    store = DTYPES[run.harvest.dtype]
    texts = [(job.ids, job.mask) for job in jobs if job.mask is not None]
    if texts:
        return [[document] for document in read_documents(target, texts, store)]
    renderer = renderer_of(run, target.tokenizer)
    talks = [begin(run, target, renderer, job.document, job.sample) for job in jobs]
    converse(target, talks, run.answers.max_new_tokens, store)
    return [talk.documents for talk in talks]


def make_manifest(run: RunConfig, target: Target, jobs: Jobs, units: int) -> Manifest:
    """The manifest of a store that is about to be filled."""
    identity = {
        "target": target.spec.fingerprint,
        "template": target.spec.template_hash,
        "template arguments": run.corpus.template,
        "taps": list(target.taps),
        "learn": asdict(run.corpus.learn),
        "answers": asdict(run.answers),
        "corpus": jobs.content.hexdigest(),
        "features": run.harvest.features,
        "tokens_per_batch": run.harvest.tokens_per_batch,
        "shard_mib": run.harvest.shard_mib,
        "dtype": run.harvest.dtype,
        "seed": run.seed,
    }
    return Manifest(identity, asdict(target.spec), list(target.taps), run.harvest.dtype, units)


def save_config(run: RunConfig) -> None:
    """The resolved config beside what it made."""
    run.directory.mkdir(parents=True, exist_ok=True)
    write_text(run.directory / "config.yaml", dump(run))


def save_skipped(run: RunConfig, skipped: Skipped) -> None:
    """Every row and document that was left out, with its place and the reason."""
    path = run.directory / "skipped.jsonl"

    def write(scratch: Path) -> None:
        with scratch.open("w", encoding="utf-8") as file:
            file.writelines(skipped.lines())

    replace_with(path, write)
    if skipped.counts:
        say(f"left out: {skipped} (listed in {path})")


def show_corpus(corpus: Corpus, sources: Sequence[Source]) -> None:
    """Documents by source and side."""
    counts: dict[str, list[int]] = {}
    for document in corpus.train:
        row = counts.setdefault(document.source, [0, 0, 0])
        row[0] += 1
        row[1] += document.samples
    for document in corpus.held_out:
        counts.setdefault(document.source, [0, 0, 0])[2] += 1
    rows = [(name, *numbers) for name, numbers in counts.items()]
    table("corpus", ("source", "training documents", "answers", "held out"), rows)
    demos = [f"{source.demo} ({licence_of(source.demo)})" for source in sources if source.demo]
    if demos:
        say(f"licences of the demo sets: {', '.join(demos)}")


def show_stores(run: RunConfig, names: Sequence[str]) -> None:
    """What was harvested."""
    rows = []
    for side in names:
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
