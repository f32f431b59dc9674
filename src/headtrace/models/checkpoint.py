"""A folder in Hugging Face format, looked over before any weight is read: its config, and the headers of its files.

Weights come from safetensors files only: headers state every tensor's name, type and shape, so that what a config
promises can be held against them without touching memory. Pickled weights can run code and are never opened.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_model
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer

from headtrace.cache import cache_folder
from headtrace.errors import HeadtraceError, InputError, OutOfMemoryError, UnsupportedModelError
from headtrace.models.architectures import HOW_TO_ADD, find_architecture
from headtrace.models.checks import check_parameters
from headtrace.models.devices import available_bytes
from headtrace.tables import human

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.pkl")
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
MOST_LABELS = 1_000_000
MOST_TENSORS = 100_000
"""More than any model has: what a config may promise before the files that hold them are there."""
FLOATS = ("F64", "F32", "F16", "BF16")
RECOMPUTED: dict[str, Callable[[tuple[int, ...]], bool]] = {
    r"(^|\.)rotary_emb\.inv_freq$": lambda shape: len(shape) == 1,
    r"(^|\.)\w*att(entio)?n\.masked_bias$": lambda shape: shape in ((), (1,)),
    r"(^|\.)\w*att(entio)?n\.bias$": lambda shape: len(shape) == 4 and shape[:2] == (1, 1),
    r"(^|\.)position_ids$": lambda shape: len(shape) <= 2,
}
"""Buffers that old checkpoints carry and that models make anew: rotary frequencies, causal masks, positions."""


@dataclass(frozen=True)
class Header:
    """What a safetensors file says about one tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Checkpoint:
    """A folder with a config and safetensors files that agree with each other in size."""

    folder: Path
    config: Any
    headers: Mapping[str, Header]

    def recomputed(self, key: str) -> bool:
        """Whether a tensor that the model has no place for is a buffer that it makes itself."""
        shapes = [
            header.shape for name, header in self.headers.items() if name.endswith(key) or key.endswith(name)
        ]
        return any(re.search(pattern, key) and any(map(fits, shapes)) for pattern, fits in RECOMPUTED.items())


def open_checkpoint(folder: Path, dtype: torch.dtype, *, in_memory: bool = True) -> Checkpoint:
    """Look a folder over: InputError with the reason if it cannot be, or is not, the model that its config says.

    A model that goes as a whole into this machine's memory (``in_memory``) must fit there.
    """
    _read_facts(folder)
    headers = read_headers(folder)
    config = read_config(folder, len(headers))
    needed = _check_sizes(folder, config, headers) * torch.finfo(dtype).bits // 8
    if in_memory and needed > available_bytes():
        raise OutOfMemoryError(
            f"The model in {str(folder)!r} needs about {human(needed)} in {str(dtype).removeprefix('torch.')}, and "
            f"{human(available_bytes())} is available. Use a machine with more memory, a smaller model, or "
            "device_map='auto' to leave some of its weights on disk."
        )
    return Checkpoint(folder, config, headers)


def read_config(folder: Path, n_tensors: int = MOST_TENSORS) -> Any:
    """The folder's config, of an architecture that is supported; no weights need to be there."""
    facts = _read_facts(folder)
    _check_layers(folder, facts, n_tensors)
    _check_code(folder, facts)
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise _bad_config(folder, error) from error
    find_architecture(config)
    return config


def _check_code(folder: Path, facts: Mapping[str, Any]) -> None:
    """A model that exists only as code in its repository; where transformers has its own, that one is used."""
    if facts.get("auto_map") and facts.get("model_type") not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"The model in {str(folder)!r} ({facts.get('model_type')!r}) runs only with code of its own repository "
            "(auto_map in config.json), and headtrace never runs code that comes with a model. Choose a model whose "
            f"architecture transformers has itself: `headtrace models` lists those that headtrace knows, and "
            f"{HOW_TO_ADD} explains how to add one."
        )


SAVED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


def saved_dtype(folder: Path) -> torch.dtype:
    """What most of a folder's weights are saved in; float32 for anything that a model does not run in."""
    sizes: dict[torch.dtype, int] = {}
    for header in read_headers(folder).values():
        dtype = SAVED.get(header.dtype, torch.float32)
        sizes[dtype] = sizes.get(dtype, 0) + header.size
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)


