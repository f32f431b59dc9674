"""An atlas: what every head and channel of a model attends to over a corpus.

>>> import headtrace, tempfile
>>> model = headtrace.load("builtin")
>>> with tempfile.TemporaryDirectory() as folder:
...     made = atlas(model, "sampled:300", folder, channels="top:2", length=50)
...     again = open_atlas(folder)
...     head = again.head(1, 2)
...     channel = again.channel(1, 2, head.channels[0])
>>> again.heads.shape[0], again.channels.shape[0]                     # 3 layers of 4 heads, two channels of each
(12, 24)
>>> again.find("induction", 3)["head"].to_list() == made.find("induction", 3)["head"].to_list()
True
>>> head.name, len(head.channels), head.measures["induction"] > 0
('L1H2', 2, True)
>>> channel.share == head.shares[channel.channel], channel.top[0].score == channel.highest
(True, True)

The folder holds ``atlas.json`` (what it was made from), ``heads.parquet`` (a row per head: the measures of
`headtrace.interpret.head_roles`), ``channels.parquet`` (a row per channel: share, quantiles, what stands out, what
it reads through the embedding), ``pairs.parquet`` (a row per kept pair) and ``scan.safetensors``. The command
``headtrace atlas`` also writes pages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow.parquet as pq

from headtrace.circuits import ModelInfo
from headtrace.errors import InputError, shown
from headtrace.interpret.head_roles import CHANCES, MEASURES, HeadRole, roles_by_measure, roles_of_sums
from headtrace.interpret.rules import PairStatistics, StandsOut
from headtrace.interpret.scan import Scan
from headtrace.interpret.scan_run import scan
from headtrace.interpret.scored_signals import FIRST_LEFT_OUT, Pair
from headtrace.interpret.writes import channel_reads
from headtrace.models.integrity import difference, warn_if_not_compared
from headtrace.vocabulary import head_name
from headtrace.writing import replacing, write_text

if TYPE_CHECKING:
    from headtrace.interpret.corpus import Corpus
    from headtrace.interpret.scored_signals import SignalExamples
    from headtrace.models import Model
    from headtrace.progress import Progress
    from headtrace.runs.engines import Engine

SCHEMA = "headtrace.atlas/3"
TABLES = ("heads", "channels", "pairs")
ROWS_PER_GROUP = 2000
"""Rows of a Parquet row group: what has to be read to find the pairs of a channel."""
REQUIRED = ("model", "weights_sha256", "corpus", "tokens", "sinks")
"""Keys of ``atlas.json`` that are read."""
READS = ("query", "key", "opposite_query", "opposite_key")
PAIR_FIELDS = ("text", "dest", "src", "score", "token_ids", "tokens")
NOT_MEASURED = ("head", "layer", "number", "roles", "shares")
"""Columns of ``heads.parquet`` that are no measure."""
TOP = 40
"""Pairs of each channel in the tables."""
SUMMARISED = 3
"""Relations, and tokens of either side, that ``ChannelEntry.words`` names."""
Row = dict[str, Any]


@dataclass(frozen=True)
class HeadEntry:
    """A head over the corpus."""

    layer: int
    head: int
    measures: Mapping[str, float | None]
    """As in `headtrace.interpret.head_roles`; None where the corpus had no occasion for it."""
    shares: tuple[float, ...]
    """Of all its channels; they sum to one."""
    channels: tuple[int, ...]
    """The channels that the atlas describes, strongest first."""
    roles: tuple[HeadRole, ...] = ()
    """What it does, as far as that has a name."""

    @property
    def name(self) -> str:
        """Such as ``L9H6``."""
        return head_name(self.layer, self.head)


@dataclass(frozen=True)
class ChannelEntry:
    """A channel over the corpus."""

    layer: int
    head: int
    channel: int
    share: float
    """The part of its head's attention that it accounts for."""
    highest: float | None
    """The highest score; None if no pair scores above zero."""
    n_pairs: int
    quantiles: tuple[tuple[float, float], ...]
    tokens: tuple[StandsOut, ...]
    relations: tuple[StandsOut, ...]
    reads: Mapping[str, tuple[tuple[str, float], ...]]
    """Tokens with their coefficients, strongest first, by ``query``, ``key``, ``opposite_query``, ``opposite_key``."""
    notes: tuple[str, ...]
    top: tuple[Pair, ...]
    """The highest pairs, highest first."""

    @property
    def name(self) -> str:
        """Such as ``L9H6:3``."""
        return f"{head_name(self.layer, self.head)}:{self.channel}"

    @property
    def words(self) -> str:
        """What stands out, in a line: a summary of examples, not a tested claim.

        >>> found = StandsOut("the same token", None, 30, 0.75, 12.0)
        >>> comma = StandsOut(",", "src", 20, 0.5, 8.0)
        >>> ChannelEntry(9, 6, 3, 0.4, 7.5, 100, (), (comma,), (found,), {}, (), ()).words
        'the same token (75 %); to "," (50 %)'
        """
        parts = [f"{each.what} ({100 * each.share:.0f} %)" for each in self.relations[:SUMMARISED]]
        for side, word in (("dest", "from"), ("src", "to")):
            tokens = [each for each in self.tokens if each.side == side][:SUMMARISED]
            if tokens:
                listed = ", ".join(json.dumps(each.what, ensure_ascii=False) for each in tokens)
                parts.append(f"{word} {listed} ({100 * sum(each.share for each in tokens):.0f} %)")
        return "; ".join(parts) or "nothing stands out"


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

    def frame(self, of: str = "heads") -> pl.DataFrame:
        """A row per head; or, with ``of``, per channel (``"channels"``) or pair of tokens (``"pairs"``)."""
        if of not in ("heads", "channels", "pairs"):
            raise InputError(f"frame({of!r}): an atlas has heads, channels and pairs.")
        return getattr(self, of)

    def _repr_html_(self) -> str:
        from headtrace.tables import frame, paragraph

        return paragraph(repr(self)) + frame(self.heads.head(20))

    @cached_property
    def pairs(self) -> pl.DataFrame:
        """All pairs of all channels."""
        return _read_table(self.folder, "pairs")

    @property
    def n_pairs(self) -> int:
        """How many pairs there are, without reading them."""
        return pq.read_metadata(self.folder / "pairs.parquet").num_rows

    @cached_property
    def scan(self) -> Scan:
        """The scan that the tables were made from."""
        return Scan.load(self.folder)

    def examples(self, channel: str) -> SignalExamples:
        """The pairs kept of a channel, like ``L9H6:3``."""
        return self.scan.examples(channel)

    def find(self, measure: str, k: int = 10, *, lowest: bool = False) -> pl.DataFrame:
        """The ``k`` heads with the highest (or lowest) values of a measure."""
        known = [name for name in self.heads.columns if name not in NOT_MEASURED]
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
        row = found.row(0, named=True)
        own = self.channels.filter(pl.col("head") == head_name(layer, head)).sort("share", descending=True)
        measures = {name: row[name] for name in MEASURES}
        chances = {name: row[f"{name}_by_chance"] for name in CHANCES}
        roles = roles_by_measure(measures, chances)
        return HeadEntry(layer, head, measures, tuple(row["shares"]), tuple(own["number"].to_list()), roles)

    def roles(self) -> dict[tuple[int, int], tuple[HeadRole, ...]]:
        """The roles of all heads, by layer and head: for `Mechanism.with_roles`."""
        return {
            (layer, head): self.head(layer, head).roles
            for layer, head in self.heads.select("layer", "number").iter_rows()
        }

    def channel(self, layer: int, head: int, channel: int) -> ChannelEntry:
        """What the atlas says of one channel, with its highest pairs; the pairs of others are not read."""
        name = f"{head_name(layer, head)}:{channel}"
        found = self.channels.filter(pl.col("channel") == name)
        if not found.height:
            known = ", ".join(map(str, self.head(layer, head).channels)) or "none of this head"
            raise InputError(
                f"The atlas has no channel {name}: it has {known}. Ask for more with --channels."
            )
        row = found.row(0, named=True)
        pairs = _read_table(self.folder, "pairs", pl.col("channel") == name).sort("place")
        return ChannelEntry(
            layer=layer,
            head=head,
            channel=channel,
            share=row["share"],
            highest=row["highest"],
            n_pairs=row["n_pairs"],
            quantiles=tuple((each["q"], each["score"]) for each in row["quantiles"]),
            tokens=tuple(StandsOut(**each) for each in json.loads(row["tokens"])),
            relations=tuple(StandsOut(**each) for each in json.loads(row["relations"])),
            reads={side: tuple((each["token"], each["coefficient"]) for each in row[side]) for side in READS},
            notes=tuple(json.loads(row["notes"])),
            top=tuple(
                Pair(text, dest, src, score, tuple(ids), tuple(tokens))
                for text, dest, src, score, ids, tokens in pairs.select(PAIR_FIELDS).iter_rows()
            ),
        )

    def require_model(self, model: Model) -> None:
        """An error if the atlas was made of another model: other weights, or another config."""
        kept = ModelInfo(
            name=self.about["model"],
            weights_sha256=self.about["weights_sha256"],
            computation_sha256=self.about.get("computation_sha256"),
        )
        other = difference(kept, model)
        if other is not None:
            raise InputError(
                f"The atlas {str(self.folder)!r} was made of another model than {model.name!r}: "
                f"{self.about['model']!r} has {other}. Load the model that it was made of, or make an atlas of this "
                "one: headtrace atlas."
            )
        warn_if_not_compared(f"The atlas {str(self.folder)!r}", kept)


