"""What passes although it should not: words dealt to other signals, labels dealt to other pairs.

Words of another signal are right about this one if both look for the same thing, and many do. So the control is told
twice: over all signals, and over those that got words which *differ* from their own: no token, no kind of condition
and no shape in common (``differing``). The first says how special words are, the second must come out near the
false-discovery rate.

>>> from headtrace.interpret.rules import Condition, Rule, Rules
>>> def words(*conditions):
...     rules = Rules((Rule(conditions),))
...     return Description(str(rules), rules.to_dict())
>>> comma = words(Condition("source_token", ids=(5,), tokens=(",",)))
>>> near, next_to = words(Condition("distance", high=3)), words(Condition("distance", low=1, high=1))
>>> [differ(comma, near), differ(near, next_to), differ(comma, words(Condition("source_punctuation")))]
[True, False, False]
>>> differ(Description("Names of people."), Description("The source is a name of a town."))
False
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headtrace.interpret.judging import HeldOut, Judged, judge_all, letters
from headtrace.interpret.protocols import Description, Judge
from headtrace.interpret.rules import Rules
from headtrace.interpret.statistics import Counts, Proportion, discoveries, shuffled_places
from headtrace.progress import Progress

_SAID_OF_ALL = {"source", "destination", "token", "pair", "example", "text", "the", "and"}
"""Words that say nothing about a signal in particular."""


@dataclass(frozen=True)
class Exchange:
    """A signal judged by the words of another."""

    judged: Judged
    words_of: str
    """The signal that the words were found for."""
    differ: bool
    """Whether they have nothing in common with the signal's own."""

    def to_dict(self) -> dict[str, Any]:
        labels = {group: letters(self.judged.labels[group]) for group in ("top", "random")}
        told = {"id": self.judged.signal.id, "words_of": self.words_of, "differ": self.differ}
        return {**told, "status": self.judged.status, "p_value": self.judged.p_value, "labels": labels}


@dataclass(frozen=True)
class Controls:
    """What passes although it should not."""

    shuffled_words: Proportion
    """Signals that pass with the words of another signal. Signals that look for the same thing pass rightly."""
    different_words: Proportion
    """Of these, signals that got words which have nothing in common with their own: near the false-discovery rate."""
    shuffled_labels: Proportion
    """Signals that pass when their labels are dealt out at random: near none, whatever the words."""
    shared_words: Proportion
    """Signals whose words are those of another signal, too."""


def exchange_words(
    judge: Judge, judged: Sequence[Judged], held: Sequence[HeldOut], seed: int, progress: Progress | None
) -> list[Exchange]:
    """Every signal with words judged by the words of another; hard negatives are not asked about again."""
    words = [each.description for each in judged if each.description is not None]
    order = shuffled_places([each.text for each in words], seed)
    bare = [HeldOut(each.top, each.random) for each in held]
    signals, given = [each.signal for each in judged], [words[place] for place in order]
    found = judge_all(judge, signals, given, bare, seed, progress)
    return [
        Exchange(each, signals[place].id, differ(words[own], words[place]))
        for own, (each, place) in enumerate(zip(found, order, strict=True))
    ]


def measure_controls(judged: Sequence[Judged], exchanged: Sequence[Exchange], seed: int) -> Controls:
    """What passes. Signals without words count with p = 1, as they do in the interpretable fraction."""
    without = [1.0] * sum(each.status == "none" for each in judged)
    texts = [each.description.text for each in judged if each.description is not None]
    tested = [(each.judged.p_value, each.differ) for each in exchanged if each.judged.tested]
    dealt = [_dealt(each.counts, seed, place) for place, each in enumerate(judged) if each.tested]
    return Controls(
        shuffled_words=_passing([p_value for p_value, _ in tested] + without),
        different_words=_passing([p_value for p_value, differs in tested if differs]),
        shuffled_labels=_passing(dealt),
        shared_words=Proportion(sum(texts.count(text) > 1 for text in texts), len(texts)),
    )


def _passing(p_values: Sequence[float]) -> Proportion:
    return Proportion(sum(discoveries(p_values)), len(p_values))


def _dealt(counts: Counts, seed: int, place: int) -> float:
    """The p-value after the labels of a signal were dealt out at random to its pairs."""
    top = counts.true_positive + counts.false_negative
    yes, no = counts.true_positive + counts.false_positive, counts.false_negative + counts.true_negative
    hits = int(np.random.default_rng((seed, place)).hypergeometric(yes, no, top)) if top else 0
    return Counts(hits, top - hits, yes - hits, no - (top - hits)).p_value


def differ(one: Description, other: Description) -> bool:
    """Whether two descriptions have nothing in common: by their rules, or by their words where there are none."""
    (said, meant), (others, others_meant) = _themes(one), _themes(other)
    return not (said & others_meant or meant & others)


def _themes(words: Description) -> tuple[set[str], set[str]]:
    """What a description speaks of, and that together with what follows from it."""
    if words.structure is None:
        said = {each.rstrip("s") for each in re.findall(r"\w{3,}", words.text.lower())} - _SAID_OF_ALL
        return said, said
    said, meant = set[str](), set[str]()
    for rule in Rules.from_dict(words.structure).either:
        for condition in rule.conditions:
            said |= condition.themes
            meant |= condition.themes | condition.implied
    return said, meant
