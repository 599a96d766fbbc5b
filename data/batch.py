"""Packed batches of features, and the one place that decides which token goes with which feature.

Shapes: T packed tokens, K taps, D target width, R positions whose `last` is stored, P live rows.

Alignment. Row t of a head reads the embedding of x_{t+1} and the feature of position t, at rotary position t, and
predicts x_{t+2}. At step i of a rollout everything on the token side moves left by i: row t then reads x_{t+1+i} and
predicts x_{t+2+i}; its distribution under the target comes from `last` at position t+1+i.

A row starts a rollout when its own token x_{t+1} is a response token, which is where serving starts to draft. It bears
loss at step i while x_{t+1} … x_{t+2+i} are response tokens of one turn. Turns are separated by template tokens, so one
turn is one unbroken run of the mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass
class DocumentFeatures:
    """One document, unpadded.

    ids_T and mask_T (response tokens); taps_TKD; and for the R positions p with mask[p] and mask[p+1] (`last_rows`):
    last_RD, the target's most likely next token argmax_R and its log-sum-exp over the vocabulary logz_R. learn_T, where
    given: the only rows whose rollouts bear loss.
    """

    ids_T: Tensor
    mask_T: Tensor
    taps_TKD: Tensor
    last_RD: Tensor
    argmax_R: Tensor
    logz_R: Tensor
    learn_T: Tensor | None = None

    def part(self, part: int, parts: int, lookahead: int) -> "DocumentFeatures":
        """One of `parts` parts of its loss-bearing rows, with everything before them, and behind them the `lookahead` tokens
        that a rollout reads.
        """
        rows = torch.nonzero(loss_masks(self.mask_T, torch.zeros_like(self.ids_T), 1)[:, 0])[:, 0]
        mine = rows[part * len(rows) // parts : (part + 1) * len(rows) // parts]
        learn_T = torch.zeros_like(self.mask_T)
        learn_T[mine] = True
        stop = int(mine[-1]) + 1 + lookahead if len(mine) else 0
        kept = len(last_rows(self.mask_T[:stop]))
        tokens = (self.ids_T[:stop], self.mask_T[:stop], self.taps_TKD[:stop])
        return DocumentFeatures(*tokens, self.last_RD[:kept], self.argmax_R[:kept], self.logz_R[:kept], learn_T[:stop])


@dataclass
class Answer:
    """The response tokens of one turn. argmax[j]: the target's most likely token in place of ids[j]; -1: not known."""

    source: str
    ids: Tensor
    argmax: Tensor

    def part(self, start: int, end: int) -> "Answer":
        """Some of its tokens."""
        return Answer(self.source, self.ids[start:end], self.argmax[start:end])


def answers_of(source: str, ids_T: Tensor, mask_T: Tensor, argmax_R: Tensor | None) -> list[Answer]:
    """The response tokens of a document, turn by turn."""
    chosen_T = torch.full_like(ids_T, -1)
    if argmax_R is not None:
        chosen_T[last_rows(mask_T) + 1] = argmax_R
    return [Answer(source, ids_T[start:end], chosen_T[start:end]) for start, end in runs_of(mask_T)]


def runs_of(mask_T: Tensor) -> list[tuple[int, int]]:
    """Start and end of each unbroken run of a mask: the turns."""
    edge = torch.zeros(1, dtype=torch.int)
    steps = torch.diff(mask_T.int(), prepend=edge, append=edge)
    starts, ends = (torch.nonzero(steps == sign)[:, 0].tolist() for sign in (1, -1))
    return list(zip(starts, ends))


@dataclass
class FeatureBatch:
    """Documents packed behind each other without padding. segment_T numbers them; position_T restarts in each; learn_T: rows
    whose rollouts may bear loss.
    """

    ids_T: Tensor
    mask_T: Tensor
    learn_T: Tensor
    segment_T: Tensor
    position_T: Tensor
    taps_TKD: Tensor
    last_RD: Tensor
    last_index_R: Tensor
    argmax_R: Tensor
    logz_R: Tensor

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "FeatureBatch":
        """Features on `device`, in `dtype`. The token side stays on the host, where rows are chosen (rows.py)."""
        taps, last = self.taps_TKD, self.last_RD
        if dtype is not None:
            taps, last = taps.to(dtype), last.to(dtype)
        return replace(self, taps_TKD=to_device(taps, device), last_RD=to_device(last, device))

    def loss_rows(self) -> int:
        """Rows that bear loss at step 0: the normaliser of the loss."""
        return int(self.loss_masks(1).sum())

    def loss_masks(self, steps: int) -> Tensor:
        """Which rows bear loss at each step [T, I]."""
        return loss_masks(self.mask_T, self.segment_T, steps) & self.learn_T[:, None]

    def without_loss(self) -> "FeatureBatch":
        """The same tokens with nothing to learn: for a rank that has no batch left in a step."""
        return replace(self, learn_T=torch.zeros_like(self.learn_T))


def last_rows(mask_T: Tensor) -> Tensor:
    """Indices R of the positions whose `last` some row needs: response tokens followed by a response token."""
    return torch.nonzero(mask_T[:-1] & mask_T[1:])[:, 0]


def shift(values_T: Tensor, steps: int, fill: int | bool = 0) -> Tensor:
    """values[t + steps] at place t; `fill` beyond the end."""
    out = torch.full_like(values_T, fill)
    out[: max(len(values_T) - steps, 0)] = values_T[steps:]
    return out


def start_mask(mask_T: Tensor, segment_T: Tensor) -> Tensor:
    """Rows t that start a rollout: x_{t+1} is a response token of the same document."""
    return shift(mask_T, 1, False) & (shift(segment_T, 1, -1) == segment_T)


def loss_masks(mask_T: Tensor, segment_T: Tensor, steps: int) -> Tensor:
    """Which rows bear loss at each step [T, I]: x_{t+1} … x_{t+2+i} are response tokens of one turn."""
    bears_T, masks = start_mask(mask_T, segment_T), []
    for ahead in range(2, steps + 2):
        bears_T = bears_T & shift(mask_T, ahead, False) & (shift(segment_T, ahead, -1) == segment_T)
        masks.append(bears_T)
    return torch.stack(masks, dim=1)


def pack(documents: Sequence[DocumentFeatures]) -> FeatureBatch:
    """Documents behind each other, in the given order."""
    lengths = [len(document.ids_T) for document in documents]
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    return FeatureBatch(
        ids_T=torch.cat([document.ids_T for document in documents]),
        mask_T=torch.cat([document.mask_T for document in documents]),
        learn_T=torch.cat([torch.ones_like(d.mask_T) if d.learn_T is None else d.learn_T for d in documents]),
        segment_T=torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(lengths)),
        position_T=torch.cat([torch.arange(length) for length in lengths]),
        taps_TKD=torch.cat([document.taps_TKD for document in documents]),
        last_RD=torch.cat([document.last_RD for document in documents]),
        last_index_R=torch.cat([last_rows(d.mask_T) + start for d, start in zip(documents, starts)]),
        argmax_R=torch.cat([document.argmax_R for document in documents]),
        logz_R=torch.cat([document.logz_R for document in documents]),
    )


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A host tensor on `device`. Without pinning, a copy to a GPU would first wait for all that it is doing."""
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
