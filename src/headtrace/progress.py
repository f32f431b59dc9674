"""How long work says how far it is.

>>> told = []
>>> halfway = part_of(lambda done, of_all: told.append(f"{done}/{of_all}"), before=5, of_all=10)
>>> halfway(2, 5)
>>> told
['7/10']
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar

Progress = Callable[[int, int], None]
"""Called now and then with how much is done, of how much in all."""


_COUNTING: ContextVar[Callable[[int], None] | None] = ContextVar("counting", default=None)


@contextmanager
def counting(heard: Callable[[int], None] | None) -> Generator[None]:
    """While the block runs, ``heard`` is told of every piece of work that is done in it, however deep inside.

    >>> with counting(lambda pieces: print("done:", pieces)):
    ...     count(3)
    done: 3
    """
    before = _COUNTING.set(heard)
    try:
        yield
    finally:
        _COUNTING.reset(before)


def count(pieces: int) -> None:
    """Tell whoever counts that so many pieces are done."""
    heard = _COUNTING.get()
    if heard is not None:
        heard(pieces)


def share_of(progress: Progress | None, before: int, size: int, of_all: int) -> Progress | None:
    """What a part of the work reports to that counts in a unit of its own; it makes up ``size`` of the whole.

    >>> share_of(lambda done, of_all: print(done, "of", of_all), before=8, size=4, of_all=12)(50, 100)
    10 of 12
    """
    if progress is None:
        return None
    return lambda done, of: progress(before + size * done // max(of, 1), of_all)


def never_back(progress: Progress | None) -> Progress | None:
    """A progress to which only more is told than before: parts may find out on the way that they are longer.

    >>> onwards = never_back(lambda done, of_all: print(done, "of", of_all))
    >>> onwards(4, 9), onwards(3, 9), onwards(5, 9)
    4 of 9
    5 of 9
    (None, None, None)
    """
    if progress is None:
        return None
    furthest = -1

    def tell(done: int, of: int) -> None:
        nonlocal furthest
        if done >= furthest:
            furthest = done
            progress(done, of)

    return tell


def part_of(progress: Progress | None, before: int, of_all: int) -> Progress | None:
    """What a part of the work is given to report to, when ``before`` is done already."""
    if progress is None:
        return None
    return lambda done, _: progress(before + done, of_all)
