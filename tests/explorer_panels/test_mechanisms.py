"""Starters, the question, and the mechanism with the heads and words that matter: what the library says, in parts."""

from __future__ import annotations

import base64
import os

import pytest
import torch

import headtrace
from headtrace.errors import InputError
from headtrace.explorer.panels import Session
from headtrace.explorer.panels.mechanisms import QuestionRequest, explain, question, thumbnail
from headtrace.explorer.panels.prompts import starter
from headtrace.explorer.panels.requests import FiringRequest, PromptRequest
from headtrace.explorer.panels.why import PairsRequest, WhyRequest, pairs
from headtrace.explorer.panels.why import why as why_of
from headtrace.interpret import HeadRole
from headtrace.mechanism import evidence
from headtrace.vocabulary import Firing
from tests.rounding import rounding
from tests.tiny import tiny_model

IOI = "When Mary and John went to the store, John gave a drink to"


def test_a_starter_is_answered_rightly_and_found_again_without_the_model(
    model, monkeypatch, tmp_path
) -> None:
    monkeypatch.setenv("HEADTRACE_CACHE", str(tmp_path))
    first = starter(Session([model]), "ioi")
    logits = model.end_logits([first.text])[0]
    answer = model.token_id(first.answer, prompt=first.text)
    assert first.right
    assert int(logits.argmax()) == answer
    assert first.probability == pytest.approx(
        float(logits.softmax(-1)[answer]), abs=rounding(torch.float32, 1000)
    )
    monkeypatch.setattr(type(model), "end_logits", lambda *_: pytest.fail("it was kept"))
    assert starter(Session([model]), "ioi") == first
    (kept,) = (tmp_path / "starters").iterdir()
    kept.write_text('{"text": "damaged"}')
    monkeypatch.undo()
    os.environ["HEADTRACE_CACHE"] = str(tmp_path)
    try:
        assert starter(Session([model]), "ioi") == first, "a damaged file is made anew"
    finally:
        del os.environ["HEADTRACE_CACHE"]


def test_a_model_without_a_tokenizer_has_no_starter() -> None:
    with pytest.raises(InputError, match="without a tokenizer"):
        starter(Session([tiny_model("llama")]), "ioi")


def test_the_question_is_the_one_that_why_chooses(session, recorded) -> None:
    found = question(session, QuestionRequest(recording=recorded.id))
    assert [each.token for each in found.answer] == ["Mary"]
    assert found.wrong is not None
    assert found.wrong.token == "John"
    assert found.answer[0].probability > 0.9 > found.wrong.probability
    assert question(session, QuestionRequest(recording=recorded.id, alone=True)).wrong is None
    other = question(session, QuestionRequest(recording=recorded.id, answer=" John"))
    assert (other.answer[0].token, other.wrong and other.wrong.token) == ("John", "Mary")
    with pytest.raises(InputError, match="goes with an answer"):
        question(session, QuestionRequest(recording=recorded.id, wrong=" John"))


def test_the_mechanism_is_that_of_the_library_and_comes_in_parts(session, recorded, model, run_lines) -> None:
    parts = []
    view, found = explain(session, QuestionRequest(recording=recorded.id), partial=parts.append)
    assert [part.stage for part in (*parts, view)] == ["run", "heads", "cards", "badges"]
    assert parts[1].mechanism is None
    assert parts[1].heads
    assert not any("measured" in step for step in parts[2].mechanism["steps"])
    expected = run_lines(view.python)["why"]
    assert found.sentence == expected.sentence
    assert found.steps == expected.steps
    assert found.test == expected.test
    matters = headtrace.importance(model, IOI)
    assert view.importance == list(matters.by_token())
    assert [word.mean for word in view.words] == [word.mean for word in matters.words]
    flows = {node.site: node.flow for node in expected.circuit.heads()}
    shown = sorted(map(abs, flows.values()), reverse=True)[: len(view.heads)]
    assert [abs(head.flow) for head in view.heads] == shown
    assert {head.step for head in view.heads} <= {None, *(step.id for step in found.steps)}
    copies = next(head for head in view.heads if head.role and "copies *Mary*" in head.role)
    assert copies.raises[0] == "Mary"
    assert "'Mary'" in view.python or "' Mary'" in view.python


