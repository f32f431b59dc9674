"""The model as it is, and under interventions: attention, answers, a root's metric, a continuation.

>>> import headtrace
>>> from headtrace.explorer.server.schemas import ComponentIntervention, PromptRequest, RootRequest, SiteRequest
>>> from headtrace.explorer.views.prompts import record
>>> tracer = headtrace.Tracer(headtrace.load("builtin"))
>>> prompt = PromptRequest(text="When Mary and John went to the store, John gave a drink to")
>>> heads = [SiteRequest(kind="head", layer=1, head=head) for head in (2, 3)]
>>> asked = InterveneRequest(prompt=prompt, interventions=[ComponentIntervention(site=site) for site in heads])
>>> view, _ = intervene_view(tracer, record(tracer.model, prompt), asked)
>>> view.clean.answers[0].token, view.changed.answers[0].token
('Mary', 'John')
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headtrace.causal.changes import Change, ComponentChange, SignalChange
from headtrace.causal.execute import continued, rerun
from headtrace.causal.metric import metric_of
from headtrace.causal.signals import Signal
from headtrace.explorer.server.schemas import (
    FiringChange,
    FiringRequest,
    InterveneRequest,
    InterveneView,
    Intervention,
    MetricChange,
    SignalIntervention,
    SiteRequest,
)
from headtrace.explorer.views import snippets
from headtrace.explorer.views.prompts import given, record_view
from headtrace.explorer.views.why import ask, asked_about, firing_of
from headtrace.prompts.encoding import decoded
from headtrace.vocabulary import Firing, Site

if TYPE_CHECKING:
    from headtrace.models import Model, Recording
    from headtrace.tracing import Tracer


def intervene_view(
    tracer: Tracer, recording: Recording, request: InterveneRequest
) -> tuple[InterveneView, Recording]:
    """The clean recording beside a run with all interventions, and that run: without any, the recording itself."""
    model, index = tracer.model, request.prompt.model
    changes = [change_of(each) for each in request.interventions]
    changed = rerun(recording, changes) if changes else recording
    python = snippets.change_lines(tracer, request, changes)
    view = InterveneView(
        clean=record_view(model, recording, index, request.prompt),
        changed=record_view(model, changed, index, request.prompt, request.interventions, python),
        firings=_firings(recording, changed, changes),
        metric=_metric(tracer, recording, changed, changes, request),
        generated=_generated(recording, changes, request.generate),
        python=python,
    )
    return view, changed


def change_of(request: Intervention) -> Change:
    """An intervention as the library knows it."""
    if isinstance(request, SignalIntervention):
        component = _site(request.source).component
        signal = Signal(firing_of(request.target), request.side, component, tuple(request.channels))
        return SignalChange(signal, request.factor, request.reach)
    return ComponentChange(_site(request.site), request.factor)


def _site(request: SiteRequest) -> Site:
    return Site(request.kind, request.layer, request.head, request.dest, request.src)


def _firings(recording: Recording, changed: Recording, changes: Sequence[Change]) -> list[FiringChange]:
    """Attention of the firings that are named: those that read a signal, and those whose writing is changed."""
    named: dict[Firing, None] = {}
    for change in changes:
        if isinstance(change, SignalChange):
            named[change.signal.firing] = None
        elif change.site.kind == "head" and None not in (change.site.dest, change.site.src):
            named[change.site.firing] = None
    return [
        FiringChange(
            firing=FiringRequest(layer=f.layer, head=f.head, dest=f.dest, src=f.src),
            before=float(recording.attention.at(f.layer, 0, f.head, f.dest, f.src)),
            after=float(changed.attention.at(f.layer, 0, f.head, f.dest, f.src)),
        )
        for f in named
    ]


def _metric(
    tracer: Tracer,
    recording: Recording,
    changed: Recording,
    changes: Sequence[Change],
    request: InterveneRequest,
) -> MetricChange | None:
    """What the root measures. An answer of several tokens is read in passes of its own."""
    if request.root is None:
        return None
    question = ask(tracer, request.root, given(request.prompt), request.prompt.bos)
    subject = asked_about(tracer, recording, question)
    metric = metric_of(question.root, subject)
    if metric is None:
        return None
    after = changed if subject is recording else rerun(subject, changes)
    return MetricChange(measure=metric.name, before=metric.of(subject), after=metric.of(after))


def _generated(recording: Recording, changes: Sequence[Change], n: int) -> tuple[str, str] | None:
    if not n:
        return None
    clean = continued(recording, n)
    model = recording.model
    return text_of(model, clean), text_of(model, continued(recording, n, changes) if changes else clean)


def text_of(model: Model, ids: Sequence[int]) -> str:
    """Some tokens as text; without a tokenizer, their ids."""
    if model.tokenizer is None:
        return " ".join(model.token_labels(ids))
    return decoded(model.tokenizer, ids)
