"""The log-likelihood of an answer: one token, alternatives, the likeliest tokens, or a continuation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from headtrace.validation import LARGEST, Flag, Ids, Index, Number, Words, Written, checked, fail

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from headtrace.causal.checks import Checking
    from headtrace.causal.metric import Metric
    from headtrace.models import Model, Recording
    from headtrace.prompts import Chat
    from headtrace.tracing.attribute_root import ReadPoint, RootAttribution, RootPart, RootReading, Seeds
    from headtrace.tracing.causes import Cause
    from headtrace.vocabulary import Prompt

DROP = 0.8
"""Seeds are the components whose removal takes the log-likelihood this share of the way to the bias-only value."""


@checked
class Likelihood(BaseRoot):
    """The log-likelihood of one or more alternatives for the next token, or of a continuation of several tokens."""

    answer: Written[Ids] = ()
    """Alternatives for the next token, weighted by the model's own probabilities; with ``continuation``, tokens that
    follow one another, each predicted from those before it."""
    continuation: Flag = False
    """Whether the tokens of ``answer`` follow one another."""
    top_k: Annotated[int, Field(strict=True, ge=1, le=LARGEST)] | None = None
    """Explain the k most likely next tokens instead of an answer."""
    top_p: Annotated[float, Field(strict=True, gt=0, le=1)] | None = None
    """Explain the most likely next tokens up to this total probability instead of an answer."""
    value: Written[Number | None] = None
    """The log-likelihood, in nats."""
    position: Index | None = None
    """The position at which the (first) token is predicted."""
    support: Ids | None = None
    """The alternatives that are explained, chosen by name or by probability."""
    answer_tokens: Words | None = None
    """The text of the answer's tokens."""
    wrong: None = None
    kind: Written[Literal["probability"]] = "probability"
    measure: ClassVar[str] = "log-likelihood"
    options: ClassVar[Mapping[str, RootOption]] = {
        "answer": RootOption(
            "the answer to explain: text (one token or several), a token id, or several alternatives", ANSWERS
        ),
        "top_k": RootOption("explain the k most likely next tokens together", int),
        "top_p": RootOption(
            "explain the most likely next tokens, up to this total probability, together", float
        ),
    }
    integrates_gradients: ClassVar[bool] = True

    def question(self, quote: Quote = quoted) -> str:
        """What is explained, in words: an answer, or the likeliest next tokens."""
        if self.answer:
            return quote(words(self.answer, self.answer_tokens, "" if self.continuation else " / "))
        if self.top_k == 1:
            return "the likeliest next token"
        if self.top_k is not None:
            return f"the {self.top_k} likeliest next tokens"
        return "the next token" if self.top_p is None else f"the likeliest next tokens up to {self.top_p:g}"

    def advice(self) -> list[str]:
        return [
            "Look at what the model answers here: headtrace record, or recording.top_answers() in Python.",
            "Ask for an answer that the model prefers: another --answer, or answer and wrong the other way round.",
            "Ask about the answer in another way: --wrong, for a logit difference.",
        ]

    # From a request

    @classmethod
    def from_options(
        cls, model: Model, prompt: Prompt | Chat, length: int, given: Mapping[str, Any]
    ) -> Likelihood:
        if len(given) != 1:
            raise InputError("root='probability' needs exactly one of: an answer, top_k=, top_p=.")
        if "answer" not in given:
            return cls(**given)
        many = several(given["answer"])
        if len(many) > 1:
            return cls(single_tokens(model, prompt, many, "answer"))
        tokens = model.continuation(prompt, many[0])
        return cls(tokens, continuation=len(tokens) > 1)

    def with_words(self, model: Model) -> Likelihood:
        return replace(self, answer_tokens=model.output_labels(self.answer)) if self.answer else self

    @property
    def answer_prefix(self) -> Ids:
        return self.answer[:-1] if self.continuation else ()

    # Tracing

    def readings(self, recording: Recording, prompt: int, ig_steps: int) -> list[RootReading]:
        """One reading, or one per token of a continuation, along the integrated gradient of its objective."""
        from headtrace.tracing.attribute_root import ReadPoint, RootReading

        first = recording.lengths[prompt] - 1 - len(self.answer_prefix)
        supports = [[t] for t in self.answer] if self.continuation else [self._support(recording, prompt)]
        found: list[RootReading] = []
        for i, support in enumerate(supports):
            point = ReadPoint.final(recording, prompt, first + i)
            objective = _Objective.at(point, support)
            gradient = objective.path_gradient(ig_steps)
            direction = point.before_norm(gradient @ recording.model.weights.W_U)
            found.append(RootReading(point, direction, (objective, gradient)))
        return found

    def attribute(
        self, recording: Recording, readings: Sequence[RootReading], written: Sequence[Tensor]
    ) -> RootAttribution:
        """Attributions by integrated gradients; those of a continuation's positions add up."""
        from headtrace.tracing.attribute_root import RootAttribution, RootPart

        parts: list[RootPart] = []
        for reading, writes in zip(readings, written, strict=True):
            point, (objective, gradient) = reading.point, reading.detail
            attributions = point.add_logit_rounding(writes, lambda logits, g=gradient: g @ logits)
            total = float(gradient @ (objective.clean - objective.base))
            size = max(1.0, float(attributions.abs().sum()))
            point.require_sum(float(attributions.sum()), total, size)
            parts.append(RootPart(point, reading.direction, objective, contributions=attributions))
        clean = sum(float(part.detail.value(part.detail.clean)) for part in parts)
        size = max(float(part.detail.clean.abs().max()) for part in parts)
        root = replace(self, value=clean, position=parts[0].point.position)
        if not self.continuation:
            root = replace(root, support=tuple(parts[0].detail.support))
        return RootAttribution(root, tuple(parts), size)

    def seeds(self, recording: Recording, prompt: int, attribution: RootAttribution | None) -> Seeds:
        """Components without which the log-likelihood falls most of the way to the bias-only value."""
        from headtrace.tracing.attribute_root import no_seeds, seeds_or_reason

        assert attribution is not None
        objectives: list[_Objective] = [part.detail for part in attribution.parts]
        clean = sum(float(objective.value(objective.clean)) for objective in objectives)
        floor = sum(float(objective.value(objective.base)) for objective in objectives)
        if clean <= floor:
            reason = (
                f"the answer is no likelier (log-likelihood {clean:.4g}) than from the model's biases alone "
                f"({floor:.4g}), so there is nothing to explain"
            )
            return no_seeds(attribution, reason, "ask for the likeliest answers (top_k)")
        found = _remove_until(attribution.parts, clean, clean - DROP * (clean - floor))
        return seeds_or_reason(found, attribution, "compare with a wrong answer (a linear root)")

    def _support(self, recording: Recording, prompt: int) -> list[int]:
        """The alternatives: those that were named, or the likeliest."""
        if self.answer:
            return list(self.answer)
        probabilities, order = recording.last_logits(prompt).softmax(-1).sort(descending=True, stable=True)
        if self.top_k is not None:
            if self.top_k > order.numel():
                raise InputError(f"top_k={self.top_k}: expected 1 to {order.numel()}.")
            return order[: self.top_k].tolist()
        count = int((probabilities.cumsum(0) < (self.top_p or 0.0)).sum()) + 1
        return order[:count].tolist()

    # Measuring and verifying

    def metric(self, recording: Recording) -> Metric:
        from headtrace.causal.metric import LogitMetric

        last = recording.lengths[0] - 1
        if self.continuation:
            tokens = list(self.answer)

            def of_tokens(logits: Float[Tensor, "*copy kept vocab"]) -> Float[Tensor, "*copy"]:
                return logits.log_softmax(-1)[..., range(len(tokens)), tokens].sum(-1)

            return LogitMetric(self.measure, tuple(range(last + 1 - len(tokens), last + 1)), of_tokens)
        support = list(self.support or self.answer)
        weights = recording.last_logits()[support].softmax(-1)

        def of_alternatives(logits: Float[Tensor, "*copy kept vocab"]) -> Float[Tensor, "*copy"]:
            return logits.log_softmax(-1)[..., -1, support] @ weights

        return LogitMetric(self.measure, (last,), of_alternatives)

    def require_in(self, model: Model, length: int) -> None:
        require_tokens("root.answer", self.answer, model)
        require_tokens("root.support", self.support or (), model)
        if self.continuation and not 0 < len(self.answer) <= length:
            fail("root.answer", f"1 to {length} tokens that the prompt ends with", len(self.answer))
        if not (self.answer or self.support or self.top_k or self.top_p):
            fail("root.answer", "token ids, or top_k, top_p or support", [])

    def verifiable(self) -> Likelihood:
        """Which alternatives are the likeliest is checked apart, so they are taken from the file here."""
        return self if self.answer or not self.support else Likelihood(self.support)

    def check(self, check: Checking, found: RootAttribution | None) -> None:
        assert found is not None
        if self.position is not None:
            check.ledger.require("root.position", "", in_file=self.position, measured=found.root.position)
        # a log-likelihood is a logit less a sum of them, once for each token of a continuation
        allowed = check.tolerance.number(found.size) * 2 * (len(self.answer_prefix) + 1)
        self._check_support(check)
        value = found.root.value or 0.0
        check.ledger.compare("root.value", "", in_file=self.value, measured=value, allowed=allowed)

    def _check_support(self, check: Checking) -> None:
        """The alternatives are those that were named, or the likeliest; a continuation is what the prompt ends with."""
        from headtrace.models.devices import exact

        ledger, ids = check.ledger, check.circuit.prompt.token_ids
        if self.continuation:
            tail = ids[len(ids) - len(self.answer_prefix) :]
            ledger.require("root.answer", "", in_file=self.answer_prefix, measured=tail)
            return
        if self.support is None:
            return
        if self.answer:
            ledger.require("root.support", "", in_file=self.support, measured=self.answer)
            return
        likely = exact(check.recording.last_logits()).log_softmax(-1)
        inside = likely[list(self.support)]
        allowed = 2 * check.tolerance.number(float(check.recording.last_logits().abs().max()))
        others = likely.clone()
        others[list(self.support)] = -float("inf")
        wrong = len(set(self.support)) != len(self.support) or bool(inside.min() < others.max() - allowed)
        if self.top_k is not None:
            wrong = wrong or len(self.support) != self.top_k
        if self.top_p is not None:
            total, least = float(inside.exp().sum()), float(inside.min().exp())
            wrong = wrong or total < self.top_p - allowed or total - least >= self.top_p + allowed
        best = likely.argsort(descending=True)[: len(self.support)].tolist()
        measured = tuple(best) if wrong else self.support
        ledger.require("root.support", "", in_file=self.support, measured=measured)


