"""Random choices that are the same on any machine, with any version of any library.

A ``Draw`` is a stream of numbers from SHA-256 of its key and a counter. Streams with different keys are
independent, so adding examples to one cell of a task never changes another.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import TypeVar

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
