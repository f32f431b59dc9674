"""What a circuit file says, compared with the model: its prompt and method, its nodes, flags, influence and weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from headtrace.causal.claims import RULES, Row, SideClaim
from headtrace.causal.opening import WRITTEN, Tolerance, text_as_ids
from headtrace.causal.report import Ledger
from headtrace.causal.signals import Signal, edge_name
from headtrace.circuits import Circuit, CompetingKeySignal, Edge, Node
from headtrace.circuits.graph import node_influence
from headtrace.errors import InputError
from headtrace.models.integrity import NOT_COMPARED
from headtrace.tracing.attribute_root import RootAttribution, attribute_root
from headtrace.tracing.methods import IG_STEPS, METHODS, THRESHOLD_RULES, Method, make_method
from headtrace.vocabulary import ATTENTION_SIDES, AttentionSide, Firing

if TYPE_CHECKING:
    from headtrace.circuits import MethodInfo
    from headtrace.models import Recording

CUSTOM = "custom"


def method_of(info: MethodInfo) -> Method | None:
    """The method with the options of a file; None if this headtrace does not know it."""
    if info.name not in METHODS:
        return None
    known = {each.name for each in fields(METHODS[info.name])} - {"tau"}
    options: dict[str, Any] = {k: v for k, v in (info.settings or {}).items() if k in known}
    if info.ig_steps is not None and "ig_steps" in known:
        options["ig_steps"] = info.ig_steps
    if isinstance(info.tau, (int, float)) and not isinstance(info.tau, bool):
        options["tau"] = float(info.tau)
    elif info.tau in THRESHOLD_RULES and info.tau != METHODS[info.name].rule:
        options["tau"] = THRESHOLD_RULES[info.tau]
    try:
        return make_method(info.name, **options)
    except InputError as error:
        raise InputError(f"method: {error}") from None


@dataclass(frozen=True)
class Checking:
    """One circuit, the run of its prompt that it is compared with, and where the outcome is noted."""

    circuit: Circuit
    recording: Recording
    tolerance: Tolerance
    ledger: Ledger

    @cached_property
    def _rows(self) -> dict[Firing, Row]:
        return {}

    def row(self, firing: Firing) -> Row:
        """One firing's row of attention."""
        return self._rows.setdefault(firing, Row(self.recording, firing))

    def attention_tolerance(self, firing: Firing) -> float:
        """What is allowed for the attention of a firing as it was recorded."""
        return self.tolerance.attention(self.row(firing).size)

    def unsure(self, name: str) -> bool:
        """Whether rounding decides if a firing, by its name, is explained."""
        node = self.circuit.node(name)
        left = [value for value in (node.predicted or {}).values() if value is not None]
        if node.kind != "head" or node.threshold is None or not left:
            return False
        return abs(node.threshold - max(left)) <= self.attention_tolerance(node.site.firing)

    @cached_property
    def method(self) -> Method | None:
        return method_of(self.circuit.method)

    @property
    def rule_known(self) -> bool:
        """Whether the threshold of every firing follows from the file: not where it was a function of the user's."""
        return self.method is not None and self.circuit.method.tau not in (CUSTOM, None)

    @cached_property
    def expands_layer_0(self) -> bool | None:
        """Whether the file's headtrace expanded firings of layer 0, as those after 0.2 do; None where it does not say.

        The default threshold changed at the same time, so a file that names one says it.
        """
        info = self.circuit.method
        if info.tau in THRESHOLD_RULES:
            return info.tau == next(iter(THRESHOLD_RULES))
        early = (info.version or "").startswith(("0.1.", "0.2."))
        return None if early and not any(n.expanded for n in self.circuit.heads() if n.layer == 0) else True

    def method_for(self, node: Node) -> Method | None:
        """The method with the threshold that holds for a node."""
        if self.method is None or self.rule_known:
            return self.method
        return replace(self.method, tau=node.threshold) if node.threshold else None

    @cached_property
    def root(self) -> RootAttribution | None:
        """The root's value in the model; None where the file does not say what was read, or for heads."""
        root, steps = self.circuit.root, self.circuit.method.ig_steps or IG_STEPS
        known = root.verifiable()
        return None if known is None else attribute_root(known, self.recording, 0, steps)


# -- prompt --------------------------------------------------------------------------------------------------


