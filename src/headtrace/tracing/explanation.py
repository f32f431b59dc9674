"""The answer to "why does this head attend here?" for one firing, ready to print."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from headtrace.tables import html_table
from headtrace.tracing.causes import Cause, Causes
from headtrace.vocabulary import ATTENTION_SIDES, AttentionSide, Firing


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
