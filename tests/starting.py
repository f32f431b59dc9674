"""Processes for tests that interrupt and kill them.

A new Python takes seconds to import what headtrace needs. These are forked from one that has done so (a *fork server*,
started with the first of them), and so begin at once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest

from headtrace.cli import main

_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else None
_CONTEXT = multiprocessing.get_context(_METHOD)
if _METHOD:
    _CONTEXT.set_forkserver_preload(["headtrace.models", "headtrace.interpret", "headtrace.explorer.server"])


class Started:
    """A process that calls a function of a module; what it prints is read from here."""

    def __init__(self, target: Callable[..., Any], *arguments: Any) -> None:
        if not _METHOD:
            pytest.skip("processes cannot be forked on this system")
        pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(2)]
        writers = [writer for _, writer in pipes]
        # Not a daemon: those may not have workers of their own.
        self._process = _CONTEXT.Process(target=_call, args=(target, arguments, *writers))
        self._process.start()
        for writer in writers:
            writer.close()
        self.stdout, self.stderr = (
            os.fdopen(os.dup(reader.fileno()), encoding="utf-8") for reader, _ in pipes
        )
        for reader, _ in pipes:
            reader.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def send_signal(self, sent: int) -> None:
        os.kill(self.pid, sent)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int | None:
        """Its exit code, or the negative number of the signal that ended it; None while it runs."""
        self._process.join(timeout)
        return self._process.exitcode

    def told(self) -> str:
        """All that is left of its standard error."""
        return self.stderr.read()

    def close(self) -> None:
        self.kill()
        self.wait()
        self.stdout.close()
        self.stderr.close()


def command(*words: str) -> None:
    """The command line, as a shell would start it."""
    sys.argv[:] = ["headtrace", *words]
    main()


def command_with(packages: str, *words: str) -> None:
    """The same where the packages of a folder are installed, too."""
    sys.path.insert(0, packages)
    command(*words)


def _call(target: Callable[..., Any], arguments: tuple[Any, ...], out: Connection, error: Connection) -> None:
    os.dup2(out.fileno(), 1)
    os.dup2(error.fileno(), 2)
    out.close()
    error.close()
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # whoever runs the tests may ignore it: a shell's jobs do
    target(*arguments)
