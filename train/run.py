"""One training run, any kind of head: `accelerate launch train/<kind>.py --config …` or `headwright train`."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from headwright.configs import RunConfig, UserError
from headwright.configs.command import run_stage
from headwright.configs.console import duration, say, table
from headwright.data.harvest import check_offline, save_config, store_path
from headwright.data.store import FeatureReader, write_json
from headwright.data.stream import FeatureStream
from headwright.data.target import Target
from headwright.data.vocab import DraftVocab, build_vocab, count_tokens, coverage
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
    if dry_run:
        check_offline(run)
        return
    if not torch.cuda.is_available():  # accelerate imports deepspeed, which otherwise warns of a missing GPU
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    accelerator = Accelerator(mixed_precision=run.train.mixed_precision)
    torch.manual_seed(run.seed)
    features, held_out = FeatureReader(store_path(run, "train")), FeatureReader(store_path(run, "held-out"))
    target = Target.load(run.target, features.manifest.taps, accelerator.device)
    refuse_other_store(features, target)
    vocab, covered = choose_vocab(run, features, held_out, target)
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
        show_end(run, state, covered)


def refuse_other_store(features: FeatureReader, target: Target) -> None:
    """Features of another model teach nothing about this one."""
    if features.manifest.identity["target"] != target.spec.fingerprint:
        raise UserError(
            f"{features.root}: harvested from {features.manifest.target['name']}, not from {target.spec.name}"
        )


def choose_vocab(
    run: RunConfig, features: FeatureReader, held_out: FeatureReader, target: Target
) -> tuple[DraftVocab, float]:
    """The draft vocabulary of the training text, and its share of the held-out response tokens."""
    size = target.spec.vocab_size
    pinned = sorted({*target.spec.eos_token_ids, *(i for i in target.tokenizer.all_special_ids if i < size)})
    vocab = build_vocab(count_tokens(features.response_tokens(), size), run.vocab.size, pinned)
    return vocab, coverage(vocab, count_tokens(held_out.response_tokens(), size))


def make_stream(run: RunConfig, features: FeatureReader, accelerator: Accelerator) -> FeatureStream:
    """This rank's share of the packed batches."""
    return FeatureStream(
        features,
        run.train.tokens_per_batch,
        run.train.accumulate,
        accelerator.process_index,
        accelerator.num_processes,
        run.seed,
    )


def run_identity(run: RunConfig, features: FeatureReader, accelerator: Accelerator, total: int) -> dict[str, Any]:
    """What must be unchanged for a checkpoint to be continued."""
    loop = {
        key: value
        for key, value in asdict(run.train).items()
        if key not in ("track", "log_every", "saves", "evals", "accumulate")
    }
    return {
        "features": features.manifest.identity,
        "vocab.size": run.vocab.size,
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


def show_start(run: RunConfig, head: DraftHead, features: FeatureReader, state: Progress, covered: float) -> None:
    """What is about to be trained."""
    trained = sum(weight.numel() for weight in head.parameters() if weight.requires_grad)
    say(
        f"{run.head.kind}: {trained / 1e6:.1f} M parameters, {len(features)} documents, "
        f"{features.manifest.response_tokens} response tokens, steps {state.step} to {state.total}"
    )
    say(f"draft vocabulary: {len(head.vocab)} tokens hold {covered:.1%} of the held-out response tokens")
    if covered < run.vocab.coverage:
        say(f"warning: under {run.vocab.coverage:.0%}; what lies outside can never be accepted: raise vocab.size")


def show_end(run: RunConfig, state: Progress, covered: float) -> None:
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
    write_json(run.directory / "training.json", vars(state) | {"coverage": covered})


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
