"""What a trace finds: the causes of a site on each side, and the printable answer for one firing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headtrace.errors import InputError
from headtrace.tables import html_table
from headtrace.vocabulary import ATTENTION_SIDES, AttentionSide, Component, Firing, Side, Site

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.figure import Figure

    from headtrace.tracing.pairs import Pairs
    from headtrace.tracing.rather_than import FiringParts, RatherThan

PromptSite = tuple[int, Site]
"""A site of a prompt: the prompt's number in its batch, and the site."""


@dataclass(frozen=True)
class Cause:
    """A site whose signal another site needs: its channels, and what it accounts for.

    The weight is the attention that removing the signal takes away; for a root, the contribution in its own unit.
    """

    site: Site
    weight: float
    channels: tuple[int, ...] | None = None
    alone: bool = False
    """Of a query or key: found by removing this signal alone, and no part of what the prediction removes."""
    at_source: bool = True
    """Of a key: whether it is written at the source, and not at other keys only."""

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
        """Causes that are nodes of a circuit: all but those that were written at other keys only."""
        return tuple(cause for cause in self.causes if cause.site.possible and cause.at_source)

    @property
    def elsewhere(self) -> tuple[Cause, ...]:
        """Those that were written at other keys only (heads that read a later token can be nowhere else): part of the
        claim, not of the graph."""
        return tuple(cause for cause in self.causes if not (cause.site.possible and cause.at_source))


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
    """The causes of one firing: per side, components with their tokens, channels and weights; which pairs of writers
    met (`pairs`); why the head attends here rather than elsewhere (`rather_than`), or why it does not (`instead`).

    >>> import headtrace
    >>> tracer = headtrace.Tracer(headtrace.load("builtin"))
    >>> why = tracer.explain("When Mary and John went to the store, John gave a drink to", "L2H0:14:10")
    >>> len(why.top(2)), str(why).splitlines()[0].split(" with ")[0]
    (2, "L2H0 14->10: 'to' attends to 'John'")
    """

    found: Causes
    tokens: tuple[str, ...]
    model: str
    notice: str | None = None
    """What was taken for granted in finding the firing, where it was not given in full."""
    rather_than: RatherThan | None = None
    """The firing against another source, where one was asked about."""
    instead: RatherThan | None = None
    """Where the head does not attend here: the firing against the source that it attends to most."""
    split: Callable[[], FiringParts] | None = field(default=None, compare=False)
    """How the query and keys of the firing are split into components, once that is asked for."""

    @property
    def attends(self) -> bool:
        """Whether the attention reaches the threshold; if not, there is nothing for signals to cause.
        Methods that make no prediction (SVT) name what is upstream whatever the attention."""
        predicts = any(side.predicted is not None for side in self.found.sides.values())
        return not predicts or self.attention >= self.threshold

    @cached_property
    def parts(self) -> FiringParts:
        """The query and keys of the firing (and of the source that it is compared with), split into components."""
        if self.split is None:
            raise InputError(
                "This explanation was made without a recording: explain the firing again with a Tracer."
            )
        return self.split()

    def pairs(self, k: int = 20) -> Pairs:
        """The k largest pairs of a component of the query and one of the key, and the exact remainder; compared with
        another source (``rather_than``), the pairs that make the difference."""
        from headtrace.tracing.pairs import largest_pairs

        return largest_pairs(self.parts, k, self.model, self.tokens, against=self.rather_than is not None)

    def frame(self) -> pl.DataFrame:
        """One row per cause, the strongest first: side, cause, kind, layer, head, src, dest, weight (attention taken
        away), channels."""
        import polars as pl

        rows = [
            {"side": side, "cause": self.place(cause), **asdict(cause.component), "dest": cause.site.dest}
            | {"weight": cause.weight, "channels": list(cause.channels or ())}
            for side, cause in self.top(10**9)
        ]
        numbers = dict.fromkeys(("layer", "head", "src", "dest"), pl.Int64)
        schema: Any = {
            "side": pl.String,
            "cause": pl.String,
            "kind": pl.String,
            **numbers,
            "weight": pl.Float64,
        }
        return pl.DataFrame(rows, schema={**schema, "channels": pl.List(pl.Int64)})

    def plot(self, path: str | Path | None = None) -> Figure:
        """The causes of both sides as bars; compared with another source, the terms of the difference."""
        from headtrace.figures.channels import plot_causes

        compared = self.rather_than or self.instead
        return plot_causes(self, path) if compared is None else compared.plot(path)

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
            "notice": self.notice,
            "attends": self.attends,
            "query": side("query"),
            "key": side("key"),
            "rather_than": None if self.rather_than is None else self.rather_than.to_dict(),
            "instead": None if self.instead is None else self.instead.to_dict(),
        }

    def __repr__(self) -> str:
        sides = ", ".join(f"{len(self.found.side(name).causes)} {name} causes" for name in ATTENTION_SIDES)
        return f"Explanation({self.firing}, attention {self.attention:.3f}, {sides}, {self.model!r})"

    def _repr_html_(self) -> str:
        compared = self.rather_than or self.instead
        if compared is not None:
            return compared._repr_html_()  # pyright: ignore[reportPrivateUsage]
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
        if not self.attends:
            dest, src = self.tokens[firing.dest], self.tokens[firing.src]
            instead = self.instead
            most = (
                "no token gets more"
                if instead is None
                else f"it attends to {instead.token(instead.other.src)} with {instead.other_attention:.3f} instead"
            )
            return (
                f"{firing}: {dest!r} does not attend to {src!r}: {self.attention:.3g} "
                f"(threshold {self.threshold:.3f}); {most}"
            )
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
        lines = [*([] if self.notice is None else [self.notice]), self._title()]
        if self.rather_than is not None:
            lines += str(self.rather_than).splitlines()
        elif self.instead is not None:
            instead = self.instead
            lines.append(
                f"  What holds {instead.token(self.firing.src)} down: ln ratio {instead.log_ratio:+.3f}"
            )
            lines += instead.lines(held_down=True)
        if not self.attends:
            return "\n".join(lines)
        for name in ATTENTION_SIDES:
            part = self.found.side(name)
            lines.append(f"  {name} side: {self._claim(name)}")
            lines += [
                f"    {cause.weight:+.3f}  {self.place(cause)}  channels {', '.join(map(str, cause.channels or ()))}"
                for cause in part.causes
            ]
        return "\n".join(lines)
