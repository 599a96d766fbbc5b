"""EAGLE-3 (arXiv 2503.01840) and 3.1: fused taps, decoder layers over [embedding ; feature], training-time test, reduced
vocabulary.

By default the module computes exactly what vLLM and SGLang compute for `LlamaForCausalLMEagle3`: the residual is the fused
feature before `hidden_norm`, logits come from `norm`, and the state fed to the next step is the one before `norm`. Options
change that; heads/eagle3_export.py knows which engine serves which.

Shapes: B rows, M new rows, T packed tokens, K taps, D target width, H head width, V target vocabulary, W draft vocabulary.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor, nn

from headwright.configs import UserError
from headwright.data.target import Target, TargetSpec
from headwright.data.vocab import DraftVocab
from headwright.heads.base import Export
from headwright.heads.eagle3_export import export_eagle3
from headwright.heads.layers import Attention, Block, RMSNorm, Sizes, SwiGLU
from headwright.heads.recurrent import Recurrent
from headwright.heads.stepwise import SharedOrOwn, StepwiseConfig, shared_rows
from headwright.heads.ttt import PlainLayer


@dataclass
class Config(StepwiseConfig):
    """Keys of an EAGLE-3 head."""

    kind: Literal["eagle3"] = "eagle3"
    taps: Annotated[
        list[int] | Literal["auto"],
        "states that the head fuses, of those harvested; auto: (2, L//2, L-3) where they are there, else all",
    ] = "auto"
    fc_norm: Annotated[bool, "RMSNorm on each tap before they are fused (3.1); taps differ widely in scale"] = True
    norm_before_fc: Annotated[bool, "one RMSNorm over all taps together before they are fused"] = False
    norm_output: Annotated[bool, "the next step reads the state after the final norm (3.1), not the one before"] = False
    norm_before_residual: Annotated[bool, "the residual is the normed feature; vLLM only"] = False
    qk_norm: Annotated[bool, "norm every head's queries and keys, as Qwen3 does; vLLM only"] = False
    layers: Annotated[int, "decoder layers; those after the first read the stream alone", Ge(1)] = 1
    window: Annotated[int | None, "tokens that the head sees; null: all. vLLM only", Gt(1)] = None
    lm_head: Annotated[
        Literal["own", "shared"], "own: starts as the target's rows and is trained; shared: stays these"
    ] = "own"
    hidden_size: Annotated[
        int | None, "width of the head, which then has its own embeddings; default: the target's", Gt(0)
    ] = None
    intermediate_size: Annotated[int | None, "width of the MLP; default: the target's", Gt(0)] = None
    embeddings: Annotated[
        Literal["shared", "own"], "own: trained with the head, and written into its exports; shared: the target's"
    ] = "shared"
    layout: Annotated[dict[str, Any], "filled in by imports: what a head has unlike its target's layers"] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        if self.taps != "auto" and (not self.taps or list(self.taps) != sorted(set(self.taps)) or self.taps[0] < 0):
            raise UserError(f"head.taps {self.taps}: give ascending, distinct numbers (tap i = after i layers)")
        if self.fc_norm and self.norm_before_fc:
            raise UserError("head.norm_before_fc: norms all taps together, head.fc_norm each: set head.fc_norm=false")
        if self.hidden_size and self.lm_head == "shared":
            raise UserError(
                "head.hidden_size: a head of another width cannot share the target's lm_head: head.lm_head=own"
            )
        if self.window is not None and self.window <= self.steps:
            raise UserError(f"head.window {self.window}: must be larger than the rollout (head.steps {self.steps})")

    def choose_taps(self, layers: int, stored: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """The taps of a target of so many layers; of `stored` ones, where features are there already."""
        usual = (2, layers // 2, layers - 3)
        if self.taps != "auto":
            return tuple(self.taps)
        return usual if stored is None or set(usual) <= set(stored) else stored


class Layer(nn.Module):
    """The first decoder layer: attention reads [norm(embedding) ; norm(feature)], the residual is the feature itself."""

    def __init__(self, sizes: Sizes, norm_before_residual: bool = False):
        super().__init__()
        self.self_attn = Attention(2 * sizes.width, sizes)
        self.mlp = SwiGLU(sizes.width, sizes.inner)
        self.input_layernorm = RMSNorm(sizes.width, sizes.eps)
        self.hidden_norm = RMSNorm(sizes.width, sizes.eps)
        self.post_attention_layernorm = RMSNorm(sizes.width, sizes.eps)
        self.norm_before_residual = norm_before_residual

    def mix(self, embedding_XH: Tensor, feature_XH: Tensor) -> Tensor:
        """The attention's input [..., 2H]."""
        return torch.cat([self.embedded(embedding_XH.to(feature_XH.dtype)), self.normed(feature_XH)], dim=-1)

    def embedded(self, embedding_XH: Tensor) -> Tensor:
        """Its token half."""
        return self.input_layernorm(embedding_XH)

    def normed(self, feature_XH: Tensor) -> Tensor:
        """Its feature half."""
        return self.hidden_norm(feature_XH)

    def finish(self, feature_XH: Tensor, mixed_XQE: Tensor) -> Tensor:
        """Output projection, residual, MLP, residual."""
        residual_XH = self.hidden_norm(feature_XH) if self.norm_before_residual else feature_XH
        middle_XH = residual_XH + self.self_attn.output(mixed_XQE)
        return middle_XH + self.mlp(self.post_attention_layernorm(middle_XH))