def test_badges_of_a_long_prompt_come_one_by_one(session, recorded, monkeypatch) -> None:
    whole, found = explain(session, QuestionRequest(recording=recorded.id))
    monkeypatch.setattr(evidence, "TOKENS_AT_ONCE", 1)  # as if each step made a full batch
    parts = []
    view, again = explain(session, QuestionRequest(recording=recorded.id), partial=parts.append)
    cards = [part.mechanism["steps"] for part in parts if part.stage == "cards"]
    assert [sum("measured" in step for step in steps) for steps in cards] == [*range(len(found.steps))]
    for steps in cards:
        for step, last in zip(steps, view.mechanism["steps"], strict=True):
            assert step.get("measured") in (None, last["measured"]), "what was measured stays"
    within = rounding(torch.float32, 10_000)
    for step, alone in zip(found.steps, again.steps, strict=True):
        for name in ("before", "without", "random"):
            expected = getattr(step.measured, name)
            assert getattr(alone.measured, name) == pytest.approx(expected, abs=within)
    assert again.test is not None
    assert again.test.kept == pytest.approx(found.test.kept, abs=within)
    assert view.stage == whole.stage == "badges"


def test_each_head_says_what_it_does_in_the_prompt_and_what_it_does_over_a_corpus(model, prompt) -> None:
    known = HeadRole("induction", 0.5, 0.1)

    class Book:
        def channel(self, layer: int, head: int, channel: int) -> None:
            return None

        def roles(self, layer: int, head: int) -> tuple[HeadRole, ...]:
            return (known,) if layer == 1 else ()

    session, parts = Session([model], atlas=Book()), []
    recorded = session.record(prompt)
    view, found = explain(session, QuestionRequest(recording=recorded.id), partial=parts.append)
    steps = {head.site.firing: step.title for step in found.steps for head in step.heads}
    for part in (*parts, view):
        for row in part.heads:
            assert row.role, f"L{row.layer}H{row.head} at stage {part.stage}"
            assert [each.name for each in row.measured] == (["induction"] if row.layer == 1 else [])
    for row in view.heads:
        title = steps.get(Firing(row.layer, row.head, row.dest, row.src))
        assert title in (None, row.role)
    assert len({row.role for row in parts[0].heads}) > 1, "before anything is compared"


def test_heads_are_there_at_once_by_what_they_contribute_in_this_run(session, recorded) -> None:
    parts = []

    def stop(view) -> None:
        parts.append(view)
        raise InterruptedError

    with pytest.raises(InterruptedError):
        explain(session, QuestionRequest(recording=recorded.id), partial=stop)
    (first,) = parts
    asked = {"answer": " Mary", "wrong": " John", "recording": recorded.id}
    for head in first.heads[:4]:
        firing = FiringRequest(layer=head.layer, head=head.head, dest=head.dest, src=head.src)
        why = why_of(session, WhyRequest(firing=firing, **asked))
        assert head.attention == pytest.approx(why.attention, abs=rounding(torch.float32, 1000))
        assert why.moved.contribution == pytest.approx(head.flow, abs=rounding(torch.float32, 10_000))
    sizes = [abs(head.flow) for head in first.heads]
    assert sizes == sorted(sizes, reverse=True)
    assert all(head.src > 0 for head in first.heads)


