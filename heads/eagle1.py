"""EAGLE-1 (arXiv 2401.15077), whose weights EAGLE-2 decodes with other trees; with HASS (arXiv 2408.15766) as options.

fc [embedding ; feature] → one Llama layer without a norm before its attention, and without one after it → the next feature,
which the target's own lm_head reads. The feature is the target's state after its final norm. Learned by regression of features
(smooth L1), and a token loss on top.

HASS: steps 3, step_weight 1, detach true, loss {kl: 0.1, topk: 1}: the head reads its own features for some steps, each step's
input taken as it is.

Shapes: C context rows, P computed rows, R positions of the target, K taps, D target width.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
import xxhash
from annotated_types import Ge, Gt
from torch import Tensor, nn

from headwright.data.batch import FeatureBatch, to_device
from headwright.data.rows import Rows
from headwright.data.target import Target, TargetSpec
from headwright.data.vocab import DraftVocab
from headwright.heads.base import Context, Export
from headwright.heads.eagle1_export import export_eagle1
from headwright.heads.layers import Block, Sizes
from headwright.heads.losses import LossName, smooth_l1
from headwright.heads.pair import Pair
from headwright.heads.recurrent import Recurrent
from headwright.heads.stepwise import SharedOrOwn, StepwiseConfig
from headwright.heads.ttt import PlainLayer

CODE_LENGTH = (
    512  # the official code's noise is that of the paper for texts of this length, and falls with their length
)


@dataclass
class Config(StepwiseConfig):
    """Keys of an EAGLE-1 head. The token losses' weights stand in `loss`."""

    kind: Literal["eagle1"] = "eagle1"
    steps: Annotated[int, "length of the rollout: 1 is EAGLE-1, 3 HASS", Ge(1)] = 1
    loss: Annotated[
        LossName | dict[LossName, float],
        "token losses and their weights beside the regression; names as for other heads",
    ] = field(default_factory=lambda: {"kl": 0.1})
    feature_weight: Annotated[float, "of the regression of features", Ge(0)] = 1.0
    noise: Annotated[
        Literal["paper", "code", "none"], "on the features that are read: uniform within ±0.1; code: less in long texts"
    ] = "paper"
    noise_scale: Annotated[float, "half the width of the noise", Ge(0)] = 0.1
    detach: Annotated[bool, "a step does not teach the steps before it (HASS)"] = False
    fc_bias: Annotated[bool, "a bias in fc: SGLang reads one, vLLM none"] = False
    intermediate_size: Annotated[int | None, "width of the MLP; default: the target's", Gt(0)] = None
    layout: Annotated[dict[str, Any], "filled in by imports: what a head has unlike its target's layers"] = field(
        default_factory=dict
    )
    out_of_vocab: Annotated[
        Literal["drop", "renormalise"],
        "token losses where the target's first choice is outside the draft vocabulary; drop: no regression there either",
    ] = "renormalise"

    def choose_taps(self, layers: int, stored: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """The stream after the last layer, which the target's final norm turns into the feature."""
        return (layers,)


class Head(Recurrent):
    """The trainable head."""

    config: Config

    def __init__(self, config: Config, spec: TargetSpec, taps: tuple[int, ...], vocab: DraftVocab):
        super().__init__(config, spec, taps, vocab)
        sizes = Sizes.of(spec, inner=config.intermediate_size, layout=config.layout)
        self.sizes = sizes
        self.fc = nn.Linear(2 * sizes.width, sizes.width, bias=config.fc_bias)
        self.layers = nn.ModuleList([Block(sizes, input_norm=False)])
        self.lm_head = SharedOrOwn(False, sizes.width, vocab)
        self.entry = Pair(self.fc)

    @property
    def stack(self) -> list[PlainLayer]:
        """Its layer."""
        return list(self.layers)  # type: ignore[arg-type]

    def read(self, taps_XKD: Tensor, target: Target) -> Tensor:
        """The target's final norm of its last state."""
        return target.final_norm(taps_XKD[..., -1, :])

    def read_context(self, context: Context) -> Tensor:
        """The same, as the target has it already."""
        return context.last_BMD.to(self.fc.weight.dtype)

    def feed(self, hidden_XH: Tensor) -> Tensor:
        """The next step reads the predicted feature."""
        return hidden_XH.detach() if self.config.detach else hidden_XH

    def disturb(self, feature_CH: Tensor, batch: FeatureBatch, plan: Rows) -> Tensor:
        """Uniform noise while training. A function of the batch alone, so that a resumed run repeats it."""
        if self.config.noise == "none" or not self.training:
            return feature_CH
        seed = xxhash.xxh64_intdigest(batch.ids_T.numpy().tobytes()) >> 1
        generator = torch.Generator(feature_CH.device).manual_seed(seed)
        noise_CH = torch.rand(feature_CH.shape, generator=generator, device=feature_CH.device) * 2 - 1
        scale_C1 = self.config.noise_scale * self.noise_share(batch, plan)
        return feature_CH + (noise_CH * scale_C1).to(feature_CH.dtype)

    def noise_share(self, batch: FeatureBatch, plan: Rows) -> Tensor | float:
        """[C, 1] by the length of each row's text, as in the official code; 1 as in the paper."""
        if self.config.noise == "paper":
            return 1.0
        lengths_T = torch.bincount(batch.segment_T)[batch.segment_T].to(torch.float32)
        return CODE_LENGTH / to_device(lengths_T, plan.context_C.device)[plan.context_C, None]

    def extra_loss(
        self, batch: FeatureBatch, target: Target, plan: Rows, outputs: list[Tensor]
    ) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """Regression of the target's features at the positions that are predicted."""
        total, metrics = outputs[0].new_zeros(()), {}
        for i, output in enumerate(outputs):
            feature_NH = batch.last_RD[plan.target_PI[: len(output), i]] if len(batch.last_RD) else output.detach()
            bears_N = plan.bears_PI[: len(output), i]
            apart = (smooth_l1(output, feature_NH.to(output.dtype)) * bears_N).sum()
            total = total + self.config.feature_weight * self.config.step_weight**i * apart
            metrics[f"feature_{i}"] = (apart.detach(), bears_N.sum().to(apart.dtype))
        return total, metrics

    def export(self, engine: str) -> Export:
        """vllm or sglang: their formats differ."""
        return export_eagle1(self, engine)
