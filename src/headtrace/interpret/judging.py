"""Are descriptions right? Blind labels of pairs that the explainer did not see, verdicts on them, and controls.

The explainer sees one half of the highest and of the random pairs. The judge gets the other half, shuffled, without
scores, together with hard negatives: pairs that score in the middle, and the highest pairs of other channels of the
same head. How often a description holds for hard negatives is reported separately: it may be right about a head and
yet not about this channel.

>>> counts = Counts(true_positive=18, false_negative=2, false_positive=3, true_negative=17)
>>> counts.accuracy.value, counts.recall.value, round(counts.p_value, 7)
(0.875, 0.9, 1.7e-06)
>>> print(counts.precision)
0.857 [0.654, 0.950]

A description is supported if the judge labels the signal's highest pairs with it more often than random ones: Fisher's
exact test for each signal, then Benjamini-Hochberg over all of them at a false-discovery rate of 5 %.

Controls repeat the test with the descriptions of other signals, and with labels dealt to the pairs at random. The
description of another signal is rightly supported where both respond to the same thing, and many do. So that control
is reported twice: over all signals, and over those whose own description has nothing in common with the one they were
given (``differ``): no token, no kind of condition, no shape. The second must come out near the false-discovery rate.

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from zlib import crc32

import numpy as np

from headtrace.interpret.explainers import BlindQuestion, Description, Judge, Labels
from headtrace.interpret.rules import Rules
from headtrace.interpret.scored_signals import Pair, ScoredSignal, SignalExamples
from headtrace.progress import Progress
from headtrace.statistics import Proportion

Group = Literal["top", "random", "middle", "sibling"]
GROUPS: tuple[Group, ...] = ("top", "random", "middle", "sibling")
Status = Literal["described", "none", "failed", "too few"]
FALSE_DISCOVERY_RATE = 0.05
_STOP_WORDS = {"source", "destination", "token", "pair", "example", "text", "the", "and"}
"""Words that say nothing about a signal in particular."""


# -- What the explainer sees, and what is held out ---------------------------------------------------------------


@dataclass(frozen=True)
class HeldOut:
    """The pairs that the explainer of a signal never sees, by group."""

    top: tuple[Pair, ...]
    random: tuple[Pair, ...]
    middle: tuple[Pair, ...] = ()
    sibling: tuple[Pair, ...] = ()
    """The highest pairs of other channels of the same head, none of which is among this signal's own."""

    def pool(self) -> list[tuple[Group, Pair]]:
        return [(group, pair) for group in GROUPS for pair in getattr(self, group)]


def split(
    examples: SignalExamples, siblings: Iterable[SignalExamples] = (), seed: int = 0
) -> tuple[SignalExamples, HeldOut]:
    """What the explainer sees, and what is held out for the judge.

    Pairs of one text stay in one half where possible. There are at most as many hard negatives of a kind as there are
    highest pairs to tell from them. ``siblings`` may hold signals of any head; those that qualify are found.
    """
    signal, random = examples.signal, _generator(seed, examples.signal.id)
    positive = [pair for pair in examples.top if pair.score > 0]
    own = {pair.place for pair in positive}
    top, held_top = _halves(positive, random)
    others, held_others = _halves([pair for pair in examples.random if pair.place not in own], random)
    middle = [pair for pair in examples.middle if pair.place not in own][: len(held_top)]
    rivals = [
        [pair for pair in each.top if pair.score > 0 and pair.place not in own]
        for each in siblings
        if (each.signal.layer, each.signal.head) == (signal.layer, signal.head)
        and not set(each.signal.channels) & set(signal.channels)
    ]
    sibling: dict[tuple[str, int, int], Pair] = {}
    for rank in range(max(map(len, rivals), default=0)):  # the highest of each channel, then the next of each
        for pairs in rivals:
            if rank < len(pairs) and len(sibling) < len(held_top):
                sibling.setdefault(pairs[rank].place, pairs[rank])
    shown = replace(examples, top=tuple(top), random=tuple(others), middle=())
    return shown, HeldOut(tuple(held_top), tuple(held_others), tuple(middle), tuple(sibling.values()))


def _generator(seed: int, name: str) -> np.random.Generator:
    """Random numbers that depend on the signal alone, not on which others are judged with it."""
    return np.random.default_rng((seed, crc32(name.encode())))


def _halves(pairs: Sequence[Pair], random: np.random.Generator) -> tuple[list[Pair], list[Pair]]:
    """Two halves by whole texts, in turn to the smaller half; by single pairs if that leaves them very unequal."""
    texts: dict[str, list[Pair]] = {}
    for pair in pairs:
        texts.setdefault(pair.text, []).append(pair)
    groups = list(texts.values())
    halves: tuple[list[Pair], list[Pair]] = ([], [])
    for place in random.permutation(len(groups)):
        min(halves, key=len).extend(groups[place])
    if min(map(len, halves)) < 0.4 * len(pairs):
        order = random.permutation(len(pairs))
        halves = ([pairs[i] for i in order[::2]], [pairs[i] for i in order[1::2]])
    one, other = (sorted(half, key=lambda pair: -pair.score) for half in halves)
    return one, other


