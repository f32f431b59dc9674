"""A causal test of families: ablating a family's exclusive edges should hurt its own prompts more than others'.

    found = families.ablate_exclusive(model, prompts=20)
    print(found.summary())

An edge of a family has no token positions. In a given prompt it is ablated (its signals are subtracted, as in
``headtrace.causal``) wherever the prompt's own circuit has it; otherwise at the place where most circuits of the family
have it, in terms of roles ("from S2 to S1+1"); where that is unknown, too, it counts as missing. As a control, the same
number of random edges of the prompt's own circuit are ablated. Edges into the root are not signals that a head reads,
and are not ablated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from headtrace.causal.changes import Reach
from headtrace.causal.effects import check_options, together
from headtrace.causal.execute import run
from headtrace.causal.metric import Metric, require_metric
from headtrace.causal.opening import open_circuit
from headtrace.causal.signals import ABLATE, Scope, Signal
from headtrace.circuits import Circuit, Edge
from headtrace.errors import InputError
from headtrace.families.population import ROOT_NAME, Roles, component_name, edge_item, position_of, role_at
from headtrace.progress import Progress
from headtrace.statistics import RESAMPLES, interval
from headtrace.tables import WithTable, frame, paragraph
from headtrace.vocabulary import ATTENTION_SIDES, AttentionSide, Component, Firing, Site

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headtrace.families.result import Families
    from headtrace.models import Model, Recording

_TYPES: Any = {
    "edges_of": pl.Int64, "prompt": pl.String, "family": pl.Int64, "own": pl.Boolean, "edges": pl.Int64,
    "found": pl.Int64, "placed": pl.Int64, "missing": pl.Int64, "signals": pl.Int64, "clean": pl.Float64,
    "change": pl.Float64, "random": pl.Float64, "random_signals": pl.Float64,
}  # fmt: skip


@dataclass(frozen=True, repr=False)
class ExclusiveAblation(WithTable):
    """Every family's exclusive edges ablated on prompts of every family."""

    table: pl.DataFrame
    """One row per set of edges and prompt. edges_of (the family whose edges are ablated), prompt, family (the
    prompt's), own (whether the two agree); edges, of which found in the prompt's circuit, placed by roles, missing;
    signals subtracted; the clean metric, its change, and the mean change by random edges."""
    metric: str
    edges: dict[int, tuple[str, ...]]
    """The exclusive edges that were ablated, by family."""
    not_signals: dict[int, int]
    """How many exclusive edges of each family lead into the root, and are not ablated."""

    def __repr__(self) -> str:
        sets = ", ".join(f"{f}: {len(edges)} edges" for f, edges in self.edges.items())
        return f"ExclusiveAblation({sets}; {self.table['prompt'].n_unique()} prompts, metric {self.metric!r})"

    def _repr_html_(self) -> str:
        return paragraph(repr(self)) + frame(self.summary()) + frame(self.contrasts())

    def summary(self) -> pl.DataFrame:
        """For each set of edges and family of prompts: mean change with its 95 % interval over prompts, the same for
        random edges and for the difference, and how many prompts the edges could be applied to."""
        rows: list[dict[str, Any]] = []
        for (edges_of, family), part in self.table.group_by("edges_of", "family", maintain_order=True):
            applied = part.filter(pl.col("signals") > 0)
            row: dict[str, Any] = {
                "edges_of": edges_of,
                "family": family,
                "own": edges_of == family,
                "prompts": part.height,
                "applied": applied.height,
                "missing": float(part["missing"].to_numpy().mean()),
            }
            changes = applied.select("change", "random", difference=pl.col("change") - pl.col("random"))
            for name in changes.columns:
                values = changes[name].drop_nulls().to_numpy()
                row |= dict.fromkeys((name, f"{name}_low", f"{name}_high"))
                if len(values):
                    low, high = interval(values, np.arange(len(values)))
                    row |= {name: float(values.mean()), f"{name}_low": low, f"{name}_high": high}
            rows.append(row)
        return pl.DataFrame(rows, infer_schema_length=None).sort("edges_of", "family")

    def contrasts(self) -> pl.DataFrame:
        """For each set of edges: mean change on own prompts minus that on all others', with a 95 % interval.

        Negative: the edges hurt their own family more. Prompts that the edges could not be applied to count as
        unchanged in ``difference``, and are left out of ``difference_applied``. The interval resamples the prompts of
        both sides; it is null where a side has one prompt.
        """
        rows: list[dict[str, Any]] = []
        for (edges_of,), part in self.table.group_by("edges_of", maintain_order=True):
            row: dict[str, Any] = {"edges_of": edges_of, "edges": len(self.edges[int(edges_of)])}
            for name, some in (
                ("difference", part.with_columns(pl.col("change").fill_null(0.0))),
                ("difference_applied", part.filter(pl.col("signals") > 0)),
            ):
                sides = [some.filter(own=own)["change"].to_numpy() for own in (True, False)]
                row |= dict.fromkeys((name, f"{name}_low", f"{name}_high"))
                if all(len(side) for side in sides):
                    row[name] = float(sides[0].mean() - sides[1].mean())
                if all(len(side) > 1 for side in sides):
                    rng = np.random.default_rng(0)
                    own, other = (
                        side[rng.integers(0, len(side), (RESAMPLES, len(side)))].mean(1) for side in sides
                    )
                    low, high = np.quantile(own - other, (0.025, 0.975))
                    row |= {f"{name}_low": float(low), f"{name}_high": float(high)}
            rows.append(row)
        return pl.DataFrame(rows, infer_schema_length=None).sort("edges_of")

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, as ``families.json`` keeps it."""
        return {
            "metric": self.metric,
            "edges": {str(f): list(edges) for f, edges in self.edges.items()},
            "into_root_not_ablated": {str(f): count for f, count in self.not_signals.items()},
            "summary": self.summary().to_dicts(),
            "contrasts": self.contrasts().to_dicts(),
        }

    def plot(self, path: str | Path | None = None) -> Figure:
        """Bars of what the ablations do to each family; written where a path is given."""
        from headtrace.figures.families import ablation_bars

        return ablation_bars(self, path)


def ablate_exclusive(
    families: Families,
    model: Model,
    *,
    prompts: int = 20,
    draws: int = 4,
    within: float = 0.5,
    outside: float = 0.1,
    reach: Reach = "local",
    scope: Scope = "claim",
    seed: int = 0,
    progress: Progress | None = None,
) -> ExclusiveAblation:
    """Ablate the exclusive edges of every family together, on ``prompts`` prompts of each family (drawn at random)."""
    check_options(draws, reach, scope, seed)
    if families.n < 2:
        raise InputError("There is one family, so nothing is exclusive to it: choose at least two (n=2).")
    if prompts < 1:
        raise InputError(f"prompts={prompts}: expected at least one prompt of each family.")

    edges, into_root = _exclusive_edges(families, within, outside)
    rng = np.random.default_rng(seed)
    drawn: list[_DrawnPrompt] = []
    for f in families.sizes:
        ids = families.members(f)
        for place in np.sort(rng.permutation(len(ids))[:prompts]):
            circuit, roles = families.population.circuit(ids[place]), families.population.roles_of(ids[place])
            drawn.append(_DrawnPrompt(ids[place], f, circuit, roles))
    placed = {
        f: [
            (item, usual_place(item, [(p.circuit, p.roles) for p in drawn if p.family == f]))
            for item in items
        ]
        for f, items in edges.items()
        if items
    }
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    metric = None
    for done, prompt in enumerate(drawn):
        recording = open_circuit(prompt.circuit, model)
        read = require_metric(prompt.circuit.root, recording, "the effect on it")
        metric = metric or read.name
        rows += _ablate_on(prompt, recording, read, placed, rng, draws=draws, reach=reach, scope=scope)
        if progress is not None:
            progress(done + 1, len(drawn))
    names = {f: tuple(edge_item(e.source, e.target, e.channel) for e in items) for f, items in edges.items()}
    return ExclusiveAblation(pl.DataFrame(rows, schema=_TYPES), metric or "metric", names, into_root)


def _exclusive_edges(
    families: Families, within: float, outside: float
) -> tuple[dict[int, list[EdgeItem]], dict[int, int]]:
    """The exclusive edges of each family between heads and MLPs, and the number of those into the root."""
    edges: dict[int, list[EdgeItem]] = {}
    into_root: dict[int, int] = {}
    for f in families.sizes:
        table = families.exclusive(f, within=within, outside=outside).select("source", "target", "channel")
        edges[f] = [EdgeItem(*row) for row in table.rows() if row[1] != ROOT_NAME]
        into_root[f] = table.height - len(edges[f])
    if not any(edges.values()):
        raise InputError(
            f"No family has an edge between heads and MLPs that at least {within:.0%} of its circuits have and at most "
            f"{outside:.0%} of the others'. Choose more families, a lower within or a higher outside."
        )
    return edges, into_root


def _ablate_on(
    prompt: _DrawnPrompt,
    recording: Recording,
    metric: Metric,
    edges: Mapping[int, Sequence[tuple[EdgeItem, UsualPlace | None]]],
    rng: np.random.Generator,
    *,
    draws: int,
    reach: Reach,
    scope: Scope,
) -> list[dict[str, Any]]:
    """Ablate every family's edges and their random controls on one prompt, in one batch: one row per family."""
    circuit, clean = prompt.circuit, metric.of(recording)
    others = [
        Signal.of(circuit, edge)
        for edge in circuit.edges
        if edge.side in ATTENTION_SIDES and (reach == "local" or circuit.node(edge.source).kind != "offset")
    ]
    found = {f: prompt.signals(items) for f, items in edges.items()}
    controls = {f: _random_sets(others, signals, draws, rng) for f, (signals, _) in found.items()}
    sets = [some for f, (signals, _) in found.items() for some in (signals, *controls[f]) if some]
    values = iter(())
    if sets:
        changed = run(recording, [together(some, ABLATE, reach, scope) for some in sets], metric)
        assert changed.metric is not None
        values = iter(changed.metric.tolist())
    rows: list[dict[str, Any]] = []
    for f, (signals, counts) in found.items():
        own = next(values) - clean if signals else None
        random = [next(values) - clean for _ in controls[f]]
        rows.append(
            {
                "edges_of": f,
                "prompt": prompt.id,
                "family": prompt.family,
                "own": f == prompt.family,
                "edges": len(edges[f]),
                **counts,
                "signals": len(signals),
                "clean": clean,
                "change": own,
                "random": float(np.mean(random)) if random else None,
                "random_signals": float(np.mean([len(some) for some in controls[f]])) if random else None,
            }
        )
    return rows


