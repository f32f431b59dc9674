"""Put every claim of a circuit to the test.

    report = headtrace.verify(circuit, model)
    print(report.summary())
    report.save("verification/")

For every firing and side, exactly the claimed signals are removed in the running model and the attention it then shows
is compared with what the trace predicted. Every other number that the model can reproduce is compared as well, and the
verdict says whether all agree: PASS, FAIL, or NOTHING TO VERIFY where the circuit predicts nothing. For every edge,
ablation and boost are measured against random channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headtrace.causal.changes import Reach
from headtrace.causal.checks import Checking, check_method, check_prompt, check_root, method_of
from headtrace.causal.claims import SideClaim
from headtrace.causal.content_checks import check_content
from headtrace.causal.effect_checks import check_effects
from headtrace.causal.effects import check_options, choose_edges, measure_edges, per_edge, within_reach
from headtrace.causal.execute import run
from headtrace.causal.graph_checks import (
    check_flags,
    check_influence,
    check_nodes,
    check_places,
    check_root_edges,
    check_weights,
    claimed_sides,
)
from headtrace.causal.ledger import Ledger
from headtrace.causal.metric import metric_of
from headtrace.causal.opening import open_circuit
from headtrace.causal.report import PredictionCheck, Report
from headtrace.causal.signals import Scope
from headtrace.causal.tolerance import Tolerance
from headtrace.circuits import Circuit, Edge
from headtrace.progress import Progress, part_of

if TYPE_CHECKING:
    from headtrace.models import Model

SIDES_AT_ONCE = 64
"""Sides of firings whose signals exist at a time."""


def verify(
    circuit: Circuit,
    model: Model,
    *,
    edges: str | Sequence[Edge] = "all",
    controls: int = 8,
    reach: Reach = "local",
    scope: Scope = "claim",
    seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Measure what a circuit claims. ``edges``: ``"all"``, ``"none"``, ``"top:20"``, ``"random:20"`` or a list."""
    check_options(controls, reach, scope, seed)
    asked = choose_edges(circuit, edges, seed)
    chosen = within_reach(circuit, asked, reach) if isinstance(edges, str) else asked
    method_of(circuit.method)  # options that cannot be are an error before anything runs
    recording = open_circuit(circuit, model)
    check = Checking(circuit, recording, Tolerance.of(circuit, model), Ledger())
    metric = metric_of(circuit.root, recording)
    sides = len(list(claimed_sides(circuit)))
    of_all = sides + per_edge(controls) * len(chosen)
    predictions = check_circuit(check, part_of(progress, 0, of_all))
    effects = measure_edges(
        recording,
        circuit,
        chosen,
        metric,
        controls=controls,
        reach=reach,
        scope=scope,
        seed=seed,
        progress=part_of(progress, sides, of_all),
    )
    check_effects(check, effects, reach, scope)
    return Report(
        circuit=circuit,
        tolerance=check.tolerance,
        failures=tuple(check.ledger.failures),
        checked=dict(check.ledger.checked),
        not_checked=tuple(check.ledger.not_checked),
        predictions=tuple(predictions),
        effects=tuple(effects),
        metric=None if metric is None else metric.name,
        clean_metric=None if metric is None else metric.of(recording),
        reach=reach,
        scope=scope,
        controls=controls,
        seed=seed,
        left_out=len(asked) - len(chosen),
    )


def check_circuit(check: Checking, progress: Progress | None = None) -> list[PredictionCheck]:
    """Everything in the file that the model can reproduce; predictions are measured in the running model."""
    for part in (check_method, check_prompt, check_root, check_nodes, check_flags, check_influence):
        part(check)
    check_places(check)
    check_root_edges(check)
    check_content(check)
    sides, found = list(claimed_sides(check.circuit)), list[PredictionCheck]()
    for start in range(0, len(sides), SIDES_AT_ONCE):
        group = sides[start : start + SIDES_AT_ONCE]
        found += _check_sides(
            check, [SideClaim.of(check.recording, check.circuit, node, side) for node, side in group]
        )
        if progress is not None:
            progress(start + len(group), len(sides))
    for one in found:
        name, values = f"predicted.{one.side}", {"in_file": one.predicted, "measured": one.measured}
        check.ledger.compare(name, one.firing, **values, allowed=one.allowed)
    return found


def _check_sides(check: Checking, claims: list[SideClaim]) -> list[PredictionCheck]:
    """The weights of some sides, and their predictions in the running model, all at once."""
    for claim in claims:
        check_weights(check, claim)
    asked = [(c, p) for c in claims if (p := (c.node.predicted or {}).get(c.side)) is not None]
    measured = run(check.recording, [claim.intervention for claim, _ in asked]).attention.tolist()
    return [
        PredictionCheck(
            claim.node.id,
            claim.node.name,
            claim.side,
            claim.node.attention or 0.0,
            predicted,
            value,
            check.tolerance.attention(claim.size),
        )
        for (claim, predicted), value in zip(asked, measured, strict=True)
    ]
