"""Signals that score by a rule of one's choice over made-up text."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from random import Random

from headtrace.interpret import Pair, ScoredSignal, SignalExamples

KNOWN = (" the", " a", " cat", " dog", " Mary", " John", ",", ".", " 12", " 7", "ing", " ran", " saw", " and")
WORDS = (
    *KNOWN,
    *(f" {a}{b}" for a in ("bl", "gr", "tw", "sn") for b in ("orp", "ixt", "unk", "alm", "eft", "isp")),
)


def texts(count: int = 40, length: int = 24, seed: int = 0) -> list[tuple[int, ...]]:
    random = Random(seed)
    return [tuple(random.randrange(len(WORDS)) for _ in range(length)) for _ in range(count)]


@cache
def all_pairs(seed: int = 0) -> list[Pair]:
    return [
        Pair(f"text {number}", dest, src, 0.0, ids, tuple(WORDS[i] for i in ids))
        for number, ids in enumerate(texts(seed=seed))
        for dest in range(len(ids))
        for src in range(dest + 1)
    ]


@cache
def signal_by(
    holds: Callable[[Pair], bool], name: str = "L0H0:0", noise: float = 0.0, seed: int = 0
) -> SignalExamples:
    """Scores high where the rule holds; with ``noise``, that share of the highest pairs is any pair."""
    random = Random(f"{name} {seed}")
    pairs = all_pairs(seed)
    head, _, channel = name.partition(":")
    layer, number = (int(part) for part in head[1:].split("H"))
    fitting, others = [p for p in pairs if holds(p)], [p for p in pairs if not holds(p)]
    top = [random.choice(others if random.random() < noise else fitting) for _ in range(60)]
    scored = tuple(
        Pair(p.text, p.dest, p.src, 2.0 - i / 60, p.token_ids, p.tokens)
        for i, p in enumerate(dict.fromkeys(top))
    )
    signal = ScoredSignal(name, layer, number, "channel", (int(channel),))
    middle = tuple(random.sample(others, min(20, len(others))))
    return SignalExamples(signal, scored, tuple(random.sample(pairs, 120)), middle)


def two_corpora(
    holds: Callable[[Pair], bool], name: str = "L0H0:0", noise: float = 0.0, seed: int = 0
) -> tuple[SignalExamples, SignalExamples]:
    """The same signal in two corpora."""
    return signal_by(holds, name, noise, seed), signal_by(holds, name, noise, seed + 1000)


def same_token(pair: Pair) -> bool:
    return pair.src < pair.dest and pair.token_ids[pair.src] == pair.token_ids[pair.dest]


def previous(pair: Pair) -> bool:
    return pair.dest - pair.src == 1


def after_same(pair: Pair) -> bool:
    return 0 < pair.src <= pair.dest and pair.token_ids[pair.src - 1] == pair.token_ids[pair.dest]


def to_animal(pair: Pair) -> bool:
    return pair.tokens[pair.src] in (" cat", " dog")


def punctuation_to_number(pair: Pair) -> bool:
    return pair.tokens[pair.dest] in (",", ".") and pair.tokens[pair.src].strip().isdigit()


def first(pair: Pair) -> bool:
    return pair.src == 0
