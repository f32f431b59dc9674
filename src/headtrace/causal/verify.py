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
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from headtrace.causal.checks import Checking, check_method, check_prompt, check_root
from headtrace.causal.edges import ABLATE, BOOST, Reach, edit, open_circuit, residual_change
from headtrace.causal.edits import Intervention, run
from headtrace.causal.effect_checks import check_effects
from headtrace.causal.graph_checks import (
    check_flags,
    check_influence,
    check_nodes,
    check_places,
    check_root_edges,
    check_weights,
    claims_of,
)
from headtrace.causal.ledger import Ledger
from headtrace.causal.metric import Metric, metric_of
from headtrace.causal.report import EdgeEffect, PredictionCheck, Report
from headtrace.causal.signals import Scope, Signal, random_channels
from headtrace.causal.tolerance import Tolerance
from headtrace.circuits import Circuit, Edge, Node
from headtrace.errors import InputError
from headtrace.progress import Progress
from headtrace.prompts import batches
from headtrace.vocabulary import ATTENTION_SIDES, AttentionSide

if TYPE_CHECKING:
    from headtrace.models import Model, Recording


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
    check_options(controls, reach, scope)
    asked = choose_edges(circuit, edges, seed)
    chosen = asked
    if reach == "global" and isinstance(edges, str):
        chosen = [e for e in asked if circuit.node(e.source).kind != "offset"]
    recording = open_circuit(circuit, model)
    check = Checking(circuit, recording, Tolerance.of(circuit, model), Ledger())
    predictions = check_circuit(check)
    metric = metric_of(circuit.root, recording)
    how = Measuring(recording, circuit, metric, controls, reach, scope, seed)
    effects = how.measure(chosen, progress)
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
        clean_metric=how.clean,
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
    """Edges that decide attention (query and key side): all, the heaviest, or some drawn at random."""
    inner = [e for e in circuit.edges if e.side in ATTENTION_SIDES]
    if not isinstance(which, str):
        return list(which)
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
    raise InputError(f"edges={which!r}: expected 'all', 'none', 'top:N' or 'random:N', such as 'top:20'.")


def check_circuit(check: Checking) -> list[PredictionCheck]:
    """Everything in the file that the model can reproduce; predictions are measured in the running model."""
    for part in (check_method, check_prompt, check_root, check_nodes, check_flags, check_influence):
        part(check)
    check_places(check)
    check_root_edges(check)
    asked: list[tuple[Node, AttentionSide, float, float]] = []
    removals: list[Intervention] = []
    for claim in claims_of(check):
        check_weights(check, claim)
        predicted = (claim.node.predicted or {}).get(claim.side)
        if predicted is not None:
            removals.append(claim.intervention)
            asked.append((claim.node, claim.side, predicted, check.tolerance.attention(claim.size)))
    measured = run(check.recording, removals).attention.tolist()
    found = [
        PredictionCheck(node.id, node.name, side, node.attention or 0.0, predicted, value, allowed)
        for (node, side, predicted, allowed), value in zip(asked, measured, strict=True)
    ]
    for one in found:
        name, values = f"predicted.{one.side}", {"in_file": one.predicted, "measured": one.measured}
        check.ledger.compare(name, one.firing, **values, allowed=one.allowed)
    return found


@dataclass(frozen=True)
class Measuring:
    """How the edges of one circuit are measured."""

    recording: Recording
    circuit: Circuit
    metric: Metric | None
    controls: int
    reach: Reach
    scope: Scope
    seed: int

    @cached_property
    def clean(self) -> float | None:
        """The metric without any intervention."""
        return None if self.metric is None else self.metric.of(self.recording)

    def measure(self, edges: Sequence[Edge], progress: Progress | None = None) -> list[EdgeEffect]:
        """Ablation and boost of every edge and of its random-channel controls: attention and metric.

        Edges whose signals enter at similar layers run together; the interventions of a few edges exist at a time, so
        that memory does not grow with the circuit.
        """
        generator = torch.Generator().manual_seed(self.seed)
        variants = [self._variants(edge, generator) for edge in edges]
        per_edge = 2 * (self.controls + 1)
        order = sorted(range(len(edges)), key=lambda i: self._entry(variants[i][0]))
        effects: dict[int, EdgeEffect] = {}
        for places in batches([self.recording.lengths[0] * per_edge] * len(order)):
            group = [order[place] for place in places]
            interventions = [
                Intervention((edit(self.recording, variant, factor, self.reach, self.scope),), variant.firing)
                for i in group
                for variant in variants[i]
                for factor in (ABLATE, BOOST)
            ]
            outcome = run(self.recording, interventions, self.metric)
            attention = outcome.attention.reshape(len(group), per_edge).tolist()
            values = [None] * len(group)
            if outcome.metric is not None:
                values = outcome.metric.reshape(len(group), per_edge).tolist()
            for place, i in enumerate(group):
                effects[i] = self._effect(edges[i], variants[i][0], attention[place], values[place])
            if progress is not None:
                progress(per_edge * len(effects), per_edge * len(edges))
        return [effects[i] for i in range(len(edges))]

    def _variants(self, edge: Edge, generator: torch.Generator) -> tuple[Signal, ...]:
        """The claimed signal, and the same in channels drawn at random."""
        signal = Signal.of(self.circuit, edge)
        draws = random_channels(signal.channels, self.recording.model.d_head, self.controls, generator)
        return (signal, *(signal.with_channels(draw) for draw in draws))

    def _entry(self, signal: Signal) -> int:
        """The layer where an intervention on the signal begins."""
        return signal.firing.layer if self.reach == "local" else signal.component.layer or 0

    def _effect(
        self, edge: Edge, signal: Signal, attention: list[float], values: list[float] | None
    ) -> EdgeEffect:
        f = signal.firing
        before = float(self.recording.patterns[f.layer, 0, f.head, f.dest, f.src])

        def change(numbers: list[float] | None, start: float | None) -> list[Any]:
            if numbers is None or start is None:
                return [None] * len(attention)
            return [n - start for n in numbers]

        d_attention, d_metric = change(attention, before), change(values, self.clean)
        cosine, ratio = residual_change(self.recording, signal)
        cosine_boost, ratio_boost = residual_change(self.recording, signal, BOOST)
        return EdgeEffect(
            edge=edge,
            source=self.circuit.node(edge.source).name,
            target=self.circuit.node(edge.target).name,
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
