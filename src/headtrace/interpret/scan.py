"""A corpus read once, and every signal scored at every token pair of it.

>>> import headtrace
>>> model = headtrace.load("builtin")
>>> found = scan(model, "sampled:300", signals=["L1H2:0", "L1H2:1"], length=60)
>>> found
Scan('builtin', 2 signals over 300 tokens of sampled:300)
>>> examples = found.examples("L1H2:0")
>>> len(examples.top), len(examples.random), examples.top[0].score >= examples.top[1].score
(40, 40, True)

Of every signal are kept:

- the ``top`` pairs with the highest scores above zero;
- ``random``: the first 40 of a uniform sample of 1,024 pairs, which all signals share;
- ``middle``: of the rest of that sample, those nearest to the median of the scores above zero;
- ``quantiles`` of the scores in that sample.

Pairs whose source is the first token are left out unless ``sinks=True``: nearly every head puts what it does not need
there, so they would fill every list. With ``out=`` the scan is written there now and then, whole or not at all, and
goes on from there when it is called again with the same options. Memory does not depend on the length of the corpus.

With ``workers=`` several processes read it, of this machine or of a Ray (`headtrace.interpret.scan_work`). The result
is the same, however many there are: what is kept does not depend on the order of chunks, and sums are added up batch
by batch in the order of the corpus.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headtrace import __version__
from headtrace.circuits import Circuit
from headtrace.errors import InputError, shown
from headtrace.interpret.corpus import Chunk, Corpus, open_corpus
from headtrace.interpret.examples import FIRST_LEFT_OUT, Pair, ScoredSignal, SignalExamples
from headtrace.interpret.heads import HeadSums
from headtrace.interpret.scoring import Block, Scorer
from headtrace.interpret.signals import Signals, find_signals
from headtrace.interpret.tally import Drawn, Hits, Numbers, Places, Tally, prefixes
from headtrace.models.devices import on_host, rounded
from headtrace.progress import monotonic
from headtrace.runs.engines import Engine, Engines
from headtrace.writing import check_folder_writable

if TYPE_CHECKING:
    from headtrace.models import Model, Recording
    from headtrace.progress import Progress

TOP = 40
RANDOM = 40
SAMPLE = 1024
"""Pairs of the shared uniform sample, from which random pairs, middle pairs and quantiles come."""
QUANTILES = (0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999, 1.0)
TOKENS_AT_ONCE = 2048
FURTHER = 8
"""Tokens of the context that are shown behind the destination."""
FILE = "scan.safetensors"


@dataclass(eq=False, repr=False)
class Scan:
    """What a corpus shows of some signals. Made by ``scan``, or read by ``Scan.load``."""

    signals: tuple[ScoredSignal, ...]
    options: dict[str, Any]
    """All that the result depends on."""
    tally: Tally
    contexts: dict[int, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Of every chunk that something is kept of, its id and tokens."""
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
        """How many chunks of the corpus were read."""
        return int(self.tally.done[0])

    @property
    def n_tokens(self) -> int:
        """How many tokens of the corpus were read."""
        return int(self.tally.done[1])

    def row(self, signal: str | ScoredSignal) -> int:
        """The place of a signal, by its id."""
        name = signal.id if isinstance(signal, ScoredSignal) else signal
        if name not in self._rows:
            raise InputError(
                f"This scan has no signal {name!r}: it has {len(self.signals)}, the first is {self.signals[0].id!r}."
            )
        return self._rows[name]

    @cached_property
    def _rows(self) -> dict[str, int]:
        return {signal.id: row for row, signal in enumerate(self.signals)}

    def examples(self, signal: str | ScoredSignal, random: int = RANDOM) -> SignalExamples:
        """The pairs that were kept of a signal, in their contexts."""
        row, tally = self.row(signal), self.tally
        signal, kept = self.signals[row], np.flatnonzero(np.isfinite(tally.top_score[row])).tolist()
        seen = np.flatnonzero(np.isfinite(tally.sample_score[row]))
        scores = tally.sample_score[row, seen]
        rest = seen[random:]
        quantiles = np.quantile(scores, QUANTILES).tolist() if len(seen) else []
        return SignalExamples(
            signal=signal,
            top=tuple(self._highest(row, place) for place in kept),
            random=tuple(self._sampled(row, place) for place in seen[:random].tolist()),
            middle=tuple(
                self._sampled(row, place) for place in _middle(tally.sample_score[row], rest, random).tolist()
            ),
            quantiles=tuple(zip(QUANTILES, quantiles, strict=False)),
            n_pairs=int(tally.n_pairs[signal.layer]),
            notes=self._notes(row),
        )

    def _notes(self, row: int) -> tuple[str, ...]:
        tally, notes = self.tally, list[str]()
        found = int(np.isfinite(tally.top_score[row]).sum())
        if not found:
            notes.append("no pair of the corpus scores above zero")
        elif found < tally.top_score.shape[1]:
            notes.append(f"only {found} pairs of the corpus score above zero")
        if not self.options["sinks"]:
            notes.append(FIRST_LEFT_OUT)
        return tuple(notes)

    def _highest(self, row: int, place: int) -> Pair:
        t = self.tally
        return self._pair(
            *(array[row, place].item() for array in (t.top_score, t.top_chunk, t.top_dest, t.top_src))
        )

    def _sampled(self, row: int, place: int) -> Pair:
        t = self.tally
        where = (array[place].item() for array in (t.sample_chunk, t.sample_dest, t.sample_src))
        return self._pair(t.sample_score[row, place].item(), *where)

    def _pair(self, score: float, chunk: int, dest: int, src: int) -> Pair:
        name, ids = self.contexts[chunk]
        ids = ids[: dest + 1 + FURTHER]
        return Pair(name, dest, src, score, ids, tuple(self.labels[token] for token in ids))

    def sampled_pairs(self, layer: int) -> list[tuple[tuple[int, ...], int, int]]:
        """The tokens, destination and source of every pair of the sample that a layer sees."""
        rows = [row for row, signal in enumerate(self.signals) if signal.layer == layer]
        tally = self.tally
        if not rows:
            return []
        return [
            (
                self.contexts[int(tally.sample_chunk[i])][1],
                int(tally.sample_dest[i]),
                int(tally.sample_src[i]),
            )
            for i in np.flatnonzero(np.isfinite(tally.sample_score[rows[0]]))
        ]

    def save(self, folder: str | Path) -> Path:
        """Write everything to ``scan.safetensors`` in a folder, in one step."""
        from headtrace.interpret.scan_files import save_scan

        return save_scan(self, folder)

    @staticmethod
    def load(folder: str | Path) -> Scan:
        """Read a scan that was written to a folder."""
        from headtrace.interpret.scan_files import load_scan

        return load_scan(folder)


