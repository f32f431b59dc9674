"""What a circuit file says outside its graph, compared with the model: the prompt's tokens, the root, the method."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from headtrace.causal.claims import Row
from headtrace.causal.ledger import Ledger
from headtrace.causal.tolerance import Tolerance
from headtrace.errors import InputError
from headtrace.tracing.attribute_root import RootAttribution, attribute_root
from headtrace.tracing.firing import IG_STEPS
from headtrace.tracing.methods import METHODS, Method, make_method
from headtrace.vocabulary import Firing

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
    if circuit.model.weights_sha256 is None:
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
    ids = ids[: len(ids) - len(root.answer_prefix)]
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
    """Value and position of the root, and the options that it was requested with."""
    check.circuit.root.check(check, check.root)


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
