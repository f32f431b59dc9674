"""The papers' experiments on single edges, over one circuit or many.

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

from headtrace.causal.edges import ABLATE, BOOST, Reach, node_name, open_circuit, residual_change
from headtrace.causal.measuring import Measuring, check_options, choose_edges, within_reach
from headtrace.causal.metric import metric_of
from headtrace.causal.signals import Scope, Signal
from headtrace.circuits import Circuit, Edge
from headtrace.errors import InputError
from headtrace.notebook import chart, frame, paragraph
from headtrace.progress import Progress, part_of, share_of
from headtrace.statistics import compare
from headtrace.vocabulary import ATTENTION_SIDES, head_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headtrace.causal.report import EdgeEffect
    from headtrace.models import Model

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
            how = Measuring(recording, circuit, read, controls, reach, scope, seed + number)
            chosen = within_reach(circuit, choose_edges(circuit, edges, seed + number), reach)
            part = share_of(progress, number * len(reaches) + place, 1, len(many) * len(reaches))
            rows += single_edge_rows(number, how.measure(chosen, part), reach)
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
    from headtrace.causal.report import mean

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
            how = Measuring(recording, circuit, read, 0, reach, scope, seed=0)
            effects = how.measure(chosen, part_of(progress, done, of_all))
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
