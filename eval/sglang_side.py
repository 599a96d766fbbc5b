"""SGLang's own classes on a CPU: they load exported directories and draft from them. Run by the python of its own environment
(scripts/verify_sglang.sh); imports nothing of Headwright.

One JSON job on standard input, one JSON answer as the last line of standard output; everything else goes to standard error.

    job     {"heads": [HEAD, …], "targets": [TARGET, …], "context_length": 512, "dtype": "float32"}
    HEAD    {"folder": DIR, "algorithm": "EAGLE3" | "EAGLE" | "NEXTN", "inputs": FILE, "count": K, "token_map": FILE | null};
            without inputs it is only loaded; it may have a "dtype" of its own
    inputs  tokens [T] (the token after each row), hidden [T, ·] (captured states, or the state after the final norm), and what
            is the target's: embedding [V, H], lm_head [V, H]
    answer  {"class", "dtype", "left", "tokens", "logprobs", "states", "error"} for each head, in "heads"
    TARGET  {"folder": DIR, "captures": LAYERS | null, "last": bool, "tokens": [T], "out": FILE}; FILE gets "hidden" [T, ·]:
            the states that SGLang hands to an EAGLE-3 head, or the last one with "last"

"left" names the parameters that the loader did not fill, or not wholly; logprobs are cumulative, over the draft vocabulary;
states are the first eight numbers of what each step hands to the next.

SGLang's are: the config, the choice of the class, the loader, the modules, the logits processor, the worker's sharing of
embedding and lm_head and its loop over draft steps. Ours are: attention, plain and causal over a list of keys and values, and
the batch, which only has the fields that these read. Kernels, paged memory, trees and scheduling stay untested.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import os
import sys
import tempfile
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = str(Path(__file__).resolve().parent)
sys.path[:] = [path for path in sys.path if path != HERE]  # our modules are no libraries

import torch  # noqa: E402, the path must be set before
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers.utils import import_utils  # noqa: E402

HOLLOW = ("torchvision", "vllm")  # imported by the models for images, and by norms where there is no GPU


def empty_class(name: str) -> type:
    """What a hollow module answers."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


