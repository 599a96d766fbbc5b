"""One training run, any kind of head: `accelerate launch train/<kind>.py --config …` or `headwright train`."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwright.configs import RunConfig, UserError, dump
from headwright.configs.command import run_stage
from headwright.configs.console import duration, peak_memory, say, show_command, table
from headwright.configs.load import parse
from headwright.data import packing
from headwright.data.corpus import general_sources, read_corpus
from headwright.data.coverage import lint
from headwright.data.harvest import (
    check_features,
    check_offline,
    jobs_of,
    make_manifest,
    open_store,
    save_config,
    store_path,
)
from headwright.data.live import HybridDocuments, LiveDocuments, Texts
from headwright.data.packing import Long, plan_epoch
from headwright.data.placing import check_sharing
from headwright.data.replay import Choice, replaying, some_of
from headwright.data.store import FeatureReader, write_json
from headwright.data.stream import Documents, FeatureStream
from headwright.data.target import Target
from headwright.data.vet import make_vet
from headwright.data.vocab import DraftVocab, adapted_vocab, choose_vocab, count_tokens, coverage
from headwright.eval.metrics import rank_correlation, read_metrics
from headwright.heads.base import DraftHead, Engine, make_head
from headwright.heads.fused import switch
from headwright.heads.lora import adapt, fingerprint, merged, save_adapter
from headwright.heads.saved import load_head, save_head, vocab_of, warm_start
from headwright.train.checkpoint import BEST, Checkpoint, Progress, Saver, differences, read_checkpoint, show
from headwright.train.health import chance
from headwright.train.launch import Launch, close_launch, open_launch
from headwright.train.loop import Callbacks, Parts, fit
from headwright.train.measure import Measure, measured_depth
from headwright.train.optim import refuse_optimizer
from headwright.train.provenance import cleaned, command, provenance
from headwright.train.spread import spread
from headwright.train.strategy import Strategy
from headwright.train.track import Tracker

TRIALS = ("shares", "trial", "curve")  # keys of adapt that concern other trainings
SHOWN = 5  # documents that were left out
ADAPTER = "adapter"  # low-rank updates of the best head, in the run's directory
SECTIONS = ("vocab", "head", "train")
ABOUT = "Train a draft head on harvested features; keep the one with the best τ on held-out text."


# of the loop's keys: what may change while a run is interrupted, since no weight depends on it
UNBOUND = (
    "track",
    "log_every",
    "saves",
    "save_every",
    "keep",
    "evals",
    "eval_every",
    "decode",
    "patience",
    "accumulate",
    "workers",
    "recompute",
    "loss_mib",
    "compile",
    "strategy",
    "processes",
    "hang_minutes",
    "bad_steps",
    "mixed_precision",
)


def head_path(run: RunConfig) -> Path:
    """Where the best head lies."""
    return run.directory / BEST


@dataclass
class Prepared:
    """What a training needs before its first step."""

    target: Target
    features: Documents
    held_out: FeatureReader
    head: DraftHead
    covered: float
    by_chance: float
    warmed: str | None
    lint: list[str] = field(default_factory=list)
    base: str = ""  # fingerprint of the head that an adapter, which is kept beside the merged head, belongs to


def train(run: RunConfig, dry_run: bool = False) -> bool:
    """Harvested features → the best head, with checkpoints to continue from. False where it was stopped before its end."""
    check_features(run)
    if dry_run:
        check_offline(run)
        return True
    if run.train.lora and (run.adapt.fresh or not (run.adapt.head or run.train.warm_start)):
        raise UserError(
            "train.lora: low-rank updates are of a head that is there: name it as adapt.head or train.warm_start, without "
            "adapt.fresh"
        )
    launch = open_launch(run.train)
    refuse_optimizer(run.train, launch.strategy, launch.device)
    torch.manual_seed(run.seed)
    lesson = prepare(run, launch)
    stream = make_stream(run, lesson.features, lesson.head, launch)
    total = max(1, round(run.train.epochs * stream.steps_per_epoch()))
    folder, identity = run.directory / "checkpoints", run_identity(run, lesson.features, launch, total)
    config = cleaned(parse(dump(run)))
    found = read_checkpoint(folder, identity)
    state = found.progress if found else Progress(total=total)
    changed = differences(state.config, config) if found else {}
    state.identity, state.config = identity, config
    strategy = take_up(lesson.head, run, launch, found)
    launch.wait()  # what is refused is refused before anything is written
    facts = provenance(launch, lesson.features.manifest)
    if launch.main:
        save_config(run)
        write_json(run.directory / "provenance.json", facts)
        show_start(run, lesson, stream, state, strategy)
        show_changes(changed)
    saver = Saver(folder, run.train.keep, facts)
    measure = Measure.of(run, strategy, lesson.target, lesson.held_out)
    floor = floor_of(run, lesson, measure)
    callbacks = Callbacks(
        measure,
        keeper(run, strategy, lesson.base),
        lambda state: saver.save(strategy, state),
    )
    tracker = Tracker(run, launch.main, state.step, facts | {"coverage": lesson.covered})
    lesson.head.train()
    try:
        parts = Parts(strategy, stream, lesson.target, run.train, state, tracker, callbacks, lesson.by_chance, floor)
        ending = fit(parts)
        saver.wait()
        if ending != "stopped":
            tracker.artifact(f"{run.name}-head", "model", head_path(run))
    finally:
        saver.close()
        tracker.close()
    if launch.main:
        finish(run, lesson, stream, state, ending, floor)
    launch.wait()  # a process that leaves early takes its end of the others' connections with it
    return ending != "stopped"


def prepare(run: RunConfig, launch: Launch) -> Prepared:
    """Target, features, vocabulary and head. Raises UserError where they do not fit together."""
    held_out = open_store(run, "held-out")
    check_sharing(run.target, launch.world)
    if run.target.shard and run.harvest.features == "hybrid":
        raise UserError(
            "target.shard: with harvest.features=hybrid some processes would read what others make: live, or stored"
        )
    target = Target.load(run.target, held_out.manifest.taps, launch.device, shared=run.target.shard)
    features = open_features(run, target)
    for side in (features, held_out):
        refuse_other_store(side, target)
    refuse_split(run, held_out)
    vocab = draft_vocab(run, features, target)
    tokens = torch.cat(list(held_out.response_tokens()))
    covered = coverage(vocab, count_tokens([tokens], target.spec.vocab_size))
    warnings = list(lint(run, vocab, held_out, target.tokenizer))
    head = make_head(run.head, target.spec, target.taps, vocab).to(launch.device)
    head.attach(target)
    if head.changes_target() and run.harvest.features != "stored":
        raise UserError(
            f"harvest.features {run.harvest.features}: this head changes its target, and what it is held to must come from the "
            "target as it was: harvest.features=stored"
        )
    head.initialise(target)
    warmed = warm_start(head, Path(run.train.warm_start)) if run.train.warm_start else None
    if run.adapt.head and not run.adapt.fresh:
        warmed = warm_start(head, Path(run.adapt.head), whole=True)
    base = fingerprint(head.state_dict()) if run.train.lora and run.adapt.vocab == "keep" else ""
    if run.train.lora:
        adapt(head, run.train.lora, new_tokens(run, head))
    head.engine = Engine(run.train.recompute, run.train.loss_mib)
    switch(run.train.compile, launch.device)
    by_chance = chance(tokens, vocab.ids_W)
    return Prepared(target, features, held_out, head, covered, by_chance, warmed, warnings, base)


def new_tokens(run: RunConfig, head: DraftHead) -> Tensor | None:
    """Draft tokens that the head which is adapted did not know; None where their rows are not trained apart."""
    if not (run.adapt.head and run.train.lora and run.train.lora.new_rows):
        return None
    start = vocab_of(Path(run.adapt.head), head.spec)
    new_N = torch.nonzero(~start.t2d_V[head.vocab.ids_W.cpu()])[:, 0]
    return new_N if len(new_N) else None


def draft_vocab(run: RunConfig, features: Documents, target: Target) -> DraftVocab:
    """What the head may guess: chosen of the training text, or made of that of the head which is adapted."""
    spec, tokenizer = asdict(target.spec), target.tokenizer
    if not run.adapt.head:
        return choose_vocab(run, features, spec, tokenizer)
    start = vocab_of(Path(run.adapt.head), target.spec)
    return adapted_vocab(run, features, spec, tokenizer, start)


def floor_of(run: RunConfig, lesson: Prepared, measure: Measure) -> float | None:
    """The τ on general text that a head must keep: of the accepted drafts of the head that is adapted, all but the budget."""
    if not run.adapt.head or run.adapt.fresh:
        return None
    general = measure.documents(general=True)
    if not general:
        return 0.0
    before = load_head(Path(run.adapt.head), lesson.target, torch.float32).eval()
    tau = measure.over(before, general)["tau"]
    return 1 + (1 - run.adapt.budget) * (tau - 1)


def take_up(head: DraftHead, run: RunConfig, launch: Launch, found: Checkpoint | None) -> Strategy:
    """The head as the launch spreads it, with what the checkpoint holds."""
    if found:
        head.load_state_dict(found.weights)
    strategy = spread(head, run.train, launch)
    if found:
        strategy.restore(found.moments)
    return strategy


def keeper(run: RunConfig, strategy: Strategy, base: str = "") -> Callable[[Progress], None]:
    """Saves the head as the best so far. All ranks call it."""

    def keep_best(state: Progress) -> None:
        weights = strategy.shown_weights()
        if strategy.launch.main:
            save_head(strategy.head, head_path(run), merged(strategy.head, weights))
            if base and run.train.lora:
                save_adapter(strategy.head, run.directory / ADAPTER, weights, run.train.lora, base)
            write_json(head_path(run) / "provenance.json", provenance_of_best(run, state))

    return keep_best


def provenance_of_best(run: RunConfig, state: Progress) -> dict[str, Any]:
    """That of the run, with the step."""

    facts: dict[str, Any] = json.loads((run.directory / "provenance.json").read_text(encoding="utf-8"))
    return facts | {"step": state.step, "tau": state.best_tau, "config": state.config}


def open_features(run: RunConfig, target: Target) -> Documents:
    """The training features: stored, or made by the target as they are asked for."""
    root = store_path(run, "train")
    if run.harvest.features == "stored":
        return open_store(run, "train")
    corpus = read_corpus(run.corpus, run.seed, run.directory)
    jobs = jobs_of(run, target.tokenizer, target.spec.max_positions, "train", corpus.train, corpus.skipped)
    manifest = make_manifest(run, target, jobs, 0)
    if run.harvest.features == "live":
        return LiveDocuments(root, manifest, jobs, target)
    manifest.identity["train.tokens_per_batch"] = run.train.tokens_per_batch  # it decides what a shard holds
    manifest.identity["packing"] = f"{packing.VERSION}, long documents {run.train.long_documents}"
    texts = Texts(jobs)
    batches = plan_epoch(texts.lengths(), texts.loss_rows(), run.train.tokens_per_batch, run.seed, 0, long_of(run))
    return HybridDocuments(root, manifest, jobs, target, [[piece.document for piece in batch] for batch in batches])


def long_of(run: RunConfig) -> Long:
    """How long documents are packed; where they are refused there are none."""
    return "whole" if run.train.long_documents == "refuse" else run.train.long_documents


def refuse_other_store(features: Documents, target: Target) -> None:
    """Features of another model teach nothing about this one."""
    if features.manifest.identity["target"] != target.spec.fingerprint:
        raise UserError(
            f"{features.root}: harvested from {features.manifest.target['name']}, not from {target.spec.name}"
        )
    if tuple(features.manifest.taps) != target.taps:
        raise UserError(
            f"{features.root}: its taps are {list(features.manifest.taps)}, those of the held-out side {list(target.taps)}: "
            "harvest both sides alike"
        )


def refuse_split(run: RunConfig, held_out: Documents) -> None:
    """An adaptation is judged by held-out text of its domain."""
    if run.adapt.head and set(held_out.sources()) <= general_sources(run.corpus):
        raise UserError(
            f"{held_out.root}: no held-out document is of the domain (a source without general: true): raise corpus.held_out, "
            "or give it more text, and harvest again"
        )


def make_stream(run: RunConfig, features: Documents, head: DraftHead, launch: Launch) -> FeatureStream:
    """This rank's share of the packed batches."""
    refuse_long(run, features)
    return FeatureStream(
        features,
        run.train.tokens_per_batch,
        run.train.accumulate,
        launch.rank,
        launch.world,
        run.seed,
        0 if run.target.shard else run.train.workers,  # a shared target runs in step on all ranks
        long_of(run),
        head.lookahead,
        make_vet(head.spec.vocab_size, len(head.taps), features.manifest.dtype),
        run.train.bad_documents == "skip",
        replay_of(run, features),
    )


