"""The numbers of a report: what the sides of an evaluation have said, as entries of report.json.

An entry is a prompt set × temperature × shape × drafter. Speeds are compared on the timed prompts, which plain decoding has
answered in the same turns.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch

from headwright.configs import RunConfig
from headwright.data.target import Target
from headwright.eval.drafters import HostDrafter
from headwright.eval.metrics import (
    acceptance_length,
    acceptance_metrics,
    as_others_count,
    bootstrap,
    histogram,
    latencies,
    percentiles,
    phase_milliseconds,
    repeated_4grams,
    tokens_per_second,
)
from headwright.eval.model_drafter import ModelDrafter
from headwright.eval.prompts import Prompt, Room
from headwright.eval.settings import Generation, Settings
from headwright.eval.sides import Side, Spoken
from headwright.heads.base import DraftHead

SAMPLES = 4  # answers that are shown


@dataclass
class Plain:
    """Plain greedy decoding: of timed prompts by our loop and by transformers' generate, turn by turn; texts of all prompts."""

    ours: list[Spoken]
    theirs: list[Spoken]
    texts: list[list[list[int]]]

    def step_seconds(self) -> float:
        """One plain target pass."""
        runs = [spoken.whole for spoken in self.ours]
        return sum(run.phases["verify"] for run in runs) / max(sum(len(run.emitted) for run in runs), 1)

    def part(self, places: Sequence[int], timed: Sequence[int]) -> "Plain":
        """Of some prompts, of which some are timed, by their places among all (the timed ones among the timed)."""
        return Plain(
            [self.ours[place] for place in timed],
            [self.theirs[place] for place in timed],
            [self.texts[place] for place in places],
        )

    @cached_property
    def best(self) -> list[Spoken]:
        """The faster of the two."""
        ours, theirs = (sum(map(per_token, runs)) for runs in (self.ours, self.theirs))
        return self.ours if ours <= theirs else self.theirs


def per_token(spoken: Spoken) -> float:
    """Seconds per new token, all turns together, prefill included."""
    return spoken.whole.seconds / max(len(spoken.whole.tokens), 1)


