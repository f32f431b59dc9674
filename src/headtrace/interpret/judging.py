"""Do descriptions hold? Blind labels of pairs that the explainer did not see, in two corpora.

The explainer sees one half of the highest and of the random pairs of the first corpus. The judge gets the other half
and the pairs of a second corpus, shuffled, without scores, together with hard negatives: pairs that score in the
middle, and the highest pairs of other channels of the same head. How often a description holds for hard negatives is
reported separately: it may be right about a head and yet not about this channel. So is how well it tells the highest
pairs from others at the same distance: random pairs are mostly far apart, and words about distance alone pass.

>>> counts = Counts(true_positive=18, false_negative=2, false_positive=3, true_negative=17)
>>> counts.accuracy.value, counts.recall.value, round(counts.p_value, 7)
(0.875, 0.9, 1.7e-06)
>>> print(counts.precision)
0.857 [0.654, 0.950]
>>> counts.auroc, [round(end, 3) for end in counts.auroc_interval], round(counts.p_above, 3)
(0.875, [0.729, 0.936], 0.042)

`headtrace.interpret.verdicts` decides by these numbers which descriptions are supported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args
from zlib import crc32

import numpy as np

from headtrace.interpret.explainers import BlindQuestion, Description, Judge, Labels
from headtrace.interpret.rules import Rules
from headtrace.interpret.scored_signals import Pair, ScoredSignal, SignalExamples
from headtrace.progress import Progress
from headtrace.statistics import Proportion, difference_interval, difference_p_value

Group = Literal[
    "top",
    "random",
    "middle",
    "sibling",
    "same_distance",
    "second_top",
    "second_random",
    "second_same_distance",
]
GROUPS: tuple[Group, ...] = get_args(Group)
Status = Literal["described", "none", "failed", "too few"]
LEAST_AUROC = 0.75
"""What the lower end of the interval of the AUROC must be above, in both corpora."""
PER_HIGHEST = 2
"""How many pairs at the same distance are drawn for each of the highest."""


# -- What the explainer sees, and what is held out ---------------------------------------------------------------


@dataclass(frozen=True)
class HeldOut:
    """The pairs that the explainer of a signal never sees, by group."""

    top: tuple[Pair, ...]
    random: tuple[Pair, ...]
    middle: tuple[Pair, ...] = ()
    sibling: tuple[Pair, ...] = ()
    """The highest pairs of other channels of the same head, none of which is among this signal's own."""
    same_distance: tuple[Pair, ...] = ()
    """Pairs of other texts, each as far apart as one of the highest."""
    second_top: tuple[Pair, ...] = ()
    second_random: tuple[Pair, ...] = ()
    second_same_distance: tuple[Pair, ...] = ()
    """The pairs of the same signal in the second corpus."""

    def at_most(self, count: int | None) -> HeldOut:
        """At most so many pairs of each group, spread evenly over it; all of them for None."""
        if count is None:
            return self
        groups = {group: getattr(self, group) for group in GROUPS}
        places = {
            group: np.linspace(0, len(each) - 1, min(count, len(each))).round()
            for group, each in groups.items()
        }
        return HeldOut(
            **{group: tuple(each[int(i)] for i in places[group]) for group, each in groups.items()}
        )

    def pool(self) -> list[tuple[Group, Pair]]:
        return [(group, pair) for group in GROUPS for pair in getattr(self, group)]