def replay_of(run: RunConfig, features: Documents) -> Choice | None:
    """Which documents an epoch of an adaptation reads. Raises UserError where the domain or the general text is missing."""
    if not run.adapt.head:
        return None
    names = general_sources(run.corpus)
    general = [source in names for source in features.sources()]
    if all(general):
        raise UserError(f"{features.root}: no document of the domain: corpus.sources without general: true")
    if run.adapt.replay and not any(general):
        raise UserError(
            f"adapt.replay {run.adapt.replay}: {features.root} has no general text: mark a source of the corpus with "
            "general: true, or set adapt.replay to 0"
        )
    return replaying(general, features.loss_rows(), replay_share(run), run.seed, run.adapt.part)


def replay_share(run: RunConfig) -> float:
    """adapt.replay as a number. Raises UserError where it is still to be found."""
    if isinstance(run.adapt.replay, str):
        raise UserError("adapt.replay search: the trials are `headwright adapt`'s; give `headwright train` a number")
    return run.adapt.replay


def refuse_long(run: RunConfig, features: Documents) -> None:
    """Documents above the budget, where the config refuses them."""
    budget = run.train.tokens_per_batch
    long = [d for d, length in enumerate(features.lengths()) if length > budget]
    if long and run.train.long_documents == "refuse":
        raise UserError(
            f"{features.root}: {len(long)} documents are longer than train.tokens_per_batch ({budget}), first document "
            f"{long[0]} ({features.place(long[0])}): raise it, or set train.long_documents to split or whole"
        )


