"""An atlas: what every head and channel of a model attends to over a corpus.

>>> import headtrace, tempfile
>>> model = headtrace.load("builtin")
>>> with tempfile.TemporaryDirectory() as folder:
...     made = atlas(model, "sampled:200", folder, channels="top:2", length=50)
...     again = open_atlas(folder)
>>> again.heads.shape[0], again.channels.shape[0]                     # 3 layers of 4 heads, two channels of each
(12, 24)
>>> again.find("induction", 3)["head"].to_list() == made.find("induction", 3)["head"].to_list()
True

The folder holds ``atlas.json`` (what it was made from), ``heads.parquet`` (a row per head: its measures, of
`headtrace.interpret.heads`), ``channels.parquet`` (a row per channel: share, quantiles, what stands out, what it reads
through the embedding), ``pairs.parquet`` (a row per kept pair) and ``scan.safetensors``. ``Atlas.head`` and
``Atlas.channel`` read one of them at a time (`headtrace.interpret.atlas_entries`). The command ``headtrace atlas`` also
writes pages.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow.parquet as pq

from headtrace.errors import InputError, shown
from headtrace.interpret.atlas_entries import ChannelEntry, HeadEntry
from headtrace.interpret.embedding_reads import Ends, Reads, channel_reads
from headtrace.interpret.examples import FIRST_LEFT_OUT
from headtrace.interpret.heads import MEASURES, HeadSums
from headtrace.interpret.scan import Scan, scan
from headtrace.interpret.standing_out import Place, StandsOut, relations_standing_out, tokens_standing_out
from headtrace.vocabulary import head_name
from headtrace.writing import replacing, write_text

if TYPE_CHECKING:
    from headtrace.interpret.corpus import Corpus
    from headtrace.interpret.examples import Pair, ScoredSignal, SignalExamples
    from headtrace.models import Model
    from headtrace.progress import Progress
    from headtrace.runs.engines import Engine

SCHEMA = "headtrace.atlas/2"
TABLES = ("heads", "channels", "pairs")
PAIRS_AT_ONCE = 2000
"""Rows that are read together to find the pairs of a channel."""
KNOWN = ("model", "weights_sha256", "corpus", "tokens", "sinks")
"""What is read of ``atlas.json``."""
NO_MEASURES = ("head", "layer", "number", "shares")
Row = dict[str, Any]


@dataclass(frozen=True, eq=False, repr=False)
class Atlas:
    """Tables of heads, channels and pairs, and the scan behind them. Made by ``atlas``, read by ``open_atlas``."""

    about: dict[str, Any]
    """Model, corpus, options and counts."""
    heads: pl.DataFrame
    channels: pl.DataFrame
    folder: Path

    def __repr__(self) -> str:
        return (
            f"Atlas({self.about['model']!r}, {self.heads.height} heads, {self.channels.height} channels over "
            f"{self.about['tokens']:,} tokens of {self.about['corpus']})"
        )

    @cached_property
    def pairs(self) -> pl.DataFrame:
        """All pairs of all channels."""
        return _read(self.folder, "pairs")

    @property
    def n_pairs(self) -> int:
        """How many pairs there are; none is read."""
        return pq.read_metadata(self.folder / "pairs.parquet").num_rows

    @cached_property
    def scan(self) -> Scan:
        """The scan that the tables were made from."""
        return Scan.load(self.folder)

    def examples(self, channel: str) -> SignalExamples:
        """The pairs that were kept of a channel, like ``L9H6:3``."""
        return self.scan.examples(channel)

    def find(self, measure: str, k: int = 10, *, lowest: bool = False) -> pl.DataFrame:
        """The heads that do something most (or least)."""
        known = [name for name in self.heads.columns if name not in NO_MEASURES]
        if measure not in known:
            raise InputError(f"Heads have no measure {shown(measure)}: they have {', '.join(known)}.")
        return self.heads.sort(measure, descending=not lowest, nulls_last=True).head(k)

    def head(self, layer: int, head: int) -> HeadEntry:
        """What the atlas says of one head."""
        found = self.heads.filter((pl.col("layer") == layer) & (pl.col("number") == head))
        if not found.height:
            last = self.heads.select(pl.col("layer", "number").max()).row(0)
            raise InputError(
                f"There is no head {head_name(layer, head)} in the atlas of {self.about['model']!r}: it has layers 0 "
                f"to {last[0]} and heads 0 to {last[1]}."
            )
        mine = self.channels.filter(pl.col("head") == head_name(layer, head)).sort("share", descending=True)
        return HeadEntry.of(found.row(0, named=True), mine["number"].to_list())

    def channel(self, layer: int, head: int, channel: int) -> ChannelEntry:
        """What the atlas says of one channel, with its highest pairs; of the pairs no others are read."""
        name = f"{head_name(layer, head)}:{channel}"
        found = self.channels.filter(pl.col("channel") == name)
        if not found.height:
            known = ", ".join(map(str, self.head(layer, head).channels)) or "none of this head"
            raise InputError(
                f"The atlas has no channel {name}: it has {known}. Ask for more with --channels."
            )
        pairs = _read(self.folder, "pairs", pl.col("channel") == name).sort("place")
        return ChannelEntry.of(found.row(0, named=True), head, pairs.to_dicts())

    def require_model(self, model: Model) -> None:
        """An error if the atlas was made of other weights than this model's."""
        if self.about["weights_sha256"] != model.weights_sha256:
            raise InputError(
                f"The atlas {str(self.folder)!r} was made of {self.about['model']!r} with other weights than those of "
                f"{model.name!r}. Load the model that it was made of, or make an atlas of this one: headtrace atlas."
            )


