"""What must hold between the parts of a circuit. Each part has checked its own fields before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

from headtrace.circuits.evidence import Evidence
from headtrace.circuits.parts import Edge, MethodInfo, ModelInfo, Node, PromptInfo
from headtrace.errors import InputError
from headtrace.roots import ROOTS
from headtrace.validation import fail, is_whole
from headtrace.vocabulary import SIDES_OF, Kind, Site

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
}
"""The fields that place a node of each kind."""

_ANYWHERE = ("embedding", "offset", "rounding")
"""Leaves that belong to no block: they are read at the layer of their reader."""


def check(circuit: Circuit) -> None:
    """Ids exist once, positions lie in the prompt, edges lead upwards into sides that their targets have."""
    _check_parts(circuit)
    prompt = circuit.prompt
    length = len(prompt.tokens)
    if len(prompt.token_ids) != length:
        raise InputError(f"prompt.tokens: expected {len(prompt.token_ids)}, one per token id, got {length}")
    if prompt.contributions is not None and len(prompt.contributions) != length:
        raise InputError(
            f"prompt.contributions: expected {length}, one per token, got {len(prompt.contributions)}"
        )
    _check_position("root.position", circuit.root.position, length)
    known: dict[int, Node] = {}
    sites: set[Site] = set()
    for i, node in enumerate(circuit.nodes):
        if node.id in known:
            raise InputError(f"nodes[{i}].id: {node.id} is already taken by another node")
        site = node.site
        _check_node(f"nodes[{i}]", node, site, length)
        if site in sites:
            raise InputError(f"nodes[{i}]: {node.name!r} occurs more than once")
        known[node.id] = node
        sites.add(site)
    _check_edges(circuit.edges, known)


def _check_parts(circuit: Circuit) -> None:
    """Each part is what it should be. A file's parts are; a circuit that is made in Python may have anything."""
    kinds = {"model": ModelInfo, "prompt": PromptInfo, "method": MethodInfo, "root": tuple(ROOTS.values())}
    for name, kind in kinds.items():
        if not isinstance(getattr(circuit, name), kind):
            names = [each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,))]
            fail(name, " or ".join(names), getattr(circuit, name))
    for name, kind in (("nodes", Node), ("edges", Edge)):
        parts: Any = getattr(circuit, name)
        if not isinstance(parts, (tuple, list)):
            fail(name, f"a tuple of {kind.__name__}", parts)
        for i, part in enumerate(parts):
            if not isinstance(part, kind):
                fail(f"{name}[{i}]", f"a {kind.__name__}", part)
    reason, kept = circuit.reason, circuit.influence_kept
    if reason is not None and not (isinstance(reason, str) and is_whole(reason)):
        fail("reason", "text without half characters", reason)
    number = isinstance(kept, (int, float)) and not isinstance(kept, bool)
    if kept is not None and not (number and isfinite(kept)):
        fail("influence_kept", "a finite number", kept)


def _check_position(path: str, position: int | None, length: int) -> None:
    if position is not None and position >= length:
        fail(path, f"a position below {length}, the length of the prompt", position)


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
    if not site.possible:
        fail(f"{path}.src", f"a position at or before dest ({node.dest})", node.src)
    if node.neurons is not None:
        _check_neurons(f"{path}.neurons", node)
    for i, signal in enumerate(node.elsewhere or ()):
        _check_position(f"{path}.elsewhere[{i}].src", signal.src, length)


def _check_neurons(path: str, node: Node) -> None:
    if node.kind != "mlp":
        fail(path, f"null, since a node of kind {node.kind!r} has no hidden units", "a list")
    seen: set[int] = set()
    for i, neuron in enumerate(node.neurons or ()):
        if neuron.unit in seen:
            fail(f"{path}[{i}].unit", "a unit that is not listed yet", neuron.unit)
        seen.add(neuron.unit)


def _check_edges(edges: Sequence[Edge], known: Mapping[int, Node]) -> None:
    taken: set[tuple[int, int, str]] = set()
    for i, edge in enumerate(edges):
        for end, node in (("source", edge.source), ("target", edge.target)):
            if node not in known:
                fail(f"edges[{i}].{end}", "the id of a node", node)
        for j, node in enumerate(edge.through or ()):
            if node not in known:
                fail(f"edges[{i}].through[{j}]", "the id of a node", node)
        _check_edge(f"edges[{i}]", edge, known[edge.source], known[edge.target])
        if edge.evidence is not None:
            _check_evidence(f"edges[{i}]", edge, edge.evidence)
        identity = (edge.source, edge.target, edge.side)
        if identity in taken:
            raise InputError(f"edges[{i}]: a second {edge.side} edge from {edge.source} to {edge.target}")
        taken.add(identity)


def _check_evidence(path: str, edge: Edge, evidence: Evidence) -> None:
    """Evidence is about words, what is supported was tested, and the marked pieces are there."""
    if edge.description is None:
        fail(f"{path}.evidence", "null, since the edge has no description", "an object")
    if evidence.supported and evidence.p_value is None:
        fail(f"{path}.evidence.p_value", "a number, since the words are supported", None)
    for i, shown in enumerate(evidence.examples or ()):
        where = f"{path}.evidence.examples[{i}]"
        if shown.dest >= len(shown.pieces):
            fail(f"{where}.dest", f"a piece below {len(shown.pieces)}, the number of pieces", shown.dest)
        if shown.src > shown.dest:
            fail(f"{where}.src", f"a piece at or before dest ({shown.dest})", shown.src)


def _check_edge(path: str, edge: Edge, source: Node, target: Node) -> None:
    sides = SIDES_OF.get(target.kind)
    if sides is None:
        fail(f"{path}.target", f"a node of kind {' or '.join(SIDES_OF)}", target.name)
    if edge.side not in sides:
        fail(f"{path}.side", f"{' or '.join(sides)}, since the target is {target.name!r}", edge.side)
    if source.kind == "root":
        fail(f"{path}.source", "a component, not the root", edge.source)
    if target.kind == "root" or source.kind in _ANYWHERE:
        return
    assert source.layer is not None
    assert target.layer is not None  # both were checked with their nodes
    beside = target.kind == "mlp" and source.kind in (
        "head",
        "attention_bias",
    )  # attention comes before the mlp
    if source.layer > target.layer or (source.layer == target.layer and not beside):
        fail(f"{path}.source", f"a component below {target.name!r}", source.name)
