"""The training loop, from top to bottom."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headwright.configs.console import cpu_seconds, peak_memory, say
from headwright.configs.console import progress as progress_bar
from headwright.configs.schema import TrainConfig
from headwright.data.batch import FeatureBatch, to_device
from headwright.data.stream import FeatureStream
from headwright.data.target import Target
from headwright.train.checkpoint import Progress
from headwright.train.health import Finite, Lagged, Learning
from headwright.train.optim import learning_rate, set_learning_rate
from headwright.train.stop import Stop
from headwright.train.strategy import Strategy
from headwright.train.track import Meter, Tracker
from headwright.train.watch import Watch


@dataclass
class Callbacks:
    """What the loop asks of the run around it. `measure` returns τ and further metrics of the head as it is; with True, also
    those of real decoding.
    """

    measure: Callable[[bool], dict[str, float]]
    keep_best: Callable[[Progress], None]
    save: Callable[[Progress], None]


@dataclass
class Parts:
    """What a training is made of."""

    strategy: Strategy
    stream: FeatureStream
    target: Target
    config: TrainConfig
    state: Progress
    tracker: Tracker
    callbacks: Callbacks
    by_chance: float = 0.0  # how often a first guess is right that needs no training
    floor: float | None = None  # of an adaptation: the τ on general text under which no head is kept


@dataclass
class Window:
    """Tokens and seconds since the last log line. Pauses (measurements, checkpoints) are no part of it."""

    tokens: int = 0
    waited: float = 0.0
    begun: float = field(default_factory=time.perf_counter)

    def speed(self) -> dict[str, float]:
        """Tokens per second of this rank, and the share of the time in which it waited for data."""
        seconds = time.perf_counter() - self.begun
        return {"tokens_per_second": self.tokens / seconds, "data_wait": self.waited / seconds}

    def timed(self, steps: Iterator[list[FeatureBatch]]) -> Iterator[list[FeatureBatch]]:
        """The steps, the waiting for each counted."""
        while True:
            started = time.perf_counter()
            batches = next(steps, None)
            self.waited += time.perf_counter() - started
            if batches is None:
                return
            yield batches

    def renew(self) -> None:
        """From here."""
        self.tokens, self.waited, self.begun = 0, 0.0, time.perf_counter()


def fit(parts: Parts) -> str:
    """Train from `state.step` to `state.total`. Returns how it ended: done, stopped (a signal came) or early (no better τ).

    The loss of a step is the sum over all loss-bearing rows of all ranks and micro-batches, divided by their number:
    the same gradient however the rows are spread.
    """
    strategy, config, state, launch = parts.strategy, parts.config, parts.state, parts.strategy.launch
    if patience_ending(config, state):  # it had ended already
        return "early"
    meter, window, lagged = Meter(), Window(), Lagged(launch.device)
    finite, learning = Finite(config, launch, parts.stream), Learning(state.total, parts.by_chance)
    before, started, ending = state.seconds, time.perf_counter(), ""
    spent = state.cpu_seconds - cpu_seconds()
    watch, bar = Watch(launch, config.hang_minutes), progress_bar(quiet=not launch.main)
    with Stop() as stop, bar, watch:
        if parts.floor is not None and state.step == 0:
            measure(parts)  # the head that is adapted may be the best
        task = bar.add_task("train", total=state.total, completed=state.step, note="")
        steps = parts.stream.steps(state.step, state.total)
        watch.at("reading features")
        for batches in window.timed(steps):
            watch.at(f"in step {state.step}")
            rate = learning_rate(config, state.step, state.total)
            set_learning_rate(strategy.groups(), rate)
            strategy.head.engine.progress = state.step / state.total
            torch.manual_seed(seed_of(parts.stream, state.step))  # dropout is the same after a resumption
            norm, flags = one_step(strategy, batches, parts.target, meter, stop.wanted)
            known = lagged.read(state.step, flags)
            state.step += 1
            if known is not None:
                number, (asked, bad, here) = known
                finite.look(number, bool(bad), bool(here))
                state.left_out += int(bad)
                ending = "stopped" if asked or (launch.world == 1 and stop.wanted) else ""
            window.tokens += sum(len(batch.ids_T) for batch in batches)
            if state.step % config.log_every == 0:
                means = meter.read(launch.sum)
                parts.tracker.log(
                    {"step": state.step, "lr": rate, "grad_norm": float(norm)} | speed(parts, window) | means
                )
                learning.look(state.step, means)
                bar.update(task, completed=state.step, note=f"loss {means.get('loss_0', 0):.3f}")
                window.renew()
            paused = time.perf_counter()
            if measures_due(config, state):
                watch.at(f"measuring after step {state.step}")
                measure(parts)
                ending = ending or patience_ending(config, state)
            measured = time.perf_counter()
            state.seconds_measuring += measured - paused
            state.seconds, state.cpu_seconds = before + measured - started, spent + cpu_seconds()
            if saves_due(config, state) or ending:
                watch.at(f"saving after step {state.step}")
                parts.callbacks.save(state)
                state.seconds_saving += time.perf_counter() - measured
            window.begun += time.perf_counter() - paused  # tokens/s is the speed of training alone
            if ending:
                break
            watch.at("reading features")
    return ending or "done"


def one_step(
    strategy: Strategy, batches: list[FeatureBatch], target: Target, meter: Meter, wanted: bool = False
) -> tuple[Tensor, Tensor]:
    """Forward and backward of all micro-batches, then one optimizer step.

    Returns the gradient norm and three flags, on the device: whether any rank was asked to stop, whether the step was left
    out as not finite, and whether this rank's loss was the reason.
    """
    launch = strategy.launch
    counted = torch.tensor([float(sum(batch.loss_rows() for batch in batches)), float(wanted)])
    shared = launch.sum(
        to_device(counted, launch.device)
    )  # one message: all leave at the same step, or would wait for ever
    rows, finite = shared[0].clamp_min(1.0), torch.ones((), dtype=torch.bool, device=launch.device)
    for place, batch in enumerate(batches):
        with strategy.micro(last=place == len(batches) - 1):
            total, metrics = strategy.loss(batch.to(launch.device), target)
            strategy.backward(total / rows)
        meter.add(metrics)
        finite = finite & torch.isfinite(total.detach())
    norm, bad = strategy.advance()
    return norm, torch.stack([shared[1] > 0, bad.to(launch.device), ~finite]).float()


def seed_of(stream: FeatureStream, step: int) -> int:
    """Of the random numbers of a step, on this rank."""
    return (stream.seed * 1_000_003 + step) * stream.world + stream.rank


def speed(parts: Parts, window: Window) -> dict[str, float]:
    """Of all ranks together, and memory of this one."""
    launch, device = parts.strategy.launch, parts.strategy.launch.device
    here = window.speed()
    sums = launch.sum(torch.tensor(list(here.values()))).tolist()
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_memory()
    return {"tokens_per_second": sums[0], "data_wait": sums[1] / launch.world, "memory_gib": memory / 2**30}


def due(state: Progress, every: int) -> bool:
    """Every so many steps and at the end; not shortly before the end."""
    left = state.total - state.step
    return left == 0 or (state.step % every == 0 and left > every // 2)


def interval(config: TrainConfig, state: Progress) -> int:
    """Steps between measurements."""
    return config.eval_every or max(1, state.total // config.evals)


def measures_due(config: TrainConfig, state: Progress) -> bool:
    """Whether τ is measured now."""
    return due(state, interval(config, state))


def saves_due(config: TrainConfig, state: Progress) -> bool:
    """Whether a checkpoint is written now."""
    return due(state, config.save_every or max(1, state.total // config.saves))


def decodes_due(config: TrainConfig, state: Progress) -> bool:
    """Whether a measurement decodes for real: `decode.evals` of them, evenly, the last at the end."""
    every, wanted = interval(config, state), config.decode.evals
    count = max(0, state.total - every // 2 - 1) // every + 1  # of all measurements: see `due`
    place = count if state.step == state.total else state.step // every
    return state.step > 0 and wanted > 0 and place * wanted // count > (place - 1) * wanted // count


def measure(parts: Parts) -> None:
    """τ on held-out text; keep the head when it is the best so far."""
    state, started = parts.state, time.perf_counter()
    measured = parts.callbacks.measure(decodes_due(parts.config, state))
    parts.tracker.log({"step": state.step, "measure_seconds": time.perf_counter() - started} | measured)
    state.since_best += 1
    kept = measured.get("tau_general", math.inf) >= (parts.floor or 0.0)
    if kept and measured["tau"] > state.best_tau:
        state.best_tau, state.best_step, state.since_best = measured["tau"], state.step, 0
        parts.callbacks.keep_best(state)
    if "tau_general" in measured:
        beside = f", {measured['tau_general']:.3f} on general text" + ("" if kept else f" (under {parts.floor:.3f})")
    else:
        beside = ""
    decoded = f", {measured['tau_decoded']:.3f} decoded" if "tau_decoded" in measured else ""
    if parts.strategy.launch.main:
        best = f"best {state.best_tau:.3f}"
        say(f"step {state.step} of {state.total}: τ {measured['tau']:.3f} on held-out text{beside}{decoded} ({best})")


def patience_ending(config: TrainConfig, state: Progress) -> str:
    """Whether the training has not become better for too long."""
    out = config.patience is not None and state.since_best >= config.patience and state.step < state.total
    return "early" if out else ""
