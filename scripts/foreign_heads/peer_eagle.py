"""EAGLE-1 heads as SafeAILab's own trainer saves them (PyPI eagle-llm 1.2.1), with what its own generate drafts.

Usage: OMP_NUM_THREADS=1 .peers/eagle/bin/python scripts/foreign_heads/peer_eagle.py tests/foreign
(.peers/eagle: torch 2.13.0, eagle-llm 1.2.1 without dependencies, transformers 4.53.1, accelerate)

eagle.model.cnets.Model saved by accelerate's save_state, as eagle/train/main.py does; beside it the configuration that
the trainer was started with, which its users copy there. The answers come from Model.generate on the file read back.
"""

from pathlib import Path
from typing import Any

import torch
from common import LLAMA, draft_greedily, fill, keep_only, make_question, parse_output, write_expected, write_json
from safetensors.torch import load_file
from torch import Tensor

# name: (whether fc has a bias, the seed)
VARIANTS = {"eagle": (True, 0), "eagle-no_bias": (False, 0)}


def write_config(folder: Path, bias: bool) -> None:
    """The keys of its eagle/train/llama_2_chat_7B_config.json, or EAGLE-LLaMA3-Instruct-8B.json, which has no bias."""
    folder.mkdir(exist_ok=True)
    config = {name: value for name, value in LLAMA.items() if name not in ("head_dim", "rope_theta")}
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float16"}
    if bias:
        more = {"pretraining_tp": 1, "rms_norm_eps": 1e-6, "rope_scaling": None}
    else:
        more = {"pad_token_id": 0, "rope_theta": 10000.0, "bias": False}
    write_json(folder / "config.json", config | more)


def make_model(folder: Path, bias: bool) -> Any:
    """Their model with the configuration of the folder, as their EaModel makes it."""
    from eagle.model.cnets import Model
    from eagle.model.configs import EConfig

    return Model(EConfig.from_pretrained(folder / "config.json"), bias=bias)


def save(model: Any, folder: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model)
    accelerator.save_state(output_dir=str(folder))
    keep_only(folder, "config.json", "model.safetensors")


def answer(model: Any, question: dict[str, Tensor]) -> dict[str, Tensor]:
    """Its generate asks for the head once a draft, with the newest state."""
    model.eval()
    states: list[Tensor] = []
    logits: list[Tensor] = []

    def head(state: Tensor) -> Tensor:
        states.append(state[0])
        logits.append(state[0] @ question["lm_head"].T)
        return logits[-1][None]

    # It drops the first token: row t takes the one after it.
    tokens = torch.cat([torch.zeros(1, dtype=torch.long), question["following"]])[None]

    def step(drafts: list[int]) -> tuple[Tensor, Tensor]:
        whole = model.generate(question["last"][None], tokens, head, max_length=len(drafts) + 1, use_cache=True)
        assert whole[tokens.shape[1] : -1] == drafts
        return logits[-1], states[-1]

    return draft_greedily(step, None)


def make(output: Path, name: str, seed: int) -> None:
    folder, (bias, _) = output / name, VARIANTS[name]
    question = make_question(seed, "last")
    write_config(folder, bias)
    model = make_model(folder, bias)
    fill(model, seed)
    model.embed_tokens.weight.data = question["embedding"].clone()
    save(model, folder)
    again = make_model(folder, bias)
    again.load_state_dict(load_file(folder / "model.safetensors"))
    write_expected(folder, question, answer(again, question))


if __name__ == "__main__":
    output = parse_output(__doc__)
    for name, (*_, seed) in VARIANTS.items():
        make(output, name, seed)
