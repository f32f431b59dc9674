"""What a circuit file says outside its graph, compared with the model: the prompt's tokens, the root, the method."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from headtrace.causal.claims import Row
from headtrace.causal.ledger import Ledger
from headtrace.causal.tolerance import Tolerance
from headtrace.errors import InputError
from headtrace.models.precision import exact
from headtrace.roots import Direction, Heads, Likelihood, LogitDifference
from headtrace.tracing.attribution import IG_STEPS
from headtrace.tracing.methods import METHODS, Method, make_method
from headtrace.tracing.roots import RootShares, root_shares
from headtrace.tracing.unhashed import same_weights
from headtrace.vocabulary import Firing, parse_head

if TYPE_CHECKING:
    from headtrace.circuits import Circuit, MethodInfo, Node
    from headtrace.models import Model, Recording

BUDGET = ("max_firings", "min_influence")
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

    @cached_property
    def method(self) -> Method | None:
        return method_of(self.circuit.method)

    @property
    def rule_known(self) -> bool:
        """Whether the threshold of every firing follows from the file: not where it was a function of the user's."""
        return self.method is not None and self.circuit.method.tau not in (CUSTOM, None)

    def method_for(self, node: Node) -> Method | None:
        """The method with the threshold that holds for a node."""
        if self.method is None or self.rule_known:
            return self.method
        return replace(self.method, tau=node.threshold) if node.threshold else None

    @cached_property
    def root(self) -> RootShares | None:
        """What the root is worth in the model; None where the file does not say what was read, or for heads."""
        root, steps = self.circuit.root, self.circuit.method.ig_steps or IG_STEPS
        if isinstance(root, Heads) or (isinstance(root, Direction) and root.vector is None):
            return None
        if isinstance(root, Likelihood) and not root.answer and root.support:
            root = Likelihood(root.support)  # which alternatives they are is a question of its own
        return root_shares(root, self.recording, 0, steps)


# -- prompt --------------------------------------------------------------------------------------------------


def check_prompt(check: Checking) -> None:
    """Tokens read as the tokenizer has them; the text gives these tokens; the architecture is the model's."""
    circuit, model, ledger = check.circuit, check.recording.model, check.ledger
    if circuit.model.architecture is not None:
        own = model.architecture.model_type
        ledger.require("model.architecture", "", in_file=circuit.model.architecture, measured=own)
    if same_weights(circuit.model, model) is None:
        ledger.skip("whether the weights are those that were traced: the file has no hash of them")
    labels = model.token_labels(circuit.prompt.token_ids)
    agree = sum(a == b for a, b in zip(circuit.prompt.tokens, labels, strict=True))
    if model.tokenizer is None and 2 * agree < len(labels):  # else the file, too, was made without one
        ledger.skip("how tokens read: the model was loaded without a tokenizer")
        return
    _check_words(ledger, "prompt.tokens", circuit.prompt.tokens, labels)
    for name in ("answer", "wrong"):
        ids, words = (getattr(circuit.root, key, None) for key in (name, f"{name}_tokens"))
        if ids and words is not None:
            _check_words(ledger, f"root.{name}_tokens", words, model.token_labels(ids))
    _check_text(check)


def _check_words(ledger: Ledger, name: str, words: tuple[str, ...], labels: tuple[str, ...]) -> None:
    """The first that is wrong, by its place."""
    if len(words) != len(labels):
        ledger.require(name, "", in_file=words, measured=labels)
    for i, (word, label) in enumerate(zip(words, labels, strict=False)):
        ledger.require(name if word == label else f"{name}[{i}]", "", in_file=word, measured=label)


def _check_text(check: Checking) -> None:
    circuit, model = check.circuit, check.recording.model
    text, ids, root = circuit.prompt.text, list(circuit.prompt.token_ids), circuit.root
    if text is None or model.tokenizer is None:
        return
    if isinstance(root, Likelihood) and root.continuation:  # its own tokens follow the prompt
        ids = ids[: len(ids) + 1 - len(root.answer)]
    readings = [found for bos in (None, True, False) if (found := _read(model, text, bos)) is not None]
    if not readings:
        check.ledger.skip("whether the prompt's text gives its tokens: the tokenizer does not take the text")
    elif ids not in readings:
        check.ledger.require("prompt.text", "", in_file=ids, measured=readings[0])
    else:
        check.ledger.checked["prompt.text"] += 1


