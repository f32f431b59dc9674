"""What a scan computes: the scores of many signals at every token pair of a corpus, and the pairs that it keeps.

Of every signal are kept:

- ``top``: the pairs with the highest positive scores, of many tokens and texts: at most two with the same source and
  destination token, four with the same source token, four with the same destination token, and eight of one text;
  none below a tenth of the highest;
- ``random``: the first 120 of a uniform sample of 1,024 pairs, which all signals share;
- ``middle``: of the rest of that sample, the pairs nearest to the median of the positive scores;
- ``quantiles`` of the scores in that sample.

Pairs whose source is the first token are left out unless ``sinks=True``: nearly every head attends there when it has
nothing else to attend to, so they would fill every list.

Of one text, the destinations with the four highest scores count, each with its best source, and the sources with the
four highest, each with its best destination. Two pools keep the highest of these: one with at most four pairs per
source token, the other with at most four per destination token. Limits that are nested in each other can be applied to
parts of a corpus and again to what they kept; both at once could not. So both at once are applied at the end, to the
pairs of both pools.

Memory does not grow with the corpus, and the result does not depend on the order in which chunks are read or on how
they are divided among workers: pairs are ordered by score, chunk, destination and source; every pair draws a random
number from the seed and its chunk, and the lowest numbers form the sample; sums over heads are added batch by batch.
`headtrace.interpret.scan_run` runs a scan. It is saved as one safetensors file: numbers as arrays, the rest as JSON in
its header.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from headtrace.errors import InputError
from headtrace.interpret.head_roles import RECORDED, TENSORS, HeadSums
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

SCHEMA = "headtrace.scan/3"
FILE = "scan.safetensors"
RANDOM = 120
PER_PAIR, PER_TOKEN = 2, 4
"""How many of the highest pairs may have the same source and destination token; the same token on one side."""
PER_TEXT = 4
"""How many destinations, and how many sources, of one text are looked at."""
LEAST_SHARE = 0.1
"""A pair that scores less than this share of the highest is not among the highest, however few there are."""
POOLED = 2
"""Each pool keeps this many times the pairs that are wanted, to choose from."""
QUANTILES = (0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999, 1.0)
TOKENS_AT_ONCE = 2048
"""Tokens of the chunks that go through the model together."""
FURTHER = 8
"""Tokens of the context shown after the destination."""

Numbers = NDArray[np.float64]
Indices = NDArray[np.int64]
_PLACE = ("chunk", "dest", "src")
_TOP = ("score", *_PLACE, "prefix", "source_token", "dest_token")
POOLS = ("source_token", "dest_token")
"""The tokens that are limited in each of the two pools."""


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
    source_token: Indices
    dest_token: Indices


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
    >>> rows, scores, ones = np.array([0, 0, 0]), np.array([1.0, 3.0, 2.0]), np.array([1, 1, 1])
    >>> tally.add_hits([Hits(rows, scores, 7, np.array([4, 5, 6]), ones, np.array([40, 50, 60]), ones, 7 * ones)])
    >>> tally.top_score[0, 0, :3].tolist(), tally.top_dest[0, 0, :2].tolist()    # two of the same tokens, no more
    ([3.0, 2.0, -inf], [5, 6])

    Among the highest, pairs with the same source and the same tokens up to the destination count once: otherwise a text
    that the corpus repeats would show twice, and the judge would see pairs that the explainer has seen. The sample
    leaves nothing out: it represents the corpus as it is.
    """

    top_score: Numbers
    """(signal, pool, rank), highest first; minus infinity where there are fewer."""
    top_chunk: Indices
    top_dest: Indices
    top_src: Indices
    top_prefix: Indices
    top_source_token: Indices
    top_dest_token: Indices
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
        pools = (n_signals, len(POOLS), POOLED * top)
        places = {f"top_{name}": np.full(pools, -1) for name in _TOP if name != "score"}
        places |= {f"sample_{name}": np.full(sample, -1) for name in _PLACE}
        return cls(
            top_score=np.full(pools, -np.inf),
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
            new = {**columns, "chunk": np.concatenate(chunks)}
            for pool in range(len(POOLS)):
                self._add_top(pool, new)

    def _add_top(self, pool: int, new: dict[str, NDArray]) -> None:
        """Keep the highest of old and new pairs in a pool, for each signal that has new ones not below its lowest."""
        enters = new["score"] >= self.top_score[new["signal"], pool, -1]
        new = {name: column[enters] for name, column in new.items()}
        touched, size = np.unique(new["signal"]), self.top_score.shape[-1]
        both = {
            name: np.concatenate([getattr(self, f"top_{name}")[touched, pool].ravel(), new[name]])
            for name in _TOP
        }
        both["signal"] = np.concatenate([np.repeat(touched, size), new["signal"]])
        order = np.lexsort((both["src"], both["dest"], both["chunk"], -both["score"], both["signal"]))
        order = order[both["chunk"][order] >= 0]
        # From the innermost limit to the outermost, the pairs that remain are the highest that keep all of them.
        for names, most in (
            (("prefix", "src"), 1),
            (("source_token", "dest_token"), PER_PAIR),
            ((POOLS[pool],), PER_TOKEN),
            ((), size),
        ):
            order = order[_rank(*(both[name][order] for name in ("signal", *names))) < most]
        row = np.searchsorted(touched, both["signal"][order])
        rank = np.arange(len(order)) - np.searchsorted(row, row)
        for name in _TOP:
            table = np.full((len(touched), size), -np.inf if name == "score" else -1)
            table[row, rank] = both[name][order]
            getattr(self, f"top_{name}")[touched, pool] = table

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
        for pool in range(len(POOLS)):
            signal, rank = np.nonzero(other.top_chunk[:, pool] >= 0)
            if len(signal):
                tops = {name: getattr(other, f"top_{name}")[signal, pool, rank] for name in _TOP}
                self._add_top(pool, {**tops, "signal": signal})
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


def _rank(*columns: NDArray) -> Indices:
    """For every row, how many rows before it are equal to it.

    >>> _rank(np.array([5, 5, 6, 5]), np.array([1, 1, 1, 2])).tolist()
    [0, 1, 0, 0]
    """
    order = np.lexsort(columns)  # stable: equal rows stay in their order
    starts = np.ones(len(order), dtype=bool)
    starts[1:] = np.any([column[order][1:] != column[order][:-1] for column in columns], axis=0)
    places = np.arange(len(order))
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = places - np.maximum.accumulate(np.where(starts, places, 0))
    return rank


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
        top = self._highest(row)
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
        elif len(top) < self.options["top"]:
            notes.append(f"only {len(top)} pairs of different tokens score high")
        if not self.options["sinks"]:
            notes.append(FIRST_LEFT_OUT)
        return SignalExamples(
            signal=self.signals[row],
            top=tuple(self._pair(*each) for each in top),
            random=self._sampled(row, sampled[:random]),
            middle=self._sampled(row, positive[start : start + random]),
            quantiles=tuple(zip(QUANTILES, quantiles, strict=False)),
            n_pairs=int(tally.n_pairs[self.signals[row].layer]),
            notes=tuple(notes),
        )

    def _highest(self, row: int) -> list[tuple[float, int, int, int]]:
        """Score, chunk, destination and source of the highest pairs of both pools within all limits, highest first."""
        tally = self.tally
        columns = (getattr(tally, f"top_{name}")[row].ravel() for name in ("score", *_PLACE, *POOLS))
        pooled = {each for each in zip(*(column.tolist() for column in columns), strict=True) if each[1] >= 0}
        kept, seen = list[tuple[float, int, int, int]](), Counter[tuple[int | None, int | None]]()
        for score, *place, source, dest in sorted(pooled, key=lambda each: (-each[0], *each[1:4])):
            limits = {(source, dest): PER_PAIR, (source, None): PER_TOKEN, (None, dest): PER_TOKEN}
            if (kept and score < LEAST_SHARE * kept[0][0]) or len(kept) == self.options["top"]:
                break
            if all(seen[group] < most for group, most in limits.items()):
                kept.append((score, *place))
                seen.update(limits.keys())
        return kept

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

    @torch.inference_mode()
    def _read_chunk(
        self, recording: Recording, place: int, chunk: Chunk, blocks: list[SignalBlock]
    ) -> list[Hits]:
        """Add a chunk's pairs to the sample, and find those that may be among the highest of their signals."""
        tally, length = self.scan.tally, len(chunk.token_ids)
        self.scan.contexts[chunk.index] = (chunk.id, chunk.token_ids)
        visible = [layer[place, :length, :length].clone() for layer in recording.visible]
        for mask in visible:
            mask[:, : self.first] = False
        hidden = [torch.where(mask, 0.0, -torch.inf) for mask in visible]
        drawn = tally.draw(self.scan.options["seed"], chunk.index, length, self.first)
        drawn_scores = np.full((len(self.scan.signals), len(drawn.key)), np.nan)
        hits, prefix, ids = list[Hits](), prefixes(chunk.token_ids), np.array(chunk.token_ids)
        for block in blocks:
            scores, mask, rows = block.scores(recording, place), visible[block.layer], block.rows.numpy()
            dest, src = (torch.from_numpy(each).to(scores.device) for each in (drawn.dest, drawn.src))
            at_drawn = scores[:, dest, src].masked_fill(~mask[dest, src], torch.nan)
            drawn_scores[rows] = on_host(at_drawn).numpy()
            signal, dest, src, values = self._best_of_text(scores.add_(hidden[block.layer]), rows)
            tokens = {"source_token": ids[src], "dest_token": ids[dest]}
            hits.append(Hits(rows[signal], values, chunk.index, dest, src, prefix[dest], **tokens))
        tally.add_drawn(drawn, drawn_scores)
        tally.n_pairs += torch.stack([mask.sum() for mask in visible]).cpu().numpy()
        return hits

    def _best_of_text(
        self, scores: Float[Tensor, "signal dest src"], rows: Indices
    ) -> tuple[Indices, Indices, Indices, Numbers]:
        """Signal, destination, source and score of the pairs of a text that may enter a pool.

        They are the best of the destinations, and of the sources, with the highest scores.
        """
        lowest = np.maximum(self.scan.tally.top_score[rows, :, -1].min(axis=1), 0.0)
        least = rounded(torch.from_numpy(lowest), like=scores)[:, None]
        found: list[tuple[Tensor, ...]] = []
        for axis in (-1, -2):
            best, place = scores.amax(axis).topk(min(PER_TEXT, scores.shape[1]), dim=1)
            signal, rank = (best > least).nonzero().T
            here = place[signal, rank]
            there = (scores[signal, here] if axis == -1 else scores[signal, :, here]).argmax(-1)
            dest, src = (here, there) if axis == -1 else (there, here)
            found.append((signal, dest, src, best[signal, rank]))
        signal, dest, src, values = (torch.cat(each) for each in zip(*found, strict=True))
        return signal.cpu().numpy(), dest.cpu().numpy(), src.cpu().numpy(), on_host(values).numpy()
