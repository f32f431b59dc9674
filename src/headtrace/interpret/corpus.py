"""Text for a scan, of any length, as a stream of chunks of tokens.

>>> import headtrace
>>> model = headtrace.load("builtin")
>>> corpus = open_corpus("sampled:64", model, length=32)
>>> [(chunk.index, len(chunk.token_ids)) for chunk in corpus.chunks()]
[(0, 32), (1, 32)]
>>> corpus = open_corpus("task:ioi", model)
>>> next(corpus.chunks()).id
'...'

Sources: a text file, JSONL (field ``text``), Parquet (column ``text``), a dataset of the hub (``hub:owner/name``, or
``hub:owner/name:config:split`` if it has several configurations or the split is not ``train``), ``sampled:N`` (N tokens
sampled from the model itself), ``task:NAME``. A chunk never crosses from one text into another; each begins with the
tokens that the tokenizer puts in front of a text. Only the piece that is being read is held in memory.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headtrace.errors import InputError
from headtrace.lazy import require
from headtrace.lines import Record, Skipped, stream_lines
from headtrace.prompts import Chat, encode, is_unknown
from headtrace.request import TraceRequest, json_fields

if TYPE_CHECKING:
    from headtrace.models import Model

LENGTH = 128
"""Tokens of a chunk."""
SHORTEST = 4
"""The rest of a text is dropped if it has fewer tokens."""
PIECE = 1 << 16
"""Characters tokenized at once; a longer line is cut at a space."""
SAMPLED_AT_ONCE = 16
"""Chunks sampled from the model together."""
_PREVIEW = 1 << 20
"""Bytes of a file that are hashed to recognise it, together with its size."""


@dataclass(frozen=True)
class Chunk:
    """A piece of a text, as the model reads it."""

    index: int
    """Its number in the corpus."""
    id: str
    """The text, and the token of it that the chunk begins with."""
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Corpus:
    """A source of chunks. Made by ``open_corpus``."""

    source: str
    length: int
    seed: int
    model: Model
    tokens: int | None = None
    """Stop after the chunk in which this many tokens are reached."""

    @property
    def kind(self) -> str:
        """``sampled``, ``task``, ``hub``, ``jsonl``, ``parquet`` or ``text``."""
        for kind in ("sampled", "task", "hub"):
            if self.source.startswith(f"{kind}:"):
                return kind
        ending = Path(self.source).suffix.lower()
        if ending in (".jsonl", ".ndjson"):
            return "jsonl"
        if ending == ".parquet":
            return "parquet"
        return "text" if os.path.exists(self.source) or ending or self.source.count("/") != 1 else "hub"

    @property
    def n_tokens(self) -> int | None:
        """How many tokens will be read, if that is known; a shorter text is read to its end."""
        if self.kind != "sampled":
            return self.tokens
        text = self.source.removeprefix("sampled:").replace("_", "").replace(",", "")
        if not text.isdecimal() or not int(text):
            raise InputError(
                f"{self.source!r} is not a corpus: write how many tokens to sample from the model, like sampled:20000."
            )
        return int(text) if self.tokens is None else min(int(text), self.tokens)

    @property
    def n_sampled(self) -> int:
        """How many chunks are sampled from the model."""
        return -(-(self.n_tokens or 0) // self.length)

    @cached_property
    def front(self) -> tuple[int, ...]:
        """The tokens that the tokenizer puts in front of a text."""
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
        """What must be equal for a scan to be resumed: source, lengths, and for a file its size and beginning."""
        known: dict[str, Any] = {"source": self.source, "length": self.length, "tokens": self.tokens}
        if self.kind in ("sampled", "task"):
            known["seed"] = self.seed
        if self.kind in ("text", "jsonl", "parquet"):
            path = Path(self.source)
            with path.open("rb") as file:
                known["beginning"] = hashlib.sha256(file.read(_PREVIEW)).hexdigest()[:16]
            known["bytes"] = path.stat().st_size
        return known

    def chunks(self, start: int = 0) -> Iterator[Chunk]:
        """The chunks from number ``start`` on, in an order that never changes."""
        return self._sample(start) if self.kind == "sampled" else islice(self._read(), start, None)

    def _read(self) -> Iterator[Chunk]:
        """The chunks of a task or of texts, up to the limit of tokens."""
        if self.kind == "task":
            from headtrace.tasks import load_task

            examples = load_task(self.source.removeprefix("task:"), self.model.tokenizer, seed=self.seed)
            pieces = ((example.id, tuple(example.token_ids)) for example in examples)
        else:
            jsonl = self.kind == "jsonl"
            texts = _read_jsonl(self.source, self.model) if jsonl else _READERS[self.kind](self.source)
            pieces = self._cut(texts)
        number, read = -1, 0
        for number, (name, ids) in enumerate(pieces):
            if self.tokens is not None and read >= self.tokens:
                return
            read += len(ids)
            yield Chunk(number, name, ids)
        if number < 0:
            raise InputError(
                f"The corpus {self.source!r} holds no text of at least {SHORTEST} tokens. Give a file with some, or "
                "sampled:N for text that the model makes up."
            )

    def _cut(self, texts: Iterator[tuple[str, str]]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Texts, given as pieces (name, characters), as id and tokens of chunks; pieces with one name are joined."""
        room = self.length - len(self.front)
        name, start, held = "", 0, list[int]()
        checked = False
        for piece_name, words in texts:
            if piece_name != name:
                if len(held) >= SHORTEST:
                    yield f"{name}:{start}", (*self.front, *held)
                name, start, held = piece_name, 0, []
            held += self._tokens(words)
            if held and not checked:
                unknown = sum(is_unknown(self.model.tokenizer, token) for token in held)
                if 2 * unknown > len(held):
                    raise InputError(
                        f"{self.model.name!r} does not know most of the words of {self.source!r} ({unknown} of the "
                        f"first {len(held)} tokens are unknown). Use text of the kind it was trained on, or sampled:N."
                    )
                checked = True
            while len(held) >= room:
                yield f"{name}:{start}", (*self.front, *held[:room])
                held, start = held[room:], start + room
        if len(held) >= SHORTEST:
            yield f"{name}:{start}", (*self.front, *held)

    def _tokens(self, words: str) -> list[int]:
        return list(self.model.tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"])

    def _sample(self, start: int) -> Iterator[Chunk]:
        """Chunks sampled from the model in batches that each have a seed: only those that are needed are sampled."""
        import torch

        from headtrace.models.forward import sample

        first = self.front or (getattr(self.model.tokenizer, "bos_token_id", None),)
        for batch in range(start // SAMPLED_AT_ONCE, -(-self.n_sampled // SAMPLED_AT_ONCE)):
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + batch) % 2**63)
            # All rows of a batch are sampled even if few are needed: a longer corpus begins as a shorter one does.
            if first == (None,):  # the tokenizer has no token to begin with: begin with any
                prompts = torch.randint(self.model.d_vocab, (SAMPLED_AT_ONCE, 1), generator=generator)
            else:
                prompts = torch.tensor([first] * SAMPLED_AT_ONCE, dtype=torch.int64)
            rows = sample(self.model, prompts.to(self.model.device), self.length, generator).tolist()
            for index, row in enumerate(rows, start=batch * SAMPLED_AT_ONCE):
                if start <= index < self.n_sampled:
                    yield Chunk(index, f"sampled {index}", tuple(row))


