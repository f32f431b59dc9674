"""The words of headtrace that every room shares: sides, kinds of components, heads, firings and sites.

>>> Firing.parse("L9H6:14:3")
Firing(layer=9, head=6, dest=14, src=3)
>>> FiringName.parse("L9H6:to:John#2").src.positions(("John", " and", " John"))
(2,)
>>> print(Firing(9, 6, 14, 3))
L9H6 14->3
>>> print(Site("mlp", layer=5, dest=13))
MLP 5 @13
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, Protocol, get_args, runtime_checkable
from unicodedata import bidirectional

from headtrace.errors import InputError


@runtime_checkable
class Array(Protocol):
    """Numbers as numpy, torch and others hold them."""

    def tolist(self) -> Any:
        """The values as nested lists."""


Message = Mapping[str, Any]
"""One turn of a conversation: ``{"role": "user", "content": "Who ..."}``."""

Prompt = str | Sequence[int] | Array | Mapping[str, Any] | Sequence[Message]
"""What a user gives: text; token ids as a list, an array, a tensor or what a tokenizer returns (a mapping with
``input_ids``); or the messages of a conversation, which go through the model's chat template."""

Kind = Literal["root", "head", "mlp", "attention_bias", "offset", "rounding", "embedding", "position"]
Side = Literal["query", "key", "value", "input", "root"]
AttentionSide = Literal["query", "key"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SIDES: tuple[Side, ...] = get_args(Side)
ATTENTION_SIDES: tuple[AttentionSide, ...] = get_args(AttentionSide)
Paths = Literal["attention", "content", "complete", "difference"]
PATHS: tuple[Paths, ...] = get_args(Paths)
"""What a circuit follows."""

SIDES_OF: dict[Kind, tuple[Side, ...]] = {
    "head": ("query", "key", "value"),
    "mlp": ("input",),
    "root": ("root",),
}
"""What can be caused, and on which sides: why a head attends and what it moves, what an MLP reads, the root."""

_HEAD = re.compile(r"\s*L(\d+)H(\d+)\s*", re.IGNORECASE)
_PLACE = r"""(?:"[^"]+"|'[^']+')(?:\#\d+)?|[^\s:](?:[^:]*?[^\s:])??"""
_FIRING = re.compile(
    rf"\s*L(\d+)H(\d+)(?:\s*[:\s]\s*({_PLACE})(?:\s*(?::|->)\s*({_PLACE}))?)?\s*", re.IGNORECASE | re.DOTALL
)
_WORD = re.compile(r"""(?:(["'])(?P<quoted>.+)\1|(?P<bare>.+?))(?:#(?P<nth>\d+))?""", re.DOTALL)


def visible(token: str) -> str:
    """A token's text without its outer spaces; one that is nothing else, as signs.

    >>> visible(" Mary"), visible(" "), visible("\\n")
    ('Mary', '␣', '⏎')
    """
    return token.strip() or token.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")


LEFT_TO_RIGHT = "\u200e"
"""An invisible mark of direction."""


def is_right_to_left(text: str) -> bool:
    """Whether any of a text is set from right to left."""
    return any(bidirectional(letter) in ("R", "AL") for letter in text)


ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")


def ordinal(number: int) -> str:
    """A place in an order, counted from one, in words.

    >>> ordinal(2), ordinal(11), ordinal(21), ordinal(43)
    ('second', '11th', '21st', '43rd')
    """
    if number <= len(ORDINALS):
        return ORDINALS[number - 1]
    teen = number % 100 in (11, 12, 13)
    return f"{number}{'th' if teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def head_name(layer: int, head: int) -> str:
    """How a head prints: ``L9H6``."""
    return f"L{layer}H{head}"


def parse_head(text: str) -> tuple[int, int]:
    """Layer and head of ``L9H6``."""
    match = _HEAD.fullmatch(text)
    if match is None:
        raise InputError(f"{text!r} is not a head. Write layer and head like L9H6.")
    return int(match[1]), int(match[2])


@dataclass(frozen=True, order=True)
class Firing:
    """A head attending from one position (``dest``, the query) to another (``src``, the key)."""

    layer: int
    head: int
    dest: int
    src: int

    @classmethod
    def parse(cls, text: str | Firing) -> Firing:
        """Read ``L9H6:14:3`` (layer and head : dest : src) or ``L9H6 14->3``. Words need a prompt: `FiringName`."""
        if isinstance(text, Firing):
            return text
        name = FiringName.parse(text)
        dest, src = (None if place is None else place.position for place in (name.dest, name.src))
        if dest is None or src is None:
            raise InputError(
                f"{text!r} is not a firing in numbers. Write layer and head, destination and source position, like "
                "L9H6:14:3 (or 'L9H6 14->3')."
            )
        return cls(name.layer, name.head, dest, src)

    @property
    def site(self) -> Site:
        """The head that fires, as a site: what it read from ``src``, written at ``dest``."""
        return Site("head", self.layer, self.head, self.dest, self.src)

    def __str__(self) -> str:
        return f"{head_name(self.layer, self.head)} {self.dest}->{self.src}"


@dataclass(frozen=True)
class TokenPlace:
    """Where in a prompt, as people write it: a position (``14``), a word (``John``), its second occurrence
    (``John#2``). A word in quotes is a word even if it is a number."""

    text: str
    """As it was written."""
    position: int | None = None
    word: str | None = None
    nth: int | None = None
    """Which occurrence of the word, from 1."""

    @classmethod
    def parse(cls, given: str | int) -> TokenPlace:
        """A position, or a word with or without the number of its occurrence."""
        if isinstance(given, int):
            return cls(str(given), given)
        match = _WORD.fullmatch(given.strip())
        if match is None:
            raise InputError(
                f"{given!r} is not a place in a prompt. Write a position (14) or a word (John, John#2)."
            )
        word, nth = match["quoted"] or match["bare"], match["nth"]
        if match["bare"] is not None and nth is None and word.isascii() and word.isdigit():
            return cls(given, int(word))
        return cls(given, None, word.strip() or word, None if nth is None else int(nth))

    def positions(self, tokens: Sequence[str]) -> tuple[int, ...]:
        """The positions that it may mean, in order; an error if there is none.

        Spaces around a token do not count, and capitals only where they tell two tokens apart.

        >>> TokenPlace.parse("to").positions(("When", " to", " the", " to"))
        (1, 3)
        """
        if self.position is not None:
            return (self.position,)
        word = self.word or ""
        plain = [token.strip() or token for token in tokens]
        found = [i for i, token in enumerate(plain) if token == word]
        found = found or [i for i, token in enumerate(plain) if token.casefold() == word.casefold()]
        if not found:
            raise InputError(f"The prompt has no token {word!r}{_instead(word, plain)}")
        if self.nth is None:
            return tuple(found)
        if not 1 <= self.nth <= len(found):
            where = ", ".join(map(str, found))
            raise InputError(f"{self.text!r}: the prompt has {word!r} {len(found)} times, at {where}.")
        return (found[self.nth - 1],)

    def choices(self, tokens: Sequence[str]) -> dict[int, str]:
        """What to write for each position that it may mean: ``John#1``, ``John#2``."""
        found = self.positions(tokens)
        if self.word is None or self.nth is not None or len(found) == 1:
            return {found[0]: self.text}
        return {position: f"{self.text}#{i}" for i, position in enumerate(found, 1)}

    def one(self, tokens: Sequence[str]) -> int:
        """The one position that it means; several are refused with the choices."""
        choices = self.choices(tokens)
        if len(choices) > 1:
            listed = ", ".join(f"{text} (position {i})" for i, text in choices.items())
            raise InputError(f"{self.text!r} is in the prompt {len(choices)} times: write {listed}.")
        return next(iter(choices))


def _instead(word: str, tokens: Sequence[str]) -> str:
    """What could be meant by a word that is no token: the tokens that spell it, or a token like it."""
    for start in range(len(tokens)):
        for end in range(start + 2, len(tokens) + 1):
            spelled = "".join(tokens[start:end])
            if spelled == word:
                parts = ", ".join(f"{tokens[i]!r} ({i})" for i in range(start, end))
                return f": the word is several tokens, {parts}. Write the position of one."
            if len(spelled) > len(word):
                break
    near = get_close_matches(word, tokens, n=1)
    return f". Did you mean {near[0]!r}?" if near else ". Write a word of it, or a position."


@dataclass(frozen=True)
class FiringName:
    """A firing as people write it: ``L9H6:14:3``, ``L9H6:to:John#2``, ``L9H6:to`` or a head alone, ``L9H6``.

    Which firing that is in a prompt, `headtrace.Recording.find_firing` says.
    """

    layer: int
    head: int
    dest: TokenPlace | None = None
    src: TokenPlace | None = None

    @classmethod
    def parse(cls, text: str) -> FiringName:
        """The one reader of firings; ``L9H6 14->3`` is read as well."""
        match = _FIRING.fullmatch(text)
        if match is None:
            raise InputError(
                f"{text!r} is not a firing. Write layer and head, destination and source, by position or by word, like "
                "L9H6:14:3 (or 'L9H6 14->3'), L9H6:to:John or L9H6:to:John#2; a head alone means its strongest pair."
            )
        layer, head, *places = match.groups()
        return cls(
            int(layer), int(head), *(None if place is None else TokenPlace.parse(place) for place in places)
        )

    def written(self, dest: str, src: str) -> str:
        """The name with these places."""
        return f"{head_name(self.layer, self.head)}:{dest}:{src}"


@dataclass(frozen=True, order=True)
class Component:
    """Something that writes into the residual: a head reading one source, an MLP, the embedding, a bias.

    An ``offset`` is the bias of a reader: of a head's query or key (layer and head), or of the root (neither).

    >>> print(Component("head", 5, 3, src=7))
    L5H3 from 7
    """

    kind: Kind
    layer: int | None = None
    head: int | None = None
    src: int | None = None

    def at(self, position: int) -> Site:
        """The component where it is read."""
        return Site(self.kind, self.layer, self.head, position, self.src)

    def __str__(self) -> str:
        if self.kind == "head" and self.layer is not None and self.head is not None:
            name = head_name(self.layer, self.head)
            return name if self.src is None else f"{name} from {self.src}"
        return self.kind if self.layer is None else f"{self.kind} {self.layer}"


@dataclass(frozen=True, order=True)
class Site:
    """A component at a position: what a node of a circuit stands for. The root is a site without a place.

    >>> Site("head", 9, 6, 14, 3).firing
    Firing(layer=9, head=6, dest=14, src=3)
    >>> Site("embedding", dest=2).component
    Component(kind='embedding', layer=None, head=None, src=None)
    """

    kind: Kind
    layer: int | None = None
    head: int | None = None
    dest: int | None = None
    """The position it sits at: a head's destination."""
    src: int | None = None
    """The position that a head read."""

    @property
    def component(self) -> Component:
        """The component, wherever it sits."""
        return Component(self.kind, self.layer, self.head, self.src)

    @property
    def firing(self) -> Firing:
        """The firing of a head that reads one source."""
        if self.kind != "head" or None in (self.layer, self.head, self.dest, self.src):
            raise InputError(f"{self} is not a firing: only a head attends.")
        return Firing(self.layer, self.head, self.dest, self.src)  # type: ignore[arg-type]

    @property
    def possible(self) -> bool:
        """False for a head that would have to read a token after the one it writes at."""
        return self.src is None or self.dest is None or self.src <= self.dest

    def __str__(self) -> str:
        return site_name(self.kind, self.layer, self.head, self.dest, self.src)


_WORDS = {
    "mlp": "MLP",
    "attention_bias": "Attention bias",
    "rounding": "Rounding",
    "embedding": "Embedding",
    "position": "Position",
}


def site_name(
    kind: Kind, layer: int | None, head: int | None, dest: int | str | None, src: int | str | None
) -> str:
    """How a component at a place prints, whether places are positions or have names.

    >>> site_name("head", 9, 6, "end", "IO"), site_name("head", 9, 6, None, None), site_name("mlp", 5, None, "S2", None)
    ('L9H6 end->IO', 'L9H6', 'MLP 5 @S2')
    """
    if kind == "root":
        return "Root"
    if kind == "head":
        name = head_name(layer or 0, head or 0)
        return name if dest is None and src is None else f"{name} {dest}->{src}"
    if kind == "offset":
        reader = "root" if layer is None else f"L{layer}" + ("" if head is None else f"H{head}")
        return f"Offset {reader} @{dest}"
    return f"{_WORDS[kind]}{'' if layer is None else f' {layer}'} @{dest}"


ROOT = Site("root")

FUNCTION_WORDS = frozenset(
    """
    a about after all also am an and any are as at be because been before but by can could did do does for from had has
    have he her hers him his how i if in into is it its may me might more most my no nor not of off on once one or other
    our out over own per shall she should so some such than that the their them then there these they this those to too
    under until up upon us very was we were what when where which while who whom whose why will with would yet you your
    """.split()  # noqa: SIM905
)
"""English words whose exchange mostly breaks a sentence: they stand after content words where words are ranked."""