def open_atlas(folder: str | Path, model: Model | None = None) -> Atlas:
    """Read an atlas from its folder; pairs are read when they are needed. With ``model``, its weights must match."""
    path = Path(folder)
    files = ("atlas.json", *(f"{table}.parquet" for table in TABLES))
    missing = [name for name in files if not (path / name).is_file()]
    if missing:
        raise InputError(
            f"{str(folder)!r} is not an atlas: it has no {missing[0]}. Make one: headtrace atlas MODEL --corpus C "
            "--out DIR (an interrupted one is resumed)."
        )
    try:
        about = json.loads((path / "atlas.json").read_text(encoding="utf-8"))
        if about["schema"] != SCHEMA:
            raise InputError(
                f"{str(folder)!r} is an atlas of the form {shown(about['schema'])}; this version reads {SCHEMA!r}. "
                "Make a new one in another folder."
            )
        about = {name: about[name] for name in REQUIRED} | about
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, error) from error
    found = Atlas(about, _read_table(path, "heads"), _read_table(path, "channels"), path)
    if model is not None:
        found.require_model(model)
    return found


def _read_table(folder: Path, table: str, rows: pl.Expr | None = None) -> pl.DataFrame:
    try:
        frame = pl.scan_parquet(folder / f"{table}.parquet")
        return (frame if rows is None else frame.filter(rows)).collect()
    except (OSError, pl.exceptions.PolarsError) as error:
        raise _unreadable(folder, error) from error