def _read(model: Model, text: str, bos: bool | None) -> list[int] | None:
    try:
        return model.to_ids(text, bos=bos)
    except InputError:  # no such token, or words that the vocabulary does not hold
        return None


# -- root ----------------------------------------------------------------------------------------------------


def check_root(check: Checking) -> None:
    """Value and place of the root, and what it was asked with."""
    root, found, ledger = check.circuit.root, check.root, check.ledger
    if isinstance(root, Heads):
        _check_heads(check, root)
        return
    if found is None:
        ledger.skip("the root: the file does not hold the vector of its direction")
        return
    if root.position is not None:
        ledger.require("root.position", "", in_file=root.position, measured=found.root.position)
    allowed = check.tolerance.number(found.size)
    value = found.root.value or 0.0
    if isinstance(root, LogitDifference) and isinstance(found.root, LogitDifference):
        bias = found.root.bias or 0.0
        ledger.compare("root.bias", "", in_file=root.bias, measured=bias, allowed=allowed)
        if root.bias is None and root.value is not None:  # files of version 1 left the output's bias out
            value = min(value, value - bias, key=lambda each: abs(each - (root.value or 0.0)))
    if isinstance(root, Likelihood):
        allowed *= 2 * max(1, len(root.answer) if root.continuation else 1)  # a logit less a sum of them
        _check_support(check, root)
    ledger.compare("root.value", "", in_file=root.value, measured=value, allowed=allowed)


def _check_heads(check: Checking, root: Heads) -> None:
    last, attention = check.recording.lengths[0] - 1, check.recording.attention
    heads = list(dict.fromkeys(parse_head(name) for name in root.heads))
    if root.position is not None:
        check.ledger.require("root.position", "", in_file=root.position, measured=last)
    value, allowed = 0.0, 0.0
    for layer, head in heads:
        row = attention.row(layer, 0, head, last)
        src = int(row.argmax())
        value += float(row[src])
        allowed += check.attention_tolerance(Firing(layer, head, last, src))
    check.ledger.compare("root.value", "", in_file=root.value, measured=value, allowed=allowed)


def _check_support(check: Checking, root: Likelihood) -> None:
    """The alternatives are those that were named, or the likeliest; a continuation is what the prompt ends with."""
    ledger, ids = check.ledger, check.circuit.prompt.token_ids
    if root.continuation:
        tail = ids[len(ids) + 1 - len(root.answer) :]
        ledger.require("root.answer", "", in_file=root.answer[:-1], measured=tail)
        return
    if root.support is None:
        return
    if root.answer:
        ledger.require("root.support", "", in_file=root.support, measured=root.answer)
        return
    likely = exact(check.recording.last_logits()).log_softmax(-1)
    inside = likely[list(root.support)]
    allowed = 2 * check.tolerance.number(float(check.recording.last_logits().abs().max()))
    others = likely.clone()
    others[list(root.support)] = -float("inf")
    wrong = len(set(root.support)) != len(root.support) or bool(inside.min() < others.max() - allowed)
    if root.top_k is not None:
        wrong = wrong or len(root.support) != root.top_k
    if root.top_p is not None:
        total, least = float(inside.exp().sum()), float(inside.min().exp())
        wrong = wrong or total < root.top_p - allowed or total - least >= root.top_p + allowed
    best = likely.argsort(descending=True)[: len(root.support)].tolist()
    ledger.require("root.support", "", in_file=root.support, measured=tuple(best) if wrong else root.support)


# -- method --------------------------------------------------------------------------------------------------


def check_method(check: Checking) -> None:
    """The options can be those of the method, and its rule is the one that the file names."""
    info, ledger, method = check.circuit.method, check.ledger, check.method
    if method is None:
        ledger.skip(f"weights, thresholds and flags: this headtrace does not know the method {info.name!r}")
    elif isinstance(info.tau, str) and info.tau != CUSTOM:
        ledger.require("method.tau", "", in_file=info.tau, measured=type(method).rule)
    elif info.tau == CUSTOM:
        ledger.skip("thresholds: they came from a function of the user's (tau is 'custom')")