def split(
    examples: SignalExamples,
    siblings: Iterable[SignalExamples] = (),
    seed: int = 0,
    second: SignalExamples | None = None,
) -> tuple[SignalExamples, HeldOut]:
    """What the explainer sees, and what is held out for the judge.

    Pairs of one text stay in one half where possible. ``second`` has the signal's pairs in another corpus, all of which
    are held out. There are at most as many hard negatives of a kind as there are highest pairs to tell from them.
    ``siblings`` may hold signals of any head; those that qualify are found.
    """
    signal = examples.signal
    # Not by its id: that has the hash of a file, which changes with rounding and with the version of headtrace.
    random = _generator(seed, f"{signal.name} {signal.side}")
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
    elsewhere = [pair for pair in second.top if pair.score > 0] if second is not None else []
    high = {pair.place for pair in elsewhere}
    low = [pair for pair in second.random if pair.place not in high] if second is not None else []
    held = HeldOut(
        top=tuple(held_top),
        random=tuple(held_others),
        middle=tuple(middle),
        sibling=tuple(sibling.values()),
        same_distance=at_same_distance(held_top, held_others, own, random),
        second_top=tuple(elsewhere),
        second_random=tuple(low),
        second_same_distance=at_same_distance(elsewhere, low, high, random),
    )
    return shown, held


def at_same_distance(
    pairs: Sequence[Pair],
    others: Sequence[Pair],
    left_out: Collection[tuple[str, int, int]],
    random: np.random.Generator,
) -> tuple[Pair, ...]:
    """Pairs as far apart as these, at random places in the contexts of ``others``.

    For each of ``pairs``, ``PER_HIGHEST`` are drawn, none of which has the first token as its source or is at a place
    that is ``left_out``. A distance that no context is long enough for is skipped.
    """
    found: dict[tuple[str, int, int], Pair] = {}
    for pair in pairs:
        distance = pair.dest - pair.src
        long_enough = [each for each in others if len(each.token_ids) > distance + 1]
        for _ in range(PER_HIGHEST if long_enough else 0):
            context = long_enough[int(random.integers(len(long_enough)))]
            dest = int(random.integers(distance + 1, len(context.token_ids)))
            drawn = replace(context, dest=dest, src=dest - distance, score=0.0)
            if drawn.place not in left_out:
                found.setdefault(drawn.place, drawn)
    return tuple(found.values())


def with_other_tokens(held: HeldOut, shown: SignalExamples, description: Description) -> HeldOut:
    """What is held out against words that may list tokens: pairs of tokens that the explainer did not see.

    A relation says nothing of tokens, and is tested on all that is held out. A list of tokens of one side is tested on
    pairs whose token of the other side is new: otherwise it could have been named for the tokens that it was seen with.
    Lists on both sides, and words without rules, are tested on pairs that are new as pairs.
    """
    listed = None if description.structure is None else Rules.from_dict(description.structure).listed_sides
    if listed == set():
        return held

    def tokens(pair: Pair) -> tuple[int, ...]:
        source, destination = pair.token_ids[pair.src], pair.token_ids[pair.dest]
        if listed == {"source"}:
            return (destination,)
        return (source,) if listed == {"destination"} else (source, destination)

    known = set(map(tokens, shown.top))
    return replace(held, top=tuple(pair for pair in held.top if tokens(pair) not in known))


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
    def auroc(self) -> float | None:
        """The area under the ROC curve of the labels: the mean of recall and of the share of others labelled no."""
        recall, alarms = self.recall.value, self.false_positive_rate.value
        return None if recall is None or alarms is None else (recall + 1 - alarms) / 2

    @property
    def auroc_interval(self) -> tuple[float, float]:
        """Its 95 % interval: Newcombe's, of the difference of two proportions."""
        low, high = difference_interval(*self._shares)
        return (1 + max(-1.0, low)) / 2, (1 + min(1.0, high)) / 2

    @property
    def p_above(self) -> float:
        """One-sided p that the AUROC is above ``LEAST_AUROC``: at 0.025 the interval ends there."""
        return difference_p_value(*self._shares, least=2 * LEAST_AUROC - 1)

    @property
    def _shares(self) -> tuple[tuple[int, int], tuple[int, int]]:
        recall, alarms = self.recall, self.false_positive_rate
        return (recall.count, recall.total), (alarms.count, alarms.total)

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
        low, high = self.auroc_interval
        auroc = {"value": self.auroc, "low": low, "high": high, "p_above": self.p_above}
        return {**vars(self), **proportions, "auroc": auroc, "p_value": self.p_value}


