"""Signals, the token pairs that they score, and what a scan keeps of them.

>>> pair = Pair("text 0", dest=2, src=0, score=1.5, token_ids=(5, 7, 5), tokens=(" a", " b", " a"))
>>> pair.marked()
'[[ a]] b<< a>>'
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headtrace.circuits.parts import mark
from headtrace.vocabulary import head_name

FIRST_LEFT_OUT = "pairs whose source is the first token are left out"
"""A note of most scans: such pairs would fill every list."""


@dataclass(frozen=True)
class ScoredSignal:
    """Some channels of a head, whose scores are summed at every pair of destination and source."""

    id: str
    """Unique within a scan: ``L9H6:3`` for a channel, ``L9H6:3+7 <content id>:<edge>`` for an edge of a circuit."""
    layer: int
    head: int
    kind: Literal["channel", "circuit"]
    channels: tuple[int, ...]
    side: Literal["query", "key"] | None = None
    """For an edge of a circuit: the side of the head that it was written to."""

    @property
    def name(self) -> str:
        """The head and its channels: ``L9H6 3+7``."""
        return f"{head_name(self.layer, self.head)} {'+'.join(map(str, self.channels))}"

    @property
    def reads(self) -> tuple[int, int, tuple[int, ...]]:
        """Layer, head and sorted channels: signals that agree in them have the same scores."""
        return self.layer, self.head, tuple(sorted(self.channels))

    @property
    def edge(self) -> tuple[str, int] | None:
        """The content id of the circuit that the signal was taken from, and the number of the edge in it.

        >>> ScoredSignal("L9H6:3 ab12:40", 9, 6, "circuit", (3,), "query").edge
        ('ab12', 40)
        """
        circuit, _, edge = self.id.partition(" ")[2].rpartition(":")
        return (circuit, int(edge)) if circuit and edge.isdigit() else None


@dataclass(frozen=True)
class Pair:
    """A destination and a source in their context, with the signal's score there."""

    text: str
    """The id of the chunk of the corpus."""
    dest: int
    """Position of the attending token within ``token_ids``."""
    src: int
    """Position of the token attended to; never after ``dest``."""
    score: float
    token_ids: tuple[int, ...]
    """The context, up to the destination or a little further."""
    tokens: tuple[str, ...]

    @property
    def place(self) -> tuple[str, int, int]:
        """Chunk, destination and source: equal for the same pair of tokens, whatever signal scored it."""
        return self.text, self.dest, self.src

    def marked(self) -> str:
        """The context with the source in ``[[...]]`` and the destination in ``<<...>>``."""
        return mark(self.tokens, self.dest, self.src)

    def excerpt(self, around: int = 8) -> str:
        """The marked tokens with a few around each; omitted tokens are shown as ``...``.

        >>> tokens = tuple(f" {i}" for i in range(9))
        >>> Pair("", dest=7, src=1, score=1.0, token_ids=tuple(range(9)), tokens=tokens).excerpt(around=1)
        ' 0[[ 1]] 2 ... 6<< 7>> 8'
        """
        kept = {
            position
            for centre in (self.src, self.dest)
            for position in range(max(0, centre - around), min(len(self.tokens), centre + around + 1))
        }
        words: list[str] = []
        for position in sorted(kept):
            if position and position - 1 not in kept:
                words.append(" ...")
            word = f"[[{self.tokens[position]}]]" if position == self.src else self.tokens[position]
            words.append(f"<<{word}>>" if position == self.dest else word)
        return "".join(words) + ("" if max(kept) == len(self.tokens) - 1 else " ...")


@dataclass(frozen=True)
class SignalExamples:
    """The pairs that a scan keeps of one signal."""

    signal: ScoredSignal
    top: tuple[Pair, ...]
    """The pairs with the highest scores, highest first."""
    random: tuple[Pair, ...]
    """A uniform sample of all causal pairs."""
    middle: tuple[Pair, ...] = ()
    """Pairs that score near the median of the positive scores: hard to tell from the top."""
    quantiles: tuple[tuple[float, float], ...] = ()
    """(q, score), over all causal pairs."""
    n_pairs: int = 0
    """How many pairs were scored."""
    notes: tuple[str, ...] = ()
    """Caveats, such as that no score was above zero."""
