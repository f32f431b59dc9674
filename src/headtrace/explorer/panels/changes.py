"""The panel of interventions: the model as it is beside the model with components or signals scaled.

>>> import headtrace
>>> session = Session([headtrace.load("builtin")])
>>> prompt = PromptRequest(text="When Mary and John went to the store, John gave a drink to")
>>> heads = [SiteRequest(kind="head", layer=1, head=head) for head in (2, 3)]
>>> removed = [ComponentIntervention(site=site) for site in heads]
>>> view = intervene(session, InterveneRequest(recording=session.record(prompt).id, interventions=removed))
>>> view.clean.answers[0].token, view.changed.answers[0].token
('Mary', 'John')
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from headtrace.causal.changes import Change, ComponentChange, SignalChange
from headtrace.causal.execute import continued, rerun
from headtrace.causal.metric import metric_of
from headtrace.causal.signals import Signal
from headtrace.errors import InputError
from headtrace.explorer.panels.prompts import ANSWERS, RecordingView, recording_view
from headtrace.explorer.panels.requests import (
    FiringRequest,
    Position,
    PromptRequest,
    Request,
    RootedRequest,
    View,
    python_lines,
)
from headtrace.explorer.panels.session import RecordedPrompt, Session
from headtrace.prompts.encoding import decoded
from headtrace.vocabulary import AttentionSide, Firing, Kind, Site

if TYPE_CHECKING:
    from headtrace.models import Model, Recording

MAX_INTERVENTIONS = 64
MAX_GENERATED = 50


class SiteRequest(Request):
    """A component at its position, as in a circuit file's nodes."""

    kind: Kind
    layer: Position | None = None
    head: Position | None = None
    dest: Position | None = None
    src: Position | None = None

    @property
    def site(self) -> Site:
        return Site(self.kind, self.layer, self.head, self.dest, self.src)


class SignalIntervention(Request):
    """An edge on a query or key side: the signal is multiplied by ``factor`` where its firing reads it (local), or
    wherever it is read (global)."""

    kind: Literal["signal"] = "signal"
    source: SiteRequest
    target: FiringRequest
    side: AttentionSide
    channels: Annotated[list[Position], Field(min_length=1, max_length=1_000)]
    factor: Annotated[float, Field(ge=-100, le=100)] = 0.0
    reach: Literal["local", "global"] = "local"

    @property
    def change(self) -> Change:
        source = self.source.site.component
        signal = Signal(self.target.firing, self.side, source, tuple(self.channels))
        return SignalChange(signal, self.factor, self.reach)


class ComponentIntervention(Request):
    """What a component writes at its position (of a head without ``src``: all that it writes at ``dest``; without
    ``dest``: everywhere) is multiplied by ``factor`` for every reader."""

    kind: Literal["component"] = "component"
    site: SiteRequest
    factor: Annotated[float, Field(ge=-100, le=100)] = 0.0

    @property
    def change(self) -> Change:
        return ComponentChange(self.site.site, self.factor)


Intervention = Annotated[SignalIntervention | ComponentIntervention, Field(discriminator="kind")]


class InterveneRequest(RootedRequest):
    """The model with these interventions, all at once, beside the model as it is."""

    interventions: Annotated[list[Intervention], Field(max_length=MAX_INTERVENTIONS)]
    generate: Annotated[int, Field(ge=0, le=MAX_GENERATED)] = 0
    """How many tokens to generate, greedily, without and with the interventions."""


class FiringChange(View):
    """Attention of a firing that an intervention names, before and after."""

    firing: FiringRequest
    before: float
    after: float


class MetricChange(View):
    """The root's metric, before and after."""

    measure: str
    before: float
    after: float


class InterveneView(View):
    """The model as it is, and under the interventions. ``changed`` has patterns like any recording."""

    clean: RecordingView
    changed: RecordingView
    firings: list[FiringChange]
    metric: MetricChange | None
    generated: tuple[str, str] | None
    """The generated text, without and with the interventions."""
    python: str


