"""``headtrace intervene``, ``edges``, ``sufficiency`` and ``faithfulness``: circuits changed in the running model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from headtrace.cli import options
from headtrace.cli.failures import progress_bar
from headtrace.cli.output import Output, say, show_table
from headtrace.cli.request_options import exit_by_share, report_skipped, skipped_of
from headtrace.cli.verify import ReachChoice, ScopeChoice
from headtrace.errors import InputError
from headtrace.request import read_requests

if TYPE_CHECKING:
    import polars as pl

    from headtrace.causal import Sufficiency
    from headtrace.causal.experiments import EdgesIntoHead
    from headtrace.causal.faithfulness import Faithfulness

REACHES = {"both": ("local", "global"), "local": ("local",), "global": ("global",)}


def intervene(
    *,
    circuit: options.CircuitSource,
    source: str = typer.Option(help="The component that writes, like 'MLP 12 @13'."),
    target: str = typer.Option(help="The firing that reads, like 'L20H0 13->9'."),
    side: str = typer.Option(help="query or key."),
    factor: float = typer.Option(0.0, help="What the signal is multiplied by: 0 ablates, 2 boosts."),
    reach: ReachChoice = "local",
    scope: ScopeChoice = "claim",
    out: options.NumbersFile = None,
    models: options.CircuitModels,
    json: options.Json = False,
) -> None:
    """
    Examples:

      headtrace intervene circuit.json --source "MLP 12 @13" --target "L20H0 13->9" --side query
      headtrace intervene circuit.json --source "MLP 0 @9" --target "L8H1 9->3" --side query
          --factor 2 --reach global --scope token
      headtrace intervene many.parquet#3 --source "MLP 0 @9" --target "L8H1 9->3" --side key --json
    """
    from headtrace.circuits import read_circuit

    output = Output(json, out, [".json", ".tex"])
    found = read_circuit(circuit)
    from headtrace.causal import find_edge
    from headtrace.causal import intervene as change
    from headtrace.causal.effects import check_change

    check_change(factor, reach, scope)
    edge = find_edge(found, source, target, side)
    done = change(found, models.of(found), edge, factor=factor, reach=reach, scope=scope)  # type: ignore[arg-type]

    def table() -> pl.DataFrame:
        import polars as pl

        names = ("attention_before", "attention_after", "metric_before", "metric_after")
        return done.frame().with_columns(**{name: pl.lit(getattr(done, name)) for name in names})

    output.finish(done.to_dict, lambda: say(done.summary()), table=table)


# -- headtrace edges ---------------------------------------------------------------------------------------------


def edges(
    *,
    circuit: options.CircuitSource,
    head: str = typer.Argument(
        metavar="HEAD", help="A head such as L20H0, or one firing of it such as L20H0:13:9."
    ),
    reach: str = typer.Option(
        "both", help="local (only one head sees the change), global (every reader does), or both."
    ),
    scope: ScopeChoice = "claim",
    show: int = typer.Option(10, help="How many of the heaviest edges to list.", min=0),
    out: options.NumbersFile = None,
    png: options.Figure = None,
    models: options.CircuitModels,
    json: options.Json = False,
) -> None:
    """
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
    output = Output(json, out, [".json", ".tex"], figures=[png])
    circuits = read_circuits(circuit)
    require_edges_into(circuits, head)
    loaded = [models.of(each) for each in circuits]
    if any(each is not loaded[0] for each in loaded):
        raise InputError(
            f"{circuit!r} holds circuits of several models, but a head belongs to one. Give circuits of one model."
        )
    with progress_bar("Interventions") as progress:
        found = edges_into_head(
            circuits,
            loaded[0],
            head,
            reaches=REACHES[reach],  # type: ignore[arg-type]
            scope=scope,  # type: ignore[arg-type]
            progress=progress,
        )
    output.finish(found.to_dict, lambda: _show_edges(found, show), table=found.frame, plots=[found.plot])


def _show_edges(found: EdgesIntoHead, count: int) -> None:
    """Rank correlations, and the heaviest edges."""
    for row in found.correlations().to_dicts():
        falls = [
            f"of {name} {row[key]:.2f}"
            for key, name in (("attention", "attention"), ("metric", found.metric))
            if row[key] is not None and row[key] == row[key]
        ]
        ranked = "; rank correlation of weight with the fall " + " and ".join(falls) if falls else ""
        say(f"{found.head}, {row['reach']}: {row['edges']} edges ablated{ranked}")
    if count:
        heaviest = found.table.sort("weight", descending=True, maintain_order=True).head(count)
        columns = {
            "circuit": "{circuit}",
            "from": "{source}",
            "into": "{target}",
            "side": "{side}",
            "reach": "{reach}",
        }
        columns |= {
            "weight": "{weight:.4f}",
            "attention": "{attention:+.4f}",
            found.metric or "metric": "{metric:+.4f}",
        }
        show_table(heaviest.to_dicts(), columns, title="Change when ablated, heaviest first", left=5)


# -- headtrace sufficiency ---------------------------------------------------------------------------------------


