"""Training-free drafters: the baselines that a head must beat."""

from dataclasses import dataclass, field

import torch

from headwright.heads.base import Context
from headwright.heads.draft_tree import Tree, TreeShape, root_only


@dataclass
class History:
    """The tokens so far."""

    tokens: list[int] = field(default_factory=list)


class PromptLookup:
    """Prompt lookup decoding: what followed the last earlier occurrence of the current n-gram, longest n first."""

    def __init__(self, longest: int = 3):
        self.longest = longest

    def start(self, batch: int, slots: int) -> History:
        """An empty history."""
        return History()

    def propose(self, state: History, context: Context, shape: TreeShape) -> Tree:
        """A chain of at most `shape.depth` tokens; the root alone where nothing matches."""
        state.tokens += context.tokens_BM[0].tolist()
        return chain_of(context, self.lookup(state.tokens, shape.depth))

    def lookup(self, tokens: list[int], count: int) -> list[int]:
        """The continuation of the most recent match."""
        for length in range(min(self.longest, len(tokens) - 1), 0, -1):
            ngram = tokens[-length:]
            for start in range(len(tokens) - length - 1, -1, -1):
                if tokens[start : start + length] == ngram:
                    return tokens[start + length : start + length + count]
        return []


def chain_of(context: Context, guesses: list[int]) -> Tree:
    """A deterministic chain below the root."""
    tree = root_only(context.root_B)
    if not guesses:
        return tree
    tokens = torch.tensor([guesses], device=context.root_B.device)
    line = torch.arange(len(guesses) + 1, device=tokens.device)[None]
    return Tree(torch.cat([tree.tokens_BN, tokens], 1), line - 1, line, torch.zeros(line.shape, device=tokens.device))
