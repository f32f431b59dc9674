"""What tells some token pairs from others: tokens and relations that are more frequent among them.

>>> top = [Place((5, 7, 5), 2, 0)] * 6
>>> rest = [Place((7, 7, 6), 2, 0)] * 10
>>> [(found.what, found.count) for found in relations_standing_out(top, rest, {5: " a", 6: " b", 7: "c"})][:1]
[('the same token', 6)]
>>> [(found.what, found.side) for found in tokens_standing_out(top, rest, {5: " a", 6: " b", 7: "c"})]
[(' a', 'dest'), (' a', 'src')]

The ratio of frequencies has half a pair added on either side, so that it stays finite. What occurs in fewer than three
of the pairs, or less than twice as often as elsewhere, does not stand out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from headtrace.interpret.examples import Pair
from headtrace.interpret.rules import Condition

FEWEST = 3
LEAST = 2.0


_SHAPES = {
    "capitalised": "begins with a capital",
    "number": "is a number",
    "punctuation": "is punctuation",
    "continues_word": "continues a word",
    "line_break": "has a line break",
}
_TOLD = {
    "itself": Condition("same_place"),
    "the same token": Condition("same_token"),
    "the token before": Condition("distance", low=1, high=1),
    "2 to 4 tokens before": Condition("distance", low=2, high=4),
    "more than 32 tokens before": Condition("distance", low=33),
    "right after an earlier occurrence": Condition("after_same"),
} | {
    f"{side} {words}": Condition(f"{side}_{shape}")
    for side in ("destination", "source")
    for shape, words in _SHAPES.items()
}
"""The conditions of ``rules.py`` that are looked for, and what they are called in a table."""


class Place(NamedTuple):
    """A pair in its text."""

    token_ids: tuple[int, ...]
    dest: int
    src: int


@dataclass(frozen=True)
class StandsOut:
    """Something more frequent in some pairs than in others."""

    what: str
    side: Literal["dest", "src"] | None
    """Of tokens: which of the two."""
    count: int
    share: float
    """Of the pairs that have it."""
    ratio: float
    """How many times as often as in the others."""


def tokens_standing_out(
    top: Sequence[Place], others: Sequence[Place], labels: Mapping[int, str], most: int = 6
) -> list[StandsOut]:
    """Tokens at the destination, then at the source; those that tell most first."""
    found: list[StandsOut] = []
    sides: tuple[Literal["dest", "src"], ...] = ("dest", "src")
    for side in sides:
        mine, theirs = (
            Counter(labels[place.token_ids[getattr(place, side)]] for place in places)
            for places in (top, others)
        )
        found += _compared(mine, theirs, len(top), len(others), side)[:most]
    return found


def relations_standing_out(
    top: Sequence[Place], others: Sequence[Place], labels: Mapping[int, str], most: int = 6
) -> list[StandsOut]:
    """Relations of the two tokens, and shapes of each; those that tell most first."""
    mine, theirs = (
        Counter(name for place in places for name in relations(place, labels)) for places in (top, others)
    )
    return _compared(mine, theirs, len(top), len(others), None)[:most]


def relations(place: Place, labels: Mapping[int, str]) -> Iterable[str]:
    """All that is true of a pair.

    >>> list(relations(Place((5, 7, 5), 2, 0), {5: " Mary", 7: "."}))
    ['the same token', '2 to 4 tokens before', 'destination begins with a capital', 'source begins with a capital']
    """
    return _true_of(place, labels[place.token_ids[place.dest]], labels[place.token_ids[place.src]])


@lru_cache(4096)  # the sample of a scan is compared with every channel of a layer
def _true_of(place: Place, dest_label: str, src_label: str) -> tuple[str, ...]:
    ids, dest, src = place
    texts = {dest: dest_label, src: src_label}
    tokens = tuple(texts.get(position, "") for position in range(len(ids)))
    pair = Pair("", dest, src, 0.0, ids, tokens)
    return tuple(name for name, condition in _TOLD.items() if condition.holds(pair))


def _compared(
    mine: Counter[str], theirs: Counter[str], n: int, others: int, side: Literal["dest", "src"] | None
) -> list[StandsOut]:
    found: list[StandsOut] = []
    for what, count in mine.items():
        ratio = (count + 0.5) / (n + 1) * (others + 1) / (theirs[what] + 0.5)
        if count >= FEWEST and ratio >= LEAST:
            found.append(StandsOut(what, side, count, count / n, ratio))
    return sorted(found, key=lambda each: (-each.count * math.log(each.ratio), each.what))
