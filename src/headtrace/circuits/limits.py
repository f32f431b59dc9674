"""What a circuit of one run cannot tell by its nature, said by the circuit itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headtrace.vocabulary import ATTENTION_SIDES

if TYPE_CHECKING:
    from headtrace.circuits.circuit import Circuit
    from headtrace.circuits.parts import Node

LISTED = 4
"""Nodes that a sentence names."""
NOTHING = 1e-6
"""Influence of a cause that takes nothing away when it is removed in its turn, but for rounding."""
HELD = 0.01
"""Influence that the biases of MLPs hold and that is worth a sentence."""
ASK = 'A difference circuit (paths="difference") may tell what changes it.'


def not_told(circuit: Circuit) -> tuple[str, ...]:
    """Sentences about what a complete circuit leaves open though its content depends on it; none for other circuits.

    - A head below the threshold moves something that matters, but no signal makes it attend there: it attends as it
      would without any, or is held down.
    - A head attends in part, and a component keeps it from attending far more: that is named, and not followed.
    - A component is needed for a query or key together with others, but takes nothing away alone: it is not followed.
    - Biases of MLPs hold a part of the influence: which of their units are on was decided by something else.
    """
    if (circuit.method.settings or {}).get("paths") != "complete":
        return ()
    weak = [
        f"{node.name} ({node.attention:.2g})"
        for node in circuit.nodes
        if node.kind == "head" and node.expanded and _below(node) and not _attends(circuit, node)
    ]
    idle = [
        node.name
        for node in circuit.nodes
        if node.kind in ("head", "mlp")
        and not node.expanded
        and (node.influence or 0.0) < NOTHING
        and any(edge.side in ATTENTION_SIDES for edge in circuit.edges_from(node))
    ]
    biased = [n for n in circuit.nodes if n.kind == "offset" and n.layer is not None and n.head is None]
    held = sum(node.influence or 0.0 for node in biased)
    held_down = [
        f"{node.name} ({node.attention:.2g}), by {_listed(list(node.held_down_by))}"
        for node in circuit.nodes
        if node.attention is not None and node.held_down_by
    ]
    sentences: list[str] = []
    if held_down:
        sentences.append(
            f"Kept from attending far more, by what is named here and not followed: {_listed(held_down)}. {ASK}"
        )
    if weak:
        sentences.append(f"Why these attend is not told, no signal makes them: {_listed(weak)}. {ASK}")
    if idle:
        sentences.append(
            f"Needed only together with others, so that their own causes are not told: {_listed(idle)}. {ASK}"
        )
    if held > HELD:
        where = _listed([f"MLP {node.layer} @{node.dest}" for node in biased])
        sentences.append(
            f"{held:.0%} of the influence ends in what biases hold ({where}): what turned their units on or off is "
            f"not told. {ASK}"
        )
    return tuple(sentences)


def _below(node: Node) -> bool:
    return node.attention is not None and node.threshold is not None and node.attention < node.threshold


def _attends(circuit: Circuit, node: Node) -> bool:
    """Whether causes of the attention of a head were looked for."""
    return node.predicted is not None or any(e.side in ATTENTION_SIDES for e in circuit.edges_into(node))


def _listed(names: list[str]) -> str:
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more} more" if more > 0 else "")
