"""What decoding is asked for, and what comes of it: settings, texts, counts."""

from dataclasses import dataclass, field

import torch

from headwright.configs import UserError
from headwright.data.sampling import Policy
from headwright.eval.clock import PHASES
from headwright.eval.fallback import Fallback, Pace
from headwright.eval.verify import LOSSLESS, Typical
from headwright.heads.draft_tree import TreeShape

PLAIN = TreeShape("plain", 0)
SAMPLED_FROM = 0.5  # temperature from which sampled trees are accepted longer than deterministic ones


@dataclass
class Generation:
    """New tokens and how they came about. One entry of the lists per cycle (target pass after the prefill)."""

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)  # drafted tokens that were emitted
    emitted: list[int] = field(default_factory=list)  # with the bonus, cut at the end of the text
    drafted: list[int] = field(default_factory=list)
    seconds: float = 0.0  # from the prompt's turn to the end of the text
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))  # of a batch of one
    warmup: float = 0.0  # seconds of capturing passes, likewise
    finish: str = ""  # eos, stop, length (max_new_tokens) or context (the target's)
    stood: list[int] = field(
        default_factory=list
    )  # drafted tokens that were right, those beyond the end of the text too
    moments: list[float] = field(
        default_factory=list
    )  # seconds after which the first token and each cycle's were there

    @property
    def acceptance_length(self) -> float:
        """τ: tokens per target pass, the bonus token included."""
        return sum(self.emitted) / len(self.emitted) if self.emitted else float("nan")

    def then(self, more: "Generation") -> "Generation":
        """This turn of a conversation and the next one, counted together. Moments stay those of each turn."""
        return Generation(
            self.tokens + more.tokens,
            self.accepted + more.accepted,
            self.emitted + more.emitted,
            self.drafted + more.drafted,
            self.seconds + more.seconds,
            {name: self.phases[name] + more.phases[name] for name in PHASES},
            self.warmup + more.warmup,
            more.finish,
            self.stood + more.stood,
            self.moments + more.moments,
        )


@dataclass(frozen=True)
class Settings:
    """How to decode.

    verification: auto draws children from the head for chains at any temperature above 0 and for trees from 0.5, where that is
    accepted longest, and takes the most likely ones otherwise; walk, sampled: always so (both lossless); typical:
    Medusa's rule, which is not. fallback: rest from drafting where it does not pay. graphs:
    captured target passes; by default on GPUs.
    """

    shape: TreeShape
    max_new_tokens: int = 128
    policy: Policy = field(default_factory=Policy)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    verification: str = "auto"
    typical: Typical = field(default_factory=Typical)
    fallback: Fallback | None = None
    batch: int = 1
    graphs: bool | None = None

    def __post_init__(self) -> None:
        if self.verification not in ("auto", "walk", "sampled", "typical"):
            raise UserError(f"verification {self.verification!r}: give auto, walk, sampled or typical")
        if self.max_new_tokens < 1 or self.batch < 1:
            raise UserError(f"max_new_tokens {self.max_new_tokens} and batch {self.batch} must be 1 or more")
        if "" in self.stop:
            raise UserError("a stop string must not be empty")

    @property
    def sampled(self) -> bool:
        """Whether children are drawn from the head's distribution."""
        if self.policy.greedy or self.verification in ("walk", "typical"):
            return False
        return self.verification == "sampled" or self.shape.kind == "chain" or self.policy.temperature >= SAMPLED_FROM

    @property
    def rule(self) -> str:
        """The verification rule in use: walk, sampled or typical."""
        return self.verification if self.verification == "typical" else "sampled" if self.sampled else "walk"

    @property
    def lossless(self) -> bool:
        """Whether the text has the target's own distribution."""
        return self.rule in LOSSLESS


@dataclass
class Outcome:
    """Finished texts in the order of their prompts, and what the batch spent: seconds of each phase and of all, target
    passes.
    """

    generations: list[Generation]
    phases: dict[str, float]
    seconds: float
    passes: int
    warmup: float = 0.0


@dataclass
class Row:
    """A text in the making."""

    number: int
    prompt: list[int]
    limit: int
    generator: torch.Generator
    pace: Pace
    begun: float
    out: Generation


@dataclass
class News:
    """What one cycle added to one text: tokens, the first `accepted` of which had been drafted."""

    number: int
    tokens: list[int]
    accepted: int
