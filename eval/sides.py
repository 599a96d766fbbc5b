"""Ways of decoding that are compared: every side decodes a prompt before the next prompt comes, in an order that turns, so that
a slow moment of the machine meets all. Plain decoding, by our loop and by transformers' generate, are sides like any other.
"""

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial, reduce
from typing import Any

import psutil
import torch
import xxhash

from headwright.configs.console import progress
from headwright.data.target import Target
from headwright.eval.decode import generate_one
from headwright.eval.kept import Kept
from headwright.eval.prompts import Prompt, Room
from headwright.eval.settings import PLAIN, Generation, Settings
from headwright.heads.base import Drafter

DISTURBED = 0.25  # processors that others keep busy, from which a measurement is doubtful
LOOK = 0.5  # seconds over which others' work is looked at
TURN = 1_000_003  # between the seeds of a conversation's turns
WARM = 4  # tokens that each side decodes before anything counts
OURS, TRANSFORMERS = "plain", "transformers"


@dataclass
class Side:
    """A drafter with its settings. Without a drafter: plain decoding by our loop."""

    name: str
    drafter: Drafter | None
    settings: Settings
    mark: str = ""  # of a further head's weights

    @property
    def key(self) -> str:
        """Its name in one run."""
        return f"{self.name} {self.settings.shape.name} T={self.settings.policy.temperature:g}"

    def decode(self, target: Target, ids: list[int], limit: int, seed: int) -> Generation:
        """Continue `ids` by at most `limit` tokens."""
        settings = replace(self.settings, max_new_tokens=limit)
        return generate_one(target, self.drafter, ids, settings, seed)


class TransformersSide(Side):
    """transformers' own greedy generate: an outside baseline. Of its time only the whole is known."""

    def decode(self, target: Target, ids: list[int], limit: int, seed: int) -> Generation:
        """Continue `ids`."""
        begun = time.perf_counter()
        ids_1T = torch.tensor([ids], device=target.device)
        room = min(limit, target.spec.max_positions - len(ids))
        tokens = target.generate_hf(ids_1T, room, self.settings.ignore_eos)
        return Generation(tokens, seconds=time.perf_counter() - begun)


def baselines(settings: Settings) -> list[Side]:
    """Greedy plain decoding, twice."""
    plain = Settings(PLAIN, settings.max_new_tokens, ignore_eos=settings.ignore_eos)
    return [Side(OURS, None, plain), TransformersSide(TRANSFORMERS, None, plain)]


@dataclass
class Spoken:
    """What one side said to one prompt, turn by turn. `load`: what others did on the machine meanwhile, in processors."""

    turns: list[Generation] = field(default_factory=list)
    load: float = 0.0

    @classmethod
    def read(cls, raw: dict[str, Any]) -> "Spoken":
        """From its JSON form."""
        return cls([Generation(**turn) for turn in raw["turns"]], raw["load"])

    @cached_property
    def whole(self) -> Generation:
        """All turns counted together."""
        return reduce(Generation.then, self.turns)


def converse(target: Target, side: Side, prompt: Prompt, room: Room, seed: int) -> Spoken:
    """All turns of a prompt: each is asked with the side's own answers before it."""
    turns: list[Generation] = []
    limit, before = prompt.limit or side.settings.max_new_tokens, Usage.now()
    while (ids := room.conversation(prompt, [turn.tokens for turn in turns])) is not None:
        turns.append(side.decode(target, ids, limit, seed + TURN * len(turns)))
    return Spoken(turns, before.load())


@dataclass
class Usage:
    """Processor seconds of the whole machine and of this process, and the wall clock."""

    all: float
    mine: float
    clock: float

    @classmethod
    def now(cls) -> "Usage":
        """At this moment."""
        times = psutil.cpu_times()
        busy = sum(
            value for name, value in times._asdict().items() if name in ("user", "system", "nice", "irq", "softirq")
        )
        return cls(busy, time.process_time(), time.perf_counter())

    def load(self) -> float:
        """Processors that others have kept busy since."""
        now = Usage.now()
        return max(0.0, (now.all - self.all - (now.mine - self.mine)) / (now.clock - self.clock))


