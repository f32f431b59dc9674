"""The attention of chosen heads."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from headtrace.roots.base import Quote, quoted
from headtrace.validation import Index, Number, Words, Written, checked


@checked
class Heads:
    """The attention of given heads at the last position, each on the source that it attends to most."""

    heads: Annotated[Words, Field(min_length=1)]
    """Names such as ``L9H6``."""
    value: Written[Number | None] = None
    """The attention of all of them, added up."""
    position: Index | None = None
    """Where they attend from."""
    kind: Written[Literal["heads"]] = "heads"
    measure: ClassVar[str] = "attention"

    def question(self, quote: Quote = quoted) -> str:
        """What is asked, in words: the attention of the named heads."""
        return "the attention of " + ", ".join(self.heads)
