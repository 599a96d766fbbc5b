"""How fast features are made, kept and read, against the bare target and the layout that others store.

    python scripts/bench_harvest.py                    # SmolLM2-135M on this machine; a few minutes
    python scripts/bench_harvest.py --memory           # peak memory of harvests of 1 000 to 50 000 documents

Texts are the Python standard library cut to chat-like lengths; the second half of each is what is learned. The bare
prefill and the harvest alternate over the same length-sorted batches; medians are printed.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers

from headwright.configs import RunConfig
from headwright.configs.console import duration, say, size, table
from headwright.configs.load import build
from headwright.configs.schema import TargetConfig
from headwright.data.corpus import read_corpus
from headwright.data.demo import demo_rows
from headwright.data.harvest import open_side, run_unit
from headwright.data.jobs import Jobs
from headwright.data.store import FeatureReader, bytes_per_token
from headwright.data.stream import FeatureStream
from headwright.data.target import Target
from headwright.heads.eagle3 import Config


def make_corpus(path: Path, tokenizer: Any, documents: int, longest: int) -> None:
    """Pre-tokenised rows of log-normal lengths: half context, half learned."""
    lengths = np.random.default_rng(0).lognormal(np.log(longest / 3), 0.8, documents).clip(24, longest).astype(int)
    tokens: list[int] = []
    texts = (row["text"] for _, row in demo_rows("python-stdlib"))
    with path.open("w") as file:
        for length in lengths.tolist():
            while len(tokens) < length:
                tokens += tokenizer(next(texts)[:200_000])["input_ids"]
            ids, tokens = tokens[:length], tokens[length:]
            file.write(
                json.dumps({"input_ids": ids, "loss_mask": [int(2 * i >= length) for i in range(length)]}) + "\n"
            )


def run_file(model: str, corpus: Path, runs: Path, **sections: Any) -> RunConfig:
    """A run over that corpus."""
    raw = {
        "name": "bench",
        "runs": str(runs),
        "target": {"model": model},
        "corpus": {"sources": [{"path": str(corpus)}], "held_out": 0.05, "max_length": 2048},
        "answers": {"by": "corpus", "max_new_tokens": 8},
    }
    return build(RunConfig, raw | sections, "bench")


def bare(target: Target, jobs: Jobs, batches: list[list[int]], with_logits: bool) -> Callable[[], None]:
    """Hugging Face's own forward over padded batches, as `generate` would prefill them."""
    model = target.model if with_logits else target.body

    def run() -> None:
        for batch in batches:
            rows = [torch.tensor(jobs.spool[number].ids) for number in batch]
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(target.device)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in rows], batch_first=True)
            with torch.inference_mode(), target.attention(target.own_attention):
                model(input_ids=ids, attention_mask=mask.to(target.device), use_cache=False)
            finish(target)

    return run


def finish(target: Target) -> None:
    """Wait for the device."""
    if target.device.type == "cuda":
        torch.cuda.synchronize()


