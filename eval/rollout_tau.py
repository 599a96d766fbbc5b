"""τ of a greedy chain without decoding.

On text that the target itself wrote greedily, a draft is accepted exactly while it equals the text. So the head's
inputs in decoding are those of one teacher-forced rollout, and every cycle follows from its guesses. Equal to the
decoder's counters, up to near-ties when features were stored in less than the target's precision. T tokens, I rollout
steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headwright.data.batch import pack, runs_of
from headwright.data.store import FeatureReader
from headwright.data.stream import whole_batches
from headwright.data.target import Target
from headwright.heads.base import DraftHead


@dataclass
class Cycles:
    """What each cycle accepted and emitted."""

    accepted: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """τ, the bonus token included."""
        return sum(self.emitted) / len(self.emitted) if self.emitted else float("nan")

    def joint(self, depth: int) -> list[float]:
        """Share of the cycles that accept at least 1, 2, … depth tokens."""
        return [sum(a > k for a in self.accepted) / max(len(self.accepted), 1) for k in range(depth)]


def replay(mask_T: Tensor, right_TI: Tensor) -> Cycles:
    """The cycles of one document; right[t, i]: row t's guess at step i equals the text. Each answer starts anew."""
    return cycles_of(mask_T, right_TI.int().cumprod(1).sum(1).tolist())


def cycles_of(mask_T: Tensor, accepted: Sequence[int]) -> Cycles:
    """The cycles of one document, given how many drafts each row would see accepted if a cycle started from it."""
    out = Cycles()
    for root, stop in runs_of(mask_T):
        end = stop - 1
        while root < end:
            taken = min(accepted[root - 1], end - root)
            emitted = min(taken + 1, end - root)
            out.accepted.append(taken)
            out.emitted.append(emitted)
            root += emitted
    return out


def rollout_tau(head: DraftHead, target: Target, reader: FeatureReader, depth: int, tokens_per_batch: int) -> Cycles:
    """All cycles of a greedy chain of `depth` over the stored (greedy, on-policy) documents."""
    return rollout_taus(head, target, reader, [depth], tokens_per_batch)[depth]


def rollout_taus(
    head: DraftHead, target: Target, reader: FeatureReader, depths: Sequence[int], tokens_per_batch: int
) -> dict[int, Cycles]:
    """The same for several depths, from one rollout of the deepest."""
    totals = {depth: Cycles() for depth in depths}
    for found in cycles_of_documents(head, target, reader, depths, tokens_per_batch):
        for depth, total in totals.items():
            total.accepted += found[depth].accepted
            total.emitted += found[depth].emitted
    return totals


@torch.inference_mode()
def cycles_of_documents(
    head: DraftHead, target: Target, reader: FeatureReader, depths: Sequence[int], tokens_per_batch: int
) -> Iterator[dict[int, Cycles]]:
    """The cycles of each stored document, by depth."""
    for group in whole_batches(reader, tokens_per_batch):
        documents = [reader[document] for document in group]
        batch = pack(documents).to(target.device)
        right_TI = head.agreement(batch, target, max(depths)).cpu()
        for mask_T, part in zip((d.mask_T for d in documents), right_TI.split([len(d.ids_T) for d in documents])):
            yield {depth: replay(mask_T, part[:, :depth]) for depth in depths}
