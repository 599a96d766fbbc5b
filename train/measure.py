"""What the head is worth while it trains: τ of greedy chains from stored features, and now and then real decoding.

The first is exact for text that the target wrote itself, greedily; the second is what it stands for, and needs no such
text. Beside them the cheap proxy that others keep their heads by, so that one can see what it would have chosen. Work is
shared by the ranks; counts are summed.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from headwright.configs import RunConfig
from headwright.configs.schema import DecodeConfig
from headwright.data.batch import pack
from headwright.data.corpus import general_sources
from headwright.data.store import FeatureReader
from headwright.data.stream import whole_batches
from headwright.data.target import Target
from headwright.eval.decode import generate
from headwright.eval.prompts import held_out_prompts
from headwright.eval.rollout_tau import replay
from headwright.eval.settings import Settings
from headwright.heads.base import DraftHead
from headwright.heads.draft_tree import TreeShape
from headwright.train.strategy import Strategy

TOGETHER = 4  # prompts that are decoded as one batch


@dataclass
class Measure:
    """Measures the head of a strategy. All ranks call it together."""

    strategy: Strategy
    target: Target
    held_out: FeatureReader
    depth: int
    tokens_per_batch: int
    decode: DecodeConfig
    general: frozenset[str] = frozenset()  # sources that are measured apart

    @classmethod
    def of(cls, run: RunConfig, strategy: Strategy, target: Target, held_out: FeatureReader) -> "Measure":
        """As the run asks for."""
        general = frozenset(general_sources(run.corpus))
        return cls(
            strategy, target, held_out, measured_depth(run), run.train.tokens_per_batch, run.train.decode, general
        )

    def __call__(self, decoded: bool) -> dict[str, float]:
        """τ (bonus token included), the share of cycles that accept at least k drafts, the proxy; and τ of real decoding."""
        with self.strategy.shown() as head:
            found = self.rollout(head)
            return found | (self.decoding(head) if decoded else {})

    def rollout(self, head: DraftHead) -> dict[str, float]:
        """From stored features: of the domain, and τ of general text."""
        found = self.over(head, self.documents(general=False))
        general = self.documents(general=True)
        return found | ({"tau_general": self.over(head, general)["tau"]} if general else {})

    def documents(self, general: bool) -> list[int]:
        """The held-out ones of one kind."""
        sources = enumerate(self.held_out.sources())
        return [document for document, source in sources if (source in self.general) == general]

    def over(self, head: DraftHead, documents: Sequence[int]) -> dict[str, float]:
        """From the stored features of some documents."""
        launch = self.strategy.launch
        batches = whole_batches(self.held_out, self.tokens_per_batch, documents)
        batches = islice(batches, launch.rank, None, launch.world)
        counts = torch.zeros(2 + 3 * self.depth, dtype=torch.float64)
        for group in batches:
            counts += count_batch(head, self.target, self.held_out, group, self.depth)
        emitted, cycles, *rest = self.sums(counts)
        reached, right, asked = (rest[i * self.depth : (i + 1) * self.depth] for i in range(3))
        tau = emitted / cycles if cycles else float("nan")
        found = {"tau": tau} | {f"accepted_{k + 1}": count / max(cycles, 1) for k, count in enumerate(reached)}
        return found | {"tau_proxy": proxy([a / b if b else 0.0 for a, b in zip(right, asked)])}

    def decoding(self, head: DraftHead) -> dict[str, float]:
        """By the decoder: greedy, a chain of the same depth."""
        launch, started = self.strategy.launch, time.perf_counter()
        prompts = [prompt.ids for prompt in held_out_prompts(self.held_out, self.decode.prompts)]
        together = (
            self.target.shared
        )  # all ranks run it equally often: each decodes everything, and one's counts are taken
        mine, counts = (
            prompts[:] if together else prompts[launch.rank :: launch.world],
            torch.zeros(3, dtype=torch.float64),
        )
        depth = min(self.depth, head.deepest or self.depth)
        settings = Settings(TreeShape.chain(depth), self.decode.max_new_tokens, batch=TOGETHER)
        for start in range(0, len(mine), TOGETHER):
            if start and not together and time.perf_counter() - started > self.decode.seconds:
                break
            texts = generate(self.target, head, mine[start : start + TOGETHER], settings).generations
            counts += torch.tensor(
                [sum(map(sum, (t.emitted for t in texts))), sum(len(t.emitted) for t in texts), len(texts)]
            )
        emitted, cycles, done = self.sums(counts if launch.main or not together else counts * 0)
        return {"tau_decoded": emitted / max(cycles, 1), "decoded_prompts": done} if cycles else {}

    def sums(self, counts: Tensor) -> list[float]:
        """Over all ranks. Exact: counts are whole numbers."""
        wide = counts if self.strategy.launch.device.type != "mps" else counts.float()
        found: list[float] = self.strategy.launch.sum(wide).tolist()
        return found


@torch.inference_mode()
def count_batch(head: DraftHead, target: Target, reader: FeatureReader, group: Sequence[int], depth: int) -> Tensor:
    """Of some documents: tokens emitted, cycles; and for each depth the cycles that came so far, guesses that were right given
    the text, and guesses.
    """
    documents = [reader[document] for document in group]
    batch = pack(documents)
    right_TI = head.agreement(batch.to(target.device), target, depth).cpu()
    bears_TI = batch.loss_masks(depth)
    emitted, cycles, reached = 0, 0, torch.zeros(depth, dtype=torch.float64)
    for mask_T, part in zip((d.mask_T for d in documents), right_TI.split([len(d.ids_T) for d in documents])):
        found = replay(mask_T, part)
        emitted, cycles = emitted + sum(found.emitted), cycles + len(found.emitted)
        reached += torch.tensor([sum(a > k for a in found.accepted) for k in range(depth)])
    guesses = [(right_TI & bears_TI).sum(0), bears_TI.sum(0)]
    return torch.cat([torch.tensor([emitted, cycles]), reached, *guesses]).double()


def proxy(shares: Sequence[float]) -> float:
    """τ, were each step's guess right independently of those before: 1 + Σ_k Π_{i ≤ k} share_i."""
    total, passed = 1.0, 1.0
    for share in shares:
        passed *= share
        total += passed
    return total


def measured_depth(run: RunConfig) -> int:
    """The chain whose τ decides which head is kept: the first chain that will be evaluated."""
    return next((shape.depth for shape in run.eval.shapes if shape.kind == "chain"), 5)
