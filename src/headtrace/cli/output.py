"""What a command prints: results on standard output, everything else on standard error.

Two consoles, ``console`` for results and ``notes`` for the rest. Neither wraps a line when it is piped, and neither
lets a control character through: text from a file or a prompt is seen, but cannot move the cursor or colour anything.

>>> printable("Mary\\x1b[31m")
'Mary\\\\x1b[31m'
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from rich.console import Console, ConsoleDimensions, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.text import Text

from headtrace.errors import InputError
from headtrace.writing import STANDARD_OUTPUT, Target

_UNWRAPPED = 100_000
_JOINERS = "\u200c\u200d"
"""Invisible, but letters of Persian and Hindi, and emoji, need them."""
_SEEN = {"\n": "⏎", "\t": "⇥", "\r": "␍"}


def printable(text: str, *, lines: bool = False) -> str:
    r"""Text with what a terminal would obey, or hide, made visible; ``lines`` leaves line breaks as they are.

    That is: control characters (ANSI escapes), marks that reverse the direction of writing, characters without width,
    halves of surrogate pairs.

    >>> printable("a\u202eb\n\x9b"), printable("two\nlines", lines=True)
    ('a\\u202eb⏎\\x9b', 'two\nlines')
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join("\n" if lines and each == "\n" else _visible(each) for each in text)


def _visible(character: str) -> str:
    if character in _SEEN:
        return _SEEN[character]
    if character in _JOINERS or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return character
    return (
        character.encode("ascii", "backslashreplace").decode()
        if character > "\x7f"
        else f"\\x{ord(character):02x}"
    )


class SafeConsole(Console):
    """A console that is as wide as it has to be when nobody looks, and that prints only what can be seen."""

    @property
    def size(self) -> ConsoleDimensions:
        found = super().size
        return found if self.is_terminal else ConsoleDimensions(_UNWRAPPED, found.height)

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        self._width, self._height = new_size

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text == "\n" or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable(segment.text, lines=True), segment.style)

    def render_str(self, text: str, **how: Any) -> Text:
        return super().render_str(printable(text, lines=True), **how)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # from within the handler of one: told at the top, in one place


console = SafeConsole()
"""For results."""
notes = SafeConsole(stderr=True)
"""For what was written where, warnings and progress."""


def tolerate_few_characters() -> None:
    """Where a terminal or a pipe has few characters (on Windows a pipe does), the others are printed as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def note(text: str) -> None:
    """A line on standard error: what was written, what was left out."""
    notes.print(escape(printable(text)), highlight=False, soft_wrap=True)


def warn(text: str) -> None:
    """A line on standard error that should not be missed."""
    notes.print(escape(printable(text)), style="yellow", highlight=False, soft_wrap=True)


def emit(
    content: Mapping[str, Any], *, as_json: bool, show: Callable[[], None], out: Target | None = None
) -> None:
    """Print a result: one JSON object with ``--json``, else what ``show`` prints for people.

    Where ``--out -`` gives standard output to a file's content, people read on standard error.
    """
    if as_json:
        print_json(content)
        return
    if out is None or os.fspath(out) != STANDARD_OUTPUT:
        show()
        return
    console.stderr = True
    try:
        show()
    finally:
        console.stderr = False


def check_output(as_json: bool, *outs: Target | None) -> None:
    """Two things cannot both have standard output."""
    places = [out for out in outs if out is not None and os.fspath(out) == STANDARD_OUTPUT]
    if len(places) + as_json > 1:
        raise InputError(
            "Standard output was asked for twice: give --json, or - as the name of one file, but not both."
        )


def print_json(content: Mapping[str, Any]) -> None:
    """One JSON object on standard output, in one line if piped, in ASCII: safe to print and to read."""
    indent = 1 if sys.stdout.isatty() else None
    sys.stdout.write(json.dumps(plain(content), indent=indent, allow_nan=False) + "\n")
    sys.stdout.flush()


def plain(value: Any) -> Any:
    """A value as JSON has it: what is not a finite number becomes null, what is unknown becomes text.

    >>> plain({"a": (1, float("nan")), 2: {3}})
    {'a': [1, None], '2': [3]}
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    to_list = getattr(value, "tolist", None)  # an array
    return str(value) if to_list is None else plain(to_list())
