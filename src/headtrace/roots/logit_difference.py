"""The logit difference between an answer and a wrong answer."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from headtrace.roots.base import Quote, quoted, words
from headtrace.validation import Ids, Index, Number, Words, Written, checked


@checked
class LogitDifference:
    """The logit of an answer (the mean over several) less that of a wrong one, or less the vocabulary's mean."""

    answer: Annotated[Ids, Field(min_length=1)]
    """Token ids of the answer."""
    wrong: Written[Ids | None] = None
    """Token ids of the wrong answer; none: the mean over the vocabulary."""
    value: Written[Number | None] = None
    """The model's own logit difference at the last position, biases of the output included."""
    position: Index | None = None
    """Where it is read."""
    answer_tokens: Words | None = None
    """How the answer reads."""
    wrong_tokens: Words | None = None
    """How the wrong answer reads."""
    bias: Number | None = None
    """What the output's own biases give of the value, whatever the prompt."""
    kind: Written[Literal["linear"]] = "linear"
    measure: ClassVar[str] = "logit difference"

    def question(self, quote: Quote = quoted) -> str:
        """What is asked, in words: an answer rather than a wrong one."""
        answer = quote(words(self.answer, self.answer_tokens))
        if self.wrong is None:
            return answer
        return f"{answer} rather than {quote(words(self.wrong, self.wrong_tokens))}"
