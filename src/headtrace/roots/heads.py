"""The attention of chosen heads at the last position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from headtrace.errors import InputError
from headtrace.roots.base import BaseRoot, Quote, RootOption, quoted
from headtrace.validation import Index, Number, Words, Written, checked, fail
from headtrace.vocabulary import Firing, FiringName, Site

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
    """The attention of given heads, each from the last position to the source it attends to most; or of firings."""

    heads: Annotated[Words, Field(min_length=1)]
    """Names such as ``L9H6`` (from the last position to the source it attends to most), or firings such as
    ``L9H6:to:John``, which a traced circuit stores with positions: ``L9H6 14->3``."""
    value: Written[Number | None] = None
    """The sum of their attention."""
    position: Index | None = None
    """The position they attend from."""
    kind: Written[Literal["heads"]] = "heads"
    measure: ClassVar[str] = "attention"
    options: ClassVar[Mapping[str, RootOption]] = {
        "heads": RootOption(
            "explain where these heads attend from the last token (L9H9,L10H0), or these firings (L9H9:to:John)",
            list[str],
        )
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
        """The firings that are named; of a head alone, the one at the last position on the source that it attends to
        most."""
        last = recording.lengths[prompt] - 1
        names = [FiringName.parse(name) for name in self.heads]
        asked = [
            f"{name.strip()}:{last}" if n.dest is None else name
            for n, name in zip(names, self.heads, strict=True)
        ]
        return list(dict.fromkeys(recording.find_firing(name, prompt)[0] for name in asked))

    def readings(self, recording: Recording, prompt: int, ig_steps: int) -> list[RootReading]:
        raise InputError(
            "The attention of heads is not a direction of the residual, so components do not contribute to it. Trace "
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
        # What was given in words is kept in numbers: a file of it can be read without the prompt.
        bare = [FiringName.parse(name).dest is None for name in self.heads]
        names = [
            name if alone else str(recording.find_firing(name, prompt)[0])
            for name, alone in zip(self.heads, bare, strict=True)
        ]
        return Seeds(replace(self, heads=tuple(names), value=value, position=last), causes)

    # Measuring and verifying

    def metric(self, recording: Recording) -> Metric:
        from headtrace.causal.metric import AttentionMetric

        return AttentionMetric(self.measure, tuple(self.firings(recording)))

    def require_in(self, model: Model, length: int) -> None:
        for i, text in enumerate(self.heads):
            name = FiringName.parse(text)
            layer, head = name.layer, name.head
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
        """The given firings, or heads at the last position, each at the source that it attends to most."""
        ledger, recording = check.ledger, check.recording
        alone = {name.strip().upper() for name in self.heads if FiringName.parse(name).dest is None}
        named = {str(Firing.parse(name)) for name in self.heads if FiringName.parse(name).dest is not None}
        last = recording.lengths[0] - 1
        for where, edge in edges.items():
            source = check.circuit.node(edge.source)
            ledger.require("channels", where, in_file=edge.channels, measured=None)
            strongest = (
                source.kind == "head" and f"L{source.layer}H{source.head}" in alone and source.dest == last
            )
            asked = strongest or source.name in named
            ledger.require("seed", where, in_file=source.name, measured=source.name if asked else "no seed")
            if not asked:
                continue
            f = source.site.firing
            row, allowed = recording.attention.row(f.layer, 0, f.head, f.dest), check.attention_tolerance(f)
            own, most = float(row[f.src]), float(row.max())
            ledger.compare("weight", where, in_file=edge.weight, measured=own, allowed=allowed)
            if source.name not in named:
                what = "attention of the strongest source"
                ledger.compare(what, where, in_file=own, measured=most, allowed=allowed)
