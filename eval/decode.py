"""The decoder: prefill → propose → extend → verify → keep. It knows no head's name.

Shapes: B texts of a batch, M new rows, N tree nodes, P places of a path, V target vocabulary.

A batch holds texts of any lengths. One that ends makes room for the next prompt; every text has its own stream of
random numbers, so what it says does not depend on its company, up to rounding. Ends of texts (end tokens, stop
strings, limits) cut inside an accepted path, before anything is counted.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwright.configs import UserError
from headwright.data.batch import to_device
from headwright.data.cache import KVCache
from headwright.data.graphs import Passes, StaticPass, give_back, take
from headwright.data.sampling import Policy, Said
from headwright.data.target import Features, Target
from headwright.eval.clock import Clock
from headwright.eval.dice import Dice
from headwright.eval.fallback import Pace
from headwright.eval.history import History
from headwright.eval.settings import PLAIN, Generation, News, Outcome, Row, Settings
from headwright.eval.text import Stops
from headwright.eval.verify import Verdict, chosen, verify
from headwright.heads.base import Context, Drafter, together
from headwright.heads.draft_tree import Tree, TreeShape, root_only


@dataclass
class Seat:
    """All that belongs to one text and is not yet in the batch."""

    row: Row
    cache: KVCache
    state: Any
    context: Context
    history: History | None


class Decoder:
    """A batch of texts being decoded. Without a drafter this is plain decoding: one token per pass."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        prompts: Sequence[list[int]],
        settings: Settings,
        seeds: Sequence[int] | None = None,
    ):
        self.target, self.drafter, self.settings, self.prompts = target, drafter, settings, prompts
        self.seeds = range(len(prompts)) if seeds is None else seeds
        if len(self.seeds) != len(prompts):
            raise ValueError(f"{len(self.seeds)} seeds for {len(prompts)} prompts")
        if drafter is not None and drafter.deepest is not None and settings.shape.depth > drafter.deepest:
            raise UserError(
                f"shape {settings.shape.name} is {settings.shape.depth} deep, this drafter guesses {drafter.deepest} ahead"
            )
        self.limits = [room_for(target, prompt, settings.max_new_tokens) for prompt in prompts]
        self.size = min(settings.batch, len(prompts))
        self.ends = frozenset(() if settings.ignore_eos else target.spec.eos_token_ids)
        self.stops = Stops(target.tokenizer, settings.stop) if settings.stop else None
        self.dice = Dice(target.device)
        self.rows: list[Row] = []
        self.pending: Context | None = None  # rows that the drafter has not taken in yet
        self.cache: KVCache
        self.state: Any
        self.history: History | None = None
        self.texts = [Generation() for _ in prompts]
        self.waiting = 0  # the next prompt
        self.passes = 0
        self.static: Passes | None = None
        self.warmup = 0.0
        self.clock = Clock(target.device)

    @torch.inference_mode()
    def cycles(self) -> Iterator[list[News]]:
        """Decode, one target pass at a time. The first news of a text is the token that its prefill gives."""
        try:
            yield from self.until_done()
        finally:  # also where nobody reads on
            self.close()

    def until_done(self) -> Iterator[list[News]]:
        """Fill the places, read, and again."""
        while True:
            places = [place for place, row in enumerate(self.rows) if row.out.finish]
            seats: list[Seat] = []
            while self.waiting < len(self.prompts) and len(self.rows) - len(places) + len(seats) < self.size:
                seat = self.admit()
                yield [News(seat.row.number, seat.row.out.tokens[:], 0)]
                if not seat.row.out.finish:
                    seats.append(seat)
            self.reseat(places, seats)
            if not self.rows:
                return
            yield self.cycle()

    def outcome(self) -> Outcome:
        """All texts, once `cycles` has ended."""
        phases, seconds = self.clock.stop()
        return Outcome(self.texts, phases, seconds, self.passes, self.warmup)

    def admit(self) -> Seat:
        """Prefill the next prompt."""
        number, target, settings = self.waiting, self.target, self.settings
        self.waiting += 1
        prompt = self.prompts[number]
        generator = torch.Generator().manual_seed(self.seeds[number])
        pace, begun = Pace(settings.fallback), time.perf_counter()
        row = Row(number, prompt, self.limits[number], generator, pace, begun, self.texts[number])
        cache = target.new_cache(1, len(prompt))
        ids_1T = to_device(torch.tensor([prompt]), target.device)
        features = target.extend(ids_1T, cache)
        cache.advance(len(prompt))
        history = History.of(ids_1T, target.spec.vocab_size) if settings.policy.penalises else None
        logits_BV = target.logits(features.last_BND[:, -1])
        if history is not None:
            logits_BV = settings.policy.penalise(logits_BV, Said(history.anywhere_BV, history.answer_BV))
        self.roll([row], 0)
        root_B = chosen(logits_BV, settings.policy, self.dice.plain)
        self.record(row, [int(root_B)])
        following = torch.cat([ids_1T[:, 1:], root_B[:, None]], 1)
        context = self.context(following, features, [len(prompt)], [[*prompt, int(root_B)]])
        state, context = self.prime(context)
        self.clock.lap("prefill")
        return Seat(row, cache, state, context, history)

    def prime(self, context: Context) -> tuple[Any, Context]:
        """A state that has taken in all of a prompt's rows but the last, and that one."""
        if self.drafter is None:
            return None, context
        count = context.counts[0]
        state = self.drafter.start(1, count)
        if count > 1:
            self.drafter.absorb(state, context.part(0, count - 1))
        return state, context.part(count - 1, count)

    def context(
        self,
        tokens_BM: Tensor,
        features: Features,
        counts: list[int],
        texts: list[list[int]],
        choices: list[list[int]] | None = None,
    ) -> Context:
        """A context of this run."""
        settings = self.settings
        return Context(
            self.target,
            tokens_BM,
            features.taps_BNKD,
            features.last_BND,
            settings.policy,
            self.dice,
            counts,
            settings.sampled,
            texts,
            choices,
        )

    def reseat(self, places: list[int], seats: list[Seat]) -> None:
        """New texts take the places of those that have ended; places that nobody takes are removed."""
        if not places and not seats:
            return
        if not self.rows:
            self.open(len(seats))
            self.rows, places = [seat.row for seat in seats], list(range(len(seats)))
        pending = [seats[0].context] * len(self.rows) if self.pending is None else split(self.pending)
        for place, seat in zip(places, seats):
            self.rows[place], pending[place] = seat.row, seat.context
            self.cache.put(place, seat.cache)
            if self.drafter is not None:
                self.state.put(place, seat.state)
            if self.history is not None and seat.history is not None:
                self.history.put(place, seat.history)
        stay = [place for place in range(len(self.rows)) if place not in places[len(seats) :]]
        self.pending = together([pending[place] for place in stay]) if stay else None
        if len(stay) < len(self.rows):
            self.keep(stay)
        self.clock.lap("other")

    def open(self, batch: int) -> None:
        """Storage for `batch` texts, large enough for every prompt that is to come."""
        target, shape = self.target, self.settings.shape
        longest = max(len(prompt) + limit for prompt, limit in zip(self.prompts, self.limits))
        slots = longest + pass_nodes(shape.nodes + 1, batch, target.device) + PADDING
        if self.settings.graphs or (self.settings.graphs is None and target.device.type == "cuda"):
            self.static = take(target, batch, slots)
            self.cache = self.static.cache
        else:
            self.cache = target.new_cache(batch, slots)
        if self.drafter is not None:
            self.state = self.drafter.start(batch, longest + shape.rows + shape.depth + 2)
        if self.settings.policy.penalises:
            empty = torch.zeros(batch, target.spec.vocab_size, dtype=torch.bool, device=target.device)
            self.history = History(empty, empty.clone())

    def close(self) -> None:
        """Others may use the storage."""
        if self.static is not None:
            give_back(self.static)
            self.static = None

    def keep(self, rows: list[int]) -> None:
        """Go on with some of the texts. What is captured is of the whole batch, so a shrinking one goes on without."""
        self.rows = [self.rows[row] for row in rows]
        if not rows:
            return
        if self.static is not None:
            self.cache = self.static.cache.copy()
            self.close()
        self.cache.select(rows)
        if self.drafter is not None:
            self.state.select(rows)
        if self.history is not None:
            self.history.select(rows)

    def cycle(self) -> list[News]:
        """Draft, one target pass, verify, keep."""
        tree = self.draft()
        tree = tree.padded(pass_nodes(tree.tokens_BN.shape[1], len(self.rows), self.target.device))
        self.clock.lap("draft")
        features, logits_BNV = self.read(tree)
        self.passes += 1
        self.clock.lap("verify")
        if self.history is not None:
            logits_BNV = self.settings.policy.penalise(logits_BNV, self.history.before(tree))
        verdict = self.judge(tree, logits_BNV)
        told = Told.of(tree, verdict, logits_BNV if self.drafter is not None and self.drafter.wants_choices else None)
        news = [self.record(row, *told.news(place)) for place, row in enumerate(self.rows)]
        self.clock.lap("select")
        self.commit(tree, features, verdict, told)
        self.clock.lap("commit")
        return news

    def judge(self, tree: Tree, logits_BNV: Tensor) -> Verdict:
        """What stands. A text without guesses is decoded plainly, by the same number whether its neighbours have some or not;
        one that rests from drafting has none.
        """
        policy = self.settings.policy
        if tree.tokens_BN.shape[1] == 1:
            return verify(tree, logits_BNV, policy, self.dice.plain)
        resting = [not row.pace.drafts for row in self.rows]
        if any(resting):
            resting_B1 = to_device(torch.tensor(resting)[:, None], self.target.device)
            tree.parents_BN = tree.parents_BN.masked_fill(resting_B1, -1)
        typically = self.settings.typical if self.settings.verification == "typical" else None
        verdict = verify(tree, logits_BNV, policy, self.dice, typically)
        if policy.greedy or (tree.proposal is not None and not any(resting)):
            return verdict
        idle_B = (tree.parents_BN < 0).all(1)
        return Verdict(
            verdict.nodes_BP.masked_fill(idle_B[:, None], 0),
            verdict.counts_B.masked_fill(idle_B, 0),
            torch.where(idle_B, chosen(logits_BNV[:, 0], policy, self.dice.plain), verdict.bonus_B),
        )

    def draft(self) -> Tree:
        """A tree for each text, or the roots alone where drafting rests."""
        shape = self.settings.shape
        if not self.settings.policy.greedy:
            self.roll(self.rows, 2 * shape.nodes + shape.depth + 2)
        context = self.pending
        assert context is not None, "every cycle leaves new rows"
        if self.drafter is not None and any(row.pace.drafts for row in self.rows):
            self.pending = None
            return self.drafter.propose(self.state, context, shape)
        if self.drafter is None:
            self.pending = None
        return root_only(context.root_B)

    def roll(self, rows: Sequence[Row], count: int) -> None:
        """Fresh random numbers for some texts."""
        if not self.settings.policy.greedy:
            self.dice.roll([row.generator for row in rows], count)

    def read(self, tree: Tree) -> tuple[Features, Tensor]:
        """The target's pass over all nodes, and their logits. Beyond its context nothing is ever emitted, but positions must
        exist.
        """
        target, nodes = self.target, tree.tokens_BN.shape[1]
        start_B = to_device(torch.tensor(self.cache.lengths), target.device)
        positions_BN = (start_B[:, None] + tree.depth_BN).clamp_max(target.spec.max_positions - 1)
        among_BNN = tree.ancestors() if nodes > 1 else None
        if self.static is not None:
            return self.captured(self.static, nodes)(tree.tokens_BN, positions_BN, among_BNN)
        features = target.extend(tree.tokens_BN, self.cache, positions_BN, among_BNN)
        return features, target.logits(features.last_BND)

    def captured(self, static: Passes, nodes: int) -> StaticPass:
        """The captured pass; the time of capturing is no verification."""
        before = static.seconds
        found = static.ready(nodes)
        if static.seconds > before:
            self.warmup += static.seconds - before
            self.clock.lap("other")
        return found

    def record(self, row: Row, new: list[int], accepted: int = 0, drafted: int | None = None) -> News:
        """Append new tokens up to the text's end, then count. Without `drafted` they are the prefill's, which is no cycle."""
        kept, finish = self.cut(row, new)
        row.out.tokens += kept
        row.out.moments.append(time.perf_counter() - row.begun)
        if drafted is not None:
            row.out.emitted.append(len(kept))
            row.out.accepted.append(min(len(kept), accepted))
            row.out.drafted.append(drafted)
            row.out.stood.append(accepted)
            row.pace.update(len(kept))
        if finish:
            row.out.finish, row.out.seconds = finish, time.perf_counter() - row.begun
        return News(row.number, kept, min(len(kept), accepted))

    def cut(self, row: Row, new: list[int]) -> tuple[list[int], str]:
        """The tokens up to the end of the text, and what ended it."""
        room = row.limit - len(row.out.tokens)
        for count, token in enumerate(new[:room], 1):
            if token in self.ends:
                return new[:count], "eos"
            if self.stops is not None and self.stops.completed(row.out.tokens + new[:count]):
                return new[:count], "stop"
        if len(new) < room:
            return new, ""
        return new[:room], "length" if row.limit == self.settings.max_new_tokens else "context"

    def commit(self, tree: Tree, features: Features, verdict: Verdict, told: "Told") -> None:
        """Keep the accepted paths; the next contexts hold their rows, and the bonus tokens as new roots."""
        self.cache.keep_paths(told.paths)
        if self.history is not None:
            self.history.add(tree, verdict.nodes_BP)
        nodes_BP = verdict.nodes_BP[:, : max(told.counts)]
        tokens_BP = torch.cat([tree.tokens_BN.gather(1, nodes_BP)[:, 1:], verdict.bonus_B[:, None]], 1)
        tokens_BP = tokens_BP.scatter(1, verdict.counts_B[:, None], verdict.bonus_B[:, None])
        rows_B1 = torch.arange(len(nodes_BP), device=nodes_BP.device)[:, None]
        kept = Features(features.taps_BNKD[rows_B1, nodes_BP], features.last_BND[rows_B1, nodes_BP])
        context = self.context(tokens_BP, kept, told.counts, told.texts, told.choices)
        if self.pending is not None:  # nobody has drafted since
            context = together([a.then(b) for a, b in zip(split(self.pending), split(context))])
        self.pending = context


