"""``headtrace view``: circuits as a page in the browser."""

from __future__ import annotations

from pathlib import Path

import typer


def register(app: typer.Typer) -> None:
    app.command("view", help=view.__doc__)(view)


def view(
    circuits: list[Path] = typer.Argument(..., metavar="CIRCUIT.json ...", help="One or more circuit files."),
    out: Path | None = typer.Option(
        None, "--out", help="Where to write the page; beside the first file if not given."
    ),
    open_page: bool = typer.Option(True, "--open/--no-open", help="Open the page in a browser."),
) -> None:
    """Write circuits as one page (a single HTML file that needs no network) and open it.

    Several circuits share a page with a switch; two are shown side by side.

    Examples:

        headtrace view c.json

        headtrace view mary.json john.json --out both.html --no-open
    """
    import webbrowser

    from headtrace.circuits import load_circuit
    from headtrace.explorer import write_page

    loaded = [load_circuit(path) for path in circuits]
    path = write_page(loaded, out or circuits[0].with_suffix(".html"), compare=len(loaded) == 2)
    typer.echo(
        f"Wrote {path} ({path.stat().st_size / 1000:.0f} kB). Open it in any browser; it needs no network."
    )
    if open_page:
        webbrowser.open(path.resolve().as_uri())
