"""Somebody who kills a worker in the middle of a run."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import psutil


class Killer(threading.Thread):
    """Kills one of two workers as soon as the first of so many shards is written."""

    def __init__(self, name: str, shards: Path, *, of: int) -> None:
        super().__init__(daemon=True)
        self.name_of_workers, self.shards, self.of, self.left = name, shards, of, 0

    def run(self) -> None:
        workers: list[psutil.Process] = []
        while len(workers) < 2:
            time.sleep(0.05)
            workers = workers_of_this_process(self.name_of_workers)
        while not any(self.shards.glob("*.json")):
            time.sleep(0.001)
        workers[0].kill()
        self.left = self.of - len(list(self.shards.glob("*.json")))


def workers_of_this_process(name: str) -> list[psutil.Process]:
    """The processes that this one has started, however far down, whose command has a word in it."""
    return [each for each in psutil.Process().children(recursive=True) if name in _command(each)]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return ""