@dataclass(frozen=True)
class _Objective:
    """``J(z) = sum over the support of q log softmax(cap(z))`` and the two ends of its path."""

    support: list[int]
    clean: Float[Tensor, " vocab"]
    """Logits before the final softcap."""
    base: Float[Tensor, " vocab"]
    """The output's biases alone."""
    q: Float[Tensor, " vocab"]
    """The model's own probabilities, renormalised over the support."""
    cap: float | None

    @classmethod
    def at(cls, point: ReadPoint, support: list[int]) -> _Objective:
        model = point.recording.model
        recorded = point.recording.logits_at(point.prompt, point.position)
        q = recorded.new_zeros(recorded.shape)
        q[support] = recorded[support].softmax(-1)
        base = model.weights.output_bias
        return cls(support, point.uncapped_logits(), base, q, model.final_softcap)

    def value(self, z: Float[Tensor, "*any vocab"]) -> Float[Tensor, "*any"]:
        from headtrace.models.attention import softcap

        scores = softcap(z, self.cap)
        return scores @ self.q - scores.logsumexp(-1)

    def path_gradient(self, steps: int) -> Float[Tensor, " vocab"]:
        """The mean gradient of J on the straight path from the bias-only logits to the clean ones."""
        from headtrace.models.attention import softcap, softcap_slope
        from headtrace.tracing.firing import path_weights

        alphas, weights = path_weights(steps, self.clean)
        z = self.base + alphas[:, None] * (self.clean - self.base)
        gradient = self.q - softcap(z, self.cap).softmax(-1)
        return weights @ (gradient * softcap_slope(z, self.cap))


