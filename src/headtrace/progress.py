"""How far a long computation is: called with the number done and the number in all."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
