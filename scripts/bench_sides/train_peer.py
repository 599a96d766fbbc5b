"""Trains a peer's EAGLE-3 head, SpecForge's, on given features for a given number of CPU-seconds, to compare quality.

    python scripts/bench_sides/train_peer.py --data DIR --out DIR --cpu-seconds N --lr X --batch B --seed S

DIR holds problem.json (fields of `Problem`, and rope, warmup, final_lr) and tensors.safetensors: ids [N], mask [N], ends [D],
taps [N,3,H], last [N,H], lm_head [V,H], embedding [V,H], ids_W [W]. Documents, model, loss and padding go through
SpecForge's own code; a row whose `last` is not stored, all zeros, bears no loss. The learning rate follows the CPU time
used, so that the schedule ends with the time. Compiling comes first and does not count.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import Data, Problem, trainable
from peer_specforge import make_config, make_strategy
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], Problem]:
    """Settings, tensors, and the problem as `make_strategy` knows it."""
    settings = json.loads((folder / "problem.json").read_text())
    tensors = load_file(folder / "tensors.safetensors")
    known = {name: value for name, value in settings.items() if name in Problem.__dataclass_fields__}
    starts = torch.cat([torch.zeros(1, dtype=torch.long), tensors["ends"][:-1]])
    known["sequence"] = int((tensors["ends"] - starts).max())
    return settings, tensors, Problem(**known)


def make_trainer(settings: dict[str, Any], tensors: dict[str, Tensor], problem: Problem) -> Any:
    """Their strategy; the lm_head starts from the target's rows of the draft vocabulary."""
    config = make_config(problem)
    config.rope_parameters = settings["rope"]
    features = (tensors[name] for name in ("ids", "mask", "taps", "last"))
    data = Data(*features, tensors["lm_head"].float(), tensors["embedding"].float(), tensors["ids_W"])
    strategy = make_strategy(problem, data, config)
    head = strategy.eagle3_model.draft_model.lm_head.weight
    head.data.copy_(tensors["lm_head"][tensors["ids_W"]])
    return strategy


def make_documents(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Each as their offline reader hands it over. Row t learns from `last` of position t + 1, so that must be stored."""
    from specforge.data.preprocessing import process_offline_eagle3_sample

    documents, ends = [], tensors["ends"].tolist()
    for start, end in zip([0, *ends[:-1]], ends):
        last_TH = tensors["last"][start:end]
        stored_T = last_TH.any(1).roll(-1)
        stored = {
            "input_ids": tensors["ids"][start:end],
            "loss_mask": (tensors["mask"][start:end] & stored_T).long(),
            "aux_hidden_state": tensors["taps"][start:end].flatten(1),
            "hidden_state": last_TH,
        }
        documents.append(process_offline_eagle3_sample(stored, end - start))
    return documents


def make_batch(documents: list[dict[str, Tensor]]) -> Any:
    """Padded on the right by their collator, in fp32."""
    from specforge.data.utils import DataCollatorWithPadding
    from specforge.runtime.contracts import TrainBatch

    tensors = {name: tensor for name, tensor in DataCollatorWithPadding()(documents).items() if tensor is not None}
    tensors |= {name: tensors[name].float() for name in ("hidden_state", "target")}
    return TrainBatch(["0"], "eagle3", tensors, {"target_repr": "hidden_state"})


def batches(documents: list[dict[str, Tensor]], size: int, seed: int) -> Iterator[Any]:
    """Without end: epochs, each in a new order; what does not fill a step at an epoch's end is left out."""
    shuffle = random.Random(seed)
    while True:
        order = shuffle.sample(documents, len(documents))
        for first in range(0, len(order) - size + 1, size):
            yield make_batch(order[first : first + size])


def warm_up(strategy: Any, documents: list[dict[str, Tensor]], size: int) -> None:
    """Compile for three shapes, the shortest and the longest among them, and throw the gradients away."""
    by_length = sorted(documents, key=lambda document: document["input_ids"].shape[1])
    middle = len(by_length) // 2
    for part in (by_length[:size], by_length[-size:], by_length[middle : middle + size]):
        strategy.forward_loss(make_batch(part)).loss.backward()
    strategy.trainable_module().zero_grad()


def rate(progress: float, warmup: float, final: float) -> float:
    """Share of the learning rate: linear warm-up, then half a cosine down to `final`."""
    if progress < warmup:
        return progress / warmup
    along = (progress - warmup) / (1 - warmup)
    return final + (1 - final) * (1 + math.cos(math.pi * min(along, 1.0))) / 2


def train(
    arguments: argparse.Namespace, settings: dict[str, Any], strategy: Any, source: Iterator[Any]
) -> dict[str, Any]:
    """Until the CPU time is used up, or the steps are; a line in metrics.jsonl for every fiftieth of the way."""
    weights = list(trainable(strategy.trainable_module()).values())
    betas, limit = tuple(settings["betas"]), arguments.total_steps or math.inf
    optimiser = torch.optim.AdamW(weights, arguments.lr, betas, weight_decay=settings.get("weight_decay", 0.0))
    started, steps, progress, seen = time.process_time(), 0, 0.0, []
    with (arguments.out / "metrics.jsonl").open("w") as log:
        while progress < 1:
            for group in optimiser.param_groups:
                group["lr"] = arguments.lr * rate(progress, settings["warmup"], settings["final_lr"])
            optimiser.zero_grad()
            output = strategy.forward_loss(next(source))
            output.loss.backward()
            nn.utils.clip_grad_norm_(weights, settings["clip"])
            optimiser.step()
            steps, used = steps + 1, time.process_time() - started
            seen.append((float(output.loss.detach()), float(output.metrics["plosses"][0])))
            before, progress = progress, max(used / arguments.cpu_seconds, steps / limit)
            if int(progress * 50) > int(before * 50):
                loss, first = (sum(values) / len(seen) for values in zip(*seen))
                seen.clear()
                print(json.dumps({"cpu": used, "step": steps, "loss_0": first, "loss": loss}), file=log, flush=True)
    return {"steps": steps, "cpu_seconds": used}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--cpu-seconds", type=float, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument(
        "--total-steps", type=int, default=0, help="stop, and end the schedule, there if it comes first"
    )
    parser.add_argument("--batch", type=int, default=1, help="documents of a step")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    settings, tensors, problem = read(arguments.data)
    strategy, documents = make_trainer(settings, tensors, problem), make_documents(tensors)
    warm_up(strategy, documents, arguments.batch)
    done = train(arguments, settings, strategy, batches(documents, arguments.batch, arguments.seed))
    weights = {name.removeprefix("draft_model."): w.data for name, w in trainable(strategy.eagle3_model).items()}
    save_file(weights, arguments.out / "model.safetensors")
    (arguments.out / "done.json").write_text(json.dumps(done))


if __name__ == "__main__":
    main()
