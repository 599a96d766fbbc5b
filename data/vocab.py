"""The draft vocabulary: which target tokens a head may guess. V target vocabulary, W draft vocabulary."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwright.configs import UserError


@dataclass(frozen=True)
class DraftVocab:
    """Kept target ids in ascending order; draft id w means target id `ids_W[w]`."""

    ids_W: Tensor
    target_size: int

    def __len__(self) -> int:
        return len(self.ids_W)

    @property
    def full(self) -> bool:
        """Whether every target token is kept, so that no map is needed."""
        return len(self) == self.target_size

    @property
    def d2t_W(self) -> Tensor:
        """Offsets as engines read them: target id = draft id + d2t[draft id]. int64."""
        return self.ids_W - torch.arange(len(self))

    @property
    def t2d_V(self) -> Tensor:
        """Boolean mask of the kept target ids."""
        mask = torch.zeros(self.target_size, dtype=torch.bool)
        mask[self.ids_W] = True
        return mask

    @property
    def index_V(self) -> Tensor:
        """Draft id of each target id; -1 where the head cannot say it."""
        index = torch.full((self.target_size,), -1)
        index[self.ids_W] = torch.arange(len(self))
        return index


def full_vocab(target_size: int) -> DraftVocab:
    """Every target token."""
    return DraftVocab(torch.arange(target_size), target_size)


def count_tokens(pieces: Iterable[Tensor], target_size: int) -> Tensor:
    """Occurrences [V] of each id in `pieces`."""
    counts = torch.zeros(target_size, dtype=torch.long)
    for ids in pieces:
        counts += torch.bincount(ids, minlength=target_size)
    return counts


def build_vocab(counts_V: Tensor, size: int | None, pinned: Sequence[int]) -> DraftVocab:
    """The `size` most frequent ids with `pinned` ones always among them; ties go to the lower id.

    Raises UserError when fewer distinct tokens occur: rows of tokens that were never seen cannot be learned.
    """
    target_size = len(counts_V)
    if size is None or size == target_size:
        return full_vocab(target_size)
    keep = counts_V.clone()
    keep[list(pinned)] = counts_V.sum() + 1
    if size < len(set(pinned)):
        raise UserError(f"vocab.size {size}: {len(set(pinned))} special tokens are always kept; set it higher")
    distinct = int((keep > 0).sum())
    if size > target_size or size > distinct:
        raise UserError(
            f"vocab.size {size}: the training text uses only {distinct} distinct response tokens (vocabulary {target_size}); "
            f"set vocab.size to {distinct} or less, or to null for the full vocabulary"
        )
    order = torch.argsort(keep, descending=True, stable=True)
    return DraftVocab(order[:size].sort().values, target_size)


def coverage(vocab: DraftVocab, counts_V: Tensor) -> float:
    """Share of the counted tokens that the head can say. No head accepts more than this."""
    total = int(counts_V.sum())
    return float(counts_V[vocab.ids_W].sum()) / total if total else 0.0
