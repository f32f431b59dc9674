"""Put every claim of a circuit to the test.

    report = headtrace.verify(circuit, model)
    print(report.summary())
    report.save("verification/")

For every firing and side, exactly the claimed signals are removed in the running model and the attention it then shows
is compared with what the trace predicted. For every edge, ablation and boost are measured against random channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from headtrace.causal.edges import (
    ABLATE,
    BOOST,
    Reach,
    Scope,
    Signal,
    claim,
    edit,
    open_circuit,
    residual_change,
)
from headtrace.causal.intervention import TOKENS_AT_ONCE, Intervention, Outcome, run
from headtrace.causal.metric import Metric
from headtrace.causal.report import EdgeEffect, PredictionCheck, Report
from headtrace.causal.signals import random_channels
from headtrace.circuits import Circuit, Edge, Node
from headtrace.errors import InputError

if TYPE_CHECKING:
    from headtrace.models import Model, Recording

Progress = Callable[[int, int], None]
"""Called with the number of interventions done and the number in all."""


def verify(
    circuit: Circuit,
    model: Model,
    *,
    edges: str | Sequence[Edge] = "all",
    controls: int = 8,
    reach: Reach = "local",
    scope: Scope = "claim",
    seed: int = 0,
    on_progress: Progress | None = None,
) -> Report:
    """Measure what a circuit claims. ``edges``: ``"all"``, ``"none"``, ``"top:20"``, ``"random:20"`` or a list."""
    check_options(controls, reach, scope)
    recording = open_circuit(circuit, model)
    predictions = check_predictions(recording, circuit)
    asked = choose_edges(circuit, edges, seed)
    chosen = asked
    if reach == "global" and isinstance(edges, str):
        chosen = [e for e in asked if circuit.node(e.source).kind != "offset"]
    effects = measure_edges(recording, circuit, chosen, controls, reach, scope, seed, on_progress)
    metric = Metric.of(circuit.root, recording.last_logits())
    return Report(
        circuit=circuit,
        predictions=tuple(predictions),
        effects=tuple(effects),
        metric=None if metric is None else metric.name,
        clean_metric=None if metric is None else float(metric(recording.last_logits())),
        reach=reach,
        scope=scope,
        controls=controls,
        seed=seed,
        left_out=len(asked) - len(chosen),
    )


def check_options(controls: int, reach: str, scope: str) -> None:
    """What can be wrong with the options of a verification, said before anything runs."""
    if controls < 0:
        raise InputError(f"controls={controls}: expected 0 or more random draws per edge.")
    if reach not in ("local", "global"):
        raise InputError(f"reach={reach!r}: expected 'local' (one head) or 'global' (every reader).")
    if scope not in ("claim", "token"):
        raise InputError(f"scope={scope!r}: expected 'claim' (every visible key) or 'token' (one position).")


def choose_edges(circuit: Circuit, which: str | Sequence[Edge], seed: int = 0) -> list[Edge]:
    """Edges between components (not those to the root): all, the heaviest, or some drawn at random."""
    inner = [e for e in circuit.edges if e.side != "root"]
    if not isinstance(which, str):
        return list(which)
    if which == "all":
        return inner
    if which == "none":
        return []
    how, _, number = which.partition(":")
    if how == "top" and number.isdigit():
        return list(circuit.top(int(number)))
    if how == "random" and number.isdigit():
        order = torch.randperm(len(inner), generator=torch.Generator().manual_seed(seed)).tolist()
        return [inner[i] for i in sorted(order[: int(number)])]
    raise InputError(f"edges={which!r}: expected 'all', 'none', 'top:N' or 'random:N', such as 'top:20'.")


def check_predictions(recording: Recording, circuit: Circuit) -> list[PredictionCheck]:
    """Remove each firing side's claimed signals, run that layer, and compare with the prediction."""
    sides: tuple[Literal["query", "key"], ...] = ("query", "key")
    asked: list[tuple[Node, Literal["query", "key"]]] = [
        (node, side)
        for node in circuit.nodes
        if node.expanded and node.predicted is not None
        for side in sides
        if node.predicted.get(side) is not None
    ]
    outcome = run(
        recording, [claim(recording, circuit, node, side) for node, side in asked], attention_only=True
    )
    checks: list[PredictionCheck] = []
    for (node, side), measured in zip(asked, outcome.attention.tolist(), strict=True):
        assert node.predicted is not None
        predicted = node.predicted[side]
        assert predicted is not None
        checks.append(PredictionCheck(node.id, node.name, side, node.attention or 0.0, predicted, measured))
    return checks


def measure_edges(
    recording: Recording,
    circuit: Circuit,
    edges: list[Edge],
    controls: int,
    reach: Reach,
    scope: Scope,
    seed: int,
    on_progress: Progress | None = None,
) -> list[EdgeEffect]:
    """Ablation and boost of every edge and of its random-channel controls: attention and metric.

    Edges whose signals enter at similar layers run together; the interventions of a few edges exist at a time, so that
    memory does not grow with the circuit.
    """
    metric = Metric.of(circuit.root, recording.last_logits())
    clean = None if metric is None else float(metric(recording.last_logits()))
    generator = torch.Generator().manual_seed(seed)
    variants: list[tuple[Signal, ...]] = []
    for signal in (Signal.of(circuit, e) for e in edges):
        draws = random_channels(signal.channels, recording.model.d_head, controls, generator)
        variants.append((signal, *(signal.with_channels(d) for d in draws)))
    per_edge = 2 * (controls + 1)
    done = [0]

    def tick(n: int) -> None:
        done[0] += n
        if on_progress is not None:
            on_progress(done[0], per_edge * len(edges))

    order = sorted(range(len(edges)), key=lambda i: _entry(variants[i][0], reach))
    together = max(1, TOKENS_AT_ONCE // (recording.lengths[0] * per_edge))
    effects: dict[int, EdgeEffect] = {}
    for start in range(0, len(order), together):
        group = order[start : start + together]
        interventions = [
            Intervention((edit(recording, variant, factor, reach, scope),), variant.firing)
            for i in group
            for variant in variants[i]
            for factor in (ABLATE, BOOST)
        ]
        outcome = run(recording, interventions, on_done=tick)
        values = _metric_values(metric, outcome)
        for place, i in enumerate(group):
            rows = slice(place * per_edge, (place + 1) * per_edge)
            attention = outcome.attention[rows].tolist()
            numbers = None if values is None else values[rows]
            effects[i] = _effect(recording, circuit, edges[i], variants[i][0], attention, numbers, clean)
    return [effects[i] for i in range(len(edges))]


def _entry(signal: Signal, reach: Reach) -> int:
    """The layer where an intervention on the signal begins."""
    return signal.firing.layer if reach == "local" else signal.component.layer or 0


def _metric_values(metric: Metric | None, outcome: Outcome) -> list[float] | None:
    return None if metric is None or outcome.logits is None else metric(outcome.logits).tolist()


def _effect(
    recording: Recording,
    circuit: Circuit,
    edge: Edge,
    signal: Signal,
    attention: list[float],
    values: list[float] | None,
    clean: float | None,
) -> EdgeEffect:
    f = signal.firing
    before = float(recording.patterns[f.layer, 0, f.head, f.dest, f.src])

    def change(numbers: list[float] | None, start: float | None) -> list[Any]:
        return [None] * len(attention) if numbers is None or start is None else [n - start for n in numbers]

    d_attention, d_metric = change(attention, before), change(values, clean)
    cosine, ratio = residual_change(recording, signal)
    cosine_boost, ratio_boost = residual_change(recording, signal, BOOST)
    return EdgeEffect(
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
