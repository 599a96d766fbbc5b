"""What speculation would bring, by formula. Runnable: `headwright speedup --alpha A --cost C --depth K`.

α: probability that a draft is accepted, alike at every place (Leviathan et al., arXiv 2211.17192). γ: drafted tokens of a
chain. c: cost of one draft step, in plain steps of the target. a: what each of N verified nodes adds to a pass, likewise.
"""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headwright.configs import UserError
from headwright.configs.command import clean_exit
from headwright.configs.console import say, table
from headwright.eval.records import read_report

SHOWN_DEPTHS = 12


def expected_tokens(alpha: float, depth: int) -> float:
    """E = 1 + α + … + α^γ = (1 − α^{γ+1}) / (1 − α): tokens of a cycle, the bonus included."""
    if alpha in (0, 1):
        return depth * alpha + 1.0
    return -math.expm1((depth + 1) * math.log(alpha)) / (1 - alpha)  # keeps its digits near α = 1


@dataclass(frozen=True)
class Costs:
    """In plain steps: of a draft step (c) and of each verified node beyond the root (a). nodes: of a pass; default: γ."""

    draft: float
    node: float = 0.0
    nodes: int | None = None

    def cycle(self, depth: int) -> float:
        """c·γ + 1 + a·N, which is also the τ that breaks even."""
        return self.draft * depth + 1 + self.node * (depth if self.nodes is None else self.nodes)

    def speedup(self, alpha: float, depth: int) -> float:
        """S = E / (c·γ + 1 + a·N); with a = 0 the paper's (1 − α^{γ+1}) / ((1 − α)(c·γ + 1))."""
        return expected_tokens(alpha, depth) / self.cycle(depth)

    def best_depth(self, alpha: float, deepest: int) -> int:
        """The depth of the largest speed-up; 0 where none pays."""
        found = max(range(1, deepest + 1), key=lambda depth: self.speedup(alpha, depth))
        return found if self.speedup(alpha, found) > 1 else 0

    def break_even(self, depth: int) -> float | None:
        """The α from which a depth pays; None where even a perfect draft does not."""
        if self.speedup(1.0, depth) < 1:
            return None
        return bisect(lambda alpha: self.speedup(alpha, depth) - 1)

    @property
    def asymptote(self) -> float:
        """The speed-up of endless perfect chains: 1 / (a + c); with free drafts 1 / a. Infinite where both are free."""
        per_token = self.draft + (self.node if self.nodes is None else 0.0)
        return 1 / per_token if per_token > 0 else math.inf


def bisect(rises: Callable[[float], float]) -> float:
    """Where a function that rises over [0, 1] is zero; the nearer end where it is not."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rises(middle) < 0 else (low, middle)
    return high


def alpha_of(tau: float, depth: int) -> float:
    """The α that gives this τ at this depth."""
    return bisect(lambda alpha: expected_tokens(alpha, depth) - tau)


@dataclass
class Measured:
    """A chain of a report: its α, costs and speed-up."""

    name: str
    alpha: float
    depth: int
    costs: Costs
    speedup: float


def measured(report: dict[str, Any]) -> Measured:
    """From the head's first greedy chain, or the first chain at all. Raises UserError where there is none."""
    chains = [entry for entry in report["entries"] if entry["shape"]["kind"] == "chain"]
    chains.sort(key=lambda entry: entry["drafter"] != report["entries"][0]["drafter"])  # stable: the head's first
    if not chains:
        raise UserError("the report has no chain: eval.shapes: [{kind: chain, depth: 5}]")
    entry = next((found for found in chains if found["temperature"] == 0), chains[0])
    model, depth = entry["speedup_model"], entry["shape"]["depth"]
    extra = model["verify_in_steps"] + model["overhead_in_steps"] - 1
    costs = Costs(model["draft_in_steps"] / depth, extra / depth)
    alpha = alpha_of(entry["acceptance_length"], depth)
    return Measured(f"{entry['drafter']} {entry['shape']['name']}", alpha, depth, costs, entry["speedup"])


def answer(alpha: float, costs: Costs, depth: int, deepest: int) -> dict[str, Any]:
    """All that follows, as JSON."""
    best = costs.best_depth(alpha, deepest)
    return {
        "alpha": alpha,
        "costs": asdict(costs),
        "depth": depth,
        "expected_tokens": expected_tokens(alpha, depth),
        "cycle_in_steps": costs.cycle(depth),
        "speedup": costs.speedup(alpha, depth),
        "best_depth": best,
        "best_speedup": costs.speedup(alpha, best) if best else 1.0,
        "break_even_alpha": costs.break_even(depth),
        "break_even_tau": costs.cycle(depth),
        "asymptote": costs.asymptote if math.isfinite(costs.asymptote) else None,
        "ceiling_free_drafts": 1 / costs.node if costs.node > 0 else None,
        "by_depth": {str(each): costs.speedup(alpha, each) for each in range(1, deepest + 1)},
    }


