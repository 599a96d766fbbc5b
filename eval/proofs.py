"""Is the text the target's own? Greedy identity with gaps, and tests of what is sampled."""

import statistics
from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch

from headwright.data.sampling import Policy
from headwright.eval.chi import chi_square
from headwright.eval.decode import generate
from headwright.eval.drafters import PromptLookup
from headwright.eval.entries import Part
from headwright.eval.scene import Row, Scene
from headwright.eval.settings import PLAIN, Settings
from headwright.eval.sides import Side
from headwright.heads.draft_tree import TreeShape

TOP = 8  # tokens among which the tested texts are drawn
BEGINNINGS = 6  # after which the next token is tested


def lossless_rows(scene: Scene) -> list[Row]:
    """Greedy identity with the gaps, and tests of what is sampled."""
    study = scene.run.study
    shapes = [*scene.chains([3, study.depth]), *scene.trees([min(4, study.depth)], study.width, study.nodes)]
    sides = [scene.side(shape) for shape in dict.fromkeys(shapes)]
    sides.append(Side("prompt-lookup", PromptLookup(), Settings(TreeShape.chain(study.depth), study.max_new_tokens)))
    rows = [identity_row(part) for part in scene.race(sides, what="greedy")]
    for shape in [*scene.chains([study.depth]), *scene.trees([min(4, study.depth)], study.width, study.nodes)]:
        rows += scene.kept.recall(f"sampled {shape.name}", partial(sampled_rows, scene, shape))
    return rows


def identity_row(part: Part) -> Row:
    """How many texts are plain decoding's, and the largest gap where one is not."""
    found = part.losslessness() or {}
    gaps = [d["logit_gap"] for d in found["divergences"] if d["logit_gap"] is not None]
    return {
        "side": f"{part.side.name} {part.side.settings.shape.name}",
        "check": "greedy text",
        "cases": found["prompts"],
        "result": f"{found['identical']}/{found['prompts']} identical",
        "per_1000_tokens": found["divergences_per_1000_tokens"],
        "largest_gap": max(gaps, default=0.0),
        "p": None,
    }


def sampled_rows(scene: Scene, shape: TreeShape) -> list[Row]:
    """Texts of three tokens behind one prompt: the first must be plain decoding's draw for draw, all three follow the target's
    own probabilities.
    """
    study, prompt = scene.run.study, min(scene.prompts, key=lambda found: len(found.ids)).ids
    policy = Policy(1.0, top_k=TOP)  # of few tokens each is drawn often
    settings = Settings(shape, 3, policy, ignore_eos=True, verification="sampled", batch=32)
    prompts = [prompt] * study.samples
    texts = [text.tokens for text in generate(scene.target, scene.head, prompts, settings).generations]
    plain = Settings(PLAIN, 1, policy, ignore_eos=True, batch=32)
    alone = [text.tokens[0] for text in generate(scene.target, None, prompts[:64], plain).generations]
    equal = sum(text[0] == token for text, token in zip(texts, alone))
    side = f"{scene.run.head.kind} {shape.name} T=1, top-k {TOP}"
    rows = [checked(side, "first token, draw for draw", len(alone), f"{equal}/{len(alone)} equal", None)]
    for place in range(3):
        found = []
        for before, seen in commonest(texts, place):
            probs_V = next_probs(scene, [*prompt, *before], policy)
            found.append((chi_square(seen, probs_V.tolist()), len(seen)))
        cases, free = sum(count for _, count in found), sum(test[1] for test, _ in found)
        p = min(1.0, len(found) * min(test[2] for test, _ in found))  # Bonferroni's
        rows.append(checked(side, f"token {place + 1}, χ² after {len(found)} beginnings", cases, f"{free} degrees", p))
    return rows


def checked(side: str, check: str, cases: int, result: str, p: float | None) -> Row:
    """A row of a test."""
    return {
        "side": side,
        "check": check,
        "cases": cases,
        "result": result,
        "per_1000_tokens": None,
        "largest_gap": None,
        "p": p,
    }


def commonest(texts: Sequence[Sequence[int]], place: int) -> list[tuple[list[int], list[int]]]:
    """The beginnings of so many tokens that most texts share, and the tokens that follow each."""
    starts = [tuple(text[:place]) for text in texts]
    most = [start for start, _ in Counter(starts).most_common(BEGINNINGS)]
    return [(list(start), [text[place] for text, mine in zip(texts, starts) if mine == start]) for start in most]


@torch.inference_mode()
def next_probs(scene: Scene, ids: list[int], policy: Policy) -> torch.Tensor:
    """The target's own distribution after a text [V], fp64."""
    features = scene.target.features(torch.tensor([ids], device=scene.target.device))
    probs_V = policy.probs(scene.target.logits(features.last_BND[0, -1])).double()
    return probs_V / probs_V.sum()


def lossless_says(rows: Sequence[Row]) -> str:
    """All together."""
    greedy = [row for row in rows if row["check"] == "greedy text"]
    tests = [row["p"] for row in rows if row["p"] is not None]
    worst = max(row["largest_gap"] for row in greedy)
    rate = statistics.fmean(row["per_1000_tokens"] for row in greedy)
    draws = [row["result"] for row in rows if row["check"].startswith("first token")]
    return (
        f"Greedy texts part {rate:.2g} times per 1000 tokens, at logit gaps up to {worst:.2g}; first tokens "
        f"{', '.join(draws)}; smallest p of {len(tests)} χ² tests: {min(tests, default=float('nan')):.3f}."
    )
