"""The talk's test of families: a family's exclusive edges, ablated, must hurt its own prompts more than another's.

    found = families.ablate_exclusive(model, prompts=20)
    print(found.summary())

An edge of a family has no positions. It is ablated (its signals taken away, as in ``headtrace.causal``) wherever the
prompt's own circuit has it; where the circuit does not have it, at the place that most circuits of the family have it
at, in the words of roles; where that is not known, either, it is missing, and counted. Beside it, as many random edges
of the prompt's own circuit are ablated. Edges into the root are no signals that a head reads, and are not ablated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from headtrace.causal.changes import Reach
from headtrace.causal.effects import check_options, together
from headtrace.causal.execute import run
from headtrace.causal.metric import require_metric
from headtrace.causal.opening import open_circuit
from headtrace.causal.signals import ABLATE, Scope, Signal
from headtrace.circuits import Circuit
from headtrace.errors import InputError
from headtrace.families.items import ROOT_NAME
from headtrace.families.places import Usual, Wanted, usual_place
from headtrace.notebook import frame, paragraph
from headtrace.progress import Progress
from headtrace.statistics import RESAMPLES, interval
from headtrace.vocabulary import ATTENTION_SIDES

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
class ExclusiveAblation:
    """Every family's exclusive edges ablated on prompts of every family."""

    table: pl.DataFrame
    """One row per set of edges and prompt: edges_of, prompt, family, own; edges, of which found in the prompt's
    circuit, placed by roles, missing; signals taken away; the metric clean, its change, and that by random edges."""
    metric: str
    edges: dict[int, tuple[str, ...]]
    """The exclusive edges that were ablated, by family."""
    not_signals: dict[int, int]
    """How many exclusive edges lead into the root, which no head reads."""

    def __repr__(self) -> str:
        sets = ", ".join(f"{f}: {len(edges)} edges" for f, edges in self.edges.items())
        return f"ExclusiveAblation({sets}; {self.table['prompt'].n_unique()} prompts, metric {self.metric!r})"

    def _repr_html_(self) -> str:
        return paragraph(repr(self)) + frame(self.summary()) + frame(self.contrasts())

    def summary(self) -> pl.DataFrame:
        """For each set of edges and family of prompts: mean change with its 95 % interval over prompts, random edges,
        the difference, how many prompts the edges could be applied to."""
        rows: list[dict[str, Any]] = []
        for (edges_of, family), part in self.table.group_by("edges_of", "family", maintain_order=True):
            applied = part.filter(pl.col("signals") > 0)
            row: dict[str, Any] = {"edges_of": edges_of, "family": family, "own": edges_of == family}
            row |= {
                "prompts": part.height,
                "applied": applied.height,
                "missing": _average(part["missing"]),
            }
            difference = applied["change"] - applied["random"]
            for name, values in (
                ("change", applied["change"]), ("random", applied["random"]), ("difference", difference)
            ):  # fmt: skip
                row |= _mean(name, values.drop_nulls().to_numpy())
            rows.append(row)
        return pl.DataFrame(rows, infer_schema_length=None).sort("edges_of", "family")

    def contrasts(self) -> pl.DataFrame:
        """For each set of edges: mean change on own prompts minus that on all others', with a 95 % interval.

        Negative: the edges hurt their own family more. Prompts that the edges could not be applied to count as
        unchanged in ``difference``, and are left out of ``difference_applied``.
        """
        rows: list[dict[str, Any]] = []
        for (edges_of,), part in self.table.group_by("edges_of", maintain_order=True):
            row: dict[str, Any] = {"edges_of": edges_of, "edges": len(self.edges[int(edges_of)])}  # type: ignore[arg-type]
            applied = part.filter(pl.col("signals") > 0)
            for name, some in (
                ("difference", part.with_columns(pl.col("change").fill_null(0.0))),
                ("difference_applied", applied),
            ):
                own, other = (some.filter(own=flag)["change"].to_numpy() for flag in (True, False))
                row |= _contrast(name, own, other)
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
        raise InputError("There is one family, so nothing is exclusive to it: ask for at least two (n=2).")
    if prompts < 1:
        raise InputError(f"prompts={prompts}: expected at least one prompt of each family.")
    wanted, not_signals = _exclusive(families, within, outside)
    cases = _drawn(families, prompts, seed)
    sets = {
        f: [
            (each, usual_place(each, [(c.circuit, c.roles) for c in cases if c.family == f]))
            for each in edges
        ]
        for f, edges in wanted.items()
        if edges
    }
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    metric = None
    for done, case in enumerate(cases):
        recording = open_circuit(case.circuit, model)
        read = require_metric(case.circuit.root, recording, "the effect on it")
        metric = metric or read.name
        rows += _measure(case, recording, sets, read, rng, draws=draws, reach=reach, scope=scope)
        if progress is not None:
            progress(done + 1, len(cases))
    names = {f: tuple(_item(each) for each in edges) for f, edges in wanted.items()}
    return ExclusiveAblation(pl.DataFrame(rows, schema=_TYPES), metric or "metric", names, not_signals)


@dataclass(frozen=True)
class _Case:
    """A prompt that edges are ablated on."""

    id: str
    family: int
    circuit: Circuit
    roles: dict[str, int]


@dataclass(frozen=True)
class _Applied:
    """The signals of a family's edges in one prompt, and how they were found."""

    signals: list[Signal]
    found: int
    placed: int
    missing: int