def _read_facts(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.exists():
        gguf = sorted(file.name for file in folder.glob("*.gguf"))
        hint = f" It holds the GGUF file {gguf[0]!r}: give that file." if gguf else ""
        raise InputError(
            f"The folder {str(folder)!r} has no config.json: expected a model in Hugging Face format.{hint}"
        )
    facts = read_json(path)
    if (folder / "adapter_config.json").exists():
        raise InputError(
            f"The folder {str(folder)!r} holds an adapter (adapter_config.json), not a whole model. Merge it into its "
            "base model first (merge_and_unload() in peft) and save that."
        )
    if facts.get("transformers_weights") is not None:
        raise InputError(
            f"{str(path)!r} names a weights file of its own (transformers_weights), which headtrace does not follow. "
            f"Save the model again with save_pretrained, which writes {WEIGHTS}."
        )
    return facts


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object; anything else is an InputError that names the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{str(path)!r} cannot be read: {error}. Is the file damaged?") from error
    if not isinstance(found, dict):
        raise InputError(
            f"{str(path)!r}: expected a JSON object, got {type(found).__name__}. Is the file damaged?"
        )
    return found  # type: ignore[return-value]


def _bad_config(folder: Path, error: Exception) -> InputError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return InputError(f"{str(folder / 'config.json')!r} does not describe a model: {reason[:500]}")


# -- weights files -------------------------------------------------------------------------------------------


def read_headers(folder: Path) -> dict[str, Header]:
    """Name, type and shape of every tensor in the folder's safetensors files; no tensor is read."""
    headers: dict[str, Header] = {}
    for name in weight_files(folder):
        found = _file_header(folder / name)
        twice = sorted(headers.keys() & found.keys())
        if twice:
            raise InputError(
                f"The tensor {twice[0]!r} is in two weights files of {str(folder)!r}. Keep one of them."
            )
        headers |= found
    return headers


def weight_files(folder: Path) -> list[str]:
    """The safetensors files that make up the model, or an InputError that says what is there instead."""
    if (folder / WEIGHTS).exists():
        return [WEIGHTS]
    if not (folder / INDEX).exists():
        pickled = sorted(file.name for pattern in PICKLED for file in folder.glob(pattern))
        if pickled:
            raise pickled_weights(str(folder), pickled[0])
        raise InputError(f"The folder {str(folder)!r} has no weights: expected {WEIGHTS} or {INDEX}.")
    files = sorted(set(indexed_files(folder / INDEX).values()))
    absent = [name for name in files if not (folder / name).is_file()]
    if absent:
        raise InputError(f"{INDEX} of {str(folder)!r} names {', '.join(absent)}, which is not there.")
    return files


def indexed_files(index: Path) -> dict[str, str]:
    """Which file each tensor of a sharded model is in."""
    found = read_json(index).get("weight_map")
    files: list[Any] = list(found.values()) if isinstance(found, dict) else []
    if not files or any(not isinstance(name, str) for name in files):
        raise InputError(f"{str(index)!r} has no weight_map from tensors to files. Is the file damaged?")
    for name in files:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise InputError(
                f"{str(index)!r} names the weights file {name!r}: expected a .safetensors file beside it."
            )
    return found  # type: ignore[return-value]


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's content, which is also what the hub knows a large file by."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 22), b""):
            digest.update(block)
    return digest.hexdigest()


def pickled_weights(where: str, file: str, revision: str | None = None) -> InputError:
    """Why pickles are refused, and how to turn them into safetensors."""
    which = repr(where) if revision is None else f"{where!r}, revision={revision!r}"
    return InputError(
        f"{where!r} has pickled weights only ({file}). A pickle can run any code when it is opened, so headtrace reads "
        "safetensors only. If you trust where the file comes from, convert it once:\n"
        "    from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"    AutoModelForCausalLM.from_pretrained({which}, use_safetensors=False).save_pretrained('converted')\n"
        f"    AutoTokenizer.from_pretrained({which}).save_pretrained('converted')\n"
        "and load 'converted'."
    )


def _file_header(path: Path) -> dict[str, Header]:
    try:
        with safe_open(path, "pt") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
            return {key: Header(s.get_dtype(), tuple(s.get_shape())) for key, s in slices.items()}
    except (OSError, SafetensorError, ValueError) as error:
        raise InputError(
            f"The weights file {str(path)!r} cannot be read: {error}. It is damaged or cut short: fetch or "
            "save it again."
        ) from error


# -- sizes ---------------------------------------------------------------------------------------------------


def _check_layers(folder: Path, facts: Mapping[str, Any], n_tensors: int) -> None:
    """Before transformers makes lists of that length: every layer has at least one tensor."""
    labels = facts.get("num_labels")
    if isinstance(labels, (int, float)) and labels > MOST_LABELS:
        raise InputError(f"config.json of {str(folder)!r} says num_labels = {labels}. Is the file damaged?")
    for key in LAYER_COUNTS:
        value = facts.get(key)
        if isinstance(value, (int, float)) and value > n_tensors:
            raise InputError(
                f"config.json of {str(folder)!r} says {key} = {value}, but the weights files hold {n_tensors} tensors "
                "in all. The config does not belong to these weights."
            )


def _check_sizes(folder: Path, config: Any, headers: Mapping[str, Header]) -> int:
    """Hold a model of shapes only, made from the config, against the headers; how many numbers it has."""
    try:
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        # Tied weights are one tensor here as in the file; buffers that are not saved take memory all the same.
        expected = {name: tuple(tensor.shape) for name, tensor in empty.named_parameters()}
        buffers = sum(tensor.numel() for tensor in empty.buffers())
    except Exception as error:
        raise _bad_config(folder, error) from error
    short = names_of(headers, getattr(empty, "base_model_prefix", ""))
    _compare(folder, expected, {name: headers[key] for name, key in short.items()})
    wanted, held = sum(map(math.prod, expected.values())), sum(header.size for header in headers.values())
    if wanted > held:
        absent = sorted(expected.keys() - short.keys()) or ["(renamed weights)"]
        raise missing_weights(str(folder), absent)
    return wanted + buffers


def names_of(headers: Iterable[str], prefix: str) -> dict[str, str]:
    """A file's tensors by the names that the model may use for them: with and without the base model's prefix."""
    names: dict[str, str] = {}
    for key in headers:
        names.setdefault(key.removeprefix(f"{prefix}."), key)
        names.setdefault(f"{prefix}.{key}", key)
    return names | {key: key for key in headers}


def _compare(folder: Path, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, Header]) -> None:
    """Weights that both sides know have the same shape, and are floating-point numbers."""
    for name in sorted(expected.keys() & found.keys()):
        header = found[name]
        if header.shape != expected[name]:
            raise InputError(
                f"config.json of {str(folder)!r} and its weights disagree: {name!r} should have the shape "
                f"{expected[name]}, and has {header.shape} in the file. The config does not belong to these weights."
            )
        if header.dtype not in FLOATS:
            raise InputError(
                f"The weight {name!r} in {str(folder)!r} is stored as {header.dtype}: expected floating-point numbers "
                f"({', '.join(FLOATS)}). Is the model quantised? Save it in float32, float16 or bfloat16."
            )


def missing_weights(where: str, absent: Iterable[str]) -> InputError:
    """Weights that the model has and its files do not: transformers would make them up at random."""
    return InputError(
        f"The model in {where!r} is not whole: its files have no {_listed(absent)}. With random numbers in their "
        "place nothing would mean anything. Fetch or save the model again, or correct its config.json."
    )


def unexpected_weights(where: str, extra: Iterable[str]) -> InputError:
    return InputError(
        f"The files of the model in {where!r} hold {_listed(extra)}, which a model with its config.json has no place "
        "for. The config does not belong to these weights: correct it, or save the model again."
    )


def _listed(names: Iterable[str], most: int = 5) -> str:
    found = sorted(names)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(map(repr, found[:most])) + more


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


def _check_gguf_sizes(path: Path, header: GGUFHeader) -> None:
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
    _check_gguf_sizes(path, header)
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
