"""GGUF files: read once, tensor by tensor, into a Hugging Face folder with float32 weights in the cache.

Names, layouts and tokenizers are translated by transformers' own tables. What is done here instead is the loop: one
tensor in memory at a time, written to its place in a safetensors file, where transformers would hold the whole model
several times. The folder is named by the content of the GGUF file, so a copy under another name is not read again.

transformers' reader leaves out some of what such a file says of its tokenizer, which is read here. The start token is
part of a model's input: Gemma without ``<bos>`` answers something else. A GGUF file says whether one comes first
(``tokenizer.ggml.add_bos_token``); files that do not say it follow llama.cpp, by the kind of the tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import struct
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from tokenizers import processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from headtrace.errors import HeadtraceError, InputError, OutOfMemoryError
from headtrace.models.architectures import find_architecture
from headtrace.models.checkpoint import WEIGHTS, missing_weights, unexpected_weights
from headtrace.models.devices import available_bytes, dtype_name
from headtrace.tables import human
from headtrace.writing import cache_folder, file_sha256, write_text

CONVERSION = 3
"""Conversions of an earlier number are not read: 1 did not look for missing weights, 2 left start tokens out."""
GGUF_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
GGUF_STRING, GGUF_ARRAY = 8, 9
GGUF_COMPUTED = ("rope_freqs.weight",)
"""Tensors of GGUF files that models compute themselves."""
AT_ONCE = 1 << 24
"""How many numbers are dequantised at once: temporary arrays are several times as large."""
SETTLED = 2.0
"""Seconds after which a file that is changed again has another time of change, whatever the clock of its disk."""


@dataclass(frozen=True)
class Stored:
    """How a GGUF file holds a tensor."""

    shape: tuple[int, ...]
    kind: int
    """The number of a quantisation, or of a float type."""
    place: int
    """Bytes after the beginning of the data."""


class GGUFHeader:
    """Metadata (without lists) and tensors of a GGUF file. Never reads more than there is, however damaged it is."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.size = file, size
        self.facts: dict[str, Any] = {}
        self.tensors: dict[str, Stored] = {}
        if self._take(4) != b"GGUF":
            raise ValueError("it does not begin like a GGUF file")
        version = self._number("I")
        if version not in (2, 3):
            raise ValueError(f"it has the version {version}: expected 2 or 3, little-endian")
        n_tensors, n_facts = self._number("Q"), self._number("Q")
        for _ in range(n_facts):
            key = self._text()
            self.facts[key] = self._value(self._number("I"))
        for _ in range(n_tensors):
            name, n_axes = self._text(), self._number("I")
            if n_axes > 8:
                raise ValueError(f"its tensor {name!r} has {n_axes} axes")
            shape = tuple(self._number("Q") for _ in range(n_axes))[
                ::-1
            ]  # the fastest axis comes first there
            self.tensors[name] = Stored(shape, self._number("I"), self._number("Q"))
        alignment = self.facts.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"it says general.alignment = {alignment}")
        self.begin = -(-self.file.tell() // alignment) * alignment

    def _take(self, count: int) -> bytes:
        if count > self.size - self.file.tell():
            raise ValueError(f"it ends after {self.size} bytes, in the middle of its header")
        return self.file.read(count)

    def _number(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _text(self) -> str:
        return self._take(self._number("Q")).decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == GGUF_STRING:
            return self._text()
        if kind in GGUF_NUMBERS:
            return self._number(GGUF_NUMBERS[kind])
        if kind != GGUF_ARRAY:
            raise ValueError(f"it has a value of an unknown type {kind}")
        inner, count = self._number("I"), self._number("Q")  # lists are vocabularies: nothing here needs them
        if inner in GGUF_NUMBERS:
            self._take(count * struct.calcsize("<" + GGUF_NUMBERS[inner]))
        elif inner == GGUF_STRING:
            for _ in range(count):  # ends with the file: a string takes eight bytes at least
                self._take(self._number("Q"))
        else:
            raise ValueError(f"it has a list of an unknown type {inner}")
        return None

    def check(self, file_size: int) -> int:
        """Compare what the metadata says with the shapes, and these with the file; numbers in all tensors."""
        widest = max((max(each.shape, default=0) for each in self.tensors.values()), default=0)
        limits = {
            ".block_count": len(self.tensors),
            ".embedding_length": widest,
            ".feed_forward_length": widest,
        }
        for key, value in self.facts.items():
            for ending, most in limits.items():
                if key.endswith(ending) and isinstance(value, int) and value > most:
                    raise ValueError(f"it says {key} = {value}, and its tensors allow {most} at most")
        needed = sum(math.prod(each.shape) for each in self.tensors.values())
        if needed > 8 * file_size:  # no type takes less than a bit per number
            raise ValueError(f"its tensors would take {human(4 * needed)}, far more than the file holds")
        return needed


def converted(path: Path, *, anew: bool = False, dtype: torch.dtype | None = None) -> Path:
    """A GGUF file as a Hugging Face folder with float32 weights, converted once and kept in the cache.

    With ``dtype`` the model has to fit into memory in that type, or nothing is read. With ``anew`` the file is
    converted even if the folder exists.
    """
    partial: Path | None = None
    try:
        folder = cache_folder("gguf") / f"{_content_sha256(path)}-{CONVERSION}"
        if anew:
            shutil.rmtree(folder, ignore_errors=True)
        if (folder / "config.json").exists():
            return folder
        with path.open("rb") as file:
            size = path.stat().st_size
            header = GGUFHeader(file, size)
        _require_room(path, header.check(size), folder.parent, dtype)
        from rich.console import Console

        partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
        if Console(stderr=True).is_jupyter:  # a status there would need another package, and warn of it
            print(f"Reading {path.name} once (later loads take seconds)", file=sys.stderr)  # noqa: T201
        with Console(stderr=True, force_jupyter=False).status(f"Reading {path.name} once") as status:

            def tell(done: int, of: int) -> None:
                status.update(f"Reading {path.name} once: {done} of {of} tensors (later loads take seconds)")

            _convert(path, header, partial, tell)
        with suppress(OSError):  # another process was faster
            partial.rename(folder)
        return folder
    except HeadtraceError:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise InputError(
            f"The GGUF file {path.name!r} cannot be read: {reason}. It is damaged, cut short or of a kind that "
            "transformers cannot read: fetch it again, or give the model in Hugging Face format."
        ) from error
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def _content_sha256(path: Path) -> str:
    """The SHA-256 of a file, remembered as long as its size and its time of change stay.

    A large file takes as long to hash as to load. One that was changed just now may change again within the same tick
    of the clock, so nothing is remembered of it.
    """
    found = path.stat()
    identity = json.dumps([os.path.realpath(path), found.st_size, found.st_mtime_ns, found.st_ino])
    memory = cache_folder("gguf-hashes") / hashlib.sha256(identity.encode()).hexdigest()
    with suppress(OSError, UnicodeDecodeError):
        known = memory.read_text(encoding="ascii")
        if len(known) == 64:
            return known
    digest = file_sha256(path)
    if time.time() - found.st_mtime > SETTLED and path.stat().st_mtime_ns == found.st_mtime_ns:
        with suppress(InputError):
            write_text(memory, digest)
    return digest


def _require_room(path: Path, numbers: int, folder: Path, dtype: torch.dtype | None) -> None:
    bits = 0 if dtype is None else torch.finfo(dtype).bits
    if dtype is not None and numbers * bits // 8 > available_bytes():
        raise OutOfMemoryError(
            f"The model in {path.name!r} needs about {human(numbers * bits / 8)} in {dtype_name(dtype)}, and "
            f"{human(available_bytes())} is available. Use a machine with more memory, a smaller model or "
            "dtype='bfloat16'."
        )
    free = shutil.disk_usage(folder).free
    if 4 * numbers > free:
        raise InputError(
            f"{path.name!r} takes {human(4 * numbers)} of disk when it is read, and {human(free)} is free in "
            f"{str(folder)!r}. Make room there, or set HEADTRACE_CACHE to a folder on a larger disk."
        )


def _convert(path: Path, header: GGUFHeader, folder: Path, tell: Callable[[int, int], None]) -> None:
    options: dict[str, Any] = {"gguf_file": path.name, "trust_remote_code": False, "local_files_only": True}
    config: Any = AutoConfig.from_pretrained(str(path.parent), **options)
    find_architecture(config)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Tied weights are one parameter here, and are saved once.
    shapes = {name: tuple(parameter.shape) for name, parameter in empty.named_parameters()}
    folder.mkdir(parents=True)
    with _SafetensorsFile(folder / WEIGHTS, shapes) as out:
        for name, values in _hf_tensors(path, header, empty, tell):
            if name in shapes:
                out.write(name, values)
        absent = shapes.keys() - out.written
    if absent:
        raise missing_weights(path.name, absent)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # the weights are plain floats now
    config.architectures = [type(empty).__name__]
    config.dtype = torch.float32
    if "tokenizer.ggml.model" in header.facts:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(path.parent), **options)
        follow_file(tokenizer, header.facts)
        tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)


