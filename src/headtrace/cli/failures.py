"""What a command that fails says, and its exit code: 2 for what a user can mend, never a traceback.

An interrupt ends with 130 and a pipe that nobody reads any more with 141, as a shell would have it. What headtrace
did not expect ends with 70 and says that it is a bug. ``HEADTRACE_TRACEBACK=1`` (or ``--debug``) shows the traceback.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

from headtrace.cli.output import notes, printable
from headtrace.errors import HeadtraceError

DEBUG = "HEADTRACE_TRACEBACK"
MENDABLE, BUG, INTERRUPTED, PIPE_CLOSED = 2, 70, 130, 141


class Commands(TyperGroup):
    """All commands, with one handler for whatever they raise."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # a closed pipe may show only now
            return result
        except BaseException as error:
            if not isinstance(error, (Exception, KeyboardInterrupt)) or hasattr(error, "exit_code"):
                raise  # a deliberate exit, or an error in the command line that typer explains itself
            if os.environ.get(DEBUG, "0") not in ("", "0") and not isinstance(error, BrokenPipeError):
                raise
            raise typer.Exit(_report(error)) from None


def _report(error: BaseException) -> int:
    """Print what happened on standard error, if it is still open, and return the exit code."""
    if isinstance(error, BrokenPipeError):
        _silence()
        return PIPE_CLOSED
    text, code = _message(error)
    with suppress(OSError):
        shown = escape(printable(text, lines=True))
        notes.print(
            f"[bold red]{'Interrupted.' if code == INTERRUPTED else 'Error:'}[/] {shown}", soft_wrap=True
        )
    return code


def _message(error: BaseException) -> tuple[str, int]:
    match error:
        case HeadtraceError():
            return str(error), MENDABLE
        case KeyboardInterrupt():
            return str(error), INTERRUPTED
        case OSError():
            where = "" if error.filename is None else f"{os.fspath(error.filename)!r}: "
            return (
                f"{where}{error.strerror or error}. Check the path, its permissions and the disk.",
                MENDABLE,
            )
        case MemoryError():
            return "There is not enough memory for this. Try a shorter prompt or a smaller model.", MENDABLE
        case _:
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            return (
                f"{what}\nThis is a bug in headtrace, not a mistake of yours. Please report it{_where_to()}, with the "
                f"command and what it prints after {DEBUG}=1 is set in the environment.",
                BUG,
            )


def _where_to() -> str:
    """Where reports go, as the package itself says."""
    from importlib import metadata

    with suppress(metadata.PackageNotFoundError):
        for line in metadata.metadata("headtrace").get_all("Project-URL") or []:
            label, _, address = line.partition(",")
            if label.strip().lower() in ("issues", "bug tracker", "tracker"):
                return f" at {address.strip()}"
    return " to the project's issue tracker"


def _silence() -> None:
    """Nobody reads standard output: let what is left in its buffer go nowhere, without a complaint at the end."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
