"""How long work says how far it is.

>>> told = []
>>> halfway = part_of(lambda done, of_all: told.append(f"{done}/{of_all}"), before=5, of_all=10)
>>> halfway(2, 5)
>>> told
['7/10']
"""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called now and then with how much is done, of how much in all."""


def part_of(progress: Progress | None, before: int, of_all: int) -> Progress | None:
    """What a part of the work is given to report to, when ``before`` is done already."""
    if progress is None:
        return None
    return lambda done, _: progress(before + done, of_all)
