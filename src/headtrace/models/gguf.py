"""GGUF files: looked over, then converted once into a Hugging Face folder with float32 weights.

Parsing a GGUF file takes transformers some twenty seconds even for a small model; the folder loads in one.
"""

from __future__ import annotations

import math
import os
import shutil
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import save_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from headtrace.cache import cache_folder
from headtrace.errors import HeadtraceError, InputError, OutOfMemoryError
from headtrace.models.checkpoint import file_sha256, missing_weights, unexpected_weights
from headtrace.models.memory import available_bytes, human
from headtrace.models.sound import check_parameters

CONVERSION = 2
"""Conversions of an earlier number are not read: the first ones did not look for weights that are missing."""

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
COUNTED_BY_TENSORS = (".block_count",)
BOUNDED_BY_SHAPES = (".embedding_length", ".feed_forward_length")
COMPUTED = ("rope_freqs.weight",)
"""Tensors of GGUF files that models compute themselves."""


@dataclass
class GGUFHeader:
    """What stands before the tensors of a GGUF file."""

    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])


class _Bytes:
    """Reads numbers and strings from a file, and never more than the file has."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.size = file, size

    def take(self, count: int) -> bytes:
        if count > self.size - self.file.tell():
            raise ValueError(f"it ends after {self.size} bytes, in the middle of its header")
        return self.file.read(count)

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            inner, count = self.number("I"), self.number("Q")
            if inner in SCALARS:
                self.take(count * struct.calcsize("<" + SCALARS[inner]))
            elif inner == STRING:
                for _ in range(count):  # ends with the file: a string takes eight bytes at least
                    self.take(self.number("Q"))
            else:
                raise ValueError(f"it has a list of an unknown type {inner}")
            return None  # lists are vocabularies: nothing here needs them
        if kind not in SCALARS:
            raise ValueError(f"it has a value of an unknown type {kind}")
        return self.number(SCALARS[kind])


def read_header(path: Path) -> GGUFHeader:
    """Metadata (without lists) and shapes of a GGUF file; InputError if it is damaged or cut short."""
    header = GGUFHeader()
    try:
        with path.open("rb") as file:
            read = _Bytes(file, path.stat().st_size)
            if read.take(4) != b"GGUF":
                raise ValueError("it does not begin like a GGUF file")
            version = read.number("I")
            if version not in (2, 3):
                raise ValueError(f"it has the version {version}: expected 2 or 3, little-endian")
            n_tensors, n_facts = read.number("Q"), read.number("Q")
            for _ in range(n_facts):
                key = read.text()
                header.facts[key] = read.value(read.number("I"))
            for _ in range(n_tensors):
                name, n_axes = read.text(), read.number("I")
                if n_axes > 8:
                    raise ValueError(f"its tensor {name!r} has {n_axes} axes")
                header.shapes[name] = tuple(read.number("Q") for _ in range(n_axes))
                read.take(12)  # type and place
    except (OSError, ValueError, struct.error) as error:
        raise _unreadable(path, str(error)) from error
    return header


def _unreadable(path: Path, reason: str) -> InputError:
    return InputError(
        f"The GGUF file {path.name!r} cannot be read: {reason.rstrip('.')}. It is damaged, cut short or of a kind that "
        "transformers cannot read: fetch it again, or give the model in Hugging Face format."
    )


def _check_sizes(path: Path, header: GGUFHeader) -> None:
    """What the metadata promises against the shapes, and the shapes against memory, before a tensor is read."""
    widest = max((max(shape, default=0) for shape in header.shapes.values()), default=0)
    limits = {
        **dict.fromkeys(COUNTED_BY_TENSORS, len(header.shapes)),
        **dict.fromkeys(BOUNDED_BY_SHAPES, widest),
    }
    for key, value in header.facts.items():
        for ending, most in limits.items():
            if key.endswith(ending) and isinstance(value, int) and value > most:
                raise _unreadable(path, f"it says {key} = {value}, and its tensors allow {most} at most")
    needed = 4 * sum(math.prod(shape) for shape in header.shapes.values())
    if needed > 8 * 4 * path.stat().st_size:  # no type takes less than a bit per number
        raise _unreadable(path, f"its tensors would take {human(needed)}, far more than the file holds")
    if needed > available_bytes():
        raise OutOfMemoryError(
            f"The model in {path.name!r} needs about {human(needed)} in float32, and {human(available_bytes())} is "
            "available. Use a machine with more memory, or a smaller model."
        )


def converted(path: Path, *, anew: bool = False) -> Path:
    """A GGUF file as a Hugging Face folder, converted once and kept in the cache (``anew``: even if it is there)."""
    folder = cache_folder("gguf") / f"{_digest(path)}-{CONVERSION}"
    if anew:
        shutil.rmtree(folder, ignore_errors=True)
    if (folder / "config.json").exists():
        return folder
    header = read_header(path)
    _check_sizes(path, header)
    from rich.console import Console

    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    with Console(stderr=True).status(f"Reading {path.name} (once; later loads take a second)"):
        try:
            _convert(path, partial, has_tokenizer="tokenizer.ggml.model" in header.facts)
        except HeadtraceError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        except Exception as error:
            shutil.rmtree(partial, ignore_errors=True)
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise _unreadable(path, reason) from error
    try:
        partial.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _digest(path: Path) -> str:
    try:
        return file_sha256(path)
    except OSError as error:
        raise _unreadable(path, str(error)) from error


def _convert(path: Path, folder: Path, *, has_tokenizer: bool) -> None:
    options: dict[str, Any] = {"gguf_file": path.name, "trust_remote_code": False, "local_files_only": True}
    found: Any = AutoModelForCausalLM.from_pretrained(
        str(path.parent), dtype=torch.float32, output_loading_info=True, **options
    )
    hf, info = found
    if info["missing_keys"]:
        raise missing_weights(path.name, info["missing_keys"])
    extra = [key for key in info["unexpected_keys"] if not key.endswith(COMPUTED)]
    if extra:
        raise unexpected_weights(path.name, extra)
    check_parameters(hf)
    config: Any = hf.config
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # the weights are plain floats now
    config.save_pretrained(folder)
    save_model(hf, str(folder / "model.safetensors"), metadata={"format": "pt"})
    if has_tokenizer:
        AutoTokenizer.from_pretrained(str(path.parent), **options).save_pretrained(folder)
