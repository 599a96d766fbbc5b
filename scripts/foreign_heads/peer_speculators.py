"""EAGLE-3 heads as speculators 0.9.0 saves them, with what its own forward computes.

Usage: OMP_NUM_THREADS=1 .peers/speculators/bin/python scripts/foreign_heads/peer_speculators.py tests/foreign
(after `bash scripts/bench_peers.sh speculators`)

A tiny target is saved with transformers; Eagle3DraftModel.from_training_args reads it as the trainer would, and the
trainer's own SingleGPUCheckpointer saves the head (float32 instead of its bfloat16, where a variant does not say). All
weights but the frozen embedding are random, also those of the lm_head, which its trainer leaves as the target's rows.
The answers are those of its own forward (training-time test, eager attention), which reads the next tokens from
input_ids: the drafts so far stand there. Rows after the last are padding that no earlier row attends to.
"""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from common import (
    DRAFTS,
    LAYERS,
    LLAMA,
    ROWS,
    draft_greedily,
    fill,
    keep_only,
    make_draft_ids,
    make_question,
    make_vocabulary_maps,
    parse_output,
    write_expected,
)
from torch import Tensor
from torch.nn.functional import pad

TARGET = "tiny-target"  # a relative name: the head's configuration repeats it

# name: (the trainer's options, the kind of layer, what the file holds, the seed)
VARIANTS: dict[str, tuple[dict[str, bool], str, torch.dtype, int]] = {
    "speculators": ({"norm_before_residual": True}, "llama", torch.float32, 0),
    "speculators-raw_residual": ({"norm_before_residual": False}, "llama", torch.float32, 5),
    "speculators-fc_norm": (
        {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
        "llama",
        torch.float32,
        1,
    ),
    "speculators-norm_before_fc": ({"norm_before_residual": False, "norm_before_fc": True}, "llama", torch.float32, 0),
    "speculators-qwen3": ({"norm_before_residual": True}, "qwen3", torch.float32, 2),
    "speculators-bfloat16": ({"norm_before_residual": True}, "llama", torch.bfloat16, 0),
}


def write_target(kind: str, question: dict[str, Tensor]) -> None:
    """What its trainer reads of the verifier: the configuration, the embedding, the final norm and the lm_head."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **LLAMA | {"num_hidden_layers": LAYERS})
    target = AutoModelForCausalLM.from_config(config)
    target.model.embed_tokens.weight.data = question["embedding"]
    target.lm_head.weight.data = question["lm_head"]
    target.save_pretrained(TARGET)


def make_model(options: dict[str, bool], kind: str, seed: int) -> Any:
    """Their draft model as the trainer makes it for this target."""
    from speculators.models.eagle3 import Eagle3DraftModel
    from transformers import AutoConfig

    t2d, d2t = make_vocabulary_maps(make_draft_ids(seed))
    model = Eagle3DraftModel.from_training_args(
        AutoConfig.for_model(kind, **LLAMA),
        t2d=t2d,
        d2t=d2t,
        draft_vocab_size=len(d2t),
        ttt_steps=DRAFTS,
        verifier_name_or_path=TARGET,
        draft_attn_impl="eager",
        **options,
    )
    fill(model, seed, keep=("embed_tokens.weight",))
    return model.eval()


def save(model: Any, folder: Path, dtype: torch.dtype) -> None:
    from speculators.train.checkpointer import SingleGPUCheckpointer

    optimizer = torch.optim.SGD(model.parameters())
    SingleGPUCheckpointer(folder.parent).save_checkpoint(model, optimizer, folder.name, float_dtype=dtype)
    keep_only(folder, "config.json", "model.safetensors")


@torch.no_grad()
def answer(model: Any, question: dict[str, Tensor]) -> dict[str, Tensor]:
    """Step i of the forward: row t reads its own state of step i - 1 and the token i places on."""
    states: list[Tensor] = []
    logits: list[Tensor] = []
    newest = model.norm if model.config.norm_output else model.layers[-1]
    newest.register_forward_hook(lambda _module, _inputs, output: states.append(output[0, ROWS - 1]))
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: logits.append(output[0, ROWS - 1]))
    length = ROWS + DRAFTS
    taps = pad(question["taps"].flatten(1), (0, 0, 0, DRAFTS))[None]

    def step(drafts: list[int]) -> tuple[Tensor, Tensor]:
        states.clear()
        logits.clear()
        tokens = torch.cat([question["following"], torch.tensor(drafts, dtype=torch.long)])
        tokens = pad(tokens, (0, length - len(tokens)))[None]
        documents = torch.zeros(1, length, dtype=torch.long)
        model(taps, tokens, documents, position_ids=torch.arange(length)[None], ttt_steps=len(drafts) + 1)
        return logits[-1], states[-1]

    return draft_greedily(step, model.d2t)


def make(output: Path, name: str, seed: int) -> None:
    options, kind, dtype, _ = VARIANTS[name]
    question = make_question(seed, "taps")
    with TemporaryDirectory() as work:
        os.chdir(work)
        write_target(kind, question)
        model = make_model(options, kind, seed)
        os.chdir(output)
    for weight in model.parameters():
        weight.data = weight.data.to(dtype).float()  # what the file keeps
    save(model, output / name, dtype)
    write_expected(output / name, question, answer(model, question))


if __name__ == "__main__":
    folder = parse_output(__doc__)
    for name, (*_, seed) in VARIANTS.items():
        make(folder, name, seed)
