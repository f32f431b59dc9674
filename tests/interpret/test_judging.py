"""Blind judging: halves that do not meet, questions that say nothing, failures and hard negatives kept apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from sklearn.metrics import roc_auc_score

from headtrace.interpret import Description, Explainer, Failure, Judge, Pair, interpret_examples
from headtrace.interpret.explainers import Explanation, Labels
from headtrace.interpret.judging import (
    LEAST_AUROC,
    PER_HIGHEST,
    Counts,
    blind_question,
    labels_by_group,
    split,
    with_other_tokens,
)
from headtrace.interpret.rules import PairCondition, Rule, Rules
from tests.interpret.made_up_signals import first, previous, same_token, signal_by, to_animal, two_corpora

BOTH = [
    two_corpora(rule, f"L{layer}H0:{channel}", seed=channel)
    for layer in (0, 1)
    for channel, rule in enumerate((same_token, previous, to_animal, first))
]
SIGNALS, SECOND = ([pair[corpus] for pair in BOTH] for corpus in (0, 1))


def _place(pair: Pair) -> tuple[str, int, int]:
    return pair.text, pair.dest, pair.src


def test_halves_do_not_meet_and_are_all_there():
    for examples in SIGNALS:
        shown, held = split(examples)
        assert not {_place(p) for p in shown.top} & {_place(p) for p in held.top}
        assert {_place(p) for p in (*shown.top, *held.top)} == {_place(p) for p in examples.top}
        assert min(len(shown.top), len(held.top)) >= 0.4 * len(examples.top)
        assert shown.middle == (), "hard negatives are not for the explainer"


def test_pairs_of_one_text_stay_on_one_side():
    shown, held = split(SIGNALS[1])
    assert not {pair.text for pair in shown.top} & {pair.text for pair in held.top}


def test_pairs_of_one_text_alone_are_split_all_the_same():
    examples = replace(SIGNALS[0], top=tuple(replace(pair, text="one") for pair in SIGNALS[0].top))
    shown, held = split(examples)
    assert abs(len(shown.top) - len(held.top)) <= 1


def test_a_pair_is_not_both_the_signals_own_and_a_negative():
    examples = replace(SIGNALS[0], random=SIGNALS[0].top[:10] + SIGNALS[0].random)
    shown, held = split(examples)
    own = {_place(pair) for pair in examples.top}
    assert not own & {_place(pair) for pair in (*shown.random, *held.random, *held.middle)}


def test_each_pair_at_the_same_distance_has_one_of_the_highest_to_match():
    for examples, second in zip(SIGNALS, SECOND, strict=True):
        _, held = split(examples, second=second)
        for high, drawn, contexts, own in (
            (held.top, held.same_distance, held.random, examples.top),
            (held.second_top, held.second_same_distance, held.second_random, second.top),
        ):
            assert len(high) < len(drawn) <= PER_HIGHEST * len(high), (
                "a place that is drawn twice counts once"
            )
            wanted = Counter(pair.dest - pair.src for pair in high)
            found = Counter(pair.dest - pair.src for pair in drawn)
            assert all(count <= PER_HIGHEST * wanted[distance] for distance, count in found.items())
            assert {pair.text for pair in drawn} <= {pair.text for pair in contexts}
            assert not set(map(_place, drawn)) & set(map(_place, own))
            assert all(0 < pair.src <= pair.dest < len(pair.token_ids) for pair in drawn)


def test_words_about_distance_alone_are_at_chance_against_pairs_at_the_same_distance():
    found = interpret_examples(SIGNALS[1:3], second=SECOND[1:3])  # the token before; any token to an animal
    near, animal = found.signals
    assert near.supported
    assert animal.supported
    for counts in (near.against_same_distance, near.second_same_distance):
        assert counts.auroc == 0.5
    assert not near.beyond_distance
    assert animal.beyond_distance
    assert found.beyond_distance.count == 1
    assert "Against pairs at the same distance: 1 of 2 supported words" in found.summary()
    table = found.table
    assert table["beyond_distance"].to_list() == [False, True]
    assert table["second_same_distance_auroc"].to_list()[0] == 0.5


def test_questions_are_blind_and_labels_find_their_way_back():
    _, held = split(SIGNALS[0], SIGNALS)
    question, order = blind_question(Description("x"), held, 0, "name")
    assert {(pair.score, pair.text) for pair in question.pairs} == {(0.0, "")}
    kinds = [held.pool()[i][0] for i in order]
    assert kinds != sorted(kinds), "shuffled"
    tops = {(pair.token_ids, pair.dest, pair.src) for pair in held.top}
    labels = tuple((pair.token_ids, pair.dest, pair.src) in tops for pair in question.pairs)
    assert all(labels_by_group(held, order, labels)["top"])


def test_siblings_are_other_channels_of_the_same_head():
    _, held = split(SIGNALS[0], SIGNALS)
    assert len(held.sibling) == len(held.top), "no more than there are pairs to tell from them"
    assert not {_place(pair) for pair in held.sibling} & {_place(pair) for pair in SIGNALS[0].top}
    lonely = [each for each in SIGNALS if each.signal.layer == 1]
    assert split(SIGNALS[0], lonely)[1].sibling == ()


@dataclass(frozen=True)
class Unreliable(Explainer):
    """Words for some, none for some, no answer for the rest."""

    name: ClassVar[str] = "unreliable"

    def explain(self, shown) -> Description | None:
        return None

    def explain_all(self, shown, progress=None) -> list[Explanation]:
        rules = {"any": [{"all": [{"feature": "same_token"}]}]}
        kinds = [Description("same", rules), None, Failure("no answer")]
        return [kinds[place % 3] for place in range(len(shown))]


@dataclass(frozen=True)
class Silent(Judge):
    name: ClassVar[str] = "silent"

    def judge(self, description: Description, pairs: Sequence[Pair]) -> Labels:
        return (None,) * len(pairs)


def test_failures_are_counted_apart_and_not_in_the_fraction():
    found = interpret_examples(SIGNALS, explainer=Unreliable())
    assert [each.status for each in found.signals[:3]] == ["described", "none", "failed"]
    assert found.failures["signals"] == 2
    assert found.fraction.total == 6
    assert found.signals[2].reason == "no answer"


def test_a_judge_that_never_answers_supports_and_denies_nothing():
    found = interpret_examples(SIGNALS, judge=Silent())
    assert found.fraction.total == 0
    assert {each.status for each in found.signals} == {"failed"}
    assert found.failures["signals"] == len(SIGNALS)


def test_a_signal_that_never_scores_above_zero_is_told_and_not_counted():
    below = tuple(replace(pair, score=-1.0) for pair in SIGNALS[0].top)
    found = interpret_examples([replace(SIGNALS[0], top=below), SIGNALS[1]])
    assert found.signals[0].status == "too few"
    assert "score high" in found.signals[0].reason
    assert found.fraction.total == 1
    assert "1 with fewer" in found.summary()


def test_a_signals_halves_do_not_depend_on_its_company():
    alone, among = interpret_examples(SIGNALS[:1]), interpret_examples(SIGNALS)
    assert alone.signals[0].counts == among.signals[0].counts


def test_fractions_are_told_by_layer_and_controls_are_near_none():
    found = interpret_examples(SIGNALS, second=SECOND)
    assert set(found.by_layer) == {0, 1}
    assert found.fraction.count == sum(each.count for each in found.by_layer.values()) == 8
    assert found.controls.shuffled_labels.count <= 1
    assert found.controls.different_words.count == 0 < found.controls.different_words.total
    assert found.controls.shared_words.count > 0, "both layers look for the same"


def test_noise_without_a_rule_is_not_interpretable():
    noise = [signal_by(lambda _: True, f"L0H{head}:0", seed=head) for head in range(20)]
    again = [signal_by(lambda _: True, f"L0H{head}:0", seed=head + 100) for head in range(20)]
    assert interpret_examples(noise, second=again).fraction.count == 0


def test_nothing_is_supported_by_one_corpus_alone():
    found = interpret_examples(SIGNALS)
    assert found.fraction.count == 0
    assert all(each.fisher_p < 0.001 for each in found.signals), "the weaker test passes all of them"


def test_words_that_hold_in_one_corpus_only_are_not_supported():
    """In the second corpus the same signals respond to something else."""
    found = interpret_examples(
        SIGNALS[:4],
        second=[replace(b, signal=a.signal) for a, b in zip(SIGNALS[:4], SECOND[1:5], strict=True)],
    )
    assert found.fraction.count == 0 < found.fraction.total


def test_forty_pairs_of_one_token_are_no_evidence():
    """One source token again and again with one destination: a list of them has no new pair to be tested on."""

    def cup(pair: Pair) -> bool:
        return pair.tokens[pair.src] == " cat" and pair.tokens[pair.dest] == " blorp"

    first, second = two_corpora(cup)
    found = interpret_examples([first], second=[second])
    words = found.signals[0].description
    assert words is not None
    assert words.structure is not None
    assert Rules.from_dict(words.structure).listed_sides
    assert not found.signals[0].supported
    assert found.signals[0].counts.recall.total == 0


@pytest.mark.parametrize("listed", [{"source"}, {"destination"}, {"source", "destination"}])
def test_words_that_list_tokens_are_tested_on_pairs_with_other_tokens(listed: set[str]):
    """A list of one side on pairs whose other side is new; of both, on pairs that are new."""
    rules = Rules(
        (Rule(tuple(PairCondition(f"{side}_token", ids=(2,), tokens=(" cat",)) for side in listed)),)
    )
    words = Description(str(rules), rules.to_dict())
    shown, held = split(signal_by(lambda pair: " cat" in (pair.tokens[pair.src], pair.tokens[pair.dest])))
    tested = with_other_tokens(held, shown, words)

    def others(pair: Pair) -> tuple[int, ...]:
        source, destination = pair.token_ids[pair.src], pair.token_ids[pair.dest]
        sides = {"source": source, "destination": destination}
        return tuple(sides[side] for side in sides if {side} != listed)

    known = set(map(others, shown.top))
    assert 0 < len(tested.top) < len(held.top)
    assert not known & set(map(others, tested.top))
    assert [pair for pair in held.top if others(pair) not in known] == list(tested.top)
    relation = Description(
        "The token before.", {"any": [{"all": [{"feature": "distance", "low": 1, "high": 1}]}]}
    )
    assert with_other_tokens(held, shown, relation) == held, "a relation says nothing of tokens"


def test_an_auroc_is_the_mean_of_both_rates_and_its_p_the_level_of_its_interval():
    counts = Counts(17, 3, 8, 72)
    assert counts.auroc == pytest.approx((17 / 20 + 72 / 80) / 2)
    low, high = counts.auroc_interval
    assert low < counts.auroc < high
    for hits in range(10, 21):
        counts = Counts(hits, 20 - hits, 8, 72)
        assert (counts.p_above < 0.025) == (counts.auroc_interval[0] > LEAST_AUROC)
    labels, truth = [1] * 17 + [0] * 3 + [1] * 8 + [0] * 72, [1] * 20 + [0] * 80
    assert roc_auc_score(truth, labels) == pytest.approx(Counts(17, 3, 8, 72).auroc)
