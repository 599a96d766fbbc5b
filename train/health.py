"""Is the training well? Steps that are not finite, and runs that cannot learn. Nothing here waits for the device."""

import statistics
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from headwright.configs import UserError
from headwright.configs.console import say
from headwright.configs.schema import TrainConfig
from headwright.data.stream import FeatureStream
from headwright.train.launch import Launch

CHECKED_AT = 500  # steps, or half of a shorter run
EARLIEST = 50  # no word about shorter runs
HALVINGS = 16  # of a loss scale, from where it starts to 1
MARGIN = 1.1  # times chance
CAUSES = {
    "tap": "the layers that the features come from (harvest.taps, head.taps) are not those that the head reads",
    "norm": "a norm, or the scale of the target's states, is lost on the way",
    "mask": "the loss mask covers what cannot be foreseen: look at `headwright preview`",
    "vocab": "the draft vocabulary misses what the target says: look at `headwright vocab`",
    "rate": "the learning rate (train.lr) is far too high or too low, or the warm-up has not ended",
}


class Lagged:
    """Small tensors of each step, read on the host one step later where the device works ahead, at once on a CPU."""

    def __init__(self, device: torch.device):
        self.late = device.type == "cuda"
        self.waiting: tuple[int, Tensor, torch.cuda.Event] | None = None

    def read(self, step: int, values: Tensor) -> tuple[int, list[float]] | None:
        """Give those of `step`; get a step's number and its values."""
        if not self.late:
            return step, values.tolist()
        before, event = self.waiting, torch.cuda.Event()
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        event.record()
        self.waiting = (step, host, event)
        if before is None:
            return None
        before[2].synchronize()
        return before[0], before[1].tolist()


class Finite:
    """Counts steps that were left out because loss or gradient was not finite, and names their documents."""

    def __init__(self, config: TrainConfig, launch: Launch, stream: FeatureStream):
        self.launch, self.stream = launch, stream
        self.scaled = (
            launch.precision == "fp16"
        )  # whose scale has to be found first: it halves with each step that overflows
        self.limit = config.bad_steps + (HALVINGS if self.scaled else 0)
        self.total = self.in_a_row = 0

    def look(self, step: int, bad: bool, here: bool) -> None:
        """The step from `step` on: left out or not, and whether the loss on this rank was the reason.

        Raises UserError after too many in a row, on every rank alike.
        """
        if not bad:
            self.in_a_row = 0
            return
        self.total, self.in_a_row = self.total + 1, self.in_a_row + 1
        if here:
            print(f"step {step}: the loss is not finite, the step is left out; {self.documents(step)}", file=sys.stderr)
        elif self.launch.main and not self.scaled:
            print(f"step {step}: the gradient is not finite, the step is left out", file=sys.stderr)
        if self.in_a_row == self.limit:
            raise UserError(
                f"loss or gradient were not finite in {self.limit} steps in a row (train.bad_steps); the weights of before are "
                f"kept. Lower train.lr, or look at the documents: {self.documents(step)}"
            )

    def documents(self, step: int) -> str:
        """What this rank read in a step."""
        found = self.stream.documents(step)
        if not found:
            return f"rank {self.launch.rank} had no documents left"
        places = [f"{document} ({self.stream.reader.place(document)})" for document in found[:6]]
        return f"rank {self.launch.rank} read documents {', '.join(places)}{' …' if len(found) > 6 else ''}"


def chance(tokens: Tensor, ids_W: Tensor) -> float:
    """How often a guess is right that is always the draft vocabulary's most frequent token."""
    counts = torch.bincount(tokens, minlength=int(ids_W[-1]) + 1)
    return float(counts[ids_W].max() / max(len(tokens), 1))


class Learning:
    """Says once, early, that a run will not learn."""

    def __init__(self, total: int, by_chance: float, wrong: Sequence[str] = tuple(CAUSES)):
        self.at, self.by_chance, self.wrong = min(CHECKED_AT, max(total // 2, EARLIEST)), by_chance, wrong
        self.done = False
        self.seen: list[float] = []  # at the log lines of the second half of the way there: one alone is mostly noise

    def look(self, step: int, means: dict[str, float]) -> bool:
        """At a log line: whether the first guess is no better than chance. Warns."""
        if self.done or "agree_0" not in means:
            return False
        if step > self.at // 2:
            self.seen.append(means["agree_0"])
        if step < self.at:
            return False
        self.done, right = True, statistics.mean(self.seen)
        hopeless = right <= MARGIN * self.by_chance
        if hopeless:
            causes = "\n".join(f"  - {CAUSES[key]}" for key in self.wrong)
            say(
                f"warning: this run does not learn. After {step} steps the first guess is right in {right:.1%}, as "
                f"often as the most frequent token would be ({self.by_chance:.1%}). Usual causes:\n{causes}"
            )
        return hopeless
