"""``headtrace import``: circuits of other tools as circuits of headtrace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headtrace.cli import options
from headtrace.cli.destinations import destination
from headtrace.cli.output import check_output, emit, note
from headtrace.errors import InputError

if TYPE_CHECKING:
    from headtrace.circuits import Circuit


def import_(
    *,
    files: list[str] = typer.Argument(
        metavar="FILE ...", help="GraphML, JSON or a Parquet table of edges; or folders of such files."
    ),
    out: str = typer.Option(help="Where to write: .parquet for many, .json for one, or a folder."),
    model: str | None = typer.Option(
        None, "--model", help="The model's name, where a file does not say it; in a table: only this model."
    ),
    where: list[str] = typer.Option(
        [], "--where", help="Rows of a table: task=ioi, prompt=12 (may be given again)."
    ),
    json: options.Json = False,
) -> None:
    """
    What such files lack (token ids, influence, weights of the model) stays empty: merge, families, compare and view
    need none of it. Graphs that `headtrace export` wrote come back as they were.

    Examples:

      headtrace import graphs/ --model gpt2-small --out acc.parquet
      headtrace import circuits-2025.parquet --model gpt2-small --where task=ioi --out ioi.parquet
      headtrace import dallas-austin.json --out dallas.json
    """
    check_output(json, out)
    destination(out, many=False).check()
    chosen = dict(each.split("=", 1) for each in where if "=" in each)
    if len(chosen) != len(where):
        raise InputError("--where takes COLUMN=VALUE, once for each column, such as task=ioi.")
    found = [
        each
        for name in files
        for path in (_inside(Path(name)) if Path(name).is_dir() else [Path(name)])
        for each in _read(path, model, chosen)
    ]
    target = destination(out, many=len(found) > 1)
    written = target.write(found, force=True)
    edges = sum(len(each.edges) for each in found)
    emit({"out": out, "circuits": len(found), "edges": edges}, as_json=json, show=lambda: None)
    note(f"{len(found)} circuits, {edges} edges. {written}".rstrip())


def _read(path: Path, model: str | None, where: dict[str, str]) -> list[Circuit]:
    from headtrace.circuits import imported

    if path.suffix.lower() == ".parquet":
        return imported(path, where=({} if model is None else {"model": model}) | where)
    return imported(path, model=model, where=where)


def _inside(folder: Path) -> list[Path]:
    """Files of a folder that may hold a graph, in the order of their names."""
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() in (".graphml", ".json"))
    if not found:
        raise InputError(f"The folder {str(folder)!r} holds no GraphML or JSON files.")
    return found