def timed(work: Callable[[], Any]) -> float:
    """Seconds."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def padded_bytes(lengths: list[int], width: int, batch: int = 32) -> float:
    """Bytes per token of the layout that others store: four bf16 states for every position of rows padded to their batch."""
    order = np.random.default_rng(1).permutation(lengths)
    padded = sum(len(part) * int(part.max()) for part in np.array_split(order, max(1, len(order) // batch)))
    return padded * 8 * width / sum(lengths)


def bench(arguments: argparse.Namespace) -> None:
    """Speed, size and reading."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = Target.load(TargetConfig(model=arguments.model), Config().choose_taps, device)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        root = Path(folder)
        make_corpus(root / "corpus.jsonl", target.tokenizer, arguments.documents, arguments.longest)
        run = run_file(arguments.model, root / "corpus.jsonl", root, harvest={"dtype": arguments.dtype})
        corpus = read_corpus(run.corpus, run.seed, root)
        lengths = [len(document.ids) for document in corpus.train]
        say(
            f"{len(lengths)} documents, {sum(lengths)} tokens, median {statistics.median(lengths):.0f}; {stack(device)}"
        )

        def harvest(number: int) -> Path:
            run.name = f"bench-{number}"
            side = open_side(run, target, "train", corpus.train)
            with side.writer.background() as writer:
                for unit in writer.missing():
                    writer.write(unit, *run_unit(run, target, side.jobs, side.units[unit]), seconds=0.0)
            side.writer.finish()
            return side.writer.root

        jobs = open_side(run, target, "train", corpus.train).jobs
        batches = list(jobs.batches())
        wasted = sum(len(b) * max(jobs.tokens[n] for n in b) for b in batches) / sum(lengths) - 1
        say(f"{len(batches)} batches; padding in the target's batches {wasted:.1%}, on disk none")
        body, whole = bare(target, jobs, batches, False), bare(target, jobs, batches, True)
        body()  # warm-up
        seconds: dict[str, list[float]] = {"body": [], "logits": [], "harvest": []}
        for number in range(arguments.repeats):
            seconds["body"].append(timed(body))
            seconds["harvest"].append(timed(lambda number=number: harvest(number)))  # type: ignore[misc]
            seconds["logits"].append(timed(whole))
        show_speed(seconds, sum(lengths))
        store = root / "bench-0" / "features"
        show_size(store, lengths, target, arguments.dtype)
        show_reading(store)


def stack(device: str) -> str:
    """What it ran on."""
    name = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"{torch.get_num_threads()} threads of {platform.processor() or platform.machine()}"
    )
    return f"{name}, torch {torch.__version__}, transformers {transformers.__version__}"


