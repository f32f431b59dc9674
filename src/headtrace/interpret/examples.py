"""What a corpus shows of a signal: token pairs that score highest, and others to tell them from.

>>> pair = Pair("text 0", dest=2, src=0, score=1.5, token_ids=(5, 7, 5), tokens=(" a", " b", " a"))
>>> pair.marked()
'[[ a]] b<< a>>'
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from headtrace.circuits.parts import mark
from headtrace.vocabulary import head_name

FIRST_LEFT_OUT = "pairs whose source is the first token are left out"
"""A note of most scans: such pairs would fill every list."""


@dataclass(frozen=True)
class ScoredSignal:
    """A pair of directions that a head reads with: what is scored for a destination and a source together."""

    id: str
    """Names the signal within one scan: ``L9H6:3`` for a channel, ``L9H6:3+7 <content id>:<edge>`` for one of a
    circuit."""
    layer: int
    head: int
    kind: Literal["channel", "circuit"]
    channels: tuple[int, ...]
    side: Literal["query", "key"] | None = None
    """For a signal of a circuit: the side that it was written to."""

    @property
    def name(self) -> str:
        """The head and its channels: ``L9H6 3+7``."""
        return f"{head_name(self.layer, self.head)} {'+'.join(map(str, self.channels))}"


@dataclass(frozen=True)
class Pair:
    """A destination and a source in their context, with the signal's score there."""

    text: str
    """Which piece of the corpus, by its id."""
    dest: int
    """The attending token, counted within ``token_ids``."""
    src: int
    """The token attended to; never after ``dest``."""
    score: float
    token_ids: tuple[int, ...]
    """The context: all that is shown, up to the destination or somewhat further."""
    tokens: tuple[str, ...]

    def marked(self) -> str:
        """The context with the source in ``[[...]]`` and the destination in ``<<...>>``."""
        return mark(self.tokens, self.dest, self.src)

    def excerpt(self, around: int = 8) -> str:
        """The marked tokens with a few around each; what is left out between and around them is ``...``.

        >>> tokens = tuple(f" {i}" for i in range(9))
        >>> Pair("", dest=7, src=1, score=1.0, token_ids=tuple(range(9)), tokens=tokens).excerpt(around=1)
        ' 0[[ 1]] 2 ... 6<< 7>> 8'
        """
        kept = {
            place
            for centre in (self.src, self.dest)
            for place in range(max(0, centre - around), min(len(self.tokens), centre + around + 1))
        }
        words: list[str] = []
        for place in sorted(kept):
            if (place and not words) or (words and place - 1 not in kept):
                words.append(" ...")
            word = f"[[{self.tokens[place]}]]" if place == self.src else self.tokens[place]
            words.append(f"<<{word}>>" if place == self.dest else word)
        return "".join(words) + ("" if max(kept) == len(self.tokens) - 1 else " ...")


@dataclass(frozen=True)
class SignalExamples:
    """All that a scan keeps of one signal."""

    signal: ScoredSignal
    top: tuple[Pair, ...]
    """The highest scores, highest first."""
    random: tuple[Pair, ...]
    """A uniform sample of all causal pairs."""
    middle: tuple[Pair, ...] = ()
    """Pairs that score near the median of those above zero: hard to tell from the top."""
    quantiles: tuple[tuple[float, float], ...] = ()
    """(q, score), of all causal pairs."""
    n_pairs: int = 0
    """How many pairs were scored."""
    notes: tuple[str, ...] = field(default=())
    """What is to be known about them, such as that no score was above zero."""
