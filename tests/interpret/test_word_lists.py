"""Word classes with the lists of packages and without: a planted class is found with them, and a result says which."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np
import pytest

from headtrace.interpret import Lexical, Pair, ScoredSignal, SignalExamples, interpret_examples
from headtrace.interpret.relations import RELATIONS, PairView
from headtrace.interpret.rules import Rules
from headtrace.interpret.word_classes import (
    PACKAGES,
    WordLists,
    grammatical_number,
    installed,
    of_class,
    use_word_lists,
    word_lists,
)

RARE = {
    "name": ["Dolores", "Marguerite", "Wilma", "Clifton", "Ernest", "Lucille", "Rosa", "Leroy"],
    "place": ["Bhutan", "Kathmandu", "Zambia", "Lusaka", "Uruguay", "Montevideo", "Oman", "Fiji"],
    "verb": ["slept", "sang", "wove", "shaken", "sought", "forbade", "clung", "swam"],
}
"""Words of each class that are in no list of headtrace's own."""
OTHERS = [
    "lamp",
    "river",
    "stone",
    "letter",
    "garden",
    "bottle",
    "castle",
    "horse",
    "bread",
    "cloud",
    "green",
    "old",
]


@pytest.fixture(autouse=True)
def _afterwards_as_before() -> Iterator[None]:
    yield
    use_word_lists(None)


@pytest.fixture
def _with_packages() -> None:
    for package in PACKAGES.values():
        pytest.importorskip(package, reason="the extra words is not installed")
    use_word_lists(installed())


def _planted(seed: int = 0, first: int = 0) -> tuple[SignalExamples, list[Pair], np.ndarray]:
    """A signal that connects words of the same class, made without the relation: the class of each word is known."""
    random, ids = Random(seed), dict[str, int]()
    pairs: list[Pair] = []
    same: list[bool] = []
    for text in range(first, first + 60):
        kinds = [random.choice([*RARE, "other", "other", "other"]) for _ in range(40)]
        tokens = tuple(f" {random.choice(RARE.get(kind, OTHERS))}" for kind in kinds)
        token_ids = tuple(ids.setdefault(token, len(ids)) for token in tokens)
        for _ in range(40):
            src, dest = sorted(random.sample(range(40), 2))
            pairs.append(Pair(f"text {text}", dest, src, 1.0, token_ids, tokens))
            same.append(kinds[src] == kinds[dest] != "other")
    holds = np.array(same)
    top = random.sample([pair for pair, own in zip(pairs, same, strict=True) if own], 60)
    signal = ScoredSignal("L0H0:0", 0, 0, "channel", (0,))
    return SignalExamples(signal, tuple(top), tuple(random.sample(pairs, 120))), pairs, holds


@pytest.mark.usefixtures("_with_packages")
def test_a_planted_class_of_rare_words_is_named_with_the_packages():
    examples, pairs, holds = _planted()
    words = Lexical().explain(examples)
    assert words is not None
    found = Rules.from_dict(words.structure or {})
    assert "same class" in str(found)
    assert found.listed_sides == set()
    assert found.holds(pairs)[holds].mean() >= 0.95
    assert found.holds(pairs)[~holds].mean() <= 0.05
    (judged,) = interpret_examples([examples], second=[_planted(1, 60)[0]]).signals
    assert judged.supported


def test_without_the_packages_it_is_not_and_the_result_says_so():
    use_word_lists(WordLists())
    examples, pairs, holds = _planted()
    assert not RELATIONS["same_class"].test(PairView(pairs))[holds].any()
    found = interpret_examples([examples], second=[_planted(1, 60)[0]])
    assert not found.signals[0].supported
    assert found.settings["word_lists"] == dict.fromkeys(PACKAGES, "built in")
    assert (
        "names, places and verbs by short lists of headtrace's own (pip install '.[words]'" in found.summary()
    )


@pytest.mark.parametrize("missing", list(PACKAGES))
def test_each_missing_package_is_named_by_its_list_alone(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headtrace.interpret import word_classes as module

    for package in PACKAGES.values():
        pytest.importorskip(package, reason="the extra words is not installed")
    found = module.find_spec
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == PACKAGES[missing] else found(name))
    sources = installed.__wrapped__().sources()
    assert [name for name, source in sources.items() if source == "built in"] == [missing]
    assert all(sources[name].startswith(f"{PACKAGES[name]} ") for name in set(PACKAGES) - {missing})


@pytest.mark.usefixtures("_with_packages")
def test_results_name_the_packages_and_their_versions():
    found = interpret_examples([_planted()[0]])
    assert found.settings["word_lists"] == word_lists().sources()
    assert "built in" not in found.settings["word_lists"].values()
    assert "pip install" not in found.summary()


@pytest.mark.usefixtures("_with_packages")
def test_a_word_that_is_also_another_is_of_a_class_only_if_headtrace_lists_it():
    claimed = {
        (word, name)
        for word in (
            "Store",
            "Central",
            "Lake",
            "Man",
            "May",
            "Summer",
            "table",
            "building",
            "morning",
            "hundred",
        )
        for name in ("name", "place", "verb")
        if of_class(f" {word}", name)
    }
    assert claimed == set()
    assert of_class(" Grace", "name")
    assert of_class(" China", "place")
    assert of_class(" walk", "verb")


@pytest.mark.usefixtures("_with_packages")
@pytest.mark.parametrize(
    ("word", "number"),
    [("mice", 1), ("news", -1), ("horses", 1), ("horse", -1), ("slept", 0), ("quickly", 0)],
)
def test_plurals_are_those_of_the_lexicon(word: str, number: int) -> None:
    assert grammatical_number(f" {word}") == number
