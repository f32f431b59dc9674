"""What a command prints: results on standard output, everything else on standard error.

Two consoles, ``console`` for results and ``notes`` for the rest. Neither wraps a line when it is piped, and neither
lets a control character through: text from a file or a prompt is seen, but cannot move the cursor or colour anything.

>>> printable("Mary\\x1b[31m")
'Mary\\\\x1b[31m'

Circuits go where ``--out`` says; what its extension means is known and checked before anything is computed.
"""

from __future__ import annotations

import io
import json
import math
import os
import stat
import string
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich import box
from rich.console import Console, ConsoleDimensions, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from headtrace.errors import InputError
from headtrace.writing import (
    STANDARD_OUTPUT,
    Target,
    check_folder_writable,
    check_writable,
    ends_like_a_folder,
    write_report,
    write_text,
)

if TYPE_CHECKING:
    import polars as pl

    from headtrace.circuits import Circuit


_UNWRAPPED = 100_000
_JOINERS = "\u200c\u200d"
"""Invisible, but letters of Persian and Hindi, and emoji, need them."""
_SEEN = {"\n": "⏎", "\t": "⇥", "\r": "␍"}


def printable(text: str, *, lines: bool = False) -> str:
    r"""Text with what a terminal would obey, or hide, made visible; ``lines`` keeps line breaks.

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
        raise BrokenPipeError  # rich would exit here; `failures` handles it


console = SafeConsole()
"""For results on standard output."""
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


def say(text: str) -> None:
    """A line of the result, or several; nothing in it is markup."""
    console.print(printable(text, lines=True), markup=False, highlight=False, soft_wrap=True)


def token_text(token: str, *, lines: bool = False) -> str:
    """Text as it is shown: control characters visible, markup harmless."""
    return escape(printable(token, lines=lines))


def show_tokens(tokens: Sequence[str]) -> None:
    """The tokens in use, quoted, with their positions."""
    cells = [f'[dim]{i}:[/][cyan]"{token_text(token)}"[/]' for i, token in enumerate(tokens)]
    console.print("Tokens  " + "  ".join(cells), highlight=False)


class _Cells(string.Formatter):
    """Cells of a table: what is missing is empty, and no text is markup."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return "" if value is None else token_text(format(value, format_spec))


def show_table(
    rows: Iterable[Any], columns: Mapping[str, str | Callable[[Any], str]], *, title: str = "", left: int = 1
) -> None:
    """A table under its title; the first ``left`` columns are text, the others numbers.

    ``columns`` maps each heading to the form of its cells: ``"{weight:.3f}"`` for rows that are mappings,
    ``"{0.weight:.3f}"`` for objects, or a function of the row.
    """
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for place, name in enumerate(columns):
        table.add_column(
            token_text(name, lines=True), justify="left" if place < left else "right", no_wrap=True
        )
    cells = _Cells()
    for row in rows:
        named = row if isinstance(row, Mapping) else {}
        table.add_row(
            *(
                token_text(f(row)) if callable(f) else cells.vformat(f, (row,), named)
                for f in columns.values()
            )
        )
    if title:
        console.print(title, style="italic", markup=False, highlight=False, soft_wrap=True)
    console.print(table)


def number(value: float | None, form: str = ".3f", missing: str = "") -> str:
    """A number of a table, which may be missing.

    >>> number(0.25, "+.2f"), number(None)
    ('+0.25', '')
    """
    return missing if value is None else format(value, form)


# -- results -----------------------------------------------------------------------------------------------------

Content = Mapping[str, Any] | Callable[[], Mapping[str, Any]]
"""What ``--json`` prints; a function of it is called only where it is needed."""
TABLE = ".tex"
"""The ending of a LaTeX table."""


class Output:
    """Where the results of a command go. Made before anything is computed: places that cannot be written are errors.

    ``out`` is a folder, unless ``endings`` of files are given; with both ``endings`` and ``folder`` it may be either.
    With ``.tex`` among the endings, ``finish`` writes a frame there as a LaTeX table. ``figures`` are further files, to
    draw into.
    """

    def __init__(
        self,
        as_json: bool,
        out: str | None = None,
        endings: Sequence[str] = (),
        *,
        folder: bool = False,
        figures: Sequence[str | None] = (),
    ) -> None:
        self.as_json, self.out, self.figures, self.ending = as_json, out, figures, ""
        check_output(as_json, out)
        for figure in filter(None, figures):
            check_figure(figure)
        if out is None:
            return
        # Where a table is the only file, any other name is a folder's, such as runs/v1.5.
        dotted = list(endings) == [TABLE] and Path(out).suffix.lower() != TABLE and not is_stream(out)
        if not endings or (folder and (is_folder(out) or dotted)):
            check_folder_writable(out)
            return
        self.ending = ".json" if is_stream(out) else Path(out).suffix.lower()
        check_writable(out)
        if self.ending not in endings:
            either = ", or give a folder" if folder else ""
            raise InputError(f"--out {out!r}: end its name in {', '.join(endings)}{either}.")

    def finish(
        self,
        content: Content,
        show: Callable[[], None],
        *,
        save: Callable[[Any], object] | None = None,
        table: Callable[[], pl.DataFrame] | None = None,
        files: str = "",
        plots: Sequence[Callable[[str], object]] = (),
    ) -> None:
        """Print the result, then write its files: ``save`` writes ``out`` (``files``, if that is a folder), by default
        as JSON; ``table`` is what ``out`` holds as LaTeX; ``plots`` draw the figures."""
        if self.out is not None and save is None and callable(content):
            content = content()
        emit(content, as_json=self.as_json, show=show, out=self.out)
        if self.out is not None:
            if self.ending == TABLE and table is not None:
                from headtrace.tables import latex_table

                write_text(self.out, latex_table(table()) + "\n")
            else:
                (save or (lambda path: write_json(path, content)))(self.out)
            if self.out != STANDARD_OUTPUT:
                note(f"Wrote {self.out}" + ("" if self.ending else f": {files}"))
        for path, plot in zip(self.figures, plots, strict=True):
            if path is not None:
                plot(path)
                note(f"Wrote {path}")


