"""``headtrace view``: circuits as a page in the browser."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from headtrace.cli import options
from headtrace.cli.destinations import is_stream
from headtrace.errors import InputError
from headtrace.writing import STANDARD_OUTPUT


def register(app: typer.Typer) -> None:
    app.command("view")(view)


def view(
    circuits: Annotated[
        list[str],
        typer.Argument(
            metavar="CIRCUIT ...",
            help="Circuit files, Parquet files (or one circuit: many.parquet#3), folders of them, runs (or DIR#ID).",
        ),
    ],
    out: Annotated[
        str | None,
        typer.Option(
            "--out", help="Where to write the page (- for standard output); by default beside the first."
        ),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
    json: options.Json = False,
) -> None:
    """Write circuits as one page (a single HTML file that needs no network) and open it.

    Several circuits share a page with a switch; two are shown side by side.

    Examples:

      headtrace view c.json

      headtrace view mary.json john.json --out both.html --no-open

      headtrace view many.parquet#3
    """
    import webbrowser

    from headtrace.circuits import read_circuits
    from headtrace.explorer import write_page

    options.check_output(json, out)
    page = out or _beside(circuits[0])
    _check_page(page)
    loaded = [circuit for source in circuits for circuit in read_circuits(source)]
    path = write_page(loaded, page, compare=len(loaded) == 2)
    regular = page != STANDARD_OUTPUT and path.is_file()
    content = {"out": page, "circuits": len(loaded)}
    options.emit(content, as_json=json, show=lambda: None)
    if regular:
        size = path.stat().st_size / 1000
        options.note(f"Wrote {path} ({size:.0f} kB). Open it in any browser; it needs no network.")
    if open_page and regular and not json:
        webbrowser.open(path.resolve().as_uri())


def _beside(source: str) -> str:
    """A page named after a circuit: ``c.html`` for ``c.json``, ``many-3.html`` for ``many.parquet#3``."""
    if source == "-":
        raise InputError("A circuit from standard input has no name for its page: give --out PAGE.html.")
    if os.path.isdir(source):
        return str(Path(source) / "circuits.html")
    path, number = source, ""
    if not os.path.lexists(source) and "#" in source:
        path, _, number = source.rpartition("#")
    try:
        return str(Path(path).with_suffix("")) + (f"-{number}" if number else "") + ".html"
    except ValueError:
        raise InputError(f"{source!r} has no name for its page: give --out PAGE.html.") from None


def _check_page(page: str) -> None:
    """A page goes to a file that says so, or to what is no file; a circuit is never taken for one."""
    options.check_writable(page)
    ending = Path(page).suffix.lower()
    if ending not in (".html", ".htm") and not is_stream(page):
        raise InputError(f"--out {page!r}: a page is HTML, so end its name in .html.")