def test_each_head_says_what_it_adds_straight_to_the_two_answers(session, recorded) -> None:
    parts = []
    view, found = explain(session, QuestionRequest(recording=recorded.id), partial=parts.append)
    first, within = parts[0], rounding(torch.float32, 10_000)
    asked = {"answer": " Mary", "wrong": " John", "recording": recorded.id}
    compared = 0
    for head in first.heads:
        firing = FiringRequest(layer=head.layer, head=head.head, dest=head.dest, src=head.src)
        assert head.logits is not None
        assert head.straight == pytest.approx(head.logits[0] - head.logits[1], abs=within)
        assert (head.straight == 0.0) == (head.dest < 14), "only the last token speaks"
        why = why_of(session, WhyRequest(firing=firing, **asked))
        assert why.moved.straight == list(zip(("Mary", "John"), head.logits, strict=True))
        assert ("straight at the logits" in why.sentence) == (head.dest == 14)
        if head.dest == 14:
            moved = why.moved
            said = dict([*moved.promotes, *moved.suppresses])
            for token, added in zip(("Mary", "John"), head.logits, strict=True):
                compared += token in said
                assert said.get(token, added) == pytest.approx(added, abs=within)
    assert compared, "a head of this run raises or lowers one of the two most"
    circuit = found.circuit
    edges = {circuit.node(edge.source).site.firing: edge for edge in circuit.edges if edge.side == "root"
             if circuit.node(edge.source).kind == "head"}  # fmt: skip
    assert edges
    for head in view.heads:
        edge = edges.get(Firing(head.layer, head.head, head.dest, head.src))
        assert (head.straight, head.logits) == ((edge.weight, edge.logits) if edge else (0.0, None))


def test_a_likelihood_is_explained_alone(session, recorded) -> None:
    view, found = explain(session, QuestionRequest(recording=recorded.id, alone=True))
    assert (view.answer, view.wrong, view.measure) == ("Mary", None, "log-likelihood")
    assert all(head.logits is None for head in view.heads)
    assert found.steps


def test_a_thumbnail_keeps_the_strongest_weight_of_each_pixel(model) -> None:
    recording = model.record([list(range(1, 61))], patterns="keep")
    small = torch.frombuffer(bytearray(base64.b64decode(thumbnail(recording, 1, 2))), dtype=torch.uint8)
    assert len(small) == 40 * 40
    pattern = recording.patterns[1, 0, 2]
    assert int(small.max()) == round(255 * float(pattern.max()))
    assert int(small[0]) == round(255 * float(pattern[:2, :2].max()))


def test_rather_than_and_pairs_add_up(session, recorded, run_lines) -> None:
    firing = FiringRequest(layer=2, head=1, dest=14, src=10)
    found = pairs(session, PairsRequest(recording=recorded.id, firing=firing, other=2))
    within = rounding(torch.float32, 1000)
    assert found.log_ratio is not None
    for terms, rest in ((found.query, found.query_rest), (found.key, found.key_rest)):
        assert sum(term.value for term in terms) + rest == pytest.approx(found.log_ratio, abs=within)
    assert sum(pair.value for pair in found.pairs) + found.remainder == pytest.approx(found.total, abs=within)
    assert run_lines(found.python)["why"].rather_than.log_ratio == pytest.approx(found.log_ratio, abs=within)
    alone = pairs(session, PairsRequest(recording=recorded.id, firing=firing))
    assert (alone.log_ratio, alone.query) == (None, [])
    assert alone.pairs


def test_a_long_prompt_is_changed_fewer_times(session) -> None:
    long = session.record(PromptRequest(tokens=[1 + i % 200 for i in range(60)]))
    view, _ = explain(session, QuestionRequest(recording=long.id))
    assert view.tried <= 100, "6,000 tokens in all"
    assert "budget=100" in view.python


def test_a_cause_has_set_what_a_head_does_only_if_it_is_most_of_it(session, recorded) -> None:
    """A head is named before MLPs; where its part is the smaller one, it has helped."""
    view, _ = explain(session, QuestionRequest(recording=recorded.id))
    asked, seen = {"answer": " Mary", "wrong": " John", "recording": recorded.id}, set()
    for head in view.heads:
        firing = FiringRequest(layer=head.layer, head=head.head, dest=head.dest, src=head.src)
        why = why_of(session, WhyRequest(firing=firing, **asked))
        for side, what in ((why.query, "what it looks for"), (why.key, "what it finds there")):
            if what in why.sentence:
                named = max(side.causes, key=lambda cause: (cause.kind == "head", cause.weight))
                most = named.weight >= sum(cause.weight for cause in side.causes) / 2
                assert (f"helped to set {what}" in why.sentence) == (not most)
                seen.add(most)
    assert seen == {True, False}
