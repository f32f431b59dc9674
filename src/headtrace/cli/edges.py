"""``headtrace edges``: every edge into one head, ablated one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headtrace.cli import options
from headtrace.cli.export import CircuitSource
from headtrace.cli.options import console
from headtrace.cli.verify import ModelChoice, ModelsOf, ScopeChoice
from headtrace.errors import InputError

if TYPE_CHECKING:
    from headtrace.causal.experiments import EdgesIntoHead

REACHES = {"both": ("local", "global"), "local": ("local",), "global": ("global",)}


def register(app: typer.Typer) -> None:
    app.command("edges")(edges)


def edges(
    circuit: CircuitSource,
    head: Annotated[
        str, typer.Argument(metavar="HEAD", help="A head like L20H0, or one firing of it like L20H0:13:9.")
    ],
    model: ModelChoice = None,
    reach: Annotated[
        str, typer.Option(help="local (one head sees the change), global (every reader), or both.")
    ] = "both",
    scope: ScopeChoice = "claim",
    show: Annotated[int, typer.Option(help="How many of the heaviest edges to list.", min=0)] = 10,
    out: options.NumbersFile = None,
    png: Annotated[
        str | None, typer.Option(help="Draw the ranked edges into this file (.png, .pdf or .svg).")
    ] = None,
    json: options.Json = False,
    dtype: options.Dtype = "float32",
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
) -> None:
    """Ablate every edge into one head, in one circuit or many: does the weight say what the edge does?

    Examples:

      headtrace edges circuit.json L20H0

      headtrace edges circuits.parquet L20H0 --reach local --png head.png

      headtrace edges circuit.json L20H0:13:9 --json
    """
    from headtrace.causal.effects import check_options
    from headtrace.causal.experiments import edges_into_head, require_edges_into
    from headtrace.circuits import read_circuits

    if reach not in REACHES:
        raise InputError(f"reach={reach!r}: expected one of {', '.join(map(repr, REACHES))}.")
    check_options(0, REACHES[reach][0], scope)
    options.check_output(json, out)
    options.check_numbers(out)
    options.check_figure(png)
    circuits = read_circuits(circuit)
    require_edges_into(circuits, head)
    models = ModelsOf(model, dtype, device, device_map)
    loaded = [models(each) for each in circuits]
    if any(each is not loaded[0] for each in loaded):
        raise InputError(f"{circuit!r} holds circuits of several models: a head is one model's. Give one's.")
    with options.progress_bar("Interventions") as progress:
        found = edges_into_head(
            circuits,
            loaded[0],
            head,
            reaches=REACHES[reach],  # type: ignore[arg-type]
            scope=scope,  # type: ignore[arg-type]
            progress=progress,
        )
    options.emit(found.to_dict(), as_json=json, show=lambda: _show(found, show), out=out)
    if out is not None:
        options.write_json(out, found.to_dict())
    if png is not None:
        found.plot(png)
        options.note(f"Wrote {png}")


def _show(found: EdgesIntoHead, rows: int) -> None:
    """Rank correlations, and the heaviest edges."""
    from rich import box
    from rich.table import Table

    for row in found.correlations().to_dicts():
        falls = [
            f"of {name} {row[key]:.2f}"
            for key, name in (("attention", "attention"), ("metric", found.metric))
            if row[key] is not None and row[key] == row[key]
        ]
        told = "; rank correlation of weight with the fall " + " and ".join(falls) if falls else ""
        line = f"{found.head}, {row['reach']}: {row['edges']} edges ablated{told}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in ("circuit", "from", "into", "side", "reach"):
        table.add_column(name, no_wrap=True)
    for name in ("weight", "attention", found.metric or "metric"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found.table.sort("weight", descending=True, maintain_order=True).head(rows).to_dicts():
        numbers = ("" if row[key] is None else f"{row[key]:+.4f}" for key in ("attention", "metric"))
        places = (str(row["circuit"]), row["source"], row["target"], row["side"], row["reach"])
        table.add_row(*places, f"{row['weight']:.4f}", *numbers)
    if rows:
        options.show_table("Change when ablated, heaviest first", table)
