"""Medusa heads with the class of PyPI medusa-llm 0.1, saved as the official training scripts save them.

Usage: OMP_NUM_THREADS=1 .peers/medusa/bin/python scripts/foreign_heads/peer_medusa.py tests/foreign
(.peers/medusa: torch 2.13.0, medusa-llm 0.1 without dependencies, transformers 4.53.1)

The state dict of MedusaModel.medusa_head and MedusaConfig.save_pretrained, with the last lines of the official training
scripts: save_file to medusa_lm_head.safetensors and version "2" (repository, commit e2a5d20), or torch.save to
medusa_lm_head.pt (release 0.1). Heads of two layers go the second way: the class repeats one ResBlock, so that its
tensors share memory, and save_file refuses them.

Stand-ins: there is no tokenizer, and the target's body answers with the given states; the heads read nothing else.
The answers are MedusaModel.forward's: its logits of the last row, one row a head, and their best tokens.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from common import LAYERS, LLAMA, MARGIN, fill, keep_only, make_question, parse_output, write_expected
from safetensors.torch import load_file, save_file
from torch import Tensor

HEADS = 3
TARGET = "tiny-target"

# name: (ResBlocks a head, the file, the seed)
VARIANTS = {
    "medusa": (1, "medusa_lm_head.safetensors", 0),
    "medusa-pt": (1, "medusa_lm_head.pt", 0),
    "medusa-two_layers": (2, "medusa_lm_head.pt", 0),
}


def make_model(layers: int, question: dict[str, Tensor]) -> Any:
    """MedusaModel on a target whose last states are the question's."""
    import medusa.model.medusa_model as package
    from transformers import LlamaConfig

    package.AutoTokenizer = SimpleNamespace(from_pretrained=lambda _name: None)
    target = package.KVLlamaForCausalLM(LlamaConfig(**LLAMA | {"num_hidden_layers": LAYERS}))
    target.lm_head.weight.data = question["lm_head"].clone()
    target.model.forward = lambda **_arguments: (question["last"][None],)
    return package.MedusaModel(target, HEADS, layers, TARGET).eval()


def save(model: Any, folder: Path, layers: int, file: str) -> None:
    from medusa.model.medusa_model import MedusaConfig

    safe = file.endswith(".safetensors")
    version = {"version": "2"} if safe else {}
    config = MedusaConfig(medusa_num_heads=HEADS, medusa_num_layers=layers, base_model_name_or_path=TARGET, **version)
    config.save_pretrained(folder)
    (save_file if safe else torch.save)(model.medusa_head.state_dict(), folder / file)
    keep_only(folder, "config.json", file)


def answer(model: Any, question: dict[str, Tensor]) -> dict[str, Tensor]:
    logits = model(input_ids=question["following"][None])[:, 0, -1].clone()
    best = logits.topk(2).values
    if (best[:, 0] - best[:, 1]).min() < MARGIN:
        raise ValueError("a head is nearly undecided: take another seed")
    drafts = logits.argmax(-1)
    if len(set(drafts.tolist())) < HEADS:
        raise ValueError("the drafts are too much alike: take another seed")
    return {"logits": logits, "drafts": drafts}


def make(output: Path, name: str, seed: int) -> None:
    layers, file, _ = VARIANTS[name]
    question = make_question(seed, "last")
    model = make_model(layers, question)
    fill(model.medusa_head, seed)
    save(model, output / name, layers, file)
    again = make_model(layers, question)
    read = load_file if file.endswith(".safetensors") else torch.load
    again.medusa_head.load_state_dict(read(output / name / file))
    write_expected(output / name, question, answer(again, question))


if __name__ == "__main__":
    output = parse_output(__doc__)
    for name, (*_, seed) in VARIANTS.items():
        make(output, name, seed)
