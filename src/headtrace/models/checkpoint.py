"""A folder in Hugging Face format, looked over before any weight is read: its config, and the headers of its files.

Weights come from safetensors files only: headers state every tensor's name, type and shape, so that what a config
promises can be held against them without touching memory. Pickled weights can run code and are never opened.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from headtrace.errors import InputError, OutOfMemoryError, UnsupportedModelError
from headtrace.models.architectures import ARCHITECTURES, HOW_TO_ADD, find_architecture
from headtrace.models.devices import available_bytes, dtype_name
from headtrace.tables import human

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.pkl")
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
MOST_LABELS = 1_000_000
MOST_TENSORS = 100_000
"""More than any model has: what a config may promise before the files that hold them are there."""
SAVED = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
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
    """Check a folder without reading weights; InputError says why it is not the model that its config describes.

    A model that goes into this machine's memory as a whole (``in_memory``) must fit there.
    """
    _config_json(folder)
    headers = read_headers(folder)
    config = read_config(folder, len(headers))
    needed = _check_sizes(folder, config, headers) * torch.finfo(dtype).bits // 8
    if in_memory and needed > available_bytes():
        raise OutOfMemoryError(
            f"The model in {str(folder)!r} needs about {human(needed)} in {dtype_name(dtype)}, and "
            f"{human(available_bytes())} is available. Use a machine with more memory, a smaller model, or "
            "device_map='auto' to leave some of its weights on disk."
        )
    return Checkpoint(folder, config, headers)


def read_config(folder: Path, n_tensors: int = MOST_TENSORS) -> Any:
    """The folder's config, of an architecture that is supported; no weights need to be there."""
    facts = _config_json(folder)
    # Before transformers makes lists of that length: every layer has at least one tensor.
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
    # Installed packages make their architectures known when they are imported, their classes to transformers as well.
    known = str(facts.get("model_type")) in ARCHITECTURES
    # A model that exists only as code in its repository; where transformers has its own, that one is used.
    if facts.get("auto_map") and facts.get("model_type") not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"The model in {str(folder)!r} ({facts.get('model_type')!r}) runs only with code of its own repository "
            "(auto_map in config.json), and headtrace never runs code that comes with a model. Choose a model whose "
            f"architecture transformers has itself: `headtrace models` lists those that headtrace knows, and "
            f"{HOW_TO_ADD} explains how to add one."
        )
    if known and facts["model_type"] not in CONFIG_MAPPING:
        raise _unregistered(facts["model_type"], "AutoConfig.register({0!r}, YourConfig)")
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise _bad_config(folder, error) from error
    find_architecture(config)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        call = f"AutoModelForCausalLM.register({type(config).__name__}, YourForCausalLM)"
        raise _unregistered(config.model_type, call)
    return config


def _unregistered(model_type: str, call: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"headtrace knows the facts of {model_type!r}, but transformers has no class for it. Tell transformers, too, "
        f"in the module of the Architecture: {call.format(model_type)}."
    )


def saved_dtype(folder: Path) -> torch.dtype:
    """What most of a folder's weights are saved in; float32 for anything that a model does not run in."""
    sizes: dict[torch.dtype, int] = {}
    for header in read_headers(folder).values():
        dtype = SAVED.get(header.dtype, torch.float32)
        sizes[dtype] = sizes.get(dtype, 0) + header.size
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)


def _config_json(folder: Path) -> dict[str, Any]:
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
    return found


def _bad_config(folder: Path, error: Exception) -> InputError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return InputError(f"{str(folder / 'config.json')!r} does not describe a model: {reason[:500]}")


# -- weights files -------------------------------------------------------------------------------------------


def read_headers(folder: Path) -> dict[str, Header]:
    """Name, type and shape of every tensor in the folder's safetensors files; no tensor is read."""
    headers: dict[str, Header] = {}
    for name in weight_files(folder):
        path = folder / name
        try:
            with safe_open(path, "pt") as file:
                slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
                found = {key: Header(s.get_dtype(), tuple(s.get_shape())) for key, s in slices.items()}
        except (OSError, SafetensorError, ValueError) as error:
            raise InputError(
                f"The weights file {str(path)!r} cannot be read: {error}. It is damaged or cut short: fetch or save it "
                "again."
            ) from error
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
    files = indexed_files(folder / INDEX)
    absent = [name for name in files if not (folder / name).is_file()]
    if absent:
        raise InputError(f"{INDEX} of {str(folder)!r} names {', '.join(absent)}, which is not there.")
    return files


def indexed_files(index: Path) -> list[str]:
    """The files of a sharded model."""
    found = read_json(index).get("weight_map")
    files: list[Any] = list(found.values()) if isinstance(found, dict) else []
    if not files or any(not isinstance(name, str) for name in files):
        raise InputError(f"{str(index)!r} has no weight_map from tensors to files. Is the file damaged?")
    for name in files:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise InputError(
                f"{str(index)!r} names the weights file {name!r}: expected a .safetensors file beside it."
            )
    return sorted(set(files))


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


def _check_sizes(folder: Path, config: Any, headers: Mapping[str, Header]) -> int:
    """Compare a model of shapes only, made from the config, with the headers; how many numbers it has."""
    try:
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        # Tied weights are one tensor here as in the file; buffers that are not saved take memory all the same.
        expected = {name: tuple(tensor.shape) for name, tensor in empty.named_parameters()}
        buffers = sum(tensor.numel() for tensor in empty.buffers())
    except Exception as error:
        raise _bad_config(folder, error) from error
    # A file may name tensors with or without the base model's prefix.
    found, prefix = dict[str, Header](), getattr(empty, "base_model_prefix", "")
    for key, header in headers.items():
        found.setdefault(key.removeprefix(f"{prefix}."), header)
        found.setdefault(f"{prefix}.{key}", header)
    found |= headers
    for name in sorted(expected.keys() & found.keys()):
        header = found[name]
        if header.shape != expected[name]:
            raise InputError(
                f"config.json of {str(folder)!r} and its weights disagree: {name!r} should have the shape "
                f"{expected[name]}, and has {header.shape} in the file. The config does not belong to these weights."
            )
        if header.dtype not in SAVED:
            raise InputError(
                f"The weight {name!r} in {str(folder)!r} is stored as {header.dtype}: expected floating-point numbers "
                f"({', '.join(SAVED)}). Is the model quantised? Save it in float32, float16 or bfloat16."
            )
    wanted, held = sum(map(math.prod, expected.values())), sum(header.size for header in headers.values())
    if wanted > held:
        raise missing_weights(str(folder), sorted(expected.keys() - found.keys()) or ["(renamed weights)"])
    return wanted + buffers


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