def _middle(scores: Numbers, places: np.ndarray, count: int) -> np.ndarray:
    """Of some places, those whose scores are nearest in rank to the median of the ones above zero."""
    positive = places[scores[places] > 0]
    positive = positive[np.argsort(-scores[positive], kind="stable")]
    start = max(0, (len(positive) - count) // 2)
    return positive[start : start + count]


def scan(
    model: Model,
    corpus: str | Path | Corpus,
    signals: Signals = "top:8",
    *,
    out: str | Path | None = None,
    length: int | None = None,
    tokens: int | None = None,
    seed: int = 0,
    top: int = TOP,
    sinks: bool = False,
    heads: bool = False,
    every: int = 4,
    engine: Engine = "local",
    workers: int | None = None,
    ray_address: str | None = None,
    progress: Progress | None = None,
) -> Scan:
    """Read a corpus once and score all signals at all pairs of tokens (`headtrace.interpret.scan`).

    ``signals`` are ``"top:8"`` (the strongest channels of every head), channels like ``"L9H6:3"``, circuits or files of
    circuits, or a list of such; ``corpus`` as in ``open_corpus``, of which ``tokens`` limits the length. ``heads`` also
    measures every head. With ``out``, a folder, progress is kept after every ``every`` batches; a scan that was
    interrupted goes on, one that is complete is read. ``workers`` is how many processes read, of this machine or with
    ``engine="ray"`` of a local Ray or of the cluster at ``ray_address``; they need ``out``, where all can write.
    """
    engines = Engines(engine, workers, ray_address)
    if not engines.here and out is None:
        raise InputError("Several workers meet in a folder: give out=.")
    if top < 1:
        raise InputError(f"top={top}: keep at least one pair of each signal.")
    if not isinstance(signals, (str, Path, Circuit, ScoredSignal)):
        signals = list(signals)  # it is gone through more than once
    text = open_corpus(corpus, model, length=length, seed=seed, tokens=tokens)
    options = _options(model, text, signals, seed=seed, top=top, sinks=sinks, heads=heads)
    begun = None if out is None else _resumed(out, options)
    if begun is not None and begun.complete:
        return begun
    if begun is None:
        chosen = find_signals(model, signals, text)
        tally = Tally.empty(len(chosen), model.n_layers, top, SAMPLE)
        begun = Scan(chosen, options, tally, heads=HeadSums.empty(model) if heads else None)
    if out is not None and not engines.here:
        from headtrace.interpret.scan_work import scan_with_workers

        scan_with_workers(begun, model, text, Path(out), engines, every, progress)
        return begun
    with model.assume_weights_unchanged():
        _run(begun, model, text, out, every, progress)
    return begun


def _options(model: Model, corpus: Corpus, asked: Signals, **rest: Any) -> dict[str, Any]:
    words = asked if isinstance(asked, str) else _digest(asked)
    return {
        "version": __version__,
        "model": model.name,
        "weights_sha256": model.weights_sha256,
        "dtype": model.own_dtype,
        "corpus": corpus.identity,
        "signals": words,
        "sample": SAMPLE,
        **rest,
    }


def _digest(asked: Signals) -> str:
    """Names what is asked for, of whatever kind."""
    one = isinstance(asked, (Path, ScoredSignal, Circuit))
    several: list[Any] = [asked] if one else list(cast(Iterable[Any], asked))
    names = [str(getattr(each, "content_id", getattr(each, "id", each))) for each in several]
    return f"{len(names)} of {hashlib.sha256(repr(names).encode()).hexdigest()[:16]}"


def _resumed(out: str | Path, options: dict[str, Any]) -> Scan | None:
    """A scan that was begun in a folder; an error names the first option that is another one now."""
    check_folder_writable(out)
    if not (Path(out) / FILE).exists():
        return None
    before = Scan.load(out)
    for name in dict.fromkeys([*options, *before.options]):
        then, now = before.options.get(name), options.get(name)
        if then != now:
            raise InputError(
                f"{str(out)!r} holds a scan with another {name.replace('_', ' ')}: {shown(then, 200)}, now "
                f"{shown(now, 200)}. Use the same options to go on with it, or another folder."
            )
    return before


# -- the pass ----------------------------------------------------------------------------------------------------


def _run(
    state: Scan, model: Model, corpus: Corpus, out: str | Path | None, every: int, progress: Progress | None
) -> None:
    reader = Reader(state, model)
    tell = monotonic(progress)
    _tell(state, corpus, tell)
    for number, batch in enumerate(batches(corpus.chunks(state.n_chunks), corpus.length), start=1):
        sums = reader.read(batch)
        if state.heads is not None and sums is not None:
            state.heads.add_stacked(HeadSums.stacked([sums]))
        if out is not None and number % every == 0:
            tidy(state, model)
            state.save(out)
        _tell(state, corpus, tell)
    finish(state, model, out)


def _tell(state: Scan, corpus: Corpus, progress: Progress | None) -> None:
    """How many chunks are read; of how many, as far as their length up to now says it."""
    if progress is None or not state.n_chunks:
        return
    tokens = corpus.n_tokens or 0
    progress(state.n_chunks, max(state.n_chunks, -(-tokens * state.n_chunks // state.n_tokens)))


def batches(chunks: Iterator[Chunk], length: int) -> Iterator[list[Chunk]]:
    """Chunks that go through the model together: the same ones, wherever a scan was interrupted."""
    while batch := list(islice(chunks, chunks_at_once(length))):
        yield batch


def chunks_at_once(length: int) -> int:
    return max(1, TOKENS_AT_ONCE // length)


def finish(state: Scan, model: Model, out: str | Path | None) -> None:
    """There is no more to read."""
    state.complete = True
    tidy(state, model)
    if out is not None:
        state.save(out)


def tidy(state: Scan, model: Model) -> None:
    """Let go of the chunks that nothing is kept of any more, and name the tokens of the others."""
    needed = state.tally.chunks
    for chunk in state.contexts.keys() - needed:
        del state.contexts[chunk]
    used = {token for _, ids in state.contexts.values() for token in ids}
    new = sorted(used - state.labels.keys())
    labels = state.labels | dict(zip(new, model.token_labels(new), strict=True))
    state.labels = {token: labels[token] for token in sorted(used)}


class Reader:
    """Reads batches of chunks into a scan."""

    def __init__(self, state: Scan, model: Model) -> None:
        self.state, self.model = state, model
        self.scorer = Scorer(model, state.signals)
        self.first = 0 if state.options["sinks"] else 1
        self.blocks: dict[int, list[Block]] = {}
        self.keep = ["queries", "keys"] if state.heads is None else ["queries", "keys", "patterns"]

    def read(self, batch: list[Chunk]) -> HeadSums | None:
        """Score one batch, whole: what is kept of it does not depend on where a scan was interrupted, nor on what was
        read before. If heads are measured, the sums of the batch."""
        recording = self.model.record(
            [list(c.token_ids) for c in batch], last_logits=True, keep=self.keep, patterns="keep"
        )
        tally, limit = self.state.tally, 64 * len(self.state.signals)
        blocks = self._blocks(max(recording.lengths))
        found, waiting = list[Hits](), 0
        for place, chunk in enumerate(batch):
            hits = self._chunk(recording, place, chunk, blocks)
            found += hits
            waiting += sum(len(each.signal) for each in hits)
            if waiting > limit:
                tally.add_hits(found)
                found, waiting = [], 0
        tally.add_hits(found)
        tally.done += (len(batch), sum(recording.lengths))
        if len(self.state.contexts) > 2 * (len(tally.chunks) + 256):
            tidy(self.state, self.model)
        if self.state.heads is None:
            return None
        sums = HeadSums.empty(self.model)
        sums.add(recording)
        return sums

    def _chunk(self, recording: Recording, place: int, chunk: Chunk, blocks: list[Block]) -> list[Hits]:
        tally, length = self.state.tally, len(chunk.token_ids)
        self.state.contexts[chunk.index] = (chunk.id, chunk.token_ids)
        drawn = tally.draw(self.state.options["seed"], chunk.index, length, self.first)
        scores_of_drawn = np.full((len(self.state.signals), len(drawn.key)), np.nan)
        seen = [self._seen(recording, layer, place, length) for layer in range(self.model.n_layers)]
        hits, prefix = list[Hits](), prefixes(chunk.token_ids)
        for block in blocks:
            scores = block.scores(recording, place)
            rows = block.rows.numpy()
            scores_of_drawn[rows] = _at(scores, seen[block.layer], drawn)
            signal, score, dest, src = self._hits(scores, seen[block.layer], rows)
            hits.append(Hits(signal, score, chunk.index, dest, src, prefix[dest]))
        tally.add_drawn(drawn, scores_of_drawn)
        tally.n_pairs += torch.stack([mask.sum() for mask in seen]).cpu().numpy()
        return hits

    def _blocks(self, length: int) -> list[Block]:
        """Made for the longest chunk of a batch, and for all up to the next power of two."""
        longest = 1 << (length - 1).bit_length()
        if longest not in self.blocks:
            self.blocks[longest] = self.scorer.blocks(longest)
        return self.blocks[longest]

    def _seen(self, recording: Recording, layer: int, place: int, length: int) -> Bool[Tensor, "dest src"]:
        seen = recording.visible[layer][place, :length, :length].clone()
        seen[:, : self.first] = False
        return seen

    def _hits(
        self,
        scores: Float[Tensor, "signal dest src"],
        seen: Bool[Tensor, "dest src"],
        rows: Places,
    ) -> tuple[Places, Numbers, Places, Places]:
        """Pairs above the lowest of their signal's top; where they are many, only as many as could stay."""
        size = self.state.tally.top_score.shape[1]
        least = rounded(torch.from_numpy(self.state.tally.least[rows]), like=scores)
        above = (scores > least[:, None, None]) & seen
        if int(above.sum()) > 2 * size * len(rows):
            flat = scores.masked_fill(~above, -torch.inf).flatten(1)
            lowest = flat.topk(min(size, flat.shape[1]), dim=1).values[:, -1]
            above &= scores >= lowest[:, None, None]
        places = above.nonzero()
        signal, dest, src = places.cpu().numpy().T
        values = on_host(scores[above]).numpy()
        return rows[signal], values, dest, src


def _at(scores: Tensor, seen: Tensor, drawn: Drawn) -> Numbers:
    """Scores at the pairs that were drawn; not a number where they are not seen."""
    dest, src = (torch.from_numpy(each).to(scores.device) for each in (drawn.dest, drawn.src))
    return on_host(scores[:, dest, src].masked_fill(~seen[dest, src], torch.nan)).numpy()
