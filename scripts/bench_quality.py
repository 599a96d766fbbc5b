"""What a second of training buys: our EAGLE-3 head and SpecForge's, on the same features, for the same CPU time.

    headwright harvest --config configs/smollm2-eagle3.yaml
    bash scripts/bench_peers.sh specforge
    python scripts/bench_quality.py --config configs/smollm2-eagle3.yaml --cpu-seconds 300

Both start their lm_head from the target's rows, use AdamW with a warm-up and a cosine over the CPU time given, a rollout of the
same length and one thread each, and run side by side. Ours packs documents to train.tokens_per_batch; SpecForge pads --batch of
them to the longest, as its collator does; compiling does not count. Then both heads decode the same held-out prompts with the
same decoder and chain. Losses are each trainer's own and differ in what they average over.
"""

import argparse
import json
import os
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from bench_train import PEERS, SIDES, environment, stack
from safetensors.torch import load_file

from headwright.configs import RunConfig, UserError
from headwright.configs.command import clean_exit
from headwright.configs.console import say, table
from headwright.configs.load import load_run
from headwright.data.batch import last_rows
from headwright.data.harvest import store_path
from headwright.data.sampling import Policy
from headwright.data.store import FeatureReader, save_tensors, write_json
from headwright.data.stream import FeatureStream
from headwright.data.target import Target
from headwright.data.vocab import DraftVocab, choose_vocab
from headwright.eval.decode import speculate
from headwright.eval.prompts import held_out_prompts
from headwright.eval.rollout_tau import rollout_tau
from headwright.heads.base import DraftHead, make_head
from headwright.heads.draft_tree import TreeShape
from headwright.heads.eagle3 import Config
from headwright.train.launch import Launch
from headwright.train.loop import one_step
from headwright.train.optim import learning_rate, set_learning_rate
from headwright.train.strategy import Strategy
from headwright.train.track import Meter

TICKS = 10_000  # the schedule's steps: a share of the CPU time in hundredths of a percent


@dataclass
class Bench:
    """What both sides share."""

    run: RunConfig
    target: Target
    train: FeatureReader
    held_out: FeatureReader
    vocab: DraftVocab
    seconds: float
    depth: int