def check_prompt(check: Checking) -> None:
    """Tokens read as the tokenizer has them; the text gives these tokens; the architecture is the model's."""
    circuit, model, ledger = check.circuit, check.recording.model, check.ledger
    if circuit.model.architecture is not None:
        own = model.architecture.model_type
        ledger.require("model.architecture", "", in_file=circuit.model.architecture, measured=own)
    if circuit.prompt.importance is not None:
        ledger.skip("importance of tokens, which `headtrace matters` measures")
    if circuit.model.weights_sha256 is None:
        ledger.skip("whether the weights are those that were traced: the file has no hash of them")
    if circuit.model.computation_sha256 is None:
        ledger.skip(NOT_COMPARED)
    labels = model.token_labels(circuit.prompt.token_ids)
    agree = sum(a == b for a, b in zip(circuit.prompt.tokens, labels, strict=True))
    if model.tokenizer is None and 2 * agree < len(labels):  # else the file, too, was made without one
        ledger.skip("how tokens read: the model was loaded without a tokenizer")
        return
    listed = {"prompt.tokens": (circuit.prompt.tokens, labels)}
    for name in ("answer", "wrong"):
        ids, words = (getattr(circuit.root, key, None) for key in (name, f"{name}_tokens"))
        if ids and words is not None:
            listed[f"root.{name}_tokens"] = words, model.output_labels(ids)
    for name, (words, labels) in listed.items():
        if len(words) != len(labels):
            ledger.require(name, "", in_file=words, measured=labels)
        for i, (word, label) in enumerate(zip(words, labels, strict=False)):
            ledger.require(name if word == label else f"{name}[{i}]", "", in_file=word, measured=label)
    if circuit.prompt.text is not None and model.tokenizer is not None:
        _check_text(check, circuit.prompt.text)


def _check_text(check: Checking, text: str) -> None:
    """The text of the prompt gives its tokens."""
    circuit, model, ledger = check.circuit, check.recording.model, check.ledger
    ids = list(circuit.prompt.token_ids)
    ids = ids[: len(ids) - len(circuit.root.answer_prefix)]
    readings = list(text_as_ids(model, text).values())
    if readings:
        measured = ids if ids in readings else readings[0]
        ledger.require("prompt.text", "", in_file=ids, measured=measured)
    else:
        ledger.require("prompt.text", "", in_file=text, measured="text that the tokenizer can read")


# -- method --------------------------------------------------------------------------------------------------


def check_method(check: Checking) -> None:
    """The options can be those of the method, and its rule is the one that the file names."""
    info, ledger, method = check.circuit.method, check.ledger, check.method
    if method is None:
        ledger.skip(f"weights, thresholds and flags: this headtrace does not know the method {info.name!r}")
    elif isinstance(info.tau, str) and info.tau not in (CUSTOM, *THRESHOLD_RULES):
        ledger.require("method.tau", "", in_file=info.tau, measured=type(method).rule)
    elif info.tau == CUSTOM:
        ledger.skip("thresholds: they came from a function of the user's (tau is 'custom')")


# -- nodes ---------------------------------------------------------------------------------------------------


def check_nodes(check: Checking) -> None:
    """Attention and threshold of every firing; nothing else has either."""
    ledger, method = check.ledger, check.method if check.rule_known else None
    for node in check.circuit.nodes:
        if node.kind != "head":
            for name in ("attention", "threshold"):
                ledger.require(name, node.name, in_file=getattr(node, name), measured=None)
            continue
        row, allowed = check.row(node.site.firing), check.attention_tolerance(node.site.firing)
        ledger.compare(
            "attention", node.name, in_file=node.attention, measured=row.attention, allowed=allowed
        )
        if method is not None:
            limit = method.threshold(row.n_visible, len(node.group or (node.src,)))
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
        signals = [e for e in causes if e.side in ATTENTION_SIDES and not e.alone]
        said = bool(signals or node.elsewhere or node.predicted)
        if not said and any(edge.side == "value" or edge.alone for edge in causes):
            continue  # expanded for what it moved, or for what it attends to in part
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
    row, allowed = check.row(f), check.attention_tolerance(f)
    if row.n_visible < 2:
        return False
    if node.group is not None:
        limit = method.threshold(row.n_visible, len(node.group))
        held = float(check.recording.attention.row(f.layer, 0, f.head, f.dest)[list(node.group)].sum())
        return None if abs(held - limit) <= allowed else held > limit
    low, high = (method.follows(f, row.attention + d, row.n_visible) for d in (-allowed, allowed))
    if high and f.layer == 0 and not check.expands_layer_0:
        return check.expands_layer_0
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
        what = "influence_kept: which values and MLPs the budget cut off is not in the file"
        ledger.skip(what, unless_traced=True)
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

    # As many firings as the budget allows were expanded, and those that were not are what it does not allow.
    settings = circuit.method.settings or {}
    most, least = settings.get("max_firings"), settings.get("min_influence")
    expanded = sum(node.expanded for node in circuit.heads())
    if isinstance(most, int) and not isinstance(most, bool):
        ledger.require("max_firings", "", in_file=most, measured=max(most, expanded))
        if expanded == most:
            return
    elif "max_firings" not in settings:
        return  # another tool's file, with a budget that is not known
    for node in leaves:
        if followed[node.id]:
            small = isinstance(least, (int, float)) and (node.influence or 0.0) < least + allowed
            ledger.require("expanded", node.name, in_file=False, measured=not small)


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


