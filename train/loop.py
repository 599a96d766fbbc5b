"""The training loop, from top to bottom."""

import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator

from headwright.configs.console import progress as progress_bar
from headwright.configs.console import say
from headwright.configs.schema import TrainConfig
from headwright.data.batch import FeatureBatch, to_device
from headwright.data.stream import FeatureStream
from headwright.data.target import Target
from headwright.heads.base import DraftHead
from headwright.train.checkpoint import Progress
from headwright.train.optim import learning_rate, set_learning_rate
from headwright.train.track import Meter, Tracker


@dataclass
class Callbacks:
    """What the loop asks of the run around it. `measure` returns τ and further metrics of the head as it is."""

    measure: Callable[[], dict[str, float]]
    keep_best: Callable[[Progress], None]
    save: Callable[[Progress], None]


class Stop:
    """Ctrl-C and SIGTERM end the loop after the step at hand; a second signal ends the process at once."""

    def __init__(self) -> None:
        self.wanted = False
        self.before = {sig: signal.getsignal(sig) for sig in (signal.SIGINT, signal.SIGTERM)}

    def __enter__(self) -> "Stop":
        for sig in self.before:
            signal.signal(sig, self.ask)
        return self

    def __exit__(self, *_: object) -> None:
        """Give back the handlers that were there before, however the loop ends."""
        for sig, handler in self.before.items():
            signal.signal(sig, handler)

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Signal handler."""
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True


def fit(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    stream: FeatureStream,
    target: Target,
    config: TrainConfig,
    state: Progress,
    tracker: Tracker,
    callbacks: Callbacks,
) -> None:
    """Train from `state.step` to `state.total`.

    The loss of a step is the sum over all loss-bearing rows of all ranks and micro-batches, divided by their number:
    the same gradient however the rows are spread.
    """
    eval_every = max(1, state.total // config.evals)
    save_every = max(1, state.total // config.saves)
    meter, started = Meter(), time.perf_counter() - state.seconds
    tokens, window = 0, time.perf_counter()
    with Stop() as stop, progress_bar(quiet=not accelerator.is_main_process) as bar:
        task = bar.add_task("train", total=state.total, completed=state.step, note="")
        for batches in stream.steps(state.step, state.total):
            rate = learning_rate(config, state.step, state.total)
            set_learning_rate(optimizer, rate)
            unwrapped(accelerator, model).engine.progress = state.step / state.total
            torch.manual_seed(seed_of(stream, state.step))  # dropout is the same after a resumption
            norm = one_step(accelerator, model, optimizer, batches, target, config, meter)
            stopping = agreed(accelerator, stop.wanted)
            state.step += 1
            state.seconds = time.perf_counter() - started
            tokens += sum(len(batch.ids_T) for batch in batches)
            if state.step % config.log_every == 0:
                speed = tokens * accelerator.num_processes / (time.perf_counter() - window)
                means = meter.read(lambda x: accelerator.reduce(x, "sum"))
                record = {
                    "step": state.step,
                    "lr": rate,
                    "grad_norm": float(norm),
                    "tokens_per_second": speed,
                } | means
                tracker.log(record)
                bar.update(task, completed=state.step, note=f"loss {means.get('loss_0', 0):.3f}")
                tokens, window = 0, time.perf_counter()
            paused = time.perf_counter()
            if due(state, eval_every):
                evaluate(accelerator, state, tracker, callbacks)
            if due(state, save_every) or stopping:
                callbacks.save(state)
            window += time.perf_counter() - paused  # tokens/s is the speed of training alone
            if stopping:
                break
    if stop.wanted:
        say(f"stopped after step {state.step} of {state.total}; a checkpoint is written")
        raise KeyboardInterrupt


def seed_of(stream: FeatureStream, step: int) -> int:
    """Of the random numbers of a step, on this rank."""
    return (stream.seed * 1_000_003 + step) * stream.world + stream.rank


def due(state: Progress, every: int) -> bool:
    """Every so many steps and at the end; not shortly before the end."""
    left = state.total - state.step
    return left == 0 or (state.step % every == 0 and left > every // 2)


def agreed(accelerator: Accelerator, wanted: bool) -> bool:
    """Whether any rank was asked to stop. All must leave at the same step, or they would wait for each other for ever."""
    if accelerator.num_processes == 1:
        return wanted
    flag = torch.tensor(float(wanted), device=accelerator.device)
    return bool(accelerator.reduce(flag, "sum") > 0)


def one_step(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[FeatureBatch],
    target: Target,
    config: TrainConfig,
    meter: Meter,
) -> Any:
    """Forward and backward of all micro-batches, then one optimizer step. Returns the gradient norm."""
    counted = to_device(torch.tensor(float(sum(batch.loss_rows() for batch in batches))), accelerator.device)
    rows = accelerator.reduce(counted, "sum").clamp_min(1.0)
    for place, batch in enumerate(batches):
        last = place == len(batches) - 1
        with nullcontext() if last else accelerator.no_sync(model):
            with accelerator.autocast():
                out = model(batch.to(accelerator.device), target)
            # DDP averages gradients over ranks; the normaliser already spans them
            accelerator.backward(out.total * accelerator.num_processes / rows)
        meter.add(out.metrics)
    norm = accelerator.clip_grad_norm_(model.parameters(), config.clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def evaluate(accelerator: Accelerator, state: Progress, tracker: Tracker, callbacks: Callbacks) -> None:
    """Measure τ on held-out text; keep the head when it is the best so far."""
    measured = callbacks.measure()
    tracker.log({"step": state.step} | measured)
    if measured["tau"] > state.best_tau:
        state.best_tau, state.best_step = measured["tau"], state.step
        callbacks.keep_best(state)
    if accelerator.is_main_process:
        say(f"step {state.step} of {state.total}: τ {measured['tau']:.3f} on held-out text (best {state.best_tau:.3f})")


def unwrapped(accelerator: Accelerator, model: torch.nn.Module) -> DraftHead:
    """The head inside what Accelerate made of it."""
    head: DraftHead = accelerator.unwrap_model(model, keep_torch_compile=False)
    return head
