"""Progress of long work: callbacks that are told how much is done, and how parts of the work report to them.

>>> reports = []
>>> second_half = part_of(lambda done, total: reports.append(f"{done}/{total}"), before=5, total=10)
>>> second_half(2, 5)
>>> reports
['7/10']
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar

Progress = Callable[[int, int], None]
"""Called now and then with how much is done, and how much there is in all. It may raise to cancel the work."""

_COUNTING: ContextVar[Callable[[int], None] | None] = ContextVar("counting", default=None)
_CHECKING: ContextVar[Callable[[], None] | None] = ContextVar("checking", default=None)


@contextmanager
def counting(callback: Callable[[int], None] | None) -> Generator[None]:
    """While the block runs, ``callback`` gets the number of pieces of work done in it, however deep inside.

    >>> with counting(lambda pieces: print("done:", pieces)):
    ...     count(3)
    done: 3
    """
    before = _COUNTING.set(callback)
    try:
        yield
    finally:
        _COUNTING.reset(before)


def count(pieces: int) -> None:
    """Report finished pieces of work to the enclosing ``counting``."""
    callback = _COUNTING.get()
    if callback is not None:
        callback(pieces)


@contextmanager
def checking(callback: Callable[[], None]) -> Generator[None]:
    """While the block runs, ``callback`` is called before every pass of a model in this thread, however deep inside. It
    may raise to cancel the work.

    >>> with checking(lambda: print("a pass")):
    ...     check()
    a pass
    """
    before = _CHECKING.set(callback)
    try:
        yield
    finally:
        _CHECKING.reset(before)


def check() -> None:
    """Say to the enclosing ``checking`` that a pass begins."""
    callback = _CHECKING.get()
    if callback is not None:
        callback()


def part_of(progress: Progress | None, before: int, total: int) -> Progress | None:
    """The progress of a part of the work that counts in the same unit; ``before`` was done already."""
    if progress is None:
        return None
    return lambda done, _: progress(before + done, total)


def scaled(progress: Progress | None, before: int, size: int, total: int) -> Progress | None:
    """The progress of a part of the work that counts in a unit of its own, and makes up ``size`` of the whole.

    >>> scaled(lambda done, total: print(done, "of", total), before=8, size=4, total=12)(50, 100)
    10 of 12
    """
    if progress is None:
        return None
    return lambda done, of: progress(before + size * done // max(of, 1), total)


def monotonic(progress: Progress | None) -> Progress | None:
    """A progress that never goes back, even if a part turns out to be longer than it said.

    >>> forward = monotonic(lambda done, total: print(done, "of", total))
    >>> forward(4, 9), forward(3, 9), forward(5, 9)
    4 of 9
    5 of 9
    (None, None, None)
    """
    if progress is None:
        return None
    furthest = -1

    def report(done: int, of: int) -> None:
        nonlocal furthest
        if done >= furthest:
            furthest = done
            progress(done, of)

    return report
