"""Self-speculation: which of the target's layers to stop after (LayerSkip, 2404.16710); and separate draft models.

Shapes: T tokens, R rows, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headwright.configs import UserError
from headwright.data.target import EarlyExit, Target
from headwright.heads.model_drafter import ModelDrafter, check_same_tokens


def small_model(model: Target, target: Target) -> ModelDrafter:
    """A separate model as the target's drafter. Raises UserError where their tokenizers differ."""
    check_same_tokens(model, target)
    return ModelDrafter(model, target.spec.vocab_size)


@dataclass
class Exit:
    """What the target would guess if it stopped after some layers: how often that is its final choice, and how sure it is of
    guesses that are (and are not).
    """

    layers: int
    agreement: float
    confidence_right: float
    confidence_wrong: float

    def speedup(self, depth: int, layers: int, verify: float) -> float:
        """Of a chain of `depth`, by the cost of its layers: τ / (depth · exit/layers + v), v in plain steps."""
        tau = sum(self.agreement**k for k in range(depth + 1))
        return tau / (depth * self.layers / layers + verify)


@torch.inference_mode()
def own_choices(target: Target, ids_1T: Tensor, rows_R: Tensor) -> Tensor:
    """The target's most likely token at rows R of a text."""
    return target.logits(target.features(ids_1T).last_BND[0, rows_R]).argmax(-1)


@torch.inference_mode()
def measure_exit(target: Target, layers: int, ids_1T: Tensor, rows_R: Tensor, own_R: Tensor) -> Exit:
    """Compare the guesses after `layers` layers with the target's own choices, at rows R of a text."""
    early = EarlyExit(target, layers)
    probs_RV = target.logits(early.features(ids_1T).last_BND[0, rows_R]).float().softmax(-1)
    sure_R, guess_R = probs_RV.max(-1)
    right_R = guess_R == own_R
    return Exit(
        layers,
        float(right_R.float().mean()),
        float(sure_R[right_R].mean()) if right_R.any() else float("nan"),
        float(sure_R[~right_R].mean()) if (~right_R).any() else float("nan"),
    )


def pooled(exits: list[tuple[Exit, int]]) -> Exit:
    """Several texts together, weighed by their rows."""
    right = [exit.agreement * rows for exit, rows in exits]
    wrong = [(1 - exit.agreement) * rows for exit, rows in exits]

    def mean(values: list[float], weights: list[float]) -> float:
        kept = [(value, weight) for value, weight in zip(values, weights) if weight]
        total = sum(weight for _, weight in kept)
        return sum(value * weight for value, weight in kept) / total if total else float("nan")

    return Exit(
        exits[0][0].layers,
        sum(right) / sum(rows for _, rows in exits),
        mean([exit.confidence_right for exit, _ in exits], right),
        mean([exit.confidence_wrong for exit, _ in exits], wrong),
    )


def early_exits(target: Target, documents: list[tuple[list[int], list[int]]], candidates: list[int]) -> list[Exit]:
    """Measure every candidate over documents (ids, rows). Raises UserError where they have no rows."""
    documents = [(ids, rows) for ids, rows in documents if rows]
    if not documents:
        raise UserError("early exits are measured on answers, and there is none")
    parts: list[list[tuple[Exit, int]]] = [[] for _ in candidates]
    for ids, rows in documents:
        ids_1T, rows_R = torch.tensor([ids], device=target.device), torch.tensor(rows, device=target.device)
        own_R = own_choices(target, ids_1T, rows_R)
        for layers, found in zip(candidates, parts):
            found.append((measure_exit(target, layers, ids_1T, rows_R, own_R), len(rows)))
    return [pooled(found) for found in parts]


def best_exit(exits: list[Exit], layers: int, depths: range, verify: float) -> tuple[Exit, int, float]:
    """The exit and chain depth of the highest predicted speed-up."""
    options = [(exit, depth, exit.speedup(depth, layers, verify)) for exit in exits for depth in depths]
    return max(options, key=lambda option: option[2])
