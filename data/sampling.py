"""Sampling policies: from logits to the distribution that a user asked for.

One place for temperature, top-k, top-p, min-p and penalties. The same object makes the probabilities for generation, for
verification, for the residual and for the bonus token; losslessness rests on that.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headwright.configs import UserError


@dataclass
class Said:
    """Which tokens stand before a place, as masks [..., V]: anywhere in prompt and answer, and in the answer alone."""

    anywhere_XV: Tensor
    answer_XV: Tensor


@dataclass(frozen=True)
class Policy:
    """How a token is drawn. temperature 0 is greedy, and then top_k, top_p and min_p mean nothing.

    repetition_penalty (CTRL, as in transformers and vLLM) divides positive logits and multiplies negative ones of tokens that
    stand in prompt or answer; presence_penalty (as in vLLM and OpenAI's interface) is subtracted for tokens of the answer.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf or not 0 < self.top_p <= 1 or not 0 <= self.min_p < 1 or self.top_k < 0:
            raise UserError(f"sampling policy out of range: {self}")
        if self.greedy and (self.top_k or self.top_p < 1 or self.min_p):
            raise UserError(f"{self}: top_k, top_p and min_p mean nothing at temperature 0: leave them out")
        if not 0 < self.repetition_penalty < math.inf or not math.isfinite(self.presence_penalty):
            raise UserError(f"sampling policy out of range: {self}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    @property
    def penalises(self) -> bool:
        """Whether logits depend on what was said before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0

    def penalise(self, logits_XV: Tensor, said: Said) -> Tensor:
        """Logits [..., V] in fp32 after the penalties; what comes before everything else."""
        logits_XV = logits_XV.float()
        rate = self.repetition_penalty
        if rate != 1:
            weaker_XV = torch.where(logits_XV > 0, logits_XV / rate, logits_XV * rate)
            logits_XV = torch.where(said.anywhere_XV, weaker_XV, logits_XV)
        return logits_XV - self.presence_penalty * said.answer_XV

    def probs(self, logits_XV: Tensor) -> Tensor:
        """Probabilities [..., V] in fp32. Greedy: all mass on the first maximum."""
        logits_XV = logits_XV.float()
        if self.greedy:
            return torch.zeros_like(logits_XV).scatter_(-1, logits_XV.argmax(-1, keepdim=True), 1.0)
        probs_XV = (logits_XV / self.temperature).softmax(-1)
        if self.top_k or self.top_p < 1 or self.min_p:
            probs_XV = probs_XV * self.allowed(probs_XV)
            probs_XV = probs_XV / probs_XV.sum(-1, keepdim=True)
        return probs_XV

    def allowed(self, probs_XV: Tensor) -> Tensor:
        """Mask [..., V] of the tokens that top-k, top-p and min-p leave. The most likely one always stays."""
        keep = probs_XV >= self.min_p * probs_XV.amax(-1, keepdim=True)
        if self.top_k or self.top_p < 1:
            ranked, order = self.head_of(probs_XV)
            # top_p is a share of what top_k left, as in transformers and vLLM
            mass = ranked.sum(-1, keepdim=True) if self.top_k else 1.0
            inside = (ranked.cumsum(-1) - ranked < self.top_p * mass) | (self.top_p == 1)
            keep &= torch.zeros_like(keep).scatter_(-1, order, inside)
        return keep

    def head_of(self, probs_XV: Tensor) -> tuple[Tensor, Tensor]:
        """The most likely tokens in order: top_k of them, or enough to hold the top_p mass.

        A full sort of a large vocabulary costs more than a decoding step; the nucleus is nearly always short.
        """
        vocabulary = probs_XV.shape[-1]
        count = min(
            self.top_k or (vocabulary if probs_XV.is_cuda else 256), vocabulary
        )  # to look would wait for the device
        ranked, order = probs_XV.topk(count, dim=-1)
        while not self.top_k and count < vocabulary and (ranked.sum(-1) < self.top_p).any():
            count = min(count * 8, vocabulary)
            ranked, order = probs_XV.topk(count, dim=-1)
        return ranked, order

    def choose(self, logits_XV: Tensor, uniform_X: Tensor | None = None) -> Tensor:
        """Token ids [...]: the first maximum, or the draw that `uniform_X` in [0, 1) selects."""
        if self.greedy:
            return logits_XV.argmax(-1)
        assert uniform_X is not None, "sampling needs one uniform number per draw"
        return draw(self.probs(logits_XV), uniform_X)


def draw(probs_XV: Tensor, uniform_X: Tensor) -> Tensor:
    """Inverse-CDF draw: the index at which the cumulative sum first exceeds u · total. Never a zero-mass index."""
    cumulative = probs_XV.double().cumsum(-1)
    threshold = uniform_X.double()[..., None] * cumulative[..., -1:]
    index = torch.searchsorted(cumulative, threshold, right=True)[..., 0]
    last = probs_XV.shape[-1] - 1 - (probs_XV.flip(-1) > 0).int().argmax(-1)
    return torch.minimum(index, last)