@dataclass
class Part:
    """Some prompts, what a side said to them, and what plain decoding said. The timed prompts stand first."""

    run: RunConfig
    target: Target
    room: Room
    side: Side
    prompts: list[Prompt]
    said: list[Spoken]
    plain: Plain

    def chosen(self, places: Sequence[int]) -> "Part":
        """Some of the prompts."""
        timed = [place for place in places if place < len(self.plain.ours)]
        prompts, said = [self.prompts[place] for place in places], [self.said[place] for place in places]
        return replace(self, prompts=prompts, said=said, plain=self.plain.part(places, timed))

    @property
    def wholes(self) -> list[Generation]:
        """All turns of each prompt together."""
        return [spoken.whole for spoken in self.said]

    def entry(self) -> dict[str, Any]:
        """One entry of the report."""
        side, runs, settings = self.side, self.wholes, self.side.settings
        return {
            "drafter": side.name,
            "shape": asdict(settings.shape) | {"name": settings.shape.name},
            "prompt_set": self.prompts[0].set,
            "temperature": settings.policy.temperature,
            **self.acceptance(),
            "by_domain": groups(self, lambda prompt: prompt.domain),
            "by_language": groups(self, lambda prompt: prompt.language),
            "turns": sum(len(spoken.turns) for spoken in self.said),
            "repeated_4grams": repeated_4grams([run.tokens for run in runs]),
            "tokens_per_second": tokens_per_second(runs),
            "chars_per_second": sum(map(self.characters, self.said)) / sum(run.seconds for run in runs),
            **self.speed(),
            **latencies([turn for spoken in self.said for turn in spoken.turns]),
            "phases_ms": self.phases(),
            "warmup_seconds": sum(run.warmup for run in runs),
            "speedup_model": self.speed_model(),
            "verification": "walk" if isinstance(side.drafter, HostDrafter) else settings.rule,
            "lossless": self.losslessness(),
            "compatible": self.compatible(),
            "per_prompt": self.per_prompt(),
            "samples": [sample(self.target, *pair) for pair in list(zip(self.said, self.prompts))[:SAMPLES]],
        }

    @property
    def texts(self) -> list[list[list[int]]]:
        """Tokens of each turn of each prompt."""
        return [[turn.tokens for turn in spoken.turns] for spoken in self.said]

    def acceptance(self) -> dict[str, Any]:
        """τ and rates."""
        return acceptance_metrics(self.wholes, self.side.settings.shape.depth, self.run.seed)

    def phases(self) -> dict[str, float]:
        """Milliseconds of a cycle."""
        return phase_milliseconds(self.wholes)

    def losslessness(self) -> dict[str, Any] | None:
        """Against plain decoding."""
        settings = self.side.settings
        return losslessness(self.target, self.room, self.prompts, self.texts, self.plain.texts, settings)

    def characters(self, spoken: Spoken) -> int:
        """Of a prompt's answers."""
        return sum(len(self.room.text(turn.tokens)) for turn in spoken.turns)

    def speed(self) -> dict[str, Any]:
        """Speed-up over the faster plain baseline, paired over the timed prompts."""
        pairs = [(per_token(before), per_token(now)) for before, now in zip(self.plain.best, self.said)]
        each = sorted(before / now for before, now in pairs)
        return {
            "baseline_tokens_per_second": tokens_per_second([spoken.whole for spoken in self.plain.ours]),
            "baseline_hf_tokens_per_second": tokens_per_second([spoken.whole for spoken in self.plain.theirs]),
            "speedup": ratio(pairs),
            "speedup_ci95": bootstrap(pairs, ratio, self.run.seed),
            "speedup_per_prompt": percentiles(each, (10, 50, 90)) | {"mean": statistics.fmean(each)},
            "timed_prompts": len(pairs),
        }

    def speed_model(self) -> dict[str, Any]:
        """S = τ / (draft + verify + overhead), in plain steps: as measured here, and modelled for a GPU (not measured)."""
        runs, step = self.wholes, 1000 * self.plain.step_seconds()
        phases, tau, depth = self.phases(), acceptance_length(runs), self.side.settings.shape.depth
        overhead = sum(phases[name] for name in ("select", "commit", "other"))
        cycle = phases["draft"] + phases["verify"] + overhead
        cost, verify_cost = draft_cost(self.run, self.side, self.target), self.run.eval.gpu_ceiling[1]
        return {
            "plain_step_ms": step,
            "draft_in_steps": phases["draft"] / step,
            "verify_in_steps": phases["verify"] / step,
            "overhead_in_steps": overhead / step,
            "predicted_here": tau * step / cycle,
            "break_even_tau_here": cycle / step,
            "ceiling_here": (depth + 1) * step / cycle,
            "modelled_gpu": tau / (depth * cost + verify_cost),
            "modelled_gpu_assumes": f"draft step {cost:g}, verification {verify_cost:g} plain steps, batch 1; not measured",
        }

    def compatible(self) -> dict[str, Any]:
        """The same runs as other projects would count them."""
        return as_others_count(
            [turn for spoken in self.said for turn in spoken.turns],
            [1 / per_token(spoken) for spoken in self.said[: len(self.plain.ours)]],
            [1 / per_token(spoken) for spoken in self.plain.theirs],
        )

    def per_prompt(self) -> list[dict[str, Any]]:
        """What `headwright compare` pairs."""
        rows = []
        for place, (prompt, spoken) in enumerate(zip(self.prompts, self.said)):
            run = spoken.whole
            row = {
                "place": prompt.place,
                "domain": prompt.domain,
                "language": prompt.language,
                "turns": len(spoken.turns),
            }
            row |= {"tokens": len(run.tokens), "characters": self.characters(spoken), "seconds": run.seconds}
            row |= {"cycles": len(run.emitted), "emitted": sum(run.emitted), "accepted": sum(run.accepted)}
            row["histogram"] = histogram([run], self.side.settings.shape.depth)
            if place < len(self.plain.ours):
                row["plain_seconds_per_token"] = per_token(self.plain.best[place])
            rows.append(row)
        return rows


def ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """Plain seconds per token over the side's, summed over prompts."""
    return sum(before for before, _ in pairs) / sum(now for _, now in pairs)


