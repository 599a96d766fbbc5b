"""What all sides of the training-step benchmark share: the problem, its data, and the loop that runs steps on command.

It runs in every peer's environment, so it imports torch and the standard library alone. A side is a process: it is started
with the problem's flags, prints one JSON line when its model is built, and then answers each line "step" with one JSON
line, until its input ends. "step check" also names the trainable parameters that got no gradient. The limits on threads
(OMP_NUM_THREADS, MKL_NUM_THREADS) are the starter's to set.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor, nn


@dataclass
class Problem:
    """One EAGLE-3 training step: a one-layer Llama-style head rolled out over one document."""

    sequence: int = 512
    share: float = 1.0  # of the positions that are response tokens
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    steps: int = 7
    hidden: int = 576
    intermediate: int = 1536
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    vocabulary: int = 49152
    draft_vocabulary: int = 8192
    epsilon: float = 1e-5
    rope_theta: float = 10000.0
    decay: float = 0.8  # step i weighs decay ** i
    lr: float = 5e-5
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 0.5
    weight_decay: float = 0.0

    @property
    def longest(self) -> int:
        """Rotary positions that a rollout reaches."""
        return self.sequence + self.steps

    def llama(self) -> dict[str, Any]:
        """The layer as Hugging Face's LlamaConfig describes it."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": 1,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.longest,
            "rms_norm_eps": self.epsilon,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
        }


SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {},
    "qwen3-8b": {
        "hidden": 4096,
        "intermediate": 12288,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "vocabulary": 151936,
        "draft_vocabulary": 32000,
        "epsilon": 1e-6,
        "rope_theta": 1e6,
    },
}


class Data(NamedTuple):
    """A document as a harvest would store it, and what belongs to the target. H hidden, V and W vocabularies."""

    ids_T: Tensor
    mask_T: Tensor  # response tokens
    taps_T3H: Tensor
    last_TH: Tensor  # after the target's final norm
    lm_head_VH: Tensor
    embedding_VH: Tensor
    ids_W: Tensor  # the draft vocabulary, sorted


class Side(NamedTuple):
    """A peer, ready to train."""

    version: str
    model: nn.Module
    loss: Callable[[], Tensor]  # one forward over the document, target distribution included
    about: dict[str, Any] = {}  # noqa: RUF012 (a NamedTuple) what else it says of itself


def make_data(problem: Problem) -> Data:
    """Random and seeded; the same on all machines, whatever the device."""
    random = torch.Generator().manual_seed(problem.seed)
    length, hidden, vocabulary = problem.sequence, problem.hidden, problem.vocabulary
    ids_T = torch.randint(vocabulary, (length,), generator=random)
    mask_T = torch.arange(length) >= length - round(problem.share * length)
    taps_T3H = torch.randn(length, 3, hidden, generator=random)
    last_TH = torch.randn(length, hidden, generator=random)
    lm_head_VH = torch.randn(vocabulary, hidden, generator=random) * 0.05
    embedding_VH = torch.randn(vocabulary, hidden, generator=random) * 0.02
    ids_W = torch.randperm(vocabulary, generator=random)[: problem.draft_vocabulary].sort().values
    made = Data(ids_T, mask_T, taps_T3H, last_TH, lm_head_VH, embedding_VH, ids_W)
    return Data(*(move(tensor, problem) for tensor in made))


def move(tensor: Tensor, problem: Problem) -> Tensor:
    """To the problem's device and, if it is not integers, to its number format."""
    dtype = getattr(torch, problem.dtype) if tensor.is_floating_point() else tensor.dtype
    return tensor.to(problem.device, dtype)


def parse() -> Problem:
    """The problem from the command line; what else stands there is the side's own."""
    parser = argparse.ArgumentParser()
    for name in ("sequence", "share", "seed", "device", "dtype"):
        default = getattr(Problem, name)
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    given = vars(parser.parse_known_args()[0])
    return Problem(**SHAPES[given.pop("shape")], **given)


def take_output() -> TextIO:
    """The real standard output. What anything else prints from now on goes to standard error."""
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return output


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """What the optimiser moves."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def make_step(problem: Problem, parameters: dict[str, nn.Parameter], loss: Callable[[], Tensor]) -> Callable[[], float]:
    """A full training step: target distribution, forward, backward, clip, AdamW. Gradients stay until the next one."""
    weights = list(parameters.values())
    optimiser = torch.optim.AdamW(weights, problem.lr, problem.betas, weight_decay=problem.weight_decay)

    def step() -> float:
        optimiser.zero_grad()
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(weights, problem.clip)
        optimiser.step()
        return float(value.detach())

    return step


def memory(device: str, peak: bool = False) -> int:
    """Bytes in use now, or at most since `forget_peak`: resident on a CPU, allocated on a GPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    field = "VmHWM:" if peak else "VmRSS:"
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(field))


def forget_peak(device: str) -> None:
    """Start the peak anew."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def timed(step: Callable[[], float], device: str) -> dict[str, float]:
    """One step; "cpu" counts user and system time of all threads of this process."""
    if device == "cuda":
        torch.cuda.synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    loss = step()  # a number: a GPU has finished by then, but for the optimiser
    if device == "cuda":
        torch.cuda.synchronize()
    return {"loss": loss, "wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def missing(gradients: dict[str, Tensor | None]) -> list[str]:
    """Names of parameters that a step left without a gradient."""
    return [name for name, gradient in gradients.items() if gradient is None or not gradient.any()]


def serve(
    step: Callable[[], float],
    gradients: Callable[[], dict[str, Tensor | None]],
    output: TextIO,
    device: str,
    **about: Any,
) -> None:
    """Say that the side is ready, then run a step for each line of input."""
    print(json.dumps({"ready": True, **about}), file=output, flush=True)
    before = 0
    for line in sys.stdin:
        before = before or memory(device)
        forget_peak(device)
        answer: dict[str, Any] = timed(step, device)
        answer["peak"] = memory(device, peak=True) - before
        if line.split() == ["step", "check"]:
            answer["missing"] = missing(gradients())
        print(json.dumps(answer), file=output, flush=True)


def main(name: str, build: Callable[[Problem, Data], Side]) -> None:
    """A side's whole life. `build` imports its toolkit itself, after the output is out of its reach."""
    problem, output = parse(), take_output()
    torch.manual_seed(problem.seed)
    side = build(problem, make_data(problem))
    parameters = trainable(side.model.to(problem.device, getattr(torch, problem.dtype)).train())
    step = make_step(problem, parameters, side.loss)
    count = sum(weight.numel() for weight in parameters.values())
    about = {"name": name, "version": side.version, "parameters": count} | side.about
    serve(step, lambda: {key: weight.grad for key, weight in parameters.items()}, output, problem.device, **about)
