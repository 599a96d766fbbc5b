"""What engines load for an EAGLE-1 head: vllm and sglang, whose formats differ in one tensor (vLLM 0.32, SGLang 0.5.23).

Both draft over the target's whole vocabulary with the target's lm_head; neither wants it in the file.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwright.configs import UserError
from headwright.heads.base import Case, Drafts, Export, Tables
from headwright.heads.engine_tables import Shapes, layer_shapes, llama_keys
from headwright.heads.plain import Chain, PlainLlama

if TYPE_CHECKING:
    from headwright.heads.eagle1 import Head

ARCHITECTURES = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle"}


def export_eagle1(head: "Head", engine: str) -> Export:
    """The directory of an engine. Raises UserError where it would compute something else."""
    if engine not in ARCHITECTURES:
        raise UserError(f"export.engines {engine!r}: an EAGLE-1 head exports as: {', '.join(ARCHITECTURES)}")
    if engine == "vllm" and head.config.fc_bias:
        raise UserError("export: vLLM's EAGLE-1 has no bias in fc: train with head.fc_bias=false, or export for sglang")
    width = head.sizes.width
    config = llama_keys(head.spec, head.sizes) | {"architectures": [ARCHITECTURES[engine]]}
    shapes: Shapes = {"fc.weight": (width, 2 * width)} | layer_shapes(config, "layers.0", width)
    tensors: dict[str, Tensor] = dict(head.state_dict())
    if engine == "sglang":  # it has the bias in any case, and leaves random memory there where the file has none
        shapes["fc.bias"] = (width,)
        tensors.setdefault("fc.bias", torch.zeros(width))
    ids_W, warnings = head.vocab.ids_W, []
    if not head.vocab.full:
        warnings = [
            f"this head was measured over {len(ids_W)} tokens; the engine drafts over all {head.spec.vocab_size}"
        ]
    return Export(
        tensors, config, shapes, lambda folder: PlainEagle1(folder, ids_W), launch_lines(engine), warnings=warnings
    )


class PlainEagle1(PlainLlama):
    """The head in a directory. `ids_W`: the tokens that it is compared over."""

    def __init__(self, folder: Path, ids_W: Tensor):
        super().__init__(folder)
        self.ids_W = ids_W

    def draft(self, tables: Tables, case: Case, count: int) -> Drafts:
        """`count` greedy tokens after the last of the case's, by full recomputation."""
        feature, chain = case.last_TD, Chain(case)
        for _ in range(count):
            pair = torch.cat([tables.embedding_VD[torch.tensor(chain.tokens)], feature], -1)
            stream = self.linear(pair, "fc")
            hidden = self.layer("layers.0", stream, stream)
            chain.take(tables.lm_head_VD[self.ids_W] @ hidden[-1], self.ids_W)
            feature = torch.cat([feature, hidden[-1:]])
        return chain.drafts()


def launch_lines(engine: str) -> Callable[[str, Path, str], str]:
    """How the engine is started with this head."""

    def lines(target: str, folder: Path, dtype: str) -> str:
        if engine == "vllm":
            speculative = json.dumps({"method": "eagle", "model": str(folder), "num_speculative_tokens": 3})
            return f"vLLM (0.32 or later; drafts chains):\n\n    vllm serve {target} --speculative-config '{speculative}'\n"
        return f"""SGLang (0.5.23 or later; drafts EAGLE-2's trees when `--speculative-eagle-topk` is above 1):

    python -m sglang.launch_server --model-path {target} --dtype {dtype} --speculative-algorithm EAGLE \\
      --speculative-draft-model-path {folder} \\
      --speculative-num-steps 4 --speculative-eagle-topk 4 --speculative-num-draft-tokens 13
"""

    return lines
