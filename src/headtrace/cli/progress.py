"""How far a command is: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.markup import escape

from headtrace.cli.output import note, notes, printable
from headtrace.progress import Progress


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
