"""Can a head say what its users will read? Its draft vocabulary against their prompts, by script; nothing is run."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from headwright.data.batch import Answer
from headwright.data.coverage import SMALL, Coverage, cover
from headwright.data.scripts import script_of
from headwright.data.vocab import DraftVocab
from headwright.heads.contract import Finding
from headwright.heads.examine import ALL

ENOUGH = 0.9  # share of a script's tokens that is inside; less is worth a word
DEPTH = 5  # of the chain whose τ is bounded
COLUMNS = ("prompts", "tokens", "distinct", "inside", f"τ bound, chain of {DEPTH}")


def sayable(vocab: DraftVocab, tokenizer: Any, texts: Sequence[str]) -> dict[str, Coverage]:
    """What the vocabulary covers of some texts, by the script that most of a text is in. Prompts stand for the answers, which
    are in the same language.
    """
    pieces = [(script_of(text), torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])) for text in texts]
    answers = [Answer(script, ids, torch.full_like(ids, -1)) for script, ids in pieces if len(ids)]
    return {
        name: group for (_, name), group in cover(vocab, ((("source", a.source), a) for a in answers), DEPTH).items()
    }


def rows_of(covered: dict[str, Coverage]) -> list[tuple[object, ...]]:
    """The table of `COLUMNS`."""
    found = []
    for name, group in covered.items():
        *cells, _, bound = group.row(name)
        found.append((*cells, bound))
    return found


def unsaid(vocab: DraftVocab, covered: dict[str, Coverage]) -> Iterator[Finding]:
    """Scripts of which much is outside."""
    whole = sum(group.tokens for group in covered.values())
    for name, group in covered.items():
        share = group.inside / group.tokens
        if share >= ENOUGH or group.tokens < SMALL * whole or group.bound is None:
            continue
        yield Finding(
            "warning",
            ALL,
            f"draft vocabulary of {len(vocab)} tokens",
            f"can say {share:.1%} of the tokens of {name} prompts",
            f"what it cannot say is never accepted: on such text no head with it exceeds τ {group.bound.tau:.2f} as a chain of "
            f"{DEPTH}",
            "headwright adapt extends the vocabulary and trains the head on such text",
        )
