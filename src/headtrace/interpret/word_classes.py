"""Classes of tokens by their text alone: names, places, numbers, verbs, function words, and what a token looks like.

>>> [name for name in CLASSES if of_class(" Mary", name)]
['name', 'capitalised', 'begins_word']
>>> of_class(" walked", "verb"), of_class(" London", "place"), of_class(" seven", "number"), of_class(" of", "function")
(True, True, True, True)
>>> grammatical_number(" dogs"), grammatical_number(" is"), grammatical_number(",")
(1, -1, 0)

The lists here are short and of English: the common ones of each class, with a few rules for endings. Packages add to
the names, places and verbs where they are installed (``pip install '.[words]'``); numbers and function words are
few, and listed here. A class is missed more often than it is claimed wrongly: where the lexicon of verbs is installed,
a name, a place or a verb that can also be something else, as "Store" can, counts only if it is listed here. So words
that name a class and pass their test hold for more tokens than are listed.

The packages:

- names: ``names`` (MIT; its data, of the US census of 1990, are in the public domain): the commonest
  first names;
- places: ``countryinfo`` (MIT): countries, their capitals and provinces;
- verbs: ``lemminflect`` (MIT; its data are of the SPECIALIST Lexicon of the NIH): words that can be a verb and nothing
  else, and which nouns are plurals.

Where a package is missing, the short list here is used alone. Results record which
lists they were made with, and say what to install for more.

>>> WordLists().sources()
{'names': 'built in', 'places': 'built in', 'verbs': 'built in'}
>>> print(note(WordLists(versions={"names": "names 0.3.0", "verbs": "lemminflect 0.2.3"}).sources()))
Word classes: names by names 0.3.0; verbs by lemminflect 0.2.3; places by a short list of headtrace's own
(pip install '.[words]' for more)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def _listed(words: str) -> frozenset[str]:
    """Words separated by blanks."""
    return frozenset(words.split())


NAMES = _listed("""
    aaron adam alan albert alex alexander alice amanda amy andrew angela ann anna anne anthony arthur barbara ben
    benjamin beth bill bob brian bruce carl carol caroline catherine charles charlie charlotte chris christina
    christopher
    claire clara dan daniel dave david dean diana donald dorothy doug edward elizabeth ellen emily emma eric erin
    ethan eva
    fiona frank fred frederick gary george gina grace greg hannah harry heather helen henry holly howard ian isabella
    jack jacob james jamie jane janet jason jean jeff jennifer jeremy jerry jessica jim joan joe joel john johnny jon
    jonathan joseph joshua judith judy julia julie justin karen kate katherine katie keith kelly ken kenneth kevin kim
    larry laura lauren lawrence leo leon leslie linda lisa louis lucas lucy luke lynn maggie margaret maria mark
    martin
    mary matt matthew max megan melissa michael michelle mike molly nancy natalie nathan neil nicholas nick nicole
    nina
    noah nora oliver olivia oscar pamela pat patricia patrick paul peter philip rachel ralph ray rebecca richard rob
    robert robin roger ron ronald rose roy russell ruth ryan sally sam samantha samuel sandra sara sarah scott sean
    sharon simon sophia sophie stephanie stephen steve steven sue susan ted teresa thomas tim timothy tina tom tony
    tyler vanessa victor victoria vincent walter wendy william zoe
    """)
PLACES = _listed("""
    africa alaska algeria america amsterdam argentina arizona asia athens atlanta australia austria baghdad bangkok
    barcelona beijing belgium berlin boston brazil britain brussels budapest bulgaria cairo california cambridge
    canada
    chicago chile china colombia colorado copenhagen cuba dallas delhi denmark detroit dublin edinburgh egypt england
    ethiopia europe finland florence florida france geneva georgia germany ghana greece hamburg hawaii helsinki
    holland
    houston hungary iceland india indonesia iowa iran iraq ireland israel istanbul italy jamaica japan jerusalem
    jordan
    kansas kenya korea lagos lebanon lisbon london louisiana madrid malaysia manchester massachusetts melbourne mexico
    miami michigan milan minnesota montreal morocco moscow mumbai munich nepal netherlands nevada nigeria norway ohio
    oregon oslo ottawa oxford pakistan paris peru philadelphia philippines poland portugal prague rome russia scotland
    seattle shanghai sicily singapore spain stockholm sweden switzerland sydney syria taiwan tennessee texas thailand
    tokyo toronto turkey ukraine utah venezuela venice vermont vienna vietnam virginia wales warsaw washington
    wisconsin zurich
    """)
NUMBERS = _listed("""
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million billion dozen
    half
    first second third fourth fifth sixth seventh eighth ninth tenth
    """)
FUNCTION = _listed("""
    a about above after again against all also although am an and any are around as at be because been before being
    below between both but by can could did do does down during each either even every few for from further had has
    have
    he her here hers him his how i if in into is it its just may me might mine more most must my neither no nor not
    now
    of off on once only onto or other our out over own per same shall she should since so some such than that the
    their
    them then there these they this those though through to too toward towards under unless until up upon us very
    was we
    were what when where whether which while who whom whose why will with within without would yet you your
    """)
VERBS = _listed("""
    add agree allow am appear are arrive ask ate be became become been began begin begun being believe bought bring
    brought build built buy call came can carry catch caught change choose chose close come contain continue could cut
    decide describe did die do does done draw drew drive drove eat fall feel fell felt find found follow forget forgot
    gave get give given go goes gone got grew grow had happen has have hear heard held help hold include is keep kept
    kill knew know known lead learn leave led left let like live look lose lost love made make mean meant meet met
    might
    move must need offer open paid pass pay play put ran reach read receive remain remember return rose run said
    sat saw
    say see seem seen sell send sent set shall should show shown sit sold speak spend spent spoke stand start stay
    stood
    stop take taken talk taught teach tell think thought threw throw told took try turn understand understood use wait
    walk want was watch went were will win won work would write written wrote
    """)
_PLURAL = _listed("we they them their theirs these those are were have do")
_SINGULAR = _listed("he him his she her hers it its this that is was has does")
AGREEING = _PLURAL | _SINGULAR
"""Verb forms and pronouns that agree in number with what they are about."""
_PLURAL_NOUNS = _listed("people men women children both many few several")


_chosen: list[WordLists] = []
"""What ``use_word_lists`` was last called with, if anything."""


def word_lists() -> WordLists:
    """The lists of packages in use, beside those of this module."""
    return _chosen[0] if _chosen else installed()


def use_word_lists(lists: WordLists | None) -> None:
    """From now on in this process, use these lists: ``WordLists()`` for none but headtrace's own, None for the default.

    >>> use_word_lists(WordLists())
    >>> word_lists().sources()["verbs"], of_class(" clicked", "verb"), of_class(" shed", "verb")
    ('built in', True, False)
    >>> use_word_lists(None)
    """
    _chosen[:] = [] if lists is None else [lists]
    of_class.cache_clear()
    grammatical_number.cache_clear()


def _word(token: str) -> str:
    return token.strip().lower()


def _is_proper(token: str, own: frozenset[str], listed: frozenset[str]) -> bool:
    """Whether it is a name in a list, with a capital letter."""
    word = _word(token)
    if not token.strip()[:1].isupper():
        return False
    if word in own:
        return True
    if word not in listed or word in FUNCTION or word in VERBS or word in NUMBERS:
        return False
    return set(word_lists().parts_of_speech(word)) <= {"PROPN"}  # "Store" is a province, too


def _is_verb(token: str) -> bool:
    word = _word(token)
    if word in VERBS:
        return True
    if not word.isalpha() or token.strip()[:1].isupper() or word in FUNCTION:
        return False
    if parts := word_lists().parts_of_speech(word):
        return set(parts) <= {"VERB", "AUX"}
    stem = word[:-1] if word.endswith("s") else word
    return stem in VERBS or (len(word) > 4 and word.endswith(("ed", "ing")))


CLASSES: dict[str, tuple[Callable[[str], bool], str]] = {
    "name": (lambda token: _is_proper(token, NAMES, word_lists().names), "is a first name"),
    "place": (lambda token: _is_proper(token, PLACES, word_lists().places), "is a place"),
    "number": (lambda token: _word(token).isdigit() or _word(token) in NUMBERS, "is a number"),
    "verb": (_is_verb, "is a verb"),
    "function": (lambda token: _word(token) in FUNCTION, "is a function word"),
    "capitalised": (lambda token: token.strip()[:1].isupper(), "begins with a capital letter"),
    "punctuation": (
        lambda token: bool(token.strip()) and not any(map(str.isalnum, token)),
        "is punctuation",
    ),
    "begins_word": (
        lambda token: token[:1] == " " and token.strip()[:1].isalpha(),
        "begins a word after a space",
    ),
    "continues_word": (lambda token: token[:1].isalpha(), "has letters without a space before them"),
    "line_break": (lambda token: "\n" in token, "has a line break"),
}
"""A test of a token's text, and its wording after "the source token"."""
WORD_CLASSES = ("name", "place", "number", "verb", "function")
"""The classes that two words can share."""


