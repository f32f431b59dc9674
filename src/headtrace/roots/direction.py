"""The projection of the residual stream on a direction."""

from __future__ import annotations

from typing import ClassVar, Literal

from headtrace.roots.base import Quote, quoted
from headtrace.validation import Index, Number, Text, Written, checked


@checked
class Direction:
    """The residual at the input of a layer (or of the final norm) and one position, along a vector: a probe."""

    layer: Index
    """The layer at whose input it is read."""
    position: Index | None = None
    """Where it is read; none: the last position."""
    vector: tuple[Number, ...] | None = None
    """The vector, d_model numbers; unknown in files of version 1."""
    value: Written[Number | None] = None
    """The projection."""
    label: Text | None = None
    """What the direction stands for, in words."""
    kind: Written[Literal["direction"]] = "direction"
    measure: ClassVar[str] = "projection"

    def question(self, quote: Quote = quoted) -> str:
        """What is asked, in words: the label of the direction, or its layer."""
        return self.label or f"a direction at layer {self.layer}"
