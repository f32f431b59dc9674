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

import networkx as nx
import polars as pl

from headtrace.causal.changes import Reach
from headtrace.causal.effects import (
    EdgeEffect,
    check_options,
    choose_edges,
    mean,
    measure_edges,
    per_edge,
    together,
    within_reach,
)
from headtrace.causal.execute import run
from headtrace.causal.metric import Metric, require_metric
from headtrace.causal.opening import open_circuit
from headtrace.causal.signals import ABLATE, BOOST, Scope, Signal, edge_name, node_name, residual_change
from headtrace.circuits import Circuit, Edge
from headtrace.errors import InputError
from headtrace.progress import Progress, part_of
from headtrace.statistics import compare
from headtrace.tables import WithTable, chart, frame, paragraph
from headtrace.vocabulary import ATTENTION_SIDES, FiringName, head_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headtrace.models import Model, Recording

Arrangement = Literal["parallel", "serial"]
ACTIONS = {"ablate": ABLATE, "boost": BOOST}
REACHES: tuple[Reach, ...] = ("local", "global")


# -- one edge at a time ----------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class SingleEdges(WithTable):
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
        paired = self.table.drop_nulls(["change", "random"])
        for part in paired.partition_by("reach", "action", "measure", maintain_order=True):
            found = compare(part["change"].to_list(), part["random"].to_list(), part["circuit"].to_list())
            rows.append({**part.select("reach", "action", "measure").row(0, named=True), **asdict(found)})
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
    for reach in reaches:
        check_options(controls, reach, scope, seed)
    chosen = [choose_edges(circuit, edges, seed + number) for number, circuit in enumerate(many)]
    effects, metric = _measure_all(many, model, chosen, reaches, scope, controls, seed, progress)
    rows = [
        {
            "circuit": number,
            "source": effect.source,
            "target": effect.target,
            "side": effect.edge.side,
            "weight": effect.edge.weight,
            "reach": reach,
            "action": action,
            "measure": measure,
            "change": change,
            "random": mean(randoms),
            "randoms": list(randoms),
        }
        for number, reach, effect in effects
        for action in ACTIONS
        for measure in ("attention", "metric")
        if (change := getattr(effect, f"{action}_{measure}")) is not None
        for randoms in [getattr(effect, f"control_{action}_{measure}")]
    ]
    schema: Any = {
        "circuit": pl.Int64,
        **dict.fromkeys(("source", "target", "side"), pl.String),
        "weight": pl.Float64,
        **dict.fromkeys(("reach", "action", "measure"), pl.String),
        "change": pl.Float64,
        "random": pl.Float64,
        "randoms": pl.List(pl.Float64),
    }
    return SingleEdges(pl.DataFrame(rows, schema=schema), metric)


def _measure_all(
    circuits: Sequence[Circuit],
    model: Model,
    edges: Sequence[Sequence[Edge]],
    reaches: Sequence[Reach],
    scope: Scope,
    controls: int,
    seed: int,
    progress: Progress | None,
) -> tuple[list[tuple[int, Reach, EdgeEffect]], str | None]:
    """Effects of the chosen edges of each circuit, with the circuit's number and the reach; the metric's name."""
    plan: list[dict[Reach, list[Edge]]] = [
        {reach: within_reach(circuit, chosen, reach) for reach in reaches}
        for circuit, chosen in zip(circuits, edges, strict=True)
    ]
    done, total = 0, per_edge(controls) * sum(len(chosen) for each in plan for chosen in each.values())
    found: list[tuple[int, Reach, EdgeEffect]] = []
    name: str | None = None
    for number, circuit in enumerate(circuits):
        recording = open_circuit(circuit, model)
        metric = circuit.root.metric(recording)
        name = name or (None if metric is None else metric.name)
        for reach, chosen in plan[number].items():
            effects = measure_edges(
                recording,
                circuit,
                chosen,
                metric,
                controls=controls,
                reach=reach,
                scope=scope,
                seed=seed + number,
                progress=part_of(progress, done, total),
            )
            done += per_edge(controls) * len(chosen)
            found.extend((number, reach, effect) for effect in effects)
    return found, name