class Head(Recurrent):
    """The trainable head."""

    config: Config

    def __init__(self, config: Config, spec: TargetSpec, taps: tuple[int, ...], vocab: DraftVocab):
        super().__init__(config, spec, taps, vocab)
        sizes = Sizes.of(spec, config.hidden_size, config.intermediate_size, config.qk_norm, config.layout)
        self.sizes, self.window, self.deepest = sizes, config.window, config.window  # a draft sees all of itself
        self.fc = nn.Linear(len(taps) * spec.hidden_size, sizes.width, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(spec.hidden_size, sizes.eps) for _ in taps)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(len(taps) * spec.hidden_size, sizes.eps)
        self.midlayer = Layer(sizes, config.norm_before_residual)
        if config.layers > 1:
            self.layers = nn.ModuleList(Block(sizes) for _ in range(config.layers - 1))
        self.norm = RMSNorm(sizes.width, sizes.eps)
        self.lm_head = SharedOrOwn(config.lm_head == "own", sizes.width, vocab)
        self.own_embedding = sizes.width != spec.hidden_size or config.embeddings == "own"
        if self.own_embedding:
            self.embed_tokens = nn.Embedding(spec.vocab_size, sizes.width)

    @property
    def stack(self) -> list[PlainLayer]:
        """The first layer, and those above it."""
        return [self.midlayer, *(self.layers if self.config.layers > 1 else ())]  # type: ignore[list-item]

    @torch.no_grad()
    def initialise(self, target: Target) -> None:
        """The lm_head starts from the target's rows of the draft vocabulary, embeddings of its own from the target's. Of
        another width, both start from their main components.
        """
        self.lm_head.initialise(target, self.ids_W)
        if not self.own_embedding:
            return
        rows_VD = target.embed(torch.arange(self.spec.vocab_size, device=target.device))
        if self.sizes.width == self.spec.hidden_size:
            self.embed_tokens.weight.copy_(rows_VD)
        elif self.lm_head.weight is not None:
            self.embed_tokens.weight.copy_(main_components(rows_VD, self.sizes.width))
            self.lm_head.weight.copy_(main_components(shared_rows(target, self.ids_W), self.sizes.width))

    def embed(self, target: Target, ids_X: Tensor) -> Tensor:
        """The target's embeddings, or the head's own where its width differs."""
        return self.embed_tokens(ids_X) if self.own_embedding else target.embed(ids_X)

    def read(self, taps_XKD: Tensor, target: Target) -> Tensor:
        """The fused taps."""
        return self.fuse(taps_XKD)

    def fuse(self, taps_XKD: Tensor) -> Tensor:
        """Taps → one feature [..., H]."""
        if self.config.fc_norm:
            normed = [norm(taps_XKD[..., k, :]) for k, norm in enumerate(self.fc_norm)]
            return self.fc(torch.cat(normed, dim=-1))
        flat = taps_XKD.flatten(-2)
        return self.fc(self.input_norm(flat) if self.config.norm_before_fc else flat)

    def feed(self, hidden_XH: Tensor) -> Tensor:
        """The output before the final norm, or after it."""
        return self.norm(hidden_XH) if self.config.norm_output else hidden_XH

    def ready(self, hidden_XH: Tensor) -> Tensor:
        """After the final norm."""
        return self.norm(hidden_XH)

    def export(self, engine: str) -> Export:
        """portable: one directory for vLLM and SGLang; vllm: also what only vLLM computes."""
        return export_eagle3(self, engine)


def main_components(rows_VD: Tensor, width: int) -> Tensor:
    """Rows projected on their `width` main directions [V, width]; zeros beyond D."""
    rows_VD = rows_VD.float()
    found = torch.linalg.eigh(rows_VD.T @ rows_VD).eigenvectors.flip(1)[:, :width]
    projected = rows_VD @ found
    return torch.nn.functional.pad(projected, (0, width - projected.shape[1]))
