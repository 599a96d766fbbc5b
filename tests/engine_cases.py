"""Small targets and trained heads of every kind that engines serve, for the proofs against real engines.

A target's weights come from integers, so that every machine has the same; the heads were trained once and lie in tests/golden
as exports, with the counters that the real engine showed. `python tests/engine_cases.py [NAME …]` trains them anew, and
`python tests/engine_cases.py --engine-python PATH` records what vLLM counts.
"""

import argparse
import copy
import json
import shutil
import tempfile
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch
import transformers
from conftest import fit, make_tokenizer
from torch import Tensor

from headwright.configs.load import build
from headwright.data.batch import DocumentFeatures
from headwright.data.generate import read_documents
from headwright.data.store import write_json
from headwright.data.target import Target
from headwright.data.vocab import DraftVocab
from headwright.eval.decode import decode_plain
from headwright.eval.prove import Counters, ask_engine, chain_counters, engine_job
from headwright.heads import get_head
from headwright.heads.base import DraftHead, make_head
from headwright.heads.export import filled, with_dtype, write_directory
from headwright.heads.saved import load_head

GOLDEN = Path(__file__).parent / "golden"
VOCAB, PROMPTS, PROMPT, NEW, K = 272, 6, 12, 24, 3
TAPS3, TAPS4 = (2, 4, 5), (1, 2, 4, 5)

# name: target, taps, size of the draft vocabulary, head, export engine
CASES: dict[str, tuple[str, tuple[int, ...], int | None, dict, str]] = {
    "eagle1": ("llama", (8,), None, {"kind": "eagle1"}, "vllm"),
    "eagle3": ("llama", TAPS3, 128, {"kind": "eagle3"}, "portable"),
    "eagle3-full-vocabulary": ("llama", TAPS3, None, {"kind": "eagle3", "norm_output": True}, "portable"),
    "eagle3-four-taps": ("llama", TAPS4, 128, {"kind": "eagle3", "fc_norm": False}, "portable"),
    "eagle3-two-layers": ("llama", TAPS3, None, {"kind": "eagle3", "layers": 2, "lm_head": "shared"}, "portable"),
    "eagle3-residual": (
        "llama",
        TAPS3,
        128,
        {"kind": "eagle3", "fc_norm": False, "norm_before_fc": True, "norm_before_residual": True},
        "vllm",
    ),
    "eagle3-on-qwen3": ("qwen3", TAPS3, 128, {"kind": "eagle3"}, "portable"),
    "eagle3-qwen3-layer": ("qwen3", TAPS4, 128, {"kind": "eagle3", "qk_norm": True}, "vllm"),
    "eagle3-window": ("qwen3", TAPS3, 128, {"kind": "eagle3", "qk_norm": True, "window": 9}, "vllm"),
    "eagle3-window-llama": ("llama", TAPS3, 128, {"kind": "eagle3", "window": 9}, "vllm"),
    "speculators-four-taps": ("llama", TAPS4, 128, {"kind": "eagle3"}, "speculators"),
    "speculators": ("llama", TAPS3, 128, {"kind": "eagle3"}, "speculators"),
    "speculators-qwen3-layer": (
        "qwen3",
        TAPS4,
        128,
        {"kind": "eagle3", "qk_norm": True, "norm_output": True},
        "speculators",
    ),
    "medusa": ("llama", (8,), 128, {"kind": "medusa", "steps": 3}, "vllm"),
    "medusa-shared": ("llama", (8,), None, {"kind": "medusa", "steps": 3, "lm_head": "shared"}, "vllm"),
    "mtp-mimo": ("llama", (8,), None, {"kind": "mtp", "block": "llama", "steps": 2}, "mimo"),
    "mtp-ernie": (
        "llama",
        (8,),
        None,
        {"kind": "mtp", "block": "llama", "steps": 2, "norm": False, "feed": "raw"},
        "ernie",
    ),
}


def numbers(count: int, seed: int) -> Tensor:
    """Numbers of about a normal distribution, from integers alone."""
    state = torch.arange(1, count * 4 + 1) * 0x9E3779B1 + seed * 0x85EBCA77
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        state = ((state & 0xFFFFFFFF) ^ ((state & 0xFFFFFFFF) >> shift)) * factor
    uniform = ((state & 0xFFFFFFFF) ^ ((state & 0xFFFFFFFF) >> 16)).double() / 2**32
    return ((uniform.view(4, count).sum(0) - 2) * 3**0.5).float()


