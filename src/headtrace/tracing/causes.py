"""What a trace finds: the causes of a site on each side, and the printable answer for one firing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from headtrace.tables import html_table
from headtrace.vocabulary import ATTENTION_SIDES, AttentionSide, Component, Firing, Side, Site

PromptSite = tuple[int, Site]
"""A site of a prompt: the prompt's number in its batch, and the site."""


@dataclass(frozen=True)
class Cause:
    """A site whose signal is needed by another one: its channels, and what it accounts for.

    The weight is the attention that removing the signal takes away; for a root, the contribution in its own unit.
    """

    site: Site
    weight: float
    channels: tuple[int, ...] | None = None

    @property
    def component(self) -> Component:
        """The component that wrote the signal."""
        return self.site.component


@dataclass(frozen=True)
class SideCauses:
    """One side: its causes, and the attention that is left when their signals are removed."""

    causes: tuple[Cause, ...]
    predicted: float | None = None
    """None where there is no prediction (SVT, roots)."""
    explained: bool = True
    """False if everything was removed and the attention still held."""

    @cached_property
    def in_graph(self) -> tuple[Cause, ...]:
        """Causes that are nodes of a circuit: all but heads that read a token after the position of this side."""
        return tuple(cause for cause in self.causes if cause.site.possible)

    @property
    def elsewhere(self) -> tuple[Cause, ...]:
        """Heads that can only have written at later keys (causality): part of the claim, not of the graph."""
        return tuple(cause for cause in self.causes if not cause.site.possible)


@dataclass(frozen=True)
class Causes:
    """Everything found about one site of one prompt."""

    prompt: int
    site: Site
    sides: Mapping[Side, SideCauses]
    attention: float | None = None
    threshold: float | None = None
    rounding: float | None = None
    """In half precision, by how much attention would change without what rounding added to the query and keys."""

    @property
    def firing(self) -> Firing:
        """The firing whose causes these are."""
        return self.site.firing

    @property
    def explained(self) -> bool:
        """Whether removing the signals changes where the head attends, on both sides."""
        return all(side.explained for side in self.sides.values())

    def side(self, side: AttentionSide) -> SideCauses:
        """The causes on one side."""
        return self.sides[side]

    @property
    def query(self) -> SideCauses:
        """The causes on the query side."""
        return self.sides["query"]

    @property
    def key(self) -> SideCauses:
        """The causes on the key side."""
        return self.sides["key"]


@dataclass(frozen=True, repr=False)
class Explanation:
    """The causes of one firing: per side, components with their tokens, channels and weights.

    >>> import headtrace
    >>> tracer = headtrace.Tracer(headtrace.load("builtin"))
    >>> why = tracer.explain("When Mary and John went to the store, John gave a drink to", "L2H0:14:10")
    >>> len(why.top(2)), str(why).splitlines()[0].split(" with ")[0]
    (2, "L2H0 14->10: 'to' attends to 'John'")
    """

    found: Causes
    tokens: tuple[str, ...]
    model: str

    @property
    def firing(self) -> Firing:
        """The firing that is explained."""
        return self.found.firing

    @property
    def attention(self) -> float:
        """The attention of the firing."""
        return self.found.attention or 0.0

    @property
    def threshold(self) -> float:
        """Attention that the head would need to count as attending."""
        return self.found.threshold or 0.0

    @property
    def query(self) -> tuple[Cause, ...]:
        """Causes on the query side: what was written at the destination."""
        return self.found.query.causes

    @property
    def key(self) -> tuple[Cause, ...]:
        """Causes on the key side: what was written at the keys."""
        return self.found.key.causes

    def top(self, k: int = 5) -> list[tuple[AttentionSide, Cause]]:
        """The k strongest causes of both sides."""
        both: list[tuple[AttentionSide, Cause]] = [
            (side, cause) for side in ATTENTION_SIDES for cause in self.found.side(side).causes
        ]
        return sorted(both, key=lambda item: -item[1].weight)[:k]

    def place(self, cause: Cause) -> str:
        """Where a cause acts, with token text: ``L5H3 from 3 ' John'``."""
        component, position = cause.component, cause.site.dest or 0
        if component.kind == "head" and component.src is not None:
            return f"{component} {self.tokens[component.src]!r}"
        return f"{component} at {position} {self.tokens[position]!r}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        firing = self.found.firing

        def side(name: AttentionSide) -> dict[str, Any]:
            part = self.found.side(name)
            causes = [
                {**asdict(c.component), "channels": list(c.channels or ()), "weight": c.weight}
                for c in part.causes
            ]
            return {"predicted_attention": part.predicted, "explained": part.explained, "causes": causes}

        return {
            "model": self.model,
            "tokens": list(self.tokens),
            "firing": asdict(firing),
            "attention": self.attention,
            "threshold": self.threshold,
            "query": side("query"),
            "key": side("key"),
        }

    def __repr__(self) -> str:
        sides = ", ".join(f"{len(self.found.side(name).causes)} {name} causes" for name in ATTENTION_SIDES)
        return f"Explanation({self.firing}, attention {self.attention:.3f}, {sides}, {self.model!r})"

    def _repr_html_(self) -> str:
        rows = [
            (name, f"{cause.weight:+.3f}", self.place(cause), ", ".join(map(str, cause.channels or ())))
            for name in ATTENTION_SIDES
            for cause in self.found.side(name).causes
        ]
        claims = (f"{name} side: {self._claim(name)}." for name in ATTENTION_SIDES)
        return html_table(
            ("side", "weight", "cause", "channels"), rows, title=" ".join([self._title(), *claims])
        )

    def _title(self) -> str:
        firing = self.found.firing
        return (
            f"{firing}: {self.tokens[firing.dest]!r} attends to {self.tokens[firing.src]!r} with {self.attention:.3f} "
            f"(threshold {self.threshold:.3f})"
        )

    def _claim(self, name: AttentionSide) -> str:
        part = self.found.side(name)
        if part.predicted is None:
            return "upstream heads that write into the firing's channels"
        note = "" if part.explained else ", which is not below the threshold: unexplained"
        return f"without these signals attention would be {part.predicted:.3f}{note}"

    def __str__(self) -> str:
        lines = [self._title()]
        for name in ATTENTION_SIDES:
            part = self.found.side(name)
            lines.append(f"  {name} side: {self._claim(name)}")
            lines += [
                f"    {cause.weight:+.3f}  {self.place(cause)}  channels {', '.join(map(str, cause.channels or ()))}"
                for cause in part.causes
            ]
        return "\n".join(lines)