def as_circuits(circuits: Circuit | Sequence[Circuit]) -> list[Circuit]:
    many = [circuits] if isinstance(circuits, Circuit) else list(circuits)
    if not many:
        raise InputError("There is no circuit to experiment on: give at least one.")
    return many


# -- edges into one head ---------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class EdgesIntoHead(WithTable):
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
        return self.table.group_by("reach", maintain_order=True).agg(
            pl.len().alias("edges"),
            *(
                pl.corr("weight", -pl.col(name), method="spearman").alias(name)
                for name in ("attention", "metric")
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
    many = as_circuits(circuits)
    for reach in reaches:
        check_options(0, reach, scope)
    chosen = require_edges_into(many, head)
    numbers = [number for number, edges in enumerate(chosen) if edges]
    measured = [many[number] for number in numbers]
    edges = [chosen[number] for number in numbers]
    effects, metric = _measure_all(measured, model, edges, reaches, scope, 0, 0, progress)
    rows = [
        {
            "circuit": numbers[place],
            "source": effect.source,
            "target": effect.target,
            "side": effect.edge.side,
            "weight": effect.edge.weight,
            "reach": reach,
            "attention": effect.ablate_attention,
            "metric": effect.ablate_metric,
        }
        for place, reach, effect in effects
    ]
    table = pl.DataFrame(rows, infer_schema_length=None).sort("weight", "circuit", "source", "side")
    table = table.with_columns(pl.int_range(pl.len()).over("reach").alias("rank"))
    return EdgesIntoHead(head, table, metric)


def require_edges_into(circuits: Sequence[Circuit], head: str) -> list[list[Edge]]:
    """The query and key edges into a head, or into one firing of it, in each circuit; an error if there are none."""
    alone = FiringName.parse(head).dest is None

    def edges(circuit: Circuit) -> list[Edge]:
        name = node_name(head, None if alone else circuit)
        into = [e for e in circuit.edges if e.side in ATTENTION_SIDES]
        return [e for e in into if name in ((target := circuit.node(e.target).name), target.split(" ")[0])]

    found = [edges(circuit) for circuit in circuits]
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


# -- how far the residual moves --------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class ResidualChanges(WithTable):
    """How little the residual moves: cosine and norm ratio before and after, for edges and for whole sides."""

    table: pl.DataFrame
    """circuit, what (edge: one signal; side: all of a firing's side), target, side, action, cosine, norm_ratio."""

    def __repr__(self) -> str:
        return f"ResidualChanges({self.table.height} rows)"

    def _repr_html_(self) -> str:
        return paragraph(repr(self)) + frame(self.quantiles())

    def quantiles(self) -> pl.DataFrame:
        """Median, and the 5 % and 95 % quantiles."""
        return self.table.group_by("what", "action", maintain_order=True).agg(
            pl.len().alias("n"),
            *(
                pl.col(name).quantile(q, "linear").name.suffix(f"_{round(100 * q)}")
                for name in ("cosine", "norm_ratio")
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
            for side in ATTENTION_SIDES:
                signals = [Signal.of(circuit, e) for e in circuit.edges_into(node) if e.side == side]
                sets = [*(("edge", [signal]) for signal in signals), ("side", signals)]
                for what, chosen in sets if signals else ():
                    for action, factor in ACTIONS.items():
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


# -- pairs of edges --------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Additivity(WithTable):
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
    graph = circuit.to_networkx()
    above = {node.id: {node.id, *nx.descendants(graph, node.id)} for node in circuit.nodes}
    found: list[tuple[Edge, Edge]] = []
    for place, later in enumerate(edges):
        for earlier in edges[:place]:
            onward, back = later.source in above[earlier.target], earlier.source in above[later.target]
            if (onward or back) == (arrangement == "serial"):
                found.append((later, earlier) if back and not onward else (earlier, later))
    return sorted(found, key=lambda pair: -min(e.weight for e in pair))[:pairs]
