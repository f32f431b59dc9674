"""Text for a scan: any length of it, as chunks of tokens, one after the other.

>>> import headtrace
>>> model = headtrace.load("builtin")
>>> corpus = open_corpus("sampled:64", model, length=32)
>>> [(chunk.index, len(chunk.token_ids)) for chunk in corpus.chunks()]
[(0, 32), (1, 32)]
>>> corpus = open_corpus("task:ioi", model)
>>> next(corpus.chunks()).id
'...'

Sources: a text file, JSONL (field ``text``), Parquet (column ``text``), a dataset of the hub (``hub:owner/name``, or
``hub:owner/name:config:split`` for another than its only configuration and ``train``), ``sampled:N`` (N tokens drawn
from the model itself), ``task:NAME``. A chunk never crosses from one text into another; each begins with what the
tokenizer puts in front of a text. Nothing is held but the piece that is being read.
"""

from __future__ import annotations

import codecs
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headtrace.errors import InputError, shown
from headtrace.extras import require
from headtrace.lines import Record, Skipped, stream_lines
from headtrace.prompts import encode, is_unknown

if TYPE_CHECKING:
    from headtrace.models import Model

LENGTH = 128
"""Tokens of a chunk."""
SHORTEST = 4
"""A rest of a text with fewer tokens is left out."""
PIECE = 1 << 16
"""Characters that are tokenized at once; a longer line is cut at a space."""
AT_ONCE = 16
"""Chunks that are drawn from the model together."""
_PREVIEW = 1 << 20
"""Bytes of a file that tell it from another one, with its size."""


@dataclass(frozen=True)
class Chunk:
    """A piece of a text, as the model reads it."""

    index: int
    """Its place in the corpus."""
    id: str
    """Which text, and from which of its tokens on."""
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Text:
    """A text, or a piece of one: pieces with one name follow each other."""

    name: str
    words: str


@dataclass(frozen=True)
class Corpus:
    """Where chunks come from. Made by ``open_corpus``."""

    source: str
    length: int
    seed: int
    model: Model
    tokens: int | None = None
    """Read so many tokens, and the rest of the chunk with the last of them."""

    def chunks(self, start: int = 0) -> Iterator[Chunk]:
        """The chunks from ``start`` on, in an order that never changes."""
        return self._sampled(start) if self.kind == "sampled" else islice(self._limited(), start, None)

    def _limited(self) -> Iterator[Chunk]:
        read = 0
        for chunk in self._read():
            if self.tokens is not None and read >= self.tokens:
                return
            read += len(chunk.token_ids)
            yield chunk

    @property
    def kind(self) -> str:
        return _kind(self.source)

    @property
    def n_tokens(self) -> int | None:
        """How many tokens are to be read, if that is known; of a shorter text all are."""
        if self.kind != "sampled":
            return self.tokens
        asked = _count(self.source)
        return asked if self.tokens is None else min(asked, self.tokens)

    @property
    def n_drawn(self) -> int:
        """How many chunks are drawn from the model."""
        return -(-(self.n_tokens or 0) // self.length)

    @cached_property
    def front(self) -> tuple[int, ...]:
        """What the tokenizer puts in front of a text."""
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            if self.kind == "sampled":
                return ()
            raise InputError(
                f"{self.model.name!r} was loaded without a tokenizer: text cannot be read. Pass tokenizer= to "
                "headtrace.load, or use the corpus sampled:N."
            )
        (encoded,) = encode(tokenizer, ["a"])
        return encoded.ids[: encoded.front]

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What must be the same for a scan to go on: source, length, and of a file its size and beginning."""
        known: dict[str, Any] = {"source": self.source, "length": self.length, "tokens": self.tokens}
        if self.kind in ("sampled", "task"):
            known["seed"] = self.seed
        if self.kind in ("text", "jsonl", "parquet"):
            path = Path(self.source)
            with path.open("rb") as file:
                known["beginning"] = hashlib.sha256(file.read(_PREVIEW)).hexdigest()[:16]
            known["bytes"] = path.stat().st_size
        return known

    # -- from text ---------------------------------------------------------------------------------------------

    def _read(self) -> Iterator[Chunk]:
        if self.kind == "task":
            yield from self._of_task()
            return
        number = -1
        for number, (name, ids) in enumerate(self._cut(_TEXTS[self.kind](self.source))):
            yield Chunk(number, name, ids)
        if number < 0:
            raise InputError(
                f"The corpus {self.source!r} holds no text of at least {SHORTEST} tokens. Give a file with some, or "
                "sampled:N for text that the model makes up."
            )

    def _cut(self, texts: Iterable[Text]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Tokens of each text in pieces of one length, behind what the tokenizer puts in front."""
        room = self.length - len(self.front)
        name, start, held = "", 0, list[int]()
        checked = False
        for text in texts:
            if text.name != name:
                yield from self._rest(name, start, held)
                name, start, held = text.name, 0, []
            held += self._tokens(text.words)
            if not checked and held:
                checked = self._check_known(held)
            while len(held) >= room:
                yield f"{name}:{start}", (*self.front, *held[:room])
                held, start = held[room:], start + room
        yield from self._rest(name, start, held)

    def _rest(self, name: str, start: int, held: list[int]) -> Iterator[tuple[str, tuple[int, ...]]]:
        if len(held) >= SHORTEST:
            yield f"{name}:{start}", (*self.front, *held)

    def _tokens(self, words: str) -> list[int]:
        found = self.model.tokenizer(words, add_special_tokens=False, verbose=False)
        return list(found["input_ids"])

    def _check_known(self, ids: list[int]) -> bool:
        unknown = sum(is_unknown(self.model.tokenizer, token) for token in ids)
        if 2 * unknown > len(ids):
            raise InputError(
                f"{self.model.name!r} does not know most of the words of {self.source!r} ({unknown} of the first "
                f"{len(ids)} tokens are unknown). Use text of its own kind, or sampled:N."
            )
        return True

    def _of_task(self) -> Iterator[Chunk]:
        from headtrace.tasks import load_task

        examples = load_task(self.source.removeprefix("task:"), self.model.tokenizer, seed=self.seed)
        for number, example in enumerate(examples):
            yield Chunk(number, example.id, tuple(example.token_ids))

    # -- from the model itself ---------------------------------------------------------------------------------

    def _sampled(self, start: int) -> Iterator[Chunk]:
        """Drawn batch by batch, each with a seed of its own: none but the wanted ones need be drawn."""
        count = self.n_drawn
        for batch in range(start // AT_ONCE, -(-count // AT_ONCE)):
            size = min(AT_ONCE, count - batch * AT_ONCE)
            for row, ids in enumerate(self._draw(batch, size)):
                index = batch * AT_ONCE + row
                if index >= start:
                    yield Chunk(index, f"sampled {index}", ids)

    def _draw(self, batch: int, size: int) -> list[tuple[int, ...]]:
        import torch

        from headtrace.models.forward import sample

        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + batch) % 2**63)
        # All rows are drawn, whatever is wanted of them: a longer corpus begins as a shorter one does.
        front = torch.tensor([self.front] * AT_ONCE, dtype=torch.int64).reshape(AT_ONCE, -1)
        if not front.shape[1]:
            front = self._first_tokens(generator)
        drawn = sample(self.model, front.to(self.model.device), self.length, generator)
        return [tuple(row) for row in drawn[:size].tolist()]

    def _first_tokens(self, generator: Any) -> Any:
        """A model that begins with no token of its own begins with its end-of-text, else with any token."""
        import torch

        first = getattr(self.model.tokenizer, "bos_token_id", None)
        if first is not None:
            return torch.full((AT_ONCE, 1), first)
        return torch.randint(self.model.d_vocab, (AT_ONCE, 1), generator=generator)