def show(found: dict[str, Any], costs: Costs) -> None:
    """A table by depth, and what it says."""
    alpha, rows = found["alpha"], []
    for depth in sorted({*range(1, SHOWN_DEPTHS + 1), found["depth"], found["best_depth"] or 1}):
        note = " · ".join(
            word for word, place in (("asked", found["depth"]), ("best", found["best_depth"])) if place == depth
        )
        numbers = (expected_tokens(alpha, depth), costs.cycle(depth), costs.speedup(alpha, depth))
        rows.append((depth, *(f"{number:.3f}" for number in numbers), note))
    title = f"α = {alpha:.3f}, a draft step {costs.draft:.3f}, a verified node {costs.node:.3f} plain steps"
    table(title, ("depth γ", "expected tokens", "cycle, plain steps", "speed-up", ""), rows)
    even = found["break_even_alpha"]
    say(
        f"depth {found['depth']}: {found['speedup']:.2f}×; "
        + (f"pays from α = {even:.3f}" if even is not None else "does not pay even where every draft is accepted")
        + f", τ = {found['break_even_tau']:.2f}"
    )
    best = found["best_depth"]
    say(f"best depth {best}: {found['best_speedup']:.2f}×" if best else "no depth pays: do not speculate")
    if found["asymptote"] is not None and found["asymptote"] > 1:
        say(f"no chain exceeds {found['asymptote']:.2f}× at these costs, however good the drafts")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(
        prog="headwright speedup",
        description="Expected tokens, speed-up, best depth, break-even and asymptote of chains, by the usual formulas: "
        "E = (1-α^(γ+1))/(1-α), S = E/(c·γ + 1 + a·N). With --report, α and costs are those that an evaluation measured; "
        "what is given on the command line replaces them.",
    )
    out.add_argument("--alpha", type=float, metavar="A", help="probability that a draft is accepted, 0 to 1")
    out.add_argument("--cost", type=float, metavar="C", help="cost of one draft step, in plain target steps")
    out.add_argument("--depth", type=int, metavar="K", help="drafted tokens of a cycle; default: 5, or the report's")
    out.add_argument("--node-cost", type=float, metavar="A", help="what each verified node adds to a pass; default: 0")
    out.add_argument("--nodes", type=int, metavar="N", help="nodes of a pass; default: the depth")
    out.add_argument("--deepest", type=int, default=32, metavar="K", help="depths that are tried; default: 32")
    out.add_argument("--report", metavar="PATH", help="a run's directory or its report.json: measured values")
    out.add_argument("--json", action="store_true", help="for machines")
    return out


def run(args: argparse.Namespace) -> None:
    """Compute and print."""
    known = measured(read_report(Path(args.report))) if args.report else None
    alpha = args.alpha if args.alpha is not None else known.alpha if known else None
    cost = args.cost if args.cost is not None else known.costs.draft if known else None
    if alpha is None or cost is None:
        raise UserError("give --alpha and --cost, or --report with measured ones")
    node = args.node_cost if args.node_cost is not None else known.costs.node if known else 0.0
    depth = args.depth if args.depth is not None else known.depth if known else 5
    check(alpha, cost, depth, args)
    costs = Costs(cost, node, args.nodes)
    found = answer(alpha, costs, depth, args.deepest)
    if known:
        found["measured"] = asdict(known)
    if args.json:
        print(json.dumps(found, indent=2))
        return
    if known:
        say(f"measured: {known.name}, α = {known.alpha:.3f}, {known.speedup:.2f}× with the prefill")
    show(found, costs)


def check(alpha: float, cost: float, depth: int, args: argparse.Namespace) -> None:
    """Numbers that the formulas take."""
    if not 0 <= alpha <= 1:
        raise UserError(f"--alpha {alpha}: a probability lies between 0 and 1")
    if not 0 <= cost < math.inf:
        raise UserError(f"--cost {cost}: give the cost of a draft step in plain steps, 0 or more")
    if args.node_cost is not None and not 0 <= args.node_cost < math.inf:
        raise UserError(f"--node-cost {args.node_cost}: give what a verified node adds, in plain steps, 0 or more")
    if depth < 1 or args.deepest < 1 or (args.nodes is not None and args.nodes < 1):
        raise UserError("--depth, --deepest and --nodes: give 1 or more")


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    args = parser().parse_args(argv)
    with clean_exit():
        run(args)


if __name__ == "__main__":
    main()
