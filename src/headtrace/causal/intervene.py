"""One edge, or several at once: what the model shows before and after.

done = intervene(circuit, model, circuit.top(1), factor=0)
print(done.summary())
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from headtrace.causal.edges import ABLATE, Reach, edit, open_circuit, residual_change
from headtrace.causal.edits import Intervention, run
from headtrace.causal.measuring import check_options
from headtrace.causal.metric import metric_of
from headtrace.causal.signals import Scope, Signal
from headtrace.errors import InputError
from headtrace.notebook import paragraph, table

if TYPE_CHECKING:
    from headtrace.circuits import Circuit, Edge
    from headtrace.models import Model, Recording


@dataclass(frozen=True)
class EdgeChange:
    """How far one intervened signal moves the residual that its firing reads."""

    source: str
    target: str
    side: str
    channels: tuple[int, ...]
    cosine: float
    norm_ratio: float


@dataclass(frozen=True, repr=False)
class Intervened:
    """The model with a set of edges multiplied by ``factor``: attention of the last edge's firing, and the metric."""

    edges: tuple[EdgeChange, ...]
    firing: str
    factor: float
    reach: str
    scope: str
    attention_before: float
    attention_after: float
    metric: str | None
    metric_before: float | None
    metric_after: float | None

    def summary(self) -> str:
        """A few lines, numbers before and after."""
        lines = [
            f"{e.source} => {e.side} of {e.target}, channels {', '.join(map(str, e.channels))}: "
            f"residual cosine {e.cosine:.5f}, norm ratio {e.norm_ratio:.5f}"
            for e in self.edges
        ]
        lines.append(f"times {self.factor:g}, {self.reach}, scope {self.scope}")
        lines.append(_line(f"attention of {self.firing}", self.attention_before, self.attention_after))
        if self.metric is not None and self.metric_before is not None and self.metric_after is not None:
            lines.append(_line(self.metric, self.metric_before, self.metric_after))
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, as ``--json`` prints it."""
        return asdict(self)

    def __repr__(self) -> str:
        moved = [f"attention of {self.firing} {self.attention_before:.4f} -> {self.attention_after:.4f}"]
        if self.metric_before is not None and self.metric_after is not None:
            moved.append(f"{self.metric} {self.metric_before:.4f} -> {self.metric_after:.4f}")
        return f"Intervened({len(self.edges)} edge(s) x {self.factor:g}: {', '.join(moved)})"

    def _repr_html_(self) -> str:
        edges = [(e.source, e.target, e.side, e.cosine, e.norm_ratio) for e in self.edges[:10]]
        moved: list[tuple[str, float | None, float | None]] = [
            (f"attention of {self.firing}", self.attention_before, self.attention_after)
        ]
        if self.metric is not None:
            moved.append((self.metric, self.metric_before, self.metric_after))
        how = f"times {self.factor:g}, {self.reach}, scope {self.scope}"
        titles = ("from", "into", "side", "residual cosine", "norm ratio")
        return f"<div>{table(moved, ('', 'before', 'after'))}{paragraph(how)}{table(edges, titles)}</div>"


def _line(name: str, before: float, after: float) -> str:
    return f"{name}: {before:.4f} before, {after:.4f} after ({after - before:+.4f})"


def intervene(
    circuit: Circuit,
    model: Model,
    edges: Sequence[Edge] | Edge,
    *,
    factor: float = ABLATE,
    reach: Reach = "local",
    scope: Scope = "claim",
) -> Intervened:
    """Multiply the signals of one edge, or of several in one forward pass, by ``factor``: 0 ablates, 2 boosts."""
    chosen = list(edges) if isinstance(edges, Sequence) else [edges]
    check_change(factor, reach, scope)
    if not chosen:
        raise InputError("There is no edge to intervene on: give one, or a list of edges.")
    recording = open_circuit(circuit, model)
    signals = [Signal.of(circuit, edge) for edge in chosen]
    change = together(recording, signals, factor, reach, scope)
    metric = metric_of(circuit.root, recording)
    outcome = run(recording, [change], metric)
    firing = signals[-1].firing
    return Intervened(
        edges=tuple(
            EdgeChange(
                circuit.node(edge.source).name,
                circuit.node(edge.target).name,
                edge.side,
                signal.channels,
                *residual_change(recording, signal, factor),
            )
            for edge, signal in zip(chosen, signals, strict=True)
        ),
        firing=str(firing),
        factor=factor,
        reach=reach,
        scope=scope,
        attention_before=float(recording.attention.at(firing.layer, 0, firing.head, firing.dest, firing.src)),
        attention_after=float(outcome.attention[0]),
        metric=None if metric is None else metric.name,
        metric_before=None if metric is None else metric.of(recording),
        metric_after=None if outcome.metric is None else float(outcome.metric[0]),
    )


def check_change(factor: float, reach: str, scope: str) -> None:
    """What can be wrong with an intervention, said before anything runs."""
    check_options(0, reach, scope)
    if not math.isfinite(factor):
        raise InputError(f"factor={factor}: expected a finite number, like 0 (ablate) or 2 (boost).")


def together(
    recording: Recording, signals: Sequence[Signal], factor: float, reach: Reach, scope: Scope
) -> Intervention:
    """Several signals changed in one copy of the prompt; the last one's firing is read.

    Where global changes of one component overlap (two firings read similar channels of it), each is made as if it were
    the only one, so that together they may take away more than the component wrote.
    """
    edits = tuple(edit(recording, signal, factor, reach, scope) for signal in signals)
    return Intervention(edits, signals[-1].firing if signals else None)
