"""What a circuit file says in its graph, compared with the model: nodes, flags, influence, places, weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from headtrace.causal.checks import Checking
from headtrace.causal.claims import RULES, SideClaim
from headtrace.causal.opening import edge_name
from headtrace.causal.tolerance import WRITTEN
from headtrace.circuits import Circuit, CompetingKeySignal, Edge, Node
from headtrace.circuits.graph import node_influence
from headtrace.tracing.methods import METHODS
from headtrace.vocabulary import ATTENTION_SIDES, AttentionSide, Firing

# -- nodes ---------------------------------------------------------------------------------------------------


def check_nodes(check: Checking) -> None:
    """Attention and threshold of every firing; nothing else has either."""
    recording, ledger = check.recording, check.ledger
    for node in check.circuit.nodes:
        if node.kind != "head":
            for name in ("attention", "threshold"):
                ledger.require(name, node.name, in_file=getattr(node, name), measured=None)
            continue
        f = node.site.firing
        ledger.compare(
            "attention",
            node.name,
            in_file=node.attention,
            measured=float(recording.attention.at(f.layer, 0, f.head, f.dest, f.src)),
            allowed=check.attention_tolerance(f),
        )
        if check.method is not None and check.rule_known:
            limit = check.method.threshold(int(recording.visible_keys[f.layer, 0, f.dest]))
            ledger.compare("threshold", node.name, in_file=node.threshold, measured=limit, allowed=WRITTEN)


# -- flags and influence -------------------------------------------------------------------------------------


def check_flags(check: Checking) -> None:
    """Which firings were expanded, and explained, as their attention and the method's rule have it."""
    for node in check.circuit.nodes:
        causes = check.circuit.edges_into(node)
        if node.kind != "head":
            if node.expanded and not causes:
                check.ledger.require("expanded", node.name, in_file=True, measured=False)
            if node.kind != "mlp" and not node.explained:
                check.ledger.require("explained", node.name, in_file=False, measured=True)
            continue
        said = bool([e for e in causes if e.side in ATTENTION_SIDES] or node.elsewhere or node.predicted)
        if not said and any(edge.side == "value" for edge in causes):
            continue  # expanded for what it moved
        if not node.expanded:
            check.ledger.require("expanded", node.name, in_file=False, measured=said)
            check.ledger.require("explained", node.name, in_file=node.explained, measured=True)
            continue
        follows = _follows(check, node)
        check.ledger.require("expanded", node.name, in_file=True, measured=follows is not False)
        explained = _explained(check, node)
        if explained is not None:
            check.ledger.require("explained", node.name, in_file=node.explained, measured=explained)


def _follows(check: Checking, node: Node) -> bool | None:
    """Whether the method traces a firing further; None where that is within rounding, or not known."""
    f, method = node.site.firing, check.method_for(node)
    if method is None:
        return None
    if f.layer == 0 or f.dest == 0:
        return False
    recording, allowed = check.recording, check.attention_tolerance(f)
    attention = float(recording.attention.at(f.layer, 0, f.head, f.dest, f.src))
    keys = int(recording.visible_keys[f.layer, 0, f.dest])
    low, high = (method.follows(f, attention + d, keys) for d in (-allowed, allowed))
    return high if low == high else None


def _explained(check: Checking, node: Node) -> bool | None:
    """Whether a firing is explained, by the rule of its method; None where that is within rounding, or not known."""
    circuit, method = check.circuit, METHODS.get(check.circuit.method.name)
    rule = None if method is None else method.explained_when
    if rule == "below threshold":
        left = [(node.predicted or {}).get(side) for side in ATTENTION_SIDES]
        if node.threshold is None or None in left:
            return None
        gaps = [node.threshold - (value or 0.0) for value in left]
        allowed = check.attention_tolerance(node.site.firing)
        return None if min(abs(gap) for gap in gaps) <= allowed else min(gaps) > 0
    if rule == "causes on both sides":
        edges = circuit.edges_into(node)
        found = {e.side for e in edges} | ({"key"} if node.elsewhere else set())
        return found >= set(ATTENTION_SIDES)
    return None


def check_influence(check: Checking) -> None:
    """Influence follows from the weights alone; what the budget cut off is missing from what was kept."""
    circuit, ledger = check.circuit, check.ledger
    found = node_influence(circuit)
    allowed = WRITTEN * (1 + len(circuit.edges))
    for node in circuit.nodes:
        ledger.compare(
            "influence", node.name, in_file=node.influence, measured=found[node.id], allowed=allowed
        )
    if (circuit.method.settings or {}).get("paths", "attention") != "attention":
        ledger.skip("influence_kept: which values and MLPs the budget cut off is not in the file")
        return
    leaves = [node for node in circuit.heads() if not node.expanded]
    followed = {node.id: _follows(check, node) for node in leaves}
    if check.method is not None and circuit.influence_kept is not None:
        cut = sum(found[i] for i, follows in followed.items() if follows)
        unsure = sum(found[i] for i, follows in followed.items() if follows is None)
        low, high = max(0.0, 1 - cut - unsure), max(0.0, 1 - cut)
        ledger.between(
            "influence_kept", "", in_file=circuit.influence_kept, low=low, high=high, allowed=allowed
        )
    _check_budget(check, [node for node in leaves if followed[node.id]], allowed)


