"""``headtrace intervene``, ``edges``, ``sufficiency`` and ``faithfulness``: circuits changed in the running model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headtrace.cli import options
from headtrace.cli.output import Output, number, say, show_table
from headtrace.cli.progress import progress_bar
from headtrace.cli.request_options import read_prompt_file
from headtrace.cli.verify import ReachChoice, ScopeChoice
from headtrace.errors import InputError

if TYPE_CHECKING:
    from headtrace.causal import Sufficiency
    from headtrace.causal.experiments import EdgesIntoHead
    from headtrace.causal.faithfulness import Faithfulness

REACHES = {"both": ("local", "global"), "local": ("local",), "global": ("global",)}


def intervene(
    *,
    circuit: options.CircuitSource,
    source: Annotated[str, typer.Option(help="The component that writes, like 'MLP 12 @13'.")],
    target: Annotated[str, typer.Option(help="The firing that reads, like 'L20H0 13->9'.")],
    side: Annotated[str, typer.Option(help="query or key.")],
    factor: Annotated[
        float, typer.Option(help="What the signal is multiplied by: 0 ablates, 2 boosts.")
    ] = 0.0,
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

    output = Output(json, numbers=out)
    found = read_circuit(circuit)
    from headtrace.causal import find_edge
    from headtrace.causal import intervene as change
    from headtrace.causal.effects import check_change

    check_change(factor, reach, scope)
    edge = find_edge(found, source, target, side)
    done = change(found, models.of(found), edge, factor=factor, reach=reach, scope=scope)  # type: ignore[arg-type]
    output.finish(done.to_dict, lambda: say(done.summary()))


# -- headtrace edges ---------------------------------------------------------------------------------------------


def edges(
    *,
    circuit: options.CircuitSource,
    head: Annotated[
        str, typer.Argument(metavar="HEAD", help="A head like L20H0, or one firing of it like L20H0:13:9.")
    ],
    reach: Annotated[
        str, typer.Option(help="local (one head sees the change), global (every reader), or both.")
    ] = "both",
    scope: ScopeChoice = "claim",
    show: Annotated[int, typer.Option(help="How many of the heaviest edges to list.", min=0)] = 10,
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
    output = Output(json, numbers=out, figures=[png])
    circuits = read_circuits(circuit)
    require_edges_into(circuits, head)
    loaded = [models.of(each) for each in circuits]
    if any(each is not loaded[0] for each in loaded):
        raise InputError(f"{circuit!r} holds circuits of several models: a head is one model's. Give one's.")
    with progress_bar("Interventions") as progress:
        found = edges_into_head(
            circuits,
            loaded[0],
            head,
            reaches=REACHES[reach],  # type: ignore[arg-type]
            scope=scope,  # type: ignore[arg-type]
            progress=progress,
        )
    output.finish(found.to_dict, lambda: _show_edges(found, show), plots=[lambda path: found.plot(path)])


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
        heaviest = found.table.sort("weight", descending=True, maintain_order=True).head(count).to_dicts()
        rows = [
            (
                *(str(row[name]) for name in ("circuit", "source", "target", "side", "reach")),
                f"{row['weight']:.4f}",
                *(number(row[name], "+.4f") for name in ("attention", "metric")),
            )
            for row in heaviest
        ]
        names = ("circuit", "from", "into", "side", "reach", "weight", "attention", found.metric or "metric")
        show_table(names, rows, title="Change when ablated, heaviest first", left=5)


# -- headtrace sufficiency ---------------------------------------------------------------------------------------


def sufficiency(
    *,
    circuit: options.CircuitSource,
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
    models: options.CircuitModels,
    json: options.Json = False,
) -> None:
    """
    Sufficiency is 1 where the circuit alone gives the model's own answer, 0 where it gives that of the counterfactual;
    above 1, what opposes the answer was left out. Necessity is the reverse: only the circuit's components are replaced.

    Examples:

      headtrace sufficiency circuit.json --counterfactual "When Anna and Tom went to the store, Emma gave a drink to"

      headtrace sufficiency circuit.json --counterfactual-ids 1,5,9 --baselines --out sufficiency
    """
    from headtrace.causal import sufficiency as measure
    from headtrace.circuits import read_circuit

    output = Output(json, folder=out)
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
        files="sufficiency.json, sufficiency.png",
    )


def _show_sufficiency(found: Sufficiency) -> None:
    say(found.summary())
    if found.compared:
        rows = [
            tuple(f"{each:.3f}" if isinstance(each, float) else str(each or "") for each in row)
            for row in found.baselines.iter_rows()
        ]
        show_table(found.baselines.columns, rows, title="Sufficiency by number kept")


# -- headtrace faithfulness --------------------------------------------------------------------------------------


def faithfulness(
    *,
    circuit: options.CircuitSource,
    ablation: Annotated[
        str, typer.Option(help="What replaces what is ablated: mean (the head's mean value) or zero.")
    ] = "mean",
    unit: Annotated[
        str, typer.Option(help="What a firing keeps: component (its one source), position or head.")
    ] = "component",
    mlps: Annotated[str, typer.Option(help="MLPs outside the circuit: keep or ablate.")] = "keep",
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.jsonl", help="Prompts (text, tokens or messages, one per line) to take means over."
        ),
    ] = None,
    controls: Annotated[int, typer.Option(help="Random draws to compare with.", min=0)] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the random draws.")] = 0,
    out: options.NumbersFile = None,
    png: options.Figure = None,
    models: options.CircuitModels,
    json: options.Json = False,
) -> None:
    """
    Faithfulness is 1 if the circuit alone does all that attention does, and 0 if it does no more than nothing.

    Examples:

      headtrace faithfulness circuit.json

      headtrace faithfulness circuit.json --unit head --reference prompts.jsonl --png curve.png

      headtrace faithfulness circuit.json --ablation zero --controls 0 --json
    """
    from headtrace.causal.faithfulness import check_choices
    from headtrace.causal.faithfulness import faithfulness as measure
    from headtrace.circuits import read_circuit

    output = Output(json, numbers=out, figures=[png])
    check_choices(ablation, unit, mlps, controls, seed)
    lines = None if reference is None else read_prompt_file(reference)
    traced = read_circuit(circuit)
    model = models.of(traced)
    recorded = None
    if lines is not None:
        prompts = [each.token_ids(model) for each in lines.values]
        recorded = model.record(prompts, keep=("values", "mlp_writes"))
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
    output.finish(found.to_dict, lambda: _show_faithfulness(found), plots=[lambda path: found.plot(path)])


def _show_faithfulness(found: Faithfulness) -> None:
    """The summary, and the curve at a few sizes."""
    say(found.summary())
    curve = found.curve.to_dicts()
    step = max(1, -(-(len(curve) - 1) // 10))
    rows = [
        (str(row["firings"]), *(number(row[name]) for name in ("metric", "faithfulness", "random")))
        for row in [*curve[:-1:step], curve[-1]]
    ]
    show_table(("firings kept", found.metric, "faithfulness", "random firings"), rows, left=0)