def atlas(
    model: Model,
    corpus: str | Path | Corpus,
    out: str | Path,
    *,
    channels: str = "top:8",
    tokens: int | None = None,
    length: int | None = None,
    seed: int = 0,
    sinks: bool = False,
    engine: Engine = "local",
    workers: int | None = None,
    ray_address: str | None = None,
    progress: Progress | None = None,
) -> Atlas:
    """Scan a corpus and write tables of all heads and of their strongest channels; goes on where it was interrupted.

    ``engine``, ``workers`` and ``ray_address`` are those of ``scan``.
    """
    asked = channels if channels.strip().startswith("top:") else channels.replace(",", " ").split()
    found = scan(
        model,
        corpus,
        asked,
        out=out,
        tokens=tokens,
        length=length,
        seed=seed,
        sinks=sinks,
        heads=True,
        engine=engine,
        workers=workers,
        ray_address=ray_address,
        progress=progress,
    )
    if any(len(signal.channels) != 1 for signal in found.signals):
        raise InputError("An atlas is of single channels: write top:8, or channels like L9H6:3.")
    channels_, pairs = list[Row](), list[pl.DataFrame]()
    for layer in sorted({signal.layer for signal in found.signals}):  # lists of a layer's pairs at a time
        of_layer, of_pairs = _layer_rows(found, model, layer)
        channels_ += of_layer
        pairs.append(pl.DataFrame(of_pairs, schema=_PAIRS))
    tables = {
        "heads": pl.DataFrame(_head_rows(found), infer_schema_length=None),
        "channels": pl.DataFrame(channels_, infer_schema_length=None),
        "pairs": pl.concat(pairs),
    }
    folder = Path(out)
    for name, table in tables.items():
        with replacing(folder / f"{name}.parquet") as temporary:
            table.write_parquet(temporary, row_group_size=PAIRS_AT_ONCE)
    about = {
        "schema": SCHEMA,
        "model": model.name,
        "weights_sha256": model.weights_sha256,
        "corpus": _corpus_name(found),
        "tokens": found.n_tokens,
        "chunks": found.n_chunks,
        "sinks": sinks,
        "options": found.options,
    }
    write_text(folder / "atlas.json", json.dumps(about, indent=1) + "\n")
    return Atlas(about, tables["heads"], tables["channels"], folder)


def open_atlas(folder: str | Path, model: Model | None = None) -> Atlas:
    """Read an atlas from its folder: of the pairs only what is asked for. With ``model``, it must be of its weights."""
    place = Path(folder)
    missing = [
        name for name in ("atlas.json", *(f"{t}.parquet" for t in TABLES)) if not (place / name).is_file()
    ]
    if missing:
        raise InputError(
            f"{str(folder)!r} is not an atlas: it has no {missing[0]}. Make one: headtrace atlas MODEL --corpus C "
            "--out DIR (an interrupted one goes on)."
        )
    try:
        about = json.loads((place / "atlas.json").read_text(encoding="utf-8"))
        if about["schema"] != SCHEMA:
            raise InputError(
                f"{str(folder)!r} is an atlas of the form {shown(about['schema'])}; this version reads {SCHEMA!r}. "
                "Make it anew in another folder."
            )
        about = {name: about[name] for name in KNOWN} | about
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(place, error) from error
    made = Atlas(about, _read(place, "heads"), _read(place, "channels"), place)
    if model is not None:
        made.require_model(model)
    return made


def _read(folder: Path, table: str, wanted: pl.Expr | None = None) -> pl.DataFrame:
    try:
        rows = pl.scan_parquet(folder / f"{table}.parquet")
        return (rows if wanted is None else rows.filter(wanted)).collect()
    except (OSError, pl.exceptions.PolarsError) as error:
        raise _unreadable(folder, error) from error


