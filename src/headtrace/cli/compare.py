"""``headtrace compare``: what circuits share, and what only one of them has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headtrace.cli import options
from headtrace.cli.families import GrainChoice
from headtrace.cli.options import console
from headtrace.errors import InputError
from headtrace.writing import ends_like_a_folder

if TYPE_CHECKING:
    from headtrace.families import CircuitComparison


def register(app: typer.Typer) -> None:
    app.command("compare")(compare)


def compare(
    circuits: Annotated[
        list[str],
        typer.Argument(
            metavar="CIRCUIT ...",
            help="Circuit files, Parquet files (or one circuit: many.parquet#3), folders, RUN#id; at least two.",
        ),
    ],
    grain: GrainChoice = "edges",
    by: Annotated[
        str | None,
        typer.Option(
            help="What matches: positions (default for one prompt), components (for several), or roles."
        ),
    ] = None,
    show: Annotated[int, typer.Option(help="How many items to list.", min=0)] = 20,
    out: Annotated[
        str | None,
        typer.Option(help="A .json, .png, .pdf, .svg or .html file, or a folder for table, figure and page."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Compare circuits of several prompts, methods or checkpoints: shared nodes and edges, and those of one alone.

    The order counts: of checkpoints given from the first to the last, it is said which edges appear and disappear when.

    Examples:

      headtrace compare mary.json john.json

      headtrace compare runs/ioi#00001 runs/ioi#00002 --by roles --out compared

      headtrace compare step100.json step1000.json step10000.json --out emergence.png
    """
    from headtrace.families.compare import check_by, compare_circuits
    from headtrace.families.files import circuits_at
    from headtrace.families.population import check_grain

    _check_out(out)
    named = [each for source in circuits for each in circuits_at(source)]
    found = compare_circuits(
        [each.circuit for each in named],
        names=_short([each.name for each in named]),
        grain=check_grain(grain),
        by=None if by is None else check_by(by),
        roles=[each.roles for each in named],
    )
    for warning in found.warnings:
        options.warn(warning)
    if out is not None:
        _write(found, out)
    options.emit(found.to_dict(), as_json=json, show=lambda: _show(found, show), out=out)


def _check_out(out: str | None) -> None:
    """What the extension says, known before anything is computed."""
    if out is None:
        return
    ending = Path(out).suffix.lower()
    if os.path.isdir(out) or ends_like_a_folder(out) or not ending:
        options.check_folder_writable(out)
    elif ending in (".png", ".pdf", ".svg"):
        options.check_figure(out)
    elif ending in (".json", ".html"):
        options.check_writable(out)
    else:
        raise InputError(
            f"--out {out!r}: {ending} is no form of a comparison. End it in .json, .png, .pdf, .svg or .html, or "
            "give a folder."
        )


def _write(found: CircuitComparison, out: str) -> None:
    ending = "" if os.path.isdir(out) else Path(out).suffix.lower()
    if ending == ".json":
        found.write_json(out)
    elif ending == ".html":
        found.to_html(out)
    elif ending:
        found.plot(out)
    else:
        found.save(out)
    options.note(f"Wrote {out}" + ("" if ending else ": comparison.json, comparison.png, comparison.html"))


def _short(names: list[str]) -> list[str]:
    """Without the folder and extension that all share; a circuit that is given twice is numbered."""
    short = [Path(name).name.replace(".json", "") for name in names]
    short = short if len(set(short)) == len(short) else names
    return [name if short.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(short)]


def _show(found: CircuitComparison, rows: int) -> None:
    """How much is shared, what each circuit brings, then the items with the most influence."""
    from rich import box
    from rich.table import Table

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    kinds = ["node"] if found.grain == "components" else ["node", "edge"]
    shared = ", ".join(
        f"{found.shared.filter(kind=k).height} of {found.table.filter(kind=k).height} {k}s" for k in kinds
    )
    say(f"{len(found.names)} circuits, matched by {found.by}: {shared} are in all")
    for i, name in enumerate(found.names):
        told = [f"{found.exclusive(i).filter(kind=k).height} {k}s only here" for k in kinds]
        if len(found.names) > 2:
            told.append(f"{found.appearing(i).filter(kind=found.unit).height} {found.unit}s first here")
            told.append(f"{found.disappearing(i).filter(kind=found.unit).height} last here")
        say(f"  {i}: {name}: {', '.join(told)}")
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column(found.unit, no_wrap=True)
    for i in range(len(found.names)):
        table.add_column(str(i), justify="right", no_wrap=True)
    for row in found.table.filter(kind=found.unit).head(rows).to_dicts():
        cells = ("" if value is None else f"{value:.3f}" for value in row["influence"])
        table.add_row(options.token_text(row["item"]), *cells)
    if rows:
        options.show_table("Influence that passes through, by circuit", table)