def is_contrast(circuit: Circuit) -> bool:
    """Whether weights of content are differences from a counterfactual prompt, which the settings then name."""
    return (circuit.method.settings or {}).get("counterfactual") is not None


def check_root_edges(check: Checking) -> None:
    """What each seed contributes to the root."""
    circuit = check.circuit
    if is_contrast(circuit):
        check.ledger.skip(
            "weights of a contrast with a counterfactual prompt, as headtrace made them up to 0.2: contributions are"
        )
        return
    edges = {edge_name(circuit, edge): edge for edge in circuit.edges if edge.side == "root"}
    circuit.root.check_seeds(check, check.root, edges)


def claimed_sides(circuit: Circuit) -> Iterator[tuple[Node, AttentionSide]]:
    """Every side of every firing that something is said about."""
    for node in circuit.heads():
        sides = {edge.side for edge in circuit.edges_into(node) if not edge.alone}
        sides |= {"key"} if node.elsewhere else set()
        for side in ATTENTION_SIDES:
            if side in sides or (node.predicted or {}).get(side) is not None:
                yield node, side


def check_alone(check: Checking) -> None:
    """What each signal accounts for that was found by removing it alone: the attention of its head without it."""
    circuit = check.circuit
    for edge in circuit.edges:
        if not edge.alone or edge.side not in ATTENTION_SIDES:
            continue
        node = replace(circuit.node(edge.target), group=None)  # of its own source
        claim = SideClaim(check.recording, node, edge.side, (edge,), (Signal.of(circuit, edge),))
        left = claim.row.attention_with(claim.row.logits - claim.rows.sum(dim=0))
        check.ledger.compare(
            "weight",
            edge_name(circuit, edge),
            in_file=edge.weight,
            measured=claim.row.attention - float(left),
            allowed=2 * check.tolerance.attention(claim.size),
        )


def check_weights(check: Checking, claim: SideClaim) -> None:
    """What each signal of a side accounts for, by the rule of the method."""
    circuit, method = check.circuit, METHODS.get(check.circuit.method.name)
    if method is None or method.edge_weight is None or not claim.parts:
        return
    found = RULES[method.edge_weight](claim, check.tolerance)
    low, high = found.low.tolist(), found.high.tolist()
    for part, least, most in zip(claim.parts, low, high, strict=True):
        where = (
            edge_name(circuit, part)
            if isinstance(part, Edge)
            else f"{part.component} => key of {claim.node.name} (elsewhere)"
        )
        check.ledger.between(
            "weight", where, in_file=part.weight, low=least, high=most, allowed=found.allowed
        )
        if method.whole_heads:
            # SVT traces whole heads, each shown at the source that it attends to most.
            f = part if isinstance(part, CompetingKeySignal) else circuit.node(part.source)
            if f.layer is None or f.head is None or f.src is None:
                check.ledger.require("kind of the source", where, in_file="no head", measured="head")
                continue
            place = claim.firing.dest if claim.side == "query" else claim.firing.src
            attention = check.recording.attention.row(f.layer, 0, f.head, place)
            check.ledger.compare(
                "attention of the strongest source",
                where,
                in_file=float(attention[f.src]),
                measured=float(attention.max()),
                allowed=check.attention_tolerance(Firing(f.layer, f.head, place, f.src)),
            )