class Hollow(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for libraries that want a CUDA build of torch: all that is imported from them is an empty class."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in HOLLOW:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = empty_class  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def start(folder: Path) -> None:
    """One process as the whole of SGLang's world, which meets in a folder."""
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    publish(ServerArgs(model_path="none", device="cpu"), role="test", ranks=SpawnRanks(world_rank=0))
    init_distributed_environment(1, 0, f"file://{folder / 'meeting'}", local_rank=0, backend="gloo")
    initialize_model_parallel(backend="gloo")
    importlib.import_module("sglang.srt.speculative.eagle_worker_v2")  # what an installation lacks shows here


def attend(
    self: Any, q: Tensor, k: Tensor, v: Tensor, forward_batch: Any, save_kv_cache: bool = True, **other: Any
) -> Tensor:
    """In place of RadixAttention.forward: the rows see each other causally, and all rows of earlier calls."""
    q, k, v = (x.view(len(x), -1, self.head_dim) for x in (q, k, v))
    if self.layer_id in forward_batch.memory:
        k, v = (torch.cat(pair) for pair in zip(forward_batch.memory[self.layer_id], (k, v)))
    forward_batch.memory[self.layer_id] = k, v
    seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    rows, keys, values = (x.transpose(0, 1) for x in (q, k, v))
    mixed = nn.functional.scaled_dot_product_attention(rows, keys, values, seen, scale=self.scaling, enable_gqa=True)
    return mixed.transpose(0, 1).flatten(1)


def replace_kernels() -> None:
    """What has no CPU form in the wheel: attention and rotary embeddings."""
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    RadixAttention.forward = attend
    RotaryEmbedding.forward = lambda self, *given, **named: self.forward_native(*given, **named)


def poison_parameters() -> None:
    """Every model begins as NaN, so that what the loader leaves alone shows."""
    from sglang.srt.model_loader import loader

    build = loader._initialize_model

    def poisoned(*given: Any, **named: Any) -> nn.Module:
        model = build(*given, **named)
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
        return model

    loader._initialize_model = poisoned


def load(folder: str, job: dict[str, Any], **how: Any) -> tuple[Any, Any]:
    """SGLang's config and model of a directory."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import get_model

    config = ModelConfig(folder, context_length=job["context_length"], dtype=job["dtype"], **how)
    return config, get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))


def make_batch(mode: Any, tokens: Tensor, positions: Tensor, memory: dict[int, Any], capture: Any) -> Any:
    """The fields of a ForwardBatch, and of its LogitsMetadata, that a model of this kind reads."""
    return SimpleNamespace(
        forward_mode=mode,
        capture_hidden_mode=capture,
        input_ids=tokens,
        positions=positions,
        attn_cp_metadata=None,
        batch_size=1,
        extend_seq_lens=torch.tensor([len(tokens)]),
        extend_return_logprob=False,
        next_token_logits_buffer=None,
        mm_input_embeds=None,
        contains_mm_inputs=lambda: False,
        draft_extend_select_index=None,
        moe_num_token_non_padded=None,
        out_cache_loc=None,
        memory=memory,
    )


class Runner:
    """The worker's model runner: forwards, and notes of what each gave."""

    def __init__(self, model: Any, config: Any):
        self.model, self.model_config, self.canary_manager = model, config, None
        self.logprobs = [0.0]
        self.states: list[list[float]] = []

    def forward(self, batch: Any) -> Any:
        """One pass of the module."""
        output = self.model.forward(batch.input_ids, batch.positions, batch)
        best = output.next_token_logits[-1].float().log_softmax(-1).max()
        self.logprobs.append(self.logprobs[-1] + float(best))
        self.states.append(output.hidden_states[-1, :8].tolist())
        return SimpleNamespace(logits_output=output)


def make_worker(head: dict[str, Any], runner: Runner, inputs: dict[str, Tensor]) -> Any:
    """What SGLang's EAGLE worker reads of itself, with the target's tables and the token map set by its own code."""
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    shared = [nn.Parameter(inputs[name], requires_grad=False) for name in ("embedding", "lm_head")]
    worker = SimpleNamespace(
        speculative_algorithm=SpeculativeAlgorithm.from_string(head["algorithm"]),
        target_worker=SimpleNamespace(model_runner=SimpleNamespace(model=None)),
        draft_runner=runner,
        draft_attn_backend=SimpleNamespace(attn_backends=[None] * head["count"]),
        topk=1,
        speculative_num_steps=head["count"],
        index_share_for_mtp_iteration=False,
        seed_dsa_topk_from_draft_extend=False,
        _resolve_shared_embed_and_head=lambda: shared,
        _topk1_parents_prealloc=torch.zeros(1, 1),
        _topk1_score_indices_prealloc=torch.zeros(1, 1),
    )
    with get_spec().override(speculative_token_map=head.get("token_map")):
        EagleDraftWorker.init_token_map(worker)
        EagleDraftWorker.init_lm_head(worker)
    return worker


def draft(head: dict[str, Any], worker: Any, inputs: dict[str, Tensor]) -> list[int]:
    """Greedy tokens: the prefix in one pass, then the worker's own loop."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

    tokens, count = inputs["tokens"], head["count"]
    batch = make_batch(ForwardMode.EXTEND, tokens, torch.arange(len(tokens)), {}, CaptureHiddenMode.LAST)
    batch.spec_info = SimpleNamespace(hidden_states=inputs["hidden"])
    first = worker.draft_runner.forward(batch).logits_output
    batch.forward_mode, batch.positions = ForwardMode.DECODE, torch.tensor([len(tokens)])
    batch.out_cache_loc = torch.zeros(count, dtype=torch.long)
    best = first.next_token_logits.argmax(-1, keepdim=True)
    batch.spec_info = SimpleNamespace(
        topk_p=torch.ones(1, 1), topk_index=best, hidden_states=first.hidden_states, draft_probs=None
    )
    return EagleDraftWorker.draft_forward(worker, batch)[2][0].tolist()


def run_head(head: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """Load and draft; an exception is part of the answer."""
    answer: dict[str, Any] = {"error": None}
    try:
        how = {"is_draft_model": True, "speculative_algorithm": head["algorithm"]}
        config, model = load(head["folder"], job | head, **how)
        answer |= {"class": type(model).__name__, "dtype": str(config.dtype)}
        answer["left"] = sorted(name for name, weight in model.named_parameters() if weight.isnan().any())
        if head.get("inputs"):
            inputs, runner = load_file(head["inputs"]), Runner(model, config)
            answer["tokens"] = draft(head, make_worker(head, runner, inputs), inputs)
            answer |= {"logprobs": runner.logprobs[1:], "states": runner.states}
    except Exception as problem:
        answer["error"] = f"{type(problem).__name__}: {problem}"
    return answer


def run_target(target: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """The states of a text that SGLang's target hands to a head."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

    _, model = load(target["folder"], job)
    if not target["last"]:
        model.set_eagle3_layers_to_capture(target["captures"])
    tokens = torch.tensor(target["tokens"])
    batch = make_batch(ForwardMode.EXTEND, tokens, torch.arange(len(tokens)), {}, CaptureHiddenMode.FULL)
    hidden = model.forward(tokens, batch.positions, batch).hidden_states
    save_file({"hidden": hidden.clone()}, target["out"])
    return {"class": type(model).__name__, "width": hidden.shape[1]}


def answer_to(job: dict[str, Any]) -> dict[str, Any]:
    """Everything that a job asks for."""
    replace_kernels()
    poison_parameters()
    return {
        "version": importlib.metadata.version("sglang"),
        "heads": [run_head(head, job) for head in job["heads"]],
        "targets": [run_target(target, job) for target in job.get("targets", [])],
    }


def main() -> None:
    """Standard input to standard output."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the worker compiles small functions; there may be no compiler
    torch.set_num_threads(1)
    import_utils.is_torchvision_available()  # remembers that there is none, before there seems to be one
    sys.meta_path.insert(0, Hollow())
    with tempfile.TemporaryDirectory() as folder:
        start(Path(folder))
        print(json.dumps(answer_to(json.load(sys.stdin))), file=output, flush=True)


if __name__ == "__main__":
    main()
