"""The panel of a recorded prompt: measures, patterns, the Python lines."""

from __future__ import annotations

import math

import pytest

from headtrace.errors import InputError
from headtrace.explorer.panels.prompts import (
    examples,
    head_pattern,
    pattern_bytes,
    record,
    server_view,
    spelled_root,
)
from headtrace.explorer.panels.requests import PromptRequest
from headtrace.roots import LogitDifference


def test_measures_are_those_of_each_pattern_counted_by_hand(session, recording, prompt) -> None:
    view = record(session, prompt)
    assert [(h.layer, h.head) for h in view.heads] == [(l, h) for l in range(3) for h in range(4)]
    for head in view.heads:
        rows = recording.patterns[head.layer, 0, head.head].double().tolist()
        later = range(1, len(rows))
        sink = sum(rows[d][0] for d in later) / len(later)
        before = sum(rows[d][d - 1] for d in later) / len(later)
        entropy = -sum(p * math.log2(p) for d in later for p in rows[d][: d + 1] if p > 0) / len(later)
        best = max(rows[d][s] for d in later for s in range(1, d + 1))
        assert (head.sink, head.previous, head.entropy) == pytest.approx((sink, before, entropy), abs=1e-5)
        dest, src, attention = head.strongest
        assert attention == pytest.approx(best) == pytest.approx(rows[dest][src])


def test_patterns_as_bytes_are_read_back_in_the_order_that_is_promised(session, recorded) -> None:
    layers, _, heads, length, _ = recorded.recording.patterns.shape
    found, at = pattern_bytes(session, recorded.id), 0
    for layer in range(layers):
        for head in range(heads):
            exact = head_pattern(session, recorded.id, layer, head).attention
            for dest in range(length):
                row = found[at : at + dest + 1]
                at += dest + 1
                assert [p / 255 for p in row] == pytest.approx(exact[dest], abs=0.5 / 255 + 1e-6)
    assert at == len(found)


def test_the_python_lines_record_the_same(session, prompt, run_lines) -> None:
    view = record(session, prompt)
    names = run_lines(view.python)
    again = names["recording"].top_answers(10)
    assert [a.id for a in view.answers] == [number for _, number, _ in again]
    assert [a.probability for a in view.answers] == pytest.approx([p for *_, p in again], rel=1e-4)
    assert view.tokens == list(names["recording"].tokens())


@pytest.mark.parametrize("ids", [[2], [2, 7]])
def test_the_shortest_prompts_have_measures_and_an_address_of_their_own(session, ids) -> None:
    view = record(session, PromptRequest(tokens=ids, model=1))
    assert view.text is None
    assert view.token_ids == ids
    assert all(math.isfinite(n) for h in view.heads for n in (h.sink, h.entropy, h.previous))
    assert view.id != record(session, PromptRequest(tokens=ids)).id


def test_a_head_that_is_not_there_is_said_to_be_missing(session, recorded) -> None:
    with pytest.raises(InputError, match="no head L3H0"):
        head_pattern(session, recorded.id, 3, 0)


def test_examples_of_a_task_have_answers_and_counterfactuals(session) -> None:
    assert "ioi" in {task.name for task in server_view(session).tasks}
    found = examples(session, "ioi", count=7, seed=3)
    assert len(found) == 7
    assert all(e.answer in f" {e.text}" and e.counterfactual != e.text for e in found)
    assert len(examples(session, "ioi", count=10_000)) == 300


@pytest.mark.parametrize("name", ["nothing", "../secret.jsonl", "/etc/secret.jsonl"])
def test_no_file_is_read_for_examples(session, name) -> None:
    with pytest.raises(InputError, match="no task"):
        examples(session, name)


def test_answers_that_are_pieces_of_characters_are_named_wherever_the_root_is(model) -> None:
    root = LogitDifference(answer=(5,), wrong=(7,), answer_tokens=("as it is",), wrong_tokens=("\ufffd",))
    (label,) = model.output_labels([7])
    named = spelled_root(model, root)
    assert (named.answer_tokens, named.wrong_tokens) == (("as it is",), (label,))
    assert "\ufffd" not in named.question()
