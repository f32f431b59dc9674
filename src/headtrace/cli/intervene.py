"""``headtrace intervene``: one edge of a circuit, changed in the running model."""

from __future__ import annotations

from typing import Annotated

import typer

from headtrace.cli import options
from headtrace.cli.export import CircuitSource
from headtrace.cli.options import console
from headtrace.cli.verify import ModelChoice, ModelsOf, ReachChoice, ScopeChoice


def register(app: typer.Typer) -> None:
    app.command("intervene")(intervene)


def intervene(
    circuit: CircuitSource,
    source: Annotated[str, typer.Option(help="The component that writes, like 'MLP 12 @13'.")],
    target: Annotated[str, typer.Option(help="The firing that reads, like 'L20H0 13->9'.")],
    side: Annotated[str, typer.Option(help="query or key.")],
    factor: Annotated[
        float, typer.Option(help="What the signal is multiplied by: 0 ablates, 2 boosts.")
    ] = 0.0,
    reach: ReachChoice = "local",
    scope: ScopeChoice = "claim",
    model: ModelChoice = None,
    out: options.NumbersFile = None,
    json: options.Json = False,
    dtype: options.Dtype = "float32",
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
) -> None:
    """Change the signal of one edge in the running model: attention and metric before and after.

    Examples:

      headtrace intervene circuit.json --source "MLP 12 @13" --target "L20H0 13->9" --side query

      headtrace intervene circuit.json --source "MLP 0 @9" --target "L8H1 9->3" --side query
      --factor 2 --reach global --scope token

      headtrace intervene many.parquet#3 --source "MLP 0 @9" --target "L8H1 9->3" --side key --json
    """
    from headtrace.circuits import read_circuit

    options.check_output(json, out)
    options.check_numbers(out)
    asked = read_circuit(circuit)
    from headtrace.causal import find_edge
    from headtrace.causal import intervene as change
    from headtrace.causal.effects import check_change

    check_change(factor, reach, scope)
    edge = find_edge(asked, source, target, side)
    loaded = ModelsOf(model, dtype, device, device_map)(asked)
    done = change(asked, loaded, edge, factor=factor, reach=reach, scope=scope)  # type: ignore[arg-type]
    content = done.to_dict()
    options.emit(
        content,
        as_json=json,
        show=lambda: console.print(done.summary(), markup=False, highlight=False, soft_wrap=True),
        out=out,
    )
    if out is not None:
        options.write_json(out, content)
