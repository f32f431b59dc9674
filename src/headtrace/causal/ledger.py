"""What was compared between a file and the model, what does not agree, and what that comes to.

>>> ledger = Ledger()
>>> ledger.compare("attention", "L9H6 14->3", in_file=0.5, measured=0.50001, allowed=1e-4)
>>> ledger.compare("attention", "L8H1 14->3", in_file=0.9, measured=0.2, allowed=1e-4)
>>> print(ledger.failures[0])
attention of L8H1 14->3: 0.9 in the file, 0.2 in the model (allowed 0.0001)
>>> overall(["PASS", "NOTHING TO VERIFY"]), overall(["PASS", "FAIL"])
('PASS', 'FAIL')
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Verdict = Literal["PASS", "FAIL", "NOTHING TO VERIFY"]
"""What a verification comes to."""


def overall(verdicts: Iterable[Verdict]) -> Verdict:
    """The verdict on many: one failure fails all; nothing is verified only where nothing is in any of them."""
    given = set(verdicts)
    if "FAIL" in given:
        return "FAIL"
    return "PASS" if "PASS" in given else "NOTHING TO VERIFY"


@dataclass(frozen=True)
class Failure:
    """One number, list or flag of a file that the model contradicts."""

    field: str
    """What the file calls it."""
    where: str
    """The node or the edge that it belongs to; empty for the circuit as a whole."""
    in_file: Any
    """What it is in the file."""
    measured: Any
    """What it is in the model."""
    allowed: float | None = None
    """How far apart the two may be; none where they must be equal."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON, which has no number for what is none."""
        values = asdict(self)
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}

    def __str__(self) -> str:
        of = f" of {self.where}" if self.where else ""
        allowed = "" if self.allowed is None else f" (allowed {self.allowed:.2g})"
        return f"{self.field}{of}: {shown(self.in_file)} in the file, {shown(self.measured)} in the model{allowed}"


def shown(value: Any) -> str:
    """A value in a sentence: numbers with as many digits as people read, text quoted, lists cut short."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "nothing"}[value]
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        some = ", ".join(shown(item) for item in value[:8])  # type: ignore[index]
        return f"[{some}{', ...' if len(value) > 8 else ''}]"  # type: ignore[arg-type]
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass
class Ledger:
    """Comparisons as they are made."""

    failures: list[Failure] = field(default_factory=list[Failure])
    checked: Counter[str] = field(default_factory=Counter[str])
    """How many of each field were compared."""
    not_checked: list[str] = field(default_factory=list[str])
    """What could not be, and why."""

    def compare(
        self, name: str, where: str, *, in_file: float | None, measured: float, allowed: float
    ) -> None:
        """A number; what a file does not say is no claim."""
        if in_file is not None:
            self.between(name, where, in_file=in_file, low=measured, high=measured, allowed=allowed)

    def between(
        self, name: str, where: str, *, in_file: float, low: float, high: float, allowed: float
    ) -> None:
        """A number that may lie in a range."""
        self.checked[name] += 1
        if not low - allowed <= in_file <= high + allowed:  # what is not a number fails, too
            nearer = low if abs(in_file - low) <= abs(in_file - high) else high
            self.failures.append(Failure(name, where, in_file, nearer, allowed))

    def require(self, name: str, where: str, *, in_file: Any, measured: Any) -> None:
        """Something that is equal or is not."""
        self.checked[name] += 1
        if in_file != measured:
            self.failures.append(Failure(name, where, in_file, measured))

    def skip(self, what: str) -> None:
        """Once is enough."""
        if what not in self.not_checked:
            self.not_checked.append(what)
