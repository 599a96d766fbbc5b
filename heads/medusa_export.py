"""What vLLM loads for Medusa heads (0.32: a chain of each head's first choice). SGLang serves none."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from headwright.configs import UserError
from headwright.heads.base import Case, Drafts, Export, Tables
from headwright.heads.engine_tables import Shapes

if TYPE_CHECKING:
    from headwright.heads.medusa import Head


def export_medusa(head: "Head", engine: str) -> Export:
    """The directory. Raises UserError for another engine."""
    if engine != "vllm":
        raise UserError(f"export.engines {engine!r}: Medusa heads export as: vllm (no other engine serves them)")
    width, count = head.spec.hidden_size, len(head.vocab)
    tensors: dict[str, Tensor] = {}
    shapes: Shapes = {}
    for name, tensor in head.heads.state_dict().items():
        number, block, _, kind = name.split(".")
        tensors[f"blocks.{number}.layers.{block}.{kind}"] = tensor
        shapes[f"blocks.{number}.layers.{block}.{kind}"] = (width, width) if kind == "weight" else (width,)
    for name, tensor in head.lm_heads.state_dict().items():
        tensors[f"lm_heads.{name}"] = tensor
    shapes |= {f"lm_heads.{number}.weight": (count, width) for number in range(len(head.lm_heads))}
    if not head.vocab.full:
        tensors["token_map"], shapes["token_map"] = head.vocab.ids_W, (count,)
    shared = {"lm_heads.0.weight": head.vocab.ids_W} if head.config.lm_head == "shared" else {}
    launch = launch_lines(head.config.steps)
    return Export(tensors, medusa_config(head), shapes, PlainMedusa, launch, from_target=shared, warnings=notes(head))


def notes(head: "Head") -> list[str]:
    """What to know before serving."""
    if head.changes_target() is None:
        return []
    return [
        "these heads belong to an adapted target: merge head/adapter into it (peft) and serve that, not the original"
    ]


def medusa_config(head: "Head") -> dict[str, Any]:
    """config.json. vLLM renames keys with `num` and `heads` or `layers` in them, so none but its own may be there."""
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": head.spec.hidden_size,
        "vocab_size": head.spec.vocab_size,
        "num_heads": head.config.steps,
        "num_hidden_layers": head.config.blocks,
        "medusa_fc_bias": head.config.bias,
        "original_lm_head": head.config.lm_head == "shared",
    }
    return config if head.vocab.full else config | {"truncated_vocab_size": len(head.vocab)}


class PlainMedusa:
    """An independent reader: plain tensors, nothing of the trainer's module."""

    def __init__(self, folder: Path):
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.w = load_file(folder / "model.safetensors")

    def draft(self, tables: Tables, case: Case, count: int) -> Drafts:
        """Each head's first choice."""
        tokens, scores = [], [0.0]
        for number in range(min(count, self.config["num_heads"])):
            x = case.last_TD[-1]
            for block in range(self.config["num_hidden_layers"]):
                name = f"blocks.{number}.layers.{block}"
                inner = self.w[f"{name}.weight"].float() @ x
                if self.config["medusa_fc_bias"]:
                    inner = inner + self.w[f"{name}.bias"].float()
                x = x + inner * torch.sigmoid(inner)
            logits = self.w[f"lm_heads.{0 if self.config['original_lm_head'] else number}.weight"].float() @ x
            best = int(logits.argmax())
            scores.append(scores[-1] + float(logits.log_softmax(-1)[best]))
            tokens.append(int(self.w["token_map"][best]) if "token_map" in self.w else best)
        return Drafts(tokens, scores[1:])


def launch_lines(heads: int) -> Callable[[str, Path, str], str]:
    """How vLLM is started with these heads."""

    def lines(target: str, folder: Path, dtype: str) -> str:
        speculative = json.dumps({"method": "medusa", "model": str(folder), "num_speculative_tokens": heads})
        return f"""vLLM (0.32 or later; drafts chains, of the first guesses alone):

    vllm serve {target} --speculative-config '{speculative}'
"""

    return lines
