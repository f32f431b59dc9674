"""What must hold between the parts of a circuit, whose own fields have been checked: ids, positions, layers, sides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headtrace.circuits.parts import Edge, Node
from headtrace.errors import InputError
from headtrace.validation import fail
from headtrace.vocabulary import PATHS, SIDES_OF, Kind, Site

if TYPE_CHECKING:
    from headtrace.circuits.circuit import Circuit

_PLACE: dict[Kind, tuple[str, ...]] = {
    "root": (),
    "head": ("layer", "head", "dest", "src"),
    "mlp": ("layer", "dest"),
    "attention_bias": ("layer", "dest"),
    "offset": ("layer", "head", "dest"),
    "rounding": ("layer", "dest"),
    "embedding": ("dest",),
    "position": ("dest",),
}
"""The fields that place a node of each kind."""

_ANYWHERE = ("embedding", "position", "offset", "rounding")
"""Leaves that belong to no block: they are read at the layer of their reader."""

LAYERS, HEADS = 100_000, 100_000
"""No model has as many layers, no layer as many heads."""
ROUNDED = 1e-5
"""A share that was added up in float32 may lie this far outside 0 to 1."""
PRECISIONS = ("bfloat16", "float16", "float32", "float64")


def require_token_ids(circuit: Circuit) -> None:
    """Raise ``InputError`` if no model can run the prompt of a circuit, which then cannot be tested."""
    if circuit.prompt.token_ids:
        return
    raise InputError(
        f"The circuit has no token ids (prompt.token_ids is empty; its method is {circuit.method.name!r}), so no model "
        "can run its prompt. Circuits of other tools have none: merge, families, compare and view work on them. "
        "To test a circuit, trace the prompt with headtrace."
    )


def check(circuit: Circuit) -> None:
    """Ids exist once, positions lie in the prompt, edges lead upwards into sides that their targets have."""
    length = len(circuit.prompt.tokens)
    _check_lengths(circuit)
    _check_position("root.position", circuit.root.position, length)
    _check_numbers(circuit)
    known: dict[int, Node] = {}
    sites: set[Site] = set()
    for i, node in enumerate(circuit.nodes):
        if node.id in known:
            raise InputError(f"nodes[{i}].id: {node.id} is already taken by another node")
        site = node.site
        _check_node(f"nodes[{i}]", node, site, length)
        # In a difference circuit influence is a flow as a share of the difference, and may exceed 1.
        if circuit.difference is None:
            _check_share(f"nodes[{i}].influence", node.influence)
        if site in sites:
            raise InputError(f"nodes[{i}]: {node.name!r} occurs more than once")
        known[node.id] = node
        sites.add(site)
    taken: set[tuple[int, int, str]] = set()
    for i, edge in enumerate(circuit.edges):
        _check_edge(f"edges[{i}]", edge, known)
        identity = (edge.source, edge.target, edge.side)
        if identity in taken:
            raise InputError(f"edges[{i}]: a second {edge.side} edge from {edge.source} to {edge.target}")
        taken.add(identity)


def _check_lengths(circuit: Circuit) -> None:
    """What is listed by token has as many entries as there are tokens."""
    prompt = circuit.prompt
    length = len(prompt.tokens)
    if prompt.token_ids and len(prompt.token_ids) != length:
        raise InputError(f"prompt.tokens: expected {len(prompt.token_ids)}, one per token id, got {length}")
    start = prompt.start_tokens or ()
    if start != prompt.tokens[: len(start)]:
        raise InputError(f"prompt.start_tokens: expected the first of prompt.tokens, got {list(start)}")
    by_token: dict[str, Any] = {
        "prompt.contributions": prompt.contributions,
        "prompt.importance": prompt.importance,
    }
    if circuit.difference is not None:
        by_token["difference.tokens"] = circuit.difference.tokens
        for i, other in enumerate(circuit.difference.prompts):
            by_token[f"difference.prompts[{i}].token_ids"] = other.token_ids
    for name, values in by_token.items():
        if values is not None and len(values) != length:
            raise InputError(f"{name}: expected {length}, one per token, got {len(values)}")


def _check_numbers(circuit: Circuit) -> None:
    """Answers are listed once, shares are shares, settings can be what they are."""
    if not getattr(circuit.root, "continuation", None):  # which may well repeat a token
        for name in ("answer", "wrong", "support", "heads"):
            _check_once(f"root.{name}", getattr(circuit.root, name, None))
    _check_share("influence_kept", circuit.influence_kept)
    _check_settings(circuit.method.settings or {})
    if ((circuit.method.settings or {}).get("paths") == "difference") != (circuit.difference is not None):
        stated = "an object" if circuit.difference is None else "null"
        fail(
            "difference", f"{stated}, since method.settings.paths says so", circuit.difference and "an object"
        )


def _check_position(path: str, position: int | None, length: int) -> None:
    if position is not None and position >= length:
        fail(path, f"a position below {length}, the length of the prompt", position)


def _check_share(path: str, value: float | None) -> None:
    if value is not None and not -ROUNDED <= value <= 1 + ROUNDED:
        fail(path, "a number from 0 to 1", value)


def _check_once(path: str, values: Sequence[Any] | None) -> None:
    for i, value in enumerate(values or ()):
        if value in (values or ())[:i]:
            fail(f"{path}[{i}]", "one that is not listed yet", value)


def _check_settings(settings: Mapping[str, Any]) -> None:
    """What headtrace writes among the settings of a method can be what it is; other settings may be anything."""

    def require(name: str, expected: str, fits: Callable[[Any], bool]) -> None:
        value = settings.get(name)
        if value is not None and not fits(value):
            fail(f"method.settings.{name}", expected, value)

    def number(value: Any) -> bool:
        return isinstance(value, (int, float)) and not isinstance(value, bool)

    def count(value: Any) -> bool:
        return number(value) and value == int(value) and value >= 1

    def share(value: Any) -> bool:
        return number(value) and 0 <= value <= 1

    require("paths", f"one of {', '.join(PATHS)}", lambda value: value in PATHS)
    require("dtype", f"one of {', '.join(PRECISIONS)}", lambda value: value in PRECISIONS)
    for name in ("max_firings", "max_nodes"):
        require(name, "a whole number of at least 1", count)
    for name in ("min_influence", "min_flow", "min_carried"):
        require(name, "a number from 0 to 1", share)
    require("rounding", "a number of at least 0", lambda value: number(value) and value >= 0)


def _check_node(path: str, node: Node, site: Site, length: int) -> None:
    places = _PLACE[node.kind]
    for key, value in (("layer", site.layer), ("head", site.head), ("dest", site.dest), ("src", site.src)):
        if value is not None and key not in places:
            fail(f"{path}.{key}", f"null, since a node of kind {node.kind!r} has none", value)
        if value is None and key in places and (node.kind != "offset" or key == "dest"):
            fail(f"{path}.{key}", f"an integer, since a node of kind {node.kind!r} has one", value)
    if node.kind == "offset" and node.layer is None and node.head is not None:
        fail(f"{path}.layer", "an integer, since a head has a layer", None)
    _check_position(f"{path}.dest", node.dest, length)
    _check_position(f"{path}.src", node.src, length)
    _check_node_numbers(path, node, length)
    if not site.possible:
        fail(f"{path}.src", f"a position at or before dest ({node.dest})", node.src)
    _check_elsewhere(path, node, length)
    if node.neurons is None:
        return
    if node.kind != "mlp":
        fail(f"{path}.neurons", f"null, since a node of kind {node.kind!r} has no hidden units", "a list")
    seen: set[int] = set()
    for i, neuron in enumerate(node.neurons):
        if neuron.unit in seen:
            fail(f"{path}.neurons[{i}].unit", "a unit that is not listed yet", neuron.unit)
        seen.add(neuron.unit)


def _check_elsewhere(path: str, node: Node, length: int) -> None:
    """Signals at other keys name a component that there is."""
    for i, signal in enumerate(node.elsewhere or ()):
        places = _PLACE[signal.kind or "head"]
        for key, value in (("layer", signal.layer), ("head", signal.head), ("src", signal.src)):
            if (value is None) == (key in places):
                wanted = "an integer" if value is None else "null"
                fail(f"{path}.elsewhere[{i}].{key}", f"{wanted} for kind {signal.kind or 'head'!r}", value)
        _check_position(f"{path}.elsewhere[{i}].src", signal.src, length)
        _check_once(f"{path}.elsewhere[{i}].channels", signal.channels)


def _check_node_numbers(path: str, node: Node, length: int) -> None:
    """A place that a model can have, shares that are shares, a group that the node is in."""
    for key, value, end in (("layer", node.layer, LAYERS), ("head", node.head, HEADS)):
        if value is not None and value >= end:
            fail(f"{path}.{key}", f"a number below {end:,}", value)
    shares = {key: getattr(node, key) for key in ("attention", "threshold", "other_attention", "rounding")}
    shares |= {f"predicted.{side}": value for side, value in (node.predicted or {}).items()}
    for key, value in shares.items():
        _check_share(f"{path}.{key}", value)
    if node.group is not None:
        _check_once(f"{path}.group", node.group)
        for i, position in enumerate(node.group):
            _check_position(f"{path}.group[{i}]", position, length)
        if node.src not in node.group:
            fail(
                f"{path}.group",
                f"positions with the node's own source ({node.src}) among them",
                list(node.group),
            )


def _check_edge(path: str, edge: Edge, known: Mapping[int, Node]) -> None:
    for end, node in (("source", edge.source), ("target", edge.target)):
        if node not in known:
            fail(f"{path}.{end}", "the id of a node", node)
    for i, node in enumerate(edge.through or ()):
        if node not in known:
            fail(f"{path}.through[{i}]", "the id of a node", node)
    _check_once(f"{path}.channels", edge.channels)
    _check_once(f"{path}.through", edge.through)
    source, target = known[edge.source], known[edge.target]
    sides = SIDES_OF.get(target.kind)
    if sides is None:
        fail(f"{path}.target", f"a node of kind {' or '.join(SIDES_OF)}", target.name)
    if edge.side not in sides:
        fail(f"{path}.side", f"{' or '.join(sides)}, since the target is {target.name!r}", edge.side)
    if source.kind == "root":
        fail(f"{path}.source", "a component, not the root", edge.source)
    if target.kind != "root" and source.kind not in _ANYWHERE:
        assert source.layer is not None
        assert target.layer is not None  # both were checked with their nodes
        # Attention comes before the MLP of its own layer.
        beside = target.kind == "mlp" and source.kind in ("head", "attention_bias")
        if source.layer > target.layer or (source.layer == target.layer and not beside):
            fail(f"{path}.source", f"a component below {target.name!r}", source.name)
    if edge.flows is not None and len(edge.flows) != len(edge.channels or ()):
        fail(f"{path}.flows", f"{len(edge.channels or ())} numbers, one per channel", len(edge.flows))
    if edge.evidence is not None:
        _check_evidence(f"{path}.evidence", edge)


def _check_evidence(path: str, edge: Edge) -> None:
    """Evidence is about a description, a supported one was tested, and the marked pieces of examples exist."""
    evidence = edge.evidence
    assert evidence is not None
    if edge.description is None:
        fail(path, "null, since the edge has no description", "an object")
    if evidence.supported and evidence.p_value is None:
        fail(f"{path}.p_value", "a number, since the words are supported", None)
    for i, example in enumerate(evidence.examples or ()):
        where = f"{path}.examples[{i}]"
        if example.dest >= len(example.pieces):
            fail(f"{where}.dest", f"a piece below {len(example.pieces)}, the number of pieces", example.dest)
        if example.src > example.dest:
            fail(f"{where}.src", f"a piece at or before dest ({example.dest})", example.src)