def _remove_until(parts: Sequence[RootPart], clean: float, target: float) -> list[Cause]:
    """Remove components by attribution (positive ones only) until the log-likelihood is at or below the target."""
    import torch

    values, order = torch.cat([part.contributions for part in parts]).sort(descending=True, stable=True)
    starts = torch.tensor([0] + [len(part.contributions) for part in parts], device=order.device).cumsum(0)
    of_part = torch.searchsorted(starts, order, right=True) - 1
    numbers = order - starts[of_part]
    # What rounding did to the logits themselves was written by nothing that could be removed.
    rounding = torch.tensor(
        [p.point.index.n_non_head - 1 if p.point.recording.model.half else -1 for p in parts]
    )
    removable = (values > 0) & (numbers != rounding.to(numbers.device)[of_part])
    order, values, of_part, numbers = (t[removable] for t in (order, values, of_part, numbers))
    left: list[Tensor] = [part.detail.clean for part in parts]
    kept, done, size = order.numel(), 0, 16
    while done < order.numel():
        chunk = slice(done, done + size)
        taken = values.new_zeros(len(order[chunk]))
        for i, part in enumerate(parts):
            mine = (of_part[chunk] == i).nonzero()[:, 0]
            if len(
                mine
            ):  # what removing this part's components, one after another, takes from its log-likelihood
                writes = part.point.writes(numbers[chunk][mine])
                remaining = left[i] - part.point.logits_of(writes).cumsum(0)
                after = part.detail.value(torch.cat((left[i][None], remaining)))
                taken[mine], left[i] = after[:-1] - after[1:], remaining[-1]
        reached = (clean - taken.cumsum(0) <= target).nonzero()
        if len(reached):
            kept = done + int(reached[0]) + 1
            break
        clean, done, size = clean - float(taken.sum()), done + len(taken), size * 2
    chosen = zip(of_part[:kept].tolist(), numbers[:kept].tolist(), values[:kept].tolist(), strict=True)
    return [parts[i].point.cause(number, value) for i, number, value in chosen]