def sufficiency(
    *,
    circuit: options.CircuitSource,
    counterfactual: str | None = typer.Option(
        None, help="A prompt with the same number of tokens, but other words where the answer is decided."
    ),
    counterfactual_ids: str | None = typer.Option(
        None, help="The counterfactual prompt as token ids: 1,2,3."
    ),
    baselines: bool = typer.Option(
        False,
        "--baselines",
        help="Compare with random, attention, attribution patching, integrated gradients, ACC++.",
    ),
    ablation: str = typer.Option(
        "counterfactual",
        help="What replaces the rest: counterfactual, or (without a counterfactual) mean or zero.",
    ),
    draws: int = typer.Option(4, help="Draws of random components.", min=1),
    seed: int = typer.Option(0, help="Seed of the random components."),
    out: str | None = typer.Option(
        None, help="Folder for sufficiency.json and sufficiency.png; or a .tex file for the table."
    ),
    models: options.CircuitModels,
    json: options.Json = False,
) -> None:
    """
    Sufficiency is 1 if the circuit alone gives the model's own metric, and 0 if it gives that of the counterfactual.
    It is above 1 if the circuit leaves out what opposes the answer. Necessity is the reverse: only the circuit's
    components are replaced.

    Examples:

      headtrace sufficiency circuit.json --counterfactual "When Anna and Tom went to the store, Emma gave a drink to"
      headtrace sufficiency circuit.json --counterfactual-ids 1,5,9 --baselines --out sufficiency
    """
    from headtrace.causal import sufficiency as measure
    from headtrace.circuits import read_circuit

    output = Output(json, out, [".tex"], folder=True)
    if counterfactual is not None and counterfactual_ids is not None:
        raise InputError("Give the counterfactual as text or as token ids (--counterfactual-ids), not both.")
    other = counterfactual if counterfactual_ids is None else options.parse_ids(counterfactual_ids)
    traced = read_circuit(circuit)
    model = models.of(traced)
    with progress_bar("Sets of components") as progress:
        found = measure(
            traced,
            model,
            other,
            baselines=baselines,
            ablation=ablation,  # type: ignore[arg-type]
            draws=draws,
            seed=seed,
            progress=progress,
        )
    output.finish(
        found.to_dict,
        lambda: _show_sufficiency(found),
        save=found.save,
        table=lambda: found.baselines,
        files="sufficiency.json, sufficiency.png",
    )


def _show_sufficiency(found: Sufficiency) -> None:
    say(found.summary())
    if found.compared:
        frame = found.baselines
        columns = {
            name: f"{{{name}:.3f}}" if kind.is_float() else f"{{{name}}}"
            for name, kind in frame.schema.items()
        }
        show_table(frame.to_dicts(), columns, title="Sufficiency by number kept")


# -- headtrace faithfulness --------------------------------------------------------------------------------------


def faithfulness(
    *,
    circuit: options.CircuitSource,
    ablation: str = typer.Option(
        "mean", help="What ablated components are replaced by: mean (the head's mean value) or zero."
    ),
    unit: str = typer.Option(
        "component",
        help="What is kept for a firing in the circuit: component (its one source), position or head.",
    ),
    mlps: str = typer.Option("keep", help="MLPs outside the circuit: keep or ablate."),
    reference: str | None = typer.Option(
        None,
        metavar="FILE.jsonl",
        help="Prompts to take the means over (text, tokens or messages, one per line).",
    ),
    controls: int = typer.Option(4, help="Random draws to compare with.", min=0),
    seed: int = typer.Option(0, help="Seed of the random draws."),
    out: options.NumbersFile = None,
    png: options.Figure = None,
    models: options.CircuitModels,
    json: options.Json = False,
) -> None:
    """
    Faithfulness is 1 if the circuit alone does everything that attention does, and 0 if it does no more than a model
    whose attention is ablated completely.

    Examples:

      headtrace faithfulness circuit.json
      headtrace faithfulness circuit.json --unit head --reference prompts.jsonl --png curve.png
      headtrace faithfulness circuit.json --ablation zero --controls 0 --json
    """
    from headtrace.causal.faithfulness import check_choices
    from headtrace.causal.faithfulness import faithfulness as measure
    from headtrace.circuits import read_circuit

    output = Output(json, out, [".json", ".tex"], figures=[png])
    check_choices(ablation, unit, mlps, controls, seed)
    lines = None if reference is None else read_requests(reference)
    traced = read_circuit(circuit)
    model = models.of(traced)
    recorded = None
    read = None if lines is None else lines.then(lambda each, _: each.token_ids(model))
    if read is not None:
        report_skipped(read)
        recorded = model.record(read.values, keep=("values", "mlp_writes"))
    with progress_bar("Runs of the model") as progress:
        found = measure(
            traced,
            model,
            ablation=ablation,  # type: ignore[arg-type]
            unit=unit,  # type: ignore[arg-type]
            mlps=mlps,  # type: ignore[arg-type]
            reference=recorded,
            controls=controls,
            seed=seed,
            progress=progress,
        )
    found = found if read is None else replace(found, skipped=read.skipped)
    output.finish(found.to_dict, lambda: _show_faithfulness(found), table=found.frame, plots=[found.plot])
    if read is not None:
        exit_by_share(*skipped_of([read]))


def _show_faithfulness(found: Faithfulness) -> None:
    """The summary, and the curve at a few sizes."""
    say(found.summary())
    curve = found.curve.to_dicts()
    step = max(1, -(-(len(curve) - 1) // 10))
    columns = {
        "firings kept": "{firings}",
        found.metric: "{metric:.3f}",
        "faithfulness": "{faithfulness:.3f}",
    }
    show_table([*curve[:-1:step], curve[-1]], columns | {"random firings": "{random:.3f}"}, left=0)
