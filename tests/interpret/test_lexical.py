"""The words of ``lexical``: the rule that made a signal is found, nothing is found where there is none."""

from __future__ import annotations

import json

import pytest

from headtrace.errors import InputError
from headtrace.interpret import Description, Lexical, LiteralJudge, SignalExamples, lexical
from headtrace.interpret.rules import Rules
from tests.interpret.made_up_signals import (
    after_same,
    first,
    previous,
    punctuation_to_number,
    same_token,
    signal_by,
    to_animal,
)

PLANTED = {
    "same_token": same_token,
    "after_same": after_same,
    "distance": previous,
    "source_token": to_animal,
    "first": first,
}


def _features(description: Description | None) -> list[list[str]]:
    assert description is not None
    assert description.structure is not None
    return [[each["feature"] for each in rule["all"]] for rule in description.structure["any"]]


@pytest.mark.parametrize("feature", PLANTED)
def test_the_feature_that_made_a_signal_is_found(feature):
    found = _features(Lexical().explain(signal_by(PLANTED[feature])))
    assert found[0][0] == feature


def test_tokens_are_listed_only_where_that_is_clearly_better_than_a_relation(monkeypatch):
    """A list of one name separates a little better than "a name", of which these texts have two."""
    examples = signal_by(lambda pair: pair.tokens[pair.src] == " Mary")

    def lists() -> set[str]:
        found = Lexical().explain(examples)
        assert found is not None
        return Rules.from_dict(found.structure or {}).listed_sides

    assert lists() == set()
    monkeypatch.setattr(lexical, "MARGIN", 0.0)
    assert lists() == {"source"}


def test_conditions_on_both_sides_are_joined():
    found = Lexical().explain(signal_by(punctuation_to_number))
    (rule,) = _features(found)
    assert sorted(rule) == ["destination_punctuation", "source_number"]
    assert found is not None
    assert "the destination token is punctuation" in found.text.lower()
    assert "the source token is a number" in found.text.lower()


def test_two_things_at_once_are_told_as_either():
    found = Lexical().explain(signal_by(lambda pair: to_animal(pair) or previous(pair), seed=1))
    assert {each for rule in _features(found) for each in rule} == {"source_token", "distance"}


def test_no_words_where_nothing_separates():
    found = [Lexical().explain(signal_by(lambda _: True, seed=seed)) for seed in range(20)]
    assert sum(each is not None for each in found) <= 3


def test_too_few_examples_have_no_words():
    examples = signal_by(same_token)
    assert Lexical().explain(SignalExamples(examples.signal, examples.top[:3], examples.random)) is None


def test_fewer_words_are_chosen_where_they_do():
    found = Lexical(most=8).explain(signal_by(same_token))
    assert found is not None
    assert Rules.from_dict(found.structure or {}).cost == 1


def test_a_description_read_from_a_file_says_the_same():
    examples = signal_by(punctuation_to_number)
    words = Lexical().explain(examples)
    assert words is not None
    again = Description(words.text, json.loads(json.dumps(words.structure)))
    judge = LiteralJudge()
    assert judge.judge(again, examples.top) == judge.judge(words, examples.top)
    assert all(judge.judge(again, examples.top))


def test_the_same_examples_give_the_same_words():
    assert Lexical().explain(signal_by(to_animal)) == Lexical().explain(signal_by(to_animal))


@pytest.mark.parametrize(
    "damaged",
    [
        {},
        {"any": 3},
        {"any": [{"all": [{"feature": "x"}]}]},
        {"any": [{"all": [{"feature": "source_token"}]}]},
    ],
)
def test_damaged_rules_are_refused(damaged):
    with pytest.raises(InputError, match="not the rules"):
        Rules.from_dict(damaged)


def test_words_without_rules_cannot_be_applied_literally():
    with pytest.raises(InputError, match="--judge openai"):
        LiteralJudge().judge(Description("names"), ())


def test_options_are_checked():
    with pytest.raises(InputError, match="most=0"):
        Lexical(most=0)