def median_of(runs: Sequence[Spoken]) -> Spoken:
    """The run of median time."""
    middle = statistics.median_low([run.whole.seconds for run in runs])
    return next(run for run in runs if run.whole.seconds == middle)


@dataclass
class Contest:
    """A target, prompts, and what all sides have said, kept as it comes."""

    target: Target
    room: Room
    kept: Kept
    seed: int = 0
    rounds: int = 1
    first: int = 0  # number of the first prompt, which its random numbers follow
    patience: float = 0.0  # seconds that may still be spent on others' work: waiting for its end, and measuring again

    def run(self, sides: Sequence[Side], prompts: Sequence[Prompt], what: str) -> dict[str, list[Spoken]]:
        """Every side's answers, by its key."""
        self.warm(sides, prompts)
        said: dict[str, list[Spoken]] = {side.key: [] for side in sides}
        for number, prompt in enumerate(watched(what, prompts), self.first):
            found = self.turn(sides, prompt, number)
            for key, spoken in found.items():
                said[key].append(spoken)
        return said

    def warm(self, sides: Sequence[Side], prompts: Sequence[Prompt]) -> None:
        """The first passes of a process are slower, and some capture graphs; where all is kept there is none to warm."""
        for side in sides:
            last = self.rounds - 1
            missing = [p for p in prompts if self.name(side, p, last) not in self.kept.parts]
            if missing:
                side.decode(self.target, missing[0].ids, WARM, self.seed)

    def turn(self, sides: Sequence[Side], prompt: Prompt, number: int) -> dict[str, Spoken]:
        """One prompt, by every side; the median of the rounds."""
        runs: dict[str, list[Spoken]] = {side.key: [] for side in sides}
        for again in range(self.rounds):
            start = (number + again) % len(sides)
            for side in [*sides[start:], *sides[:start]]:
                work = partial(self.say, side, prompt, self.seed + number)
                runs[side.key].append(Spoken.read(self.kept.recall(self.name(side, prompt, again), work)))
        return {key: median_of(found) for key, found in runs.items()}

    def say(self, side: Side, prompt: Prompt, seed: int) -> dict[str, Any]:
        """One side's answers, as JSON. Where others worked on the machine meanwhile they are given again once these have
        finished, for which there is a limited time in all: threads that wait for each other may take ten times as long.
        """
        spoken = converse(self.target, side, prompt, self.room, seed)
        while spoken.load > DISTURBED and self.calm():
            begun = time.perf_counter()
            again = converse(self.target, side, prompt, self.room, seed)
            spoken = min(spoken, again, key=lambda said: said.load)
            self.patience -= time.perf_counter() - begun
        return asdict(spoken)

    def calm(self) -> bool:
        """Wait until others leave the machine alone; False when there is no more time for that."""
        while self.patience > 0:
            before = Usage.now()
            time.sleep(LOOK)
            self.patience -= LOOK
            if before.load() <= DISTURBED:
                return True
        return False

    def name(self, side: Side, prompt: Prompt, again: int) -> str:
        """Under which an answer is kept."""
        asked = xxhash.xxh32_hexdigest(f"{prompt.ids} {prompt.rounds} {prompt.limit}".encode("utf-8", "replace"))
        return f"{side.key}{side.mark} | {prompt.set} {prompt.place} {asked}" + (
            f" | round {again + 1}" if again else ""
        )


def watched(what: str, items: Sequence[Any]) -> Iterable[Any]:
    """Iterate with a progress bar."""
    with progress() as bar:
        task = bar.add_task(what, total=len(items), note="")
        for item in items:
            yield item
            bar.advance(task)
