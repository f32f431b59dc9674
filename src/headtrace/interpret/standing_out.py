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
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

FEWEST = 3
LEAST = 2.0


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
    """All that is true of a pair."""
    ids, dest, src = place
    distance = dest - src
    if distance == 0:
        yield "itself"
    elif ids[dest] == ids[src]:
        yield "the same token"
    if distance == 1:
        yield "the token before"
    elif 2 <= distance <= 4:
        yield "2 to 4 tokens before"
    elif distance > 32:
        yield "more than 32 tokens before"
    if 0 < src <= dest and ids[src - 1] == ids[dest]:
        yield "right after an earlier occurrence"
    for side, position in (("destination", dest), ("source", src)):
        for shape in shapes(labels[ids[position]]):
            yield f"{side} {shape}"


def shapes(token: str) -> Iterable[str]:
    """What a token looks like.

    >>> list(shapes(" Mary")), list(shapes("ing")), list(shapes(".")), list(shapes("42"))
    (['begins with a capital'], ['continues a word'], ['is punctuation'], ['is a number'])
    """
    core = token.strip()
    if not core:
        yield "is a line break" if "\n" in token else "is blank"
    elif core[0].isupper():
        yield "begins with a capital"
    elif core.isdecimal():
        yield "is a number"
    elif all(unicodedata.category(letter)[0] in "PS" for letter in core):
        yield "is punctuation"
    elif token[0].isalpha():
        yield "continues a word"


def _compared(
    mine: Counter[str], theirs: Counter[str], n: int, others: int, side: Literal["dest", "src"] | None
) -> list[StandsOut]:
    found: list[StandsOut] = []
    for what, count in mine.items():
        ratio = (count + 0.5) / (n + 1) * (others + 1) / (theirs[what] + 0.5)
        if count >= FEWEST and ratio >= LEAST:
            found.append(StandsOut(what, side, count, count / n, ratio))
    return sorted(found, key=lambda each: (-each.count * math.log(each.ratio), each.what))