def _unreadable(folder: Path, error: Exception) -> InputError:
    return InputError(f"The atlas {str(folder)!r} cannot be read ({error}). Make it anew.")


def _corpus_name(found: Scan) -> str:
    """A file by its name alone: pages are shown to others."""
    source = str(found.options["corpus"]["source"])
    return Path(source).name if "bytes" in found.options["corpus"] else source


# -- rows --------------------------------------------------------------------------------------------------------


def _sums(found: Scan) -> HeadSums:
    assert found.heads is not None, "an atlas measures heads"
    return found.heads


def _head_rows(found: Scan) -> list[Row]:
    sums = _sums(found)
    measures, shares = sums.measures(), sums.shares()
    sorted_shares = shares.sort(dim=-1, descending=True).values
    rows: list[Row] = []
    for layer, head in _places(sums):
        row: Row = {"head": head_name(layer, head), "layer": layer, "number": head}
        row |= {name: _finite(measures[name][layer, head]) for name in MEASURES}
        row["top_share"] = float(sorted_shares[layer, head, 0])
        row["top_4_share"] = float(sorted_shares[layer, head, :4].sum())
        row["shares"] = shares[layer, head].tolist()
        rows.append(row)
    return rows


def _places(sums: HeadSums) -> list[tuple[int, int]]:
    layers, heads, _ = sums.parts.shape
    return [(layer, head) for layer in range(layers) for head in range(heads)]


def _finite(value: Any) -> float | None:
    number = float(value)
    return number if number == number else None


def _layer_rows(found: Scan, model: Model, layer: int) -> tuple[list[Row], list[Row]]:
    """The channels of a layer, and their highest pairs; the random ones are in the scan."""
    shares = _sums(found).shares()
    signals = [signal for signal in found.signals if signal.layer == layer]
    reads = channel_reads(model, layer, [(signal.head, signal.channels[0]) for signal in signals])
    labels = _labels(model, reads)
    others = [Place(*pair) for pair in found.sampled_pairs(layer)]
    rows, pairs = list[Row](), list[Row]()
    for signal, read in zip(signals, reads, strict=True):
        examples, channel = found.examples(signal), signal.channels[0]
        top = [Place(pair.token_ids, pair.dest, pair.src) for pair in examples.top]
        tokens = tokens_standing_out(top, others, found.labels)
        relations = relations_standing_out(top, others, found.labels)
        row: Row = _identity(signal) | {"share": float(shares[layer, signal.head, channel])}
        row |= {"highest": examples.top[0].score if top else None, "n_pairs": examples.n_pairs}
        row["quantiles"] = [{"q": q, "score": score} for q, score in examples.quantiles]
        row["tokens"], row["relations"] = _written(tokens), _written(relations)
        row |= {name: _named(ends, labels) for name, ends in asdict(read).items()}
        # What holds for all of them is said once, in what the atlas was made from.
        row["notes"] = json.dumps([note for note in examples.notes if note != FIRST_LEFT_OUT])
        rows.append(row)
        pairs += [_pair_row(signal.id, place, pair) for place, pair in enumerate(examples.top)]
    return rows, pairs


def _identity(signal: ScoredSignal) -> Row:
    return {
        "channel": signal.id,
        "head": head_name(signal.layer, signal.head),
        "layer": signal.layer,
        "number": signal.channels[0],
    }


def _written(found: list[StandsOut]) -> str:
    """As JSON: an empty list of records has no type that a table could know."""
    return json.dumps([asdict(each) for each in found])


def _labels(model: Model, reads: list[Reads]) -> dict[int, str]:
    ids = sorted({token for read in reads for ends in asdict(read).values() for token, _ in ends})
    return dict(zip(ids, model.token_labels(ids), strict=True))


def _named(ends: Ends, labels: dict[int, str]) -> list[Row]:
    return [{"token": labels[token], "coefficient": value} for token, value in ends]


_PAIRS: dict[str, Any] = {
    "channel": pl.String,
    "kind": pl.String,
    "place": pl.Int64,
    "score": pl.Float64,
    "text": pl.String,
    "dest": pl.Int64,
    "src": pl.Int64,
    "dest_token": pl.String,
    "src_token": pl.String,
    "token_ids": pl.List(pl.Int64),
    "tokens": pl.List(pl.String),
}


def _pair_row(channel: str, place: int, pair: Pair) -> Row:
    return {
        "channel": channel,
        "kind": "top",
        "place": place,
        "score": pair.score,
        "text": pair.text,
        "dest": pair.dest,
        "src": pair.src,
        "dest_token": pair.tokens[pair.dest],
        "src_token": pair.tokens[pair.src],
        "token_ids": list(pair.token_ids),
        "tokens": list(pair.tokens),
    }
