"""``headtrace sufficiency``: is a circuit enough, and is it needed?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from headtrace.cli import options
from headtrace.cli.export import CircuitSource
from headtrace.cli.options import console
from headtrace.cli.verify import ModelChoice, ModelsOf

if TYPE_CHECKING:
    from headtrace.causal import Sufficiency


def register(app: typer.Typer) -> None:
    app.command("sufficiency")(sufficiency)


def sufficiency(
    circuit: CircuitSource,
    counterfactual: Annotated[
        str | None,
        typer.Option(help="A prompt of as many tokens, with other words where the answer is decided."),
    ] = None,
    counterfactual_ids: Annotated[
        str | None, typer.Option(help="The counterfactual prompt as token ids: 1,2,3.")
    ] = None,
    baselines: Annotated[
        bool,
        typer.Option(
            "--baselines",
            help="Compare with random, attention, attribution patching, integrated gradients, ACC++.",
        ),
    ] = False,
    ablation: Annotated[
        str,
        typer.Option(
            help="What replaces the rest: counterfactual, or (without a counterfactual) mean or zero."
        ),
    ] = "counterfactual",
    draws: Annotated[int, typer.Option(help="Draws of random components.", min=1)] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the random components.")] = 0,
    out: Annotated[str | None, typer.Option(help="Folder for sufficiency.json and sufficiency.png.")] = None,
    model: ModelChoice = None,
    json: options.Json = False,
    dtype: options.Dtype = "float32",
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
) -> None:
    """Keep only a circuit's head components, give all others what they had on a counterfactual prompt: what is left?

    Sufficiency is 1 where the circuit alone gives the model's own answer, 0 where it gives that of the counterfactual;
    above 1, what opposes the answer was left out. Necessity is the reverse: only the circuit's components are replaced.

    Examples:

      headtrace sufficiency circuit.json --counterfactual "When Anna and Tom went to the store, Emma gave a drink to"

      headtrace sufficiency circuit.json --counterfactual-ids 1,5,9 --baselines --out sufficiency
    """
    from headtrace.causal import sufficiency as measure
    from headtrace.circuits import read_circuit
    from headtrace.errors import InputError

    if out is not None:
        options.check_folder_writable(out)
    if counterfactual is not None and counterfactual_ids is not None:
        raise InputError("Give the counterfactual as text or as token ids (--counterfactual-ids), not both.")
    other = counterfactual if counterfactual_ids is None else options.parse_ids(counterfactual_ids)
    asked = read_circuit(circuit)
    loaded = ModelsOf(model, dtype, device, device_map)(asked)
    with options.progress_bar("Sets of components") as progress:
        found = measure(
            asked,
            loaded,
            other,
            baselines=baselines,
            ablation=ablation,  # type: ignore[arg-type]
            draws=draws,
            seed=seed,
            progress=progress,
        )
    if out is not None:
        found.save(out)
        options.note(f"Wrote {out}: sufficiency.json, sufficiency.png")
    options.emit(found.to_dict(), as_json=json, show=lambda: _show(found))


def _show(found: Sufficiency) -> None:
    console.print(found.summary(), markup=False, highlight=False, soft_wrap=True)
    if found.compared:
        console.print(_table(found))


def _table(found: Sufficiency) -> Table:
    """The circuit beside its baselines."""
    rows = found.baselines
    table = Table(
        title="Sufficiency by number kept", title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0)
    )
    for name in rows.columns:
        right = name != "ranking"
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for row in rows.iter_rows():
        table.add_row(*(f"{each:.3f}" if isinstance(each, float) else str(each or "") for each in row))
    return table
