"""The projection of the residual stream on a direction: a probe, or any vector of the user's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from headtrace.errors import InputError
from headtrace.roots.base import BaseRoot, Quote, RootOption, quoted
from headtrace.validation import Index, Number, Text, Written, checked, fail

if TYPE_CHECKING:
    from torch import Tensor

    from headtrace.causal.checks import Checking
    from headtrace.causal.metric import Metric
    from headtrace.models import Model, Recording
    from headtrace.prompts import Chat
    from headtrace.tracing.attribute_root import RootAttribution, RootReading, Seeds
    from headtrace.vocabulary import Prompt

_NEEDS = "root='direction' needs direction= (a vector of d_model numbers) and layer=."


@checked
class Direction(BaseRoot):
    """The residual stream at one position, at the input of a layer or of the final norm, along a vector: a probe."""

    layer: Index
    """The layer at whose input it is read."""
    position: Index | None = None
    """The position at which it is read; null: the last."""
    vector: tuple[Number, ...] | None = None
    """The vector, d_model numbers; unknown in files of version 1."""
    value: Written[Number | None] = None
    """The projection."""
    label: Text | None = None
    """What the direction stands for, in words."""
    kind: Written[Literal["direction"]] = "direction"
    measure: ClassVar[str] = "projection"
    adds_up: ClassVar[bool] = True
    options: ClassVar[Mapping[str, RootOption]] = {
        "direction": RootOption(
            "a vector of d_model numbers: explain the residual stream along it", list[float]
        ),
        "layer": RootOption(
            "with direction: read at the input of this layer (the number of layers: before the final norm)",
            int,
        ),
        "position": RootOption("with direction: read at this position (default: the last)", int),
    }

    def question(self, quote: Quote = quoted) -> str:
        """What is explained, in words: the label of the direction, or its layer."""
        return self.label or f"a direction at layer {self.layer}"

    def advice(self) -> list[str]:
        return ["Reverse the direction, or give another one, or another layer or position."]

    # From a request

    @classmethod
    def from_options(
        cls, model: Model, prompt: Prompt | Chat, length: int, given: Mapping[str, Any]
    ) -> Direction:
        if "direction" not in given or "layer" not in given:
            raise InputError(_NEEDS)
        vector: Any = given["direction"]
        if getattr(vector, "ndim", 1) != 1:
            raise InputError(f"The direction has shape {tuple(vector.shape)}; expected ({model.d_model},).")
        position: int = given.get("position", -1)
        if not -length <= position < length:
            raise InputError(f"Position {position} does not exist in a prompt of {length} tokens.")
        numbers: Any = vector.tolist() if hasattr(vector, "tolist") else vector
        root = cls(given["layer"], position % length, tuple(numbers))
        root._check_fits(model)
        return root

    def _check_fits(self, model: Model) -> None:
        if self.layer > model.n_layers:
            raise InputError(
                f"Layer {self.layer} does not exist: a direction is read before layer 0 to {model.n_layers}."
            )
        if self.vector is None:
            raise InputError(_NEEDS)
        if len(self.vector) != model.d_model:
            raise InputError(
                f"The direction has {len(self.vector)} numbers; the model's residual has {model.d_model}."
            )

    # Tracing

    def readings(self, recording: Recording, prompt: int, ig_steps: int) -> list[RootReading]:
        from headtrace.tracing.attribute_root import ReadPoint, RootReading

        model, length = recording.model, recording.lengths[prompt]
        position = length - 1 if self.position is None else self.position
        self._check_fits(model)
        if position >= length:
            raise InputError(f"Position {position} does not exist in a prompt of {length} tokens.")
        point = ReadPoint(recording, prompt, position, self.layer)
        return [RootReading(point, recording.residuals.new_tensor(self.vector or ()))]

    def attribute(
        self, recording: Recording, readings: Sequence[RootReading], written: Sequence[Tensor]
    ) -> RootAttribution:
        from headtrace.tracing.attribute_root import RootAttribution, RootPart

        point, vector = readings[0].point, readings[0].direction
        value = float(point.residual @ vector)
        size = max(float(point.residual.norm() * vector.norm()), float(written[0].abs().sum()))
        point.require_sum(float(written[0].sum()), value, size)
        root = replace(self, value=value, position=point.position)
        return RootAttribution(root, (RootPart(point, vector, contributions=written[0]),), size)

    def seeds(self, recording: Recording, prompt: int, attribution: RootAttribution | None) -> Seeds:
        from headtrace.tracing.attribute_root import above_cutoff, no_seeds, seeds_or_reason

        assert attribution is not None
        (part,) = attribution.parts
        total = float(part.contributions.sum())
        if total <= 0:
            reason = f"the residual has no positive part along the direction (total {total:.4g})"
            return no_seeds(attribution, reason, "reverse the direction")
        found = [part.point.cause(number, weight) for number, weight in above_cutoff(part.contributions)]
        return seeds_or_reason(found, attribution, "ask for another layer or position")

    # Measuring and verifying

    def metric(self, recording: Recording) -> Metric | None:
        from headtrace.causal.metric import ProjectionMetric

        if self.vector is None:
            return None
        position = recording.lengths[0] - 1 if self.position is None else self.position
        vector = recording.residuals.new_tensor(self.vector or ())
        return ProjectionMetric(self.measure, self.layer, position, vector)

    def require_in(self, model: Model, length: int) -> None:
        if self.layer > model.n_layers:
            expected = f"0 to {model.n_layers} (layers of {model.name!r}, and after the last)"
            fail("root.layer", expected, self.layer)
        if self.vector is not None and len(self.vector) != model.d_model:
            fail("root.vector", f"{model.d_model} numbers (the width of {model.name!r})", len(self.vector))

    def verifiable(self) -> Direction | None:
        return None if self.vector is None else self

    def check(self, check: Checking, found: RootAttribution | None) -> None:
        if found is None:
            check.ledger.skip("the root: the file does not hold the vector of its direction")
            return
        if self.position is not None:
            check.ledger.require("root.position", "", in_file=self.position, measured=found.root.position)
        allowed, value = check.tolerance.number(found.size), found.root.value or 0.0
        check.ledger.compare("root.value", "", in_file=self.value, measured=value, allowed=allowed)
