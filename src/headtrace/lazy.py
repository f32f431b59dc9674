"""Imports that wait until they are needed: names of a package on first use, and packages that come with an extra.

What needs no model so starts without torch. Where a package of an extra is missing, the error names the extra.

>>> require("nothing_so_named", extra="serve", what="The explorer")
Traceback (most recent call last):
headtrace.errors.InputError: The explorer needs nothing_so_named: pip install '.[serve]' in headtrace's folder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from headtrace.errors import InputError


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A ``__getattr__`` for a package: each name is looked up in its home, a module of that package.

    >>> lazy_names("headtrace", {"Firing": "vocabulary"})("Firing").__name__
    'Firing'
    """

    def look_up(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, found)
        return found

    return look_up


def require(*packages: str, extra: str, what: str, instead: str = "") -> None:
    """Raise ``InputError`` if a package is missing that ``what`` needs; ``instead`` says what works without it."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        needed = f"{what} needs {' and '.join(missing)}: pip install '.[{extra}]' in headtrace's folder."
        raise InputError(f"{needed} {instead}".rstrip())


def require_ray() -> None:
    """Ray, asked for before a model is loaded or a folder is made."""
    require("ray", extra="ray", what="The engine ray", instead="Without it there is the engine local.")