@dataclass(frozen=True)
class _DrawnPrompt:
    """A prompt on which edges are ablated."""

    id: str
    family: int
    circuit: Circuit
    roles: Roles

    def signals(
        self, items: Iterable[tuple[EdgeItem, UsualPlace | None]]
    ) -> tuple[list[Signal], dict[str, int]]:
        """The distinct signals of edges in this prompt; and how many edges were found, placed, or are missing."""
        signals: dict[Signal, None] = {}
        counts = {"found": 0, "placed": 0, "missing": 0}
        for item, usual in items:
            own = item.signals(self.circuit)
            elsewhere = (
                None if own or usual is None else usual.signal(self.roles, len(self.circuit.prompt.token_ids))
            )
            signals |= dict.fromkeys(own if elsewhere is None else [elsewhere])
            counts["found" if own else "missing" if elsewhere is None else "placed"] += 1
        return list(signals), counts


def _random_sets(
    every: list[Signal], ablated: list[Signal], draws: int, rng: np.random.Generator
) -> list[list[Signal]]:
    """Random sets of as many other signals of the prompt's circuit (all others, if there are fewer)."""
    used = {(s.firing, s.side, s.component) for s in ablated}
    free = [signal for signal in every if (signal.firing, signal.side, signal.component) not in used]
    if not ablated or not free:
        return []
    return [[free[place] for place in rng.permutation(len(free))[: len(ablated)]] for _ in range(draws)]