def make_model(family: str) -> transformers.PreTrainedModel:
    """A target of 8 layers with peaked logits: no choice is so close that rounding could decide it."""
    classes = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}
    config = classes[family](
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        bos_token_id=None,
        eos_token_id=258,
        pad_token_id=258,
        tie_word_embeddings=False,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for place, (name, weight) in enumerate(sorted(model.named_parameters())):
            values = numbers(weight.numel(), place + 1).view_as(weight)
            weight.copy_(1 + 0.2 * values if "norm" in name else values * SPREAD.get(name.split(".")[-2], 0.1))
    return model.eval()


SPREAD = {"embed_tokens": 1.0, "lm_head": 0.4}


def make_target(family: str, taps: tuple[int, ...]) -> Target:
    """A checked target."""
    return Target(make_model(family), make_tokenizer(), f"tiny-{family}", taps)


def prompts() -> list[list[int]]:
    """Six prompts of twelve tokens."""
    return (numbers(PROMPTS * PROMPT, 99).abs() * 1000).long().remainder(256).view(PROMPTS, PROMPT).tolist()


def own_texts(target: Target, count: int = NEW + K + 2) -> list[list[int]]:
    """What the target says after every prompt."""
    return [prompt + decode_plain(target, prompt, count).tokens for prompt in prompts()]


def documents(target: Target, texts: list[list[int]]) -> list[DocumentFeatures]:
    """The same as features."""
    masks = [[place >= PROMPT for place in range(len(text))] for text in texts]
    return read_documents(target, list(zip(texts, masks)))


def draft_vocab(texts: list[list[int]], size: int | None) -> DraftVocab:
    """The tokens that the target says, filled up with the first others."""
    if size is None:
        return DraftVocab(torch.arange(VOCAB), VOCAB)
    said = sorted({token for text in texts for token in text[PROMPT:]})[:size]
    others = [token for token in range(VOCAB) if token not in said][: size - len(said)]
    return DraftVocab(torch.tensor(sorted(said + others)), VOCAB)


def trained(name: str, target: Target, steps: int = 30) -> DraftHead:
    """A head of a case, overfitted a little on what the target says."""
    _, taps, size, config, _ = CASES[name]
    texts = own_texts(target)
    settings = build(get_head(config["kind"]).Config, config, name)
    torch.manual_seed(7)
    head = make_head(settings, target.spec, taps, draft_vocab(texts, size))
    head.attach(target)
    head.initialise(target)
    return fit(head.train(), target, documents(target, texts), steps, 3e-3)


# Making and reading the golden directories


@cache
def target_of(name: str) -> Target:
    """The target of a case."""
    family, taps, *_ = CASES[name]
    return make_target(family, taps)


def write_golden(name: str) -> Path:
    """Train a case's head and export it in bfloat16."""
    target, engine, folder = target_of(name), CASES[name][4], GOLDEN / name
    head = copy.deepcopy(trained(name, target)).to(torch.bfloat16).float()
    shutil.rmtree(folder, ignore_errors=True)
    export = head.export(engine)
    if engine == "speculators":
        export.config["speculators_config"]["verifier"]["name_or_path"] = "TARGET"
    write_directory(folder, with_dtype(filled(export, target), torch.bfloat16))
    return folder


def our_counters(name: str) -> Counters:
    """Of our decoder, with the head as it lies in the golden directory."""
    target = target_of(name)
    return chain_counters(target, load_head(GOLDEN / name, target, torch.float32).eval(), prompts(), NEW, K)


def recorded(name: str) -> dict:
    """What the real engine counted."""
    return json.loads((GOLDEN / name / "counters.json").read_text(encoding="utf-8"))


# Asking the real engine


def write_models(root: Path) -> None:
    """The targets as directories, with a tokenizer."""
    for family in {case[0] for case in CASES.values()}:
        make_model(family).save_pretrained(root / family)
        make_tokenizer().save_pretrained(root / family)


def served_copy(name: str, root: Path) -> Path:
    """A golden directory as an engine gets it: without the counters, and with the target's place in it."""
    folder = root / "heads" / name
    shutil.copytree(GOLDEN / name, folder, ignore=shutil.ignore_patterns("counters.json"))
    config, model = folder / "config.json", json.dumps(str(root / CASES[name][0]))
    config.write_text(config.read_text(encoding="utf-8").replace('"TARGET"', model), encoding="utf-8")
    return folder


def job_of(name: str, root: Path) -> dict:
    """What vLLM is asked."""
    model = str(root / CASES[name][0])
    return engine_job(served_copy(name, root), model, prompts(), NEW, K, dtype="float32", context=128)


def answers_of(names: list[str], python: str, root: Path) -> dict[str, dict]:
    """vLLM's answer to every case."""
    write_models(root)
    found = ask_engine(python, [job_of(name, root) for name in names])
    return {name: answer | {"vllm": found["version"]} for name, answer in zip(names, found["answers"])}


def record(names: list[str], python: str) -> None:
    """Write down what the engine counts."""
    with tempfile.TemporaryDirectory() as root:
        answers = answers_of(names, python, Path(root))
    for name, answer in answers.items():
        ours = asdict(our_counters(name))
        theirs = {key: answer.get(key) for key in ("vllm", "drafts", "accepted_per_pos")}
        print(name, "equal" if theirs == theirs | ours else f"DIFFERS: {answer.get('error', theirs)}, ours {ours}")
        if "error" not in answer:
            write_json(GOLDEN / name / "counters.json", theirs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="cases; default: all")
    parser.add_argument("--engine-python", help="record what vLLM counts, instead of training")
    args = parser.parse_args()
    if args.engine_python:
        record(args.names or list(CASES), args.engine_python)
    else:
        for case in args.names or CASES:
            print(write_golden(case).name, our_counters(case))
