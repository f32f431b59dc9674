"""The effect of edges: their signals ablated, boosted or multiplied by any factor in the running model.

    done = intervene(circuit, model, circuit.top(1), factor=0)
    print(done.summary())

``measure_edges`` ablates and boosts every edge, beside random channels of the same head; ``intervene`` changes one
edge, or several at once, and shows what the model does before and after.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from headtrace.causal.changes import Intervention, Reach, SignalChange, check_factor, check_reach
from headtrace.causal.execute import run
from headtrace.causal.metric import Metric, metric_of
from headtrace.causal.opening import open_circuit
from headtrace.causal.signals import ABLATE, BOOST, Scope, Signal, random_channels, residual_change
from headtrace.circuits import Circuit, Edge
from headtrace.errors import InputError
from headtrace.progress import Progress
from headtrace.tables import html_table, paragraph
from headtrace.vocabulary import ATTENTION_SIDES

if TYPE_CHECKING:
    import polars as pl

    from headtrace.models import Model, Recording

_MEASURES = ("ablate_attention", "boost_attention", "ablate_metric", "boost_metric")
_RESIDUAL = ("cosine", "norm_ratio", "boost_cosine", "boost_norm_ratio")
_CHOICES = "'all', 'none', 'top:N' or 'random:N', such as 'top:20'"


# -- which edges -----------------------------------------------------------------------------------------------


def check_options(controls: int, reach: str, scope: str, seed: int = 0) -> None:
    """Raise ``InputError`` for options of a verification that cannot be, before anything runs."""
    check_seed(seed)
    if controls < 0:
        raise InputError(f"controls={controls}: expected 0 or more random draws per edge.")
    check_reach(reach, scope)


def check_seed(seed: int) -> None:
    """Generators of random numbers take 64 bits."""
    if not 0 <= seed < 2**63:
        raise InputError(f"seed={seed}: expected a whole number from 0 to 2^63 - 1.")


def choose_edges(circuit: Circuit, which: str | Sequence[Edge], seed: int = 0) -> list[Edge]:
    """Edges that decide attention (query and key side): all, the heaviest, or some drawn at random."""
    inner = [e for e in circuit.edges if e.side in ATTENTION_SIDES]
    if not isinstance(which, str):
        given: Any = which
        listed: list[Any] = list(given) if isinstance(given, Iterable) else []
        if not isinstance(given, Iterable) or not all(isinstance(edge, Edge) for edge in listed):
            raise InputError(f"edges={which!r}: expected {_CHOICES}, or a list of edges of the circuit.")
        return listed
    if which == "all":
        return inner
    if which == "none":
        return []
    how, _, number = which.partition(":")
    if how == "top" and number.isdigit():
        return sorted(inner, key=lambda edge: -edge.weight)[: int(number)]
    if how == "random" and number.isdigit():
        order = torch.randperm(len(inner), generator=torch.Generator().manual_seed(seed)).tolist()
        return [inner[i] for i in sorted(order[: int(number)])]
    raise InputError(f"edges={which!r}: expected {_CHOICES}.")


def within_reach(circuit: Circuit, edges: Sequence[Edge], reach: Reach) -> list[Edge]:
    """Edges that an intervention can change: globally, all but offsets, which no component writes."""
    return [e for e in edges if reach == "local" or circuit.node(e.source).kind != "offset"]


# -- every edge ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EdgeEffect:
    """Changes (after minus before) when an edge's signal is ablated or boosted, and the same for random channels."""

    edge: Edge
    source: str
    target: str
    attention: float
    ablate_attention: float
    boost_attention: float
    ablate_metric: float | None
    boost_metric: float | None
    control_ablate_attention: tuple[float, ...]
    control_boost_attention: tuple[float, ...]
    control_ablate_metric: tuple[float | None, ...]
    control_boost_metric: tuple[float | None, ...]
    cosine: float
    norm_ratio: float
    boost_cosine: float
    boost_norm_ratio: float


def mean(values: tuple[float | None, ...]) -> float | None:
    """The mean of what was measured; None without measurements."""
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known else None


