"""Circuits as tests: claims about a model that another one (fine-tuned, quantised, upgraded) must still bear out.

A claim is a prompt, something that can be measured there, and the least that is expected:

- ``answer``: the logit difference between the answer and the wrong one;
- ``attends``: the attention of a firing;
- ``carries``: what a firing contributes to the logit difference;
- ``step``: what the logit difference loses if the heads of a mechanism's step take what they had on another prompt;
- ``causal``: how much attention a firing loses if a component is taken out of its query or key (out of all channels,
  since channels are of one model's weights).

>>> import headtrace
>>> model = headtrace.load("builtin")
>>> prompt = "When Mary and John went to the store, John gave a drink to"
>>> circuit = headtrace.Tracer(model).trace(prompt, " Mary", " John")
>>> claims = make_claims(circuit, model)
>>> found = expect(claims, model)
>>> found.passed, found.first_broken
(True, None)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from headtrace.causal.changes import Intervention, edit
from headtrace.causal.difference_checks import patch_sets
from headtrace.causal.effects import choose_edges
from headtrace.causal.execute import run
from headtrace.causal.signals import ABLATE, Signal
from headtrace.errors import InputError
from headtrace.models.frozen import CONTENT_FIELDS
from headtrace.roots import LogitDifference
from headtrace.tables import html_table
from headtrace.tracing.content import moved
from headtrace.validation import parse, shown
from headtrace.vocabulary import ATTENTION_SIDES, KINDS, Component, Firing, Site
from headtrace.writing import write_report

if TYPE_CHECKING:
    import polars as pl

    from headtrace.circuits import Circuit
    from headtrace.models import Model, Recording

SCHEMA = "headtrace.claims/1"
ClaimKind = Literal["answer", "attends", "carries", "step", "causal"]
UNITS: dict[ClaimKind, str] = {
    "answer": "logit difference",
    "attends": "attention",
    "carries": "logit difference",
    "step": "logit difference lost",
    "causal": "attention lost",
}
KEPT = 0.5
"""The share of what a circuit shows that is expected of another model, unless another one is given."""


@dataclass(frozen=True)
class Claim:
    """One thing that is expected of a model."""

    kind: ClaimKind
    at_least: float
    """The least that is expected, in the unit of its kind."""
    tokens: tuple[int, ...]
    answer: tuple[int, ...] = ()
    wrong: tuple[int, ...] = ()
    firing: str | None = None
    """By positions: ``L9H6:14:3``, or ``L9H6 14->3``."""
    side: str | None = None
    source: tuple[str, int | None, int | None, int | None] | None = None
    """For ``causal``: kind, layer, head and source position of the component that is taken out."""
    firings: tuple[str, ...] = ()
    """For ``step``: its heads, by positions."""
    other: tuple[int, ...] = ()
    """For ``step``: the prompt that it is patched to, of as many tokens."""
    text: str | None = None
    """The prompt, for people; of a step, what it does."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(ClaimKind):
            raise InputError(
                f"There is no claim {shown(self.kind)}: choose {', '.join(get_args(ClaimKind))}."
            )
        if not isinstance(self.at_least, (int, float)) or isinstance(self.at_least, bool):
            raise InputError(f"at_least: expected a number, got {shown(self.at_least)}.")
        if not self.tokens or any(type(token) is not int for token in self.tokens):
            raise InputError(f"tokens: expected token ids, got {shown(list(self.tokens))}.")
        if self.kind not in ("answer", "step"):
            Firing.parse(self.firing or "")
        for firing in self.firings:
            Firing.parse(firing)
        if self.kind == "step" and not (self.firings and len(self.other) == len(self.tokens)):
            raise InputError(
                "A step needs its firings, and a second prompt with the same number of tokens: got "
                f"{len(self.firings)} firings, and {len(self.other)} tokens for {len(self.tokens)}."
            )
        if self.kind in ("answer", "carries", "step") and not (self.answer and self.wrong):
            raise InputError(f"A claim of the kind {self.kind!r} needs an answer and a wrong answer.")
        if self.kind == "causal" and (
            self.side not in ATTENTION_SIDES or self.source is None or self.source[0] not in KINDS
        ):
            raise InputError(
                "A causal claim needs a side (query or key) and a source (kind, layer, head, src), got "
                f"{shown(self.side)} and {shown(self.source)}."
            )

    @property
    def component(self) -> Component:
        """What is taken out."""
        assert self.source is not None
        return Component(*self.source)  # type: ignore[arg-type]

    def __str__(self) -> str:
        if self.kind == "answer":
            return "the answer is preferred"
        if self.kind == "step":
            return f"step: {self.text or ', '.join(self.firings)}"
        firing = str(Firing.parse(self.firing or ""))
        if self.kind == "causal":
            return f"{firing} attends because of {self.component} ({self.side})"
        return f"{firing} {'attends' if self.kind == 'attends' else 'carries the answer'}"


