"""The logit difference between an answer and a wrong answer.

Answers of several tokens are two continuations of the prompt. The model is given what they begin with alike; the first
token that differs decides between them, and the difference is read there: the logarithm of the ratio of the two tokens'
probabilities, exactly, for what normalises them cancels. What follows lies in two different runs, one after each of the
two tokens, so no component of one run has a share in both; how likely it is, is measured and stated beside the value.

>>> root = LogitDifference((5,), (7,), value=2.0, continuations=((3, 5, 9), (3, 7)), rest=(-0.25, 0.0))
>>> root.answer_prefix, root.log_odds
((3,), 1.75)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    several,
    single_tokens,
    words,
)
from headtrace.validation import Ids, Index, Number, Words, Written, checked, fail

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
    continuations: tuple[Ids, Ids] | None = None
    """All tokens of the answer and of the wrong answer, where one has several; `answer` and `wrong` are the first that
    differ, and the prompt ends with what stands before these."""
    continuation_tokens: tuple[Words, Words] | None = None
    """The text of all these tokens."""
    rest: tuple[Number, Number] | None = None
    """The log-likelihoods of what follows the tokens that differ, each after its own, in nats."""
    kind: Written[Literal["linear"]] = "linear"
    measure: ClassVar[str] = "logit difference"
    adds_up: ClassVar[bool] = True
    options: ClassVar[Mapping[str, RootOption]] = {
        "answer": RootOption("the answer: text, a token id, or several alternatives", ANSWERS),
        "wrong": RootOption("the wrong answer to compare with (of several tokens, too)", ANSWERS),
    }

    def question(self, quote: Quote = quoted) -> str:
        """What is explained, in words: an answer rather than a wrong one."""
        if self.continuations is not None:
            labels = self.continuation_tokens or (None, None)
            one, other = (quote(words(*each, "")) for each in zip(self.continuations, labels, strict=True))
            return f"{one} rather than {other}"
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
            raise InputError(
                "A logit difference needs an answer, too, such as answer=' Mary' (--answer ' Mary')."
            )
        answers, wrongs = several(given["answer"]), several(given["wrong"]) if "wrong" in given else []
        if len(answers) == len(wrongs) == 1:
            answer = model.reader.continuation(prompt, answers[0])
            wrong = model.reader.continuation(prompt, wrongs[0], "wrong answer")
            if len(answer) > 1 or len(wrong) > 1:
                return cls.of_continuations(answer, wrong, labels=model.output_labels)
        else:
            answer = single_tokens(model, prompt, answers, "answer")
            wrong = single_tokens(model, prompt, wrongs, "wrong answer") if wrongs else None
        if set(answer) & set(wrong or ()):
            raise InputError("The answer and the wrong answer are the same token: their difference is zero.")
        return cls(answer, wrong)

    @classmethod
    def of_continuations(
        cls, answer: Ids, wrong: Ids, labels: Callable[[Ids], Words] = lambda ids: tuple(map(str, ids))
    ) -> LogitDifference:
        """The root of two continuations, as token ids; ``labels`` says how tokens read, for the error."""
        shared = next(
            (i for i, pair in enumerate(zip(answer, wrong, strict=False)) if pair[0] != pair[1]), None
        )
        if shared is None:
            one, other = ("".join(labels(each)) for each in (answer, wrong))
            how = "are the same" if answer == wrong else "begin alike, and one ends there"
            raise InputError(
                f"The answer {one!r} and the wrong answer {other!r} {how}: no token decides between them. Give answers "
                "that differ, or one alone (its log-likelihood is explained)."
            )
        return cls((answer[shared],), (wrong[shared],), continuations=(answer, wrong))

    def with_words(self, model: Model) -> LogitDifference:
        wrong = None if self.wrong is None else model.output_labels(self.wrong)
        named = replace(self, answer_tokens=model.output_labels(self.answer), wrong_tokens=wrong)
        if self.continuations is None:
            return named
        one, other = map(model.output_labels, self.continuations)
        return replace(named, continuation_tokens=(one, other))

    @property
    def answer_prefix(self) -> Ids:
        if self.continuations is None:
            return ()
        pairs = enumerate(zip(*self.continuations, strict=False))
        return self.continuations[0][: next((i for i, (one, other) in pairs if one != other), 0)]

    @property
    def log_odds(self) -> float | None:
        """How much likelier the whole answer is than the whole wrong one, in nats; None before tracing."""
        if self.value is None or self.wrong is None or (self.continuations is not None and self.rest is None):
            return None
        return self.value if self.rest is None else self.value + self.rest[0] - self.rest[1]

    def measured(self, model: Model, ids: Sequence[int]) -> LogitDifference:
        return self if self.continuations is None else replace(self, rest=self._rests(model, ids)[0])

    def _rests(self, model: Model, ids: Sequence[int]) -> tuple[tuple[float, float], float]:
        """The log-likelihoods of what follows the tokens that differ, and the largest logit that they are made of."""
        found, size, shared = [0.0, 0.0], 0.0, len(self.answer_prefix)
        tails = [tail[shared:] for tail in self.continuations or ((), ())]
        # Each token of a tail is predicted at the end of all that stands before it.
        rows = [(i, tail[: j + 1], token) for i, tail in enumerate(tails) for j, token in enumerate(tail[1:])]
        if rows:
            ends = model.end_logits([[*ids, *before] for _, before, _ in rows])
            for (i, _, token), logits in zip(rows, ends, strict=True):
                found[i] += float(logits.log_softmax(-1)[token])
                size = max(size, float(logits.abs().max()))
        return (found[0], found[1]), size

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
            return no_seeds(attribution, reason, f'{swap}use root="probability" (--root probability)')
        found = [part.point.cause(number, weight) for number, weight in above_cutoff(part.contributions)]
        if bias > 0:  # a bias against the answer is in the root's value only
            found.append(Cause(Component("offset").at(part.point.position), bias))
        return seeds_or_reason(found, attribution, 'use root="probability" (--root probability)')

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
        for i, each in enumerate(self.continuations or ()):
            require_tokens(f"root.continuations[{i}]", each, model)
        shared = len(self.answer_prefix)
        decided = tuple(each[shared : shared + 1] for each in self.continuations or ())
        if decided and decided != (self.answer, self.wrong):
            fail("root.continuations", "to differ first where answer and wrong do", decided)
        if shared >= length:
            fail("root.continuations", f"fewer than {length} tokens before those that differ", shared)

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
        if self.continuations is not None:
            ids, shared = check.circuit.prompt.token_ids, self.answer_prefix
            tail = ids[len(ids) - len(shared) :]
            ledger.require("root.continuations", "", in_file=shared, measured=tail)
            rests, size = self._rests(check.recording.model, ids)
            if self.rest is None:
                ledger.require("root.rest", "", in_file=None, measured=rests)
                return
            for place, (here, there) in enumerate(zip(self.rest, rests, strict=True)):
                bound = check.tolerance.number(max(size, found.size)) * 2 * len(self.continuations[place])
                ledger.compare(f"root.rest[{place}]", "", in_file=here, measured=there, allowed=bound)
