"""Errors that say what was given, what was expected and what to do next.

Everything headtrace raises on purpose is a ``HeadtraceError``; the command line prints it without a
traceback and ends with exit code 2.
"""

from __future__ import annotations


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
