"""Target passes of fixed shape, captured as CUDA graphs.

A decoding cycle on a GPU is bound by the launches of its kernels, not by their work. A pass over B texts and N nodes
that looks at the first S slots of a cache has the same kernels each time, so it is captured once and then replayed as
a whole. Inputs are copied into buffers that stay where they are; S grows in steps, a graph for each.

On other devices the same pass runs without a graph, which is how it is tested against `Target.extend`.

Shapes: B texts, N nodes, S slots, V vocabulary.
"""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headwright.data.cache import KVCache
from headwright.data.target import AttentionPlan, Features, Target

STEP = 512  # slots by which a pass grows


def whole_steps(slots: int) -> int:
    """Slots rounded up."""
    return -(-slots // STEP) * STEP


class StaticAdapter:
    """A cache behind the methods that Hugging Face layers call, written at slots that a tensor names."""

    is_compileable = False

    def __init__(self, cache: KVCache, slots_BN: Tensor, end: int):
        self.cache, self.slots_BN, self.end = cache, slots_BN, end
        self.rows_B1 = torch.arange(len(slots_BN), device=slots_BN.device)[:, None]

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store, and return all slots of the pass."""
        return self.put(self.cache.keys, layer_idx, keys), self.put(self.cache.values, layer_idx, values)

    def put(self, kept: list[Tensor | None], layer: int, made_BGNE: Tensor) -> Tensor:
        """Keys or values."""
        store = self.cache.store(kept, layer, made_BGNE)
        store[self.rows_B1, :, self.slots_BN] = made_BGNE.transpose(1, 2)
        return store[:, :, : self.end]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always given, so that nothing depends on it."""
        return 0


class StaticPass:
    """One pass: its buffers, and on a GPU its graph."""

    def __init__(self, target: Target, cache: KVCache, nodes: int, end: int):
        shape, device = (len(cache.lengths), nodes), cache.device
        self.target, self.cache, self.end = target, cache, end
        self.ids_BN, self.positions_BN, self.slots_BN = (
            torch.zeros(shape, dtype=torch.long, device=device) for _ in range(3)
        )
        self.mask_BNS = torch.zeros((*shape, end), dtype=torch.bool, device=device)
        self.mask_BNS[:, :, 0] = True  # a row without any key would give NaN while warming up
        self.graph: torch.cuda.CUDAGraph | None = None
        self.out: tuple[Features, Tensor] | None = None
        if device.type == "cuda":
            self.capture()

    def run(self) -> tuple[Features, Tensor]:
        """The pass on what the buffers hold."""
        plan = AttentionPlan(self.mask_BNS, self.positions_BN, self.cache.positions[:, : self.end])
        adapter = StaticAdapter(self.cache, self.slots_BN, self.end)
        features = self.target.run(self.ids_BN, self.positions_BN, plan, adapter)
        return features, self.target.logits(features.last_BND)

    def capture(self) -> None:
        """Run it until nothing is made for the first time, then record it. The slots written meanwhile are free ones."""
        self.slots_BN.copy_(self.cache.next_slots(self.ids_BN.shape[1]))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.run()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self.run()

    def __call__(self, ids_BN: Tensor, positions_BN: Tensor, among_BNN: Tensor | None) -> tuple[Features, Tensor]:
        """As `Target.extend`, with the logits of all nodes. The result lives until the next call."""
        self.cache.place(positions_BN)
        visible_BNE = self.cache.visible(ids_BN.shape[1], among_BNN)
        self.mask_BNS.zero_()
        self.mask_BNS[:, :, : visible_BNE.shape[2]] = visible_BNE
        self.ids_BN.copy_(ids_BN)
        self.positions_BN.copy_(positions_BN)
        self.slots_BN.copy_(self.cache.next_slots(ids_BN.shape[1]))
        if self.graph is None:
            return self.run()
        self.graph.replay()
        assert self.out is not None
        return self.out


@dataclass
class Passes:
    """The passes over one cache, made when they are first asked for, and the seconds that this took."""

    target: Target
    cache: KVCache
    made: dict[tuple[int, int], StaticPass] = field(default_factory=dict)
    seconds: float = 0.0

    def ready(self, nodes: int) -> StaticPass:
        """The pass over so many nodes behind what the cache holds."""
        key = (nodes, whole_steps(self.cache.room(nodes)))
        if key not in self.made:
            begun = time.perf_counter()
            self.made[key] = StaticPass(self.target, self.cache, *key)
            self.seconds += time.perf_counter() - begun
        return self.made[key]


def take(target: Target, batch: int, slots: int) -> Passes:
    """Passes over an empty cache: those of texts that have ended, graphs and all, or new ones."""
    slots = whole_steps(slots)
    spare = target.spare.get((batch, slots))
    if not spare:
        return Passes(target, target.new_cache(batch, slots))
    passes: Passes = spare.pop()
    passes.cache.lengths = [0] * batch
    passes.seconds = 0.0
    return passes


def give_back(passes: Passes) -> None:
    """For the target's next texts."""
    passes.target.spare.setdefault((len(passes.cache.lengths), passes.cache.slots), []).append(passes)
