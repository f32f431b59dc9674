"""Blind judging: half of a signal's pairs are never seen by the explainer, and a judge labels them among others.

The explainer sees one half of the highest and of the random pairs. The judge gets the other half, shuffled, without
scores, together with hard negatives: pairs that score in the middle, and the highest pairs of another channel of the
same head. How often the words hold for those is reported apart: words may be right about a head and yet not about
this channel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from zlib import crc32

import numpy as np

from headtrace.interpret.examples import Pair, ScoredSignal, SignalExamples
from headtrace.interpret.protocols import Description, Failure, Judge, Labels, Question
from headtrace.interpret.statistics import Counts
from headtrace.progress import Progress

LEAST_TOP = 8
"""A signal with fewer pairs above zero is not judged: half of them would say nothing."""
NOTHING = Counts()

Group = Literal["top", "random", "middle", "sibling"]
Status = Literal["described", "none", "failed", "too few"]


@dataclass(frozen=True)
class HeldOut:
    """What the explainer of a signal never sees, by kind."""

    top: tuple[Pair, ...]
    random: tuple[Pair, ...]
    middle: tuple[Pair, ...] = ()
    sibling: tuple[Pair, ...] = ()
    """The highest pairs of another channel of the same head, none of which is among this signal's own."""

    def pool(self) -> list[tuple[Group, Pair]]:
        groups: tuple[Group, ...] = ("top", "random", "middle", "sibling")
        return [(group, pair) for group in groups for pair in getattr(self, group)]


@dataclass(frozen=True)
class Judged:
    """A signal, its words, and what a judge made of them."""

    signal: ScoredSignal
    status: Status
    """``none``: the explainer found no words. ``failed``: there was no answer. ``too few``: few pairs above zero."""
    description: Description | None = None
    counts: Counts = NOTHING
    """Held-out highest pairs against random ones: this decides."""
    against_middle: Counts = NOTHING
    """The same highest pairs against those that score in the middle."""
    against_sibling: Counts = NOTHING
    """The same highest pairs against those of another channel of the head."""
    q_value: float | None = None
    supported: bool = False
    reason: str = ""
    """Why there are no words, where there are none."""
    examples: tuple[tuple[Pair, bool | None], ...] = ()
    """Held-out highest pairs, highest first, and whether the words hold there."""
    labels: Mapping[Group, Labels] = field(default_factory=dict[Group, Labels], hash=False)
    """Every label that the judge gave, by kind of pair: what the counts are counted from."""

    @property
    def p_value(self) -> float:
        """1 where there are no words."""
        return self.counts.p_value if self.status == "described" else 1.0

    @property
    def tested(self) -> bool:
        """Whether the signal counts: failures, and signals without examples, do not."""
        return self.status in ("described", "none")

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, as ``interpretation.json`` keeps it."""
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
    """Labels in a file: a letter each.

    >>> letters((True, False, None))
    'yn?'
    """
    return "".join("?" if label is None else "ny"[label] for label in labels)


def split(
    examples: SignalExamples, siblings: Iterable[SignalExamples] = (), seed: int = 0
) -> tuple[SignalExamples, HeldOut]:
    """What the explainer sees, and what it does not. Pairs of one text stay together where they can.

    There are no more hard negatives of a kind than there are highest pairs to tell from them.
    """
    random = _random(seed, examples.signal.id)
    above = [pair for pair in examples.top if pair.score > 0]
    top, held_top = _halves(above, random)
    own = {_place(pair) for pair in above}
    others, held_others = _halves([p for p in examples.random if _place(p) not in own], random)
    shown = replace(examples, top=tuple(top), random=tuple(others), middle=())
    middle = tuple(pair for pair in examples.middle if _place(pair) not in own)[: len(held_top)]
    sibling = _of_siblings(examples, siblings, own, len(held_top))
    return shown, HeldOut(tuple(held_top), tuple(held_others), middle, sibling)


def _random(seed: int, name: str) -> np.random.Generator:
    """The same for a signal in whatever company it is judged."""
    return np.random.default_rng((seed, crc32(name.encode())))


def _place(pair: Pair) -> tuple[str, int, int]:
    return pair.text, pair.dest, pair.src


def _halves(pairs: Sequence[Pair], random: np.random.Generator) -> tuple[list[Pair], list[Pair]]:
    """Two halves: whole texts by turns to the smaller one; pair by pair where that would leave one far behind."""
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


def _of_siblings(
    examples: SignalExamples, siblings: Iterable[SignalExamples], own: set[tuple[str, int, int]], most: int
) -> tuple[Pair, ...]:
    """The highest pairs of other channels of the head, by turns."""
    signal = examples.signal
    others = [
        [pair for pair in each.top if pair.score > 0 and _place(pair) not in own]
        for each in siblings
        if (each.signal.layer, each.signal.head) == (signal.layer, signal.head)
        and not set(each.signal.channels) & set(signal.channels)
    ]
    found: dict[tuple[str, int, int], Pair] = {}
    for rank in range(max(map(len, others), default=0)):
        for pairs in others:
            if rank < len(pairs) and len(found) < most:
                found.setdefault(_place(pairs[rank]), pairs[rank])
    return tuple(found.values())


def blind(description: Description, held_out: HeldOut, seed: int, name: str) -> tuple[Question, list[int]]:
    """The question as the judge gets it, without scores and in a random order, and that order."""
    pool = held_out.pool()
    order = _random(seed + 1, name).permutation(len(pool)).tolist()
    return Question(description, tuple(replace(pool[i][1], text="", score=0.0) for i in order)), order


def by_group(held_out: HeldOut, order: Sequence[int], labels: Labels) -> Mapping[Group, Labels]:
    """The labels put back in order, by kind of pair."""
    back: dict[int, bool | None] = dict(zip(order, labels, strict=True))
    found: dict[Group, list[bool | None]] = {"top": [], "random": [], "middle": [], "sibling": []}
    for place, (group, _) in enumerate(held_out.pool()):
        found[group].append(back[place])
    return {group: tuple(each) for group, each in found.items()}


def judge_all(
    judge: Judge,
    signals: Sequence[ScoredSignal],
    words: Sequence[Description],
    held_out: Sequence[HeldOut],
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Judged]:
    """Descriptions of signals, each judged by the pairs that its explainer did not see."""
    asked = [
        blind(text, held, seed, signal.id)
        for signal, text, held in zip(signals, words, held_out, strict=True)
    ]
    labels = judge.judge_all([question for question, _ in asked], progress)
    return [
        _judged(signal, text, held, by_group(held, order, each))
        for signal, text, held, (_, order), each in zip(signals, words, held_out, asked, labels, strict=True)
    ]


def _judged(
    signal: ScoredSignal, words: Description, held: HeldOut, labels: Mapping[Group, Labels]
) -> Judged:
    counts = Counts.of(labels["top"], labels["random"])
    missing = counts.failed > counts.labelled
    return Judged(
        signal,
        "failed" if missing else "described",
        words,
        counts,
        Counts.of(labels["top"], labels["middle"]),
        Counts.of(labels["top"], labels["sibling"]),
        reason="The judge did not answer for most of the pairs." if missing else "",
        examples=tuple(zip(held.top, labels["top"], strict=True)),
        labels=labels,
    )


def without_words(signal: ScoredSignal, found: Failure | None, held: HeldOut) -> Judged:
    """A signal whose explainer found nothing, or did not answer."""
    examples = tuple((pair, None) for pair in held.top)
    if found is None:
        why = "Nothing was found that tells its pairs from others."
        return Judged(signal, "none", reason=why, examples=examples)
    return Judged(signal, "failed", reason=found.reason, examples=examples)
