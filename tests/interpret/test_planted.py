"""Models whose heads attend by known features: the words name the feature, and a judge refuses other words."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from headtrace.interpret import Description, ScoredSignal, SignalExamples, interpret_examples, scan
from headtrace.interpret.judging import judge_all, split
from headtrace.interpret.lexical import LEAST_GAIN, Lexical, LiteralJudge
from headtrace.interpret.rules import Rules
from tests.interpret.planted import CLASS, KEPT, any_texts, of_known, scored, three_heads
from tests.truth.known import END, MARKER


def _conditions(examples: SignalExamples) -> list[dict[str, object]]:
    """The conditions of the first rule that is found in the half which the explainer sees."""
    words = Lexical().explain(split(examples)[0])
    assert words is not None
    assert words.structure is not None
    return words.structure["any"][0]["all"]


def _features(examples: SignalExamples) -> set[object]:
    return {each["feature"] for each in _conditions(examples)}


def test_a_previous_token_head_is_named():
    (condition,) = _conditions(of_known("induction", "L0H1"))
    assert condition == {"feature": "distance", "low": 1, "high": 1}


def test_an_induction_head_is_named():
    words = Lexical().explain(split(of_known("induction", "L1H0"))[0])
    assert words is not None
    assert words.structure is not None
    assert words.structure["any"] == [{"all": [{"feature": "after_same"}]}]


def test_a_duplicate_token_head_is_named():
    # The head rests on the first token where nothing is repeated: only texts' repeated tokens score high.
    assert "same_token" in _features(of_known("before repeat", "L0H1"))


def test_the_marker_before_the_source_is_named():
    conditions = {each["feature"]: each for each in _conditions(of_known("marked", "L2H2"))}
    assert conditions["before_source"]["ids"] == [MARKER]
    assert set(conditions) <= {"before_source", "destination_token"}
    if "destination_token" in conditions:
        assert conditions["destination_token"]["ids"] == [END]


def test_heads_built_for_this_are_named_by_their_features():
    model, texts = three_heads(), any_texts()
    same = Lexical().explain(split(scored(model, 0, 0, texts))[0])
    assert same is not None
    assert same.structure is not None
    assert same.structure["any"] == [
        {"all": [{"feature": "same_place"}]},
        {"all": [{"feature": "same_token"}]},
    ], "a head without positions finds its own token, too"
    assert _conditions(scored(model, 0, 1, texts))[0] == {"feature": "distance", "low": 1, "high": 1}


@pytest.mark.parametrize("kept", [40, 200])
def test_every_token_of_a_class_that_is_seen_often_enough_is_named(kept):
    """Each of the five is a fifth of the head's pairs and a twelfth of all pairs. Among the hundred that are shown of
    two hundred that difference is far above chance, and all are named; among twenty, one that chance shows twice is
    as rare as anywhere, and no honest reader could name it."""
    examples, complete = scored(three_heads(), 0, 2, any_texts(), kept=kept), 0
    for seed in range(1 if kept == KEPT else 5):
        shown, _ = split(examples, seed=seed)
        by_class = Lexical().explain(shown)
        assert by_class is not None
        assert by_class.structure is not None
        listed = {
            token
            for rule in by_class.structure["any"]
            for each in rule["all"]
            if each["feature"] == "source_token"
            for token in each["ids"]
        }
        seen = Counter(pair.token_ids[pair.src] for pair in shown.top)
        rare = {token for token in CLASS if seen[token] / len(shown.top) < 1 / 12 + LEAST_GAIN}
        assert set(CLASS) - rare <= listed <= set(CLASS)
        complete += listed == set(CLASS)
    assert kept == KEPT or complete > 0


PLANTED = (("induction", "L0H1"), ("induction", "L1H0"), ("before repeat", "L0H1"))
"""Heads that attend to the token before, by induction, and to an earlier occurrence of the same token."""


@pytest.fixture(scope="module")
def planted() -> list[SignalExamples]:
    return [replace(of_known(*each), signal=_as_layer(place)) for place, each in enumerate(PLANTED)]


@pytest.fixture(scope="module")
def elsewhere() -> list[SignalExamples]:
    """The same heads over other prompts."""
    return [replace(of_known(*each, seed=1), signal=_as_layer(place)) for place, each in enumerate(PLANTED)]


def _as_layer(number: int) -> ScoredSignal:
    """Heads of several models, as if they were of one."""
    return ScoredSignal(f"L{number}H0:0", number, 0, "channel", (0,))


def test_planted_words_are_supported_and_those_of_others_are_not(planted, elsewhere):
    found = interpret_examples(planted, second=elsewhere)
    assert all(each.supported for each in found.signals)
    for each in found.signals:
        assert each.description is not None
        assert Rules.from_dict(each.description.structure or {}).listed_sides == set(), "relations, not lists"
    assert found.controls.shuffled_words.count == found.controls.different_words.count == 0
    assert found.controls.shared_words.count == found.controls.shuffled_labels.count == 0
    assert found.controls.above_rate == {}


def test_a_channel_of_one_token_alone_is_not_put_into_words():
    """Each channel of a same-token head matches one token with itself: two such pairs are kept, too few to test."""
    model = three_heads()
    found = scan(model, "sampled:900", [f"L0H0:{channel}" for channel in range(12)], length=12)
    examples = [found.examples(signal) for signal in found.signals]
    words = interpret_examples(examples)
    assert {each.status for each in words.signals} == {"too few"}
    assert all(len(each.top) <= 2 for each in examples)


def test_the_judge_rejects_the_words_of_another_channel(planted):
    parts = [split(each) for each in planted]
    words = [Lexical().explain(shown) for shown, _ in parts]
    assert all(isinstance(each, Description) for each in words)
    wrong = [*words[1:], words[0]]
    held = [each for _, each in parts]
    judged = judge_all(LiteralJudge(), [each.signal for each in planted], wrong, held)  # type: ignore[arg-type]
    assert all(each.counts.p_above > 0.05 for each in judged)
