"""Relations: each is what it says, each is found and named as a relation where it made a signal."""

from __future__ import annotations

from functools import cache
from random import Random

import numpy as np
import pytest

from headtrace.interpret import Lexical, Pair, ScoredSignal, SignalExamples
from headtrace.interpret.relations import RELATIONS, PairView
from headtrace.interpret.rules import Rules

WORDS = {
    "name": ["Mary", "John", "Paul", "Anna", "Peter", "Susan", "Kevin", "Laura", "Simon", "Alice"],
    "place": ["London", "Paris", "Berlin", "Texas", "Egypt", "Japan", "Rome", "Chile"],
    "number": ["12", "7", "345", "two", "seven", "nine"],
    "verb": ["walked", "gave", "took", "saw", "opened", "built", "found", "likes"],
    "noun": [
        "table",
        "lamps",
        "river",
        "stones",
        "letter",
        "garden",
        "windows",
        "bottle",
        "castle",
        "horses",
        "bread",
        "clouds",
    ],
    "function": ["the", "a", "of", "with", "to", "in"],
}


def _tokens(random: Random) -> list[str]:
    """A text of sentences with lists, brackets, quotations, lines, and words in pieces."""
    noun, name, verb = (
        lambda kind=kind: f" {random.choice(WORDS[kind])}" for kind in ("noun", "name", "verb")
    )

    def word() -> list[str]:
        kind = random.choice(list(WORDS))
        return [
            f" {random.choice(WORDS[kind])}",
            *([random.choice(("ish", "ness"))] if random.random() < 0.2 else []),
        ]

    found: list[str] = []
    while len(found) < 90:
        sentence = [random.choice((name(), " The", " A")), noun(), verb()]
        form = random.randrange(6)
        if form == 0:
            sentence += [noun(), ",", noun(), ",", noun(), random.choice((" and", " or")), noun()]
        elif form == 1:
            sentence += [" (", *word(), *word(), *word(), ")", *word()]
        elif form == 2:
            sentence += [' "', *word(), *word(), *word(), '"', *word()]
        elif form == 3:
            sentence += [random.choice((" is", " are", " was", " were")), *word(), *word()]
        else:
            sentence += [*word(), *word(), *word(), *word()]
        found += [*sentence, random.choice((".", "!", ".\n"))]
    return found


@cache
def _pairs() -> tuple[Pair, ...]:
    random, ids = Random(0), dict[str, int]()
    found: list[Pair] = []
    for number in range(60):
        tokens = _tokens(random)
        token_ids = tuple(ids.setdefault(token, len(ids)) for token in tokens)
        for dest in random.sample(range(20, len(tokens)), 12):
            # Near and far sources alike, so that every relation has pairs.
            sources = {*range(max(0, dest - 9), dest + 1), *random.sample(range(dest + 1), 12), 0}
            found += [
                Pair(f"text {number}", dest, src, 1.0, token_ids, tuple(tokens)) for src in sorted(sources)
            ]
    return tuple(found)


def _examples(holds: np.ndarray, seed: int = 0) -> SignalExamples:
    """A signal whose highest pairs are some of those for which something holds; the others are of all pairs."""
    random, pairs = Random(seed), _pairs()
    fitting = [pair for pair, fits in zip(pairs, holds, strict=True) if fits]
    top = random.sample(fitting, min(40, len(fitting)))
    signal = ScoredSignal("L0H0:0", 0, 0, "channel", (0,))
    return SignalExamples(signal, tuple(top), tuple(random.sample(pairs, 80)))


def _rules(examples: SignalExamples) -> Rules:
    words = Lexical().explain(examples)
    assert words is not None
    return Rules.from_dict(words.structure or {})


TOO_GENERAL = {
    "same_line",
    "source_new",
    "destination_repeated",
    "destination_new",
    "source_begins_word",
    "destination_begins_word",
}
"""True of so many pairs of these texts that nothing can tell them from random ones."""


@pytest.mark.parametrize("name", [name for name in RELATIONS if name not in TOO_GENERAL])
def test_a_planted_relation_is_named_as_a_relation(name: str) -> None:
    """Where another relation is named, it is true of the same pairs: of all that are planted, and of few others."""
    holds = RELATIONS[name].test(PairView(_pairs()))
    assert 40 <= holds.sum() < len(holds) / 2, "the texts have pairs of both kinds"
    found = _rules(_examples(holds))
    assert found.listed_sides == set(), str(found)
    said = found.holds(_pairs())
    assert said[holds].mean() >= 0.85, str(found)
    assert said[~holds].mean() <= 0.15, str(found)


@pytest.mark.parametrize(
    "both",
    [
        ("same_sentence", "source_continues_word"),
        ("same_class", "source_starts_sentence"),
        ("source_name", "destination_verb"),
    ],
)
def test_two_relations_together_are_named(both: tuple[str, str]) -> None:
    view = PairView(_pairs())
    holds = RELATIONS[both[0]].test(view) & RELATIONS[both[1]].test(view)
    assert holds.sum() >= 40
    found = _rules(_examples(holds))
    assert found.listed_sides == set()
    said = found.holds(view)
    assert said[holds].mean() >= 0.85, str(found)


def _hold(name: str, text: str, dest: str, src: str) -> bool:
    """Whether a relation is true of two words of a text, given by their last and first occurrence."""
    tokens = tuple(word if word in (",", ".") else f" {word}" for word in text.split("|"))
    ids = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    places = [place for place, token in enumerate(tokens) if token.strip() == dest]
    source = [place for place, token in enumerate(tokens) if token.strip() == src]
    pair = Pair("", places[-1], source[0], 1.0, tuple(ids[token] for token in tokens), tokens)
    return bool(RELATIONS[name].test(PairView([pair]))[0])


@pytest.mark.parametrize(
    ("name", "text", "true", "false"),
    [
        ("same_token", "a|cat|saw|a|dog", ("a", "a"), ("dog", "a")),
        ("after_same", "a|cat|saw|a", ("a", "cat"), ("a", "saw")),
        ("before_same", "one|cat|saw|a|cat", ("cat", "one"), ("cat", "saw")),
        ("source_new", "a|cat|saw|a|dog", ("dog", "saw"), None),
        ("same_brackets", "the|(|big|red|)|box", ("red", "big"), ("box", "big")),
        ("same_quotes", 'he|said|"|go|home|"|twice', ("home", "go"), ("twice", "go")),
        ("opens", "the|(|big|red|)|box", ("red", "("), ("box", "(")),
        ("source_first_of_list", "with|figs|,|pears|and|nuts|now", ("now", "figs"), ("now", "pears")),
        ("source_last_of_list", "with|figs|,|pears|and|nuts|now", ("now", "nuts"), ("now", "pears")),
        ("source_starts_sentence", "he|ran|.|she|sat|down", ("down", "she"), ("down", "ran")),
        ("same_sentence", "he|ran|.|she|sat|down", ("down", "she"), ("down", "ran")),
        ("same_class", "Mary|met|the|tall|John", ("John", "Mary"), ("John", "tall")),
        ("agreement", "the|dogs|near|table|are", ("are", "dogs"), ("are", "table")),
    ],
)
def test_a_relation_is_what_it_says(
    name: str, text: str, true: tuple[str, str], false: tuple[str, str] | None
) -> None:
    assert _hold(name, text, *true)
    if false is not None:
        assert not _hold(name, text, *false)
