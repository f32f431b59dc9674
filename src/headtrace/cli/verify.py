"""``headtrace verify``: every claim of a circuit, put to the test in the running model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from headtrace.cli import options
from headtrace.cli.options import console

if TYPE_CHECKING:
    from headtrace.causal import Report
    from headtrace.circuits import Circuit
    from headtrace.models import Model

CircuitFile = Annotated[str, typer.Argument(metavar="CIRCUIT.json", help="A circuit file.")]
ModelChoice = Annotated[
    str | None, typer.Option("--model", help="Where the model is now (default: the circuit's model name).")
]
ReachChoice = Annotated[
    str, typer.Option(help="local: one head sees the change; global: every reader of the component does.")
]
ScopeChoice = Annotated[
    str,
    typer.Option(help="claim: on the key side at every visible key, as traced; token: at one position."),
]


def register(app: typer.Typer) -> None:
    app.command("verify")(verify)


def verify(
    circuit: CircuitFile,
    model: ModelChoice = None,
    edges: Annotated[
        str, typer.Option(help="Edges to measure: all, none, top:N (heaviest) or random:N.")
    ] = "all",
    controls: Annotated[int, typer.Option(help="Random-channel draws per edge.", min=0)] = 8,
    reach: ReachChoice = "local",
    scope: ScopeChoice = "claim",
    seed: Annotated[int, typer.Option(help="Seed of the random channels.")] = 0,
    show: Annotated[int, typer.Option(help="How many of the strongest edges to list.", min=0)] = 10,
    out: Annotated[
        str | None,
        typer.Option(help="Folder for verification.json, edges.parquet, circuit.json and effects.png."),
    ] = None,
    update: Annotated[
        bool, typer.Option("--update", help="Write the measured effects into the circuit file itself.")
    ] = False,
    dtype: options.Dtype = "float32",
    device: options.Device = "auto",
) -> None:
    """Put a circuit to the test: remove what it claims in the running model, and compare with what it predicts.

    For every firing and side the claimed signals are removed and the attention that the model then shows is compared
    with the prediction. Every edge is ablated and boosted, beside random channels of the same head.

    Examples:

      headtrace verify circuit.json

      headtrace verify circuit.json --edges top:20 --controls 4 --out verification

      headtrace verify circuit.json --reach global --scope token --update
    """
    from headtrace.circuits import load_circuit

    asked = load_circuit(circuit)
    loaded = load_model_of(asked, model, dtype, device)
    how = {"edges": edges, "controls": controls, "reach": reach, "scope": scope, "seed": seed}
    report = _run(asked, loaded, **how)
    console.print(report.summary(), markup=False, highlight=False, soft_wrap=True)
    if show and report.effects:
        console.print(_table(report, show))
    if out is not None:
        report.save(out)
        console.print(f"Wrote {out}: verification.json, edges.parquet, circuit.json", soft_wrap=True)
        if report.effects:
            report.plot(f"{out}/effects.png")
            console.print(f"Wrote {out}/effects.png", soft_wrap=True)
    if update:
        report.annotated().save(circuit)
        console.print(f"Wrote the measured effects into {circuit}", soft_wrap=True)


def load_model_of(circuit: Circuit, model: str | None, dtype: str, device: str) -> Model:
    """The model that was traced, by its name unless another place is given."""
    revision = circuit.model.revision if model is None else None
    return options.load_model(model or circuit.model.name, revision, dtype, device)


def _run(circuit: Circuit, model: Model, **how: Any) -> Report:
    from headtrace.causal import verify as put_to_the_test

    with options.progress_bar("Interventions") as progress:
        return put_to_the_test(circuit, model, progress=progress, **how)


def _table(report: Report, rows: int) -> Table:
    """The edges that move attention most, with the average of their random channels beside them."""
    from headtrace.causal.report import mean

    metric = "" if report.metric is None else f" and {report.metric} (metric)"
    table = Table(
        title=f"Change of attention{metric} when ablated, and with random channels (mean)",
        title_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for name in ("from", "into", "side"):
        table.add_column(name, no_wrap=True)
    for name in ("weight", "attention", "random", "metric", "random"):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    strongest = sorted(report.effects, key=lambda e: -abs(e.ablate_attention))[:rows]
    for effect in strongest:
        table.add_row(
            effect.source,
            effect.target,
            effect.edge.side,
            f"{effect.edge.weight:.4f}",
            *(
                "" if number is None else f"{number:+.4f}"
                for number in (
                    effect.ablate_attention,
                    mean(effect.control_ablate_attention),
                    effect.ablate_metric,
                    mean(effect.control_ablate_metric),
                )
            ),
        )
    return table
