"""Sufficiency over the number of components kept: which sizes are measured, and the areas of the curve.

>>> sizes(27)
[1, 2, 5, 10, 20, 27]
>>> shares_of(25_000)[:4]
[25, 50, 125, 250]
>>> areas([0.0, 0.5, 1.0], [0.0, 1.0, 1.0])                    # below the curve, and between the curve and 1
(0.75, 0.25)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Of all components: where MIB measures a curve."""
SHOWN = (5, 10, 20, 40)
"""The sizes that tables compare."""


def _marks() -> Iterator[int]:
    yield from (1, 2)
    size = 5
    while True:
        yield size
        size *= 2


def sizes(own: int) -> list[int]:
    """1, 2, 5, 10, 20, 40, ... up to a circuit's own size, which is measured too."""
    found: list[int] = []
    for size in _marks():
        if size >= own:
            return [*found, own] if own else found
        found.append(size)
    return found


def shares_of(total: int) -> list[int]:
    """How many components each of ``SHARES`` is: at least one."""
    return [max(1, round(share * total)) for share in SHARES]


def areas(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """By trapezoid, the area below a curve (CPR) and that of its distance from one (CMD)."""
    below = above = 0.0
    for left in range(len(x) - 1):
        width = x[left + 1] - x[left]
        below += width * (y[left] + y[left + 1]) / 2
        above += width * (abs(1 - y[left]) + abs(1 - y[left + 1])) / 2
    return below, above
