"""One training run, any kind of head: `accelerate launch train/<kind>.py --config …` or `headwright train`."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from headwright.configs import RunConfig, UserError
from headwright.configs.command import run_stage
from headwright.configs.console import duration, peak_memory, say, table
from headwright.data import packing
from headwright.data.corpus import read_corpus
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
from headwright.data.store import write_json
from headwright.data.stream import Documents, FeatureStream
from headwright.data.target import Target
from headwright.data.vet import make_vet
from headwright.data.vocab import choose_vocab, count_tokens, coverage
from headwright.eval.metrics import read_metrics
from headwright.eval.rollout_tau import rollout_tau
from headwright.heads.base import DraftHead, Engine, make_head
from headwright.heads.fused import switch
from headwright.heads.saved import save_head, warm_start
from headwright.train.checkpoint import Progress, load_checkpoint, save_checkpoint
from headwright.train.loop import Callbacks, fit, unwrapped
from headwright.train.optim import make_optimizer
from headwright.train.track import Tracker

SHOWN = 5  # documents that were left out
SECTIONS = ("vocab", "head", "train")
ABOUT = "Train a draft head on harvested features; keep the one with the best τ on held-out text."


# of the loop's keys: what may change while a run is interrupted, since no value depends on it
UNBOUND = ("track", "log_every", "saves", "evals", "accumulate", "workers", "recompute", "loss_mib", "compile")


def head_path(run: RunConfig) -> Path:
    """Where the best head lies."""
    return run.directory / "head"


def train(run: RunConfig, dry_run: bool = False) -> None:
    """Harvested features → the best head, with checkpoints to continue from."""
    check_features(run)
    if dry_run:
        check_offline(run)
        return
    if not torch.cuda.is_available():  # accelerate imports deepspeed, which otherwise warns of a missing GPU
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    accelerator = Accelerator(mixed_precision=run.train.mixed_precision)
    torch.manual_seed(run.seed)
    held_out = open_store(run, "held-out")
    target = Target.load(run.target, held_out.manifest.taps, accelerator.device)
    features = open_features(run, target)
    for side in (features, held_out):
        refuse_other_store(side, target)
    vocab = choose_vocab(run, features, held_out.manifest.target, target.tokenizer)
    covered = coverage(vocab, count_tokens(held_out.response_tokens(), target.spec.vocab_size))
    head = make_head(run.head, target.spec, target.taps, vocab).to(accelerator.device)
    head.attach(target)
    if head.changes_target() and run.harvest.features != "stored":
        raise UserError(
            f"harvest.features {run.harvest.features}: this head changes its target, and what it is held to must come from the "
            "target as it was: harvest.features=stored"
        )
    head.initialise(target)
    warmed = warm_start(head, Path(run.train.warm_start)) if run.train.warm_start else None
    head.engine = Engine(run.train.recompute, run.train.loss_mib)
    switch(run.train.compile, accelerator.device)
    optimizer = make_optimizer(head, run.train, head.rate_of)

    stream = make_stream(run, features, head, accelerator)
    total = max(1, round(run.train.epochs * stream.steps_per_epoch()))
    folder, identity = run.directory / "checkpoints", run_identity(run, features, accelerator, total)
    state = load_checkpoint(folder, head, optimizer, identity) or Progress(total=total, identity=identity)
    model, optimizer = accelerator.prepare(head, optimizer)
    check_parallel(accelerator, model)
    if accelerator.is_main_process:
        save_config(run)  # only now: a run that the checkpoint refuses must not change what lies beside it
        show_start(run, head, stream, state, covered)
        if warmed and state.step == 0:
            say(warmed)

    def measure() -> dict[str, float]:
        head.eval()
        cycles = rollout_tau(head, target, held_out, measured_depth(run), run.train.tokens_per_batch)
        head.train()
        joint = cycles.joint(measured_depth(run))
        return {"tau": cycles.acceptance_length} | {f"accepted_{k + 1}": share for k, share in enumerate(joint)}

    def keep_best(state: Progress) -> None:
        if accelerator.is_main_process:
            save_head(unwrapped(accelerator, model), head_path(run))

    def save(state: Progress) -> None:
        if accelerator.is_main_process:
            save_checkpoint(folder, unwrapped(accelerator, model), optimizer, state)
        accelerator.wait_for_everyone()

    head.train()
    tracker = Tracker(run, accelerator.is_main_process, since=state.step)
    try:
        fit(
            accelerator,
            model,
            optimizer,
            stream,
            target,
            run.train,
            state,
            tracker,
            Callbacks(measure, keep_best, save),
        )
    finally:
        tracker.close()
    if accelerator.is_main_process:
        if isinstance(features, HybridDocuments):
            features.writer.finish()  # from now on an ordinary store
        show_end(run, features, stream, state, covered)


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


def make_stream(run: RunConfig, features: Documents, head: DraftHead, accelerator: Accelerator) -> FeatureStream:
    """This rank's share of the packed batches."""
    refuse_long(run, features)
    return FeatureStream(
        features,
        run.train.tokens_per_batch,
        run.train.accumulate,
        accelerator.process_index,
        accelerator.num_processes,
        run.seed,
        run.train.workers,
        long_of(run),
        head.lookahead,
        make_vet(head.spec.vocab_size, len(head.taps), features.manifest.dtype),
        run.train.bad_documents == "skip",
    )


