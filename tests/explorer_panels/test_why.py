"""The panel of one firing: channels, causes, what was moved, without running the model again."""

from __future__ import annotations

import pytest

from headtrace.errors import InputError
from headtrace.explorer.panels import Session
from headtrace.explorer.panels.requests import FiringRequest
from headtrace.explorer.panels.why import EvidenceView, WhyRequest, why
from headtrace.interpret import HeadRole

PLACE = FiringRequest(layer=1, head=2, dest=14, src=2)


def compare(view, names) -> None:
    why, channels, moved = names["why"], names["channels"], names["moved"]
    assert view.attention == pytest.approx(why.attention, rel=1e-5)
    assert view.threshold == why.threshold
    for side in ("query", "key"):
        ours, theirs = getattr(view, side), why.found.side(side)
        assert [c.name for c in ours.causes] == [str(c.site) for c in theirs.causes]
        assert [c.weight for c in ours.causes] == pytest.approx([c.weight for c in theirs.causes], abs=1e-5)
        assert ours.predicted == pytest.approx(theirs.predicted, abs=1e-5)
    assert {b.channel: b.term for b in view.channels} == pytest.approx(
        {c.channel: c.term for c in channels.top(1000)}, abs=1e-4
    )
    if moved.contribution is not None:
        assert view.moved.contribution == pytest.approx(moved.contribution, rel=1e-4)
    assert [t for t, _ in view.moved.promotes] == [t for t, _ in moved.promotes]
    assert view.moved.measure == moved.measure


@pytest.mark.parametrize("asked", [{}, {"answer": " Mary", "wrong": " John"}, {"answer": " Mary and John"}])
def test_the_python_lines_find_the_same_causes_and_contribution(session, recorded, run_lines, asked) -> None:
    view = why(session, WhyRequest(recording=recorded.id, firing=PLACE, **asked))
    assert sum(bar.term for bar in view.channels) + view.remainder == pytest.approx(view.logit, abs=1e-4)
    assert (view.moved.contribution is None) == (not asked)
    compare(view, run_lines(view.python))


def test_a_contribution_is_the_one_that_a_complete_circuit_shows(
    session, tracer, recorded, prompt, root
) -> None:
    circuit = tracer.trace(prompt.text, **root, paths="complete")
    heads = [node for node in circuit.heads() if node.contribution is not None]
    assert heads
    for node in heads[:6]:
        place = FiringRequest(layer=node.layer, head=node.head, dest=node.dest, src=node.src)
        view = why(session, WhyRequest(recording=recorded.id, firing=place, **root))
        assert view.moved.contribution == pytest.approx(node.contribution, rel=1e-4, abs=1e-5)


def test_the_model_does_not_run_again(session, recorded, root, monkeypatch) -> None:
    def fail(*_, **__):
        raise AssertionError("the model ran")

    monkeypatch.setattr(type(session.models[0].hf), "forward", fail)
    why(session, WhyRequest(recording=recorded.id, firing=PLACE, **root))


def test_every_cell_has_an_answer(session, recorded, root) -> None:
    for layer, head, dest, src in [(0, 0, 0, 0), (0, 3, 5, 5), (1, 2, 0, 0), (2, 3, 14, 14), (1, 0, 7, 3)]:
        place = FiringRequest(layer=layer, head=head, dest=dest, src=src)
        view = why(session, WhyRequest(recording=recorded.id, firing=place, **root))
        expected = float(recorded.recording.patterns[layer, 0, head, dest, src])
        assert view.attention == pytest.approx(expected, rel=1e-5)


def test_what_is_known_of_a_channel_stands_beside_it(model, prompt) -> None:
    class Book:
        def channel(self, layer: int, head: int, channel: int) -> EvidenceView | None:
            return EvidenceView(words=f"L{layer}H{head} c{channel}") if channel == 0 else None

        def roles(self, layer: int, head: int) -> tuple[HeadRole, ...]:
            return ()

    session = Session([model], atlas=Book())
    view = why(session, WhyRequest(recording=session.record(prompt).id, firing=PLACE))
    told = {bar.channel: bar.evidence for bar in view.channels}
    assert told[0] == EvidenceView(words="L1H2 c0")
    assert told[1] is None


def test_a_cell_outside_the_prompt_is_refused_with_its_place(session, recorded) -> None:
    place = FiringRequest(layer=2, head=1, dest=99, src=2)
    with pytest.raises(InputError, match="99->2 is outside the prompt"):
        why(session, WhyRequest(recording=recorded.id, firing=place))
