"""Packages that come with an extra of headtrace. Where one is missing, the error names the extra to install.

>>> require("nothing_so_named", extra="serve", what="The explorer")
Traceback (most recent call last):
headtrace.errors.InputError: The explorer needs nothing_so_named: pip install '.[serve]' in headtrace's folder.
"""

from __future__ import annotations

from importlib.util import find_spec

from headtrace.errors import InputError


def require(*packages: str, extra: str, what: str, instead: str = "") -> None:
    """Raise ``InputError`` if a package is missing that ``what`` needs; ``instead`` says what works without it."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        needed = f"{what} needs {' and '.join(missing)}: pip install '.[{extra}]' in headtrace's folder."
        raise InputError(f"{needed} {instead}".rstrip())


def require_ray() -> None:
    """Ray, asked for before a model is loaded or a folder is made."""
    require("ray", extra="ray", what="The engine ray", instead="Without it there is the engine local.")
