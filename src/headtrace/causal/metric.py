"""The number that a circuit's root explains, read from the running model: one kind of metric for each type of root."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import singledispatch
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.errors import InputError
from headtrace.models.observer import AttentionCall, Observer, Rotary
from headtrace.roots import Direction, Heads, Likelihood, LogitDifference, Root
from headtrace.vocabulary import Firing, parse_head

if TYPE_CHECKING:
    from headtrace.models import Recording


class Reading(Observer):
    """What one pass shows of a metric: the observer that looks for it, and the number for every copy."""

    def value(self, logits: Float[Tensor, "copy kept vocab"]) -> Float[Tensor, " copy"]:
        raise NotImplementedError


@dataclass(frozen=True)
class Metric(ABC):
    """A number that can be read in every copy of a prompt."""

    name: str

    @property
    def positions(self) -> tuple[int, ...]:
        """Where output logits are read."""
        return ()

    @abstractmethod
    def layers(self, n_layers: int) -> int:
        """How many layers have to run."""

    @abstractmethod
    def reading(self) -> Reading:
        """A fresh observer for one pass."""

    @abstractmethod
    def of(self, recording: Recording) -> float:
        """The number that a recording shows (prompt 0)."""


@singledispatch
def metric_of(root: Root, recording: Recording) -> Metric | None:
    """The metric of a root; None where the file does not say what was read (a direction without its vector)."""
    raise InputError(f"There is no metric for a {type(root).__name__}.")


def require_metric(root: Root, recording: Recording, what: str) -> Metric:
    metric = metric_of(root, recording)
    if metric is None:
        raise InputError(
            f"This circuit's file does not hold the vector of its direction, so {what} cannot be measured. "
            "Trace it again."
        )
    return metric


# -- output logits -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LogitMetric(Metric):
    """A number made of output logits at some positions."""

    def layers(self, n_layers: int) -> int:
        return n_layers

    def reading(self) -> Reading:
        metric = self

        class OfLogits(Reading):
            def value(self, logits: Tensor) -> Tensor:
                return metric.of_logits(logits)

        return OfLogits()

    def of(self, recording: Recording) -> float:
        logits = torch.stack([recording.logits_at(0, position) for position in self.positions])
        return float(self.of_logits(logits[None])[0])

    @abstractmethod
    def of_logits(self, logits: Float[Tensor, "*copy kept vocab"]) -> Float[Tensor, "*copy"]: ...


@dataclass(frozen=True)
class Difference(LogitMetric):
    answer: tuple[int, ...]
    wrong: tuple[int, ...] | None
    position: int

    @property
    def positions(self) -> tuple[int, ...]:
        return (self.position,)

    def of_logits(self, logits: Tensor) -> Tensor:
        last = logits[..., -1, :]
        against = last if self.wrong is None else last[..., list(self.wrong)]
        return last[..., list(self.answer)].mean(-1) - against.mean(-1)


@metric_of.register(LogitDifference)
def _(root: LogitDifference, recording: Recording) -> Metric:
    return Difference(root.measure, root.answer, root.wrong, recording.lengths[0] - 1)


@dataclass(frozen=True, eq=False)
class LogLikelihood(LogitMetric):
    tokens: tuple[int, ...]
    """One for each position (a continuation), or alternatives at one."""
    first: int
    weights: Float[Tensor, " token"] | None = None
    """Of alternatives: the model's own probabilities, renormalised."""

    @property
    def positions(self) -> tuple[int, ...]:
        n = len(self.tokens) if self.weights is None else 1
        return tuple(range(self.first, self.first + n))

    def of_logits(self, logits: Tensor) -> Tensor:
        likely = logits.log_softmax(-1)
        if self.weights is not None:
            return likely[..., -1, list(self.tokens)] @ self.weights
        return likely[..., range(len(self.tokens)), list(self.tokens)].sum(-1)


@metric_of.register(Likelihood)
def _(root: Likelihood, recording: Recording) -> Metric:
    last = recording.lengths[0] - 1
    if root.continuation:
        return LogLikelihood(root.measure, root.answer, last + 1 - len(root.answer))
    support = root.support or root.answer
    weights = recording.last_logits()[list(support)].softmax(-1)
    return LogLikelihood(root.measure, support, last, weights)


# -- the residual --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Projection(Metric):
    layer: int
    position: int
    vector: Float[Tensor, " d_model"]

    def layers(self, n_layers: int) -> int:
        return self.layer

    def of(self, recording: Recording) -> float:
        return float(recording.residuals[self.layer, 0, self.position] @ self.vector)

    def reading(self) -> Reading:
        metric = self

        class OfResidual(Reading):
            found: Tensor

            def layer_input(self, layer: int, residual: Tensor, rotary: Rotary | None) -> None:
                if layer == metric.layer:
                    self._read(residual)

            def final_input(self, residual: Tensor) -> None:
                if not hasattr(self, "found"):  # a direction read behind the last layer
                    self._read(residual)

            def _read(self, residual: Tensor) -> None:
                self.found = residual[:, metric.position] @ metric.vector

            def value(self, logits: Tensor) -> Tensor:
                return self.found

        return OfResidual()


@metric_of.register(Direction)
def _(root: Direction, recording: Recording) -> Metric | None:
    if root.vector is None:
        return None
    position = recording.lengths[0] - 1 if root.position is None else root.position
    return Projection(root.measure, root.layer, position, recording.residuals.new_tensor(root.vector))


# -- attention -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attention(Metric):
    firings: tuple[Firing, ...]

    def layers(self, n_layers: int) -> int:
        return 1 + max(f.layer for f in self.firings)

    def of(self, recording: Recording) -> float:
        return float(sum(recording.attention.at(f.layer, 0, f.head, f.dest, f.src) for f in self.firings))

    def reading(self) -> Reading:
        metric = self

        class OfAttention(Reading):
            found: Tensor | float = 0.0

            def see(self, call: AttentionCall, pattern: Tensor) -> None:
                for f in metric.firings:
                    if f.layer == call.layer:
                        self.found = self.found + pattern[:, f.head, f.dest, f.src]

            def value(self, logits: Tensor) -> Tensor:
                assert isinstance(self.found, Tensor)
                return self.found

        return OfAttention()


@metric_of.register(Heads)
def _(root: Heads, recording: Recording) -> Metric:
    """The attention of each head on the source that it attends to most in the clean run."""
    last = recording.lengths[0] - 1
    heads = [parse_head(name) for name in dict.fromkeys(root.heads)]
    firings = [Firing(l, h, last, int(recording.attention.row(l, 0, h, last).argmax())) for l, h in heads]
    return Attention(root.measure, tuple(firings))
