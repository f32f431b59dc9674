"""Classes of tokens by their text alone: names, places, numbers, verbs, function words, and what a token looks like.

>>> [name for name in CLASSES if of_class(" Mary", name)]
['name', 'capitalised', 'begins_word']
>>> of_class(" walked", "verb"), of_class(" London", "place"), of_class(" seven", "number"), of_class(" of", "function")
(True, True, True, True)
>>> grammatical_number(" dogs"), grammatical_number(" is"), grammatical_number(",")
(1, -1, 0)

The lists are short and of English: the common ones of each class, with a few rules for endings. A class is missed more
often than it is claimed wrongly, so words that name a class and pass their test hold for more tokens than are listed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache


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


def _word(token: str) -> str:
    return token.strip().lower()


def _is_verb(token: str) -> bool:
    word = _word(token)
    if word in VERBS:
        return True
    if not word.isalpha() or token.strip()[:1].isupper() or word in FUNCTION:
        return False
    stem = word[:-1] if word.endswith("s") else word
    return stem in VERBS or (len(word) > 4 and word.endswith(("ed", "ing")))


CLASSES: dict[str, tuple[Callable[[str], bool], str]] = {
    "name": (lambda token: _word(token) in NAMES and token.strip()[:1].isupper(), "is a first name"),
    "place": (lambda token: _word(token) in PLACES and token.strip()[:1].isupper(), "is a place"),
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
    return 1 if word.endswith("s") and not word.endswith(("ss", "us", "is")) else -1
