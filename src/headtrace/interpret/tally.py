"""What a scan keeps while it runs: of every signal the highest pairs, and one uniform sample of pairs for all of them.

>>> tally = Tally.empty(n_signals=1, n_layers=1, top=2, sample=3)
>>> rows, scores = np.array([0, 0, 0]), np.array([1.0, 3.0, 2.0])
>>> tally.add_hits([Hits(rows, scores, 7, np.array([4, 5, 6]), np.array([1, 1, 1]), np.array([40, 50, 60]))])
>>> tally.top_score[0].tolist(), tally.top_dest[0].tolist()
([3.0, 2.0], [5, 6])

Nothing here grows with the corpus. Both parts are the same in whatever order chunks come, and in however many tallies
they were counted before these were put together (``merge``): pairs are ordered by score, chunk, destination and source;
and every pair draws a number, by the seed and its chunk, of which the lowest stay (so each set of pairs is as likely as
any other).

Among the highest, a pair with the same tokens up to its destination counts once: a text that a corpus has twice would
else show twice, and a judge be asked about what an explainer has seen. Of the sample, nothing is left out: it is of the
corpus as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Places = NDArray[np.int64]
_PLACE = ("chunk", "dest", "src")
_TOP = ("score", *_PLACE, "prefix")


class Hits(NamedTuple):
    """Pairs of one chunk that may be among the highest of their signals."""

    signal: Places
    score: Numbers
    chunk: int
    dest: Places
    src: Places
    prefix: Places
    """What names the tokens up to the destination (``prefixes``): all that a causal score depends on."""


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
    top_prefix: Places
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
        places = {f"top_{name}": np.full((n_signals, top), -1) for name in (*_PLACE, "prefix")}
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
        chunks = [np.full(len(each.signal), each.chunk) for each in hits]
        columns = {
            name: np.concatenate([getattr(e, name) for e in hits]) for name in Hits._fields if name != "chunk"
        }
        self._add_top({**columns, "chunk": np.concatenate(chunks)})

    def _add_top(self, new: dict[str, NDArray]) -> None:
        """The highest of old and new pairs, of each signal that has new ones."""
        touched, size = np.unique(new["signal"]), self.top_score.shape[1]
        both = {
            name: np.concatenate([getattr(self, f"top_{name}")[touched].ravel(), new[name]]) for name in _TOP
        }
        both["signal"] = np.concatenate([np.repeat(touched, size), new["signal"]])
        places = (both["src"], both["dest"], both["chunk"], -both["score"], both["signal"])
        order = np.lexsort(places)
        order = order[both["chunk"][order] >= 0]
        order = order[_first_of_each(*(both[name][order] for name in ("signal", "prefix", "src")))]
        row = np.searchsorted(touched, both["signal"][order])
        place = np.arange(len(order)) - np.searchsorted(row, row)
        kept = place < size
        for name in _TOP:
            table = np.full((len(touched), size), -np.inf if name == "score" else -1)
            table[row[kept], place[kept]] = both[name][order[kept]]
            getattr(self, f"top_{name}")[touched] = table

    def merge(self, other: Tally) -> None:
        """Take in what another tally, of other chunks, has counted."""
        signal, place = np.nonzero(other.top_chunk >= 0)
        if len(signal):
            tops = {name: getattr(other, f"top_{name}")[signal, place] for name in _TOP}
            self._add_top({**tops, "signal": signal})
        there = other.sample_chunk >= 0
        self._add_sample(
            other.sample_key[there],
            [getattr(other, f"sample_{name}")[there] for name in _PLACE],
            other.sample_score[:, there],
        )
        self.n_pairs += other.n_pairs
        self.done += other.done

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
        chunk = np.full(len(drawn.key), drawn.chunk)
        self._add_sample(drawn.key, [chunk, drawn.dest, drawn.src], scores)

    def _add_sample(self, keys: Numbers, places: Sequence[Places], scores: Numbers) -> None:
        if not len(keys):
            return
        key = np.concatenate([self.sample_key, keys])
        kept = np.argsort(key, kind="stable")[: len(self.sample_key)]
        self.sample_key = key[kept]
        for name, new in zip(_PLACE, places, strict=True):
            old = getattr(self, f"sample_{name}")
            setattr(self, f"sample_{name}", np.concatenate([old, new])[kept])
        self.sample_score = np.concatenate([self.sample_score, scores], axis=1)[:, kept]


def prefixes(token_ids: Sequence[int]) -> Places:
    """For every token, what names all of them up to it.

    >>> one, other = prefixes((5, 7, 9)), prefixes((5, 7, 8))
    >>> (one == other).tolist()
    [True, True, False]
    """
    hasher, found = hashlib.blake2b(digest_size=8), list[bytes]()
    for token in token_ids:
        hasher.update(token.to_bytes(8, "little"))
        found.append(hasher.digest())
    return np.frombuffer(b"".join(found), dtype=np.int64)


def _first_of_each(*columns: NDArray) -> NDArray[np.bool_]:
    """Whether a row is the first of those that are equal to it."""
    order = np.lexsort(columns)  # stable: rows that are equal stay in their order
    differs = np.ones(len(order), dtype=bool)
    differs[1:] = np.any([column[order][1:] != column[order][:-1] for column in columns], axis=0)
    first = np.empty(len(order), dtype=bool)
    first[order] = differs
    return first


@lru_cache(maxsize=4)
def _pairs(length: int, first: int) -> tuple[Places, Places]:
    """All causal pairs of a chunk."""
    dest, src = np.tril_indices(length)
    kept = src >= first
    return dest[kept], src[kept]
