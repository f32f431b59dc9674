"""``headtrace export``: circuits for other tools."""

from __future__ import annotations

from typing import Annotated

import typer

from headtrace.cli import options
from headtrace.cli.destinations import FORMATS, destination

CircuitSource = Annotated[
    str,
    typer.Argument(
        metavar="CIRCUIT",
        help="A circuit file, a Parquet file (or one circuit of it: many.parquet#3), a folder, a run (or one "
        "circuit of it: DIR#ID), - for standard input.",
    ),
]


def register(app: typer.Typer) -> None:
    app.command("export")(export)


def export(
    circuit: CircuitSource,
    out: Annotated[str, typer.Option(help="File to write (- for standard output), or a folder for many.")],
    to: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(FORMATS)} (default: by the extension of --out; .json is the circuit file)."
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Write circuits in the format of another tool.

    GraphML is read by Gephi, yEd and Cytoscape, networkx is node-link JSON, neuronpedia their attribution graph, dot is
    for Graphviz, Parquet is one table of edges.

    Examples:

      headtrace export circuit.json --out circuit.graphml

      headtrace export many.parquet#3 --to neuronpedia --out graph.json

      headtrace export circuits/ --out circuits.parquet
    """
    from headtrace.circuits import read_circuits

    options.check_output(json, out)
    destination(out, many=False, to=to).check()
    circuits = read_circuits(circuit)
    where = destination(out, many=len(circuits) > 1, to=to)
    told = where.write(circuits, force=True)
    content = {"out": out, "format": where.format, "circuits": len(circuits)}
    options.emit(content, as_json=json, show=lambda: None)
    if told:
        options.note(told)
