"""EAGLE-3 heads with the official class (SafeAILab/EAGLE), with what its own topK_genrate drafts.

Usage: OMP_NUM_THREADS=1 .peers/eagle/bin/python scripts/foreign_heads/peer_eagle3.py tests/foreign
(.peers/eagle as for peer_eagle.py; no package carries the class, so the repository, commit 148042c, has to lie in
.peers/eagle3/EAGLE)

Only eagle/model/cnets.py is loaded from the repository; what it imports from its neighbours comes from the release
eagle-llm 1.2.1. The official trainer ends with DeepSpeed's save_16bit_model(exclude_frozen_parameters=True): the state
dict without the frozen embedding, by torch.save, in float16 ("eagle3-bin"; DeepSpeed itself does not run here). Its
EaModel also reads model.safetensors ("eagle3", in float32). The configuration has the keys of
eagle/traineagle3/config.json. The answers come from topK_genrate with one child a level, on the file read back in
float32, with the target's embedding, as EaModel loads it.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from common import (
    DRAFT_VOCABULARY,
    LLAMA,
    draft_greedily,
    fill,
    make_draft_ids,
    make_question,
    make_vocabulary_maps,
    parse_output,
    write_expected,
    write_json,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

CLASS_FILE = Path(__file__).resolve().parents[2] / ".peers/eagle3/EAGLE/eagle/model/cnets.py"

# name: (the file, what it holds, the seed)
VARIANTS = {
    "eagle3": ("model.safetensors", torch.float32, 1),
    "eagle3-bin": ("pytorch_model.bin", torch.float16, 1),
}


def load_class() -> Any:
    """The official module, as a neighbour of the release's modules."""
    import eagle.model

    name = f"{eagle.model.__name__}.cnets3"
    spec = importlib.util.spec_from_file_location(name, CLASS_FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module.Model


def write_config(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    config = {name: value for name, value in LLAMA.items() if name not in ("head_dim", "rope_theta")}
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float16"}
    write_json(folder / "config.json", config | {"pad_token_id": 0, "draft_vocab_size": DRAFT_VOCABULARY})


def make_model(folder: Path) -> Any:
    from eagle.model.configs import EConfig

    return load_class()(EConfig.from_pretrained(folder / "config.json"), top_k=1).eval()


def save(model: Any, file: Path, dtype: torch.dtype) -> None:
    """The state dict without what is frozen."""
    state = model.state_dict()
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            del state[name]
        else:
            state[name] = state[name].to(dtype)
    if file.suffix == ".bin":
        torch.save(state, file)
    else:
        save_file(state, file)


def answer(model: Any, question: dict[str, Tensor]) -> dict[str, Tensor]:
    """A tree of one child a level is a chain. It drops the first token: row t takes the one after it."""
    states: list[Tensor] = []
    logits: list[Tensor] = []
    model.midlayer.register_forward_hook(lambda _module, _inputs, output: states.append(output[0][0, -1]))
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: logits.append(output[-1]))
    model.init_tree()
    taps = question["taps"].flatten(1)[None]
    tokens = torch.cat([torch.zeros(1, dtype=torch.long), question["following"]])[None]

    def step(drafts: list[int]) -> tuple[Tensor, Tensor]:
        model.reset_kv()
        model.depth, model.total_tokens = len(drafts), len(drafts) + 1
        tree = model.topK_genrate(taps, tokens, None, None)[0][0].tolist()
        assert tree[1:-1] == drafts
        return logits[-1], states[-1]

    return draft_greedily(step, model.d2t)


def make(output: Path, name: str, seed: int) -> None:
    (file, dtype, _), folder = VARIANTS[name], output / name
    question = make_question(seed, "taps")
    write_config(folder)
    model = make_model(folder)
    fill(model, seed, keep=("embed_tokens.weight",))
    t2d, d2t = make_vocabulary_maps(make_draft_ids(seed))
    model.t2d.copy_(t2d)
    model.d2t.copy_(d2t)
    save(model, folder / file, dtype)
    again = make_model(folder)
    again.embed_tokens.weight.data = question["embedding"].clone()
    read = torch.load if file.endswith(".bin") else load_file
    missing, unexpected = again.load_state_dict(read(folder / file), strict=False)
    assert missing == ["embed_tokens.weight"]
    assert not unexpected
    write_expected(folder, question, answer(again, question))


if __name__ == "__main__":
    output = parse_output(__doc__)
    for name, (*_, seed) in VARIANTS.items():
        make(output, name, seed)
