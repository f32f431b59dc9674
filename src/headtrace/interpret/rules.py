"""Descriptions as rules: conditions on a destination, a source and their context, in English and as data.

>>> rule = Rule((PairCondition("same_token"), PairCondition("source_token", ids=(5,), tokens=(" a",))))
>>> words = Rules((rule,))
>>> print(words)
The source is an earlier occurrence of the destination token and the source token is " a".
>>> pair = Pair("", dest=2, src=0, score=1.0, token_ids=(5, 7, 5), tokens=(" a", " b", " a"))
>>> words.holds([pair]).tolist(), Rules.from_dict(words.to_dict()) == words
([True], True)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool

from headtrace.errors import InputError, shown
from headtrace.interpret.relations import RELATIONS, PairView, Side
from headtrace.interpret.scored_signals import Pair
from headtrace.interpret.word_classes import CLASSES, of_class

TOKENS: dict[str, tuple[Side, str, str]] = {
    "source_token": ("source", "ids", "the source token is"),
    "destination_token": ("destination", "ids", "the destination token is"),
    "before_source": ("source", "before", "the token before the source is"),
    "before_destination": ("destination", "before", "the token before the destination is"),
}
"""Positions whose token may be one of a list: the side and property of a ``PairView``, and the wording."""
Pairs = PairView | Sequence[Pair]


def _view(pairs: Pairs) -> PairView:
    return pairs if isinstance(pairs, PairView) else PairView(pairs)


@dataclass(frozen=True)
class PairCondition:
    """Something that is true or false of a pair."""

    feature: str
    """A relation of `headtrace.interpret.relations`, a position whose token is listed, or ``distance``."""
    ids: tuple[int, ...] = ()
    """For a position: the token ids that it may have."""
    tokens: tuple[str, ...] = ()
    """The text of these tokens."""
    low: int = 0
    """For the distance: the least number of tokens between source and destination."""
    high: int | None = None
    """For the distance: the greatest number; None for no limit."""

    @property
    def cost(self) -> int:
        """How much there is to remember: each listed token counts."""
        return max(1, len(self.ids))

    @property
    def themes(self) -> set[str]:
        """What it is about, on either side: the listed tokens, the distance, repetition, a shape.

        >>> sorted(PairCondition("source_token", ids=(5, 6), tokens=(" a", ",")).themes)
        ['token ,', 'token a']
        >>> PairCondition("same_token").themes == PairCondition("destination_repeated").themes == {"repetition"}
        True
        """
        if self.feature in TOKENS:
            return {f"token {token.strip().lower()}" for token in self.tokens}
        return {"distance"} if self.feature == "distance" else set(RELATIONS[self.feature].themes)

    @property
    def implied(self) -> set[str]:
        """Classes that the listed tokens are of."""
        return {name for name in CLASSES if any(of_class(token, name) for token in self.tokens)}

    @property
    def lists(self) -> Side | None:
        """The side whose tokens, or the tokens before it, are listed; None where none are."""
        return TOKENS[self.feature][0] if self.feature in TOKENS else None

    def holds(self, pairs: Pairs) -> Bool[np.ndarray, " pair"]:
        """Whether it is true of each pair."""
        view = _view(pairs)
        if self.feature in TOKENS:
            return np.isin(view.at(*TOKENS[self.feature][:2]), self.ids)
        if self.feature == "distance":
            distance = view.dest - view.src
            return (distance >= self.low) & (distance <= (distance if self.high is None else self.high))
        return RELATIONS[self.feature].test(view)

    def __str__(self) -> str:
        if self.feature in RELATIONS:
            return RELATIONS[self.feature].words
        if self.feature in TOKENS:
            *most, last = [f'"{token}"' for token in self.tokens]
            listed = f"{', '.join(most)} or {last}" if most else last
            return f"{TOKENS[self.feature][2]} {listed}"
        if (self.low, self.high) == (1, 1):
            return "the source is the token just before the destination"
        if self.high is None:
            away = f"at least {self.low}"
        elif self.low == self.high:
            away = f"{self.low}"
        else:
            away = f"at most {self.high}" if self.low == 0 else f"{self.low} to {self.high}"
        return f"the source is {away} tokens before the destination"

    def to_dict(self) -> dict[str, Any]:
        """The feature and, where it has any, its tokens or limits."""
        found: dict[str, Any] = {"feature": self.feature}
        if self.feature in TOKENS:
            found |= {"ids": list(self.ids), "tokens": list(self.tokens)}
        if self.feature == "distance":
            found |= {"low": self.low, "high": self.high}
        return found

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> PairCondition:
        feature, high = given["feature"], given.get("high")
        if not any(feature in known for known in (RELATIONS, TOKENS, ("distance",))):
            raise ValueError(f"unknown feature {feature!r}")
        ids, tokens = tuple(map(int, given.get("ids", ()))), tuple(map(str, given.get("tokens", ())))
        if feature in TOKENS and (not ids or len(ids) != len(tokens)):
            raise ValueError(f"{feature} needs as many tokens as ids, and at least one")
        return cls(feature, ids, tokens, int(given.get("low", 0)), None if high is None else int(high))


@dataclass(frozen=True)
class Rule:
    """A conjunction of conditions."""

    conditions: tuple[PairCondition, ...]

    @property
    def cost(self) -> int:
        return sum(condition.cost for condition in self.conditions)

    def holds(self, pairs: Pairs) -> Bool[np.ndarray, " pair"]:
        """Whether all conditions are true, per pair."""
        view = _view(pairs)
        return np.all([condition.holds(view) for condition in self.conditions], axis=0)

    def __str__(self) -> str:
        return " and ".join(map(str, self.conditions))


@dataclass(frozen=True)
class Rules:
    """A disjunction of rules."""

    either: tuple[Rule, ...]

    @property
    def cost(self) -> int:
        return sum(rule.cost for rule in self.either)

    @property
    def listed_sides(self) -> set[str]:
        """The sides of which tokens are listed."""
        sides = (each.lists for rule in self.either for each in rule.conditions)
        return {side for side in sides if side is not None}

    def holds(self, pairs: Pairs) -> Bool[np.ndarray, " pair"]:
        """Whether one of the rules is true, per pair."""
        view = _view(pairs)
        return np.any([rule.holds(view) for rule in self.either], axis=0)

    def __str__(self) -> str:
        text = "; or ".join(map(str, self.either))
        return text[:1].upper() + text[1:] + "."

    def to_dict(self) -> dict[str, Any]:
        return {"any": [{"all": [each.to_dict() for each in rule.conditions]} for rule in self.either]}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Rules:
        """Rules as ``to_dict`` wrote them; anything else is an error that shows it."""
        try:
            rules = [Rule(tuple(map(PairCondition.from_dict, rule["all"]))) for rule in given["any"]]
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"These are not the rules of a description: {shown(given)} ({error}). Expected "
                '{"any": [{"all": [{"feature": "same_token"}]}]}.'
            ) from None
        return cls(tuple(rules))


# -- What is frequent in some pairs and rare in others -----------------------------------------------------------

FEWEST = 3
"""What occurs in fewer pairs does not stand out."""
LEAST_RATIO = 2.0
"""Nor what is less than this many times as frequent as in the other pairs."""
_RELATIONS_LISTED = {
    "itself": PairCondition("same_place"),
    "the same token": PairCondition("same_token"),
    "the token before": PairCondition("distance", low=1, high=1),
    "2 to 4 tokens before": PairCondition("distance", low=2, high=4),
    "more than 32 tokens before": PairCondition("distance", low=33),
    "right after an earlier occurrence": PairCondition("after_same"),
} | {
    f"{side} {words}": PairCondition(f"{side}_{shape}")
    for side in ("destination", "source")
    for shape, words in (
        ("capitalised", "begins with a capital"),
        ("number", "is a number"),
        ("punctuation", "is punctuation"),
        ("continues_word", "continues a word"),
        ("line_break", "has a line break"),
    )
}
"""Conditions by their names in the tables of an atlas."""


@dataclass(frozen=True)
class StandsOut:
    """A token or relation that is more frequent in some pairs than in others."""

    what: str
    side: Literal["dest", "src"] | None
    """For a token: at the destination or at the source."""
    count: int
    share: float
    """The fraction of the pairs that have it."""
    ratio: float
    """How many times as frequent as in the other pairs; half a pair is added on either side to keep it finite."""


class PairStatistics:
    """How often tokens and relations occur in some pairs.

    >>> tokens = {5: " a", 6: " b", 7: "c"}
    >>> def pairs(ids, count):
    ...     return [Pair("", 2, 0, 0.0, ids, tuple(tokens[token] for token in ids))] * count
    >>> top, rest = PairStatistics(pairs((5, 7, 5), 6)), PairStatistics(pairs((7, 7, 6), 10))
    >>> [(found.what, found.count) for found in top.relations_beyond(rest)][:1]
    [('the same token', 6)]
    >>> [(found.what, found.side) for found in top.tokens_beyond(rest)]
    [(' a', 'dest'), (' a', 'src')]
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.n = len(pairs)
        self.dest = Counter(pair.tokens[pair.dest] for pair in pairs)
        self.src = Counter(pair.tokens[pair.src] for pair in pairs)
        view = PairView(pairs)
        self.relations = Counter(
            {name: int(condition.holds(view).sum()) for name, condition in _RELATIONS_LISTED.items()}
        )

    def tokens_beyond(self, others: PairStatistics, most: int = 6) -> list[StandsOut]:
        """Tokens that stand out at the destination, then at the source; the most telling first."""
        dest = self._beyond(others, self.dest, others.dest, "dest")[:most]
        return dest + self._beyond(others, self.src, others.src, "src")[:most]

    def relations_beyond(self, others: PairStatistics, most: int = 6) -> list[StandsOut]:
        """Relations of the two tokens and shapes of each that stand out; the most telling first."""
        return self._beyond(others, self.relations, others.relations, None)[:most]

    def _beyond(
        self,
        others: PairStatistics,
        own: Counter[str],
        theirs: Counter[str],
        side: Literal["dest", "src"] | None,
    ) -> list[StandsOut]:
        found: list[StandsOut] = []
        for what, count in own.items():
            ratio = (count + 0.5) / (self.n + 1) * (others.n + 1) / (theirs[what] + 0.5)
            if count >= FEWEST and ratio >= LEAST_RATIO:
                found.append(StandsOut(what, side, count, count / self.n, ratio))
        return sorted(found, key=lambda each: (-each.count * math.log(each.ratio), each.what))
