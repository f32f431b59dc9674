"""What stands behind the words on an edge: a blind test, its numbers, and a few of the examples it was made with.

>>> tested = Evidence(supported=False, p_value=0.31, accuracy=0.55, judged=40)
>>> tested.verdict
'unsupported, p 0.31'
>>> shown = Example((" the park,", " Paul", " gave a book", " to"), dest=3, src=1, score=2.5, holds=True)
>>> shown.marked
' the park,[[ Paul]] gave a book<< to>>'
>>> Evidence(supported=True, p_value=1.5)
Traceback (most recent call last):
headtrace.errors.InputError: Evidence.p_value: expected a number of at most 1.0, got 1.5
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from headtrace.validation import Flag, Index, Number, Text, Words, checked

Share = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=1)]


@checked
class Example:
    """A pair of tokens that the signal scores highly, in its context. Nobody who wrote the words had seen it."""

    pieces: Words
    """The context in a few pieces; the two tokens are pieces of their own."""
    dest: Index
    """Which piece is the token that attends."""
    src: Index
    """Which piece is the token attended to: never after `dest`, and the same where a token attends to itself."""
    score: Number | None = None
    """What the signal scores there, as a part of the attention logit."""
    holds: Flag | None = None
    """Whether the judge found that the words hold there; null where it gave no answer."""

    @property
    def marked(self) -> str:
        """The context with the source in ``[[...]]`` and the destination in ``<<...>>``."""
        return mark(self.pieces, self.dest, self.src)


@checked
class Evidence:
    """How the words of an edge came about, and whether they are right.

    A judge who knows nothing but the words labels pairs of tokens that the signal scores highest, and random ones.
    """

    supported: Flag
    """Whether the words passed: at a false-discovery rate of 5 % among all signals that were tested with this one."""
    p_value: Share | None = None
    """How likely labels as good as the judge's would be if the words said nothing; null where there was no test."""
    accuracy: Share | None = None
    """The share of labels that are right."""
    interval: tuple[Share, Share] | None = None
    """Where the accuracy lies with 95 % confidence: lower and upper end."""
    judged: Index | None = None
    """How many pairs were labelled."""
    explainer: Text | None = None
    """Who found the words."""
    judge: Text | None = None
    """Who labelled the pairs."""
    examples: tuple[Example, ...] | None = None
    """A few of the pairs that the signal scores highest, highest first; none was shown to the explainer."""

    @property
    def verdict(self) -> str:
        """The result in a few words: ``supported, p 6e-05``, ``unsupported, not judged``."""
        p_value = "not judged" if self.p_value is None else f"p {self.p_value:.2g}"
        return f"{'supported' if self.supported else 'unsupported'}, {p_value}"


def mark(pieces: Words, dest: int, src: int) -> str:
    """Text in pieces, with the source in ``[[...]]`` and the destination in ``<<...>>``."""
    words: list[str] = []
    for place, piece in enumerate(pieces):
        word = f"[[{piece}]]" if place == src else piece
        words.append(f"<<{word}>>" if place == dest else word)
    return "".join(words)
