"""What must not reach a training step: features that are not finite, tokens that do not exist, nothing to learn.

T tokens, K taps, R positions whose `last` is stored.
"""

from collections.abc import Callable

import torch

from headwright.data.batch import DocumentFeatures, loss_masks


def make_vet(vocabulary: int, taps: int, stored: str) -> Callable[[DocumentFeatures], str | None]:
    """A check of documents for a target of so many tokens and a head of so many taps; `stored`: the features' dtype."""

    def vet(document: DocumentFeatures) -> str | None:
        return (
            wrong_shape(document, taps)
            or wrong_token(document, vocabulary)
            or not_finite(document, stored)
            or nothing_to_learn(document)
        )

    return vet


def wrong_shape(document: DocumentFeatures, taps: int) -> str | None:
    """Taps that the head does not read."""
    found = document.taps_TKD.shape[1]
    return None if found == taps else f"it has {found} taps, the head reads {taps}: harvest with the head's taps"


def wrong_token(document: DocumentFeatures, vocabulary: int) -> str | None:
    """A token outside the target's vocabulary, in the text or among the target's choices."""
    for name, ids in (("token", document.ids_T), ("the target's choice", document.argmax_R)):
        beyond = torch.nonzero((ids < 0) | (ids >= vocabulary))[:, 0]
        if len(beyond):
            return f"{name} {int(beyond[0])} is {int(ids[beyond[0]])}, the target's vocabulary has {vocabulary}"
    return None


def not_finite(document: DocumentFeatures, stored: str) -> str | None:
    """NaN or infinity in a feature."""
    for name, values in (("taps", document.taps_TKD), ("last", document.last_RD), ("logz", document.logz_R)):
        if not bool(values.isfinite().all()):
            rows = torch.nonzero(~values.isfinite())[:, 0]
            hint = "; float16 ends at 65504: harvest with harvest.dtype=bfloat16" if stored == "float16" else ""
            return f"NaN or infinite feature: {name} of row {int(rows[0])}{hint}"
    return None


def nothing_to_learn(document: DocumentFeatures) -> str | None:
    """No row that bears loss."""
    rows = loss_masks(document.mask_T, torch.zeros_like(document.ids_T), 1)
    return None if rows.any() else "no row bears loss: no two response tokens follow each other after the first token"
