"""The draft vocabulary: which target tokens a head may guess. V target vocabulary, W draft vocabulary.

It is built from stored token ids, in one pass and a sort: changing it never needs a new harvest.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from headwright.configs import RunConfig, UserError
from headwright.data.batch import Answer
from headwright.data.masks import special_ids
from headwright.data.scripts import script_of
from headwright.data.stream import Answers

PLACEHOLDER = re.compile("unused|reserved", re.IGNORECASE)
Group = tuple[str, str]  # ("source" or "script", its name)


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
        counts.scatter_add_(0, ids, torch.ones_like(ids))
    return counts


def choose_vocab(run: RunConfig, features: Answers, spec: dict[str, Any], tokenizer: Any) -> DraftVocab:
    """The draft vocabulary that the run file asks for, of the training text. `spec` is the target's, as manifests keep it."""
    return vocab_maker(run, features, spec, tokenizer)(run.vocab.size)


def adapted_vocab(
    run: RunConfig, features: Answers, spec: dict[str, Any], tokenizer: Any, start: DraftVocab
) -> DraftVocab:
    """The draft vocabulary of a head that is adapted, from the one that it has. Raises UserError where that cannot be."""
    refuse_vocab(run, start)
    if run.adapt.vocab == "keep":
        return start
    if run.adapt.vocab == "rebuild":
        return choose_vocab(run, features, spec, tokenizer)
    size = spec["vocab_size"] if run.vocab.size is None else run.vocab.size
    counts_V = count_tokens(features.response_tokens(), spec["vocab_size"])
    pinned = pinned_ids(tokenizer, spec["eos_token_ids"], spec["vocab_size"], run.vocab.pin_bytes)
    kept = sorted({*start.ids_W.tolist(), *pinned})
    there = len(torch.nonzero(counts_V)) + len([token for token in kept if not counts_V[token]])
    return build_vocab(counts_V, max(min(size, there), len(kept)), kept)


def refuse_vocab(run: RunConfig, start: DraftVocab) -> None:
    """A vocabulary that cannot become what the run asks for. Raises UserError."""
    if run.adapt.vocab == "keep":
        return
    if start.full:
        raise UserError(
            f"adapt.vocab {run.adapt.vocab}: {run.adapt.head} can say all {len(start)} tokens of the target: adapt.vocab=keep"
        )
    size = start.target_size if run.vocab.size is None else run.vocab.size
    if run.adapt.vocab == "extend" and size <= len(start):
        raise UserError(
            f"vocab.size {size}: {run.adapt.head} has {len(start)} draft tokens already, and adapt.vocab is extend: set it "
            "higher, or adapt.vocab to keep or rebuild"
        )


def vocab_maker(
    run: RunConfig, features: Answers, spec: dict[str, Any], tokenizer: Any
) -> Callable[[int | None], DraftVocab]:
    """A function from a size to the vocabulary: the text is counted once."""
    counts_V = count_tokens(features.response_tokens(), spec["vocab_size"])
    pinned = pinned_ids(tokenizer, spec["eos_token_ids"], spec["vocab_size"], run.vocab.pin_bytes)
    groups = group_counts(features, tokenizer, counts_V) if run.vocab.quotas else {}
    return lambda size: build_vocab(counts_V, size, pinned, groups, run.vocab.quotas)


def build_vocab(
    counts_V: Tensor,
    size: int | None,
    pinned: Sequence[int],
    groups: Mapping[str, Tensor] | None = None,
    quotas: Mapping[str, float] | None = None,
) -> DraftVocab:
    """The `size` most frequent ids with `pinned` ones always among them; ties go to the lower id.

    With quotas, each group first takes its share of the places for its own most frequent ids; what is left goes by
    overall frequency. Raises UserError when fewer distinct tokens occur: rows of tokens that were never seen cannot be
    learned.
    """
    target_size = len(counts_V)
    if size is None or size == target_size:
        return full_vocab(target_size)
    rank_V = counts_V.clone()
    first = int(counts_V.sum()) + 1
    if size < len(set(pinned)):
        raise UserError(
            f"vocab.size {size}: {len(set(pinned))} special tokens and byte pieces are always kept; set it higher, or "
            "vocab.pin_bytes to false"
        )
    rank_V[list(pinned)] = first + 1
    distinct = int((rank_V > 0).sum())
    if size > target_size or size > distinct:
        raise UserError(
            f"vocab.size {size}: the training text uses only {distinct} distinct response tokens (vocabulary {target_size}); "
            f"set vocab.size to {distinct} or less, or to null for the full vocabulary"
        )
    for name, share in check_quotas(quotas or {}, groups or {}).items():
        place = int(Fraction(str(share)) * (size - len(set(pinned))))
        top = torch.argsort((groups or {})[name], descending=True, stable=True)[:place]
        top = top[(groups or {})[name][top] > 0]
        rank_V[top] = rank_V[top].clamp_min(first)
    order = torch.argsort(rank_V, descending=True, stable=True)
    return DraftVocab(order[:size].sort().values, target_size)


