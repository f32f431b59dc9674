"""Load a model: from a hub name, a local folder, a GGUF file, a module that is loaded already, or the built-in one.

Whatever the source, it becomes a folder in Hugging Face format (`headtrace.models.hub`),
which is checked before a weight is read (`headtrace.models.checkpoint`) and afterwards: a weight that is missing,
left over, of another shape or not finite is an error that names it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from headtrace import builtin
from headtrace.errors import HeadtraceError, InputError
from headtrace.models import devices, hub
from headtrace.models.checkpoint import (
    missing_weights,
    open_checkpoint,
    saved_dtype,
    unexpected_weights,
)
from headtrace.models.devices import (
    DeviceMap,
    check_device_map,
    dtype_name,
    find_device,
    named_device,
    same_device,
)
from headtrace.models.gguf_files import converted
from headtrace.models.hub import Source, find_source
from headtrace.models.integrity import check_adapters, check_surroundings
from headtrace.models.model import Model
from headtrace.models.packages import PACKAGED_GGUF, packaged_file

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
DTYPES = {dtype_name(dtype): dtype for dtype in devices.DTYPES}


def load(
    name_or_path_or_model: str | os.PathLike[str] | PreTrainedModel,
    tokenizer: Any = None,
    *,
    device: str = "auto",
    dtype: str | None = None,
    device_map: DeviceMap | None = None,
    revision: str | None = None,
    name: str | None = None,
) -> Model:
    """Load a causal language model.

        headtrace.load("gpt2-small")                            # a familiar alias, or any hub name
        headtrace.load("EleutherAI/pythia-160m", revision="step1000")
        headtrace.load("EleutherAI/pythia-160m@step1000")       # the same
        headtrace.load("path/to/folder")                        # Hugging Face format
        headtrace.load("model.Q4_1.gguf")
        headtrace.load(hf_model, tokenizer)                     # already loaded
        headtrace.load(hf_model, tokenizer, name="my-finetune") # what files and figures call it

    ``dtype`` is ``"float32"`` (the default), ``"float64"``, ``"bfloat16"`` or ``"float16"`` (in half precision the
    model's own sums are rounded: what that added is the component ``rounding``), or ``"auto"``, which is what the
    checkpoint was saved in; ``device="auto"`` takes a GPU if there is one. ``device_map`` spreads a model over several
    devices instead, as transformers does: ``"auto"``, or a dictionary from modules to devices, ``"cpu"`` and ``"disk"``
    among them. A model that is already loaded keeps its own dtype and devices. Code that comes with a model is never
    run, and pickled weights are never opened.
    """
    check_surroundings(torch.device("cpu"))
    if dtype is not None and dtype not in (*DTYPES, "auto"):
        raise InputError(
            f"dtype={dtype!r} is not supported: choose {', '.join(map(repr, DTYPES))}, or 'auto' for what the "
            "checkpoint was saved in."
        )
    if isinstance(name_or_path_or_model, PreTrainedModel):
        return _loaded(name_or_path_or_model, tokenizer, device, dtype, device_map, revision, name)
    if isinstance(name_or_path_or_model, nn.Module):  # an adapter wrapped around a model says so
        check_adapters(name_or_path_or_model)
    if name is not None:
        raise InputError(
            f"name={name!r} names a model that is loaded already; {str(name_or_path_or_model)!r} has a name of its own."
        )
    if not isinstance(name_or_path_or_model, (str, os.PathLike)):
        raise InputError(
            f"Expected the name of a model, a path or a loaded transformers model, got "
            f"{type(name_or_path_or_model).__name__}."
        )
    if device_map is not None and device != "auto":
        raise InputError(
            f"device={device!r} is one place for the whole model, and device_map={device_map!r} says where its parts "
            "go. Give one of them."
        )
    wanted = None if dtype == "auto" else DTYPES[dtype or "float32"]
    place = None
    if device_map is None:
        place = find_device(device, wanted or torch.float32)
    else:
        check_device_map(device_map, wanted or torch.float32)
    source = find_source(name_or_path_or_model, revision)
    with _quiet():
        source = _on_this_machine(source)
        read = _Reading(wanted, device_map, tokenizer is None)
        if source.kind == "gguf":
            hf, found = read.gguf(Path(source.place))
        else:
            hf, found = read.folder(builtin.folder() if source.kind == "builtin" else Path(source.place))
        hf = hf if place is None else hf.to(place)  # type: ignore[arg-type]
        found = found if tokenizer is None else tokenizer
        model = Model(hf, found, name=source.name, revision=source.revision)
        _try(model)
    return model


def _loaded(
    hf: PreTrainedModel,
    tokenizer: Any,
    device: str,
    dtype: str | None,
    device_map: DeviceMap | None,
    revision: str | None,
    name: str | None,
) -> Model:
    """A model that the caller loaded is taken as it is: changing it here would change it everywhere."""
    if device_map is not None:
        raise InputError(
            f"device_map={device_map!r}, but the model that was given is loaded already, and stays where it is. Spread "
            "it when you load it (from_pretrained(..., device_map=...)), or give headtrace its name or folder."
        )
    if revision is not None:
        raise InputError(
            f"revision={revision!r} asks for a version on the Hugging Face hub, but the model that was given is loaded "
            "already. Leave the revision out, or give the model's name."
        )
    if dtype not in (None, "auto") and hf.dtype != DTYPES[dtype]:
        raise InputError(
            f"dtype={dtype!r}, but the model that was given is in {dtype_name(hf.dtype)}. Convert it "
            f"first (model.to(torch.{dtype})), or leave dtype out."
        )
    if device != "auto" and not same_device(named_device(device), hf.device):
        raise InputError(
            f"device={device!r}, but the model that was given is on {str(hf.device)!r}. Move it first "
            f"(model.to({device!r})), or leave device out."
        )
    place = str(hf.config.name_or_path or "")
    if name is None and os.path.isdir(place):  # a path is where it was read from, not what anybody calls it
        name = os.path.basename(os.path.abspath(place))
    return Model(hf, tokenizer, name=name)


def _try(model: Model) -> None:
    """One token through the model: a config may have the right sizes and still describe nothing that runs."""
    try:
        logits = model.record([0]).logits
    except HeadtraceError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"{model.name!r} was read, but it does not run: {reason[:300]}. Does its config.json belong to it?"
        ) from error
    if not bool(torch.isfinite(logits).all()):
        raise InputError(
            f"{model.name!r} was read, but its output is not finite. Does its config.json belong to it?"
        )


@contextmanager
def _quiet() -> Generator[None]:
    """Without transformers' own progress bars and notes, which would mix with headtrace's output."""
    bars, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


# -- where weights come from ---------------------------------------------------------------------------------


def _on_this_machine(source: Source) -> Source:
    """The same model as a folder or a file of this machine: fetched from the hub if it is only there.

    Its revision is the one that was given, or else the commit that was found: a branch moves on.
    """
    if source.kind != "hub":
        return source
    packaged = packaged_file(source.name) if source.revision is None else None
    if packaged is not None and not hub.in_cache(source):  # what the user got is used without asking the hub
        return replace(source, kind="gguf", place=str(packaged))
    folder = hub.fetch(source)
    if folder is not None:
        return replace(source, kind="folder", place=str(folder), revision=source.revision or folder.name)
    packaged = packaged or (_installed_gguf(source.name) if source.revision is None else None)
    if packaged is None:
        raise hub.unreachable(source)
    return replace(source, kind="gguf", place=str(packaged))


def _installed_gguf(alias: str) -> Path | None:
    """The GGUF file that an installed package carries for this alias (found without importing the package)."""
    if alias not in PACKAGED_GGUF:
        return None
    package, file = PACKAGED_GGUF[alias]
    spec = importlib.util.find_spec(package)
    places = [] if spec is None else spec.submodule_search_locations or []
    return next((Path(place) / file for place in places if (Path(place) / file).exists()), None)


def loadable_place(name: str, revision: str | None = None) -> str | None:
    """Where another process finds a model of this name, without the hub: a name or an absolute path; None if nowhere.

    >>> loadable_place("builtin"), loadable_place("LlamaForCausalLM")
    ('builtin', None)
    """
    try:
        source = find_source(name, revision)
    except InputError:
        return None
    if source.kind in ("folder", "gguf"):
        return os.path.abspath(source.place)
    packaged = packaged_file(source.name) or _installed_gguf(source.name)
    return name if source.kind == "builtin" or hub.in_cache(source) or packaged is not None else None


@dataclass(frozen=True)
class _Reading:
    """How a model's files are read."""

    dtype: torch.dtype | None
    """None: as the checkpoint was saved."""
    device_map: DeviceMap | None
    with_tokenizer: bool

    def gguf(self, path: Path) -> tuple[PreTrainedModel, Any]:
        dtype = (self.dtype or torch.float32) if self.device_map is None else None
        try:
            return self.folder(converted(path, dtype=dtype))
        except InputError:
            # The file itself is damaged, which a second conversion says again, or its converted copy is.
            return self.folder(converted(path, anew=True, dtype=dtype))

    def folder(self, folder: Path) -> tuple[PreTrainedModel, Any]:
        """The module of a folder, and its tokenizer if it has one and it is wanted."""
        hf = self._weights(folder)
        return hf, _read_tokenizer(folder) if self.with_tokenizer else None

    def _weights(self, folder: Path) -> PreTrainedModel:
        """The module of a folder, with every one of its weights from the files and every weight of the files in it."""
        dtype = saved_dtype(folder) if self.dtype is None else self.dtype
        checkpoint = open_checkpoint(folder, dtype, in_memory=self.device_map is None)
        try:
            found: Any = AutoModelForCausalLM.from_pretrained(
                str(folder),
                dtype=dtype,
                attn_implementation="eager",
                trust_remote_code=False,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                **({} if self.device_map is None else {"device_map": self.device_map}),
            )
        except HeadtraceError:
            raise
        except Exception as error:
            doubt = "Are all its files there and complete?"
            if self.device_map is not None:
                doubt = f"Does device_map={self.device_map!r} suit the model and this machine?"
            raise InputError(
                f"The model in {str(folder)!r} cannot be read: {str(error).rstrip('.')}. {doubt}"
            ) from error
        hf, info = found
        if isinstance(self.device_map, Mapping):  # transformers ignores names that no module has
            known = {name for name, _ in (*hf.named_modules(), *hf.named_parameters())}
            strange = sorted(set(self.device_map) - known)
            if strange:
                near = get_close_matches(strange[0], known, n=3) or sorted(known - {""})[:3]
                raise InputError(
                    f"device_map names {strange[0]!r}, and the model has no such module. Is it one of "
                    f"{', '.join(map(repr, near))}?"
                )
        if info["missing_keys"]:
            raise missing_weights(str(folder), info["missing_keys"])
        extra = [key for key in info["unexpected_keys"] if not checkpoint.recomputed(key)]
        if extra:
            raise unexpected_weights(str(folder), extra)
        return hf


def _read_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, or None where there is none: token ids work everywhere text does."""
    files = [name for name in TOKENIZER_FILES if (folder / name).exists()]
    if not files:
        return None  # transformers would make up an empty tokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        tokenizer("a")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the tokenizers library panics past Exception
        if "trust_remote_code" in str(error):
            raise InputError(
                f"The tokenizer in {str(folder)!r} runs only with code of its own repository, and headtrace never runs "
                "code that comes with a model. Give another one with headtrace.load(..., tokenizer=...)."
            ) from None
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"The tokenizer in {str(folder)!r} ({', '.join(files)}) cannot be read: {reason[:300]}. Fetch it again, "
            "give one with headtrace.load(..., tokenizer=...), or take its files away to use token ids alone."
        ) from error
    return tokenizer