# -- where an edge acts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EdgeItem:
    """An edge without positions: two components, and optionally one channel."""

    source: str
    target: str
    channel: int | None = None

    def edges(self, circuit: Circuit) -> list[Edge]:
        """The query and key edges of a circuit that are this item."""
        return [
            edge
            for edge in circuit.edges
            if edge.side in ATTENTION_SIDES
            and component_name(circuit.node(edge.source).site) == self.source
            and component_name(circuit.node(edge.target).site) == self.target
            and (self.channel is None or self.channel in (edge.channels or ()))
        ]

    def signals(self, circuit: Circuit) -> list[Signal]:
        """The signals of these edges; with a channel, only the part in that channel."""
        found = [Signal.of(circuit, edge) for edge in self.edges(circuit)]
        return found if self.channel is None else [each.with_channels([self.channel]) for each in found]


@dataclass(frozen=True)
class RolePlace:
    """Where a signal acts, in terms of roles instead of positions."""

    source: Site
    target: Site
    side: AttentionSide
    dest: str
    src: str
    source_src: str | None
    """What the writing head attended to; None for an MLP."""

    @classmethod
    def of(cls, circuit: Circuit, edge: Edge, roles: Roles) -> RolePlace | None:
        """The place of an edge; None where a position has no role."""
        source, target = circuit.node(edge.source).site, circuit.node(edge.target).site
        dest, src, read = (role_at(at, roles) for at in (target.dest, target.src, source.src))
        if dest is None or src is None or (source.src is not None and read is None):
            return None
        bare = Site(source.kind, source.layer, source.head), Site("head", target.layer, target.head)
        return cls(*bare, edge.side, dest, src, read)  # type: ignore[arg-type]


