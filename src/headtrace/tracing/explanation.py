"""The answer to "why does this head attend here?" for one firing, ready to print."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from headtrace.tracing.firing import Cause, FiringCauses


@dataclass(frozen=True)
class Explanation:
    """The causes of one firing: per side, components with their tokens, channels and weights.

    why = tracer.explain("When Mary and John ...", firing="L20H0:13:9")
    print(why)
    why.top(3)
    """

    found: FiringCauses
    tokens: tuple[str, ...]
    model: str

    @property
    def firing(self) -> Any:
        return self.found.firing

    @property
    def attention(self) -> float:
        return self.found.attention

    @property
    def query(self) -> tuple[Cause, ...]:
        """Causes on the query side: what was written at the destination."""
        return self.found.query.causes

    @property
    def key(self) -> tuple[Cause, ...]:
        """Causes on the key side: what was written at the keys."""
        return self.found.key.causes

    def top(self, k: int = 5) -> list[tuple[Literal["query", "key"], Cause]]:
        """The k strongest causes of both sides."""
        sides: tuple[Literal["query", "key"], ...] = ("query", "key")
        both: list[tuple[Literal["query", "key"], Cause]] = [
            (side, cause) for side in sides for cause in self.found.side(side).causes
        ]
        both.sort(key=lambda item: -item[1].weight)
        return both[:k]

    def place(self, cause: Cause, side: str) -> str:
        """Where a cause acts, with token text: ``L5H3 from 3 ' John'``."""
        component = cause.component
        if component.kind == "head" and component.src is not None:
            return f"{component} {self.tokens[component.src]!r}"
        position = self.found.firing.dest if side == "query" else self.found.firing.src
        return f"{component} at {position} {self.tokens[position]!r}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        firing = self.found.firing

        def side(name: Literal["query", "key"]) -> dict[str, Any]:
            part = self.found.side(name)
            causes = [
                {
                    "kind": c.component.kind,
                    "layer": c.component.layer,
                    "head": c.component.head,
                    "src": c.component.src,
                    "channels": list(c.channels),
                    "weight": c.weight,
                }
                for c in part.causes
            ]
            return {"predicted_attention": part.predicted, "explained": part.explained, "causes": causes}

        return {
            "model": self.model,
            "tokens": list(self.tokens),
            "firing": {"layer": firing.layer, "head": firing.head, "dest": firing.dest, "src": firing.src},
            "attention": self.found.attention,
            "threshold": self.found.threshold,
            "query": side("query"),
            "key": side("key"),
        }

    def __str__(self) -> str:
        firing = self.found.firing
        lines = [
            f"{firing}: {self.tokens[firing.dest]!r} attends to {self.tokens[firing.src]!r} with {self.attention:.3f} "
            f"(threshold {self.found.threshold:.3f})"
        ]
        for name in ("query", "key"):
            part = self.found.side(name)
            note = "" if part.explained else ", which is not below the threshold: unexplained"
            claim = "upstream heads that write into the firing's channels"
            if part.predicted is not None:
                claim = f"without these signals attention would be {part.predicted:.3f}{note}"
            lines.append(f"  {name} side: {claim}")
            lines += [
                f"    {cause.weight:+.3f}  {self.place(cause, name)}  channels {', '.join(map(str, cause.channels))}"
                for cause in part.causes
            ]
        return "\n".join(lines)
