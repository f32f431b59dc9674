"""What all roots have in common."""

from __future__ import annotations

from collections.abc import Callable

from headtrace.validation import Ids, Words

Quote = Callable[[str], str]


def quoted(text: str) -> str:
    """Token text as a terminal shows it: with its outer space, in quotation marks."""
    return f'"{text}"'


def words(ids: Ids, tokens: Words | None, joint: str = " / ") -> str:
    """Token text where it is known, else the ids."""
    return joint.join(tokens or [f"token {i}" for i in ids])