@dataclass(frozen=True)
class CheckedClaim:
    """A claim, and what a model shows."""

    claim: Claim
    measured: float

    @property
    def passed(self) -> bool:
        """Whether the model shows what is expected."""
        return self.measured >= self.claim.at_least

    @property
    def unit(self) -> str:
        """What is measured."""
        return UNITS[self.claim.kind]

    def __str__(self) -> str:
        verdict = "PASS" if self.passed else "FAIL"
        return (
            f"{verdict}  {self.claim}: {self.measured:.4g} (at least {self.claim.at_least:.4g} {self.unit})"
        )


@dataclass(frozen=True, repr=False)
class Expectations:
    """All claims of a file, put to one model."""

    model: str
    checked: tuple[CheckedClaim, ...]

    @property
    def passed(self) -> bool:
        """Whether all claims hold."""
        return all(each.passed for each in self.checked)

    @property
    def first_broken(self) -> CheckedClaim | None:
        """The first claim that does not hold, in the order of `ordered`: where a difference begins."""
        return next((each for each in self.checked if not each.passed), None)

    def frame(self) -> pl.DataFrame:
        """A row per claim: claim, kind, verdict, measured, at_least, unit."""
        import polars as pl

        rows = [
            (str(c.claim), c.claim.kind, "PASS" if c.passed else "FAIL", c.measured, c.claim.at_least, c.unit)
            for c in self.checked
        ]
        words = dict.fromkeys(("claim", "kind", "verdict"), pl.String)
        numbers = {"measured": pl.Float64, "at_least": pl.Float64, "unit": pl.String}
        return pl.DataFrame(rows, schema={**words, **numbers}, orient="row")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        broken = self.first_broken
        return {
            "model": self.model,
            "verdict": "PASS" if self.passed else "FAIL",
            "first_broken": None if broken is None else str(broken.claim),
            "claims": self.frame().to_dicts(),
        }

    def __repr__(self) -> str:
        good = sum(each.passed for each in self.checked)
        return f"Expectations({good} of {len(self.checked)} claims hold in {self.model!r})"

    def _repr_html_(self) -> str:
        rows = [tuple(map(str, row)) for row in self.frame().rows()]
        return html_table(self.frame().columns, rows, title=repr(self))

    def __str__(self) -> str:
        lines = [str(each) for each in self.checked]
        if self.first_broken is not None:
            lines.append(f"The first claim that broke: {self.first_broken.claim}")
        return "\n".join(lines)


def make_claims(circuit: Circuit, model: Model, *, kept: float = KEPT, most: int = 10) -> tuple[Claim, ...]:
    """Claims from a circuit of a logit difference: its answer, and the attention, contribution and causes of its
    most influential firings (``most`` of each); of a difference circuit also the steps of its mechanism. ``kept`` is
    the share of what the circuit's own model shows now that is expected."""
    root = circuit.root
    if not isinstance(root, LogitDifference) or not root.wrong:
        raise InputError(
            "Claims are made from the circuit of a logit difference: trace an answer and a wrong one."
        )
    if not 0 < kept <= 1:
        raise InputError(f"kept={kept}: the share that is expected is above 0, and 1 at most.")
    same: dict[str, Any] = {"tokens": circuit.prompt.token_ids, "text": circuit.prompt.text}
    asked: dict[str, Any] = {"answer": root.answer, "wrong": root.wrong}
    heads = sorted(circuit.heads(), key=lambda node: -(node.influence or 0.0))[:most]
    wanted = [Claim("attends", 0.0, firing=str(node.site.firing), **same) for node in heads]
    wanted += [Claim("carries", 0.0, firing=str(node.site.firing), **same, **asked) for node in heads]
    signals = [edge for edge in choose_edges(circuit, f"top:{most}") if edge.side in ATTENTION_SIDES]
    for edge in signals:
        target, source = circuit.node(edge.target).site, circuit.node(edge.source).site.component
        parts = (source.kind, source.layer, source.head, source.src)
        wanted.append(Claim("causal", 0.0, firing=str(target.firing), side=edge.side, source=parts, **same))
    if circuit.difference is not None:
        other = tuple(circuit.difference.prompts[0].token_ids)
        steps = [step for step in circuit.mechanism().steps if step.heads and not step.hidden]
        wanted += [
            Claim(
                "step",
                0.0,
                circuit.prompt.token_ids,
                firings=tuple(str(head.site.firing) for head in step.heads),
                other=other,
                text=step.title,
                **asked,
            )
            for step in steps[:most]
        ]
    wanted.append(Claim("answer", 0.0, **same, **asked))
    # What is zero or less says nothing that could be lost.
    measured = expect(wanted, model).checked
    return tuple(replace(each.claim, at_least=kept * each.measured) for each in measured if each.measured > 0)


