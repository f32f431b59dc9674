"""The panel of interventions: clean and changed beside each other, and the lines that compute the same."""

from __future__ import annotations

import pytest

from headtrace.errors import InputError
from headtrace.explorer.panels.changes import (
    ComponentIntervention,
    InterveneRequest,
    SignalIntervention,
    SiteRequest,
    intervene,
    text_of,
)
from headtrace.explorer.panels.requests import FiringRequest

HEADS = [
    ComponentIntervention(site=SiteRequest(kind="head", layer=1, head=h, dest=14, src=2)) for h in (2, 3)
]


def of_edge(circuit, edge, factor: float, reach: str) -> SignalIntervention:
    source, target = circuit.node(edge.source), circuit.node(edge.target)
    return SignalIntervention(
        source=SiteRequest(
            kind=source.kind, layer=source.layer, head=source.head, dest=source.dest, src=source.src
        ),
        target=FiringRequest(layer=target.layer, head=target.head, dest=target.dest, src=target.src),
        side=edge.side,
        channels=list(edge.channels),
        factor=factor,
        reach=reach,
    )


@pytest.mark.parametrize("answer", [" Mary", " Mary and John"])
def test_the_python_lines_change_the_same(session, tracer, recorded, prompt, run_lines, answer) -> None:
    circuit = tracer.trace(prompt.text, answer=" Mary", wrong=" John")
    local, everywhere = circuit.top(2)
    signals = [of_edge(circuit, local, 0.0, "local"), of_edge(circuit, everywhere, 2.0, "global")]
    interventions = [*HEADS, *signals]
    asked = InterveneRequest(recording=recorded.id, interventions=interventions, answer=answer, generate=3)
    view = intervene(session, asked)
    recording, changed = recorded.recording, session.recorded(view.changed.id).recording
    names = run_lines(view.python)
    again = names["changed"].top_answers(10)
    assert [a.id for a in view.changed.answers] == [number for _, number, _ in again]
    assert [a.probability for a in view.changed.answers] == pytest.approx([p for *_, p in again], rel=1e-3)
    assert tuple(text_of(tracer.model, ids) for ids in names["generated"]) == view.generated
    metric, longer = names["metric"], names["subject"]
    after = metric.of(names["rerun"](longer, names["changes"]))
    assert (view.metric.measure, view.metric.before) == (
        metric.name,
        pytest.approx(metric.of(longer), rel=1e-4),
    )
    assert view.metric.after == pytest.approx(after, rel=1e-3)
    for firing in view.firings:
        f = firing.firing
        assert firing.before == pytest.approx(float(recording.patterns[f.layer, 0, f.head, f.dest, f.src]))
        assert firing.after == pytest.approx(float(changed.patterns[f.layer, 0, f.head, f.dest, f.src]))
    assert len(view.firings) >= 3


def test_without_the_heads_that_move_mary_the_answer_is_another(session, recorded, root) -> None:
    view = intervene(session, InterveneRequest(recording=recorded.id, interventions=HEADS, **root))
    assert view.clean.answers[0].token == "Mary" != view.changed.answers[0].token
    assert view.metric.before > 0 > view.metric.after
    assert view.clean.id != view.changed.id
    assert view.generated is None
    changed = session.recorded(view.changed.id).recording
    assert changed.patterns.shape == recorded.recording.patterns.shape
    with pytest.raises(InputError, match="under interventions"):
        intervene(session, InterveneRequest(recording=view.changed.id, interventions=HEADS))


def test_without_interventions_the_recording_is_the_clean_one(session, recorded) -> None:
    view = intervene(session, InterveneRequest(recording=recorded.id, interventions=[]))
    assert view.changed.id == view.clean.id


def test_an_edge_of_another_kind_is_refused_in_words(session, recorded) -> None:
    site = ComponentIntervention(site=SiteRequest(kind="offset", layer=1, head=1, dest=3))
    with pytest.raises(InputError, match="writes nothing that can be changed"):
        intervene(session, InterveneRequest(recording=recorded.id, interventions=[site]))
