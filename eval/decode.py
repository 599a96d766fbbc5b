"""The decoder: prefill → propose → extend → verify → keep. It knows no head's name.

Shapes: B rows (1 for now), M new rows, N tree nodes, V target vocabulary.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from headwright.configs import UserError
from headwright.data.cache import KVCache
from headwright.data.sampling import Policy
from headwright.data.target import Target
from headwright.eval.verify import Verdict, verify
from headwright.heads.base import Context
from headwright.heads.draft_tree import Tree, TreeShape

PHASES = ("prefill", "draft", "verify", "select", "commit", "other")


class Drafter(Protocol):
    """Anything that guesses: a head, or a training-free method."""

    def start(self, batch: int, slots: int) -> Any:
        """Fresh state."""
        ...

    def propose(self, state: Any, context: Context, shape: TreeShape) -> Tree:
        """A tree below the context's root."""
        ...


@dataclass
class Generation:
    """New tokens and how they came about. One entry of the lists per cycle (target pass after the prefill)."""

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)  # drafted tokens that were emitted
    emitted: list[int] = field(default_factory=list)  # with the bonus, cut at the end of the text
    drafted: list[int] = field(default_factory=list)
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @property
    def acceptance_length(self) -> float:
        """τ: tokens per target pass, the bonus token included."""
        return sum(self.emitted) / len(self.emitted) if self.emitted else float("nan")


class Clock:
    """Phase times that add up to the wall time: what no phase claims is `other`."""

    def __init__(self, phases: dict[str, float], device: torch.device):
        self.phases, self.cuda = phases, device.type == "cuda"
        self.started = self.now()

    def now(self) -> float:
        """Seconds; waits for the device, so that a phase pays for its own kernels."""
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the body to `name`."""
        begin = self.now()
        yield
        self.phases[name] += self.now() - begin

    def stop(self) -> float:
        """Total seconds; the rest goes to `other`."""
        total = self.now() - self.started
        self.phases["other"] = total - sum(seconds for name, seconds in self.phases.items() if name != "other")
        return total


@torch.inference_mode()
def speculate(
    target: Target,
    drafter: Drafter,
    prompt: list[int],
    shape: TreeShape,
    max_new_tokens: int,
    policy: Policy | None = None,
    seed: int = 0,
) -> Generation:
    """Continue `prompt` by speculative decoding; the text is the target's own.

    Ends at an end token, or after exactly `max_new_tokens`; both cut inside an accepted path, before anything is
    counted.
    """
    policy = policy or Policy()
    check_room(target, prompt, max_new_tokens)
    uniform = uniform_source(seed)
    out = Generation()
    clock = Clock(out.phases, target.device)
    slots = len(prompt) + max_new_tokens + max(shape.nodes, shape.depth * shape.top_k) + 2
    cache, state = target.new_cache(1, slots), drafter.start(1, slots + shape.depth * shape.top_k)
    with clock.phase("prefill"):
        ids = torch.tensor([prompt], device=target.device)
        features = target.extend(ids, cache)
        cache.advance(len(prompt))
        root = policy.choose(target.logits(features.last_BND[:, -1]), uniform().to(target.device))
        following = torch.cat([ids[:, 1:], root[:, None]], dim=1)
        context = Context(target, following, features.taps_BNKD, features.last_BND, policy, uniform)
        out.tokens.append(int(root))
    while not finished(target, out.tokens, max_new_tokens):
        with clock.phase("draft"):
            tree = drafter.propose(state, context, shape)
        with clock.phase("verify"):
            start = torch.tensor(cache.lengths, device=target.device)
            positions = start[:, None] + tree.depth_BN
            features = target.extend(tree.tokens_BN, cache, positions, tree.ancestors())
            logits_BNV = target.logits(features.last_BND)
        with clock.phase("select"):
            verdict = verify(tree, logits_BNV[0], policy, uniform)
            record(out, target, tree, verdict, max_new_tokens)
        with clock.phase("commit"):
            context = commit(cache, context, tree, features.taps_BNKD, features.last_BND, verdict)
    out.seconds = clock.stop()
    return out


def check_room(target: Target, prompt: list[int], max_new_tokens: int) -> None:
    """Prompt and answer must fit the target's context."""
    if not prompt:
        raise UserError("decoding needs a prompt of at least one token")
    if len(prompt) + max_new_tokens > target.spec.max_positions:
        raise UserError(
            f"a prompt of {len(prompt)} tokens and {max_new_tokens} new ones exceed the target's context of "
            f"{target.spec.max_positions}"
        )


def uniform_source(seed: int) -> Callable[[], Tensor]:
    """One seeded stream of numbers in [0, 1), as a tensor [1]."""
    generator = torch.Generator().manual_seed(seed)
    return lambda: torch.rand(1, generator=generator, dtype=torch.float64)


def finished(target: Target, tokens: list[int], max_new_tokens: int) -> bool:
    """Whether the text has ended."""
    return tokens[-1] in target.spec.eos_token_ids or len(tokens) >= max_new_tokens


def record(out: Generation, target: Target, tree: Tree, verdict: Verdict, max_new_tokens: int) -> None:
    """Append the cycle's tokens up to an end token or the limit, then count."""
    new = [*tree.tokens_BN[0, verdict.path[1:]].tolist(), verdict.bonus]
    ends = [place for place, token in enumerate(new) if token in target.spec.eos_token_ids]
    new = new[: min([max_new_tokens - len(out.tokens), *(end + 1 for end in ends[:1])])]
    out.tokens += new
    out.emitted.append(len(new))
    out.accepted.append(min(len(new), len(verdict.path) - 1))
    out.drafted.append(tree.tokens_BN.shape[1] - 1)


def commit(cache: KVCache, context: Context, tree: Tree, taps: Tensor, last: Tensor, verdict: Verdict) -> Context:
    """Keep the accepted path in the target's cache; the next context holds its rows and the bonus as new root."""
    cache.keep(0, verdict.path)
    path = torch.tensor(verdict.path, device=taps.device)
    bonus = torch.tensor([verdict.bonus], device=taps.device)
    following = torch.cat([tree.tokens_BN[0, path[1:]], bonus])[None]
    return Context(context.target, following, taps[:, path], last[:, path], context.policy, context.uniform)


@torch.inference_mode()
def decode_plain(
    target: Target, prompt: list[int], max_new_tokens: int, policy: Policy | None = None, seed: int = 0
) -> Generation:
    """One token per target pass: the baseline, by the same target code without any of the drafting."""
    policy = policy or Policy()
    check_room(target, prompt, max_new_tokens)
    uniform = uniform_source(seed)
    out = Generation()
    clock = Clock(out.phases, target.device)
    cache = target.new_cache(1, len(prompt) + max_new_tokens + 1)
    with clock.phase("prefill"):
        features = target.extend(torch.tensor([prompt], device=target.device), cache)
        cache.advance(len(prompt))
        token = policy.choose(target.logits(features.last_BND[:, -1]), uniform().to(target.device))
        out.tokens.append(int(token))
    with clock.phase("verify"):
        while not finished(target, out.tokens, max_new_tokens):
            features = target.extend(token[:, None], cache)
            cache.advance(1)
            token = policy.choose(target.logits(features.last_BND[:, -1]), uniform().to(target.device))
            out.tokens.append(int(token))
            out.emitted.append(1)
            out.accepted.append(0)
            out.drafted.append(0)
    out.seconds = clock.stop()
    return out