def _unreadable(folder: Path, error: Exception) -> InputError:
    return InputError(f"The atlas {str(folder)!r} cannot be read ({error}). Make a new one.")


# -- Making an atlas ---------------------------------------------------------------------------------------------


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
    """Scan a corpus and write tables of all heads and of their strongest channels; an interrupted atlas is resumed.

    ``engine``, ``workers`` and ``ray_address`` are those of ``scan``.
    """
    found = scan(
        model,
        corpus,
        channels if channels.strip().startswith("top:") else channels.replace(",", " ").split(),
        out=out,
        tokens=tokens,
        length=length,
        seed=seed,
        sinks=sinks,
        top=TOP,
        heads=True,
        engine=engine,
        workers=workers,
        ray_address=ray_address,
        progress=progress,
    )
    if any(len(signal.channels) != 1 for signal in found.signals):
        raise InputError("An atlas takes single channels: write top:8, or channels like L9H6:3.")
    channel_rows, pairs = list[Row](), list[pl.DataFrame]()
    for layer in sorted({signal.layer for signal in found.signals}):  # the pairs of one layer at a time
        rows, pair_rows = _layer_rows(found, model, layer)
        channel_rows += rows
        pairs.append(pl.DataFrame(pair_rows, schema=PAIR_COLUMNS))
    tables = {
        "heads": pl.DataFrame(_head_rows(found), infer_schema_length=None),
        "channels": pl.DataFrame(channel_rows, infer_schema_length=None),
        "pairs": pl.concat(pairs),
    }
    folder = Path(out)
    for name, table in tables.items():
        with replacing(folder / f"{name}.parquet") as temporary:
            table.write_parquet(temporary, row_group_size=ROWS_PER_GROUP)
    text = found.options["corpus"]
    about = {
        "schema": SCHEMA,
        "model": model.name,
        "weights_sha256": model.weights_sha256,
        "computation_sha256": model.computation_sha256,
        # A file by its name alone, since pages are shown to others.
        "corpus": Path(text["source"]).name if "bytes" in text else text["source"],
        "tokens": found.n_tokens,
        "chunks": found.n_chunks,
        "sinks": sinks,
        "options": found.options,
    }
    write_text(folder / "atlas.json", json.dumps(about, indent=1) + "\n")
    return Atlas(about, tables["heads"], tables["channels"], folder)


