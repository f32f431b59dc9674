"""What a scan computes: the scores of many signals at every token pair of a corpus, and the pairs that it keeps.

Of every signal are kept:

- the ``top`` pairs with the highest positive scores;
- ``random``: the first 40 of a uniform sample of 1,024 pairs, which all signals share;
- ``middle``: of the rest of that sample, the pairs nearest to the median of the positive scores;
- ``quantiles`` of the scores in that sample.

Pairs whose source is the first token are left out unless ``sinks=True``: nearly every head attends there when it has
nothing else to attend to, so they would fill every list.

Memory does not grow with the corpus, and the result does not depend on the order in which chunks are read or on how
they are divided among workers: pairs are ordered by score, chunk, destination and source; every pair draws a random
number from the seed and its chunk, and the lowest numbers form the sample; sums over heads are added batch by batch.
`headtrace.interpret.scan_run` runs a scan. It is saved as one safetensors file: numbers as arrays, the rest as JSON in
its header.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from headtrace.errors import InputError
from headtrace.interpret.head_measures import RECORDED, TENSORS, HeadSums
from headtrace.interpret.scored_signals import (
    FIRST_LEFT_OUT,
    Pair,
    ScoredSignal,
    SignalBlock,
    SignalExamples,
    score_blocks,
)
from headtrace.models.devices import on_host, rounded
from headtrace.writing import replacing

if TYPE_CHECKING:
    from headtrace.interpret.corpus import Chunk
    from headtrace.models import Model, Recording

SCHEMA = "headtrace.scan/2"
FILE = "scan.safetensors"
RANDOM = 40
QUANTILES = (0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999, 1.0)
TOKENS_AT_ONCE = 2048
"""Tokens of the chunks that go through the model together."""
FURTHER = 8
"""Tokens of the context shown after the destination."""

Numbers = NDArray[np.float64]
Indices = NDArray[np.int64]
_PLACE = ("chunk", "dest", "src")
_TOP = ("score", *_PLACE, "prefix")


# -- The pairs that are kept -------------------------------------------------------------------------------------


class Hits(NamedTuple):
    """Pairs of one chunk that may be among the highest of their signals."""

    signal: Indices
    score: Numbers
    chunk: int
    dest: Indices
    src: Indices
    prefix: Indices
    """Hash of the tokens up to the destination (``prefixes``): all that a causal score depends on."""


class Drawn(NamedTuple):
    """Pairs of one chunk that enter the uniform sample, with the random numbers that they drew."""

    key: Numbers
    chunk: int
    dest: Indices
    src: Indices


@dataclass(eq=False)
class Tally:
    """The highest pairs of every signal and one uniform sample of pairs, as arrays of fixed size.

    >>> tally = Tally.empty(n_signals=1, n_layers=1, top=2, sample=3)
    >>> rows, scores = np.array([0, 0, 0]), np.array([1.0, 3.0, 2.0])
    >>> tally.add_hits([Hits(rows, scores, 7, np.array([4, 5, 6]), np.array([1, 1, 1]), np.array([40, 50, 60]))])
    >>> tally.top_score[0].tolist(), tally.top_dest[0].tolist()
    ([3.0, 2.0], [5, 6])

    Among the highest, pairs with the same source and the same tokens up to the destination count once: otherwise a text
    that the corpus repeats would show twice, and the judge would see pairs that the explainer has seen. The sample
    leaves nothing out: it represents the corpus as it is.
    """

    top_score: Numbers
    """(signal, rank), highest first; minus infinity where there are fewer."""
    top_chunk: Indices
    top_dest: Indices
    top_src: Indices
    top_prefix: Indices
    sample_key: Numbers
    """(sample), lowest first; infinity where there are fewer."""
    sample_chunk: Indices
    sample_dest: Indices
    sample_src: Indices
    sample_score: Numbers
    """(signal, sample); NaN where the layer's mask hides the pair."""
    n_pairs: Indices
    """(layer): pairs that were scored."""
    done: Indices
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

    @property
    def chunks(self) -> set[int]:
        """The chunks that some kept pair is in."""
        found = np.union1d(self.top_chunk, self.sample_chunk)
        return {int(each) for each in found if each >= 0}

    def add_hits(self, hits: Sequence[Hits]) -> None:
        """Insert pairs among the highest of their signals."""
        chunks = [np.full(len(each.signal), each.chunk) for each in hits]
        if any(map(len, chunks)):
            names = [name for name in Hits._fields if name != "chunk"]
            columns = {name: np.concatenate([getattr(each, name) for each in hits]) for name in names}
            self._add_top({**columns, "chunk": np.concatenate(chunks)})

    def _add_top(self, new: dict[str, NDArray]) -> None:
        """Keep the highest of old and new pairs, for each signal that has new ones."""
        touched, size = np.unique(new["signal"]), self.top_score.shape[1]
        both = {
            name: np.concatenate([getattr(self, f"top_{name}")[touched].ravel(), new[name]]) for name in _TOP
        }
        both["signal"] = np.concatenate([np.repeat(touched, size), new["signal"]])
        order = np.lexsort((both["src"], both["dest"], both["chunk"], -both["score"], both["signal"]))
        order = order[both["chunk"][order] >= 0]
        order = order[_first_of_each(*(both[name][order] for name in ("signal", "prefix", "src")))]
        row = np.searchsorted(touched, both["signal"][order])
        rank = np.arange(len(order)) - np.searchsorted(row, row)
        kept = rank < size
        for name in _TOP:
            table = np.full((len(touched), size), -np.inf if name == "score" else -1)
            table[row[kept], rank[kept]] = both[name][order[kept]]
            getattr(self, f"top_{name}")[touched] = table

    def draw(self, seed: int, chunk: int, length: int, first: int) -> Drawn:
        """The pairs of a chunk that enter the sample as it is now; sources before ``first`` are left out."""
        dest, src = _causal_pairs(length, first)
        key = np.random.default_rng([seed, chunk]).random(len(dest))
        chosen = np.flatnonzero(key < self.sample_key[-1])
        if len(chosen) > len(self.sample_key):
            chosen = chosen[np.argsort(key[chosen], kind="stable")[: len(self.sample_key)]]
        return Drawn(key[chosen], chunk, dest[chosen], src[chosen])

    def add_drawn(self, drawn: Drawn, scores: Numbers) -> None:
        """Insert drawn pairs into the sample, with the scores (signal, pair) that all signals have there."""
        chunk = np.full(len(drawn.key), drawn.chunk)
        self._add_sample(drawn.key, [chunk, drawn.dest, drawn.src], scores)

    def _add_sample(self, keys: Numbers, places: Sequence[Indices], scores: Numbers) -> None:
        if not len(keys):
            return
        key = np.concatenate([self.sample_key, keys])
        kept = np.argsort(key, kind="stable")[: len(self.sample_key)]
        self.sample_key = key[kept]
        for name, new in zip(_PLACE, places, strict=True):
            old = getattr(self, f"sample_{name}")
            setattr(self, f"sample_{name}", np.concatenate([old, new])[kept])
        self.sample_score = np.concatenate([self.sample_score, scores], axis=1)[:, kept]

    def merge(self, other: Tally) -> None:
        """Add what another tally has counted over other chunks."""
        signal, rank = np.nonzero(other.top_chunk >= 0)
        if len(signal):
            tops = {name: getattr(other, f"top_{name}")[signal, rank] for name in _TOP}
            self._add_top({**tops, "signal": signal})
        filled = other.sample_chunk >= 0
        places = [getattr(other, f"sample_{name}")[filled] for name in _PLACE]
        self._add_sample(other.sample_key[filled], places, other.sample_score[:, filled])
        self.n_pairs += other.n_pairs
        self.done += other.done