@lru_cache(maxsize=1 << 18)
def of_class(token: str, name: str) -> bool:
    """Whether a token's text is of a class."""
    return CLASSES[name][0](token)


@lru_cache(maxsize=1 << 16)
def grammatical_number(token: str) -> int:
    """1 for a plural, -1 for a singular, 0 for what has no number, or where the text does not tell."""
    word = _word(token)
    if word in AGREEING or word in _PLURAL_NOUNS:
        return -1 if word in _SINGULAR else 1
    if token[:1] != " " or len(word) < 4 or not word.isalpha() or word in FUNCTION or _is_verb(token):
        return 0
    if parts := word_lists().parts_of_speech(word):
        nouns = parts.get("NOUN", ())  # "mice" is of "mouse", "news" of itself
        return 0 if not nouns else -1 if word in nouns else 1
    return 1 if word.endswith("s") and not word.endswith(("ss", "us", "is")) else -1


PACKAGES = {"names": "names", "places": "countryinfo", "verbs": "lemminflect"}
"""The package that each list comes from."""
BUILT_IN = "built in"
COVERED = 80.0
"""The commonest first names that this share of people have, in percent: the rarer ones are often other words."""

PartsOfSpeech = Mapping[str, tuple[str, ...]]
"""For each part of speech that a word can be, its lemmas."""


