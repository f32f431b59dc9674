"""What a scan keeps while it runs: of every signal the highest pairs, and one uniform sample of pairs for all of them.

>>> tally = Tally.empty(n_signals=1, n_layers=1, top=2, sample=3)
>>> tally.add_hits([Hits(np.array([0, 0, 0]), np.array([1.0, 3.0, 2.0]), 7, np.array([4, 5, 6]), np.array([1, 1, 1]))])
>>> tally.top_score[0].tolist(), tally.top_dest[0].tolist()
([3.0, 2.0], [5, 6])

Nothing here grows with the corpus. Both parts are the same in whatever order chunks come: pairs are ordered by score,
chunk, destination and source; and every pair draws a number, by the seed and its chunk, of which the lowest stay (so
each set of pairs is as likely as any other).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Places = NDArray[np.int64]
_PLACE = ("chunk", "dest", "src")


class Hits(NamedTuple):
    """Pairs of one chunk that may be among the highest of their signals."""

    signal: Places
    score: Numbers
    chunk: int
    dest: Places
    src: Places


class Drawn(NamedTuple):
    """Pairs of one chunk that enter the sample: by what they drew."""

    key: Numbers
    chunk: int
    dest: Places
    src: Places


@dataclass(eq=False)
class Tally:
    """All of it, as arrays."""

    top_score: Numbers
    """(signal, place), highest first; minus infinity where there is none."""
    top_chunk: Places
    top_dest: Places
    top_src: Places
    sample_key: Numbers
    """Lowest first; infinity where there is none."""
    sample_chunk: Places
    sample_dest: Places
    sample_src: Places
    sample_score: Numbers
    """(signal, place in the sample); not a number where the layer does not see the pair."""
    n_pairs: Places
    """(layer): pairs that were scored."""
    done: Places
    """Chunks and tokens read."""

    @classmethod
    def empty(cls, n_signals: int, n_layers: int, top: int, sample: int) -> Tally:
        places = {f"top_{name}": np.full((n_signals, top), -1) for name in _PLACE}
        places |= {f"sample_{name}": np.full(sample, -1) for name in _PLACE}
        return cls(
            top_score=np.full((n_signals, top), -np.inf),
            sample_key=np.full(sample, np.inf),
            sample_score=np.full((n_signals, sample), np.nan),
            n_pairs=np.zeros(n_layers, dtype=np.int64),
            done=np.zeros(2, dtype=np.int64),
            **places,
        )

    def arrays(self) -> dict[str, NDArray]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def least(self) -> Numbers:
        """What a score must exceed, per signal: the lowest of its top, and zero."""
        return np.maximum(self.top_score[:, -1], 0.0)

    @property
    def chunks(self) -> set[int]:
        """The chunks that something is kept of."""
        found = np.union1d(self.top_chunk, self.sample_chunk)
        return {int(each) for each in found if each >= 0}

    def add_hits(self, hits: Sequence[Hits]) -> None:
        """Put new pairs among the highest, and keep as many as before."""
        hits = [each for each in hits if len(each.signal)]
        if not hits:
            return
        touched = np.unique(np.concatenate([each.signal for each in hits]))
        size = self.top_score.shape[1]
        signal, score, chunk, dest, src = (
            np.concatenate([old, *new])
            for old, new in (
                (np.repeat(touched, size), [each.signal for each in hits]),
                (self.top_score[touched].ravel(), [each.score for each in hits]),
                (self.top_chunk[touched].ravel(), [np.full(len(e.signal), e.chunk) for e in hits]),
                (self.top_dest[touched].ravel(), [each.dest for each in hits]),
                (self.top_src[touched].ravel(), [each.src for each in hits]),
            )
        )
        order = np.lexsort((src, dest, chunk, -score, signal))
        first = np.searchsorted(signal[order], touched)
        kept = order[(first[:, None] + np.arange(size)).ravel()]
        for name, values in (("score", score), ("chunk", chunk), ("dest", dest), ("src", src)):
            getattr(self, f"top_{name}")[touched] = values[kept].reshape(-1, size)

    def draw(self, seed: int, chunk: int, length: int, first: int) -> Drawn:
        """Which pairs of a chunk enter the sample as it is now; sources before ``first`` do not count."""
        dest, src = _pairs(length, first)
        key = np.random.default_rng([seed, chunk]).random(len(dest))
        chosen = np.flatnonzero(key < self.sample_key[-1])
        if len(chosen) > len(self.sample_key):
            chosen = chosen[np.argsort(key[chosen], kind="stable")[: len(self.sample_key)]]
        return Drawn(key[chosen], chunk, dest[chosen], src[chosen])

    def add_drawn(self, drawn: Drawn, scores: Numbers) -> None:
        """Take pairs into the sample, with the scores that all signals have there; others leave it."""
        key = np.concatenate([self.sample_key, drawn.key])
        kept = np.argsort(key, kind="stable")[: len(self.sample_key)]
        self.sample_key = key[kept]
        chunk = np.full(len(drawn.key), drawn.chunk)
        self.sample_chunk = np.concatenate([self.sample_chunk, chunk])[kept]
        self.sample_dest = np.concatenate([self.sample_dest, drawn.dest])[kept]
        self.sample_src = np.concatenate([self.sample_src, drawn.src])[kept]
        self.sample_score = np.concatenate([self.sample_score, scores], axis=1)[:, kept]


@lru_cache(maxsize=4)
def _pairs(length: int, first: int) -> tuple[Places, Places]:
    """All causal pairs of a chunk."""
    dest, src = np.tril_indices(length)
    kept = src >= first
    return dest[kept], src[kept]
