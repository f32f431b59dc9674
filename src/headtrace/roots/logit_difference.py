"""The logit difference between an answer and a wrong answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from headtrace.errors import InputError
from headtrace.roots.base import (
    ANSWERS,
    BaseRoot,
    Quote,
    RootOption,
    quoted,
    require_tokens,
    single_tokens,
    words,
)
from headtrace.validation import Ids, Index, Number, Words, Written, checked

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from headtrace.causal.checks import Checking
    from headtrace.causal.metric import Metric
    from headtrace.models import Model, Recording
    from headtrace.prompts import Chat
    from headtrace.tracing.attribute_root import RootAttribution, RootReading, Seeds
    from headtrace.vocabulary import Prompt


@checked
class LogitDifference(BaseRoot):
    """The logit of an answer (the mean over several) minus that of a wrong one, or minus the vocabulary's mean."""

    answer: Annotated[Ids, Field(min_length=1)]
    """Token ids of the answer."""
    wrong: Written[Ids | None] = None
    """Token ids of the wrong answer; null: compare with the mean over the vocabulary."""
    value: Written[Number | None] = None
    """The model's own logit difference at the last position, biases of the output included."""
    position: Index | None = None
    """The position at which it is read."""
    answer_tokens: Words | None = None
    """The text of the answer's tokens."""
    wrong_tokens: Words | None = None
    """The text of the wrong answer's tokens."""
    bias: Number | None = None
    """The part of the value that comes from the output's own biases, on any prompt."""
    kind: Written[Literal["linear"]] = "linear"
    measure: ClassVar[str] = "logit difference"
    adds_up: ClassVar[bool] = True
    options: ClassVar[Mapping[str, RootOption]] = {
        "answer": RootOption("the answer: text, a token id, or several alternatives", ANSWERS),
        "wrong": RootOption("the wrong answer to compare with", ANSWERS),
    }

    def question(self, quote: Quote = quoted) -> str:
        """What is explained, in words: an answer rather than a wrong one."""
        answer = quote(words(self.answer, self.answer_tokens))
        if self.wrong is None:
            return answer
        return f"{answer} rather than {quote(words(self.wrong, self.wrong_tokens))}"

    def advice(self) -> list[str]:
        return [
            "Look at what the model answers here: headtrace record, or recording.top_answers() in Python.",
            "Ask for an answer that the model prefers: another --answer, or answer and wrong the other way round.",
            "Ask about the answer in another way: --root probability.",
        ]

    # From a request

    @classmethod
    def from_options(
        cls, model: Model, prompt: Prompt | Chat, length: int, given: Mapping[str, Any]
    ) -> LogitDifference:
        if "answer" not in given:
            raise InputError("root='linear' needs an answer, such as answer=' Mary'.")
        answer = single_tokens(model, prompt, given["answer"], "answer")
        wrong = single_tokens(model, prompt, given["wrong"], "wrong answer") if "wrong" in given else None
        if set(answer) & set(wrong or ()):
            raise InputError("The answer and the wrong answer are the same token: their difference is zero.")
        return cls(answer, wrong)

    def with_words(self, model: Model) -> LogitDifference:
        wrong = None if self.wrong is None else model.output_labels(self.wrong)
        return replace(self, answer_tokens=model.output_labels(self.answer), wrong_tokens=wrong)

    # Tracing

    def difference(self, per_token: Float[Tensor, "vocab *rest"]) -> Float[Tensor, "*rest"]:
        """The answer's rows (their mean) less the wrong answer's, or less the mean of all."""
        against = per_token if self.wrong is None else per_token[list(self.wrong)]
        return per_token[list(self.answer)].mean(dim=0) - against.mean(dim=0)

    def readings(self, recording: Recording, prompt: int, ig_steps: int) -> list[RootReading]:
        from headtrace.tracing.attribute_root import ReadPoint, RootReading

        point = ReadPoint.final(recording, prompt)
        return [RootReading(point, point.before_norm(self.difference(recording.model.weights.W_U)))]

    def attribute(
        self, recording: Recording, readings: Sequence[RootReading], written: Sequence[Tensor]
    ) -> RootAttribution:
        from headtrace.tracing.attribute_root import RootAttribution, RootPart

        point, uncapped = readings[0].point, readings[0].point.uncapped_logits()
        contributions = point.add_logit_rounding(written[0], self.difference)
        bias = float(self.difference(recording.model.weights.output_bias))
        size = max(float(uncapped.abs().max()), float(contributions.abs().sum()))
        point.require_sum(float(contributions.sum()) + bias, float(self.difference(uncapped)), size)
        value = float(self.difference(recording.logits_at(point.prompt, point.position)))
        root = replace(self, value=value, position=point.position, bias=bias)
        part = RootPart(point, readings[0].direction, contributions=contributions)
        return RootAttribution(root, (part,), size)

    def seeds(self, recording: Recording, prompt: int, attribution: RootAttribution | None) -> Seeds:
        from headtrace.tracing.attribute_root import above_cutoff, no_seeds, seeds_or_reason
        from headtrace.tracing.causes import Cause
        from headtrace.vocabulary import Component

        assert attribution is not None
        (part,) = attribution.parts
        total, bias = float(part.contributions.sum()), getattr(attribution.root, "bias", None) or 0.0
        if total <= 0:
            above = "the vocabulary's mean" if self.wrong is None else "the wrong answer's"
            without = " without the output's own bias" if bias else ""
            swap = "" if self.wrong is None else "swap the two answers, "
            value = f"{without} (total {total:.4g})"
            reason = f"the answer's logit is not above {above}{value}, so there is nothing to explain"
            return no_seeds(attribution, reason, f"{swap}ask for a probability root")
        found = [part.point.cause(number, weight) for number, weight in above_cutoff(part.contributions)]
        if bias > 0:  # a bias against the answer is in the root's value only
            found.append(Cause(Component("offset").at(part.point.position), bias))
        return seeds_or_reason(found, attribution, "ask for a probability root")

    # Measuring and verifying

    def metric(self, recording: Recording) -> Metric:
        from headtrace.causal.metric import LogitMetric

        def difference(logits: Float[Tensor, "*copy kept vocab"]) -> Float[Tensor, "*copy"]:
            last = logits[..., -1, :]
            against = last if self.wrong is None else last[..., list(self.wrong)]
            return last[..., list(self.answer)].mean(-1) - against.mean(-1)

        return LogitMetric(self.measure, (recording.lengths[0] - 1,), difference)

    def require_in(self, model: Model, length: int) -> None:
        require_tokens("root.answer", self.answer, model)
        require_tokens("root.wrong", self.wrong or (), model)

    def check(self, check: Checking, found: RootAttribution | None) -> None:
        assert found is not None
        assert isinstance(found.root, LogitDifference)
        ledger, allowed = check.ledger, check.tolerance.number(found.size)
        if self.position is not None:
            ledger.require("root.position", "", in_file=self.position, measured=found.root.position)
        value, bias = found.root.value or 0.0, found.root.bias or 0.0
        ledger.compare("root.bias", "", in_file=self.bias, measured=bias, allowed=allowed)
        if self.bias is None and self.value is not None:  # files of version 1 left the output's bias out
            value = min(value, value - bias, key=lambda each: abs(each - (self.value or 0.0)))
        ledger.compare("root.value", "", in_file=self.value, measured=value, allowed=allowed)