def check_quotas(quotas: Mapping[str, float], groups: Mapping[str, Tensor]) -> Mapping[str, float]:
    """Quotas name groups that occur, and leave no place given twice."""
    for name in quotas:
        if name not in groups:
            raise UserError(f"vocab.quotas.{name}: no such script or source in the training text: {', '.join(groups)}")
    if sum(quotas.values()) > 1 + 1e-9:
        raise UserError(f"vocab.quotas add up to {sum(quotas.values()):g}: shares of the places cannot exceed 1")
    return quotas


def pinned_ids(tokenizer: Any, ends: Sequence[int], size: int, with_bytes: bool) -> list[int]:
    """Ids that are always kept: ends of text, special tokens that mean something, and the pieces that spell single bytes."""
    special = special_ids(tokenizer) - placeholders(tokenizer)
    pinned = {*ends, *(token for token in special if token < size)}
    return sorted(pinned | set(byte_pieces(tokenizer, size))) if with_bytes else sorted(pinned)


def placeholders(tokenizer: Any) -> set[int]:
    """Special tokens that mean nothing yet: Gemma has 6242 (<unused0>, …), Llama 3 250 (<|reserved_special_token_0|>, …)."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {token for token, entry in added.items() if PLACEHOLDER.search(entry.content)}


def byte_pieces(tokenizer: Any, size: int) -> list[int]:
    """Ids of the 256 single bytes: `<0x00>` … of a byte-fallback vocabulary, or the alphabet of a byte-level one."""
    vocabulary = tokenizer.get_vocab()
    fallback = [vocabulary.get(f"<0x{byte:02X}>") for byte in range(256)]
    level = [vocabulary.get(symbol) for symbol in sorted(ByteLevel.alphabet())]
    found = fallback if None not in fallback else level
    return [token for token in found if token is not None and token < size]


def group_counts(features: Answers, tokenizer: Any, counts_V: Tensor) -> dict[str, Tensor]:
    """Occurrences [V] by source and by script; a source that is named like a script goes first."""
    groups: dict[Group, Tensor] = {}
    for group, part in grouped(features.answers(), tokenizer):
        counts = groups.setdefault(group, torch.zeros_like(counts_V))
        counts.scatter_add_(0, part.ids, torch.ones_like(part.ids))
    return {name: counts for (_, name), counts in sorted(groups.items())}


def grouped(answers: Iterable[Answer], tokenizer: Any) -> Iterator[tuple[Group, Answer]]:
    """Every answer under the name of its source, and each of its lines under that of its script.

    A line, because a piece of a letter has no script of its own.
    """
    breaks: dict[int, bool] = {}
    for answer in answers:
        yield ("source", answer.source), answer
        start = 0
        for end, token in enumerate(answer.ids.tolist(), 1):
            if token not in breaks:
                breaks[token] = "\n" in tokenizer.decode([token])
            if breaks[token] or end == len(answer.ids):
                script = script_of(tokenizer.decode(answer.ids[start:end].tolist()))
                yield ("script", script), answer.part(start, end)
                start = end


def coverage(vocab: DraftVocab, counts_V: Tensor) -> float:
    """Share of the counted tokens that the head can say. No head accepts more than this."""
    total = int(counts_V.sum())
    return float(counts_V[vocab.ids_W].sum()) / total if total else 0.0
