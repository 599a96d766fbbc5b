"""The target's own answers, with its hidden states kept from the same run.

A head serves text that the target writes, so it should learn on such text (on-policy). Answers are generated in batches
with ragged prompts; a row leaves the batch when its answer ends. Sampling is per row: a row's text does not depend on
its batch, up to floating-point rounding.

Shapes: B rows of a batch, N new tokens, K taps, D target width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headwright.data.batch import DocumentFeatures, last_rows
from headwright.data.cache import KVCache
from headwright.data.sampling import Policy
from headwright.data.target import Features, Target


@dataclass
class Question:
    """A prompt, how its answer is drawn, and the seed of that draw. `mask`: earlier answers of the target in the prompt."""

    ids: list[int]
    policy: Policy
    seed: int = 0
    mask: list[bool] | None = None


@dataclass
class Row:
    """An answer in the making: tokens, and the features of every position fed so far."""

    question: Question
    generator: torch.Generator
    new: list[int] = field(default_factory=list)
    ended: bool = False
    taps: list[Tensor] = field(default_factory=list)
    last: list[Tensor] = field(default_factory=list)
    argmax: list[Tensor] = field(default_factory=list)
    logz: list[Tensor] = field(default_factory=list)
    earlier: tuple[Tensor, Tensor, Tensor] | None = None

    def record(self, host: Features, row: int, valid: int) -> None:
        """Keep the states of the `valid` first tokens of row `row`. `host` lies on the CPU."""
        self.taps.append(host.taps_BNKD[row, :valid])
        self.last.append(host.last_BND[row, valid - 1])

    def document(self) -> DocumentFeatures:
        """The finished document."""
        ids_T = torch.tensor(self.question.ids + self.new)
        given = self.question.mask or [False] * len(self.question.ids)
        mask_T = torch.tensor(given + [True] * len(self.new))
        # last[j] stands on position len(prompt) - 1 + j; rows are needed for the response tokens but the final one
        count = max(len(self.new) - 1, 0)
        rows = [torch.stack(kept)[1 : 1 + count] for kept in (self.last, self.argmax, self.logz)]
        if self.earlier is not None:
            rows = [torch.cat(pair) for pair in zip(self.earlier, rows)]
        return DocumentFeatures(ids_T, mask_T, torch.cat(self.taps), *rows)


@torch.inference_mode()
def answer(
    target: Target, questions: Sequence[Question], max_new_tokens: int, store: torch.dtype = torch.float32
) -> list[DocumentFeatures]:
    """One answered document per question, in order, on the CPU."""
    rows = [Row(question, torch.Generator().manual_seed(question.seed)) for question in questions]
    live = rows
    cache, features = prefill(target, questions, max_new_tokens)
    valid = list(cache.lengths)
    for index, row in enumerate(rows):
        row.earlier = earlier_answers(target, row.question, features.last_BND[index], store)
    while True:
        host = Features(features.taps_BNKD.to("cpu", store), features.last_BND.to("cpu", store))
        for index, row in enumerate(live):
            row.record(host, index, valid[index])
        live, stay = drop_ended(live)
        if not live:
            return [row.document() for row in rows]
        ends = torch.tensor([valid[index] - 1 for index in stay], device=target.device)
        last_BD = features.last_BND[torch.tensor(stay, device=target.device), ends]
        tokens = next_tokens(target, live, last_BD, max_new_tokens)
        if len(stay) < len(cache.lengths):
            cache.select(stay)
        features = target.extend(torch.tensor(tokens, device=target.device)[:, None], cache)
        cache.advance(1)
        valid = [1] * len(live)


def earlier_answers(
    target: Target, question: Question, last_ND: Tensor, store: torch.dtype
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The loss-bearing rows (last, argmax, logz) of answers that stand in the prompt already."""
    if question.mask is None:
        return None
    last_RD = last_ND[last_rows(torch.tensor(question.mask)).to(last_ND.device)]
    return (last_RD.to("cpu", store), *summarise(target, last_RD))


