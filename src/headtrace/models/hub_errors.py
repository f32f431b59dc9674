"""What the hub, or the way to it, refuses, in words that say what to do. No token is ever part of them."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from difflib import get_close_matches

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from headtrace.errors import InputError
from headtrace.models.names import READY, Source

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
