"""``headtrace signals``: do heads read the same in two circuits, or in two families?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headtrace.cli import options
from headtrace.cli.options import console
from headtrace.cli.verify import ModelChoice, ModelsOf

if TYPE_CHECKING:
    from headtrace.families import SignalComparison

Side = Annotated[
    str,
    typer.Argument(
        metavar="CIRCUIT",
        help="A circuit (c.json, many.parquet#3, RUN#id), many (a table, a folder), or a family (RUN#2).",
    ),
]


def register(app: typer.Typer) -> None:
    app.command("signals")(signals)


def signals(
    a: Side,
    b: Side,
    families: Annotated[
        str | None,
        typer.Option(
            help="Folder with families.json, so that SOURCE#2 is family 2 (default: the folder 'families' of the run)."
        ),
    ] = None,
    most: Annotated[
        int, typer.Option(help="At most so many circuits of each side, drawn at random.", min=1)
    ] = 50,
    seed: Annotated[int, typer.Option(help="Seed of samples and intervals.", min=0)] = 0,
    out: Annotated[str | None, typer.Option(help="Folder for signals.json and signals.png.")] = None,
    model: ModelChoice = None,
    json: options.Json = False,
    dtype: options.Dtype = "float32",
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
) -> None:
    """Compare what each head reads in two circuits or families: cosines of its summed query and key signals.

    Near 1 a head looks for the same, near 0 for something else, below 0 for the opposite. The control is the same head
    in two circuits of one side.

    Examples:

      headtrace signals mary.json john.json

      headtrace signals circuits.parquet#1 circuits.parquet#2 --families families

      headtrace signals runs/ioi#1 runs/ioi#2 --out signals
    """
    from headtrace.families.files import circuit_group
    from headtrace.families.head_signals import compare_signals

    if out is not None:
        options.check_folder_writable(out)
    sides = [circuit_group(each, families, most=most, seed=seed) for each in (a, b)]
    loaded = ModelsOf(model, dtype, device, device_map)(sides[0].circuits[0])
    with options.progress_bar("Circuits") as progress:
        found = compare_signals(
            sides[0].circuits,
            sides[1].circuits,
            loaded,
            names=(sides[0].name, sides[1].name),
            seed=seed,
            progress=progress,
        )
    if out is not None:
        found.save(Path(out))
        options.note(f"Wrote {out}: signals.json, signals.png")
    options.emit(found.to_dict(), as_json=json, show=lambda: _show(found))


def _show(found: SignalComparison) -> None:
    """Heads that do the same, something else, the opposite."""
    from rich import box
    from rich.table import Table

    from headtrace.vocabulary import head_name

    told = [
        f"{name} ({count} circuit{'s' if count > 1 else ''})"
        for name, count in zip(found.names, found.circuits, strict=True)
    ]
    console.print(
        f"{' and '.join(told)}: {found.table.height} head sides in both", markup=False, highlight=False
    )
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in ("head", "side"):
        table.add_column(name, no_wrap=True)
    for name in ("cosine", "low", "high", "control"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("reads", no_wrap=True)
    for row in found.table.sort("cosine", descending=True, maintain_order=True).to_dicts():
        numbers = (
            "" if row[key] is None else f"{row[key]:+.3f}" for key in ("cosine", "low", "high", "control")
        )
        table.add_row(
            head_name(row["layer"], row["head"]), row["side"], *numbers, found.verdict(row["cosine"])
        )
    console.print(table)
