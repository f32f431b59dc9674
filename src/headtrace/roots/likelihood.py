"""The log-likelihood of an answer."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from headtrace.roots.base import Quote, quoted, words
from headtrace.validation import LARGEST, Flag, Ids, Index, Number, Words, Written, checked


@checked
class Likelihood:
    """The log-likelihood of one or more alternatives for the next token, or of a continuation of several tokens."""

    answer: Written[Ids] = ()
    """Alternatives for the next token (their likelihood is weighted by the model's own probabilities); with
    ``continuation``, tokens that follow one another, each given those before it."""
    continuation: Flag = False
    """Whether the tokens of ``answer`` follow one another."""
    top_k: Annotated[int, Field(strict=True, ge=1, le=LARGEST)] | None = None
    """Ask for the k likeliest next tokens instead of an answer."""
    top_p: Annotated[float, Field(strict=True, gt=0, le=1)] | None = None
    """Ask for the likeliest next tokens up to this probability instead of an answer."""
    value: Written[Number | None] = None
    """The log-likelihood, in nats."""
    position: Index | None = None
    """Where the (first) token is predicted."""
    support: Ids | None = None
    """The alternatives that were asked for, by name or by probability."""
    answer_tokens: Words | None = None
    """How the answer reads."""
    wrong: None = None
    kind: Written[Literal["probability"]] = "probability"
    measure: ClassVar[str] = "log-likelihood"

    def question(self, quote: Quote = quoted) -> str:
        """What is asked, in words: an answer, or the likeliest next tokens."""
        if self.answer:
            return quote(words(self.answer, self.answer_tokens, "" if self.continuation else " / "))
        if self.top_k == 1:
            return "the likeliest next token"
        if self.top_k is not None:
            return f"the {self.top_k} likeliest next tokens"
        return "the next token" if self.top_p is None else f"the likeliest next tokens up to {self.top_p:g}"
