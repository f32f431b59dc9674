"""The papers' experiments on edges, over one circuit or many: single edges, edges into a head, pairs of edges.

    found = single_edges(circuits, model, edges="top:30")
    print(found.comparisons())
    found.plot("violins.png")

All numbers are changes: with the intervention, minus without.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import polars as pl

from headtrace.causal.changes import Reach
from headtrace.causal.effects import (
    EdgeEffect,
    check_options,
    choose_edges,
    mean,
    measure_edges,
    together,
    within_reach,
)
from headtrace.causal.execute import run
from headtrace.causal.metric import Metric, metric_of, require_metric
from headtrace.causal.opening import open_circuit
from headtrace.causal.signals import ABLATE, BOOST, Scope, Signal, edge_name, node_name, residual_change
from headtrace.circuits import Circuit, Edge
from headtrace.errors import InputError
from headtrace.notebook import chart, frame, paragraph
from headtrace.progress import Progress, part_of, scaled
from headtrace.statistics import compare
from headtrace.vocabulary import ATTENTION_SIDES, head_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headtrace.models import Model, Recording

Arrangement = Literal["parallel", "serial"]
ACTIONS = ("ablate", "boost")
REACHES: tuple[Reach, ...] = ("local", "global")


@dataclass(frozen=True, repr=False)
class SingleEdges:
    """Every edge ablated and boosted, locally and globally, beside random channels."""

    table: pl.DataFrame
    """circuit, source, target, side, weight, reach, action, measure, change, random (mean), randoms (every draw)."""
    metric: str | None

    def __repr__(self) -> str:
        return f"SingleEdges({self.table.height} rows, metric {self.metric!r})"

    def _repr_html_(self) -> str:
        return paragraph(repr(self)) + frame(self.comparisons())

    def comparisons(self) -> pl.DataFrame:
        """Claimed against random for each reach, action and measure: means, 95 % intervals, paired tests."""
        rows: list[dict[str, Any]] = []
        for reach, action, measure in (
            self.table.select("reach", "action", "measure").unique(maintain_order=True).rows()
        ):
            part = self.table.filter(reach=reach, action=action, measure=measure).drop_nulls(
                ["change", "random"]
            )
            if part.height:
                found = compare(part["change"].to_list(), part["random"].to_list(), part["circuit"].to_list())
                rows.append({"reach": reach, "action": action, "measure": measure, **asdict(found)})
        return pl.DataFrame(rows)

    def plot(self, path: str | Path | None = None) -> Figure:
        from headtrace.figures.causal import single_edge_violins

        return single_edge_violins(self, path)


def single_edges(
    circuits: Circuit | Sequence[Circuit],
    model: Model,
    *,
    edges: str = "all",
    controls: int = 8,
    reaches: Sequence[Reach] = REACHES,
    scope: Scope = "claim",
    seed: int = 0,
    progress: Progress | None = None,
) -> SingleEdges:
    """Ablate and boost single edges, locally and globally, and the same with random channels of the same heads."""
    many = as_circuits(circuits)
    rows: list[dict[str, Any]] = []
    metric = None
    for reach in reaches:
        check_options(controls, reach, scope, seed)
    for number, circuit in enumerate(many):
        recording = open_circuit(circuit, model)
        read = metric_of(circuit.root, recording)
        metric = metric or (None if read is None else read.name)
        for place, reach in enumerate(reaches):
            chosen = within_reach(circuit, choose_edges(circuit, edges, seed + number), reach)
            part = scaled(progress, number * len(reaches) + place, 1, len(many) * len(reaches))
            effects = measure_edges(
                recording,
                circuit,
                chosen,
                read,
                controls=controls,
                reach=reach,
                scope=scope,
                seed=seed + number,
                progress=part,
            )
            rows += single_edge_rows(number, effects, reach)
            if progress is not None:
                progress(number * len(reaches) + place + 1, len(many) * len(reaches))
    return SingleEdges(pl.DataFrame(rows, schema=_SINGLE), metric)


_SINGLE: Any = {
    "circuit": pl.Int64,
    **dict.fromkeys(("source", "target", "side"), pl.String),
    "weight": pl.Float64,
    **dict.fromkeys(("reach", "action", "measure"), pl.String),
    "change": pl.Float64,
    "random": pl.Float64,
    "randoms": pl.List(pl.Float64),
}


def single_edge_rows(number: int, effects: Sequence[EdgeEffect], reach: Reach) -> list[dict[str, Any]]:
    """Effects in long form."""
    return [
        {
            "circuit": number,
            "source": effect.source,
            "target": effect.target,
            "side": effect.edge.side,
            "weight": effect.edge.weight,
            "reach": reach,
            "action": action,
            "measure": measure,
            "change": getattr(effect, f"{action}_{measure}"),
            "random": mean(getattr(effect, f"control_{action}_{measure}")),
            "randoms": list(getattr(effect, f"control_{action}_{measure}")),
        }
        for effect in effects
        for action in ACTIONS
        for measure in ("attention", "metric")
        if getattr(effect, f"{action}_{measure}") is not None
    ]


@dataclass(frozen=True, repr=False)
class EdgesIntoHead:
    """Edges into the firings of one head, lightest first: weight, change of attention, change of the metric."""

    head: str
    table: pl.DataFrame
    """rank, circuit, source, target, side, weight, reach, attention, metric."""
    metric: str | None

    def __repr__(self) -> str:
        return f"EdgesIntoHead({self.head!r}, {self.table.height} rows, metric {self.metric!r})"

    def _repr_html_(self) -> str:
        return f"<div>{paragraph(repr(self))}{frame(self.correlations())}{chart(self.plot())}</div>"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        found = self.correlations().to_dicts()
        edges = self.table.to_dicts()
        return {"head": self.head, "metric": self.metric, "correlations": found, "edges": edges}

    def correlations(self) -> pl.DataFrame:
        """Spearman correlation of weight with the fall of attention, and with the fall of the metric."""
        falls = [-pl.col("attention"), -pl.col("metric")]
        return self.table.group_by("reach", maintain_order=True).agg(
            pl.len().alias("edges"),
            *(
                pl.corr("weight", fall, method="spearman").alias(n)
                for fall, n in zip(falls, ("attention", "metric"), strict=True)
            ),
        )

    def plot(self, path: str | Path | None = None) -> Figure:
        from headtrace.figures.causal import edges_into_head_bars

        return edges_into_head_bars(self, path)


def edges_into_head(
    circuits: Circuit | Sequence[Circuit],
    model: Model,
    head: str,
    *,
    reaches: Sequence[Reach] = REACHES,
    scope: Scope = "claim",
    progress: Progress | None = None,
) -> EdgesIntoHead:
    """Ablate every edge into one head (``"L20H0"``) or one firing (``"L20H0 13->9"``), ranked by weight."""
    many, done = as_circuits(circuits), 0
    for reach in reaches:
        check_options(0, reach, scope)
    wanted = require_edges_into(many, head)
    of_all = 2 * sum(len(within_reach(c, e, r)) for c, e in zip(many, wanted, strict=True) for r in reaches)
    rows: list[dict[str, Any]] = []
    metric = None
    for number, (circuit, edges) in enumerate(zip(many, wanted, strict=True)):
        if not edges:
            continue
        recording = open_circuit(circuit, model)
        read = metric_of(circuit.root, recording)
        metric = metric or (None if read is None else read.name)
        for reach in reaches:
            chosen = within_reach(circuit, edges, reach)
            part = part_of(progress, done, of_all)
            effects = measure_edges(
                recording, circuit, chosen, read, controls=0, reach=reach, scope=scope, progress=part
            )
            done += 2 * len(chosen)
            rows += [
                {
                    "circuit": number,
                    "source": e.source,
                    "target": e.target,
                    "side": e.edge.side,
                    "weight": e.edge.weight,
                    "reach": reach,
                    "attention": e.ablate_attention,
                    "metric": e.ablate_metric,
                }
                for e in effects
            ]
    table = pl.DataFrame(rows, infer_schema_length=None).sort("weight", "circuit", "source", "side")
    table = table.with_columns(pl.int_range(pl.len()).over("reach").alias("rank"))
    return EdgesIntoHead(head, table, metric)


def require_edges_into(circuits: Sequence[Circuit], head: str) -> list[list[Edge]]:
    """The query and key edges into a head, or into one firing of it, in each circuit; an error if there are none."""
    name = node_name(head)
    found = [
        [
            edge
            for edge in circuit.edges
            if edge.side in ATTENTION_SIDES and name in _names(circuit.node(edge.target).name)
        ]
        for circuit in circuits
    ]
    if not any(found):
        counts = Counter(
            head_name(n.layer or 0, n.head or 0) for c in circuits for n in c.heads() if c.edges_into(n)
        )
        there = ", ".join(name for name, _ in counts.most_common(8)) or "no head"
        raise InputError(
            f"No edge goes into {head!r} in these circuits. Name a head like 'L20H0', or a firing of one; edges go "
            f"into {there}."
        )
    return found


def _names(firing: str) -> tuple[str, str]:
    """A firing's own name, and that of its head."""
    return firing, firing.split(" ")[0]