def groups(part: Part, name: Callable[[Prompt], str]) -> dict[str, Any]:
    """τ, its interval and the speed-up of each group of a part's prompts."""
    found = {}
    timed = len(part.plain.ours)
    for group in dict.fromkeys(map(name, part.prompts)):
        places = [place for place, prompt in enumerate(part.prompts) if name(prompt) == group]
        runs = [part.said[place].whole for place in places]
        pairs = [(per_token(part.plain.best[p]), per_token(part.said[p])) for p in places if p < timed]
        found[group] = {
            "prompts": len(places),
            "acceptance_length": acceptance_length(runs),
            "acceptance_length_ci95": bootstrap(runs, acceptance_length, part.run.seed),
            "tokens_per_second": tokens_per_second(runs),
            "chars_per_second": sum(part.characters(part.said[p]) for p in places) / sum(run.seconds for run in runs),
            "timed_prompts": len(pairs),
            "speedup": ratio(pairs) if pairs else None,
            "speedup_ci95": bootstrap(pairs, ratio, part.run.seed) if pairs else None,
        }
    return found


def draft_cost(run: RunConfig, side: Side, target: Target) -> float:
    """One draft step in plain steps, on the modelled GPU: a head's as the run file says, a model's by the weights that
    it reads.
    """
    if isinstance(side.drafter, DraftHead):
        return run.eval.gpu_ceiling[0]
    return side.drafter.share(target) if isinstance(side.drafter, ModelDrafter) else 0.0


def losslessness(
    target: Target,
    room: Room,
    prompts: Sequence[Prompt],
    texts: Sequence[Sequence[list[int]]],
    plain: Sequence[Sequence[list[int]]],
    settings: Settings,
) -> dict[str, Any] | None:
    """Greedy identity with plain decoding, turn by turn; where texts part for the first time, the target's logit gap between
    the two tokens. None where text is sampled: the rule is then exact, and no two texts can be compared.
    """
    if not settings.lossless:
        return {"rule": "typical acceptance is not lossless: this text is not the target's own"}
    if not settings.policy.greedy:
        return None
    different = []
    for prompt, said, wanted in zip(prompts, texts, plain):
        turn = next((turn for turn, (a, b) in enumerate(zip(said, wanted)) if a != b), None)
        if turn is None:
            continue
        ids = room.conversation(prompt, said[:turn])
        assert ids is not None, "both have answered it"
        place, gap = parting(target, ids, said[turn], wanted[turn])
        different.append({"place": prompt.place, "turn": turn, "token": place, "logit_gap": gap})
    identical, tokens = len(prompts) - len(different), sum(len(turn) for said in texts for turn in said)
    return {
        "prompts": len(prompts),
        "identical": identical,
        "greedy_identity": identical / len(prompts),
        "divergences_per_1000_tokens": 1000 * len(different) / max(tokens, 1),
        "divergences": different,
    }


def parting(target: Target, ids: list[int], text: list[int], plain: list[int]) -> tuple[int, float | None]:
    """The first place where two texts differ, and the difference of the target's logits for the two tokens there; None where
    one text merely ends.
    """
    place = next((i for i, (a, b) in enumerate(zip(text, plain)) if a != b), min(len(text), len(plain)))
    if place >= min(len(text), len(plain)):
        return place, None
    before = torch.tensor([ids + plain[:place]], device=target.device)
    logits = target.logits(target.features(before).last_BND[0, -1])
    return place, float((logits[plain[place]] - logits[text[place]]).abs())


def sample(target: Target, spoken: Spoken, prompt: Prompt) -> dict[str, Any]:
    """A first answer, cut into the pieces that each cycle emitted."""
    generation, pieces, start = spoken.turns[0], [], 1
    decode = target.tokenizer.decode
    for emitted, accepted in zip(generation.emitted, generation.accepted):
        tokens = generation.tokens[start : start + emitted]
        pieces.append({"accepted": decode(tokens[:accepted]), "target": decode(tokens[accepted:])})
        start += emitted
    asked = decode(prompt.ids[-160:], skip_special_tokens=True)
    first = decode(generation.tokens[:1])
    return {"source": prompt.source, "place": prompt.place, "asked": asked, "first": first, "cycles": pieces}