def _exclusive(
    families: Families, within: float, outside: float
) -> tuple[dict[int, list[Wanted]], dict[int, int]]:
    """Edges of each family that are signals, and how many are not."""
    wanted: dict[int, list[Wanted]] = {}
    into_root: dict[int, int] = {}
    for f in families.sizes:
        rows = (
            families.exclusive(f, within=within, outside=outside).select("source", "target", "channel").rows()
        )
        wanted[f] = [Wanted(*row) for row in rows if row[1] != ROOT_NAME]
        into_root[f] = len(rows) - len(wanted[f])
    if not any(wanted.values()):
        raise InputError(
            f"No family has an edge between heads and MLPs that at least {within:.0%} of its circuits have and at most "
            f"{outside:.0%} of the others'. Ask for more families, or for a lower within or a higher outside."
        )
    return wanted, into_root


def _drawn(families: Families, prompts: int, seed: int) -> list[_Case]:
    rng = np.random.default_rng(seed)
    cases: list[_Case] = []
    for f in families.sizes:
        ids = families.members(f)
        for place in np.sort(rng.permutation(len(ids))[:prompts]):
            id = ids[place]
            cases.append(_Case(id, f, families.population.circuit(id), families.population.roles_of(id)))
    return cases


def _measure(
    case: _Case,
    recording: Recording,
    sets: dict[int, list[tuple[Wanted, Usual | None]]],
    metric: Any,
    rng: np.random.Generator,
    *,
    draws: int,
    reach: Reach,
    scope: Scope,
) -> list[dict[str, Any]]:
    """All sets of edges on one prompt, with their random controls, in one go."""
    clean = metric.of(recording)
    applied = {f: _apply(case, edges, reach) for f, edges in sets.items()}
    every = [
        Signal.of(case.circuit, edge)
        for edge in case.circuit.edges
        if edge.side in ATTENTION_SIDES
        and (reach == "local" or case.circuit.node(edge.source).kind != "offset")
    ]
    random = {f: _random(every, each.signals, draws, rng) for f, each in applied.items()}
    changed = [signals for f in sets for signals in (applied[f].signals, *random[f]) if signals]
    values = _values(recording, changed, metric, reach, scope)
    rows: list[dict[str, Any]] = []
    for f, each in applied.items():
        own = next(values) - clean if each.signals else None
        controls = [next(values) - clean for signals in random[f] if signals]
        rows.append(
            {
                "edges_of": f,
                "prompt": case.id,
                "family": case.family,
                "own": f == case.family,
                "edges": len(sets[f]),
                "found": each.found,
                "placed": each.placed,
                "missing": each.missing,
                "signals": len(each.signals),
                "clean": clean,
                "change": own,
                "random": float(np.mean(controls)) if controls else None,
                "random_signals": float(np.mean([len(s) for s in random[f]])) if random[f] else None,
            }
        )
    return rows


def _values(
    recording: Recording, changed: Sequence[list[Signal]], metric: Any, reach: Reach, scope: Scope
) -> Any:
    """The metric with each set of signals taken away, one after the other."""
    if not changed:
        return iter(())
    interventions = [together(signals, ABLATE, reach, scope) for signals in changed]
    outcome = run(recording, interventions, metric)
    assert outcome.metric is not None
    return iter(outcome.metric.tolist())


def _apply(case: _Case, edges: Sequence[tuple[Wanted, Usual | None]], reach: Reach) -> _Applied:
    signals: dict[Signal, None] = {}
    found = placed = 0
    for wanted, usual in edges:
        own = wanted.edges(case.circuit)
        if own:
            signals |= {wanted.signal(case.circuit, edge): None for edge in own}
            found += 1
            continue
        if usual is not None:
            signal = usual.place.signal(case.roles, usual.channels, len(case.circuit.prompt.token_ids))
            if signal is not None and signal.channels:
                signals[signal] = None
                placed += 1
    return _Applied(list(signals), found, placed, len(edges) - found - placed)


def _random(
    every: list[Signal], taken: list[Signal], draws: int, rng: np.random.Generator
) -> list[list[Signal]]:
    """As many edges of the prompt's own circuit that are not in the set; all others, where there are not as many."""
    used = {(s.firing, s.side, s.component) for s in taken}
    free = [signal for signal in every if (signal.firing, signal.side, signal.component) not in used]
    if not taken or not free:
        return []
    return [[free[place] for place in rng.permutation(len(free))[: len(taken)]] for _ in range(draws)]


def _average(values: pl.Series) -> float:
    return float(np.mean(values.to_numpy())) if len(values) else 0.0


def _mean(name: str, values: np.ndarray) -> dict[str, float | None]:
    if not len(values):
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    low, high = interval(values, np.arange(len(values)))
    return {name: float(values.mean()), f"{name}_low": low, f"{name}_high": high}


def _contrast(name: str, own: np.ndarray, other: np.ndarray) -> dict[str, float | None]:
    """Difference of two means, prompts of both sides drawn again; one prompt on a side gives no interval."""
    nothing: dict[str, float | None] = {name: None, f"{name}_low": None, f"{name}_high": None}
    if not len(own) or not len(other):
        return nothing
    if min(len(own), len(other)) < 2:
        return nothing | {name: float(own.mean() - other.mean())}
    rng = np.random.default_rng(0)
    means = [
        values[rng.integers(0, len(values), (RESAMPLES, len(values)))].mean(1) for values in (own, other)
    ]
    low, high = np.quantile(means[0] - means[1], (0.025, 0.975))
    return {name: float(own.mean() - other.mean()), f"{name}_low": float(low), f"{name}_high": float(high)}


def _item(wanted: Wanted) -> str:
    from headtrace.families.items import edge_item

    return edge_item(wanted.source, wanted.target, wanted.channel)