def measure_edges(
    recording: Recording,
    circuit: Circuit,
    edges: Sequence[Edge],
    metric: Metric | None,
    *,
    controls: int,
    reach: Reach,
    scope: Scope,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[EdgeEffect]:
    """Ablation and boost of every edge and of its random-channel controls: changes of attention and metric."""
    generator = torch.Generator().manual_seed(seed)
    d_head = recording.model.d_head
    interventions: list[Intervention] = []
    for edge in edges:
        signal = Signal.of(circuit, edge)
        draws = random_channels(signal.channels, d_head, controls, generator)
        for variant in (signal, *(signal.with_channels(draw) for draw in draws)):
            for factor in (ABLATE, BOOST):
                change = SignalChange(variant, factor, reach, scope)
                interventions.append(Intervention((change,), variant.firing))
    if not interventions:
        return []
    outcome = run(recording, interventions, metric, progress=progress)
    attention = outcome.attention.reshape(len(edges), -1).tolist()
    values = None if outcome.metric is None else outcome.metric.reshape(len(edges), -1).tolist()
    clean = None if metric is None else metric.of(recording)
    effects: list[EdgeEffect] = []
    for i, edge in enumerate(edges):
        signal = Signal.of(circuit, edge)
        f = signal.firing
        before = float(recording.attention.at(f.layer, 0, f.head, f.dest, f.src))
        d_attention: list[float] = [after - before for after in attention[i]]
        d_metric: list[Any] = [None] * len(d_attention)
        if values is not None and clean is not None:
            d_metric = [after - clean for after in values[i]]
        cosine, ratio = residual_change(recording, signal)
        cosine_boost, ratio_boost = residual_change(recording, signal, BOOST)
        effects.append(
            EdgeEffect(
                edge=edge,
                source=circuit.node(edge.source).name,
                target=circuit.node(edge.target).name,
                attention=before,
                ablate_attention=d_attention[0],
                boost_attention=d_attention[1],
                ablate_metric=d_metric[0],
                boost_metric=d_metric[1],
                control_ablate_attention=tuple(d_attention[2::2]),
                control_boost_attention=tuple(d_attention[3::2]),
                control_ablate_metric=tuple(d_metric[2::2]),
                control_boost_metric=tuple(d_metric[3::2]),
                cosine=cosine,
                norm_ratio=ratio,
                boost_cosine=cosine_boost,
                boost_norm_ratio=ratio_boost,
            )
        )
    return effects


def per_edge(controls: int) -> int:
    """Interventions for each edge: ablation and boost of its own signal and of every control."""
    return 2 * (controls + 1)


def effect_record(effect: EdgeEffect, reach: str, scope: str) -> dict[str, float | str | None]:
    """What a circuit file keeps of a measured edge, and how it was measured."""
    return {
        "reach": reach,
        "scope": scope,
        "attention": effect.ablate_attention,
        "metric": effect.ablate_metric,
        "boost_attention": effect.boost_attention,
        "boost_metric": effect.boost_metric,
        "control_attention": mean(effect.control_ablate_attention),
        "control_metric": mean(effect.control_ablate_metric),
        "cosine": effect.cosine,
        "norm_ratio": effect.norm_ratio,
    }


def edge_table(effects: Sequence[EdgeEffect]) -> pl.DataFrame:
    """One row per edge, also with none: ``control_*`` is the mean over draws, ``controls_*`` holds every draw."""
    import polars as pl

    schema: dict[str, Any] = {"source": pl.Int64, "target": pl.Int64}
    schema |= dict.fromkeys(("source_name", "target_name", "side"), pl.String)
    schema |= {"weight": pl.Float64, "channels": pl.List(pl.Int64), "attention": pl.Float64}
    schema |= dict.fromkeys(_MEASURES, pl.Float64)
    schema |= {f"control_{name}": pl.Float64 for name in _MEASURES}
    schema |= {f"controls_{name}": pl.List(pl.Float64) for name in _MEASURES}
    schema |= dict.fromkeys(_RESIDUAL, pl.Float64)
    rows: list[dict[str, Any]] = []
    for effect in effects:
        edge, values = effect.edge, dict(vars(effect))
        values |= {"source": edge.source, "source_name": effect.source, "side": edge.side}
        values |= {"target": edge.target, "target_name": effect.target, "weight": edge.weight}
        values["channels"] = list(edge.channels or ())
        for name in _MEASURES:
            draws = getattr(effect, f"control_{name}")
            values |= {f"control_{name}": mean(draws), f"controls_{name}": list(draws)}
        rows.append({name: values[name] for name in schema})
    return pl.DataFrame(rows, schema=schema)


# -- one edge, or several at once ------------------------------------------------------------------------------


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
        lines += [
            f"{name}: {before:.4f} before, {after:.4f} after ({after - before:+.4f})"
            for name, before, after in self._moved
        ]
        return "\n".join(lines)

    def frame(self) -> pl.DataFrame:
        """A row per edge: source, target, side, channels, cosine and norm ratio of the residual before and after."""
        import polars as pl

        return pl.DataFrame([{**vars(each), "channels": list(each.channels)} for each in self.edges])

    @property
    def _moved(self) -> list[tuple[str, float, float]]:
        """What was measured, before and after: attention, and the metric if there is one."""
        moved = [(f"attention of {self.firing}", self.attention_before, self.attention_after)]
        if self.metric is not None and self.metric_before is not None and self.metric_after is not None:
            moved.append((self.metric, self.metric_before, self.metric_after))
        return moved

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, as ``--json`` prints it."""
        return asdict(self)

    def __repr__(self) -> str:
        moved = ", ".join(f"{name} {before:.4f} -> {after:.4f}" for name, before, after in self._moved)
        edges = "1 edge" if len(self.edges) == 1 else f"{len(self.edges)} edges"
        return f"Intervened({edges} x {self.factor:g}: {moved})"

    def _repr_html_(self) -> str:
        edges = [(e.source, e.target, e.side, e.cosine, e.norm_ratio) for e in self.edges[:10]]
        how = f"times {self.factor:g}, {self.reach}, scope {self.scope}"
        titles = ("from", "into", "side", "residual cosine", "norm ratio")
        moved = html_table(("", "before", "after"), self._moved)
        return f"<div>{moved}{paragraph(how)}{html_table(titles, edges)}</div>"


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
    metric = metric_of(circuit.root, recording)
    outcome = run(recording, [together(signals, factor, reach, scope)], metric)
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
    """Raise ``InputError`` for an intervention that cannot be, before anything runs."""
    check_reach(reach, scope)
    check_factor(factor)


def together(signals: Sequence[Signal], factor: float, reach: Reach, scope: Scope) -> Intervention:
    """Several signals changed in one copy of the prompt; attention of the last one's firing is read.

    Where global changes of one component overlap (two firings read similar channels of it), each is made as if it were
    the only one, so that together they may take away more than the component wrote.
    """
    changes = tuple(SignalChange(signal, factor, reach, scope) for signal in signals)
    return Intervention(changes, signals[-1].firing if signals else None)