def split(context: Context) -> list[Context]:
    """The texts of a batch, one by one."""
    return [context.rows_of(row) for row in range(len(context.counts))]


@dataclass
class Told:
    """A verdict on the host: the accepted nodes of each text, its new tokens with the bonus, how many guesses there
    were, and the target's choices at all nodes for a drafter that wants them.
    """

    paths: list[list[int]]
    texts: list[list[int]]
    drafted: list[int]
    choices: list[list[int]] | None

    @classmethod
    def of(cls, tree: Tree, verdict: Verdict, wanted_BNV: Tensor | None) -> "Told":
        """In one transfer: the only moment of a cycle at which the host waits for the device."""
        drafted_B = (tree.parents_BN >= 0).sum(1)
        tokens_BP = tree.tokens_BN.gather(1, verdict.nodes_BP)
        columns = [verdict.counts_B[:, None], verdict.bonus_B[:, None], drafted_B[:, None], verdict.nodes_BP, tokens_BP]
        if wanted_BNV is not None:
            columns.append(wanted_BNV.argmax(-1))
        width, paths, texts, drafted, choices = verdict.nodes_BP.shape[1], [], [], [], []
        for count, bonus, guesses, *rest in torch.cat(columns, 1).tolist():
            paths.append(rest[: count + 1])
            texts.append([*rest[width + 1 : width + 1 + count], bonus])
            drafted.append(guesses)
            choices.append(rest[2 * width :])
        return cls(paths, texts, drafted, None if wanted_BNV is None else choices)

    @property
    def counts(self) -> list[int]:
        """Rows that each text has gained."""
        return [len(path) for path in self.paths]

    def news(self, place: int) -> tuple[list[int], int, int]:
        """New tokens, accepted drafts and guesses of one text."""
        return self.texts[place], len(self.paths[place]) - 1, self.drafted[place]