def open_corpus(
    source: str | Path | Corpus,
    model: Model,
    *,
    length: int | None = None,
    seed: int = 0,
    tokens: int | None = None,
) -> Corpus:
    """A corpus by its name; errors that can be seen at once are raised here."""
    if isinstance(source, Corpus):
        return source
    context = model.max_positions
    size = min(LENGTH, context or LENGTH) if length is None else length
    if size < SHORTEST or (context is not None and size > context):
        most = "" if context is None else f" to {context}, the context of {model.name!r}"
        raise InputError(f"The length of a chunk is {size}: it must be {SHORTEST}{most or ' or more'}.")
    if tokens is not None and tokens < 1:
        raise InputError(f"The number of tokens to read is {tokens}: it must be at least 1.")
    corpus = Corpus(str(source), size, seed, model, tokens)
    _check(corpus)
    return corpus


def _kind(source: str) -> str:
    for kind in ("sampled", "task", "hub"):
        if source.startswith(f"{kind}:"):
            return kind
    ending = Path(source).suffix.lower()
    if ending in (".jsonl", ".ndjson"):
        return "jsonl"
    if ending == ".parquet":
        return "parquet"
    known = os.path.exists(source) or ending or source.count("/") != 1
    return "text" if known else "hub"


def _check(corpus: Corpus) -> None:
    source, kind = corpus.source, corpus.kind
    if kind == "sampled":
        _count(source)
    elif kind == "task":
        next(corpus.chunks())
    elif kind == "hub":
        _datasets()
    elif not os.path.isfile(source):
        what = "is a folder" if os.path.isdir(source) else "does not exist"
        raise InputError(
            f"The corpus {source!r} {what}. Give a text file, JSONL with a field 'text', Parquet with a column "
            "'text', hub:owner/name, sampled:N or task:ioi."
        )
    corpus.front  # noqa: B018 (says so if there is no tokenizer)


def _count(source: str) -> int:
    text = source.removeprefix("sampled:").replace("_", "").replace(",", "")
    if not text.isdecimal() or not int(text):
        raise InputError(
            f"{source!r} is not a corpus: write how many tokens to draw from the model, like sampled:20000."
        )
    return int(text)


