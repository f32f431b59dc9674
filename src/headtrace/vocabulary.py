"""The words of headtrace that every room shares: sides, kinds of components, heads and firings.

>>> Firing.parse("L9H6:14:3")
Firing(layer=9, head=6, dest=14, src=3)
>>> print(Firing(9, 6, 14, 3))
L9H6 14->3
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from headtrace.errors import InputError

Side = Literal["query", "key", "root"]
Kind = Literal["head", "mlp", "embedding", "attention_bias", "offset", "root"]

_HEAD = re.compile(r"\s*L(\d+)H(\d+)\s*", re.IGNORECASE)
_FIRING = re.compile(r"\s*L(\d+)H(\d+)\s*[: ]\s*(\d+)\s*(?::|->)\s*(\d+)\s*", re.IGNORECASE)


def head_name(layer: int, head: int) -> str:
    """How a head prints: ``L9H6``."""
    return f"L{layer}H{head}"


def parse_head(text: str) -> tuple[int, int]:
    """Layer and head of ``L9H6``."""
    match = _HEAD.fullmatch(text)
    if match is None:
        raise InputError(f"{text!r} is not a head. Write layer and head like L9H6.")
    return int(match[1]), int(match[2])


@dataclass(frozen=True, order=True)
class Firing:
    """A head attending from one position (``dest``, the query) to another (``src``, the key)."""

    layer: int
    head: int
    dest: int
    src: int

    @classmethod
    def parse(cls, text: str | Firing) -> Firing:
        """Read ``L9H6:14:3`` (layer and head : dest : src) or ``L9H6 14->3``."""
        if isinstance(text, Firing):
            return text
        match = _FIRING.fullmatch(text)
        if match is None:
            raise InputError(
                f"{text!r} is not a firing. Write layer and head, destination and source position, "
                "like L9H6:14:3 (or 'L9H6 14->3')."
            )
        layer, head, dest, src = (int(group) for group in match.groups())
        return cls(layer, head, dest, src)

    def __str__(self) -> str:
        return f"{head_name(self.layer, self.head)} {self.dest}->{self.src}"


@dataclass(frozen=True, order=True)
class Component:
    """Something that writes into the residual: a head reading one source, an MLP, the embedding, a bias.

    >>> print(Component("head", 5, 3, src=7))
    L5H3 from 7
    """

    kind: Kind
    layer: int | None = None
    head: int | None = None
    src: int | None = None

    def __str__(self) -> str:
        if self.kind == "head" and self.layer is not None and self.head is not None:
            name = head_name(self.layer, self.head)
            return name if self.src is None else f"{name} from {self.src}"
        return self.kind if self.layer is None else f"{self.kind} {self.layer}"