@dataclass(frozen=True)
class Judged:
    """A signal, its description, and the judge's labels."""

    signal: ScoredSignal
    status: Status
    """``none``: the explainer found nothing. ``failed``: there was no answer. ``too few``: few pairs above zero."""
    description: Description | None = None
    counts: Counts = field(default=Counts())
    """Held-out highest pairs against random ones, in the corpus that the explainer saw the other half of."""
    in_second: Counts = field(default=Counts())
    """Highest pairs against random ones in the second corpus. The verdict depends on these two."""
    against_middle: Counts = field(default=Counts())
    """The same highest pairs against those that score in the middle."""
    against_sibling: Counts = field(default=Counts())
    """The same highest pairs against those of other channels of the head."""
    against_same_distance: Counts = field(default=Counts())
    second_same_distance: Counts = field(default=Counts())
    """The highest pairs against others at the same distance, in each corpus: the verdict does not depend on it."""
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
        """That the AUROC is above 0.75 in both corpora: the larger of the two p. 1 where there is no description."""
        return max(self.counts.p_above, self.in_second.p_above) if self.status == "described" else 1.0

    @property
    def fisher_p(self) -> float:
        """That the description holds more often for high than for random pairs of the first corpus: a weak test."""
        return self.counts.p_value if self.status == "described" else 1.0

    @property
    def separates(self) -> bool:
        """Whether the lower end of the interval of the AUROC is above 0.75 in both corpora."""
        ends = (each.auroc_interval[0] for each in (self.counts, self.in_second))
        return self.status == "described" and all(low > LEAST_AUROC for low in ends)

    @property
    def beyond_distance(self) -> bool:
        """Whether the description tells the highest pairs from others at the same distance, in both corpora: the lower
        end of the interval of the AUROC is above one half."""
        ends = (each.auroc_interval[0] for each in (self.against_same_distance, self.second_same_distance))
        return self.status == "described" and all(low > 0.5 for low in ends)

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
            "fisher_p": self.fisher_p if self.tested else None,
            "against_random": self.counts.to_dict(),
            "in_second": self.in_second.to_dict(),
            "against_middle": self.against_middle.to_dict(),
            "against_sibling": self.against_sibling.to_dict(),
            "against_same_distance": self.against_same_distance.to_dict(),
            "second_same_distance": self.second_same_distance.to_dict(),
            "beyond_distance": self.beyond_distance,
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
    description: Description, held_out: HeldOut, seed: int, name: str, seen: SignalExamples | None = None
) -> tuple[BlindQuestion, list[int]]:
    """The question as the judge gets it, without scores and in a random order, and that order."""
    pool = held_out.pool()
    order = _generator(seed + 1, name).permutation(len(pool)).tolist()
    pairs = [pool[i][1] for i in order]
    known = [(pair, True) for pair in seen.top] + [(pair, False) for pair in seen.random] if seen else []
    blind = tuple((_blind(pair), high) for pair, high in known)
    return BlindQuestion(description, tuple(map(_blind, pairs)), blind), order


def _blind(pair: Pair) -> Pair:
    return replace(pair, text="", score=0.0)


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
    seen: Sequence[SignalExamples] | None = None,
) -> list[Judged]:
    """Judge the descriptions of signals, each by the pairs that its explainer did not see.

    ``seen`` has what the explainer saw, for judges that must find out what counts as a yes.
    """
    shown = [None] * len(signals) if seen is None else seen
    questions = [
        blind_question(description, held, seed, signal.id, each)
        for signal, description, held, each in zip(signals, descriptions, held_out, shown, strict=True)
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
                Counts.of(labels["second_top"], labels["second_random"]),
                Counts.of(labels["top"], labels["middle"]),
                Counts.of(labels["top"], labels["sibling"]),
                Counts.of(labels["top"], labels["same_distance"]),
                Counts.of(labels["second_top"], labels["second_same_distance"]),
                reason="The judge did not answer for most of the pairs." if missing else "",
                examples=tuple(zip(held.top, labels["top"], strict=True)),
                labels=labels,
            )
        )
    return found
