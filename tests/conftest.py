"""Tiny random targets of several families, a small tokenizer, and a run over them. Nothing here is downloaded."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

import headwright.heads
from headwright.configs import RunConfig
from headwright.configs.load import build
from headwright.data.batch import DocumentFeatures, pack
from headwright.data.chat import Renderer
from headwright.data.harvest import harvest
from headwright.data.store import store_damage
from headwright.data.target import Target
from headwright.data.vocab import DraftVocab
from headwright.eval.prompts import Room
from headwright.eval.settings import Generation
from headwright.heads.base import DraftHead, make_head
from headwright.train import loop

ROOT = Path(__file__).resolve().parents[1]
if Path(headwright.heads.__file__).resolve().parents[1] != ROOT:
    raise RuntimeError(f"headwright is installed from another checkout; run: pip install -e {ROOT}")

torch.set_num_threads(1)
os.environ.setdefault("WANDB_MODE", "disabled")  # a developer's key must not upload test runs

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB = 272  # 256 bytes, the special tokens, a few unused rows
TAPS = (1, 3, 6)
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral")


def make_tokenizer(
    template: str = CHATML, special: list[str] = SPECIAL, eos: str = "<|im_end|>"
) -> transformers.PreTrainedTokenizerFast:
    """A byte-level tokenizer: one token per byte, exact round trips, offsets."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[])
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=eos, pad_token=eos, additional_special_tokens=special
    )
    tokenizer.chat_template = template
    return tokenizer


def make_model(family: str = "llama", seed: int = 0, vocab: int = VOCAB, **changes) -> transformers.PreTrainedModel:
    """A random 8-layer model, scaled so that its choices vary."""
    shared = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": 258,
        "pad_token_id": 258,
        "initializer_range": 0.2,
    }
    configs = {
        "llama": (transformers.LlamaConfig, {}),
        "qwen2": (transformers.Qwen2Config, {}),
        "qwen3": (transformers.Qwen3Config, {}),
        "mistral": (transformers.MistralConfig, {"sliding_window": 9}),
        "gemma2": (transformers.Gemma2Config, {"sliding_window": 9, "query_pre_attn_scalar": 8}),
        "gemma3": (transformers.Gemma3TextConfig, {"sliding_window": 9, "query_pre_attn_scalar": 8}),
    }
    cls, own = configs[family]
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(cls(**(shared | own | changes)))
    with torch.no_grad():  # norms away from one (or zero, for Gemma's 1 + w), so that a forgotten gain shows
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(torch.rand_like(weight) * 0.5)
    return model.eval()


def make_target(family: str = "llama", taps=TAPS, **changes) -> Target:
    """A tiny target, checked as any other."""
    return Target(make_model(family, **changes), make_tokenizer(), f"tiny-{family}", taps)


def make_room(target: Target, context: int | None = None) -> Room:
    """A target's template and context, or another context."""
    most = target.spec.max_positions if context is None else context
    return Room(Renderer(target.tokenizer), most, frozenset(target.spec.eos_token_ids))


def make_tiny_head(target: Target, size: int | None = 100, seed: int = 1, **config) -> DraftHead:
    """A random EAGLE-3 head for a tiny target; by default with a reduced vocabulary."""
    torch.manual_seed(seed)
    ids = (
        torch.arange(target.spec.vocab_size)
        if size is None
        else torch.randperm(target.spec.vocab_size)[:size].sort().values
    )
    settings = build(headwright.heads.get_head("eagle3").Config, {"kind": "eagle3", **config}, "test")
    head = make_head(settings, target.spec, target.taps, DraftVocab(ids, target.spec.vocab_size))
    head.initialise(target)
    return head.eval()


