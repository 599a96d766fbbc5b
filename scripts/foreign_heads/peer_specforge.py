"""EAGLE-3 heads as SpecForge 0.2.0 exports them, with what its own modules compute.

Usage: OMP_NUM_THREADS=1 .peers/specforge/bin/python scripts/foreign_heads/peer_specforge.py tests/foreign
(after `bash scripts/bench_peers.sh specforge`)

A checkpoint such as its trainer writes (training_state.pt, without the frozen embedding) goes through its own exporter:
export_to_hf, which keeps the checkpoint's float32 and adds the embedding, or export_to_sglang, which rounds to bfloat16
and leaves the embedding out. The answers come from the exported directory, read back into its class in float32 and
rolled out as OnlineEagle3Model does: all rows at once, each step's keys and values kept in cache_hidden.
"""

import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # its norms ask for torch.compile

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from common import (
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
    write_json,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

# name: (the options in the draft's configuration, the exporter, the seed)
VARIANTS: dict[str, tuple[dict[str, Any], str, int]] = {
    "specforge": ({}, "hf", 0),
    "specforge-fc_norm": ({"fc_norm": True, "norm_output": True}, "hf", 1),
    "specforge-no_norm_output": ({"fc_norm": True, "norm_output": False}, "hf", 0),
    "specforge-sglang": ({}, "sglang", 0),
}


def write_training_state(work: Path, options: dict[str, Any], question: dict[str, Tensor], seed: int) -> None:
    """The draft's configuration, a checkpoint, and as much of the target as the exporter reads."""
    from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig

    config = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": 100}
    write_json(work / "draft.json", config | options)
    draft = AutoDraftModel.from_config(AutoDraftModelConfig.from_file(str(work / "draft.json")))
    fill(draft, seed)
    t2d, d2t = make_vocabulary_maps(make_draft_ids(seed))
    draft.t2d.copy_(t2d)
    draft.d2t.copy_(d2t)
    state = {name: tensor for name, tensor in draft.state_dict().items() if "embed" not in name}
    torch.save({"draft_state_dict": state, "strategy": "eagle3"}, work / "training_state.pt")
    (work / "target").mkdir()
    save_file({"model.embed_tokens.weight": question["embedding"]}, work / "target" / "model.safetensors")


def export(work: Path, folder: Path, exporter: str) -> None:
    from specforge.export import export_to_hf, export_to_sglang

    arguments = (str(work / "training_state.pt"), str(work / "draft.json"), str(folder))
    if exporter == "hf":
        export_to_hf(*arguments, embedding_source=str(work / "target"))
    else:
        export_to_sglang(*arguments)
    keep_only(folder, "config.json", "model.safetensors")


def load(folder: Path) -> Any:
    """The exported head in float32. Its from_pretrained leaves the rotary tables unset under transformers 5.8.1."""
    from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig

    draft = AutoDraftModel.from_config(AutoDraftModelConfig.from_file(str(folder / "config.json"))).float().eval()
    missing, unexpected = draft.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert set(missing) <= {"embed_tokens.weight"}
    assert not unexpected
    return draft


@torch.no_grad()
def answer(folder: Path, question: dict[str, Tensor]) -> dict[str, Tensor]:
    """Its rollout, where the last row's next token is its own draft."""
    draft = load(folder)
    draft.embed_tokens.weight.data = question["embedding"]
    positions = torch.arange(ROWS)[None]
    state = draft.project_hidden_states(question["taps"].flatten(1)[None])
    everything = torch.ones(1, ROWS, dtype=torch.bool)
    mask = draft.prepare_decoder_attention_mask(everything, state, 1, ROWS, 0)
    cache: Any = [[], []]

    def step(drafts: list[int]) -> tuple[Tensor, Tensor]:
        nonlocal state
        tokens = torch.cat([question["following"], torch.tensor(drafts, dtype=torch.long)])[-ROWS:]
        state = draft.backbone(draft.embed_input_ids(tokens[None]), state, cache, mask, positions)
        return draft.compute_logits(state)[0, -1], state[0, -1]

    return draft_greedily(step, draft.d2t)


def make(output: Path, name: str, seed: int) -> None:
    options, exporter, _ = VARIANTS[name]
    question = make_question(seed, "taps")
    with TemporaryDirectory() as work:
        write_training_state(Path(work), options, question, seed)
        export(Path(work), output / name, exporter)
    write_expected(output / name, question, answer(output / name, question))


if __name__ == "__main__":
    folder = parse_output(__doc__)
    for name, (*_, seed) in VARIANTS.items():
        make(folder, name, seed)