def run_identity(run: RunConfig, features: Documents, launch: Launch, total: int) -> dict[str, Any]:
    """What must be unchanged for a checkpoint to be continued."""
    loop = {key: value for key, value in asdict(run.train).items() if key not in UNBOUND}
    return {
        "features": features.manifest.identity,
        "vocab": asdict(run.vocab) | {"coverage": None},
        "adapt": {key: value for key, value in asdict(run.adapt).items() if key not in TRIALS},
        "general": sorted(general_sources(run.corpus)),
        "head": asdict(run.head),
        "train": loop | {"betas": list(loop["betas"])},
        "precision": launch.precision,
        "packing": packing.VERSION,
        "batches per step": run.train.accumulate * launch.world,
        "total steps": total,
        "seed": run.seed,
    }


def show_start(run: RunConfig, lesson: Prepared, stream: FeatureStream, state: Progress, strategy: Strategy) -> None:
    """What is about to be trained, and how."""
    features, head, launch = stream.reader, lesson.head, strategy.launch
    empty, trained = stream.rows.count(0), trained_parameters(head)
    say(
        f"{run.head.kind}: {trained / 1e6:.1f} M parameters, {len(features)} documents, "
        f"{features.manifest.response_tokens} response tokens, steps {state.step} to {state.total}"
    )
    precision = "fp32" if launch.precision == "no" else f"{launch.precision} over fp32 weights"
    say(
        f"{strategy.describe()}; {launch.device.type}, {precision}; a step is {stream.group} batches of at most "
        f"{stream.tokens_per_batch} tokens, {stream.accumulate} on each process"
    )
    if empty:
        say(f"{empty} documents have no two response tokens in a row: there is nothing to learn from them")
    say(f"draft vocabulary: {len(head.vocab)} tokens hold {lesson.covered:.1%} of the held-out response tokens")
    for words in lesson.lint:
        say(words)
    if lesson.warmed and state.step == 0:
        say(lesson.warmed)


