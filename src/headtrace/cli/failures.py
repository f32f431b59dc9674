"""How far a command is, and how it ends when it fails.

Progress is a bar on a terminal, a line now and then in a log. A command that fails says what a user can mend (exit code
2), never a traceback.

An interrupt ends with 130 and a pipe that nobody reads any more with 141, as a shell would have it. What headtrace
did not expect ends with 70 and says that it is a bug. ``HEADTRACE_TRACEBACK=1`` (or ``--debug``) shows the traceback.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

from headtrace.cli.output import note, notes, printable
from headtrace.errors import HeadtraceError
from headtrace.progress import Progress

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


class Bar:
    """A progress that can also show a few words: how many prompts failed, say."""

    def __init__(self, report: Progress, words: Callable[[str], None]) -> None:
        self._report, self.words = report, words

    def __call__(self, done: int, of: int) -> None:
        self._report(done, of)


@contextmanager
def progress_bar(what: str, total: int | None = None, *, resumes: bool = False) -> Generator[Bar]:
    """Rate and remaining time; the block gets a function to call with how much is done, and of how much.

    On a terminal a bar, in a log a line now and then. Where work ``resumes``, the first call says what was done
    before, which took no time now.
    """
    if not notes.is_terminal:
        lines = _Lines(what, resumes)
        yield Bar(lines, lambda words: setattr(lines, "words", words))
        return
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[rate]}"),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left:"),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[words]}", style="yellow"),
    )
    with progress.Progress(*columns, console=notes, transient=True) as bar:
        task = bar.add_task(escape(printable(what)), total=total, words="", rate="")
        begun = not resumes

        def report(done: int, of: int) -> None:
            nonlocal begun
            if not begun:
                bar.reset(task, completed=done, total=of)
                begun = True
            speed = bar.tasks[0].speed
            bar.update(task, completed=done, total=of, rate="" if not speed else f"{speed:.3g}/s")

        yield Bar(report, lambda words: bar.update(task, words=escape(printable(words))))


class _Lines:
    """Progress where nobody sees a bar: at most one line in ten seconds."""

    every = 10.0

    def __init__(self, what: str, resumes: bool = False) -> None:
        self.what, self.words = what, ""
        self.start = self.reported = time.monotonic()
        self.before: int | None = None if resumes else 0

    def __call__(self, done: int, of: int) -> None:
        now = time.monotonic()
        if self.before is None:
            self.before = done
        if now - self.reported < self.every:
            return
        self.reported, passed = now, now - self.start
        new = done - self.before
        left = "" if not new else f", about {passed * (of - done) / new:.0f} s left ({new / passed:.3g}/s)"
        words = f", {self.words}" if self.words else ""
        note(f"{self.what}: {done} of {of}{left}{words}")
