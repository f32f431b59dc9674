"""Words that fill the slots of the tasks. Objects start with a consonant sound, so that "a" always fits."""

from __future__ import annotations


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