def show_changes(changed: dict[str, tuple[Any, Any]]) -> None:
    """Keys that are not as they were when the checkpoint was written, and may be so."""
    if changed:
        say("changed since the checkpoint (the weights do not depend on it):\n" + "\n".join(show(changed)))


def finish(
    run: RunConfig, lesson: Prepared, stream: FeatureStream, state: Progress, ending: str, floor: float | None
) -> None:
    """What the run leaves, and what it says at its end."""
    if ending == "stopped":
        say(f"stopped after step {state.step} of {state.total}; a checkpoint is written. To continue:")
        show_command(command())
        return
    if isinstance(lesson.features, HybridDocuments):
        lesson.features.writer.finish()  # from now on an ordinary store
    if ending == "early":
        say(f"ended early: τ was not better in {state.since_best} measurements (train.patience)")
    show_end(run, lesson, stream, state)
    if floor is not None:
        show_kept(run, state, floor)
    write_end(run, lesson, stream, state, floor)


def show_end(run: RunConfig, lesson: Prepared, stream: FeatureStream, state: Progress) -> None:
    """The curve of the run."""
    features = lesson.features
    records = [record for record in read_metrics(run.directory / "metrics.jsonl") if "tau" in record]
    show_curve(records, measured_depth(run))
    for document, wrong in sorted(stream.skipped.items())[:SHOWN]:
        say(f"left out: document {document} ({features.place(document)}): {wrong}")
    if stream.skipped:
        say(f"{len(stream.skipped)} documents of {len(features)} were left out (train.bad_documents)")
    if state.left_out:
        say(f"{state.left_out} steps were left out: loss or gradient were not finite")
    say(
        f"trained {state.step} steps in {duration(state.seconds)} (measuring {duration(state.seconds_measuring)}, "
        f"waiting for checkpoints {duration(state.seconds_saving)}); "
        f"best τ {state.best_tau:.3f} at step {state.best_step}: {head_path(run)}"
    )


