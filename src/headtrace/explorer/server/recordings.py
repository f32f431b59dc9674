"""Recordings of recent prompts, so that a click does not run the model again: bounded in bytes and in number.

Those that were not used for longest go first; the latest stays, whatever its size.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from headtrace.models import Recording


@dataclass(frozen=True)
class Kept:
    """A recording, and which of the served models it is of."""

    recording: Recording = field(repr=False)
    model: int


class Recordings:
    """The cache. Any thread may use it."""

    def __init__(self, max_bytes: int, max_count: int) -> None:
        self.max_bytes, self.max_count = max_bytes, max_count
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def n_bytes(self) -> int:
        with self._lock:
            return self._bytes()

    def get(self, id: str) -> Kept | None:
        with self._lock:
            if id in self._kept:
                self._kept.move_to_end(id)
            return self._kept.get(id)

    def put(self, id: str, recording: Recording, model: int) -> None:
        with self._lock:
            self._kept[id] = Kept(recording, model)
            self._kept.move_to_end(id)
            while len(self._kept) > 1 and (
                len(self._kept) > self.max_count or self._bytes() > self.max_bytes
            ):
                self._kept.popitem(last=False)

    def _bytes(self) -> int:
        return sum(held_bytes(kept.recording) for kept in self._kept.values())


def held_bytes(recording: Recording) -> int:
    """What a recording takes in memory now: what was recorded, its masks, and what was derived from it since."""
    found = [each for each in tuple(vars(recording).values()) if isinstance(each, Tensor)]
    derived = {id(each): each for each in found}.values()  # one may be there under two names
    masks = {id(mask): mask for mask in recording.visible}.values()
    return recording.n_bytes + sum(each.numel() * each.element_size() for each in (*derived, *masks))