def show_speed(seconds: dict[str, list[float]], tokens: int) -> None:
    """Tokens per second and ratios, pair by pair."""
    names = {
        "body": "bare prefill, no logits",
        "logits": "prefill with logits",
        "harvest": "harvest: states, argmax, log-sum-exp, checksums, writing",
    }
    rows = []
    for key, name in names.items():
        rate = tokens / statistics.median(seconds[key])
        ratios = [base / mine for base, mine in zip(seconds["body"], seconds[key])]
        rows.append((name, f"{rate:.0f}", f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"))
    ratios = [base / mine for base, mine in zip(seconds["logits"], seconds["harvest"])]
    rows.append(
        (
            "harvest against prefill with logits",
            "",
            f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]",
        )
    )
    table("speed", ("what", "tokens/s (median)", "against the bare prefill [range]"), rows)


def show_size(store: Path, lengths: list[int], target: Target, dtype: str) -> None:
    """Bytes per token."""
    manifest = FeatureReader(store).manifest
    per_token, per_row = bytes_per_token(len(target.taps), target.spec.hidden_size, dtype)
    mine, theirs = manifest.bytes / manifest.tokens, padded_bytes(lengths, target.spec.hidden_size)
    rows = [
        (f"here ({dtype})", f"{mine:.0f}", "1.00"),
        ("by arithmetic, all tokens learned", f"{per_token + per_row}", f"{(per_token + per_row) / mine:.2f}"),
        (
            "four bf16 states, unpadded (8·H)",
            f"{8 * target.spec.hidden_size}",
            f"{8 * target.spec.hidden_size / mine:.2f}",
        ),
        ("four bf16 states, padded to batches of 32", f"{theirs:.0f}", f"{theirs / mine:.2f}"),
    ]
    table("bytes per token", ("layout", "bytes", "against ours"), rows)


def show_reading(store: Path) -> None:
    """Random packed batches, as training reads them; the file is in the page cache."""
    rows = []
    for workers in (0, 2):
        reader = FeatureReader(store)
        for what in ("first epoch, checksums compared", "second epoch"):
            stream = FeatureStream(reader, 2048, workers=workers)
            moved = 0
            started = time.perf_counter()
            for batches in stream.steps(0, stream.steps_per_epoch()):
                moved += sum(batch.taps_TKD.nbytes + batch.last_RD.nbytes for batch in batches)
            rate = moved / (time.perf_counter() - started)
            rows.append((f"{workers} workers, {what}", f"{size(moved)}", f"{rate / 1e9:.2f} GB/s"))
    table("reading random packed batches of 2048 tokens", ("how", "read", "bandwidth"), rows)


def memory(arguments: argparse.Namespace) -> None:
    """Peak memory of whole harvests, each in a process of its own, over a tiny random target."""
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        root = Path(folder)
        config = transformers.LlamaConfig(
            vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=7, num_attention_heads=2
        )
        transformers.LlamaForCausalLM(config).save_pretrained(root / "model")
        byte_tokenizer().save_pretrained(root / "model")
        rows = []
        for documents in (1_000, 10_000, 50_000):
            (root / "runs").mkdir(exist_ok=True)
            write_chats(root / "chats.jsonl", documents)
            rows.append((documents, *harvest_alone(root, documents)))
        table("peak memory of a harvest", ("documents", "tokens", "peak memory", "time", "store"), rows)


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token per byte, and a ChatML template: nothing of the memory that is measured is the vocabulary's."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    made.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return made


def write_chats(path: Path, documents: int) -> None:
    """Chats about pieces of the standard library."""
    texts: Iterator[str] = (row["text"] for _, row in demo_rows("python-stdlib"))
    words: list[str] = []
    with path.open("w") as file:
        for number in range(documents):
            while len(words) < 12:
                words += next(texts).split()
            said, words = words[:12], words[12:]
            turns = [{"role": "user", "content": f"{number}: {' '.join(said[:6])}"}]
            file.write(json.dumps({"messages": [*turns, {"role": "assistant", "content": " ".join(said[6:])}]}) + "\n")


def harvest_alone(root: Path, documents: int) -> tuple[object, ...]:
    """One harvest in a process of its own; its peak memory is what the system counted."""
    run = run_file(str(root / "model"), root / "chats.jsonl", root / "runs", name=f"memory-{documents}")
    code = (
        "import json, sys; from headwright.configs import RunConfig; from headwright.configs.load import build;"
        "from headwright.data.harvest import harvest; from headwright.configs.console import peak_memory;"
        "run = build(RunConfig, json.loads(sys.argv[1]), 'bench'); harvest(run);"
        "print('PEAK', peak_memory())"
    )
    raw = {
        "name": run.name,
        "runs": run.runs,
        "target": {"model": run.target.model},
        "corpus": {"sources": [{"path": str(root / "chats.jsonl")}], "held_out": 0.01},
        "answers": {"by": "corpus", "max_new_tokens": 4},
        "harvest": {"shard_mib": 8},  # several shards are in memory at a time: of the same size in each harvest
    }
    started = time.perf_counter()
    command = [sys.executable, "-c", code, json.dumps(raw)]
    out = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"COLUMNS": "120"}
    ).stdout
    seconds = time.perf_counter() - started
    manifest = FeatureReader(run.directory / "features").manifest
    peak = int(out.split("PEAK")[1])
    return manifest.tokens, size(peak), duration(seconds), size(manifest.bytes)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="embedded:smollm2-135m-instruct", help="hub name, directory or embedded model"
    )
    parser.add_argument("--documents", type=int, default=60)
    parser.add_argument("--longest", type=int, default=768, help="tokens of the longest document")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", help="of the store: bfloat16, fp8, fp8-taps, …")
    parser.add_argument(
        "--folder", help="where stores are written meanwhile; default: the system's temporary directory"
    )
    parser.add_argument("--memory", action="store_true", help="measure peak memory instead")
    arguments = parser.parse_args()
    memory(arguments) if arguments.memory else bench(arguments)


if __name__ == "__main__":
    main()
