"""Why does this head attend here? One click, on a recording that is there: the model does not run again.

>>> import headtrace
>>> from headtrace.explorer.server.schemas import PromptRequest
>>> from headtrace.explorer.views.prompts import record
>>> model = headtrace.load("builtin")
>>> prompt = PromptRequest(text="When Mary and John went to the store, John gave a drink to")
>>> asked = WhyRequest(prompt=prompt, firing=FiringRequest(layer=2, head=0, dest=14, src=10))
>>> why = why_view(headtrace.Tracer(model), record(model, prompt), asked)
>>> why.query.explained, why.attention > why.threshold > (why.query.predicted or 0)
(True, True)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from headtrace.channels import Decomposition
from headtrace.errors import InputError
from headtrace.explorer.server.schemas import (
    CauseView,
    ChannelBar,
    Evidence,
    FiringRequest,
    MovedView,
    SideView,
    WhyRequest,
    WhyView,
)
from headtrace.explorer.views import snippets
from headtrace.explorer.views.prompts import given
from headtrace.models.frozen import CONTENT_FIELDS
from headtrace.tracing.causes import Cause, SideCauses
from headtrace.tracing.moved import moved
from headtrace.vocabulary import Firing

if TYPE_CHECKING:
    from headtrace.explorer.server.schemas import RootRequest
    from headtrace.models import Recording
    from headtrace.tracing import Tracer
    from headtrace.tracing.questions import Question


@runtime_checkable
class Known(Protocol):
    """What is known about channels: an atlas, an interpretation."""

    def channel(self, layer: int, head: int, channel: int) -> Evidence | None: ...


def why_view(
    tracer: Tracer, recording: Recording, request: WhyRequest, evidence: Known | None = None
) -> WhyView:
    """The channels and causes of one firing, what it moved, and what that contributed to a root."""
    firing = firing_of(request.firing)
    (causes,) = tracer.trace_firings(recording, [firing])
    found = tracer.model.decompose(recording, firing)
    tokens = recording.tokens()
    return WhyView(
        firing=request.firing,
        attention=found.attention,
        threshold=causes.threshold or 0.0,
        logit=found.logit,
        channels=_channels(found, evidence),
        remainder=found.remainder,
        query=_side(causes.query, tokens),
        key=_side(causes.key, tokens),
        moved=moved_view(tracer, recording, request),
        python=snippets.why_lines(tracer, request),
    )


def firing_of(request: FiringRequest) -> Firing:
    """A firing that was asked about."""
    return Firing(request.layer, request.head, request.dest, request.src)


def ask(tracer: Tracer, request: RootRequest, prompt: str | list[int], bos: bool | None) -> Question:
    """What is explained about a prompt."""
    return tracer.ask(prompt, bos=bos, **snippets.root_options(request))


def asked_about(tracer: Tracer, recording: Recording, question: Question) -> Recording:
    """The recording that a question is about: the one that is there, unless an answer of several tokens reads more."""
    ids = recording.token_ids[0].tolist()
    if question.ids == ids:
        return recording
    if question.ids[: len(ids)] != ids:
        raise InputError(
            "The recording is of another prompt than the one that is asked about. Record it first."
        )
    return tracer.model.record([question.ids], last_logits=question.logits_needed, keep=CONTENT_FIELDS)


def moved_view(tracer: Tracer, recording: Recording, request: WhyRequest) -> MovedView:
    """What the head moved. Only an answer of several tokens needs another pass: of the prompt with that answer."""
    root = None
    if request.root is not None:
        question = ask(tracer, request.root, given(request.prompt), request.prompt.bos)
        recording, root = asked_about(tracer, recording, question), question.root
    found = moved(recording, firing_of(request.firing), root)
    return MovedView(
        norm=found.norm,
        promotes=list(found.promotes),
        suppresses=list(found.suppresses),
        contribution=found.contribution,
        measure=found.measure,
    )


def _channels(found: Decomposition, evidence: Known | None) -> list[ChannelBar]:
    layer, head = found.firing.layer, found.firing.head
    return [
        ChannelBar(
            channel=term.channel,
            term=term.term,
            relative_term=term.relative_term,
            singular_value=term.singular_value,
            in_signal_set=term.in_signal_set,
            evidence=None if evidence is None else evidence.channel(layer, head, term.channel),
        )
        for term in found.top(len(found.terms))
    ]


def _side(side: SideCauses, tokens: Sequence[str]) -> SideView:
    causes = [_cause(cause, tokens) for cause in side.causes]
    return SideView(causes=causes, predicted=side.predicted, explained=side.explained)


def _cause(cause: Cause, tokens: Sequence[str]) -> CauseView:
    site = cause.site
    read = site.dest if site.src is None else site.src
    return CauseView(
        name=str(site),
        kind=site.kind,
        layer=site.layer,
        head=site.head,
        dest=site.dest,
        src=site.src,
        token="" if read is None else tokens[read],
        channels=list(cause.channels or ()),
        weight=cause.weight,
    )
