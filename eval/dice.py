"""Random numbers of a batch of texts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headwright.data.batch import to_device


class Dice:
    """Numbers in [0, 1), a stream of its own for each text. A block is drawn per cycle, so that a text's stream does
    not depend on how many numbers others need.
    """

    def __init__(self, device: torch.device):
        self.device, self.next = device, 0
        self.block_BU = torch.zeros(0, 0)

    def roll(self, generators: Sequence[torch.Generator], count: int) -> None:
        """A new block."""
        drawn = [torch.rand(1 + count, generator=generator, dtype=torch.float64) for generator in generators]
        self.block_BU, self.next = to_device(torch.stack(drawn), self.device), 1

    def plain(self) -> Tensor:
        """The number [B] that chooses a token without drafting: the same, whether a neighbour drafts or not."""
        return self.block_BU[:, 0]

    def __call__(self) -> Tensor:
        """The next number of each text [B]."""
        self.next += 1
        return self.block_BU[:, self.next - 1]
