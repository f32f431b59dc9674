"""Words that fill the slots of the tasks, and the choice among them. Objects start with a consonant sound, so that "a"
always fits.

Choices are the same on any machine, with any version of any library. A ``Draw`` is a stream of numbers from SHA-256 of
its key and a counter. Streams with different keys are independent, so adding examples to one cell of a task never
changes another.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import TypeVar


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FEMALE_NAMES = _words(
    """Mary Anna Emma Sarah Laura Julia Alice Jane Kate Lisa Maria Linda Susan Karen Nancy Helen Ruth Carol
    Amanda Jessica Jennifer Michelle Melissa Rebecca Rachel Elizabeth Margaret Katherine Christine Diana
    Victoria Olivia Sophie Sophia Emily Hannah Amy Lucy Rose Grace Claire Martha Julie Anne Barbara
    Patricia Catherine Stephanie Nicole Samantha Maya Ellen Betty Sandra Heather"""
)
MALE_NAMES = _words(
    """John Tom James Michael David Robert William Richard Thomas Charles Daniel Matthew Anthony Mark Paul
    Steven Andrew Joshua Kevin Brian George Edward Ronald Timothy Jason Jeffrey Ryan Jacob Gary Nicholas Eric
    Jonathan Stephen Larry Justin Scott Brandon Benjamin Samuel Gregory Frank Patrick Jack Dennis Jerry Peter
    Adam Henry Nathan Carl Arthur Simon Martin Oliver Luke"""
)
NAMES = tuple(name for pair in zip(FEMALE_NAMES, MALE_NAMES, strict=True) for name in pair)

PLACES = _words(
    """store park school office beach garden station library market museum hotel restaurant hospital kitchen
    farm church house bank theater zoo gym river airport bakery"""
)
OBJECTS = _words(
    """drink book ring ball basket letter key flower computer phone map ticket coat lamp cake pen hat camera
    guitar bottle necklace snack sandwich gift card box picture coin knife blanket"""
)

EVENTS = _words(
    """war trip project siege journey reign festival strike drought dispute trial alliance voyage expedition
    construction campaign negotiation epidemic rebellion partnership"""
)

JOBS = _words("teacher singer doctor cook dancer driver writer painter lawyer farmer")

CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "England": "London",
    "Ireland": "Dublin",
    "Scotland": "Edinburgh",
    "Portugal": "Lisbon",
    "Austria": "Vienna",
    "Greece": "Athens",
    "Poland": "Warsaw",
    "Hungary": "Budapest",
    "Russia": "Moscow",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Denmark": "Copenhagen",
    "Finland": "Helsinki",
    "Belgium": "Brussels",
    "Japan": "Tokyo",
    "China": "Beijing",
    "Egypt": "Cairo",
    "Iraq": "Baghdad",
    "Iran": "Tehran",
    "Syria": "Damascus",
    "Cuba": "Havana",
    "Peru": "Lima",
    "Canada": "Ottawa",
    "Kenya": "Nairobi",
    "Afghanistan": "Kabul",
}
LANGUAGES = {
    "France": "French",
    "Germany": "German",
    "Italy": "Italian",
    "Spain": "Spanish",
    "England": "English",
    "Portugal": "Portuguese",
    "Brazil": "Portuguese",
    "Greece": "Greek",
    "Poland": "Polish",
    "Hungary": "Hungarian",
    "Russia": "Russian",
    "Sweden": "Swedish",
    "Denmark": "Danish",
    "Japan": "Japanese",
    "China": "Chinese",
    "Egypt": "Arabic",
    "Iraq": "Arabic",
    "Syria": "Arabic",
    "Cuba": "Spanish",
    "Mexico": "Spanish",
    "Argentina": "Spanish",
    "Australia": "English",
    "Turkey": "Turkish",
    "Iran": "Persian",
}
CONTINENTS = {
    "France": "Europe",
    "Germany": "Europe",
    "Italy": "Europe",
    "Spain": "Europe",
    "Portugal": "Europe",
    "Greece": "Europe",
    "Poland": "Europe",
    "Norway": "Europe",
    "Sweden": "Europe",
    "Belgium": "Europe",
    "Japan": "Asia",
    "China": "Asia",
    "India": "Asia",
    "Iraq": "Asia",
    "Iran": "Asia",
    "Syria": "Asia",
    "Thailand": "Asia",
    "Vietnam": "Asia",
    "Egypt": "Africa",
    "Kenya": "Africa",
    "Nigeria": "Africa",
    "Ghana": "Africa",
    "Morocco": "Africa",
    "Ethiopia": "Africa",
}


T = TypeVar("T")


class Draw:
    """A deterministic stream of choices.

    >>> Draw("ioi", 0).pick(["Mary", "John", "Tom"]) == Draw("ioi", 0).pick(["Mary", "John", "Tom"])
    True
    """

    def __init__(self, *key: str | int) -> None:
        self._key = "\x1f".join(map(str, key)).encode()
        self._count = 0

    def below(self, bound: int) -> int:
        """A whole number in [0, bound). 64 bits make the bias of the remainder smaller than 1e-15."""
        digest = sha256(self._key + self._count.to_bytes(8, "big")).digest()
        self._count += 1
        return int.from_bytes(digest[:8], "big") % bound

    def pick(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        """``count`` different places of the sequence, in random order."""
        chosen: dict[int, T] = {}
        while len(chosen) < count:
            index = self.below(len(items))
            chosen[index] = items[index]
        return list(chosen.values())

    def shuffled(self, items: Sequence[T]) -> list[T]:
        order = list(items)
        for last in range(len(order) - 1, 0, -1):
            other = self.below(last + 1)
            order[last], order[other] = order[other], order[last]
        return order