def _head_rows(found: Scan) -> list[Row]:
    assert found.heads is not None, "an atlas measures heads"
    measures, shares, chances = found.heads.measures(), found.heads.shares(), found.heads.chances()
    roles = roles_of_sums(found.heads)
    descending = shares.sort(dim=-1, descending=True).values
    rows: list[Row] = []
    for layer in range(shares.shape[0]):
        for head in range(shares.shape[1]):
            values = {name: float(measures[name][layer, head]) for name in MEASURES}
            values |= {f"{name}_by_chance": float(chances[name][layer, head]) for name in CHANCES}
            own = roles[layer, head]
            rows.append(
                {"head": head_name(layer, head), "layer": layer, "number": head}
                | {
                    name: value if value == value else None for name, value in values.items()
                }  # NaN: no occasion
                | {
                    "roles": ", ".join(role.name for role in own),
                    "top_share": float(descending[layer, head, 0]),
                    "top_4_share": float(descending[layer, head, :4].sum()),
                    "shares": shares[layer, head].tolist(),
                }
            )
    return rows


def _layer_rows(found: Scan, model: Model, layer: int) -> tuple[list[Row], list[Row]]:
    """The rows of a layer's channels, and of their highest pairs; the random pairs are in the scan."""
    assert found.heads is not None, "an atlas measures heads"
    shares, others = found.heads.shares(), PairStatistics(found.sample(layer))
    signals = [signal for signal in found.signals if signal.layer == layer]
    reads = channel_reads(model, layer, [(signal.head, signal.channels[0]) for signal in signals])
    ids = sorted({token for read in reads for side in READS for token, _ in getattr(read, side)})
    labels = dict(zip(ids, model.token_labels(ids), strict=True))
    rows, pairs = list[Row](), list[Row]()
    for signal, read in zip(signals, reads, strict=True):
        examples, channel = found.examples(signal), signal.channels[0]
        statistics = PairStatistics(examples.top)
        rows.append(
            {
                "channel": signal.id,
                "head": head_name(layer, signal.head),
                "layer": layer,
                "number": channel,
                "share": float(shares[layer, signal.head, channel]),
                "highest": examples.top[0].score if examples.top else None,
                "n_pairs": examples.n_pairs,
                "quantiles": [{"q": q, "score": score} for q, score in examples.quantiles],
                # As JSON: an empty list of records would have no type in the table.
                "tokens": json.dumps([asdict(each) for each in statistics.tokens_beyond(others)]),
                "relations": json.dumps([asdict(each) for each in statistics.relations_beyond(others)]),
            }
            | {
                side: [{"token": labels[id], "coefficient": value} for id, value in getattr(read, side)]
                for side in READS
            }
            # What holds for all channels is in atlas.json.
            | {"notes": json.dumps([note for note in examples.notes if note != FIRST_LEFT_OUT])}
        )
        pairs += [
            {
                "channel": signal.id,
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
            for place, pair in enumerate(examples.top)
        ]
    return rows, pairs


PAIR_COLUMNS: dict[str, Any] = {
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
"""Columns of ``pairs.parquet``."""