def expect(claims: Sequence[Claim] | str | Path, model: Model) -> Expectations:
    """Put claims (or a file of them) to a model: one recording per prompt, and one run of what is taken out."""
    given = read_claims(claims) if isinstance(claims, (str, Path)) else list(claims)
    if not given:
        raise InputError("There are no claims to test.")
    given = ordered(given)
    prompts = list(dict.fromkeys(claim.tokens for claim in given))
    measured: dict[int, float] = {}
    for tokens in prompts:
        recording = model.record(list(tokens), keep=CONTENT_FIELDS)
        mine = [claim for claim in given if claim.tokens == tokens]
        for claim in mine:
            if claim.kind not in ("causal", "step"):
                measured[id(claim)] = _measure(claim, recording)
        steps = [claim for claim in mine if claim.kind == "step"]
        for asked in dict.fromkeys((claim.other, claim.answer, claim.wrong) for claim in steps):
            some = [claim for claim in steps if (claim.other, claim.answer, claim.wrong) == asked]
            measured |= dict(zip(map(id, some), _lost(some, model), strict=True))
        causal = [claim for claim in mine if claim.kind == "causal"]
        if causal:
            changes = [_removal(claim, recording) for claim in causal]
            after = run(recording, changes).attention.tolist()
            for claim, left in zip(causal, after, strict=True):
                measured[id(claim)] = _attention(claim, recording) - left
    return Expectations(model.name, tuple(CheckedClaim(claim, measured[id(claim)]) for claim in given))


def ordered(claims: Sequence[Claim]) -> list[Claim]:
    """Where heads attend and why, from the lowest layer up; then what firings carry, which depends on all above them,
    and the answer. So what breaks first is where a difference begins."""
    order: dict[ClaimKind, int] = {"attends": 0, "causal": 0, "carries": 1, "step": 1, "answer": 2}
    return sorted(
        claims, key=lambda c: (order[c.kind], 0 if c.firing is None else Firing.parse(c.firing).layer)
    )


def _attention(claim: Claim, recording: Recording) -> float:
    firing, _ = recording.find_firing(claim.firing or "")
    return float(recording.attention.at(firing.layer, 0, firing.head, firing.dest, firing.src))


def _measure(claim: Claim, recording: Recording) -> float:
    if claim.kind == "attends":
        return _attention(claim, recording)
    _require_tokens(claim, recording.model)
    root = LogitDifference(claim.answer, claim.wrong)
    if claim.kind == "answer":
        return float(root.difference(recording.last_logits()))
    return moved(recording, claim.firing or "", root).contribution or 0.0


def _lost(steps: Sequence[Claim], model: Model) -> list[float]:
    """What the logit difference loses if the heads of each step take what they had on the other prompt, for steps that
    are about the same prompts and answers."""
    first = steps[0]
    _require_tokens(first, model)
    sets = [
        [Site("head", f.layer, f.head, f.dest, f.src) for f in map(Firing.parse, claim.firings)]
        for claim in steps
    ]
    runs = model.record(list(first.tokens)), model.record(list(first.other))
    found = patch_sets(*runs, LogitDifference(first.answer, first.wrong), sets, draws=0)
    return [each.effect for each in found]


def _require_tokens(claim: Claim, model: Model) -> None:
    outside = [token for token in (*claim.answer, *claim.wrong) if not 0 <= token < model.d_vocab]
    if outside:
        raise InputError(f"Unknown token id {outside[0]}: {model.name!r} has 0 to {model.d_vocab - 1}.")


def _removal(claim: Claim, recording: Recording) -> Intervention:
    firing, _ = recording.find_firing(claim.firing or "")
    everything = tuple(range(recording.model.d_head))
    signal = Signal(firing, claim.side, claim.component, everything)  # type: ignore[arg-type]
    return Intervention((edit(recording, signal, ABLATE),), firing)


def save_claims(claims: Sequence[Claim], path: str | Path) -> Path:
    """Write a file of claims."""
    listed = [{k: v for k, v in asdict(claim).items() if v not in (None, ())} for claim in claims]
    write_report(Path(path), {"schema": SCHEMA, "claims": listed})
    return Path(path)


def read_claims(path: str | Path) -> list[Claim]:
    """Read a file of claims; an error names what is wrong in it."""
    try:
        data: Any = parse(Path(path).read_text(encoding="utf-8"), "a file of claims")
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read: {error.strerror or error}.") from None
    content = cast("dict[str, Any]", data) if isinstance(data, dict) else {}
    if content.get("schema") != SCHEMA or not isinstance(content.get("claims"), list):
        raise InputError(
            f"{str(path)!r} is not a file of claims ({SCHEMA}): make one with make_claims or expect."
        )
    listed: list[Any] = content["claims"]
    return [_claim(each, f"{str(path)!r}, claims[{number}]") for number, each in enumerate(listed)]


def _claim(data: Any, where: str) -> Claim:
    """A claim from its JSON form."""
    known = {each.name for each in fields(Claim)}
    if (
        not isinstance(data, dict)
        or not {"kind", "at_least", "tokens"} <= set(cast("dict[str, Any]", data)) <= known
    ):
        raise InputError(f"{where}: expected kind, at_least, tokens and some of {', '.join(sorted(known))}.")
    given = cast("dict[str, Any]", data)
    plain: dict[str, Any] = {
        k: tuple(cast("list[Any]", v)) if isinstance(v, list) else v for k, v in given.items()
    }
    try:
        return Claim(**plain)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
