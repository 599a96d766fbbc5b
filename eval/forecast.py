"""Speed-ups foretold from recorded text and from costs measured elsewhere, and what the clock says."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from headwright.eval.calculator import bisect, expected_tokens
from headwright.eval.decode import pass_nodes
from headwright.eval.prompts import Prompt
from headwright.eval.scene import Costs, Row, Scene, numbers
from headwright.eval.shape import Recorded, between
from headwright.heads.draft_tree import TreeShape


@dataclass
class Calibration:
    """Costs in plain steps, measured in real decoding of other prompts: of drafts by width, of passes by their padded size."""

    verify: dict[int, float] = field(default_factory=dict)
    draft: dict[int, dict[int, float]] = field(default_factory=dict)  # width → depth → steps
    rest: float = 0.0

    def cycle(self, shape: TreeShape, device: torch.device) -> float:
        """One cycle of a shape."""
        width = shape.top_k if shape.kind == "dynamic" else 1
        nearest = min(self.draft, key=lambda known: abs(known - width))
        size = pass_nodes(shape.nodes + 1, 1, device)
        return between(self.draft[nearest], shape.depth) + between(self.verify, size) + self.rest


def calibrate(scene: Scene, prompts: Sequence[Prompt]) -> tuple[Calibration, list[TreeShape]]:
    """Decode `prompts` in a few shapes that span depths and sizes, in turn with plain decoding; costs and those shapes."""
    study, device = scene.run.study, scene.target.device
    ends = sorted({min(study.depths), max(study.depths)})
    shapes = scene.chains([*ends, statistics.median_low(study.depths)])
    low, *_, high = sorted([*study.node_counts, max(study.node_counts)])
    shapes += scene.trees([2], study.width, low) + scene.trees([max(study.depths)], study.width, high)
    shapes += scene.trees([study.depth], study.width, statistics.median_low(study.node_counts))
    shapes = list(dict.fromkeys(shapes))
    found, rests = Calibration(), []
    sizes: dict[int, list[float]] = {}
    for part in scene.race([scene.side(shape) for shape in shapes], prompts, "calibration"):
        shape, costs = part.side.settings.shape, Costs.of(part)
        width = shape.top_k if shape.kind == "dynamic" else 1
        found.draft.setdefault(width, {})[shape.depth] = costs.draft
        sizes.setdefault(pass_nodes(shape.nodes + 1, 1, device), []).append(costs.verify)
        rests.append(costs.rest)
    found.verify = {1: 1.0} | {size: statistics.fmean(costs) for size, costs in sizes.items()}
    found.rest = statistics.fmean(rests)
    return found, shapes


def forecast_rows(scene: Scene) -> list[Row]:
    """Speed-ups foretold from recorded text and from costs measured on other prompts, and what the clock then says."""
    study, device = scene.run.study, scene.target.device
    documents, prompts = scene.documents(2 * study.prompts)
    costs, known = calibrate(scene, prompts[::2])
    asked, recorded = prompts[1::2], documents[1::2]
    shapes = scene.chains(study.depths)
    for nodes in study.node_counts:
        shapes += scene.trees([3, study.depth], study.width, nodes)
    shapes = list(dict.fromkeys(shapes))
    taus = foretold(scene, recorded, shapes)
    rows = []
    for shape, part in zip(shapes, scene.race([scene.side(shape) for shape in shapes], asked, "forecast")):
        row, tau = numbers(part), taus[shape]
        predicted = tau / costs.cycle(shape, device)
        more = {"tau_foretold": tau, "foretold": predicted, "off": predicted / row["decode_speedup"] - 1}
        rows.append(row | more | {"calibrated": "yes" if shape in known else "no"})
    return rows


def foretold(scene: Scene, documents: Sequence[Any], shapes: Sequence[TreeShape]) -> dict[TreeShape, float]:
    """Exact τ of every shape on recorded answers."""
    found: dict[TreeShape, float] = {}
    for width in sorted({shape.top_k for shape in shapes}):
        mine = [shape for shape in shapes if shape.top_k == width]
        name = f"recorded {width}: {', '.join(shape.name for shape in mine)}"
        found |= dict(zip(mine, scene.kept.recall(name, partial(recorded_taus, scene, documents, width, mine))))
    return found


def recorded_taus(scene: Scene, documents: Sequence[Any], width: int, shapes: Sequence[TreeShape]) -> list[float]:
    """Of shapes of one width."""
    recorded = Recorded(scene.head, scene.target, documents, max(shape.depth for shape in shapes), width)
    return [recorded.cycles(shape).acceptance_length for shape in shapes]


def forecast_says(rows: Sequence[Row]) -> str:
    """How far off."""
    within = [row for row in rows if abs(row["off"]) <= 0.1]
    worst = max(rows, key=lambda row: abs(row["off"]))
    return (
        f"{len(within)} of {len(rows)} shapes within 10 %; median {statistics.median(abs(r['off']) for r in rows):.1%}, "
        f"largest {worst['off']:+.1%} ({worst['shape']})."
    )


def break_even_rows(scene: Scene) -> list[Row]:
    """Gain or loss of chains over depth and α, at the costs measured here."""
    study, device = scene.run.study, scene.target.device
    _, prompts = scene.documents(study.prompts)
    costs, _ = calibrate(scene, prompts)
    rows = []
    for shape in scene.chains(range(1, max(study.depths) + 1)):
        cycle = costs.cycle(shape, device)
        even = bisect(lambda alpha: expected_tokens(alpha, shape.depth) - cycle)  # noqa: B023
        for alpha in (place / 20 for place in range(4, 20)):
            tau = expected_tokens(alpha, shape.depth)
            gain = {"alpha": alpha, "tau": tau, "speedup": tau / cycle}
            rows.append({"depth": shape.depth, "break_even_tau": cycle, "break_even_alpha": even} | gain)
    return rows


def break_even_says(rows: Sequence[Row]) -> str:
    """The τ from which each depth pays."""
    lines = {row["depth"]: row for row in rows}
    return "Drafting pays above " + ", ".join(
        f"τ {row['break_even_tau']:.2f} (α {row['break_even_alpha']:.2f}) at depth {depth}"
        for depth, row in lines.items()
    )