def _no_parts(_: str) -> PartsOfSpeech:
    return {}


@dataclass(frozen=True)
class WordLists:
    """What packages know of words. All words are in small letters."""

    names: frozenset[str] = frozenset()
    places: frozenset[str] = frozenset()
    parts_of_speech: Callable[[str], PartsOfSpeech] = _no_parts
    """Nothing for a word that is not known."""
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    """The package and version that each list comes from, for those that come from one."""

    def sources(self) -> dict[str, str]:
        """Where each list comes from, as results record it."""
        return {name: self.versions.get(name, BUILT_IN) for name in PACKAGES}


def note(sources: Mapping[str, str]) -> str:
    """Where the lists of a result come from, in a sentence, with what to install for more."""
    own = [name for name, source in sources.items() if source == BUILT_IN]
    parts = [f"{name} by {source}" for name, source in sources.items() if source != BUILT_IN]
    if own:
        listed = ", ".join(own[:-1]) + " and " * (len(own) > 1) + own[-1]
        lists = "a short list" if len(own) == 1 else "short lists"
        parts.append(f"{listed} by {lists} of headtrace's own (pip install '.[words]' for more)")
    return "Word classes: " + "; ".join(parts)


@cache
def installed() -> WordLists:
    """The lists of the packages that are installed."""
    versions = {
        name: f"{package} {version(package)}" for name, package in PACKAGES.items() if find_spec(package)
    }
    return WordLists(
        names=_first_names() if "names" in versions else frozenset(),
        places=_places() if "places" in versions else frozenset(),
        parts_of_speech=_lexicon() if "verbs" in versions else _no_parts,
        versions=versions,
    )


def _first_names() -> frozenset[str]:
    """Rows are a name, its share, the share of it and all before it, and its rank."""
    from names import FILES

    found = set[str]()
    for kind in ("first:male", "first:female"):
        for line in Path(FILES[kind]).read_text("utf-8").splitlines():
            name, _, covered, _ = line.split()
            if float(covered) <= COVERED:
                found.add(name.lower())
    return frozenset(found)


def _places() -> frozenset[str]:
    from countryinfo import all_countries

    found = set[str]()
    for country in all_countries():
        found.update(_single([country.name(), country.capital(), *country.provinces()]))
    return frozenset(found)


def _single(names: Iterable[Any]) -> Iterable[str]:
    """Those of one word: a token is never more. Some countries have no capital, and some a list of them."""
    return (name.lower() for name in names if isinstance(name, str) and name.isalpha() and len(name) > 2)


def _lexicon() -> Callable[[str], PartsOfSpeech]:
    from lemminflect import getAllLemmas

    return getAllLemmas
