"""``headtrace faithfulness``: how much of the answer is left when only the circuit is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headtrace.cli import options
from headtrace.cli.export import CircuitSource
from headtrace.cli.options import console
from headtrace.cli.verify import ModelChoice, ModelsOf
from headtrace.lines import prompt_of, read_records

if TYPE_CHECKING:
    from headtrace.causal.faithfulness import Faithfulness
    from headtrace.models import Model, Recording


def register(app: typer.Typer) -> None:
    app.command("faithfulness")(faithfulness)


def faithfulness(
    circuit: CircuitSource,
    model: ModelChoice = None,
    ablation: Annotated[
        str, typer.Option(help="What stands for what is ablated: mean (the head's mean value) or zero.")
    ] = "mean",
    unit: Annotated[
        str, typer.Option(help="What a firing keeps: component (its one source), position or head.")
    ] = "component",
    mlps: Annotated[str, typer.Option(help="MLPs outside the circuit: keep or ablate.")] = "keep",
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.jsonl", help="Prompts (text or tokens, one per line) to take means over instead."
        ),
    ] = None,
    controls: Annotated[int, typer.Option(help="Random draws to compare with.", min=0)] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the random draws.")] = 0,
    out: options.NumbersFile = None,
    png: Annotated[
        str | None, typer.Option(help="Draw the curve into this file (.png, .pdf or .svg).")
    ] = None,
    json: options.Json = False,
    dtype: options.Dtype = "float32",
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
) -> None:
    """Keep only the circuit's attention and see how much of the answer is left; then take away only the circuit.

    Faithfulness is 1 if the circuit alone does all that attention does, and 0 if it does no more than nothing.

    Examples:

      headtrace faithfulness circuit.json

      headtrace faithfulness circuit.json --unit head --reference prompts.jsonl --png curve.png

      headtrace faithfulness circuit.json --ablation zero --controls 0 --json
    """
    from headtrace.causal.faithfulness import check_choices
    from headtrace.causal.faithfulness import faithfulness as measure
    from headtrace.circuits import read_circuit

    options.check_output(json, out)
    options.check_numbers(out)
    options.check_figure(png)
    check_choices(ablation, unit, mlps, controls, seed)
    asked = read_circuit(circuit)
    loaded = ModelsOf(model, dtype, device, device_map)(asked)
    with options.progress_bar("Runs of the model") as progress:
        found = measure(
            asked,
            loaded,
            ablation=ablation,  # type: ignore[arg-type]
            unit=unit,  # type: ignore[arg-type]
            mlps=mlps,  # type: ignore[arg-type]
            reference=None if reference is None else _recorded(loaded, reference),
            controls=controls,
            seed=seed,
            progress=progress,
        )
    options.emit(found.to_dict(), as_json=json, show=lambda: _show(found), out=out)
    if out is not None:
        options.write_json(out, found.to_dict())
    if png is not None:
        found.plot(png)
        options.note(f"Wrote {png}")


def _recorded(model: Model, path: str) -> Recording:
    prompts = [prompt_of(record, f"{path}, line {number}") for number, record in read_records(path)]
    return model.record(prompts, keep=("values", "mlp_writes"))


def _show(found: Faithfulness) -> None:
    """The summary, and the curve at a few sizes."""
    from rich import box
    from rich.table import Table

    console.print(found.summary(), markup=False, highlight=False, soft_wrap=True)
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in ("firings kept", found.metric, "faithfulness", "random firings"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = found.curve.to_dicts()
    step = max(1, -(-(len(rows) - 1) // 10))
    for row in [*rows[:-1:step], rows[-1]]:
        numbers = (row["metric"], row["faithfulness"], row["random"])
        table.add_row(str(row["firings"]), *("" if n is None else f"{n:.3f}" for n in numbers))
    console.print(table)
