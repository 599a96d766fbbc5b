"""Can a head say what its users will read? Its draft vocabulary against their prompts, by script; nothing is run."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from headwright.data.batch import Answer
from headwright.data.coverage import SMALL, Coverage, cover
from headwright.data.vocab import DraftVocab, Group, grouped
from headwright.heads.contract import Finding
from headwright.heads.examine import ALL

ENOUGH = 0.9  # share of a script's tokens that is inside; less is worth a word
DEPTH = 5  # of the chain whose τ is bounded


def sayable(vocab: DraftVocab, tokenizer: Any, texts: Sequence[str]) -> dict[Group, Coverage]:
    """What the vocabulary covers of some texts. Prompts stand for the answers, which are of the same language."""
    pieces = [torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    answers = [Answer("prompts", ids, torch.full_like(ids, -1)) for ids in pieces if len(ids)]
    return cover(vocab, grouped(answers, tokenizer), DEPTH)


def unsaid(vocab: DraftVocab, covered: dict[Group, Coverage]) -> Iterator[Finding]:
    """Scripts of which much is outside."""
    scripts = {name: group for (kind, name), group in covered.items() if kind == "script"}
    whole = sum(group.tokens for group in scripts.values())
    bounds = [group.bound.tau for group in covered.values() if group.bound]
    for name, group in scripts.items():
        share = group.inside / group.tokens
        if share >= ENOUGH or group.tokens < SMALL * whole:
            continue
        yield Finding(
            "warning",
            ALL,
            f"draft vocabulary of {len(vocab)} tokens",
            f"can say {share:.1%} of the {name} tokens of the prompts",
            f"what it cannot say is never accepted: no head with it exceeds τ {bounds[0]:.2f} as a chain of {DEPTH} on text "
            "like all of them together",
            "headwright adapt extends the vocabulary and trains the head on such text",
        )
