"""What the name of a model stands for: the built-in model, a folder, a GGUF file, or a model on the hub.

>>> find_source("pythia-160m@step1000")
Source(kind='hub', place='EleutherAI/pythia-160m', name='pythia-160m', revision='step1000')
>>> find_source("builtin").kind
'builtin'
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from huggingface_hub.utils import HFValidationError, validate_repo_id

from headtrace.errors import InputError
from headtrace.models.aliases import ALIASES, BUILTIN

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
