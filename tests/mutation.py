"""Damage for files: bytes that are lost, doubled or changed, and values that no field expects.

Seeded, so that a case is always the same.
"""

from __future__ import annotations

import copy
import random
import re
from typing import Any

SNIPPETS = (
    *(b"1e400", b"-1e999", b"NaN", b"-Infinity", b"9" * 5000, b"-1", b"1.5", b"true", b"null", b'"x"'),
    *(b"\xff", b"\xed\xa0\x80", b"\\ud800", b"\xef\xbb\xbf", b"\x00", b"\xe2\x80\xa8", b"\r", b"\n", b'"'),
    *(b"[" * 3000, b'{"a":' * 3000, b"{}", b"[]", b",", b"}", b"]", b"\\"),
)
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2**63,
        10**400,
        0.0,
        -0.5,
        1e308,
        float("nan"),
        float("inf"),
        "",
        "x",
        "0",
    ),
    *("\ud800", "\u202e<b>", "a" * 500, [], {}, [[]], [None], {"a": 1}, {"kind": "head"}, [1, 2], ["x"]),
)


def mutated(content: bytes, rng: random.Random) -> bytes:
    """The content with one to three damages."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        content = _damaged(content, rng)
    return content


def _damaged(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content) + 1)
    span = rng.choice((1, 1, 2, 8, 60))
    match rng.randrange(7):
        case 0:
            return content[:at]
        case 1:
            return content[:at] + content[at + span :]
        case 2:
            return content[:at] + content[at : at + span] * 2 + content[at + span :]
        case 3:
            return content[:at] + rng.randbytes(span) + content[at + span :]
        case 4:
            return content[:at] + rng.choice(SNIPPETS) + content[at:]
        case 5:
            bit = bytes([content[at] ^ (1 << rng.randrange(8))]) if at < len(content) else b""
            return content[:at] + bit + content[at + 1 :]
        case _:
            digit = re.compile(rb"[0-9]").search(content, at)
            at = 0 if digit is None else digit.start()
            return content[:at] + rng.choice((b"7", b"0", b"-", b".", b"e9", b"99")) + content[at + 1 :]


def misshaped(data: Any, rng: random.Random) -> Any:
    """JSON data in which one value is replaced, left out, doubled or moved to another place."""
    places = list(_places(data))
    holder, key = rng.choice(places)
    match rng.randrange(5):
        case 0 | 1:
            holder[key] = rng.choice(VALUES)
        case 2:
            del holder[key]
        case 3 if isinstance(holder, list):
            holder.insert(rng.randrange(len(holder) + 1), holder[key])
        case _:
            other, place = rng.choice(places)
            holder[key] = copy.deepcopy(other[place])
    return data


def _places(data: Any) -> Any:
    keys = list(data) if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    for key in keys:
        yield data, key
        yield from _places(data[key])


def told(error: Exception, *words: str) -> None:
    """The reason can be printed, is for people to read, and has these words."""
    assert str(error).encode()
    assert len(str(error)) < 2000
    for word in words:
        assert word in str(error)
