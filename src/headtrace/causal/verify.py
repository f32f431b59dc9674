"""Put every claim of a circuit to the test.

    report = headtrace.verify(circuit, model)
    print(report.summary())
    report.save("verification/")

The numbers of the file, its graph and its content are compared with the model. For every firing and side, exactly the
claimed signals are removed in the running model, and the attention it then shows is compared with what the trace
predicted. For every edge, ablation and boost are measured against random channels. The prompt is traced again, and
everything compared. The verdict (`headtrace.causal.Verdict`) says whether the numbers reproduce; whether the circuit is
enough for the answer stands beside it. A difference circuit is computed again from both runs, and its components take
what they had in the other one (`headtrace.causal.difference_checks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headtrace.causal.changes import Reach
from headtrace.causal.checks import (
    Checking,
    check_alone,
    check_flags,
    check_influence,
    check_method,
    check_nodes,
    check_places,
    check_prompt,
    check_root_edges,
    check_weights,
    claimed_sides,
    method_of,
)
from headtrace.causal.claims import SideClaim
from headtrace.causal.content_checks import check_content
from headtrace.causal.difference_checks import check_difference
from headtrace.causal.effects import (
    EdgeEffect,
    check_options,
    choose_edges,
    effect_record,
    measure_edges,
    per_edge,
    within_reach,
)
from headtrace.causal.execute import run
from headtrace.causal.metric import metric_of
from headtrace.causal.opening import Tolerance, open_circuit
from headtrace.causal.patching import measure
from headtrace.causal.report import Difference, Enough, Ledger, PredictionCheck, Report
from headtrace.causal.retrace import check_traced_again, not_traced
from headtrace.causal.signals import Scope, edge_name
from headtrace.causal.sufficiency import open_case
from headtrace.circuits import Circuit, Edge
from headtrace.errors import InputError
from headtrace.progress import Progress, part_of
from headtrace.vocabulary import ATTENTION_SIDES, Prompt

if TYPE_CHECKING:
    from headtrace.models import Model

SIDES_AT_ONCE = 64
"""Sides of firings whose signals exist at a time."""
EVERYWHERE = ("cosine", "norm_ratio")
"""Effects that do not depend on how far an intervention reached."""
DRAWN = ("control_attention", "control_metric")
"""Effects of channels that were drawn at random: another draw gives others."""


def verify(
    circuit: Circuit,
    model: Model,
    *,
    edges: str | Sequence[Edge] = "all",
    controls: int = 8,
    reach: Reach = "local",
    scope: Scope = "claim",
    seed: int = 0,
    counterfactual: Prompt | None = None,
    progress: Progress | None = None,
) -> Report:
    """Test what a circuit claims in the running model. ``edges``: ``"all"``, ``"none"``, ``"top:20"``,
    ``"random:20"`` or a list.

    With a ``counterfactual``, a prompt of as many tokens, the report also says which share of the difference between
    the two the circuit keeps by itself. A difference circuit has one of its own.
    """
    check_options(controls, reach, scope, seed)
    wanted = choose_edges(circuit, edges, seed)
    chosen = within_reach(circuit, wanted, reach) if isinstance(edges, str) else wanted
    if circuit.difference is not None:
        chosen = []  # what its nodes do is measured by patching them
    method_of(circuit.method)  # options that cannot be are an error before anything runs
    recording = open_circuit(circuit, model)
    check = Checking(circuit, recording, Tolerance.of(model), Ledger())
    coarser = coarser_precision(circuit, model)
    enough = measure_enough(circuit, model, counterfactual)
    sides = len(list(claimed_sides(circuit)))
    of_all = sides + per_edge(controls) * len(chosen)

    # The numbers of the file, its graph, its content.
    check_prompt(check)
    circuit.root.check(check, check.root)
    check_nodes(check)
    check_influence(check)
    patches = None
    if circuit.difference is not None:  # flows between two runs have no thresholds
        patches = check_difference(check, edges, controls, seed, progress)
    else:
        check_method(check)
        check_flags(check)
        check_places(check)
        check_root_edges(check)
        check_content(check)
        check_alone(check)

    # What each signal accounts for, and what is left without all of them.
    predictions = check_predictions(check, part_of(progress, 0, of_all))

    # The effect of every edge, measured now and compared with what the file has.
    metric = metric_of(circuit.root, recording)
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

    # Everything else: what is missing from the file, which nodes were expanded, what was mixed into weights.
    differences: list[Difference] = []
    if coarser is not None:
        not_traced(check, "it was made in another precision")
    else:
        differences = check_traced_again(check)
        coarser = float32_numbers(check)
    if coarser is not None and not all(
        failure.within(coarser.relative / check.tolerance.relative) for failure in check.ledger.failures
    ):
        coarser = None

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
        left_out=len(wanted) - len(chosen),
        differences=tuple(differences),
        coarser=coarser,
        enough=enough,
        patches=patches,
    )


def coarser_precision(circuit: Circuit, model: Model) -> Tolerance | None:
    """Where a file says that it was made in another precision than the model's: the tolerance of the coarser one.

    Only half precision is named in files. What a file says makes no number of it right: it only gets another verdict.
    """
    stated = (circuit.method.settings or {}).get("dtype")
    if stated == (model.own_dtype if model.half else None):
        return None
    here = Tolerance.of(model)
    there = here if stated is None else Tolerance.of(model, str(stated))
    return max(here, there, key=lambda each: each.relative)


def float32_numbers(check: Checking) -> Tolerance | None:
    """Where the model runs in float64 and the file does not agree to that: the tolerance of float32."""
    if not check.ledger.failures or check.tolerance.precision != "float64":
        return None
    return Tolerance.of(check.recording.model, "float32")


def measure_enough(circuit: Circuit, model: Model, counterfactual: Prompt | None = None) -> Enough:
    """The share of the difference from a counterfactual prompt that the circuit's heads keep by themselves."""
    given, text = counterfactual, counterfactual if isinstance(counterfactual, str) else None
    if given is None and circuit.difference is not None and circuit.difference.prompts:
        first = circuit.difference.prompts[0]
        given, text = list(first.token_ids), first.text
    if given is None:
        return Enough()
    if not circuit.heads():
        return Enough(reason="the circuit has no heads")
    try:
        case, other = open_case(circuit, model, given)
    except InputError as error:
        if counterfactual is not None:
            raise
        return Enough(reason=str(error))
    kept = measure([case.keeping(case.places_of(node.site.firing for node in circuit.heads()))])[0]
    if text is None:
        text = " ".join(map(str, given))  # type: ignore[arg-type]
    return Enough((kept - other) / (case.clean - other), text, None)