# -- Labels, counted ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counts:
    """Labels of a signal's highest pairs (positives) and of other pairs (negatives)."""

    true_positive: int = 0
    false_negative: int = 0
    false_positive: int = 0
    true_negative: int = 0
    failed: int = 0
    """Pairs without a label because the judge gave no answer: neither right nor wrong."""

    @classmethod
    def of(cls, top: Sequence[bool | None], others: Sequence[bool | None]) -> Counts:
        """From the labels of the highest pairs and of others; None is a failure."""
        return cls(
            true_positive=sum(label is True for label in top),
            false_negative=sum(label is False for label in top),
            false_positive=sum(label is True for label in others),
            true_negative=sum(label is False for label in others),
            failed=sum(label is None for label in (*top, *others)),
        )

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, name) + value for name, value in vars(other).items()))

    @property
    def labelled(self) -> int:
        """How many pairs got a label."""
        return self.true_positive + self.false_negative + self.false_positive + self.true_negative

    @property
    def accuracy(self) -> Proportion:
        """The fraction of labels that are right."""
        return Proportion(self.true_positive + self.true_negative, self.labelled)

    @property
    def precision(self) -> Proportion:
        """Of the pairs that fit the description, the fraction that are the signal's."""
        return Proportion(self.true_positive, self.true_positive + self.false_positive)

    @property
    def recall(self) -> Proportion:
        """Of the signal's pairs, the fraction that fit the description."""
        return Proportion(self.true_positive, self.true_positive + self.false_negative)

    @property
    def false_positive_rate(self) -> Proportion:
        """Of the other pairs, the fraction that fit the description."""
        return Proportion(self.false_positive, self.false_positive + self.true_negative)

    @property
    def p_value(self) -> float:
        """One-sided Fisher exact test: do the highest pairs fit the description more often than the others?"""
        from scipy import stats

        table = [[self.true_positive, self.false_negative], [self.false_positive, self.true_negative]]
        if not all(map(sum, table)):  # nothing to compare with
            return 1.0
        result: Any = stats.fisher_exact(table, alternative="greater")
        return min(1.0, float(result[1]))

    def to_dict(self) -> dict[str, Any]:
        """Counts, proportions with their intervals, and the p-value, as plain values."""
        proportions = {name: getattr(self, name).to_dict() for name in ("accuracy", "precision", "recall")}
        return {**vars(self), **proportions, "p_value": self.p_value}


