"""Numbers that are read from a running model, in every copy of a prompt: what a root explains, measured again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.errors import InputError
from headtrace.models.observer import AttentionCall, Observer, Rotary
from headtrace.vocabulary import Firing

if TYPE_CHECKING:
    from headtrace.models import Recording
    from headtrace.roots import Root


class MetricObserver(Observer):
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
        """How many layers have to run: none above is read."""

    def first_layer(self, n_layers: int) -> int:
        """The first layer that is read: the pass must not begin above it."""
        return self.layers(n_layers)

    @abstractmethod
    def reading(self) -> MetricObserver:
        """A fresh observer for one pass."""

    @abstractmethod
    def of(self, recording: Recording) -> float:
        """The number that a recording shows (prompt 0)."""


def metric_of(root: Root, recording: Recording) -> Metric | None:
    """The metric of a root; None where the file does not say what was read (a direction without its vector)."""
    return root.metric(recording)


def require_metric(root: Root, recording: Recording, what: str) -> Metric:
    metric = root.metric(recording)
    if metric is None:
        raise InputError(
            f"This circuit's file does not hold the vector of its direction, so {what} cannot be measured. "
            "Trace it again."
        )
    return metric


@dataclass(frozen=True, eq=False)
class LogitMetric(Metric):
    """A number made of output logits at some positions."""

    read_at: tuple[int, ...]
    of_logits: Callable[[Float[Tensor, "*copy kept vocab"]], Float[Tensor, "*copy"]]

    @property
    def positions(self) -> tuple[int, ...]:
        return self.read_at

    def layers(self, n_layers: int) -> int:
        return n_layers

    def reading(self) -> MetricObserver:
        metric = self

        class OfLogits(MetricObserver):
            def value(self, logits: Tensor) -> Tensor:
                return metric.of_logits(logits)

        return OfLogits()

    def of(self, recording: Recording) -> float:
        logits = torch.stack([recording.logits_at(0, position) for position in self.positions])
        return float(self.of_logits(logits[None])[0])


@dataclass(frozen=True, eq=False)
class ProjectionMetric(Metric):
    """The residual before a layer, at one position, along a vector."""

    layer: int
    position: int
    vector: Float[Tensor, " d_model"]

    def layers(self, n_layers: int) -> int:
        return self.layer

    def of(self, recording: Recording) -> float:
        return float(recording.residuals[self.layer, 0, self.position] @ self.vector)

    def reading(self) -> MetricObserver:
        metric = self

        class OfResidual(MetricObserver):
            found: Tensor

            def layer_input(self, layer: int, residual: Tensor, rotary: Rotary | None) -> None:
                if layer == metric.layer:
                    self._read(residual)

            def final_input(self, residual: Tensor) -> None:
                if not hasattr(self, "found"):  # a direction read after the last layer
                    self._read(residual)

            def _read(self, residual: Tensor) -> None:
                self.found = residual[:, metric.position] @ metric.vector

            def value(self, logits: Tensor) -> Tensor:
                return self.found

        return OfResidual()


@dataclass(frozen=True)
class AttentionMetric(Metric):
    """The attention of some firings, added up."""

    firings: tuple[Firing, ...]

    def layers(self, n_layers: int) -> int:
        return 1 + max(f.layer for f in self.firings)

    def first_layer(self, n_layers: int) -> int:
        return min(f.layer for f in self.firings)

    def of(self, recording: Recording) -> float:
        return float(sum(recording.attention.at(f.layer, 0, f.head, f.dest, f.src) for f in self.firings))

    def reading(self) -> MetricObserver:
        metric = self

        class OfAttention(MetricObserver):
            found: Tensor | float = 0.0

            def see(self, call: AttentionCall, pattern: Tensor) -> None:
                for f in metric.firings:
                    if f.layer == call.layer:
                        self.found = self.found + pattern[:, f.head, f.dest, f.src]

            def value(self, logits: Tensor) -> Tensor:
                assert isinstance(self.found, Tensor)
                return self.found

        return OfAttention()