def _hf_tensors(
    path: Path, header: GGUFHeader, empty: torch.nn.Module, tell: Callable[[int, int], None]
) -> Generator[tuple[str, np.ndarray]]:
    """The file's tensors one by one, under the names and in the layout that transformers has for them."""
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    config: Any = empty.config
    kind: Any = TENSOR_PROCESSORS.get(str(header.facts.get("general.architecture")), TensorProcessor)
    processor = kind(config=config.to_dict())
    names: Mapping[str, str] = get_gguf_hf_weights_map(empty, processor)
    gathered: dict[str, Any] = {"tensors": {}, "config": processor.config}
    """Experts, which GGUF files keep apart by projection, are put together here."""
    extra = list[str]()
    data = np.memmap(path, dtype=np.uint8, mode="r")
    for done, (name, stored) in enumerate(header.tensors.items()):
        tell(done, len(header.tensors))
        values = _dequantised(data, header.begin, name, stored)
        result = processor.process(
            weights=values, name=name, tensor_key_mapping=names, parsed_parameters=gathered
        )
        if result.name is None:
            continue
        if result.name in names:
            yield names[result.name], result.weights
        elif not result.name.endswith(GGUF_COMPUTED):
            extra.append(result.name)
    if extra:
        raise unexpected_weights(path.name, extra)
    yield from ((name, tensor.numpy()) for name, tensor in gathered["tensors"].items())


