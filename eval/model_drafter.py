"""Drafting by a model: a small one with the target's tokenizer (Leviathan et al., 2211.17192; Chen et al., 2302.01318), or the
target's own first layers (self-speculation: LayerSkip, 2404.16710).

Shapes: B texts, M new tokens, k frontier nodes, W the vocabulary that target and drafter share.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headwright.configs import UserError
from headwright.data.batch import to_device
from headwright.data.cache import KVCache
from headwright.data.target import EarlyExit, Features, Target, TargetSpec
from headwright.heads.base import Context
from headwright.heads.draft_tree import Tree, TreeShape
from headwright.heads.grow import Frontier, grow


class Model(Protocol):
    """A causal language model with our cache: `Target`, or `EarlyExit`."""

    @property
    def spec(self) -> TargetSpec:
        """Its facts."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it lives."""
        ...

    def new_cache(self, batch: int, slots: int) -> KVCache:
        """An empty cache."""
        ...

    def extend(
        self,
        ids_BN: Tensor,
        cache: KVCache,
        positions_BN: Tensor | None = None,
        among_BNN: Tensor | None = None,
        mask_BNS: Tensor | None = None,
    ) -> Features:
        """Run new tokens behind those in `cache`."""
        ...

    def logits(self, last_XD: Tensor) -> Tensor:
        """Logits from the final state."""
        ...

    def weights(self) -> int:
        """Bytes that one step reads."""
        ...


class ModelDrafter:
    """Any of these models as a drafter, for chains and trees, greedy and sampled."""

    wants_choices = False
    deepest: int | None = None

    def __init__(self, model: Model, vocabulary: int):
        self.model, self.vocabulary = model, min(vocabulary, model.spec.vocab_size)
        self.ids_W = torch.arange(self.vocabulary, device=model.device)

    def share(self, target: Target) -> float:
        """Weights that one of its steps reads, over the target's; of embedding tables a step reads a row."""
        return self.model.weights() / target.weights()

    def start(self, batch: int, slots: int) -> KVCache:
        """The model's own cache."""
        return self.model.new_cache(batch, slots + 1)  # x_0 is no row of the context

    @torch.inference_mode()
    def absorb(self, state: KVCache, context: Context) -> Tensor:
        """Read the new tokens; the logits [B, W] after each text's last."""
        counts = [len(text) for text in context.texts]
        state.make_room(max(counts))
        padded = torch.tensor([text + [0] * (max(counts) - len(text)) for text in context.texts])
        padded = padded.clamp_max(self.model.spec.vocab_size - 1)  # tokens of the target's that it has no row for
        last_BMD = self.model.extend(to_device(padded, self.model.device), state).last_BND
        state.advance(counts)
        ends_B = to_device(torch.tensor(counts) - 1, last_BMD.device)
        return self.logits(last_BMD[torch.arange(len(counts), device=last_BMD.device), ends_B])

    def logits(self, last_XD: Tensor) -> Tensor:
        """Logits [..., W] in fp32."""
        return self.model.logits(last_XD)[..., : self.vocabulary].float()

    @torch.inference_mode()
    def propose(self, state: KVCache, context: Context, shape: TreeShape) -> Tree:
        """Read, then draft."""
        logits_BW = self.absorb(state, context)
        frontier = Frontier(state, shape.rows)

        def step(tokens_Bk: Tensor, parents_Bk: Tensor) -> Tensor:
            with frontier.level(parents_Bk) as (positions_Bk, mask_BkS):
                features = self.model.extend(tokens_Bk, state, positions_Bk, mask_BNS=mask_BkS)
            return self.logits(features.last_BND)

        tree = grow(shape, context, logits_BW, step, self.ids_W)
        frontier.forget()
        return tree


def small_model(model: Target, target: Target) -> ModelDrafter:
    """A separate model as the target's drafter. Raises UserError where their tokenizers differ."""
    ours, theirs = model.tokenizer.get_vocab(), target.tokenizer.get_vocab()
    different = [token for token, place in theirs.items() if ours.get(token) != place]
    if different or len(ours) != len(theirs):
        example = f", such as {different[0]!r}" if different else ""
        raise UserError(
            f"draft model {model.spec.name}: its tokenizer is not that of {target.spec.name} "
            f"({len(ours)} and {len(theirs)} tokens, {len(different)} differ{example}): a draft model must share it"
        )
    if model.spec.max_positions < target.spec.max_positions:
        raise UserError(
            f"draft model {model.spec.name}: its context of {model.spec.max_positions} is shorter than the target's "
            f"({target.spec.max_positions})"
        )
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