def open_corpus(
    source: str | Path | Corpus,
    model: Model,
    *,
    length: int | None = None,
    seed: int = 0,
    tokens: int | None = None,
) -> Corpus:
    """A corpus by its name; what can be seen to be wrong without reading it is an error here."""
    if isinstance(source, Corpus):
        return source
    context = model.max_positions
    size = min(LENGTH, context or LENGTH) if length is None else length
    if size < SHORTEST or (context is not None and size > context):
        most = " or more" if context is None else f" to {context}, the context of {model.name!r}"
        raise InputError(f"The length of a chunk is {size}: it must be {SHORTEST}{most}.")
    if tokens is not None and tokens < 1:
        raise InputError(f"The number of tokens to read is {tokens}: it must be at least 1.")
    corpus = Corpus(str(source), size, seed, model, tokens)
    if corpus.kind == "sampled":
        corpus.n_tokens  # noqa: B018 (an error if N is not a number)
    elif corpus.kind == "task":
        next(corpus.chunks())
    elif corpus.kind == "hub":
        _datasets()
    elif not os.path.isfile(corpus.source):
        what = "is a folder" if os.path.isdir(corpus.source) else "does not exist"
        raise InputError(
            f"The corpus {corpus.source!r} {what}. Give a text file, JSONL with a field 'text', Parquet with a column "
            "'text', hub:owner/name, sampled:N or task:ioi."
        )
    corpus.front  # noqa: B018 (an error if a tokenizer is needed and missing)
    return corpus


