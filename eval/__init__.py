"""Decoding and measuring. As a library:

from headwright.eval import speculate
answer = speculate("path/to/model", "runs/my-head/head", "Why is the sky blue?", shape="chain-5")
print(answer.text, answer.acceptance_length)
"""

import importlib
from typing import Any

__all__ = ["Answer", "Piece", "Speculator", "speculate", "stream"]


def __getattr__(name: str) -> Any:
    """What the library offers, imported when it is asked for: commands start without torch."""
    if name in __all__:
        return getattr(importlib.import_module("headwright.eval.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
