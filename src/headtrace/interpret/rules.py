"""Descriptions as rules: conditions on a destination, a source and their context, in English and as data.

>>> rule = Rule((Condition("same_token"), Condition("source_token", ids=(5,), tokens=(" a",))))
>>> words = Rules((rule,))
>>> print(words)
The source is an earlier occurrence of the destination token and the source token is " a".
>>> pair = Pair("", dest=2, src=0, score=1.0, token_ids=(5, 7, 5), tokens=(" a", " b", " a"))
>>> words.holds(pair), Rules.from_dict(words.to_dict()) == words
(True, True)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headtrace.errors import InputError, shown
from headtrace.interpret.examples import Pair


def _word(token: str) -> str:
    return token.strip()


def _capitalised(token: str) -> bool:
    return _word(token)[:1].isupper()


def _number(token: str) -> bool:
    return _word(token).isdigit()


def _punctuation(token: str) -> bool:
    word = _word(token)
    return bool(word) and not any(each.isalnum() for each in word)


def _begins_word(token: str) -> bool:
    return token[:1] == " " and _word(token)[:1].isalpha()


def _continues_word(token: str) -> bool:
    return token[:1].isalpha()


def _line_break(token: str) -> bool:
    return "\n" in token


SHAPES: dict[str, tuple[Callable[[str], bool], str]] = {
    "capitalised": (_capitalised, "begins with a capital letter"),
    "number": (_number, "is a number"),
    "punctuation": (_punctuation, "is punctuation"),
    "begins_word": (_begins_word, "begins a word after a space"),
    "continues_word": (_continues_word, "has letters without a space before them"),
    "line_break": (_line_break, "has a line break"),
}
"""What a token looks like: a test of its text, and how it reads after "the source token"."""


def _same_token(pair: Pair) -> bool:
    return pair.src < pair.dest and pair.token_ids[pair.src] == pair.token_ids[pair.dest]


def _after_same(pair: Pair) -> bool:
    return 0 < pair.src <= pair.dest and pair.token_ids[pair.src - 1] == pair.token_ids[pair.dest]


def _repeated(pair: Pair, place: int) -> bool:
    return pair.token_ids[place] in pair.token_ids[:place]


RELATIONS: dict[str, tuple[Callable[[Pair], bool], str]] = {
    "same_place": (lambda pair: pair.src == pair.dest, "the source is the destination itself"),
    "same_token": (_same_token, "the source is an earlier occurrence of the destination token"),
    "after_same": (
        _after_same,
        "the source comes right after an earlier occurrence of the destination token",
    ),
    "first": (lambda pair: pair.src == 0, "the source is the first token of the text"),
    "source_repeated": (
        lambda pair: _repeated(pair, pair.src),
        "the source token has occurred before in the text",
    ),
    "destination_repeated": (
        lambda pair: _repeated(pair, pair.dest),
        "the destination token has occurred before in the text",
    ),
}
"""What holds between destination, source and context: a test of the pair, and how it reads."""

_THEMES = {"same_place": "distance"} | dict.fromkeys(
    ("same_token", "after_same", "source_repeated", "destination_repeated"), "repetition"
)
"""Relations that are about the same, and what that is."""

TOKENS: dict[str, tuple[Callable[[Pair], int], str]] = {
    "source_token": (lambda pair: pair.src, "the source token is"),
    "destination_token": (lambda pair: pair.dest, "the destination token is"),
    "before_source": (lambda pair: pair.src - 1, "the token before the source is"),
    "before_destination": (lambda pair: pair.dest - 1, "the token before the destination is"),
}
"""Places whose token may be one of a few: where they are (-1 is nowhere), and how it reads."""


@dataclass(frozen=True)
class Condition:
    """Something that holds for a pair or does not."""

    feature: str
    """A relation, a shape (``source_capitalised``), a place whose token is listed, or ``distance``."""
    ids: tuple[int, ...] = ()
    """For a place: the token ids that it may have."""
    tokens: tuple[str, ...] = ()
    """How these read."""
    low: int = 0
    """For the distance: at least so many tokens back."""
    high: int | None = None
    """For the distance: at most so many; None is as far as you like."""

    @property
    def cost(self) -> int:
        """How much there is to remember: each listed token counts."""
        return max(1, len(self.ids))

    @property
    def themes(self) -> set[str]:
        """What it is about, on whichever side: the listed tokens, the distance, repetition, a shape.

        >>> sorted(Condition("source_token", ids=(5, 6), tokens=(" a", ",")).themes)
        ['token ,', 'token a']
        >>> Condition("same_token").themes == Condition("destination_repeated").themes == {"repetition"}
        True
        """
        if self.feature in TOKENS:
            return {f"token {_word(token).lower()}" for token in self.tokens}
        shape = self.feature.partition("_")[2]
        return {_THEMES.get(self.feature) or (shape if shape in SHAPES else self.feature)}

    @property
    def implied(self) -> set[str]:
        """Shapes that the listed tokens have."""
        return {shape for shape, (test, _) in SHAPES.items() if any(map(test, self.tokens))}

    def holds(self, pair: Pair) -> bool:
        if self.feature in RELATIONS:
            return RELATIONS[self.feature][0](pair)
        if self.feature in TOKENS:
            place = TOKENS[self.feature][0](pair)
            return place >= 0 and pair.token_ids[place] in self.ids
        if self.feature == "distance":
            back = pair.dest - pair.src
            return self.low <= back and (self.high is None or back <= self.high)
        side, _, shape = self.feature.partition("_")
        return SHAPES[shape][0](pair.tokens[pair.src if side == "source" else pair.dest])

    def __str__(self) -> str:
        if self.feature in RELATIONS:
            return RELATIONS[self.feature][1]
        if self.feature in TOKENS:
            *most, last = [f'"{token}"' for token in self.tokens]
            listed = f"{', '.join(most)} or {last}" if most else last
            return f"{TOKENS[self.feature][1]} {listed}"
        if self.feature == "distance":
            return _distance(self.low, self.high)
        side, _, shape = self.feature.partition("_")
        return f"the {side} token {SHAPES[shape][1]}"

    def to_dict(self) -> dict[str, Any]:
        """Only what says something."""
        told: dict[str, Any] = {"feature": self.feature}
        if self.feature in TOKENS:
            told |= {"ids": list(self.ids), "tokens": list(self.tokens)}
        if self.feature == "distance":
            told |= {"low": self.low, "high": self.high}
        return told


FEATURES = frozenset(
    (
        *RELATIONS,
        *TOKENS,
        "distance",
        *(f"{side}_{shape}" for side in ("source", "destination") for shape in SHAPES),
    )
)


def _distance(low: int, high: int | None) -> str:
    if (low, high) == (1, 1):
        return "the source is the token just before the destination"
    if high is None:
        return f"the source is at least {low} tokens before the destination"
    if low == high:
        return f"the source is {low} tokens before the destination"
    return (
        f"the source is at most {high} tokens before the destination"
        if low == 0
        else (f"the source is {low} to {high} tokens before the destination")
    )


@dataclass(frozen=True)
class Rule:
    """Conditions that hold together."""

    conditions: tuple[Condition, ...]

    @property
    def cost(self) -> int:
        return sum(condition.cost for condition in self.conditions)

    def holds(self, pair: Pair) -> bool:
        return all(condition.holds(pair) for condition in self.conditions)

    def __str__(self) -> str:
        return " and ".join(map(str, self.conditions))


@dataclass(frozen=True)
class Rules:
    """One rule or another."""

    either: tuple[Rule, ...]

    @property
    def cost(self) -> int:
        return sum(rule.cost for rule in self.either)

    def holds(self, pair: Pair) -> bool:
        return any(rule.holds(pair) for rule in self.either)

    def __str__(self) -> str:
        text = "; or ".join(map(str, self.either))
        return text[:1].upper() + text[1:] + "."

    def to_dict(self) -> dict[str, Any]:
        return {"any": [{"all": [each.to_dict() for each in rule.conditions]} for rule in self.either]}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Rules:
        """Rules as ``to_dict`` wrote them; anything else is an error that shows it."""
        try:
            rules = [Rule(tuple(_condition(each) for each in rule["all"])) for rule in given["any"]]
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"These are not the rules of a description: {shown(given)} ({error}). Expected "
                '{"any": [{"all": [{"feature": "same_token"}]}]}.'
            ) from None
        return cls(tuple(rules))


def _condition(given: Mapping[str, Any]) -> Condition:
    feature = given["feature"]
    if feature not in FEATURES:
        raise ValueError(f"unknown feature {feature!r}")
    ids, tokens = tuple(map(int, given.get("ids", ()))), tuple(map(str, given.get("tokens", ())))
    if feature in TOKENS and (not ids or len(ids) != len(tokens)):
        raise ValueError(f"{feature} needs as many tokens as ids, and at least one")
    high = given.get("high")
    return Condition(feature, ids, tokens, int(given.get("low", 0)), None if high is None else int(high))