def prefill(target: Target, questions: Sequence[Question], max_new_tokens: int) -> tuple[KVCache, Features]:
    """A cache that holds each question's prompt, and the prompts' features. Several answers to one prompt share its pass."""
    prompts = list(dict.fromkeys(tuple(question.ids) for question in questions))
    lengths = [len(prompt) for prompt in prompts]
    cache = target.new_cache(len(prompts), max(lengths) + max_new_tokens + 1)
    features = target.extend(padded([list(prompt) for prompt in prompts], target), cache)
    cache.advance(lengths)
    places = [prompts.index(tuple(question.ids)) for question in questions]
    if places != list(range(len(prompts))):
        cache.select(places)
        index = torch.tensor(places, device=target.device)
        features = Features(features.taps_BNKD[index], features.last_BND[index])
    return cache, features


def drop_ended(live: list[Row]) -> tuple[list[Row], list[int]]:
    """The rows that go on, and their places. A row ends one step late: its final token must have been fed."""
    stay = [index for index, row in enumerate(live) if not row.ended]
    return [live[index] for index in stay], stay


def next_tokens(target: Target, live: list[Row], last_BD: Tensor, max_new_tokens: int) -> list[int]:
    """Draw one token per row, and mark the rows whose answer it ends."""
    logits_BV = target.logits(last_BD).float()
    argmax_B, logz_B = logits_BV.argmax(-1).cpu(), logits_BV.logsumexp(-1).cpu()
    tokens = argmax_B.tolist()
    drawn = [index for index, row in enumerate(live) if not row.question.policy.greedy]
    for policy in {live[index].question.policy for index in drawn}:
        group = [index for index in drawn if live[index].question.policy == policy]
        uniform = torch.stack([torch.rand((), generator=live[index].generator, dtype=torch.float64) for index in group])
        for index, token in zip(group, policy.choose(logits_BV[group], uniform.to(target.device)).tolist()):
            tokens[index] = token
    for index, row in enumerate(live):
        row.argmax.append(argmax_B[index])
        row.logz.append(logz_B[index])
        row.new.append(tokens[index])
        row.ended = tokens[index] in target.spec.eos_token_ids or len(row.new) >= max_new_tokens
    return tokens


@torch.inference_mode()
def read_documents(
    target: Target, texts: Sequence[tuple[list[int], list[bool]]], store: torch.dtype = torch.float32
) -> list[DocumentFeatures]:
    """Features of given texts (ids, mask), by one padded prefill."""
    features = target.features(padded([ids for ids, _ in texts], target))
    masks = [torch.tensor(mask, dtype=torch.bool) for _, mask in texts]
    wanted = [last_rows(mask_T) for mask_T in masks]
    counts = [len(rows) for rows in wanted]
    owners = torch.repeat_interleave(torch.arange(len(texts)), torch.tensor(counts)).to(target.device)
    last_RD = features.last_BND[owners, torch.cat(wanted).to(target.device)]
    # all documents together: the lm_head's weight is large, and many passes over a few rows each would cost twice as much
    argmax, logz = (parts.split(counts) for parts in summarise(target, last_RD))
    last = last_RD.to("cpu", store).split(counts)
    return [
        DocumentFeatures(
            torch.tensor(ids),
            masks[row],
            features.taps_BNKD[row, : len(ids)].to("cpu", store),
            last[row],
            argmax[row],
            logz[row],
        )
        for row, (ids, _) in enumerate(texts)
    ]


def summarise(target: Target, last_RD: Tensor, chunk: int = 512) -> tuple[Tensor, Tensor]:
    """The most likely token and the log-sum-exp of the logits, without ever holding [R, V]."""
    argmax, logz = [], []
    for piece in last_RD.split(chunk):
        logits = target.logits(piece).float()
        argmax.append(logits.argmax(-1).cpu())
        logz.append(logits.logsumexp(-1).cpu())
    empty = torch.zeros(0)
    return torch.cat([empty.long(), *argmax]), torch.cat([empty, *logz])


def padded(rows: Sequence[list[int]], target: Target) -> Tensor:
    """Right-padded ids [B, N] on the target's device. Padding is masked out or overwritten, never read."""
    width = max(len(row) for row in rows)
    return torch.tensor([row + [target.spec.pad_token_id] * (width - len(row)) for row in rows], device=target.device)
