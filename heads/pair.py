"""[token ; feature] joined by one linear layer into the stream that decoder layers read: EAGLE-1 and MTP.

The token's half is projected once for all steps of a rollout. Shapes: D target width, H head width.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwright.heads.ttt import unchanged

Norm = Callable[[Tensor], Tensor]


class Pair:
    """W [enorm(embedding) ; hnorm(feature)] + b. `mask_first`: the token at position 0 counts as zeros, as engines have it for
    the MTP layers of DeepSeek, GLM, MiMo and ERNIE.
    """

    def __init__(self, linear: nn.Linear, enorm: Norm = unchanged, hnorm: Norm = unchanged, mask_first: bool = False):
        self.linear, self.enorm, self.hnorm, self.mask_first = linear, enorm, hnorm, mask_first
        self.width = linear.in_features // 2

    def token(self, embedding_XD: Tensor) -> Tensor:
        """The token's share [..., H]."""
        return F.linear(self.enorm(embedding_XD), self.linear.weight[:, : self.width])

    def join(self, token_XH: Tensor, feature_XD: Tensor, positions_X: Tensor) -> Tensor:
        """The stream [..., H]."""
        if self.mask_first:
            token_XH = torch.where(positions_X[..., None] == 0, 0.0, token_XH)
        return token_XH + F.linear(self.hnorm(feature_XD), self.linear.weight[:, self.width :], self.linear.bias)
