"""Trace a circuit's prompt again with the settings of its file, and compare everything with what the file has.

What the model contradicts number by number is found by the other checks, which search for nothing. What is *missing*
from a file, which nodes were expanded, how much influence was followed, how reasons were mixed into the weight of an
edge: that only tracing again can show. Where rounding decides a near tie, another machine may trace other edges, so a
difference in nodes and edges is not called false; but it is no PASS either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headtrace import __version__
from headtrace.causal.report import Difference
from headtrace.causal.signals import edge_name
from headtrace.circuits import Circuit, ModelInfo, Node, PromptInfo
from headtrace.errors import InputError
from headtrace.request import ResolvedRequest, TraceRequest
from headtrace.tracing.difference_circuit import (
    CARRIED,
    LEAST,
    FlowBudget,
    Pair,
    difference_circuit,
    trace_pairs,
)
from headtrace.tracing.tracer import Tracer
from headtrace.validation import plain

if TYPE_CHECKING:
    from headtrace.causal.checks import Checking
    from headtrace.models import Model

AT_ONCE = 16
"""Pairs of prompts that are recorded together."""
BESIDE = {"id", "label", "description", "evidence", "effect", "importance", "text", "tokens", "version"}
"""What a trace does not decide: numbers of nodes, words, measured effects; tokens are compared by themselves."""
OF_PROMPTS = {"change", "flips", "naturalness"}
"""What is known of the prompts that a difference circuit compares with, from how they were found."""
OLD_SETTINGS = {"counterfactual"}
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
        Pair(ids, list(other.token_ids), circuit.root, replace(other, value=0.0)) for other in said.prompts
    ]
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


def _edges(circuit: Circuit) -> dict[str, Any]:
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
                f"L{e.layer}H{e.head} from {e.src}, channel {k}, elsewhere of {node.name}"
                for e in node.elsewhere or ()
                for k in e.channels
            ]
        return dict.fromkeys(found)

    first, second = known(circuit), known(again)
    yield from (Difference(what, in_file=True) for what in first if what not in second)
    yield from (Difference(what, in_file=False) for what in second if what not in first)


def _compare(check: Checking, again: Circuit) -> None:
    """Every number and flag of two circuits with the same nodes and edges."""
    circuit, ledger = check.circuit, check.ledger
    for path, key, size in _parts():
        ours, theirs = path(circuit), path(again)
        for where in theirs:
            mine, found = ours.get(where, {}), theirs[where]
            for name in dict.fromkeys([*mine, *found]):
                if name in BESIDE or (key == "prompts" and name in OF_PROMPTS):
                    continue
                _compare_value(
                    check, f"{key}{name}", where, mine.get(name), found.get(name), size(again, name)
                )
    ledger.checked["traced again"] += 1


def _parts() -> list[
    tuple[Callable[[Circuit], dict[str, dict[str, Any]]], str, Callable[[Circuit, str], float]]
]:
    """What is compared: by place, the fields there; and the size of the numbers that a field is computed from."""

    def nodes(circuit: Circuit) -> dict[str, dict[str, Any]]:
        return {node.name: _node(circuit, node) for node in circuit.nodes}

    def edges(circuit: Circuit) -> dict[str, dict[str, Any]]:
        return {name: _edge(circuit, edge) for name, edge in _edges(circuit).items()}

    def whole(circuit: Circuit) -> dict[str, dict[str, Any]]:
        data = plain(circuit)
        settings = {k: v for k, v in (circuit.method.settings or {}).items() if k not in OLD_SETTINGS}
        kept = {"influence_kept": data.get("influence_kept"), "empty": circuit.reason is not None}
        return {"": kept | {f"method.settings.{k}": v for k, v in settings.items()}}

    def compared(circuit: Circuit) -> dict[str, dict[str, Any]]:
        if circuit.difference is None:
            return {}
        data = plain(circuit.difference)
        prompts = data.pop("prompts")
        data["flows of tokens"] = data.pop("tokens")
        for each in prompts:
            for name in (*OF_PROMPTS, "text"):
                each.pop(name, None)
        return {"": data} | {f"prompt {i}": each for i, each in enumerate(prompts)}

    def largest(part: Callable[[Circuit], dict[str, dict[str, Any]]]) -> Callable[[Circuit, str], float]:
        known: dict[int, float] = {}

        def size(circuit: Circuit, _: str) -> float:
            if id(circuit) not in known:
                known[id(circuit)] = max(
                    (abs(number) for fields in part(circuit).values() for number in _numbers(fields)),
                    default=1.0,
                )
            return known[id(circuit)]

        return size

    return [
        (nodes, "", largest(nodes)),
        (edges, "", largest(edges)),
        (whole, "", lambda *_: 1.0),
        (compared, "difference.", largest(compared)),
    ]


def _node(circuit: Circuit, node: Node) -> dict[str, Any]:
    data = plain(node)
    data |= {f"elsewhere[{i}].weight": part["weight"] for i, part in enumerate(data.pop("elsewhere", ()))}
    data["neurons"] = len(node.neurons or ())
    data |= {f"predicted.{side}": value for side, value in (data.pop("predicted", None) or {}).items()}
    return data


def _edge(circuit: Circuit, edge: Any) -> dict[str, Any]:
    data = plain(edge)
    flows = data.pop("flows", None)
    if flows is not None:  # channels of nearly the same flow may stand in another order
        data |= {f"flow of channel {k}": flow for k, flow in zip(edge.channels, flows, strict=True)}
    data["through"] = sorted(circuit.node(i).name for i in edge.through or ())
    data["channels"] = None if edge.channels is None else sorted(edge.channels)
    return {name: value for name, value in data.items() if name not in ("source", "target")}


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, Mapping):
        for name, each in value.items():
            if name not in ("dest", "src", "layer", "head", "channels", "group"):
                yield from _numbers(each)
    elif isinstance(value, list):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, float):
        yield value


def _compare_value(check: Checking, field: str, where: str, mine: Any, found: Any, size: float) -> None:
    """Numbers to the tolerance, lists of numbers one by one, all else exactly; numbers that were compared with what
    was measured are not compared again."""
    if (field, where) in check.ledger.places and (
        _is_number(found) or check.ledger.contradicts(field, where)
    ):
        return
    if isinstance(mine, list) and isinstance(found, list) and len(mine) == len(found):
        for i, (one, two) in enumerate(zip(mine, found, strict=True)):
            _compare_value(check, f"{field}[{i}]", where, one, two, size)
    elif _is_number(mine) and _is_number(found) and (isinstance(mine, float) or isinstance(found, float)):
        allowed = MARGIN * check.tolerance.number(size)
        check.ledger.compare(field, where, in_file=float(mine), measured=float(found), allowed=allowed)
    elif field == "explained" and mine != found and check.unsure(where):
        return
    else:
        check.ledger.require(field, where, in_file=mine, measured=found)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