def _check_budget(check: Checking, cut: list[Node], allowed: float) -> None:
    """As many firings as the budget lets, and what was left out is what it does not let."""
    settings = check.circuit.method.settings or {}
    most, least = settings.get("max_firings"), settings.get("min_influence")
    expanded = sum(node.expanded for node in check.circuit.heads())
    if isinstance(most, int) and not isinstance(most, bool):
        check.ledger.require("max_firings", "", in_file=most, measured=max(most, expanded))
        if expanded == most:
            return
    elif "max_firings" not in settings:
        return  # another tool's file, with a budget that is not known
    for node in cut:
        small = isinstance(least, (int, float)) and (node.influence or 0.0) < least + allowed
        check.ledger.require("expanded", node.name, in_file=False, measured=not small)


# -- edges ---------------------------------------------------------------------------------------------------


def check_places(check: Checking) -> None:
    """What is read on a side sits at the position of that side; a bias is read by its own head alone."""
    circuit = check.circuit
    for edge in circuit.edges:
        source, target = circuit.node(edge.source), circuit.node(edge.target)
        if edge.side not in ATTENTION_SIDES:
            continue
        wanted = target.dest if edge.side == "query" else target.src
        where = edge_name(circuit, edge)
        check.ledger.require("position of the source", where, in_file=source.dest, measured=wanted)
        if source.kind == "offset":
            check.ledger.require(
                "reader of the offset",
                where,
                in_file=(source.layer, source.head),
                measured=(target.layer, target.head),
            )


def check_root_edges(check: Checking) -> None:
    """What each seed contributes to the root."""
    circuit = check.circuit
    if (circuit.method.settings or {}).get("counterfactual") is not None:
        return  # contrasts, which are compared with the rest of the content
    edges = {edge_name(circuit, edge): edge for edge in circuit.edges if edge.side == "root"}
    circuit.root.check_seeds(check, check.root, edges)


def claimed_sides(circuit: Circuit) -> Iterator[tuple[Node, AttentionSide]]:
    """Every side of every firing that something is said about."""
    for node in circuit.heads():
        sides = {edge.side for edge in circuit.edges_into(node)} | ({"key"} if node.elsewhere else set())
        for side in ATTENTION_SIDES:
            if side in sides or (node.predicted or {}).get(side) is not None:
                yield node, side


def check_weights(check: Checking, claim: SideClaim) -> None:
    """What each signal of a side accounts for, by the rule of the method."""
    circuit, method = check.circuit, METHODS.get(check.circuit.method.name)
    if method is None or method.edge_weight is None or not claim.parts:
        return
    rule = RULES[method.edge_weight]
    written = torch.tensor([part.weight for part in claim.parts], dtype=torch.float64)
    found = rule(claim, circuit.method, check.tolerance, written.to(claim.rows.device))
    low, high = found.low.tolist(), found.high.tolist()
    for part, least, most in zip(claim.parts, low, high, strict=True):
        where = (
            edge_name(circuit, part)
            if isinstance(part, Edge)
            else f"L{part.layer}H{part.head} from {part.src} => key of {claim.node.name} (elsewhere)"
        )
        check.ledger.between(
            "weight", where, in_file=part.weight, low=least, high=most, allowed=found.allowed
        )
        if method.whole_heads:
            _check_shown_source(check, claim, part, where)


def _check_shown_source(
    check: Checking, claim: SideClaim, part: Edge | CompetingKeySignal, where: str
) -> None:
    """SVT traces whole heads, each shown at the source that it attends to most."""
    f = part if isinstance(part, CompetingKeySignal) else check.circuit.node(part.source)
    place = claim.firing.dest if claim.side == "query" else claim.firing.src
    if f.layer is None or f.head is None or f.src is None:
        check.ledger.require("kind of the source", where, in_file="no head", measured="head")
        return
    row = check.recording.attention.row(f.layer, 0, f.head, place)
    allowed = check.attention_tolerance(Firing(f.layer, f.head, place, f.src))
    own, most = float(row[f.src]), float(row.max())
    check.ledger.compare(
        "attention of the strongest source", where, in_file=own, measured=most, allowed=allowed
    )
