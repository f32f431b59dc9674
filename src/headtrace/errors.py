"""Errors that say what was given, what was expected and what to do next.

Everything headtrace raises on purpose is a ``HeadtraceError``; the command line prints it without a
traceback and ends with exit code 2.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from reprlib import repr as brief
from typing import Any


class HeadtraceError(Exception):
    """Base of every error that a user can act on."""


class InputError(HeadtraceError, ValueError):
    """A prompt, token, firing, option or file is not what was expected."""


class UnsupportedModelError(HeadtraceError):
    """The architecture, or this variant of it, is not one that headtrace can decompose exactly."""


class IdentityError(HeadtraceError):
    """A decomposition does not add up to what the model computed."""


class OutOfMemoryError(HeadtraceError, MemoryError):
    """The estimate for a run is larger than the memory at hand."""


class HeadtraceDeprecationWarning(FutureWarning):
    """Something works for now and will end: the message says when, and what to write instead.

    Python shows it by default: those who use a name have to hear of it, not only those who run tests.
    """


def deprecated(what: str, ends: str, instead: str) -> None:
    """Warn whoever called the function that calls this.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as heard:
    ...     warnings.simplefilter("always")
    ...     deprecated("bos=", "0.5", "prompts with their own BOS token")
    >>> str(heard[0].message)
    'bos= will end with headtrace 0.5. Use prompts with their own BOS token.'
    """
    text = f"{what} will end with headtrace {ends}. Use {instead}."
    warnings.warn(text, HeadtraceDeprecationWarning, stacklevel=3)


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A ``__getattr__`` for a package whose public names have changed: the old ones work, and warn."""

    def __getattr__(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        deprecated(f"{module}.{name}", "0.5", f"{module}.{names[name]}")
        return getattr(import_module(module), names[name])

    return __getattr__


def shown(value: Any, width: int = 80) -> str:
    """A value in an error as JSON would have it, cut short. Whatever it is, it can be shown, and printed.

    >>> shown(["Mary", None]), shown(10**5000), shown("half of \\ud83d")
    ('["Mary", null]', 'a value of type int', '"half of \\\\ud83d"')
    """
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
        text.encode()
    except UnicodeEncodeError:  # half a character: only its escape can be printed
        text = json.dumps(value, default=str)
    except (TypeError, ValueError, RecursionError):
        text = _named(value)
    return text if len(text) <= width else text[: width - 3] + "..."


def _named(value: Any) -> str:
    try:
        return brief(value)
    except (ValueError, RecursionError):  # Python refuses to write integers of thousands of digits
        return f"a value of type {type(value).__name__}"
