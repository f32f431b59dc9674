"""The attention of chosen heads at the last position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from headtrace.errors import InputError
from headtrace.roots.base import BaseRoot, Quote, RootOption, quoted
from headtrace.validation import Index, Number, Words, Written, checked, fail
from headtrace.vocabulary import Firing, Site, head_name, parse_head

if TYPE_CHECKING:
    from torch import Tensor

    from headtrace.causal.checks import Checking
    from headtrace.causal.metric import Metric
    from headtrace.circuits import Edge
    from headtrace.models import Model, Recording
    from headtrace.prompts import Chat
    from headtrace.tracing.attribute_root import RootAttribution, RootReading, Seeds
    from headtrace.vocabulary import Prompt


@checked
class Heads(BaseRoot):
    """The attention of given heads at the last position, each on the source that it attends to most."""

    heads: Annotated[Words, Field(min_length=1)]
    """Names such as ``L9H6``."""
    value: Written[Number | None] = None
    """The attention of all of them, added up."""
    position: Index | None = None
    """Where they attend from."""
    kind: Written[Literal["heads"]] = "heads"
    measure: ClassVar[str] = "attention"
    options: ClassVar[Mapping[str, RootOption]] = {
        "heads": RootOption("start from these heads at the last token, such as L9H9,L10H0", list[str])
    }
    has_directions: ClassVar[bool] = False

    def question(self, quote: Quote = quoted) -> str:
        """What is explained, in words: the attention of the named heads."""
        return "the attention of " + ", ".join(self.heads)

    def advice(self) -> list[str]:
        return [
            "Look at where the heads attend: headtrace record, or model.record(prompt) in Python.",
            "Count weaker attention as attending: a smaller --tau.",
            "Start from the answer instead of from heads: --answer and --wrong.",
        ]

    # From a request

    @classmethod
    def from_options(
        cls, model: Model, prompt: Prompt | Chat, length: int, given: Mapping[str, Any]
    ) -> Heads:
        if "heads" not in given:
            raise InputError("root='heads' needs heads=, such as heads=['L9H9'].")
        names = [given["heads"]] if isinstance(given["heads"], str) else list(given["heads"])
        return cls(tuple(name.strip() for name in names))

    # Tracing

    def firings(self, recording: Recording, prompt: int = 0) -> list[Firing]:
        """Each head at the last position, on the source that it attends to most."""
        model, last = recording.model, recording.lengths[prompt] - 1
        found: list[Firing] = []
        for layer, head in dict.fromkeys(parse_head(name) for name in self.heads):
            if layer >= model.n_layers or head >= model.n_heads:
                raise InputError(
                    f"There is no {head_name(layer, head)}: the model has layers 0 to {model.n_layers - 1} and heads 0 "
                    f"to {model.n_heads - 1}."
                )
            row = recording.attention.row(layer, prompt, head, last)[: last + 1]
            found.append(Firing(layer, head, last, int(row.argmax())))
        return found

    def readings(self, recording: Recording, prompt: int, ig_steps: int) -> list[RootReading]:
        raise InputError(
            "The attention of heads is no direction of the residual, so components have no contributions to it. Trace "
            'an answer or a direction; from heads, attention is followed (paths="attention" or "complete").'
        )

    def attribute(
        self, recording: Recording, readings: Sequence[RootReading], written: Sequence[Tensor]
    ) -> RootAttribution:
        raise NotImplementedError("heads have no directions")

    def seeds(self, recording: Recording, prompt: int, attribution: RootAttribution | None) -> Seeds:
        from headtrace.tracing.attribute_root import Seeds
        from headtrace.tracing.causes import Cause

        causes = tuple(
            Cause(
                Site("head", f.layer, f.head, f.dest, f.src),
                float(recording.attention.at(f.layer, prompt, f.head, f.dest, f.src)),
            )
            for f in self.firings(recording, prompt)
        )
        value, last = sum(cause.weight for cause in causes), recording.lengths[prompt] - 1
        return Seeds(replace(self, value=value, position=last), causes)

    # Measuring and verifying

    def metric(self, recording: Recording) -> Metric:
        from headtrace.causal.metric import AttentionMetric

        return AttentionMetric(self.measure, tuple(self.firings(recording)))

    def require_in(self, model: Model, length: int) -> None:
        for i, name in enumerate(self.heads):
            layer, head = parse_head(name)
            if layer >= model.n_layers:
                fail(f"root.heads[{i}]", f"0 to {model.n_layers - 1} (layers of {model.name!r})", layer)
            if head >= model.n_heads:
                fail(
                    f"root.heads[{i}]", f"0 to {model.n_heads - 1} (heads of a layer of {model.name!r})", head
                )

    def verifiable(self) -> None:
        return None

    def check(self, check: Checking, found: RootAttribution | None) -> None:
        recording, firings = check.recording, self.firings(check.recording)
        if self.position is not None:
            last = recording.lengths[0] - 1
            check.ledger.require("root.position", "", in_file=self.position, measured=last)
        value = sum(float(recording.attention.at(f.layer, 0, f.head, f.dest, f.src)) for f in firings)
        allowed = sum(check.attention_tolerance(firing) for firing in firings)
        check.ledger.compare("root.value", "", in_file=self.value, measured=value, allowed=allowed)

    def check_seeds(self, check: Checking, found: RootAttribution | None, edges: Mapping[str, Edge]) -> None:
        """The given heads at the last position, each at the source that it attends to most."""
        ledger, recording = check.ledger, check.recording
        names, last = {name.strip().upper() for name in self.heads}, recording.lengths[0] - 1
        for where, edge in edges.items():
            source = check.circuit.node(edge.source)
            ledger.require("channels", where, in_file=edge.channels, measured=None)
            asked = (
                source.kind == "head" and f"L{source.layer}H{source.head}" in names and source.dest == last
            )
            ledger.require("seed", where, in_file=source.name, measured=source.name if asked else "no seed")
            if not asked:
                continue
            f = source.site.firing
            row, allowed = recording.attention.row(f.layer, 0, f.head, last), check.attention_tolerance(f)
            own, most = float(row[f.src]), float(row.max())
            ledger.compare("weight", where, in_file=edge.weight, measured=own, allowed=allowed)
            strongest = "attention of the strongest source"
            ledger.compare(strongest, where, in_file=own, measured=most, allowed=allowed)