def hand_over(bench: Bench, folder: Path) -> None:
    """The features as plain tensors, for a trainer in another environment."""
    spec, loop = bench.target.spec, bench.run.train
    documents = list(bench.train)
    lasts = []
    for document in documents:
        last_TD = document.taps_TKD.new_zeros(len(document.ids_T), spec.hidden_size)
        last_TD[last_rows(document.mask_T)] = document.last_RD
        lasts.append(last_TD)
    tensors = {
        "ids": torch.cat([d.ids_T for d in documents]),
        "mask": torch.cat([d.mask_T for d in documents]),
        "ends": torch.tensor([len(d.ids_T) for d in documents]).cumsum(0),
        "taps": torch.cat([d.taps_TKD for d in documents]),
        "last": torch.cat(lasts),
        "lm_head": bench.target.lm_head.weight.detach().clone(),
        "embedding": bench.target.model.get_input_embeddings().weight.detach().clone(),
        "ids_W": bench.vocab.ids_W,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(tensors, folder / "tensors.safetensors")
    settings = {
        "hidden": spec.hidden_size,
        "intermediate": spec.intermediate_size,
        "heads": spec.num_heads,
        "kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "epsilon": spec.rms_norm_eps,
        "rope": spec.rope,
        "rope_theta": spec.rope["rope_theta"],
        "vocabulary": spec.vocab_size,
        "draft_vocabulary": len(bench.vocab),
        "steps": bench.run.head.steps,
        "decay": bench.run.head.step_weight,
        "clip": loop.clip,
        "betas": list(loop.betas),
        "warmup": loop.warmup,
        "final_lr": loop.final_lr,
    }
    write_json(folder / "problem.json", settings)


def start_peer(bench: Bench, folder: Path, out: Path, lr: float, batch: int) -> subprocess.Popen[bytes]:
    """SpecForge's trainer, in the background."""
    python = PEERS / "specforge" / "bin" / "python"
    if not python.exists():
        raise UserError("SpecForge is not installed: bash scripts/bench_peers.sh specforge")
    flags = {"data": folder, "out": out, "cpu-seconds": bench.seconds, "lr": lr, "batch": batch, "seed": bench.run.seed}
    line = [str(python), str(SIDES / "train_peer.py"), *(f"--{key}={value}" for key, value in flags.items())]
    return subprocess.Popen(line, env=environment(1), stderr=subprocess.DEVNULL)


def train_ours(bench: Bench, lr: float) -> tuple[DraftHead, dict[str, Any], list[dict[str, float]]]:
    """Our head, for the CPU time given; and its loss over the way."""
    run, torch_threads = bench.run, torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    head = make_head(run.head, bench.target.spec, bench.target.taps, bench.vocab)
    head.initialise(bench.target)
    run.train.lr = lr
    strategy, meter = Strategy(head, run.train, Launch()), Meter()
    stream = FeatureStream(bench.train, run.train.tokens_per_batch, seed=run.seed, lookahead=head.lookahead)
    started, steps, progress, curve = time.process_time(), 0, 0.0, []
    for batches in stream.steps(0, 10**9):
        set_learning_rate(strategy.groups(), learning_rate(run.train, int(progress * TICKS), TICKS))
        one_step(strategy, batches, bench.target, meter)
        steps, used = steps + 1, time.process_time() - started
        before, progress = progress, used / bench.seconds
        if int(progress * 50) > int(before * 50):
            means = meter.read(lambda x: x)
            curve.append({"cpu": used, "step": steps, "loss_0": means["loss_0"]})
        if progress >= 1:
            break
    torch.set_num_threads(torch_threads)
    return head.eval(), {"steps": steps, "cpu_seconds": used}, curve


def load_peer(bench: Bench, out: Path) -> DraftHead:
    """SpecForge's weights in our module: the same tensors under the same names."""
    config = Config(steps=bench.run.head.steps, fc_norm=False)
    head = make_head(config, bench.target.spec, bench.target.taps, bench.vocab)
    head.load_state_dict(load_file(out / "model.safetensors"))
    return head.eval()


def decode(bench: Bench, head: DraftHead) -> dict[str, Any]:
    """τ of the greedy chain: decoded on held-out prompts, and exact over all held-out text."""
    shape = TreeShape("chain", bench.depth, 1, bench.depth)
    runs = [
        speculate(bench.target, head, prompt.ids, shape, bench.run.eval.max_new_tokens, Policy())
        for prompt in held_out_prompts(bench.held_out, bench.run.eval.prompts)
    ]
    cycles = rollout_tau(head, bench.target, bench.held_out, bench.depth, bench.run.train.tokens_per_batch)
    emitted, passes = sum(sum(r.emitted) for r in runs), sum(len(r.emitted) for r in runs)
    return {
        "tau": emitted / passes,
        "tau_held_out": cycles.acceptance_length,
        "accepted": cycles.joint(bench.depth),
        "prompts": len(runs),
    }


def prepare(arguments: argparse.Namespace) -> Bench:
    """Target, features and vocabulary of a harvested run."""
    run = load_run(arguments.config, [f"head.steps={arguments.steps}", *arguments.overrides])
    held_out = FeatureReader(store_path(run, "held-out"))
    target = Target.load(run.target, held_out.manifest.taps, "cpu")
    train = FeatureReader(store_path(run, "train"))
    vocab = choose_vocab(run, train, held_out.manifest.target, target.tokenizer)
    return Bench(run, target, train, held_out, vocab, arguments.cpu_seconds, arguments.depth)


def show(results: list[dict[str, Any]]) -> None:
    """τ side by side, then the loss curves."""
    rows = []
    for result in results:
        drafts = result["tau_held_out"] - 1
        rows.append(
            (
                result["name"],
                f"{result['lr']:g}",
                result["steps"],
                f"{result['cpu_seconds']:.0f}",
                f"{result['tau']:.3f}",
                f"{result['tau_held_out']:.3f}",
                f"{(results[0]['tau_held_out'] - 1) / drafts:.2f}",
                f"{(results[0]['tau'] - 1) / (result['tau'] - 1):.2f}",
            )
        )
    columns = ("side", "lr", "steps", "CPU-s", "τ decoded", "τ held-out", "ours/it, held-out", "ours/it, decoded")
    table("the same CPU time; ratios are of τ - 1", columns, rows)
    for result in results:
        points = [result["curve"][int(k * (len(result["curve"]) - 1) / 6)] for k in range(7)]
        say(f"{result['name']} loss of step 0: " + ", ".join(f"{p['cpu']:.0f} s {p['loss_0']:.3f}" for p in points))


def bench_all(arguments: argparse.Namespace) -> None:
    """Train side by side, then decode one after the other."""
    bench = prepare(arguments)
    folder = bench.run.directory / "bench-quality"
    hand_over(bench, folder / "data")
    say(f"{stack()}; {len(bench.train)} documents, {bench.train.manifest.response_tokens} response tokens")
    results: list[dict[str, Any]] = []
    for lr in arguments.peer_lr:
        out = folder / f"specforge-{lr:g}"
        peer = start_peer(bench, folder / "data", out, lr, arguments.batch)
        if not results:
            head, done, curve = train_ours(bench, arguments.lr)
            results.append({"name": "headwright", "lr": arguments.lr, "curve": curve} | done)
        if peer.wait():
            raise UserError(f"SpecForge's trainer ended with code {peer.returncode}")
        lines = (out / "metrics.jsonl").read_text().splitlines()
        done = json.loads((out / "done.json").read_text())
        results.append({"name": "specforge 0.2.0", "lr": lr, "curve": [json.loads(line) for line in lines]} | done)
    results[0] |= decode(bench, head)
    for lr, result in zip(arguments.peer_lr, results[1:]):
        result |= decode(bench, load_peer(bench, folder / f"specforge-{lr:g}"))
    show(results)
    if arguments.out:
        write_json(arguments.out, {"stack": stack(), "head": asdict(bench.run.head), "results": results})


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--cpu-seconds", type=float, default=300.0)
    parser.add_argument("--steps", type=int, default=7, help="length of the rollout, both sides")
    parser.add_argument("--depth", type=int, default=5, help="of the greedy chain that is measured")
    parser.add_argument("--lr", type=float, default=1e-3, help="ours")
    parser.add_argument("--peer-lr", type=float, nargs="+", default=[1e-3], help="theirs; several are tried")
    parser.add_argument("--batch", type=int, default=4, help="documents of a step of theirs")
    parser.add_argument("--out", type=Path, help="write all figures to this JSON file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with clean_exit():
        bench_all(parser.parse_args())


if __name__ == "__main__":
    main()
