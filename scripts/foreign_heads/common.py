"""What the makers of foreign heads share: the sizes, the target's side of the question, and the file of answers.

Each maker runs in its own peer's environment, so this imports torch, safetensors and the standard library alone.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

HIDDEN, VOCABULARY, DRAFT_VOCABULARY, LAYERS = 32, 272, 100, 8
ROWS, DRAFTS = 9, 4
MARGIN = 1e-2  # of the best logit over the second: no rounding turns a draft

LLAMA = {
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def parse_output(description: str | None) -> Path:
    """The one argument: the folder that takes the directories."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("output", type=Path)
    output: Path = parser.parse_args().output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    return output


def make_question(seed: int, *names: str) -> dict[str, Tensor]:
    """The target's side: row t holds the states at position t and the token that comes after it."""
    g = torch.Generator().manual_seed(seed)
    shapes = {
        "taps": (ROWS, 3, HIDDEN),
        "last": (ROWS, HIDDEN),
        "embedding": (VOCABULARY, HIDDEN),
        "lm_head": (VOCABULARY, HIDDEN),
    }
    question = {"following": torch.randint(VOCABULARY, (ROWS,), generator=g)}
    for name, shape in shapes.items():
        tensor = torch.randn(shape, generator=g)
        if name in names or name in ("embedding", "lm_head"):
            # What a bfloat16 file keeps as it is, so that a trainer's own rounding changes nothing.
            question[name] = (0.3 * tensor if name == "lm_head" else tensor).bfloat16().float()
    return question


def make_draft_ids(seed: int) -> Tensor:
    """The target's ids of the draft vocabulary, sorted."""
    g = torch.Generator().manual_seed(seed)
    return torch.randperm(VOCABULARY, generator=g)[:DRAFT_VOCABULARY].sort().values


def make_vocabulary_maps(ids: Tensor) -> tuple[Tensor, Tensor]:
    """t2d, a mask over the target's ids, and d2t, what to add to a draft id."""
    return torch.zeros(VOCABULARY, dtype=torch.bool).scatter_(0, ids, True), ids - torch.arange(len(ids))


@torch.no_grad()
def fill(module: nn.Module, seed: int, keep: tuple[str, ...] = ()) -> None:
    """Random weights: norms around 1, biases and matrices around 0."""
    g = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        if name in keep:
            continue
        if "norm" in name:
            weight.copy_(0.5 + torch.rand(weight.shape, generator=g))
        else:
            weight.copy_(0.2 * torch.randn(weight.shape, generator=g))


@torch.no_grad()
def draft_greedily(step: Callable[[list[int]], tuple[Tensor, Tensor]], d2t: Tensor | None) -> dict[str, Tensor]:
    """The answers. `step` computes the newest row's logits and state after the tokens drafted so far."""
    drafts: list[int] = []
    answers: dict[str, Tensor] = {}
    for _ in range(DRAFTS):
        logits, state = step(drafts)
        first, second = logits.topk(2).values.tolist()
        if first - second < MARGIN:
            raise ValueError(f"draft {len(drafts)} is nearly a tie: take another seed")
        if not answers:
            answers = {"logits": logits, "state": state}
        best = int(logits.argmax())
        drafts.append(best if d2t is None else best + int(d2t[best]))
    if len(set(drafts)) < 3:
        raise ValueError(f"the drafts {drafts} are too much alike: take another seed")
    return answers | {"drafts": torch.tensor(drafts)}


def write_expected(folder: Path, question: dict[str, Tensor], answers: dict[str, Tensor]) -> None:
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in (question | answers).items()}
    save_file(tensors, folder / "expected.safetensors")
    print(f"{folder.name}: drafts {answers['drafts'].tolist()}")


def keep_only(folder: Path, *names: str) -> None:
    """Drop what is neither the configuration nor weights."""
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
