"""A small causal language model, distilled from the target: the separate draft model that the literature starts from (Leviathan
et al., 2211.17192; DistillSpec, 2310.08461).

It has the target's tokens and reads nothing of its states. It begins as some of the target's own layers, or as any small
model, and learns the target's distributions on the same corpus as a head does.

Shapes: T packed tokens, P computed rows, D its width, W draft vocabulary.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from headwright.configs import UserError
from headwright.data.batch import FeatureBatch
from headwright.data.cache import KVCache
from headwright.data.rows import Rows
from headwright.data.small_model import (
    cut_target,
    description,
    from_description,
    is_tied,
    load_small,
    load_written,
)
from headwright.data.target import Target
from headwright.data.vocab import DraftVocab
from headwright.heads.base import Case, Context, Drafts, Export, Tables
from headwright.heads.draft_tree import Tree, TreeShape
from headwright.heads.model_drafter import ModelDrafter, check_same_tokens
from headwright.heads.plain import Chain
from headwright.heads.stepwise import Stepwise, StepwiseConfig


@dataclass
class Config(StepwiseConfig):
    """Keys of a draft model."""

    kind: Literal["draft_model"] = "draft_model"
    steps: Annotated[int, "always 1: a language model's next guess does not depend on how it got there", Ge(1)] = 1
    model: Annotated[str | None, "hub name or directory of a small model with the target's tokenizer"] = None
    layers: Annotated[int, "without one: how many of the target's layers it begins as, evenly spread", Ge(1)] = 2
    described: Annotated[dict[str, Any], "filled in: the model's own configuration"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.steps != 1:
            raise UserError("head.steps: a draft model learns one step; how far it drafts is decided when it is used")

    def choose_taps(self, layers: int, stored: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """None is read; features keep one at least."""
        return stored[:1] if stored else (layers,)


class Head(Stepwise):
    """The model as a head."""

    config: Config
    small: Target

    def attach(self, target: Target) -> None:
        """Make or load the model."""
        super().attach(target)
        config = self.config
        if config.described:
            small = from_description(config.described, target, "draft model")
        else:
            small = load_small(config.model, target) if config.model else cut_target(target, config.layers)
        check_same_tokens(small, target)
        if int(self.ids_W.max()) >= small.spec.vocab_size:
            raise UserError(
                f"head.model {config.model}: has rows for {small.spec.vocab_size} tokens, and the draft vocabulary reaches to "
                f"token {int(self.ids_W.max())}: set vocab.size, so that it holds tokens of the text alone"
            )
        config.described = description(small)
        object.__setattr__(self, "small", small)
        self.model = small.model.requires_grad_(True).to(target.device)
        small.model.get_input_embeddings().padding_idx = None  # it would keep a token of real texts from learning
        self.tied = is_tied(small)

    def initialise(self, target: Target) -> None:
        """The model begins as it was made."""

    # Tied tensors are kept once

    def tied_name(self, prefix: str = "") -> str | None:
        """The name of the lm_head that is the embedding."""
        if not self.tied:
            return None
        head = self.small.lm_head
        return prefix + "model." + next(name for name, part in self.model.named_modules() if part is head) + ".weight"

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """Without the copy of a tied tensor."""
        found: dict[str, Any] = super().state_dict(*args, **options)
        name = self.tied_name(options.get("prefix", ""))
        return {key: value for key, value in found.items() if key != name}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """The inverse."""
        name = self.tied_name()
        embedding = self.small.model.get_input_embeddings()
        source = next(key for key, part in self.model.named_modules() if part is embedding)
        restored = state_dict if name is None else {**state_dict, name: state_dict[f"model.{source}.weight"]}
        return super().load_state_dict(restored, strict, assign)

    # Training

    def projections(self, target: Target) -> list[Tensor]:
        """Its own lm_head's rows of the draft vocabulary."""
        weight = self.small.lm_head.weight
        return [weight[: len(self.ids_W)] if self.vocab.full else weight[self.ids_W]]

    def outputs(self, batch: FeatureBatch, target: Target, plan: Rows) -> list[Tensor]:
        """Its last state at the token that each row of each step reads; it has read the whole text before."""
        last_TD = self.small.packed(batch.ids_T, batch.segment_T, batch.position_T) * self.small.logit_scale
        end = len(last_TD) - 1
        return [last_TD[(plan.rows_P[:count] + 1 + i).clamp_max(end)] for i, count in enumerate(plan.counts)]

    # Drafting

    def drafter(self) -> ModelDrafter:
        """The model as the decoder's other draft models."""
        return ModelDrafter(self.small, len(self.ids_W) if self.vocab.full else self.ids_W)

    def start(self, batch: int, slots: int) -> KVCache:
        """The model's own cache."""
        return self.drafter().start(batch, slots)

    def absorb(self, state: KVCache, context: Context) -> Tensor:
        """Read the new tokens."""
        return self.drafter().absorb(state, context)

    def propose(self, state: KVCache, context: Context, shape: TreeShape) -> Tree:
        """Read, then draft."""
        return self.drafter().propose(state, context, shape)

    def export(self, engine: str) -> Export:
        """huggingface: a model directory."""
        if engine != "huggingface":
            raise UserError(f"export.engines {engine!r}: a draft model exports as: huggingface")
        tensors = {
            name.removeprefix("model."): value for name, value in self.state_dict().items() if name.startswith("model.")
        }
        shapes = {name: tuple(value.shape) for name, value in tensors.items()}
        config, vocab = dict(self.config.described), self.vocab
        return Export(
            tensors, config, shapes, lambda folder: PlainModel(folder, vocab), launch=launch_lines, shares=False
        )


class PlainModel:
    """A written directory as transformers reads it: no cache, no code of ours."""

    def __init__(self, folder: Path, vocab: DraftVocab):
        self.model, self.ids_W = load_written(str(folder)), vocab.ids_W

    @torch.inference_mode()
    def draft(self, tables: Tables, case: Case, count: int) -> Drafts:
        """`count` greedy tokens after the last of the case's."""
        chain = Chain(case)
        for _ in range(count):
            chain.take(self.model(torch.tensor([chain.tokens])).logits[0, -1, self.ids_W], self.ids_W)
        return chain.drafts()


def launch_lines(target: str, folder: Path, dtype: str) -> str:
    """How engines are started with this model."""
    speculative = json.dumps({"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3})
    return f"""vLLM (0.32 or later; drafts chains):

    vllm serve {target} --speculative-config '{speculative}'

SGLang (0.5.23 or later):

    python -m sglang.launch_server --model-path {target} --dtype {dtype} --speculative-algorithm STANDALONE \\
      --speculative-draft-model-path {folder} \\
      --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4
"""
