"""Drafters that remember nothing between drafts. Shapes: B texts, D target width."""

from collections.abc import Sequence
from typing import Any


class Steady:
    """The state of a head that reads the last confirmed row alone."""

    def put(self, row: int, other: Any) -> None:
        """Nothing to take over."""

    def select(self, rows: Sequence[int]) -> None:
        """Nothing to keep."""
