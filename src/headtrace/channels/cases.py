"""Firings to follow through training, and the file they are read from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headtrace.errors import InputError
from headtrace.vocabulary import Firing


@dataclass(frozen=True)
class Case:
    """A head and a token pair of a prompt, to be followed through training."""

    prompt: str | tuple[int, ...]
    firing: Firing
    name: str = ""
    """What the head does, if known: shown in figures."""


def read_cases(path: str | Path) -> list[Case]:
    """Read firings from JSONL: ``{"text": ..., "firing": "L9H6:14:3"}`` or ``{"tokens": ...``."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(f"The file of firings {str(path)!r} cannot be read: {error.strerror}.") from error
    cases = [_read_case(line, f"{path}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not cases:
        raise InputError(f"{str(path)!r} holds no firings: write one JSON object per line.")
    return cases


def _read_case(line: str, where: str) -> Case:
    example = '{"text": "When Mary ...", "firing": "L9H6:14:3"}'
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where} is not JSON ({error.msg}). Expected {example}.") from error
    if not isinstance(entry, dict) or "firing" not in entry or ("text" in entry) == ("tokens" in entry):
        raise InputError(f"{where} needs 'firing' and either 'text' or 'tokens'. Expected {example}.")
    given: Any = entry.get("text", entry.get("tokens"))
    if "tokens" in entry:
        if not isinstance(given, list) or not all(isinstance(i, int) for i in given):
            raise InputError(f"{where}: 'tokens' must be a list of token ids, like [1, 2, 3].")
        given = tuple(given)
    elif not isinstance(given, str):
        raise InputError(f"{where}: 'text' must be a string.")
    return Case(given, Firing.parse(str(entry["firing"])), str(entry.get("name", "")))
