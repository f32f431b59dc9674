"""Relations of a destination, a source and their context: one registry, evaluated over many pairs at once.

>>> from dataclasses import replace
>>> pair = Pair("", dest=2, src=0, score=1.0, token_ids=(5, 7, 5), tokens=(" a", " b", " a"))
>>> view = PairView([pair, replace(pair, src=1)])
>>> RELATIONS["same_token"].test(view).tolist(), RELATIONS["after_same"].test(view).tolist()
([True, False], [False, True])

To add one, register what it says and a test of a ``PairView``, under a name: explainers, judges, controls and the
tables of an atlas then know it.

>>> far = Relation("the source is in the first half of the text before the destination", lambda p: 2 * p.src < p.dest)
>>> far.test(view).tolist()                                            # register_relation("first_half", far)
[True, False]

A test reads properties of the tokens at either side with ``PairView.at``: those of ``TextTokens``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headtrace.interpret.scored_signals import Pair
from headtrace.interpret.word_classes import AGREEING, CLASSES, WORD_CLASSES, grammatical_number, of_class
from headtrace.registry import Registry

Side = Literal["source", "destination"]
SIDES: tuple[Side, Side] = ("source", "destination")
Truths = NDArray[np.bool_]
_BRACKETS = {")": "(", "]": "[", "}": "{"}
_QUOTES = {'"', "“", "”", "``"}
_SENTENCE_ENDS = (".", "!", "?")


class TextTokens:
    """The tokens of a text with what relations ask about each of them, one value per token."""

    def __init__(self, token_ids: Sequence[int], tokens: Sequence[str]) -> None:
        self.ids = np.array(token_ids)
        self.tokens = tuple(tokens)

    def is_class(self, name: str) -> Truths:
        """Whether each token is of a class of `headtrace.interpret.word_classes`."""
        return np.array([of_class(token, name) for token in self.tokens], dtype=bool)

    @cached_property
    def before(self) -> NDArray[np.int64]:
        """The id of the token before; -1 at the first."""
        return np.concatenate([[-1], self.ids[:-1]])

    @cached_property
    def after(self) -> NDArray[np.int64]:
        """The id of the token after; -2 at the last."""
        return np.concatenate([self.ids[1:], [-2]])

    @cached_property
    def repeated(self) -> Truths:
        """Whether the token has occurred before."""
        first = np.unique(self.ids, return_index=True)[1]
        return ~np.isin(np.arange(len(self.ids)), first)

    @cached_property
    def words(self) -> NDArray[np.int64]:
        """A number for each word, the same for all its forms with or without capitals and spaces; 0 for no word."""
        stripped = [token.strip().lower() for token in self.tokens]
        known = {
            word: n
            for n, word in enumerate(dict.fromkeys(w for w in stripped if len(w) > 1 and w.isalpha()), 1)
        }
        return np.array([known.get(word, 0) for word in stripped])

    @cached_property
    def piece_of(self) -> NDArray[np.int64]:
        """The position at which the token's word begins."""
        continues = self.is_class("continues_word")
        begins = np.where(continues & (np.arange(len(continues)) > 0), 0, np.arange(len(continues)))
        return np.maximum.accumulate(begins)

    @cached_property
    def starts_line(self) -> Truths:
        return np.array([True, *("\n" in token for token in self.tokens[:-1])])

    @cached_property
    def starts_sentence(self) -> Truths:
        """Behind a full stop, a question or exclamation mark, an empty line, or nothing."""
        ends = (token.strip().endswith(_SENTENCE_ENDS) or token.count("\n") > 1 for token in self.tokens[:-1])
        return np.array([True, *ends])

    @cached_property
    def line(self) -> NDArray[np.int64]:
        return self.starts_line.astype(np.int64).cumsum()

    @cached_property
    def sentence(self) -> NDArray[np.int64]:
        return self.starts_sentence.astype(np.int64).cumsum()

    @cached_property
    def open_bracket(self) -> NDArray[np.int64]:
        """The position of the innermost bracket that is open before the token; -1 where none is."""
        stack, found = list[tuple[str, int]](), list[int]()
        for place, token in enumerate(self.tokens):
            found.append(stack[-1][1] if stack else -1)
            for sign in token:
                if sign in _BRACKETS.values():
                    stack.append((sign, place))
                elif sign in _BRACKETS and stack and stack[-1][0] == _BRACKETS[sign]:
                    stack.pop()
        return np.array(found)

    @cached_property
    def open_quote(self) -> NDArray[np.int64]:
        """The position of the quotation mark that is open before the token; -1 where none is."""
        found, opened = list[int](), -1
        for place, token in enumerate(self.tokens):
            found.append(opened)
            if sum(token.count(mark) for mark in _QUOTES) % 2:
                opened = place if opened < 0 else -1
        return np.array(found)

    @cached_property
    def _listing(self) -> tuple[Truths, Truths]:
        """First and last items of lists: before the first comma of a sentence, after an "and" or "or" behind commas."""
        first, last = (np.zeros(len(self.ids), dtype=bool) for _ in range(2))
        commas = dict[int, int]()
        for place, token in enumerate(self.tokens):
            sentence, word = int(self.sentence[place]), token.strip().lower()
            if word == ",":
                first[place - 1] |= place > 0 and not commas.get(sentence)
                commas[sentence] = commas.get(sentence, 0) + 1
            elif word in ("and", "or") and commas.get(sentence) and place + 1 < len(self.tokens):
                last[place + 1] = True
        return first, last

    @cached_property
    def first_of_list(self) -> Truths:
        return self._listing[0]

    @cached_property
    def last_of_list(self) -> Truths:
        return self._listing[1]

    @property
    def plural(self) -> NDArray[np.int64]:
        """1 for a plural, -1 for a singular, 0 for neither."""
        return np.array([grammatical_number(token) for token in self.tokens])

    @cached_property
    def agrees(self) -> Truths:
        """Whether the token is a verb form or a pronoun that has a number."""
        return np.array([token.strip().lower() in AGREEING for token in self.tokens])


