"""A LoRA adapter on the target, trained together with a head (Medusa-2, arXiv 2401.10774). By peft.

The target is adapted in place, and its text may change: whoever measures such a head says so.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt
from torch import Tensor, nn

from headwright.configs import UserError
from headwright.data.target import Target

LABEL = "headwright"


@dataclass
class AdapterConfig:
    """LoRA on the target: first the heads alone, then both."""

    rank: Annotated[int, "rank of the update", Ge(1)] = 32
    alpha: Annotated[int, "its scale: alpha / rank", Gt(0)] = 16
    dropout: Annotated[float, "of what the update reads, while it is trained", Ge(0), Lt(1)] = 0.05
    modules: Annotated[list[str], "names of the linear layers that are adapted"] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    joint_from: Annotated[float, "share of the training after which the adapter is trained too", Ge(0), Lt(1)] = 0.5
    rate: Annotated[float, "its learning rate, in rates of the run: the heads learn four times as fast", Gt(0)] = 0.25
    heads_weight: Annotated[
        float, "λ: weight of the heads' loss beside the distillation, at the end of the ramp", Gt(0)
    ] = 0.2
    ramp: Annotated[Literal["constant", "sine"], "how λ comes to its weight from joint_from on"] = "sine"
    distil: Annotated[float, "weight of KL(the target as it was ‖ the adapted one)", Ge(0)] = 1.0
    text: Annotated[float, "weight of the cross-entropy of the text that the target would have said", Ge(0)] = 0.0


def adapted_names(config: AdapterConfig, target: Target) -> list[str]:
    """The target's linear layers that the config names, in full. Raises UserError for a name that none has."""
    inside = next(name for name, part in target.model.named_modules() if part is target.body.layers)
    linear = [
        name
        for name, part in target.model.named_modules()
        if name.startswith(f"{inside}.") and isinstance(part, nn.Linear)
    ]
    kinds = sorted({name.rpartition(".")[2] for name in linear})
    for wanted in config.modules:
        if wanted not in kinds:
            raise UserError(
                f"head.adapter.modules: {wanted!r} is no linear layer of the target's: there are {', '.join(kinds)}"
            )
    if not config.modules:
        raise UserError(f"head.adapter.modules is empty: give some of {', '.join(kinds)}")
    return [name for name in linear if name.rpartition(".")[2] in config.modules]


class Adapter(nn.Module):
    """The trainable matrices of a LoRA adapter, which lie in the target's layers."""

    def __init__(self, config: AdapterConfig, target: Target):
        super().__init__()
        from peft import LoraConfig, inject_adapter_in_model

        self.config = config
        target.want_layers("head.adapter")
        names = adapted_names(config, target)
        self.lora = LoraConfig(
            r=config.rank, lora_alpha=config.alpha, lora_dropout=config.dropout, target_modules=names
        )
        inject_adapter_in_model(self.lora, target.model, LABEL)
        self.parts = nn.ModuleDict()
        for name in names:
            layer = target.model.get_submodule(name)
            sides = {"A": layer.lora_A[LABEL], "B": layer.lora_B[LABEL], "dropout": layer.lora_dropout[LABEL]}
            self.parts[name.replace(".", "/")] = nn.ModuleDict(sides)
            target.adapted[name] = layer.base_layer
        target.model.eval()
        self.requires_grad_(True)

    def strength(self, progress: float) -> float:
        """λ at a point of the training."""
        config = self.config
        if config.ramp == "constant":
            return config.heads_weight
        share = (progress - config.joint_from) / (1 - config.joint_from)
        return config.heads_weight * math.sin(math.pi / 2 * min(max(share, 0.0), 1.0))

    def joint(self, progress: float) -> bool:
        """Whether the adapter is being trained."""
        return progress >= self.config.joint_from

    def save(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """As peft and engines read it: adapter_config.json and adapter_model.safetensors. `weights`: the head's state."""
        from headwright.data.store import replace_with, save_tensors, write_json

        folder.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for name, _ in self.parts.named_children():
            for side in "AB":
                weight = weights[f"adapter.parts.{name}.{side}.weight"]
                tensors[f"base_model.model.{name.replace('/', '.')}.lora_{side}.weight"] = weight
        replace_with(folder / "adapter_model.safetensors", lambda path: save_tensors(tensors, path, {"format": "pt"}))
        described = {
            key: sorted(value) if isinstance(value, set) else value for key, value in self.lora.to_dict().items()
        }
        write_json(folder / "adapter_config.json", described | {"inference_mode": True})