@dataclass(frozen=True)
class Judged:
    """A signal, its description, and the judge's labels."""

    signal: ScoredSignal
    status: Status
    """``none``: the explainer found nothing. ``failed``: there was no answer. ``too few``: few pairs above zero."""
    description: Description | None = None
    counts: Counts = field(default=Counts())
    """Held-out highest pairs against random ones: the verdict depends on these."""
    against_middle: Counts = field(default=Counts())
    """The same highest pairs against those that score in the middle."""
    against_sibling: Counts = field(default=Counts())
    """The same highest pairs against those of other channels of the head."""
    q_value: float | None = None
    supported: bool = False
    reason: str = ""
    """Why there is no description, where there is none."""
    examples: tuple[tuple[Pair, bool | None], ...] = ()
    """Held-out highest pairs, highest first, and whether the description holds there."""
    labels: Mapping[Group, Labels] = field(default_factory=dict[Group, Labels], hash=False)
    """Every label that the judge gave, by group of pairs."""

    @property
    def p_value(self) -> float:
        """1 where there is no description."""
        return self.counts.p_value if self.status == "described" else 1.0

    @property
    def tested(self) -> bool:
        """Whether the signal counts: failures, and signals with too few examples, do not."""
        return self.status in ("described", "none")

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, as in ``interpretation.json``."""
        words = self.description
        return {
            "id": self.signal.id,
            "layer": self.signal.layer,
            "head": self.signal.head,
            "channels": list(self.signal.channels),
            "kind": self.signal.kind,
            "side": self.signal.side,
            "status": self.status,
            "reason": self.reason,
            "description": None if words is None else words.text,
            "structure": None if words is None or words.structure is None else dict(words.structure),
            "supported": self.supported,
            "p_value": self.p_value if self.tested else None,
            "q_value": self.q_value,
            "against_random": self.counts.to_dict(),
            "against_middle": self.against_middle.to_dict(),
            "against_sibling": self.against_sibling.to_dict(),
            "labels": {group: letters(each) for group, each in self.labels.items()},
            "examples": [
                {"text": pair.text, "marked": pair.excerpt(), "score": pair.score, "holds": label}
                for pair, label in self.examples
            ],
        }


def letters(labels: Labels) -> str:
    """Labels as they are written to files, a letter each.

    >>> letters((True, False, None))
    'yn?'
    """
    return "".join("?" if label is None else "ny"[label] for label in labels)


# -- Asking the judge --------------------------------------------------------------------------------------------


def blind_question(
    description: Description, held_out: HeldOut, seed: int, name: str
) -> tuple[BlindQuestion, list[int]]:
    """The question as the judge gets it, without scores and in a random order, and that order."""
    pool = held_out.pool()
    order = _generator(seed + 1, name).permutation(len(pool)).tolist()
    pairs = tuple(replace(pool[i][1], text="", score=0.0) for i in order)
    return BlindQuestion(description, pairs), order


def labels_by_group(held_out: HeldOut, order: Sequence[int], labels: Labels) -> Mapping[Group, Labels]:
    """The labels of a blind question in the original order of the pairs, by group."""
    unshuffled: dict[int, bool | None] = dict(zip(order, labels, strict=True))
    found: dict[Group, Labels] = dict.fromkeys(GROUPS, ())
    for place, (group, _) in enumerate(held_out.pool()):
        found[group] = (*found[group], unshuffled[place])
    return found


def judge_all(
    judge: Judge,
    signals: Sequence[ScoredSignal],
    descriptions: Sequence[Description],
    held_out: Sequence[HeldOut],
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Judged]:
    """Judge the descriptions of signals, each by the pairs that its explainer did not see."""
    questions = [
        blind_question(description, held, seed, signal.id)
        for signal, description, held in zip(signals, descriptions, held_out, strict=True)
    ]
    answers = judge.judge_all([question for question, _ in questions], progress)
    found: list[Judged] = []
    for signal, held, (question, order), answer in zip(signals, held_out, questions, answers, strict=True):
        labels = labels_by_group(held, order, answer)
        counts = Counts.of(labels["top"], labels["random"])
        missing = counts.failed > counts.labelled
        found.append(
            Judged(
                signal,
                "failed" if missing else "described",
                question.description,
                counts,
                Counts.of(labels["top"], labels["middle"]),
                Counts.of(labels["top"], labels["sibling"]),
                reason="The judge did not answer for most of the pairs." if missing else "",
                examples=tuple(zip(held.top, labels["top"], strict=True)),
                labels=labels,
            )
        )
    return found


# -- Verdicts ----------------------------------------------------------------------------------------------------


def q_values(p_values: Sequence[float]) -> list[float]:
    """Benjamini-Hochberg: for each test, the lowest false-discovery rate at which it passes."""
    if not p_values:
        return []
    from scipy import stats

    return [float(q) for q in stats.false_discovery_control(np.asarray(p_values, float), method="bh")]


def discoveries(p_values: Sequence[float], rate: float = FALSE_DISCOVERY_RATE) -> list[bool]:
    """Which tests pass at a false-discovery rate."""
    return [q <= rate for q in q_values(p_values)]


def with_verdicts(judged: Sequence[Judged]) -> list[Judged]:
    """The same signals with q-values and verdicts. A signal without a description counts with p = 1."""
    found = iter(q_values([each.p_value for each in judged if each.tested]))
    verdicts: list[Judged] = []
    for each in judged:
        q_value = next(found) if each.tested else None
        passes = q_value is not None and q_value <= FALSE_DISCOVERY_RATE and each.status == "described"
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
            "labels": {group: letters(self.judged.labels[group]) for group in ("top", "random")},
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


def exchange_words(
    judge: Judge, judged: Sequence[Judged], held: Sequence[HeldOut], seed: int, progress: Progress | None
) -> list[Exchange]:
    """Judge every signal that has a description by that of another, without hard negatives."""
    words = [each.description for each in judged if each.description is not None]
    order = shuffled_places([each.text for each in words], seed)
    bare = [HeldOut(each.top, each.random) for each in held]
    signals = [each.signal for each in judged]
    found = judge_all(judge, signals, [words[place] for place in order], bare, seed, progress)
    return [
        Exchange(each, signals[place].id, differ(words[own], words[place]))
        for own, (each, place) in enumerate(zip(found, order, strict=True))
    ]


def measure_controls(judged: Sequence[Judged], exchanged: Sequence[Exchange], seed: int) -> Controls:
    """What passes the controls. Signals without a description count with p = 1, as they do in the verdicts."""

    def passing(p_values: Sequence[float]) -> Proportion:
        return Proportion(sum(discoveries(p_values)), len(p_values))

    without = [1.0] * sum(each.status == "none" for each in judged)
    texts = [each.description.text for each in judged if each.description is not None]
    tested = [(each.judged.p_value, each.differ) for each in exchanged if each.judged.tested]
    dealt: list[float] = []
    for place, each in enumerate(judged):
        if each.tested:
            counts = each.counts
            top = counts.true_positive + counts.false_negative
            yes = counts.true_positive + counts.false_positive
            no = counts.labelled - yes
            random = np.random.default_rng((seed, place))
            hits = int(random.hypergeometric(yes, no, top)) if top else 0
            dealt.append(Counts(hits, top - hits, yes - hits, no - (top - hits)).p_value)
    return Controls(
        shuffled_words=passing([p_value for p_value, _ in tested] + without),
        different_words=passing([p_value for p_value, differs in tested if differs]),
        shuffled_labels=passing(dealt),
        shared_words=Proportion(sum(texts.count(text) > 1 for text in texts), len(texts)),
    )


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
