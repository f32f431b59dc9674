"""The id of a circuit: a hash of everything it says, so that a circuit is known wherever it is kept.

>>> from headtrace.circuits.describe import example
>>> content_id(example()) == content_id(example()) != content_id(example().prune(min_weight=1.0))
True
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from headtrace.circuits.files import to_json

if TYPE_CHECKING:
    from headtrace.circuits.circuit import Circuit

_WHOLE = 2**53
"""Up to here floats hold every integer, so that 1.0 and 1 are the same number, written in two ways."""


def content_id(circuit: Circuit) -> str:
    """32 hexadecimal digits; equal circuits have equal ids, on every machine and in every version of the file."""
    said = {key: _same(value) for key, value in to_json(circuit).items() if key != "schema"}
    text = json.dumps(said, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _same(value: Any) -> Any:
    """Equal numbers in the same form: 1.0 as 1, -0.0 as 0."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < _WHOLE else value
    if isinstance(value, dict):
        return {key: _same(item) for key, item in value.items()}
    return [_same(item) for item in value] if isinstance(value, list) else value
