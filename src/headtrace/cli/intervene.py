"""``headtrace intervene``: one edge of a circuit, changed in the running model."""

from __future__ import annotations

from typing import Annotated

import typer

from headtrace.cli import options
from headtrace.cli.options import console
from headtrace.cli.verify import CircuitFile, ModelChoice, ReachChoice, ScopeChoice, load_model_of


def register(app: typer.Typer) -> None:
    app.command("intervene")(intervene)


def intervene(
    circuit: CircuitFile,
    source: Annotated[str, typer.Option(help="The component that writes, like 'MLP 12 @13'.")],
    target: Annotated[str, typer.Option(help="The firing that reads, like 'L20H0 13->9'.")],
    side: Annotated[str, typer.Option(help="query or key.")],
    factor: Annotated[
        float, typer.Option(help="What the signal is multiplied by: 0 ablates, 2 boosts.")
    ] = 0.0,
    reach: ReachChoice = "local",
    scope: ScopeChoice = "claim",
    model: ModelChoice = None,
    json_file: Annotated[str | None, typer.Option("--json", help="Write the numbers as JSON.")] = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "auto",
) -> None:
    """Change the signal of one edge in the running model: attention and metric before and after.

    Examples:

      headtrace intervene circuit.json --source "MLP 12 @13" --target "L20H0 13->9" --side query

      headtrace intervene circuit.json --source "MLP 0 @9" --target "L8H1 9->3" --side query
      --factor 2 --reach global --scope token
    """
    from headtrace.circuits import load_circuit

    asked = load_circuit(circuit)
    from headtrace.causal import find_edge
    from headtrace.causal import intervene as change
    from headtrace.causal.verify import check_options

    check_options(0, reach, scope)
    edge = find_edge(asked, source, target, side)
    loaded = load_model_of(asked, model, dtype, device)
    done = change(asked, loaded, edge, factor=factor, reach=reach, scope=scope)  # type: ignore[arg-type]
    console.print(done.summary(), markup=False, highlight=False, soft_wrap=True)
    if json_file is not None:
        options.write_json(json_file, done.to_dict())