# -- Readers: the texts of a source as pieces (name, characters) of bounded size ---------------------------------


def _pieces(name: str, words: str) -> Iterator[tuple[str, str]]:
    """A long text in pieces, cut before a space where there is one."""
    start = 0
    while len(words) - start > PIECE:
        cut = words.rfind(" ", start + PIECE // 2, start + PIECE)
        cut = start + PIECE if cut < 0 else cut
        yield name, words[start:cut]
        start = cut
    if start < len(words):
        yield name, words[start:]


def _read_text(source: str) -> Iterator[tuple[str, str]]:
    """A text file is one text, read in blocks that end with a line or, within a long line, before a space."""
    held, block = "", "-"
    try:
        with open(source, encoding="utf-8-sig", newline="") as file:
            while block:
                block = file.read(PIECE)
                held += block
                if "\0" in held:
                    raise ValueError("a zero byte")
                cut = held.rfind("\n") + 1 or held.rfind(" ") if block else len(held)
                if cut > 0:
                    yield from _pieces("text", held[:cut])
                    held = held[cut:]
                elif len(held) >= PIECE:
                    yield "text", held
                    held = ""
    except OSError as error:
        raise InputError(f"The corpus {source!r} cannot be read: {error.strerror or error}.") from None
    except ValueError:
        raise InputError(
            f"The corpus {source!r} is not UTF-8 text. Save it as UTF-8; files of other formats (JSONL, Parquet) are "
            "recognised by their extensions."
        ) from None


def _read_jsonl(source: str, model: Model) -> Iterator[tuple[str, str]]:
    """The texts of a file of JSON objects; prompts given as tokens or messages are read as text.

    Fields of prompts are checked as in a file of prompts. Others are ignored where there is a text: corpora have many.
    """
    known = json_fields()

    def text_of(record: Record, where: str) -> str:
        has_text = record.get("text") is not None
        fields = {name: value for name, value in record.items() if name in known or not has_text}
        try:
            prompt = TraceRequest.from_json(fields).prompt
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        if isinstance(prompt, Chat):
            return "\n".join(message["content"] for message in prompt.messages)
        if isinstance(prompt, str):
            return prompt
        return model.tokenizer.decode(model.to_ids(list(prompt)), skip_special_tokens=True)

    used, first = 0, None
    for number, found in stream_lines(source, text_of, what="texts"):
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


def _read_parquet(source: str) -> Iterator[tuple[str, str]]:
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
        if pa.types.is_dictionary(kind):  # categories
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


def _read_hub(source: str) -> Iterator[tuple[str, str]]:
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
    except Exception as error:  # whatever the hub, the network or the dataset raises
        reason = " ".join(str(error).split())
        raise InputError(
            f"The dataset {name!r} cannot be read: {reason.rstrip('.')}. Is its name right, and the hub reachable? "
            "Another configuration or split is hub:owner/name:config:split. A downloaded JSONL or Parquet file works, "
            "too."
        ) from error


def _datasets() -> Any:
    without = "Without it, give a text file, JSONL or Parquet, or sampled:N."
    require("datasets", extra="interpret", what="A dataset of the hub", instead=without)
    import datasets

    return datasets


_READERS: dict[str, Callable[[str], Iterator[tuple[str, str]]]] = {
    "text": _read_text,
    "parquet": _read_parquet,
    "hub": _read_hub,
}
