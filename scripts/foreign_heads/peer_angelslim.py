"""EAGLE-3 heads as AngelSlim 0.5.0's trainer saves them, with what its own modules compute.

Usage: OMP_NUM_THREADS=1 .peers/angelslim/bin/python scripts/foreign_heads/peer_angelslim.py tests/foreign
(.peers/angelslim: torch 2.13.0, angelslim 0.5.0 without dependencies, transformers 5.14.1, accelerate)

Its create_draft_model makes the training class, always in bfloat16; "angelslim" is made float32 before it is saved.
OfflineEagle3Trainer.save_model writes it, with the Hugging Face trainer underneath. The answers come from the file read
back into that class in float32 (its inference class fails on the configuration that it writes, under the transformers 5
that it asks for), rolled out as the trainer does: all rows at once, each step's keys and values kept in cache_hidden.

Stand-ins: the packages whose __init__ would import the whole toolkit are registered bare, and angelslim.utils has only
rank0_print.
"""

import importlib.util
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch
from common import (
    DRAFT_VOCABULARY,
    DRAFTS,
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
from safetensors.torch import load_file
from torch import Tensor

# name: (what the file holds, the seed)
VARIANTS = {"angelslim": (torch.float32, 0), "angelslim-bfloat16": (torch.bfloat16, 0)}


def register_bare_packages() -> None:
    """Packages with the right search paths, in place of those that import everything."""
    spec = importlib.util.find_spec("angelslim")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    inner = "compressor.speculative"
    names = ["", "utils", "compressor", inner, f"{inner}.train", f"{inner}.train.models", f"{inner}.train.trainer"]
    for name in [*names, f"{inner}.train.data"]:
        package = ModuleType(".".join(["angelslim", *name.split(".")]).rstrip("."))
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[package.__name__] = package
    sys.modules["angelslim.utils"].rank0_print = print


def make_model(work: Path, question: dict[str, Tensor], dtype: torch.dtype, seed: int) -> Any:
    """Their training class with the configuration that their users give, as in its configs of the Qwen3 drafts."""
    from angelslim.compressor.speculative.train.models.draft import DraftModelConfig, create_draft_model

    more = {"architectures": ["Eagle3LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"}
    more |= {"rope_scaling": None, "draft_vocab_size": DRAFT_VOCABULARY}
    write_json(work / "draft.json", LLAMA | more)
    model = create_draft_model(DraftModelConfig.from_file(work / "draft.json"))
    fill(model, seed)
    model.embed_tokens.weight.data = question["embedding"].bfloat16()
    t2d, d2t = make_vocabulary_maps(make_draft_ids(seed))
    model.t2d.copy_(t2d)
    model.d2t.copy_(d2t)
    return model.to(dtype)


def save(model: Any, work: Path, folder: Path) -> None:
    from angelslim.compressor.speculative.train.trainer.offline_eagle3_trainer import OfflineEagle3Trainer
    from transformers import TrainingArguments

    arguments = TrainingArguments(output_dir=str(work), use_cpu=True, report_to="none")
    OfflineEagle3Trainer(model, target_head=None, length=DRAFTS, args=arguments).save_model(str(folder))
    keep_only(folder, "config.json", "model.safetensors")


def load(folder: Path) -> Any:
    """The saved head in their training class, in float32."""
    from angelslim.compressor.speculative.train.models.draft import DraftModelConfig
    from angelslim.compressor.speculative.train.models.draft.llama_eagle3 import Eagle3LlamaForCausalLM

    model = Eagle3LlamaForCausalLM(DraftModelConfig.from_file(folder / "config.json"))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()


@torch.no_grad()
def answer(model: Any, question: dict[str, Tensor]) -> dict[str, Tensor]:
    """The trainer's rollout (draft_model_training_time_test), where the last row's next token is its own draft."""
    state = model.combine_hidden_states(question["taps"].flatten(1)[None])
    everything, positions = torch.ones(1, ROWS, dtype=torch.bool), torch.arange(ROWS)[None]
    mask = model.prepare_decoder_attention_mask(everything, (1, ROWS), state, 0)
    cache: Any = [[], []]

    def step(drafts: list[int]) -> tuple[Tensor, Tensor]:
        nonlocal state, cache
        tokens = torch.cat([question["following"], torch.tensor(drafts, dtype=torch.long)])[-ROWS:]
        state, cache = model.encode_layers(model.embed_input_ids(tokens[None]), state, cache, mask, positions, True)
        return model.compute_logits(state)[0, -1], state[0, -1]

    return draft_greedily(step, model.d2t)


def make(output: Path, name: str, seed: int) -> None:
    dtype, _ = VARIANTS[name]
    question = make_question(seed, "taps")
    with TemporaryDirectory() as work:
        model = make_model(Path(work), question, dtype, seed)
        save(model, Path(work), output / name)
    write_expected(output / name, question, answer(load(output / name), question))


if "angelslim" not in sys.modules:
    register_bare_packages()

if __name__ == "__main__":
    output = parse_output(__doc__)
    for name, (*_, seed) in VARIANTS.items():
        make(output, name, seed)
