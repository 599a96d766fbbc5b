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
from headwright.data.corpus import read_corpus
from headwright.data.harvest import check_features, check_offline, jobs_of, make_manifest, save_config, store_path
from headwright.data.live import HybridDocuments, LiveDocuments, Texts
from headwright.data.store import FeatureReader, write_json
from headwright.data.stream import Documents, FeatureStream, pack_in_order
from headwright.data.target import Target
from headwright.data.vocab import choose_vocab, count_tokens, coverage
from headwright.eval.metrics import read_metrics
from headwright.eval.rollout_tau import rollout_tau
from headwright.heads.base import DraftHead, make_head, save_head
from headwright.train.checkpoint import Progress, load_checkpoint, save_checkpoint
from headwright.train.loop import Callbacks, fit, unwrapped
from headwright.train.optim import make_optimizer
from headwright.train.track import Tracker

SECTIONS = ("vocab", "head", "train")
ABOUT = "Train a draft head on harvested features; keep the one with the best τ on held-out text."


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
    held_out = FeatureReader(store_path(run, "held-out"))
    target = Target.load(run.target, held_out.manifest.taps, accelerator.device)
    features = open_features(run, target)
    for side in (features, held_out):
        refuse_other_store(side, target)
    vocab = choose_vocab(run, features, held_out.manifest.target, target.tokenizer)
    covered = coverage(vocab, count_tokens(held_out.response_tokens(), target.spec.vocab_size))
    head = make_head(run.head, target.spec, target.taps, vocab).to(accelerator.device)
    head.initialise(target)
    optimizer = make_optimizer(head, run.train)

    stream = make_stream(run, features, accelerator)
    total = max(1, round(run.train.epochs * stream.steps_per_epoch()))
    folder, identity = run.directory / "checkpoints", run_identity(run, features, accelerator, total)
    state = load_checkpoint(folder, head, optimizer, identity) or Progress(total=total, identity=identity)
    model, optimizer = accelerator.prepare(head, optimizer)
    check_parallel(accelerator, model)
    if accelerator.is_main_process:
        save_config(run)  # only now: a run that the checkpoint refuses must not change what lies beside it
        show_start(run, head, features, state, covered)

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
        show_end(run, features, state, covered)


def open_features(run: RunConfig, target: Target) -> Documents:
    """The training features: stored, or made by the target as they are asked for."""
    root = store_path(run, "train")
    if run.harvest.features == "stored":
        return FeatureReader(root)
    corpus = read_corpus(run.corpus, run.seed, run.directory)
    jobs = jobs_of(run, target.tokenizer, target.spec.max_positions, "train", corpus.train, corpus.skipped)
    manifest = make_manifest(run, target, jobs, 0)
    if run.harvest.features == "live":
        return LiveDocuments(root, manifest, jobs, target)
    manifest.identity["train.tokens_per_batch"] = run.train.tokens_per_batch  # it decides what a shard holds
    batches = pack_in_order(Texts(jobs).lengths(), run.train.tokens_per_batch, run.seed, epoch=0)
    return HybridDocuments(root, manifest, jobs, target, batches)


def refuse_other_store(features: Documents, target: Target) -> None:
    """Features of another model teach nothing about this one."""
    if features.manifest.identity["target"] != target.spec.fingerprint:
        raise UserError(
            f"{features.root}: harvested from {features.manifest.target['name']}, not from {target.spec.name}"
        )


def make_stream(run: RunConfig, features: Documents, accelerator: Accelerator) -> FeatureStream:
    """This rank's share of the packed batches."""
    return FeatureStream(
        features,
        run.train.tokens_per_batch,
        run.train.accumulate,
        accelerator.process_index,
        accelerator.num_processes,
        run.seed,
        run.train.workers,
    )


def run_identity(run: RunConfig, features: Documents, accelerator: Accelerator, total: int) -> dict[str, Any]:
    """What must be unchanged for a checkpoint to be continued."""
    loop = {
        key: value
        for key, value in asdict(run.train).items()
        if key not in ("track", "log_every", "saves", "evals", "accumulate", "workers")
    }
    return {
        "features": features.manifest.identity,
        "vocab": asdict(run.vocab) | {"coverage": None},
        "head": asdict(run.head),
        "train": loop | {"betas": list(loop["betas"])},
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


def show_start(run: RunConfig, head: DraftHead, features: Documents, state: Progress, covered: float) -> None:
    """What is about to be trained."""
    trained = sum(weight.numel() for weight in head.parameters() if weight.requires_grad)
    say(
        f"{run.head.kind}: {trained / 1e6:.1f} M parameters, {len(features)} documents, "
        f"{features.manifest.response_tokens} response tokens, steps {state.step} to {state.total}"
    )
    say(f"draft vocabulary: {len(head.vocab)} tokens hold {covered:.1%} of the held-out response tokens")
    if covered < run.vocab.coverage:
        say(f"warning: under {run.vocab.coverage:.0%}; what lies outside can never be accepted: raise vocab.size")


def show_end(run: RunConfig, features: Documents, state: Progress, covered: float) -> None:
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
    say(
        f"trained {state.step} steps in {duration(state.seconds)}; "
        f"best τ {state.best_tau:.3f} at step {state.best_step}: {head_path(run)}"
    )
    write_json(
        run.directory / "training.json",
        vars(state)
        | {"coverage": covered, "response_tokens": features.manifest.response_tokens, "peak_memory": peak_memory()},
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