PADDING = 4  # slots that padded nodes may take


def pass_nodes(nodes: int, batch: int, device: torch.device) -> int:
    """How many nodes a pass should have. Matrix products of 2, 3, 6, 7 … rows are slower on CPUs than those of the
    next multiple of four (docs/performance.md).
    """
    if device.type != "cpu" or batch > 1 or nodes % 4 not in (2, 3):
        return nodes
    return nodes + -nodes % 4


def room_for(target: Target, prompt: Sequence[int], max_new_tokens: int) -> int:
    """How many tokens may follow: no more than the target's context allows. Raises UserError where there is no room."""
    if not prompt:
        raise UserError("decoding needs a prompt of at least one token")
    most = target.spec.max_positions
    if len(prompt) >= most:
        raise UserError(
            f"a prompt of {len(prompt)} tokens leaves no room in the target's context of {most}: shorten it"
        )
    wrong = [token for token in prompt if not 0 <= token < target.spec.vocab_size]
    if wrong:
        raise UserError(f"the prompt holds token {wrong[0]}, the target's vocabulary ends at {target.spec.vocab_size}")
    return min(max_new_tokens, most - len(prompt))


def generate(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[list[int]],
    settings: Settings,
    seeds: Sequence[int] | None = None,
) -> Outcome:
    """Continue every prompt, `settings.batch` at a time; a text that ends makes room for the next. The texts are the
    target's own.

    Args:
        drafter: a head or another drafter; None decodes plainly.
        seeds: of each prompt's random numbers; default: its place.
    """
    decoder = Decoder(target, drafter, prompts, settings, seeds)
    for _ in decoder.cycles():
        pass
    return decoder.outcome()


def generate_one(
    target: Target, drafter: Drafter | None, prompt: list[int], settings: Settings, seed: int = 0
) -> Generation:
    """A single text, with its phases."""
    outcome = generate(target, drafter, [prompt], settings, [seed])
    [generation] = outcome.generations
    generation.phases, generation.seconds, generation.warmup = outcome.phases, outcome.seconds, outcome.warmup
    return generation


def speculate(
    target: Target,
    drafter: Drafter,
    prompt: list[int],
    shape: TreeShape,
    max_new_tokens: int,
    policy: Policy | None = None,
    seed: int = 0,
) -> Generation:
    """Continue `prompt` by speculative decoding."""
    return generate_one(target, drafter, prompt, Settings(shape, max_new_tokens, policy or Policy()), seed)


def decode_plain(
    target: Target, prompt: list[int], max_new_tokens: int, policy: Policy | None = None, seed: int = 0
) -> Generation:
    """One token per target pass: the baseline, by the same code without any drafting."""
    return generate_one(target, None, prompt, Settings(PLAIN, max_new_tokens, policy or Policy()), seed)
