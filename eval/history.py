"""Which tokens texts have said: what penalties need. Shapes: B texts, N tree nodes, P places of a path, V target vocabulary."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwright.data.sampling import Said
from headwright.heads.draft_tree import Tree


@dataclass
class History:
    """Which tokens each text has said, for penalties: masks [B, V]. The root is not in them yet: it stands in every tree."""

    anywhere_BV: Tensor
    answer_BV: Tensor

    @classmethod
    def of(cls, ids_BT: Tensor, vocabulary: int) -> "History":
        """Of prompts."""
        anywhere = torch.zeros(len(ids_BT), vocabulary, dtype=torch.bool, device=ids_BT.device).scatter_(
            1, ids_BT, True
        )
        return cls(anywhere, torch.zeros_like(anywhere))

    def before(self, tree: Tree) -> Said:
        """What stands before the token after each node: the text, the root, and the node's own path. [B, N, V]"""
        batch, nodes = tree.tokens_BN.shape
        shape = (batch, nodes, self.anywhere_BV.shape[1])
        sees_BNN = tree.ancestors()
        path = torch.zeros(shape, dtype=torch.int32, device=sees_BNN.device)
        path.scatter_add_(2, tree.tokens_BN[:, None].expand(batch, nodes, nodes), sees_BNN.int())
        said = path > 0
        return Said(self.anywhere_BV[:, None] | said, self.answer_BV[:, None] | said)

    def add(self, tree: Tree, nodes_BP: Tensor) -> None:
        """An accepted path, the root first; repeated nodes change nothing."""
        tokens_BP = tree.tokens_BN.gather(1, nodes_BP)
        for mask_BV in (self.anywhere_BV, self.answer_BV):
            mask_BV.scatter_(1, tokens_BP, True)

    def put(self, row: int, other: "History") -> None:
        """Let `row` hold what the only row of `other` holds."""
        self.anywhere_BV[row], self.answer_BV[row] = other.anywhere_BV[0], other.answer_BV[0]

    def select(self, rows: Sequence[int]) -> None:
        """Keep only `rows`."""
        self.anywhere_BV, self.answer_BV = self.anywhere_BV[list(rows)], self.answer_BV[list(rows)]
