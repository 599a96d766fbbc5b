"""Drafting by a model: a small one with the target's tokenizer (Leviathan et al., 2211.17192; Chen et al., 2302.01318), or the
target's own first layers.

Shapes: B texts, M new tokens, k frontier nodes, W the vocabulary that target and drafter share, or a part of it.
"""

from typing import Protocol

import torch
from torch import Tensor

from headwright.configs import UserError
from headwright.data.batch import to_device
from headwright.data.cache import KVCache
from headwright.data.target import Features, Target, TargetSpec
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

    def logits(self, last_XD: Tensor, ids_W: Tensor | None = None) -> Tensor:
        """Logits from the final state; of some tokens only, if given."""
        ...

    def weights(self) -> int:
        """Bytes that one step reads."""
        ...


class ModelDrafter:
    """Any of these models as a drafter, for chains and trees, greedy and sampled."""

    wants_choices = False
    deepest: int | None = None

    def __init__(self, model: Model, vocabulary: int | Tensor):
        self.model, self.part = model, isinstance(vocabulary, Tensor)
        if isinstance(vocabulary, Tensor):
            self.ids_W = vocabulary
        else:
            self.ids_W = torch.arange(min(vocabulary, model.spec.vocab_size), device=model.device)

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
        if self.part:
            return self.model.logits(last_XD, self.ids_W).float()
        return self.model.logits(last_XD)[..., : len(self.ids_W)].float()

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


def check_same_tokens(model: Target, target: Target) -> None:
    """A draft model must number its tokens as the target does, and reach as far. Raises UserError."""
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