def _dequantised(data: np.ndarray, begin: int, name: str, stored: Stored) -> np.ndarray:
    """One tensor in float32; blocks of a quantisation lie along the last axis, so rows are independent."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quant_shape_to_byte_shape

    kind = GGMLQuantizationType(stored.kind)
    shape = stored.shape or (1,)
    widths = quant_shape_to_byte_shape(shape, kind)
    size = math.prod(widths)
    start = begin + stored.place
    if start + size > len(data):
        raise ValueError(f"it ends in the middle of its tensor {name!r}")
    rows = data[start : start + size].reshape(-1, widths[-1])
    values = np.empty((len(rows), shape[-1]), dtype=np.float32)
    step = max(1, AT_ONCE // max(1, shape[-1]))
    for first in range(0, len(rows), step):
        # A copy: what is mapped from the file need not lie where a float may begin.
        values[first : first + step] = dequantize(np.array(rows[first : first + step]), kind)
    with np.errstate(invalid="ignore", over="ignore"):
        total = values.sum(dtype=np.float64)
    if not np.isfinite(total):  # much quicker than to look at each
        wrong = int((~np.isfinite(values)).sum())
        if wrong:
            raise ValueError(
                f"its tensor {name!r} is not finite: {wrong} of {values.size} numbers are NaN or infinite"
            )
    return values.reshape(shape)


class _SafetensorsFile:
    """A safetensors file of known shapes, float32, whose tensors are written one at a time, in any order."""

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes, self.written, self.starts = shapes, set[str](), dict[str, int]()
        content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape in shapes.items():
            start, end = end, end + 4 * math.prod(shape)
            self.starts[name] = start
            content[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(content).encode()
        text += b" " * (-len(text) % 8)
        self.file = path.open("wb")
        self.file.write(struct.pack("<Q", len(text)) + text)
        self.begin = self.file.tell()
        self.file.truncate(self.begin + end)

    def write(self, name: str, values: np.ndarray) -> None:
        if tuple(values.shape) != self.shapes[name]:
            raise ValueError(
                f"its {name!r} has the shape {tuple(values.shape)}, and its metadata asks for {self.shapes[name]}"
            )
        self.file.seek(self.begin + self.starts[name])
        self.file.write(np.ascontiguousarray(values, dtype=np.float32).data.cast("B"))
        self.written.add(name)

    def __enter__(self) -> _SafetensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


STARTS_BY_KIND = {"llama": True, "gpt2": False, "bert": True, "t5": False}
"""``tokenizer.ggml.model`` -> whether llama.cpp puts a start token in front where the file does not say."""
WHOLE_WORDS = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken",
)  # fmt: skip
"""``tokenizer.ggml.pre`` of byte-level tokenizers that start with a token by default, and that take a word which is in
their vocabulary whole, whatever their merges make of it."""


def follow_file(tokenizer: Any, facts: Mapping[str, Any]) -> None:
    """Set up a tokenizer that transformers made of a GGUF file: its start and end tokens, and words taken whole.

    Tokens at the end are set as the file has them; headtrace leaves off what a tokenizer puts behind a prompt.
    """
    backend = tokenizer.backend_tokenizer
    kind, pre = facts.get("tokenizer.ggml.model"), facts.get("tokenizer.ggml.pre")
    if kind == "gpt2" and pre in WHOLE_WORDS:
        backend.model.ignore_merges = True
    start = _said(facts, "add_bos_token", STARTS_BY_KIND.get(str(kind), False) or pre in WHOLE_WORDS)
    end = _said(facts, "add_eos_token", kind == "t5")
    before = (
        _token(tokenizer, facts.get("tokenizer.ggml.bos_token_id", tokenizer.bos_token_id)) if start else None
    )
    behind = (
        _token(tokenizer, facts.get("tokenizer.ggml.eos_token_id", tokenizer.eos_token_id)) if end else None
    )
    used = [each for each in (before, behind) if each is not None]
    pieces = [*([before[0]] if before else []), "$A", *([behind[0]] if behind else [])]
    template = processors.TemplateProcessing(single=pieces, pair=[*pieces, "$B"], special_tokens=used)
    byte_level = kind == "gpt2"
    # Offsets of byte-level tokens include the space before a word unless they are trimmed, as GPT-2's are.
    backend.post_processor = (
        processors.Sequence([processors.ByteLevel(trim_offsets=False), template]) if byte_level else template
    )
    # transformers writes these into tokenizer_config.json and makes its own template from them when it reads it.
    tokenizer._add_bos_token, tokenizer._add_eos_token = before is not None, behind is not None
    if before is not None:
        tokenizer.bos_token = before[0]


def _said(facts: Mapping[str, Any], key: str, default: bool) -> bool:
    found = facts.get(f"tokenizer.ggml.{key}")
    return default if not isinstance(found, bool) else found


def _token(tokenizer: Any, number: int | None) -> tuple[str, int] | None:
    """A token as a template names it."""
    if number is None or not 0 <= number < len(tokenizer):
        return None
    return str(tokenizer.convert_ids_to_tokens(number)), int(number)