@dataclass(frozen=True)
class UsualPlace:
    """Where most circuits of a family have an edge, and in which channels."""

    place: RolePlace
    channels: tuple[int, ...]

    def signal(self, roles: Roles, length: int) -> Signal | None:
        """The edge's signal in another prompt; None if its roles are missing or in an impossible order."""
        place = self.place
        dest, src, read = (position_of(role, roles) for role in (place.dest, place.src, place.source_src))
        if (
            not self.channels
            or dest is None
            or src is None
            or (place.source_src is not None and read is None)
        ):
            return None
        at = dest if place.side == "query" else src
        if not src <= dest < length or (read is not None and read > at):
            return None
        firing = Firing(place.target.layer or 0, place.target.head or 0, dest, src)
        component = Component(place.source.kind, place.source.layer, place.source.head, read)
        return Signal(firing, place.side, component, self.channels)


def usual_place(item: EdgeItem, circuits: Iterable[tuple[Circuit, Mapping[str, int]]]) -> UsualPlace | None:
    """The most frequent place of an edge among circuits whose prompts have roles, and the channels that at least half
    of the edges there use."""
    places: dict[RolePlace, list[tuple[int, ...]]] = {}
    for circuit, roles in circuits:
        for edge in item.edges(circuit):
            place = RolePlace.of(circuit, edge, roles)
            if place is not None:
                places.setdefault(place, []).append(edge.channels or ())
    if not places:
        return None
    place, seen = max(places.items(), key=lambda each: len(each[1]))
    if item.channel is not None:
        return UsualPlace(place, (item.channel,))
    counts = Counter(channel for channels in seen for channel in channels)
    return UsualPlace(place, tuple(sorted(c for c, count in counts.items() if 2 * count >= len(seen))))