# -- texts of files ----------------------------------------------------------------------------------------------


def _pieces(name: str, words: str) -> Iterator[Text]:
    """A long text in pieces, cut before a space where there is one."""
    start = 0
    while len(words) - start > PIECE:
        cut = words.rfind(" ", start + PIECE // 2, start + PIECE)
        cut = start + PIECE if cut < 0 else cut
        yield Text(name, words[start:cut])
        start = cut
    if start < len(words):
        yield Text(name, words[start:])


def _plain_texts(source: str) -> Iterator[Text]:
    """A text file is one text, read block by block; a block ends with a line or, in a long line, before a space."""
    decoder, held = codecs.getincrementaldecoder("utf-8-sig")(), ""
    try:
        with Path(source).open("rb") as file:
            while block := file.read(PIECE):
                held += _decoded(decoder, block, source)
                cut = held.rfind("\n") + 1 or held.rfind(" ")
                if cut > 0:
                    yield from _pieces("text", held[:cut])
                    held = held[cut:]
                elif len(held) >= PIECE:
                    yield Text("text", held)
                    held = ""
    except OSError as error:
        raise InputError(f"The corpus {source!r} cannot be read: {error.strerror or error}.") from None
    held += _decoded(decoder, b"", source)
    yield from _pieces("text", held)


def _decoded(decoder: codecs.IncrementalDecoder, block: bytes, source: str) -> str:
    try:
        text = decoder.decode(block, final=not block)
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise InputError(
            f"The corpus {source!r} is not UTF-8 text. Save it as UTF-8; other formats are JSONL and Parquet, by their "
            "endings."
        )
    return text


def _jsonl_texts(source: str) -> Iterator[Text]:
    def words(record: Record, where: str) -> str:
        text = record.get("text")
        if not isinstance(text, str) or not text:
            raise InputError(f"{where}: 'text' must be a string that is not empty, got {shown(text)}.")
        return text

    used, first = 0, None
    for number, found in stream_lines(source, words, what="texts"):
        if isinstance(found, Skipped):
            first = first or found
        else:
            used += 1
            yield from _pieces(f"line {number}", found)
    if not used:
        reason = "" if first is None else f" First, {first}"
        raise InputError(
            f'{source!r} holds no texts: write one JSON object per line, {{"text": "..."}}.{reason}'
        )


def _parquet_texts(source: str) -> Iterator[Text]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        file: Any = pq.ParquetFile(source)
        names = file.schema_arrow.names
        if names.count("text") != 1:
            several = "several columns" if "text" in names else "no column"
            raise InputError(
                f"{source!r} has {several} 'text': it has {', '.join(map(repr, names))}. Rename the one to be read."
            )
        kind = file.schema_arrow.field("text").type
        if pa.types.is_dictionary(kind):  # as categories are written
            kind = kind.value_type
        if str(kind) not in ("string", "large_string", "string_view"):
            raise InputError(f"The column 'text' of {source!r} holds {kind}, not text.")
        for batch in file.iter_batches(batch_size=64, columns=["text"]):
            for text in batch.column(0).to_pylist():
                if text:
                    yield from _pieces(f"row {number}", text)
                number += 1
    except UnicodeDecodeError:
        raise InputError(
            f"The column 'text' of {source!r} is not UTF-8, in row {number} or soon after."
        ) from None
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{source!r} cannot be read as Parquet: {error}.") from None


def _hub_texts(source: str) -> Iterator[Text]:
    name, config, split, *_ = *source.removeprefix("hub:").split(":"), "", ""
    try:
        rows: Any = _datasets().load_dataset(name, config or None, split=split or "train", streaming=True)
        for number, row in enumerate(rows):
            text = row.get("text", row)
            if not isinstance(text, str | None):
                raise InputError(
                    f"The dataset {name!r} has no field 'text' of text: it has {', '.join(map(repr, row))}."
                )
            yield from _pieces(f"row {number}", text or "")
    except InputError:
        raise
    except Exception as error:  # whatever the hub, the network or the dataset has to say
        told = " ".join(str(error).split())
        raise InputError(
            f"The dataset {name!r} cannot be read: {told.rstrip('.')}. Is its name right, and the hub reachable? "
            "Another configuration or split is hub:owner/name:config:split. A file that was downloaded before will do, "
            "too: JSONL or Parquet."
        ) from error


def _datasets() -> Any:
    without = "Without it, give a text file, JSONL or Parquet, or sampled:N."
    require("datasets", extra="interpret", what="A dataset of the hub", instead=without)
    import datasets  # type: ignore[import-not-found]

    return datasets


_TEXTS: dict[str, Callable[[str], Iterator[Text]]] = {
    "text": _plain_texts,
    "jsonl": _jsonl_texts,
    "parquet": _parquet_texts,
    "hub": _hub_texts,
}
