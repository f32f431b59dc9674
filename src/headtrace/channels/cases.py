"""Firings to follow through training, and the file they are read from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headtrace.errors import InputError
from headtrace.lines import Record, prompt_of, read_lines
from headtrace.vocabulary import Firing


@dataclass(frozen=True)
class Case:
    """A head and a token pair of a prompt, to be followed through training."""

    prompt: str | tuple[int, ...]
    firing: Firing
    name: str = ""
    """What the head does, if known: shown in figures."""


def read_cases(path: str | Path) -> list[Case]:
    """Read firings from JSONL: ``{"text": ..., "firing": "L9H6:14:3"}`` or ``{"tokens": ...``.

    A line that cannot be used is an error: what is followed through training should be what was asked for.
    """
    return read_lines(path, _case, what="firings", strict=True).values


def _case(record: Record, where: str) -> Case:
    prompt = prompt_of(record, where)
    try:
        firing = Firing.parse(str(record.get("firing", "")))
    except InputError as error:
        raise InputError(f"{where}, field 'firing': {error}") from error
    return Case(prompt, firing, str(record.get("name", "")))