def refuse_long(run: RunConfig, features: Documents) -> None:
    """Documents above the budget, where the config refuses them."""
    budget = run.train.tokens_per_batch
    long = [d for d, length in enumerate(features.lengths()) if length > budget]
    if long and run.train.long_documents == "refuse":
        raise UserError(
            f"{features.root}: {len(long)} documents are longer than train.tokens_per_batch ({budget}), first document "
            f"{long[0]} ({features.place(long[0])}): raise it, or set train.long_documents to split or whole"
        )


def run_identity(run: RunConfig, features: Documents, accelerator: Accelerator, total: int) -> dict[str, Any]:
    """What must be unchanged for a checkpoint to be continued."""
    loop = {key: value for key, value in asdict(run.train).items() if key not in UNBOUND}
    return {
        "features": features.manifest.identity,
        "vocab": asdict(run.vocab) | {"coverage": None},
        "head": asdict(run.head),
        "train": loop | {"betas": list(loop["betas"])},
        "packing": packing.VERSION,
        "batches per step": run.train.accumulate * accelerator.num_processes,
        "total steps": total,
        "seed": run.seed,
    }


def check_parallel(accelerator: Accelerator, model: torch.nn.Module) -> None:
    """Several processes that do not share gradients would train several heads and keep one."""
    launched = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    wrapped = isinstance(model, DraftHead) is False
    if launched > 1 and (accelerator.num_processes != launched or not wrapped):
        raise UserError(
            f"{launched} processes were launched, but Accelerate runs {accelerator.num_processes} with "
            f"{type(model).__name__}: no gradients would be shared. On CPUs launch with\n"
            f"  ACCELERATE_USE_CPU=true torchrun --nproc_per_node {launched} train/<kind>.py --config …"
        )


def measured_depth(run: RunConfig) -> int:
    """The chain whose τ decides which head is kept: the first chain that will be evaluated."""
    return next((shape.depth for shape in run.eval.shapes if shape.kind == "chain"), 5)


def show_start(run: RunConfig, head: DraftHead, stream: FeatureStream, state: Progress, covered: float) -> None:
    """What is about to be trained."""
    features, empty = stream.reader, stream.rows.count(0)
    trained = sum(weight.numel() for weight in head.parameters() if weight.requires_grad)
    say(
        f"{run.head.kind}: {trained / 1e6:.1f} M parameters, {len(features)} documents, "
        f"{features.manifest.response_tokens} response tokens, steps {state.step} to {state.total}"
    )
    if empty:
        say(f"{empty} documents have no two response tokens in a row: there is nothing to learn from them")
    say(f"draft vocabulary: {len(head.vocab)} tokens hold {covered:.1%} of the held-out response tokens")
    if covered < run.vocab.coverage:
        say(f"warning: under {run.vocab.coverage:.0%}; what lies outside can never be accepted: raise vocab.size")


def show_end(run: RunConfig, features: Documents, stream: FeatureStream, state: Progress, covered: float) -> None:
    """The curve of the run."""
    records = read_metrics(run.directory / "metrics.jsonl")
    depth = measured_depth(run)
    columns = ["step", "τ", *(f"≥{k} accepted" for k in range(1, depth + 1))]
    rows = [
        [r["step"], f"{r['tau']:.3f}", *(f"{r.get(f'accepted_{k}', 0):.1%}" for k in range(1, depth + 1))]
        for r in records
        if "tau" in r
    ]
    table(f"held-out text, greedy chain of {depth}", columns, rows)
    for document, wrong in sorted(stream.skipped.items())[:SHOWN]:
        say(f"left out: document {document} ({features.place(document)}): {wrong}")
    if stream.skipped:
        say(f"{len(stream.skipped)} documents of {len(features)} were left out (train.bad_documents)")
    say(
        f"trained {state.step} steps in {duration(state.seconds)}; "
        f"best τ {state.best_tau:.3f} at step {state.best_step}: {head_path(run)}"
    )
    write_json(
        run.directory / "training.json",
        vars(state)
        | {
            "coverage": covered,
            "skipped": len(stream.skipped),
            "response_tokens": features.manifest.response_tokens,
            "peak_memory": peak_memory(),
        },
    )


def main(argv: list[str] | None = None, kind: str | None = None) -> None:
    """Command line. A thin `train/<kind>.py` names the kind, and the config must agree."""

    def stage(run: RunConfig, dry_run: bool) -> None:
        if kind is not None and run.head.kind != kind:
            raise UserError(
                f"train/{kind}.py trains {kind} heads, but head.kind is {run.head.kind}: use train/{run.head.kind}.py"
            )
        train(run, dry_run)

    run_stage(f"train/{kind}.py" if kind else "headwright train", ABOUT, SECTIONS, stage, argv)


if __name__ == "__main__":
    main()
