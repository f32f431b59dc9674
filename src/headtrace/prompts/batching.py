"""Which prompts go through the model together."""

from __future__ import annotations

from collections.abc import Sequence


def batches(
    lengths: Sequence[int], tokens_at_once: int = 2048, prompts_at_once: int | None = None
) -> list[list[int]]:
    """Which prompts to run together: similar lengths, so that little is padded, and a bounded number of tokens.

    Gives places in ``lengths``. A prompt that is longer than the bound goes alone.

    >>> batches([3, 9, 3, 8], tokens_at_once=10)
    [[0, 2], [3], [1]]
    """
    found: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: (lengths[place], place)):
        size = len(found[-1]) if found else 0
        fits = lengths[place] * (size + 1) <= tokens_at_once
        if found and fits and (prompts_at_once is None or size < prompts_at_once):
            found[-1].append(place)
        else:
            found.append([place])
    return found
