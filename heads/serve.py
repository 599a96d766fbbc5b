"""How a directory is served: launch lines, what to expect, how long drafts should be, and SERVE.md, which says so beside it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwright.heads.contract import Contract, Finding
from headwright.heads.directory import Config

USUAL = 3  # drafted tokens where nothing is measured
BATCHES = (1, 2, 4, 8, 16, 32)
LONGEST = 8


@dataclass
class Advice:
    """The best number of drafted tokens at a batch size, and the speed-up that it should bring; 0: do not draft."""

    batch: int
    tokens: int
    speedup: float


def between(measured: Mapping[int, float], place: float) -> float:
    """Linear interpolation; beyond the ends the last two points go on."""
    known = sorted(measured)
    if place in measured or len(known) == 1:
        return measured.get(int(place), measured[known[0]])
    right = next((number for number, value in enumerate(known) if value > place), len(known) - 1)
    low, high = known[max(right - 1, 0)], known[max(right, 1)]
    return measured[low] + (measured[high] - measured[low]) * (place - low) / (high - low)


def advise(accepted: Sequence[float], costs: Mapping[str, Any], batches: Iterable[int] = BATCHES) -> list[Advice]:
    """The best chain at each batch size.

    accepted: share of the drafts whose token at each position stood (joint). costs: what `headwright tune` measured, in
    milliseconds: target passes by their number of tokens, the first draft token and each further one. A batch of B texts with K
    drafts each is a pass of B · (K + 1) tokens; what is beyond the longest pass measured is not answered.
    """
    verify = {int(count): float(value) for count, value in costs["verify"].items()}
    if min(verify) > 1:  # a plain step was not measured
        return []
    first, level = float(costs["first"]["1"]), float(costs["level"]["1"])
    found = []
    for batch in batches:
        if batch > max(verify):
            break
        options = {0: 1.0}
        for count in range(1, min(len(accepted), LONGEST) + 1):
            if batch * (count + 1) <= max(verify):
                tau = 1 + sum(accepted[:count])
                cycle = between(verify, batch * (count + 1)) + first + (count - 1) * level + float(costs["overhead"])
                options[count] = tau * between(verify, batch) / cycle
        best = max(options, key=lambda count: options[count])
        found.append(Advice(batch, best, options[best]))
    return found


def recommended(ours: Mapping[str, Any]) -> list[Advice]:
    """From what an export wrote beside the weights; empty where costs or acceptance were not measured."""
    measured = ours.get("measured") or {}
    try:
        costs, accepted = measured.get("costs_ms"), (measured.get("chain") or {}).get("accepted_per_position")
        return advise(accepted, costs) if costs and accepted else []
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError):
        return []  # not what tune writes


def drafted_tokens(advice: Sequence[Advice]) -> int:
    """How many tokens a launch line drafts: the best at batch 1, or the usual number."""
    return advice[0].tokens or 1 if advice else USUAL


def launch_lines(
    contracts: Iterable[Contract],
    problems: Mapping[str, Sequence[Finding]],
    config: Config,
    target: str,
    folder: Path,
    count: int,
) -> str:
    """One block per engine: the line that starts it, or why it cannot serve this head."""
    blocks = []
    for contract in contracts:
        errors = problems.get(contract.engine, ())
        if errors:
            where = errors[0].where.removeprefix("config.json: ").removeprefix("model.safetensors: ")
            blocks.append(f"{contract.title}: does not serve this head: {where} {errors[0].what} ({errors[0].so})\n")
            continue
        line = contract.launch(config, target, folder, count).replace("\n", "\n    ")
        blocks.append(f"{contract.title} (drafts {contract.shape}s):\n\n    {line}\n")
    return "\n".join(blocks)


def expectation(measured: Mapping[str, Any] | None) -> str:
    """What was measured: a chain for engines that draft chains, a tree for those that draft trees."""
    if not measured:
        return "No chain of this head is measured yet: run `headwright eval`, then export again."
    lines = []
    for kind, where in (("chain", "vLLM"), ("tree", "SGLang with a tree of this size")):
        entry = measured.get(kind)
        if entry:
            low, high = entry["acceptance_length_ci95"]
            rates = ", ".join(f"{rate:.2f}" for rate in entry["accepted_per_position"])
            lines.append(
                f"- {kind} ({entry['shape']['name']}), comparable with {where}: τ = {entry['acceptance_length']:.2f} "
                f"[{low:.2f}, {high:.2f}], {sampling(entry)}; accepted at each position: {rates}"
            )
    return f"Measured by Headwright on {measured['answers']['data']}:\n\n" + "\n".join(lines)


def sampling(result: Mapping[str, Any]) -> str:
    """How a measured entry was decoded."""
    return f"T = {result['temperature']:g}" if result["temperature"] else "greedy"


def lengths(advice: Sequence[Advice], device: str) -> str:
    """The recommended draft lengths as a table."""
    if not advice:
        return "Not measured: run `headwright tune`, then export again."
    rows = [f"| {found.batch} | {found.tokens or 'do not draft'} | {found.speedup:.2f}× |" for found in advice]
    head = "| texts at once | drafted tokens | expected speed-up |\n|---|---|---|"
    note = (
        f"From costs measured on {device} (a batch's pass counted as a single text's of as many tokens) and the acceptance "
        "above. Another machine or engine has other costs: measure there."
    )
    return f"{head}\n" + "\n".join(rows) + f"\n\n{note}"


COUNTERS = """`curl -s localhost:8000/metrics | grep spec_decode` (vLLM) shows `num_drafts` (cycles), `num_accepted_tokens`
(the bonus token is not counted) and `num_accepted_tokens_per_pos` (by position). So

    τ = 1 + num_accepted_tokens / num_drafts
    accepted at position i = num_accepted_tokens_per_pos[i] / num_drafts

are the chain's numbers above, for the same number of drafted tokens. SGLang logs `accept len`, which counts the bonus token,
as τ does; its trees are to be compared with the tree's number. Both depend on the number of drafted tokens: K = 3 accepts less
per pass than K = 5. A value near 1.0 means that something is wrong, not that the head is weak: `headwright doctor` finds it."""


def serve_notes(
    target: str, launch: str, measured: Mapping[str, Any] | None, advice: Sequence[Advice], shares: bool
) -> str:
    """SERVE.md."""
    shared = "\nThe embedding is the target's own and is not in this directory; engines share it.\n" if shares else ""
    device = (measured or {}).get("device", "this machine")
    return f"""# Serving this head

Target: `{target}`.

## Launch

{launch}
## What to expect

{expectation(measured)}

## How many tokens to draft

{lengths(advice, device)}

## Reading the engine's counters

{COUNTERS}
{shared}"""