def emit(content: Content, *, as_json: bool, show: Callable[[], None], out: Target | None = None) -> None:
    """Print a result: one JSON object with ``--json``, else what ``show`` prints for people.

    Where ``--out -`` gives standard output to a file's content, people read on standard error.
    """
    if as_json:
        indent = 1 if sys.stdout.isatty() else None
        found = content() if callable(content) else content
        sys.stdout.write(json.dumps(plain(found), indent=indent, allow_nan=False) + "\n")
        sys.stdout.flush()
        return
    console.stderr = out is not None and os.fspath(out) == STANDARD_OUTPUT
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


def is_stream(out: str) -> bool:
    """Whether it is standard output, a device or a pipe, which has no extension."""
    if out == STANDARD_OUTPUT:
        return True
    try:
        mode = os.stat(out).st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) or out.startswith(("/dev/", "/proc/"))


def is_folder(out: str) -> bool:
    """Whether a name is that of a folder: it exists as one, ends in a slash or has no extension."""
    return os.path.isdir(out) or ends_like_a_folder(out) or (not Path(out).suffix and not is_stream(out))


def check_figure(path: str) -> None:
    """Raise ``InputError``, before anything is computed, if a figure cannot be drawn there."""
    from headtrace.figures.style import figure_kind

    figure_kind(path)
    check_writable(path)


def write_json(path: str, content: Any) -> None:
    """Numbers as a file that people can read as well."""
    write_report(path, plain(content))


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


EXTENSIONS = {
    ".json": "json",
    ".parquet": "parquet",
    ".html": "html",
    ".graphml": "graphml",
    ".dot": "dot",
}
FORMATS = ("json", "graphml", "networkx", "neuronpedia", "dot", "parquet", "html")
"""By name, so that help needs no circuits: those that are text are ``circuits.exports.TEXTS``."""
_TOGETHER = ("parquet", "html")
"""Formats of which one file holds many circuits."""


class Destination(NamedTuple):
    """A file, or a folder of one file per circuit, and the format."""

    path: str
    format: str
    folder: bool = False

    def check(self) -> None:
        """Raise ``InputError`` if it cannot be written."""
        (check_folder_writable if self.folder else check_writable)(self.path)

    def write(self, circuits: Sequence[Circuit], *, force: bool = False) -> str:
        """Write the circuits; what was written, in words. Only with ``force`` does an empty one replace a file."""
        ending = next((end for end, name in EXTENSIONS.items() if name == self.format), ".json")
        if self.folder:
            places = {f"{self.path}/circuit-{i:05d}{ending}": [each] for i, each in enumerate(circuits)}
        else:
            places = {self.path: circuits}
        for path, inside in places.items():
            replaced = path != STANDARD_OUTPUT and os.path.isfile(path) and os.path.getsize(path)
            if replaced and not force and not any(circuit.edges for circuit in inside):
                raise InputError(
                    f"The circuit is empty, and {path!r} exists and was not replaced. Give --force to replace it, or "
                    "another --out."
                )
        for path, inside in places.items():
            if self.format == "parquet":
                from headtrace.circuits import write_parquet

                write_parquet(inside, path)
            elif self.format == "html":
                from headtrace.explorer import write_page

                write_page(inside, path, compare=len(inside) == 2)
            else:
                from headtrace.circuits.exports import TEXTS

                write_text(path, TEXTS[self.format](inside[0]))
        if self.folder:
            return f"Wrote {len(circuits)} files to {self.path}"
        return "" if self.path == STANDARD_OUTPUT else f"Wrote {self.path}"


def destination(out: str, *, many: bool, to: str | None = None) -> Destination:
    """Where ``out`` leads, by its extension, or in the format ``to``.

    >>> destination("c.parquet", many=True).format, destination("circuits", many=True).folder
    ('parquet', True)
    """
    if to is not None and to not in FORMATS:
        raise InputError(f"There is no format {to!r}: choose {', '.join(FORMATS)}.")
    ending = Path(out).suffix.lower()
    folder = is_folder(out)
    form = to or ("json" if folder or is_stream(out) else EXTENSIONS.get(ending))
    if form is None:
        raise InputError(
            f"--out {out!r}: {ending} is not a format of circuits. End it in {', '.join(EXTENSIONS)}, or give a folder."
        )
    if folder and form in _TOGETHER:
        raise InputError(
            f"--out {out!r} is a folder, but {form} is one file: give a name that ends in .{form}."
        )
    if many and not folder and form not in _TOGETHER:
        raise InputError(
            f"--out {out!r} holds one circuit, and there are many: end it in .parquet or .html, or give a folder."
        )
    return Destination(out, form, folder)
