"""Sets of edges: do the effects of edges on parallel paths, and of edges on one path, add up?

    found = edge_pairs(circuits, model, pairs=20)
    print(found.summary())

Signals are those of the clean run, in sets as in single edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import polars as pl

from headtrace.causal.edges import ABLATE, Reach, edge_name, open_circuit
from headtrace.causal.edits import run
from headtrace.causal.experiments import REACHES, as_circuits
from headtrace.causal.intervene import together
from headtrace.causal.metric import Metric, require_metric
from headtrace.causal.signals import Scope, Signal
from headtrace.errors import InputError
from headtrace.notebook import frame, paragraph

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headtrace.circuits import Circuit, Edge
    from headtrace.models import Model, Recording

Arrangement = Literal["parallel", "serial"]


@dataclass(frozen=True, repr=False)
class Additivity:
    """Pairs of edges ablated one by one and together."""

    table: pl.DataFrame
    """circuit, arrangement, reach, first, second, single_first, single_second, sum, joint (changes of the metric)."""
    metric: str

    def __repr__(self) -> str:
        return f"Additivity({self.table.height} pairs of edges, metric {self.metric!r})"

    def _repr_html_(self) -> str:
        return paragraph(repr(self)) + frame(self.summary())

    def summary(self) -> pl.DataFrame:
        """How far joint effects are sums: slope of joint on sum through zero, correlation, mean |joint - sum|."""
        slope = (pl.col("joint") * pl.col("sum")).sum() / pl.col("sum").pow(2).sum()
        return self.table.group_by("arrangement", "reach", maintain_order=True).agg(
            pl.len().alias("pairs"),
            slope.alias("slope"),
            pl.corr("joint", "sum").alias("correlation"),
            pl.col("sum").abs().mean().alias("mean_abs_sum"),
            (pl.col("joint") - pl.col("sum")).abs().mean().alias("mean_abs_gap"),
        )

    def plot(self, path: str | Path | None = None) -> Figure:
        from headtrace.figures.causal import additivity_scatter

        return additivity_scatter(self, path)


def edge_pairs(
    circuits: Circuit | Sequence[Circuit],
    model: Model,
    *,
    pairs: int = 20,
    among: int | None = None,
    reaches: Sequence[Reach] = REACHES,
    scope: Scope = "claim",
    factor: float = ABLATE,
) -> Additivity:
    """The heaviest pairs of edges of each circuit, parallel and serial, changed alone and together."""
    rows: list[dict[str, Any]] = []
    name = None
    for number, circuit in enumerate(as_circuits(circuits)):
        recording = open_circuit(circuit, model)
        metric = require_metric(circuit.root, recording, "the sum of effects on it")
        name = metric.name
        for reach in reaches:
            for arrangement in ("parallel", "serial"):
                chosen = find_pairs(circuit, arrangement, pairs, among, offsets=reach == "local")
                sets = [(e,) for e in dict.fromkeys(e for pair in chosen for e in pair)] + list(chosen)
                found = joint_changes(
                    recording, circuit, metric, sets, factor=factor, reach=reach, scope=scope
                )
                for first, second in chosen:
                    one, other = found[(first,)], found[(second,)]
                    rows.append(
                        {
                            "circuit": number,
                            "arrangement": arrangement,
                            "reach": reach,
                            "first": edge_name(circuit, first),
                            "second": edge_name(circuit, second),
                            "single_first": one,
                            "single_second": other,
                            "sum": one + other,
                            "joint": found[(first, second)],
                        }
                    )
    if not rows:
        raise InputError("No two edges to pair: these circuits are too small.")
    return Additivity(pl.DataFrame(rows), name or "metric")


def joint_changes(
    recording: Recording,
    circuit: Circuit,
    metric: Metric,
    sets: Sequence[tuple[Edge, ...]],
    *,
    factor: float,
    reach: Reach,
    scope: Scope,
) -> dict[tuple[Edge, ...], float]:
    """Change of the metric when each set of edges is multiplied by ``factor`` in one forward pass."""
    clean = metric.of(recording)
    changes = [
        together(recording, [Signal.of(circuit, e) for e in edges], factor, reach, scope) for edges in sets
    ]
    outcome = run(recording, changes, metric)
    assert outcome.metric is not None
    return {edges: value - clean for edges, value in zip(sets, outcome.metric.tolist(), strict=True)}


def find_pairs(
    circuit: Circuit, arrangement: Arrangement, pairs: int, among: int | None = None, *, offsets: bool = True
) -> list[tuple[Edge, Edge]]:
    """The heaviest pairs of edges (by the lighter of the two): serial if one path holds both, else parallel."""
    edges = [
        e for e in circuit.top(len(circuit.edges)) if offsets or circuit.node(e.source).kind != "offset"
    ][:among]
    above = {node.id: _above(circuit, node.id) for node in circuit.nodes}
    found: list[tuple[Edge, Edge]] = []
    for place, later in enumerate(edges):
        for earlier in edges[:place]:
            if later.source in above[earlier.target]:
                serial, pair = True, (earlier, later)
            elif earlier.source in above[later.target]:
                serial, pair = True, (later, earlier)
            else:
                serial, pair = False, (earlier, later)
            if serial == (arrangement == "serial"):
                found.append(pair)
    return sorted(found, key=lambda pair: -min(e.weight for e in pair))[:pairs]


def _above(circuit: Circuit, node: int) -> set[int]:
    """The node and everything it causes, directly or not."""
    reached, waiting = {node}, [node]
    while waiting:
        for edge in circuit.edges_from(waiting.pop()):
            if edge.target not in reached:
                reached.add(edge.target)
                waiting.append(edge.target)
    return reached