def intervene(session: Session, request: InterveneRequest) -> InterveneView:
    """Run the model with all interventions, and compare attention, answers, the root's metric and generated text."""
    recorded = session.clean(request.recording)
    prompt, recording = recorded.prompt, recorded.recording
    length, most = recording.lengths[0] + request.generate, session.settings.max_tokens
    if length > most:
        raise InputError(
            f"{recording.lengths[0]} tokens of the prompt and {request.generate} new ones are more than {most}. "
            "Generate fewer."
        )
    changes = [each.change for each in request.interventions]
    changed = recorded
    if changes:
        changed = RecordedPrompt(prompt, rerun(recording, changes), tuple(request.interventions))
        session.recordings.put(changed.id, changed)

    metric = None
    if request.has_root:
        resolved = session.resolve(request.trace_request(prompt), prompt.model)
        subject = session.subject(recorded, resolved)
        measured = metric_of(resolved.root, subject)
        if measured is not None:
            after = changed.recording if subject is recording else rerun(subject, changes)
            metric = MetricChange(
                measure=measured.name, before=measured.of(subject), after=measured.of(after)
            )

    generated = None
    if request.generate:
        clean_ids = continued(recording, request.generate)
        changed_ids = continued(recording, request.generate, changes) if changes else clean_ids
        generated = text_of(recording.model, clean_ids), text_of(recording.model, changed_ids)

    python = _python(recording.model, prompt, request, changes)
    return InterveneView(
        clean=recording_view(recorded),
        changed=recording_view(changed, python),
        firings=_firings(recording, changed.recording, changes),
        metric=metric,
        generated=generated,
        python=python,
    )


def _firings(recording: Recording, changed: Recording, changes: Sequence[Change]) -> list[FiringChange]:
    """Attention of the firings that read a changed signal, or whose writes are changed."""
    named: dict[Firing, None] = {}
    for change in changes:
        if isinstance(change, SignalChange):
            named[change.signal.firing] = None
        elif change.site.kind == "head" and None not in (change.site.dest, change.site.src):
            named[change.site.firing] = None
    return [
        FiringChange(
            firing=FiringRequest.model_validate(f),
            before=float(recording.attention.at(f.layer, 0, f.head, f.dest, f.src)),
            after=float(changed.attention.at(f.layer, 0, f.head, f.dest, f.src)),
        )
        for f in named
    ]


def text_of(model: Model, ids: Sequence[int]) -> str:
    """Tokens as text; without a tokenizer, their ids."""
    if model.tokenizer is None:
        return " ".join(model.token_labels(ids))
    return decoded(model.tokenizer, ids)


def _python(model: Model, prompt: PromptRequest, request: InterveneRequest, changes: Sequence[Change]) -> str:
    lines = [
        "recording = model.record(model.to_ids({prompt}))",
        "changes = [",
        *(f"    {change!r}," for change in changes),
        "]",
        "changed = rerun(recording, changes)",
        f"print(changed.top_answers({min(ANSWERS, model.d_output)}))",
    ]
    if request.has_root:
        lines += [
            "resolved = tracer.request({request}).resolve(model)",
            "subject = model.record(resolved.ids)",
            "metric = metric_of(resolved.root, subject)",
            "print(metric.name, metric.of(subject), metric.of(rerun(subject, changes)))",
        ]
    if request.generate:
        lines += [
            f"generated = [continued(recording, {request.generate}, these) for these in ([], changes)]",
            "print(*(model.token_labels(ids) for ids in generated), sep='\\n')",
        ]
    imports = (
        "from headtrace.causal import ComponentChange, Signal, SignalChange, continued, metric_of, rerun",
        "from headtrace.vocabulary import Component, Firing, Site",
    )
    return python_lines(request.trace_request(prompt), model, *lines, imports=imports)