def check_predictions(check: Checking, progress: Progress | None = None) -> list[PredictionCheck]:
    """The weights of every side of every firing, and the attention predicted without its signals, measured."""
    sides, found = list(claimed_sides(check.circuit)), list[PredictionCheck]()
    for start in range(0, len(sides), SIDES_AT_ONCE):
        group = sides[start : start + SIDES_AT_ONCE]
        with check.recording.model.assume_weights_unchanged():  # sums read them thousands of times
            claims = [SideClaim.of(check.recording, check.circuit, node, side) for node, side in group]
            for claim in claims:
                check_weights(check, claim)
        stated = [(c, p) for c in claims if (p := (c.node.predicted or {}).get(c.side)) is not None]
        measured = run(check.recording, [claim.intervention for claim, _ in stated]).attention.tolist()
        for (claim, predicted), value in zip(stated, measured, strict=True):
            node, allowed = claim.node, check.tolerance.attention(claim.size)
            clean = node.attention or 0.0
            found.append(PredictionCheck(node.id, node.name, claim.side, clean, predicted, value, allowed))
        if progress is not None:
            progress(start + len(group), len(sides))
    for one in found:
        name, values = f"predicted.{one.side}", {"in_file": one.predicted, "measured": one.measured}
        check.ledger.compare(name, one.firing, **values, allowed=one.allowed)
    return found


def check_effects(check: Checking, effects: Sequence[EdgeEffect], reach: str, scope: str) -> None:
    """Effects that an earlier verification wrote into the file, where the same edge is measured now.

    Changes can be compared if reach and scope are the same; cosine and norm ratio do not depend on them.
    """
    measured = {(e.edge.source, e.edge.target, e.edge.side): e for e in effects}
    known = [edge for edge in check.circuit.edges if edge.effect and edge.side in ATTENTION_SIDES]
    for edge in known:
        now, written = measured.get((edge.source, edge.target, edge.side)), edge.effect or {}
        if now is None:
            check.ledger.skip("effects that the file has of edges which were not measured now (--edges all)")
            continue
        allowed = _allowed(check, now)
        if (written.get("reach"), written.get("scope")) != (reach, scope):
            check.ledger.skip(
                "effects that the file has of another reach or scope, or of one it does not name"
            )
            allowed = {name: allowed[name] for name in EVERYWHERE}
        record = effect_record(now, reach, scope)
        for name in (name for name in record if name in allowed):
            old, value = written.get(name), record[name]
            if isinstance(value, float) and isinstance(old, (int, float)):
                where, limit = edge_name(check.circuit, edge), allowed[name]
                check.ledger.compare(f"effect.{name}", where, in_file=old, measured=value, allowed=limit)
    if any((edge.effect or {}).get(name) is not None for edge in known for name in DRAWN):
        check.ledger.skip("effects that the file has of channels drawn at random")


def _allowed(check: Checking, effect: EdgeEffect) -> dict[str, float]:
    """A change is a difference of two numbers; with a boost, logits may be twice as large."""
    row = check.row(check.circuit.node(effect.edge.target).site.firing)
    attention = 4 * check.tolerance.attention(row.size)
    metric = 4 * check.tolerance.number(row.size if check.root is None else check.root.size)
    return {
        "attention": attention,
        "boost_attention": attention,
        "metric": metric,
        "boost_metric": metric,
        "cosine": 4 * check.tolerance.relative,
        "norm_ratio": 4 * check.tolerance.number(effect.norm_ratio),
    }
