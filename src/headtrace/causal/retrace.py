"""Trace a circuit's prompt again with the settings of its file, and compare everything with what the file has.

What the model contradicts number by number is found by the other checks, which search for nothing. What is *missing*
from a file, which nodes were expanded, how much influence was followed, how reasons were mixed into the weight of an
edge: that only tracing again can show. Where rounding decides a near tie, another machine may trace other edges, so a
difference in nodes and edges is not called false; but it is no PASS either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from headtrace import __version__
from headtrace.causal.report import Difference
from headtrace.causal.signals import edge_name
from headtrace.circuits import Circuit, Edge, ModelInfo, PromptInfo
from headtrace.errors import InputError
from headtrace.request import ResolvedRequest, TraceRequest
from headtrace.tracing.difference_circuit import (
    CARRIED,
    LEAST,
    FlowBudget,
    PromptPair,
    difference_circuit,
    trace_pairs,
)
from headtrace.tracing.tracer import Tracer

if TYPE_CHECKING:
    from headtrace.causal.checks import Checking
    from headtrace.models import Model

AT_ONCE = 16
"""Pairs of prompts that are recorded together."""
BESIDE = ("id", "label", "description", "evidence", "effect", "note")
"""What a trace does not decide: numbers of nodes, words, measured effects."""
SHARES = ("influence", "influence_kept", "attention", "other_attention", "threshold", "left", "rounding")
"""Numbers of size one; all others are at most as large as the largest of the circuit."""
OLD_SETTINGS = ("counterfactual",)
MARGIN = 8
"""A weight, or an influence, is a quotient of a few numbers that are each within the tolerance."""


def check_traced_again(check: Checking) -> list[Difference]:
    """Everything that tracing gives, compared with the file; nodes and edges that only one of the two has."""
    circuit, version = check.circuit, check.circuit.method.version
    try:
        if version != __version__:
            raise InputError(f"it was traced by headtrace {version}, and this is {__version__}")
        again = trace_again(check)
    except InputError as error:
        not_traced(check, str(error))
        return []
    differences = list(_differences(circuit, again))
    if not differences:
        _compare(check, again)
    return differences


def not_traced(check: Checking, why: str) -> None:
    """Say what could not be compared."""
    for what in (f"whether tracing again gives the same circuit: {why}", *check.ledger.if_not_traced):
        check.ledger.skip(what)


# -- tracing ---------------------------------------------------------------------------------------------------


def trace_again(check: Checking) -> Circuit:
    """The circuit that the model gives for the prompt, root and settings of a file; an error says why none."""
    circuit, model, settings = check.circuit, check.recording.model, check.circuit.method.settings or {}
    root = circuit.root if circuit.root.kind == "heads" else circuit.root.verifiable()
    if root is None:
        raise InputError("the file does not hold the vector of its direction")
    prompt = PromptInfo(circuit.prompt.text, circuit.prompt.token_ids, circuit.prompt.tokens)
    info: ModelInfo = circuit.model
    if circuit.difference is not None:
        return _differences_again(check, model, info, prompt)
    if check.method is None:
        raise InputError(f"this headtrace does not know the method {circuit.method.name!r}")
    if "max_firings" not in settings:
        raise InputError("the file does not say how many firings were expanded at most")
    method = check.method
    if not check.rule_known:
        limits = {check.row(n.site.firing).n_visible: n.threshold for n in circuit.heads() if not n.group}
        method = replace(method, tau=lambda visible: limits.get(visible) or 1.0)
    most = settings["max_firings"]
    request = TraceRequest(
        circuit.prompt.token_ids,
        root=root,
        paths=settings.get("paths", "attention"),  # type: ignore[arg-type]
        neurons=max((len(node.neurons or ()) for node in circuit.nodes), default=0),
        method=method,
        max_firings=None if most is None else int(most),
        min_influence=settings.get("min_influence"),  # type: ignore[arg-type]
    )
    tracer = Tracer(
        model, method=method, max_firings=request.max_firings, min_influence=request.min_influence
    )
    resolved = ResolvedRequest(request, list(circuit.prompt.token_ids), root, circuit.prompt.text)
    found = tracer.trace_resolved([resolved])[0]
    return (
        found if root == circuit.root else replace(found, root=replace(circuit.root, value=found.root.value))
    )


def _differences_again(check: Checking, model: Model, info: ModelInfo, prompt: PromptInfo) -> Circuit:
    """A difference circuit against the prompts that the file names."""
    circuit, said = check.circuit, check.circuit.difference
    assert said is not None
    settings: Mapping[str, Any] = circuit.method.settings or {}
    if "max_nodes" not in settings or "min_flow" not in settings:
        raise InputError("the file does not say how many components were kept at most")
    most, least = settings["max_nodes"], float(settings["min_flow"])
    carried = settings.get("min_carried", CARRIED if least == LEAST else 1.0)
    ids = list(circuit.prompt.token_ids)
    pairs = [
        PromptPair(ids, list(other.token_ids), circuit.root, replace(other, value=0.0))
        for other in said.prompts
    ]
    if any(each.flips is not None or each.naturalness is not None for each in said.prompts):
        check.ledger.skip(
            "how natural the other prompts are, and whether they flip the answer (headtrace matters)"
        )
    if not pairs:
        raise InputError("the file names no prompt that the circuit was compared with")
    flows = [
        flow
        for start in range(0, len(pairs), AT_ONCE)
        for flow in trace_pairs(model, pairs[start : start + AT_ONCE])
    ]
    budget = FlowBudget(None if most is None else int(most), least, float(carried))
    return difference_circuit(
        info, prompt, circuit.method, flows, budget, automatic=said.automatic, note=said.note
    )


# -- comparing -------------------------------------------------------------------------------------------------


def _edges(circuit: Circuit) -> dict[str, Edge]:
    """Edges by the names of their ends."""
    return {edge_name(circuit, edge): edge for edge in circuit.edges}


def _differences(circuit: Circuit, again: Circuit) -> Iterator[Difference]:
    """Nodes and edges, and channels of edges, that only one of two circuits has."""

    def known(one: Circuit) -> dict[str, None]:
        found = [f"node {node.name}" for node in one.nodes if node.kind != "root"]
        for name, edge in _edges(one).items():
            found.append(f"edge {name}")
            found += [f"channel {k} of {name}" for k in edge.channels or ()]
            found += [f"{one.node(k).name} in 'through' of {name}" for k in edge.through or ()]
        for node in one.nodes:
            found += [
                f"{e.component}, channel {k}, elsewhere of {node.name}"
                for e in node.elsewhere or ()
                for k in e.channels
            ]
        return dict.fromkeys(found)

    first, second = known(circuit), known(again)
    yield from (Difference(what, in_file=True) for what in first if what not in second)
    yield from (Difference(what, in_file=False) for what in second if what not in first)


def _compare(check: Checking, again: Circuit) -> None:
    """Every number and flag of two circuits with the same nodes and edges.

    Numbers that were compared with what was measured are not compared again.
    """
    ledger, mine, found = check.ledger, _said(check.circuit), _said(again)
    size = max(abs(value) for value in found.values() if isinstance(value, float))
    for (where, field), measured in found.items():
        in_file = mine.get((where, field))
        if (field, where) in ledger.places and (
            _is_number(measured) or any((f.field, f.where) == (field, where) for f in ledger.failures)
        ):
            continue
        if _is_number(in_file) and isinstance(measured, float):
            of_one = field in SHARES or field.startswith("predicted.")
            allowed = MARGIN * check.tolerance.number(1.0 if of_one else size)
            ledger.compare(field, where, in_file=float(in_file), measured=measured, allowed=allowed)
        elif not (field == "explained" and in_file != measured and check.unsure(where)):
            ledger.require(field, where, in_file=in_file, measured=measured)
    for where, field in mine:
        if (where, field) not in found:
            ledger.require(field, where, in_file=mine[where, field], measured=None)


def _said(circuit: Circuit) -> dict[tuple[str, str], Any]:
    """What tracing says of a circuit: by node or edge (empty for the whole) and field; lists number by number."""
    found: dict[tuple[str, str], Any] = {("", "empty"): circuit.reason is not None}
    found["", "influence_kept"] = circuit.influence_kept
    for name, value in (circuit.method.settings or {}).items():
        if name not in OLD_SETTINGS:
            found["", f"method.settings.{name}"] = value
    for node in circuit.nodes:
        data: dict[str, Any] = {each.name: getattr(node, each.name) for each in fields(node)}
        for i, signal in enumerate(data.pop("elsewhere") or ()):
            data[f"elsewhere[{i}].weight"] = signal.weight
        data["neurons"] = len(node.neurons or ())
        found |= {(node.name, name): value for name, value in _flat(data)}
    for edge in circuit.edges:
        data = {each.name: getattr(edge, each.name) for each in fields(edge)}
        for name in ("source", "target", "channels", "through"):  # compared before, by name
            del data[name]
        for channel, flow in zip(edge.channels or (), data.pop("flows") or (), strict=False):
            data[f"flows[{channel}]"] = flow  # channels of nearly the same flow may stand in another order
        found |= {(edge_name(circuit, edge), name): value for name, value in _flat(data)}
    said = circuit.difference
    if said is not None:
        data = {each.name: getattr(said, each.name) for each in fields(said)}
        data |= {f"prompts[{i}].value": each.value for i, each in enumerate(data.pop("prompts"))}
        data["flows of tokens"] = data.pop("tokens")
        found |= {("", f"difference.{name}"): value for name, value in _flat(data)}
    return {(where, name): value for (where, name), value in found.items() if value is not None}


def _flat(data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Fields whose values are numbers, flags or text; of lists and mappings, one for each item."""
    for name, value in data.items():
        if name in BESIDE or value is None:
            continue
        if isinstance(value, Mapping):
            items = cast("Mapping[str, Any]", value)
            yield from _flat({f"{name}.{key}": item for key, item in items.items()})
        elif isinstance(value, tuple):
            several = cast("tuple[Any, ...]", value)
            yield from _flat({f"{name}[{i}]": item for i, item in enumerate(several)})
        else:
            yield name, value


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