def fit(
    head: DraftHead, target: Target, documents: list[DocumentFeatures], steps: int = 60, lr: float = 1e-2
) -> DraftHead:
    """A moment of training on the target's own text."""
    batch = pack(documents)
    optimizer = torch.optim.Adam(head.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        head.loss(batch, target).total.backward()
        optimizer.step()
    return head.eval()


def counted(generations: list[Generation], begin: tuple[int, int], words: int) -> torch.Tensor:
    """How often each token came after each pair of tokens [V, V, V], over texts that go on from `begin`."""
    seen = torch.zeros(words, words, words, dtype=torch.float64)
    for out in generations:
        line = torch.tensor([*begin, *out.tokens])
        seen.index_put_((line[:-2], line[1:-1], line[2:]), torch.ones(len(line) - 2, dtype=torch.float64), True)
    return seen


@pytest.fixture(scope="session")
def tiny() -> Target:
    """A tiny llama."""
    return make_target()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> Path:
    """A tiny llama with its tokenizer, as a directory."""
    folder = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def chats(tmp_path_factory) -> Path:
    """Forty short chats as JSONL."""
    path = tmp_path_factory.mktemp("corpus") / "chats.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for i in range(40):
            turns = [
                {"role": "user", "content": f"count to {i}"},
                {"role": "assistant", "content": f"one two {i * 7}"},
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


@pytest.fixture(scope="module")
def done(model_dir, chats, tmp_path_factory):
    """A finished harvest, not to be changed."""
    run = tiny_run(model_dir, chats, tmp_path_factory.mktemp("runs"))
    harvest(run)
    return run


def broken(root: Path) -> list[str]:
    """The files of a store that are not as they were written."""
    return [file for file, wrong in store_damage(root) if wrong]


def tiny_run(model_dir: Path, chats: Path, runs: Path, **sections) -> RunConfig:
    """A run file over the tiny model, as `load_run` would give it. `sections` replace whole sections."""
    raw = {
        "name": "tiny",
        "runs": str(runs),
        "target": {"model": str(model_dir)},
        "corpus": {"sources": [{"path": str(chats), "samples": 2}], "held_out": 0.25, "max_length": 256},
        "answers": {"max_new_tokens": 12, "rows": 8},
        "harvest": {"taps": list(TAPS), "tokens_per_batch": 512, "dtype": "float32"},
        "vocab": {"size": 24, "pin_bytes": False, "least": 0.0},
        "head": {"kind": "eagle3", "steps": 2},
        "train": {"epochs": 2, "tokens_per_batch": 256, "lr": 1e-3, "log_every": 1, "evals": 2, "saves": 4},
        "eval": {
            "prompts": 3,
            "max_new_tokens": 10,
            "timed_prompts": 2,
            "shapes": [
                {"kind": "chain", "depth": 3},
                {"kind": "dynamic", "depth": 3, "top_k": 2, "nodes": 6},
            ],
        },
        "export": {"prompts": 2},
    } | sections
    run = build(RunConfig, raw, "test")
    run.eval.patience = 0  # other tests run at the same time
    run.head = build(headwright.heads.get_head(run.head["kind"]).Config, run.head, "test")
    return run


# Trainings


@pytest.fixture(scope="module")
def harvested(model_dir, chats, tmp_path_factory) -> Path:
    """A run directory that holds features and nothing else."""
    runs = tmp_path_factory.mktemp("harvested")
    harvest(tiny_run(model_dir, chats, runs))
    return runs


@pytest.fixture
def make_run(request, model_dir, chats, harvested, tmp_path):
    """Trainings by the module's TRAIN over the same features: in fresh directories, or in one that is there already."""
    count = iter(range(99))

    def make(where: Path | None = None, **changes):
        runs = where or tmp_path / f"runs-{next(count)}"
        if not runs.exists():
            shutil.copytree(harvested, runs)
        return tiny_run(model_dir, chats, runs, train=request.module.TRAIN | changes)

    return make


class Interrupted(Exception):
    """Stands for a crash."""


def crash_at(monkeypatch, step: int) -> None:
    """Let a training die inside an optimizer step of its own counting, after some checkpoints."""
    real, count = loop.one_step, iter(range(10**6))

    def dying(*args):
        if next(count) == step:
            raise Interrupted
        return real(*args)

    monkeypatch.setattr(loop, "one_step", dying)


def on_two_processes(script: Path, text: str, *words: str) -> str:
    """Write a script and run it by torchrun on two processes, single-threaded; what they printed, once both ended well."""
    script.write_text(text, encoding="utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TESTS": str(ROOT / "tests")}
    done = subprocess.run(
        [*launcher, str(script), *words],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=500,
        env=environment,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