@dataclass(frozen=True, repr=False)
class ResidualChanges:
    """How little the residual moves: cosine and norm ratio before and after, for edges and for whole sides."""

    table: pl.DataFrame
    """circuit, what (edge: one signal; side: all of a firing's side), target, side, action, cosine, norm_ratio."""

    def __repr__(self) -> str:
        return f"ResidualChanges({self.table.height} rows)"

    def _repr_html_(self) -> str:
        return paragraph(repr(self)) + frame(self.quantiles())

    def quantiles(self) -> pl.DataFrame:
        """Median, and the 5 % and 95 % quantiles."""
        numbers = [pl.col(name) for name in ("cosine", "norm_ratio")]
        return self.table.group_by("what", "action", maintain_order=True).agg(
            pl.len().alias("n"),
            *(
                c.quantile(q, "linear").name.suffix(f"_{round(100 * q)}")
                for c in numbers
                for q in (0.05, 0.5, 0.95)
            ),
        )

    def plot(self, path: str | Path | None = None) -> Figure:
        from headtrace.figures.causal import residual_distributions

        return residual_distributions(self, path)


def residual_changes(circuits: Circuit | Sequence[Circuit], model: Model) -> ResidualChanges:
    """Cosine and norm ratio of the residual that a head reads, for every edge and for every side of every firing."""
    rows: list[dict[str, Any]] = []
    for number, circuit in enumerate(as_circuits(circuits)):
        recording = open_circuit(circuit, model)
        for node in circuit.heads():
            for side in ("query", "key"):
                signals = [Signal.of(circuit, e) for e in circuit.edges_into(node) if e.side == side]
                sets: list[tuple[Literal["edge", "side"], list[Signal]]] = [("edge", [s]) for s in signals]
                for what, chosen in [*sets, ("side", signals)] if signals else []:
                    for action, factor in zip(ACTIONS, (ABLATE, BOOST), strict=True):
                        cosine, ratio = residual_change(recording, chosen, factor)
                        rows.append(
                            {
                                "circuit": number,
                                "what": what,
                                "target": node.name,
                                "side": side,
                                "action": action,
                                "cosine": cosine,
                                "norm_ratio": ratio,
                            }
                        )
    return ResidualChanges(pl.DataFrame(rows))


def as_circuits(circuits: Circuit | Sequence[Circuit]) -> list[Circuit]:
    many = [circuits] if isinstance(circuits, Circuit) else list(circuits)
    if not many:
        raise InputError("There is no circuit to experiment on: give at least one.")
    return many


# -- pairs of edges --------------------------------------------------------------------------------------------


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
    changes = [together([Signal.of(circuit, e) for e in edges], factor, reach, scope) for edges in sets]
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