def prefixes(token_ids: Sequence[int]) -> Indices:
    """For every position, a hash of all tokens up to it.

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
    """Whether a row is the first of those equal to it."""
    order = np.lexsort(columns)  # stable: equal rows stay in their order
    differs = np.ones(len(order), dtype=bool)
    differs[1:] = np.any([column[order][1:] != column[order][:-1] for column in columns], axis=0)
    first = np.empty(len(order), dtype=bool)
    first[order] = differs
    return first


@lru_cache(maxsize=4)
def _causal_pairs(length: int, first: int) -> tuple[Indices, Indices]:
    dest, src = np.tril_indices(length)
    kept = src >= first
    return dest[kept], src[kept]


# -- The result --------------------------------------------------------------------------------------------------


@dataclass(eq=False, repr=False)
class Scan:
    """What a corpus shows of some signals. Made by ``scan``, or read by ``Scan.load``."""

    signals: tuple[ScoredSignal, ...]
    options: dict[str, Any]
    """Everything that the result depends on."""
    tally: Tally
    contexts: dict[int, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """By chunk: its id and tokens, for the chunks that kept pairs are in."""
    labels: dict[int, str] = field(default_factory=dict)
    """Text of the tokens in the contexts."""
    heads: HeadSums | None = None
    complete: bool = False
    """False while there is more of the corpus to read."""

    def __repr__(self) -> str:
        rest = "" if self.complete else ", not complete"
        source = self.options["corpus"]["source"]
        size = f"{len(self.signals)} signals over {self.n_tokens:,} tokens"
        return f"Scan({self.options['model']!r}, {size} of {source}{rest})"

    @property
    def n_chunks(self) -> int:
        """Chunks of the corpus read so far."""
        return int(self.tally.done[0])

    @property
    def n_tokens(self) -> int:
        """Tokens of the corpus read so far."""
        return int(self.tally.done[1])

    @cached_property
    def _rows(self) -> dict[str, int]:
        return {signal.id: row for row, signal in enumerate(self.signals)}

    def row(self, signal: str | ScoredSignal) -> int:
        """The index of a signal, by its id."""
        name = signal.id if isinstance(signal, ScoredSignal) else signal
        if name not in self._rows:
            raise InputError(
                f"This scan has no signal {name!r}: it has {len(self.signals)}, the first is {self.signals[0].id!r}."
            )
        return self._rows[name]

    def examples(self, signal: str | ScoredSignal, random: int = RANDOM) -> SignalExamples:
        """The pairs kept of a signal, in their contexts."""
        row, tally = self.row(signal), self.tally
        top = np.flatnonzero(np.isfinite(tally.top_score[row]))
        columns = (tally.top_score, tally.top_chunk, tally.top_dest, tally.top_src)
        scores = tally.sample_score[row]
        sampled = np.flatnonzero(np.isfinite(scores))
        # Of the rest of the sample, those whose positive scores are nearest in rank to their median.
        positive = sampled[random:][scores[sampled[random:]] > 0]
        positive = positive[np.argsort(-scores[positive], kind="stable")]
        start = max(0, (len(positive) - random) // 2)
        quantiles = np.quantile(scores[sampled], QUANTILES).tolist() if len(sampled) else []
        notes: list[str] = []
        if not len(top):
            notes.append("no pair of the corpus scores above zero")
        elif len(top) < tally.top_score.shape[1]:
            notes.append(f"only {len(top)} pairs of the corpus score above zero")
        if not self.options["sinks"]:
            notes.append(FIRST_LEFT_OUT)
        return SignalExamples(
            signal=self.signals[row],
            top=tuple(map(self._pair, *(column[row, top].tolist() for column in columns))),
            random=self._sampled(row, sampled[:random]),
            middle=self._sampled(row, positive[start : start + random]),
            quantiles=tuple(zip(QUANTILES, quantiles, strict=False)),
            n_pairs=int(tally.n_pairs[self.signals[row].layer]),
            notes=tuple(notes),
        )

    def sample(self, layer: int) -> tuple[Pair, ...]:
        """The uniform sample of pairs, as far as a layer may attend to them; scores are of its first signal."""
        row = next((row for row, signal in enumerate(self.signals) if signal.layer == layer), None)
        if row is None:
            return ()
        return self._sampled(row, np.flatnonzero(np.isfinite(self.tally.sample_score[row])))

    def _sampled(self, row: int, chosen: NDArray) -> tuple[Pair, ...]:
        tally = self.tally
        columns = (tally.sample_score[row], tally.sample_chunk, tally.sample_dest, tally.sample_src)
        return tuple(map(self._pair, *(column[chosen].tolist() for column in columns)))

    def _pair(self, score: float, chunk: int, dest: int, src: int) -> Pair:
        name, ids = self.contexts[chunk]
        ids = ids[: dest + 1 + FURTHER]
        return Pair(name, dest, src, score, ids, tuple(self.labels[token] for token in ids))

    def tidy(self, model: Model) -> None:
        """Drop the chunks that no kept pair is in any more, and look up the text of the tokens of the others."""
        for chunk in self.contexts.keys() - self.tally.chunks:
            del self.contexts[chunk]
        used = {token for _, ids in self.contexts.values() for token in ids}
        new = sorted(used - self.labels.keys())
        labels = self.labels | dict(zip(new, model.token_labels(new), strict=True))
        self.labels = {token: labels[token] for token in sorted(used)}

    def save(self, folder: str | Path) -> Path:
        """Write everything to ``scan.safetensors`` in a folder, in one step."""
        chunks = sorted(self.contexts)
        ids = [self.contexts[chunk][1] for chunk in chunks]
        arrays = vars(self.tally) | {
            "context_chunk": np.array(chunks, dtype=np.int64),
            "context_length": np.array([len(each) for each in ids], dtype=np.int64),
            "context_tokens": np.array([token for each in ids for token in each], dtype=np.int64),
        }
        if self.heads is not None:
            arrays |= {f"head_{name}": getattr(self.heads, name).numpy() for name in TENSORS}
        about = {
            "schema": SCHEMA,
            "options": self.options,
            "complete": self.complete,
            "signals": [asdict(signal) for signal in self.signals],
            "contexts": [self.contexts[chunk][0] for chunk in chunks],
            "labels": {str(token): label for token, label in self.labels.items()},
        }
        path = Path(folder) / FILE
        with replacing(path) as temporary:
            contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
            save_file(contiguous, temporary, metadata={"scan": json.dumps(about)})
        return path

    @staticmethod
    def load(folder: str | Path) -> Scan:
        """Read a scan from a folder; ``InputError`` if there is none, or it is damaged."""
        path = Path(folder) / FILE
        if not path.is_file():
            raise InputError(
                f"There is no scan in {str(folder)!r}: expected the file {FILE}. Make one with scan(..., out=)."
            )
        try:
            with safe_open(path, "numpy") as file:
                arrays: dict[str, Any] = {name: file.get_tensor(name).copy() for name in file.keys()}  # noqa: SIM118
                about: dict[str, Any] = json.loads((file.metadata() or {})["scan"])
            if about["schema"] != SCHEMA:
                raise InputError(
                    f"{str(path)!r} has the schema {about['schema']!r}, and this version reads {SCHEMA!r}. Scan "
                    "again in another folder."
                )
            tokens = np.split(arrays["context_tokens"], np.cumsum(arrays["context_length"])[:-1])
            names = about["contexts"]
            rows = zip(arrays["context_chunk"].tolist(), names, tokens, strict=True) if names else ()
            heads = [torch.from_numpy(arrays[f"head_{name}"]) for name in TENSORS if f"head_{name}" in arrays]
            return Scan(
                signals=tuple(
                    ScoredSignal(**each | {"channels": tuple(each["channels"])}) for each in about["signals"]
                ),
                options=about["options"],
                tally=Tally(**{name: arrays[name] for name in Tally.__dataclass_fields__}),
                contexts={chunk: (name, tuple(ids.tolist())) for chunk, name, ids in rows},
                labels={int(token): label for token, label in about["labels"].items()},
                heads=HeadSums(*heads) if heads else None,
                complete=about["complete"],
            )
        except InputError:
            raise
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{str(path)!r} is not a scan, or it is damaged ({error!r}). Delete it and scan again."
            ) from error


# -- Scoring batches of chunks -----------------------------------------------------------------------------------


def chunks_at_once(length: int) -> int:
    """How many chunks of a length go through the model together."""
    return max(1, TOKENS_AT_ONCE // length)


def batches(chunks: Iterator[Chunk], length: int) -> Iterator[list[Chunk]]:
    """Chunks that go through the model together: the same ones, wherever a scan was interrupted."""
    while batch := list(islice(chunks, chunks_at_once(length))):
        yield batch


class BatchScorer:
    """Scores batches of chunks and keeps their pairs in a scan."""

    def __init__(self, scan: Scan, model: Model) -> None:
        self.scan, self.model = scan, model
        self.first = 0 if scan.options["sinks"] else 1
        self.blocks: dict[int, list[SignalBlock]] = {}
        self.keep = RECORDED if scan.heads is not None else ("queries", "keys")

    def read(self, batch: list[Chunk]) -> HeadSums | None:
        """Score one batch; the sums over its heads, if heads are measured."""
        recording = self.model.record(
            [list(chunk.token_ids) for chunk in batch], last_logits=True, keep=self.keep, patterns="keep"
        )
        longest = 1 << (max(recording.lengths) - 1).bit_length()  # few block sizes serve all lengths
        if longest not in self.blocks:
            self.blocks[longest] = score_blocks(self.model, self.scan.signals, longest)
        tally, waiting = self.scan.tally, list[Hits]()
        for place, chunk in enumerate(batch):
            waiting += self._read_chunk(recording, place, chunk, self.blocks[longest])
            if sum(len(hits.signal) for hits in waiting) > 64 * len(self.scan.signals):
                tally.add_hits(waiting)
                waiting = []
        tally.add_hits(waiting)
        tally.done += (len(batch), sum(recording.lengths))
        if len(self.scan.contexts) > 2 * (len(tally.chunks) + 256):
            self.scan.tidy(self.model)
        if self.scan.heads is None:
            return None
        sums = HeadSums.empty(self.model)
        sums.add(recording)
        return sums

    def _read_chunk(
        self, recording: Recording, place: int, chunk: Chunk, blocks: list[SignalBlock]
    ) -> list[Hits]:
        """Add a chunk's pairs to the sample, and find those that may be among the highest of their signals."""
        tally, length = self.scan.tally, len(chunk.token_ids)
        self.scan.contexts[chunk.index] = (chunk.id, chunk.token_ids)
        visible = [layer[place, :length, :length].clone() for layer in recording.visible]
        for mask in visible:
            mask[:, : self.first] = False
        drawn = tally.draw(self.scan.options["seed"], chunk.index, length, self.first)
        drawn_scores = np.full((len(self.scan.signals), len(drawn.key)), np.nan)
        hits, prefix = list[Hits](), prefixes(chunk.token_ids)
        for block in blocks:
            scores, mask, rows = block.scores(recording, place), visible[block.layer], block.rows.numpy()
            dest, src = (torch.from_numpy(each).to(scores.device) for each in (drawn.dest, drawn.src))
            at_drawn = scores[:, dest, src].masked_fill(~mask[dest, src], torch.nan)
            drawn_scores[rows] = on_host(at_drawn).numpy()
            above = self._above(scores, mask, rows)
            signal, dest, src = above.nonzero().cpu().numpy().T
            values = on_host(scores[above]).numpy()
            hits.append(Hits(rows[signal], values, chunk.index, dest, src, prefix[dest]))
        tally.add_drawn(drawn, drawn_scores)
        tally.n_pairs += torch.stack([mask.sum() for mask in visible]).cpu().numpy()
        return hits

    def _above(
        self, scores: Float[Tensor, "signal dest src"], visible: Bool[Tensor, "dest src"], rows: Indices
    ) -> Bool[Tensor, "signal dest src"]:
        """Pairs above the lowest of their signal's top; where they are many, only as many as could be kept."""
        top = self.scan.tally.top_score[rows]
        least = rounded(torch.from_numpy(np.maximum(top[:, -1], 0.0)), like=scores)
        above = (scores > least[:, None, None]) & visible
        if int(above.sum()) > 2 * top.size:
            flat = scores.masked_fill(~above, -torch.inf).flatten(1)
            lowest = flat.topk(min(top.shape[1], flat.shape[1]), dim=1).values[:, -1]
            above &= scores >= lowest[:, None, None]
        return above
