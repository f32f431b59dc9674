"""Which descriptions are supported, and how often one passes that should not.

A description is supported if it tells a signal's highest pairs from random ones in two corpora: the lower end of the
95 % interval of its AUROC is above 0.75 on the held-out pairs of the first and on the pairs of the second, and the
larger p of the two passes Benjamini-Hochberg over all signals at a false-discovery rate of 5 %.

Controls repeat this with the descriptions of other signals, and with labels dealt to the pairs at random. The
description of another signal is rightly supported where both respond to the same thing, and many do. So that control
is reported twice: over all signals, and over those whose own description has nothing in common with the one they were
given (``differ``): no token, no kind of condition, no class. That one and random labels may not come out above the
false-discovery rate; a run in which one does says so.

>>> discoveries([0.001, 0.02, 0.03, 0.9])
[True, True, True, False]
>>> from headtrace.interpret.rules import PairCondition, Rule
>>> def words(*conditions):
...     rules = Rules((Rule(conditions),))
...     return Description(str(rules), rules.to_dict())
>>> comma = words(PairCondition("source_token", ids=(5,), tokens=(",",)))
>>> near, next_to = words(PairCondition("distance", high=3)), words(PairCondition("distance", low=1, high=1))
>>> [differ(comma, near), differ(near, next_to), differ(comma, words(PairCondition("source_punctuation")))]
[True, False, False]
>>> differ(Description("Names of people."), Description("The source is a name of a town."))
False
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headtrace.interpret.explainers import Description
from headtrace.interpret.judging import Counts, Judged, letters
from headtrace.interpret.rules import Rules
from headtrace.statistics import Proportion, q_values

FALSE_DISCOVERY_RATE = 0.05
_STOP_WORDS = {"source", "destination", "token", "pair", "example", "text", "the", "and"}
"""Words that say nothing about a signal in particular."""


def discoveries(p_values: Sequence[float], rate: float = FALSE_DISCOVERY_RATE) -> list[bool]:
    """Which tests pass at a false-discovery rate."""
    return [q <= rate for q in q_values(p_values)]


def with_verdicts(judged: Sequence[Judged]) -> list[Judged]:
    """The same signals with q-values and verdicts. A signal without a description counts with p = 1."""
    found = iter(q_values([each.p_value for each in judged if each.tested]))
    verdicts: list[Judged] = []
    for each in judged:
        q_value = next(found) if each.tested else None
        passes = q_value is not None and q_value <= FALSE_DISCOVERY_RATE and each.separates
        verdicts.append(replace(each, q_value=q_value, supported=passes))
    return verdicts


# -- Controls ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exchange:
    """A signal judged by the description of another."""

    judged: Judged
    words_of: str
    """The id of the signal that the description was found for."""
    differ: bool
    """Whether it has nothing in common with the signal's own."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.judged.signal.id,
            "words_of": self.words_of,
            "differ": self.differ,
            "status": self.judged.status,
            "p_value": self.judged.p_value,
            "labels": {group: letters(labels) for group, labels in self.judged.labels.items() if labels},
        }


@dataclass(frozen=True)
class Controls:
    """How often a description passes that should not."""

    shuffled_words: Proportion
    """Signals that pass with the description of another. Signals that respond to the same thing pass rightly."""
    different_words: Proportion
    """The same over signals given a description that has nothing in common with their own."""
    shuffled_labels: Proportion
    """Signals that pass when their labels are dealt to the pairs at random: near none, whatever the description."""
    shared_words: Proportion
    """Signals whose description is that of another signal, too."""

    @property
    def above_rate(self) -> dict[str, Proportion]:
        """Controls that pass more often than the false-discovery rate allows, beyond chance.

        Words of another signal are not among them unless they have nothing in common: they may rightly pass.
        """
        tested = {"different_words": self.different_words, "shuffled_labels": self.shuffled_labels}
        return {name: each for name, each in tested.items() if each.interval[0] > FALSE_DISCOVERY_RATE}


def exchanges(judged: Sequence[Judged], words: Sequence[Description], order: Sequence[int]) -> list[Exchange]:
    """Signals that were judged by the words of others: ``judged[i]`` by ``words[order[i]]`` instead of ``words[i]``."""
    return [
        Exchange(each, judged[place].signal.id, differ(words[own], words[place]))
        for own, (each, place) in enumerate(zip(judged, order, strict=True))
    ]


def measure_controls(judged: Sequence[Judged], exchanged: Sequence[Exchange], seed: int) -> Controls:
    """What passes the controls. Signals without a description count with p = 1, as they do in the verdicts."""

    def passing(signals: Sequence[Judged]) -> Proportion:
        return Proportion(
            sum(each.supported for each in with_verdicts(signals)), sum(each.tested for each in signals)
        )

    without = [each for each in judged if each.status == "none"]
    texts = [each.description.text for each in judged if each.description is not None]
    dealt: list[Judged] = []
    for place, each in enumerate(judged):
        random = np.random.default_rng((seed, place))
        dealt.append(
            replace(each, counts=_dealt(each.counts, random), in_second=_dealt(each.in_second, random))
        )
    return Controls(
        shuffled_words=passing([each.judged for each in exchanged] + without),
        different_words=passing([each.judged for each in exchanged if each.differ]),
        shuffled_labels=passing(dealt),
        shared_words=Proportion(sum(texts.count(text) > 1 for text in texts), len(texts)),
    )


def _dealt(counts: Counts, random: np.random.Generator) -> Counts:
    """The same labels, dealt to highest and other pairs at random."""
    top = counts.true_positive + counts.false_negative
    yes = counts.true_positive + counts.false_positive
    no = counts.labelled - yes
    hits = int(random.hypergeometric(yes, no, top)) if top else 0
    return Counts(hits, top - hits, yes - hits, no - (top - hits))


def shuffled_places(texts: Sequence[str], seed: int = 0) -> list[int]:
    """A random order of descriptions in which as few signals as possible keep their own text.

    Each place that would keep the same text is swapped with one where both texts change.

    >>> shuffled_places(["a", "b", "c"], seed=3) != [0, 1, 2]
    True
    """
    order = np.random.default_rng(seed).permutation(len(texts)).tolist()
    for place, text in enumerate(texts):
        if texts[order[place]] != text:
            continue
        for other, own in enumerate(texts):
            if texts[order[other]] != text and texts[order[place]] != own:
                order[place], order[other] = order[other], order[place]
                break
    return order


def differ(one: Description, other: Description) -> bool:
    """Whether two descriptions have nothing in common: by their rules, or by their words if they have none."""
    (said, implied), (others_said, others_implied) = _themes(one), _themes(other)
    return not (said & others_implied or implied & others_said)


def _themes(description: Description) -> tuple[set[str], set[str]]:
    """What a description is about, and that together with what it implies."""
    if description.structure is None:
        words = {each.rstrip("s") for each in re.findall(r"\w{3,}", description.text.lower())}
        return words - _STOP_WORDS, words - _STOP_WORDS
    rules = Rules.from_dict(description.structure).either
    conditions = [condition for rule in rules for condition in rule.conditions]
    said = set[str]().union(*(each.themes for each in conditions))
    return said, said.union(*(each.implied for each in conditions))
