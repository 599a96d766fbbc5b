"""When drafting rests: a text whose guesses do not pay is decoded plainly for a while, then tried again."""

from dataclasses import dataclass, field

from headwright.configs import UserError


@dataclass(frozen=True)
class Fallback:
    """break_even: the τ at which a drafting cycle costs as much per token as plain decoding (`headwright tune` measures it).

    window: cycles over which τ is estimated. rest: plain passes after a window below break-even; doubled after each further
    failure, up to `longest_rest`.
    """

    break_even: float
    window: int = 8
    rest: int = 32
    longest_rest: int = 256

    def __post_init__(self) -> None:
        if not 0 < self.break_even < float("inf") or self.window < 1 or not 1 <= self.rest <= self.longest_rest:
            raise UserError(f"fallback out of range: {self}")


@dataclass
class Pace:
    """One text's running estimate."""

    rule: Fallback | None
    recent: list[int] = field(default_factory=list)
    resting: int = 0  # plain passes that are left
    next_rest: int = 0

    @property
    def drafts(self) -> bool:
        """Whether the next cycle should draft for this text."""
        return self.rule is None or self.resting == 0

    def update(self, emitted: int) -> None:
        """A cycle has emitted so many tokens."""
        if self.rule is None:
            return
        if self.resting:
            self.resting -= 1
            return
        self.recent.append(emitted)
        if len(self.recent) == self.rule.window:
            self.judge(self.rule, sum(self.recent) / len(self.recent))
            self.recent.clear()

    def judge(self, rule: Fallback, tau: float) -> None:
        """A whole window has been seen."""
        if tau >= rule.break_even:
            self.next_rest = 0
            return
        self.resting = self.next_rest or rule.rest
        self.next_rest = min(2 * self.resting, rule.longest_rest)