@lru_cache(maxsize=4096)
def _text(token_ids: tuple[int, ...], tokens: tuple[str, ...]) -> TextTokens:
    return TextTokens(token_ids, tokens)


class PairView:
    """Many pairs side by side, with what is known of the tokens at their two ends."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._texts = list(dict.fromkeys((pair.token_ids, pair.tokens) for pair in pairs))
        place = {text: number for number, text in enumerate(self._texts)}
        starts = [0, *accumulate(len(ids) for ids, _ in self._texts)]
        offset = np.array([starts[place[pair.token_ids, pair.tokens]] for pair in pairs], dtype=np.int64)
        self.dest = np.array([pair.dest for pair in pairs], dtype=np.int64)
        """Position of the destination in its text, per pair."""
        self.src = np.array([pair.src for pair in pairs], dtype=np.int64)
        """Position of the source in its text, per pair."""
        self._places = {"source": offset + self.src, "destination": offset + self.dest}
        self._known: dict[str, NDArray[Any]] = {}

    def __len__(self) -> int:
        return len(self.dest)

    def at(self, side: Side, what: str) -> NDArray[Any]:
        """A property of the tokens at one side, per pair: an attribute of ``TextTokens``, or a class of tokens."""
        if what not in self._known:
            texts = [_text(*text) for text in self._texts]
            values = [each.is_class(what) if what in CLASSES else getattr(each, what) for each in texts]
            self._known[what] = np.concatenate(values) if values else np.zeros(0, dtype=np.int64)
        return self._known[what][self._places[side]]

    def both(self, what: str) -> tuple[NDArray[Any], NDArray[Any]]:
        """A property at the source and at the destination."""
        return self.at("source", what), self.at("destination", what)

    def equal(self, what: str) -> Truths:
        """Whether a property is the same at both ends."""
        source, destination = self.both(what)
        return source == destination


@dataclass(frozen=True)
class Relation:
    """Something that is true or false of a pair."""

    words: str
    """In words, after which a full stop may follow: "the source is the first token of the text"."""
    test: Callable[[PairView], Truths]
    themes: tuple[str, ...] = ()
    """What it is about: relations without a common theme have nothing in common."""


def _same_class(pairs: PairView) -> Truths:
    shared = [np.logical_and(*pairs.both(name)) for name in WORD_CLASSES]
    return np.any(shared, axis=0) & (pairs.src < pairs.dest)


def _agree(pairs: PairView) -> Truths:
    plural = pairs.both("plural")
    return (
        (plural[0] == plural[1])
        & (plural[0] != 0)
        & pairs.at("destination", "agrees")
        & (pairs.src < pairs.dest)
    )


def _inside(what: str, pairs: PairView) -> Truths:
    return pairs.equal(what) & (pairs.at("source", what) >= 0)


def _earlier(what: str, pairs: PairView) -> Truths:
    return pairs.equal(what) & (pairs.src < pairs.dest)


_KNOWN: dict[str, Relation] = {
    "same_place": Relation("the source is the destination itself", lambda p: p.src == p.dest, ("distance",)),
    "same_token": Relation(
        "the source is an earlier occurrence of the destination token",
        partial(_earlier, "ids"),
        ("repetition",),
    ),
    "after_same": Relation(
        "the source comes right after an earlier occurrence of the destination token",
        lambda p: p.at("source", "before") == p.at("destination", "ids"),
        ("repetition",),
    ),
    "before_same": Relation(
        "the source comes right before an earlier occurrence of the destination token",
        lambda p: (p.at("source", "after") == p.at("destination", "ids")) & (p.src + 1 < p.dest),
        ("repetition",),
    ),
    "first": Relation("the source is the first token of the text", lambda p: p.src == 0, ("first",)),
    "source_repeated": Relation(
        "the source token has occurred before in the text",
        lambda p: p.at("source", "repeated"),
        ("repetition",),
    ),
    "source_new": Relation(
        "the source is the first occurrence of its token",
        lambda p: ~p.at("source", "repeated"),
        ("repetition",),
    ),
    "destination_repeated": Relation(
        "the destination token has occurred before in the text",
        lambda p: p.at("destination", "repeated"),
        ("repetition",),
    ),
    "destination_new": Relation(
        "the destination is the first occurrence of its token",
        lambda p: ~p.at("destination", "repeated"),
        ("repetition",),
    ),
    "same_word": Relation(
        "the source is an earlier occurrence of the destination's word, with or without capitals",
        lambda p: _earlier("words", p) & (p.at("source", "words") > 0),
        ("repetition",),
    ),
    "same_piece": Relation(
        "the source is an earlier piece of the destination's word",
        partial(_earlier, "piece_of"),
        ("distance", "continues_word"),
    ),
    "same_brackets": Relation(
        "source and destination are inside the same brackets",
        partial(_inside, "open_bracket"),
        ("brackets", "distance"),
    ),
    "same_quotes": Relation(
        "source and destination are inside the same quotation",
        partial(_inside, "open_quote"),
        ("quotes", "distance"),
    ),
    "opens": Relation(
        "the source opens the brackets or the quotation that the destination is in",
        lambda p: (
            (p.src == p.at("destination", "open_bracket")) | (p.src == p.at("destination", "open_quote"))
        ),
        ("brackets", "quotes", "punctuation"),
    ),
    "source_first_of_list": Relation(
        "the source is the first item of a list", lambda p: p.at("source", "first_of_list"), ("list",)
    ),
    "source_last_of_list": Relation(
        "the source is the last item of a list", lambda p: p.at("source", "last_of_list"), ("list",)
    ),
    "same_sentence": Relation(
        "source and destination are in the same sentence",
        partial(_earlier, "sentence"),
        ("sentence", "distance"),
    ),
    "same_line": Relation(
        "source and destination are in the same line", partial(_earlier, "line"), ("line", "distance")
    ),
    "same_class": Relation(
        "source and destination are words of the same class (names, places, numbers, verbs or function words)",
        _same_class,
        WORD_CLASSES,
    ),
    "agreement": Relation(
        "the destination is a verb or a pronoun that agrees in number with the source",
        _agree,
        ("agreement", "function"),
    ),
}
for _side in SIDES:
    for _start, _words, _more in (
        ("sentence", "begins a sentence", "capitalised"),
        ("line", "begins a line", "line_break"),
    ):
        _KNOWN[f"{_side}_starts_{_start}"] = Relation(
            f"the {_side} {_words}", lambda p, s=_side, w=f"starts_{_start}": p.at(s, w), (_start, _more)
        )
    for _name, (_, _words) in CLASSES.items():
        _KNOWN[f"{_side}_{_name}"] = Relation(
            f"the {_side} token {_words}",
            lambda p, s=_side, n=_name: p.at(s, n),
            (_name, "capitalised") if _name in ("name", "place") else (_name,),
        )

RELATIONS: Registry[Relation] = Registry(
    "relation", "headtrace.relations", _KNOWN, check=lambda found: isinstance(found, Relation)
)
"""All relations by name, the simplest first: of relations that separate equally well, the first is named."""


def register_relation(name: str, relation: Relation) -> None:
    """Register a relation under a name, for this process; packages use the entry point group headtrace.relations."""
    RELATIONS.add(name, relation)