def show_kept(run: RunConfig, state: Progress, floor: float) -> None:
    """Where an adaptation kept no head that it trained: none was better for the domain and forgot no more than it may."""
    if state.best_step > 0:
        return
    records = [record for record in read_metrics(run.directory / "metrics.jsonl") if "tau_general" in record]
    kept = "the head that is kept is the one of before the first step" if state.best_step == 0 else "no head is kept"
    if any(record["tau_general"] >= floor for record in records if record["step"] > 0) or not records:
        say(f"warning: training made nothing better for the domain: {kept}. Try another train.lr, or more text")
        return
    say(
        f"warning: no trained head kept τ {floor:.3f} on general text (adapt.budget {run.adapt.budget:.0%}): {kept}. Raise "
        "adapt.replay or train.epochs, lower train.lr, train low-rank updates (train.lora), or raise the budget"
    )


def write_end(run: RunConfig, lesson: Prepared, stream: FeatureStream, state: Progress, floor: float | None) -> None:
    """training.json: what it took and what it gave."""
    kept = {key: value for key, value in vars(state).items() if key != "config"}
    found = {
        "coverage": lesson.covered,
        "skipped": len(stream.skipped),
        "response_tokens": lesson.features.manifest.response_tokens,
        "trained_parameters": trained_parameters(lesson.head),
        "peak_memory": peak_memory(),
        "general_floor": floor,
        "domain_rows": domain_rows(run, lesson.features, stream.rows) if run.adapt.head else None,
    }
    write_json(run.directory / "training.json", kept | found)


def domain_rows(run: RunConfig, features: Documents, rows: Sequence[int]) -> int:
    """Loss-bearing rows of the domain's text that is learned."""
    names = general_sources(run.corpus)
    domain = [document for document, source in enumerate(features.sources()) if source not in names]
    return sum(rows[document] for document in some_of(domain, run.adapt.part, run.seed))


def trained_parameters(head: DraftHead) -> int:
    """Numbers that training changes."""
    return sum(weight.numel() for weight in head.parameters() if weight.requires_grad)


def show_curve(records: list[dict[str, Any]], depth: int) -> None:
    """τ beside what others keep their heads by."""
    decoded = any("tau_decoded" in record for record in records)
    columns = [
        "step",
        "τ",
        *(["decoded"] if decoded else []),
        "proxy",
        *(f"≥{k} accepted" for k in range(1, depth + 1)),
    ]
    rows = []
    for record in records:
        real = [f"{record['tau_decoded']:.3f}" if "tau_decoded" in record else ""] if decoded else []
        shares = (f"{record.get(f'accepted_{k}', 0):.1%}" for k in range(1, depth + 1))
        rows.append([record["step"], f"{record['tau']:.3f}", *real, f"{record.get('tau_proxy', 0):.3f}", *shares])
    table(f"held-out text, greedy chain of {depth}", columns, rows)
    for name, label in (("tau_proxy", "the teacher-forced proxy"), ("tau_decoded", "τ of real decoding")):
        pairs = [(record["tau"], record[name]) for record in records if name in record]
        agreement = rank_correlation(*zip(*pairs)) if len(pairs) >= 3 else math.nan
        if not math.isnan(agreement):
            say(f"rank correlation of τ with {label}: {agreement:.2f} ({len(pairs)} measurements)")


def main(argv: list[str] | None = None, kind: str | None = None) -> None:
    """Command line. A thin `train/<kind>.py` names the kind, and the config must agree."""

    def stage(run: RunConfig, dry_run: bool) -> None:
        if kind is not None and run.head.kind != kind:
            raise UserError(
                f"train/{kind}.py trains {kind} heads, but head.kind is {run.head.kind}: use train/{run.head.kind}.py"
            )
        train(run, dry_run)

    run_stage(f"train/{kind}.py" if kind else "headwright train", ABOUT, SECTIONS, stage, argv)
    close_launch()


if __name__ == "__main__":
    main()
