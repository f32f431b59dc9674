"""``headtrace families``, ``signals`` and ``compare``: which circuits are alike, and in what they differ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headtrace.cli import options
from headtrace.cli.failures import progress_bar
from headtrace.cli.output import Output, say, show_table, warn
from headtrace.cli.request_options import PromptsFile, exit_by_share, report_skipped, skipped_of
from headtrace.errors import InputError
from headtrace.request import TraceRequest, read_requests
from headtrace.vocabulary import head_name

if TYPE_CHECKING:
    from headtrace.families import (
        CircuitComparison,
        Families,
        FamiliesFile,
        RunComparison,
        SharedSteps,
        SignalComparison,
    )
    from headtrace.families.compare import By

GrainChoice = Annotated[
    str, typer.Option(help="What circuits are compared by: components, edges or edge-channel.")
]


def families(
    *,
    run: str = typer.Argument(
        metavar="RUN", help="A run folder, a Parquet file of circuits, or a folder of circuit files."
    ),
    grain: GrainChoice = "edge-channel",
    n: int | None = typer.Option(
        None,
        "--n",
        help="The number of families (default: chosen by silhouette, a shuffled control and stability).",
    ),
    distance: float | None = typer.Option(
        None, help="Instead of --n: do not merge groups whose mean distance is larger than this."
    ),
    k_max: int = typer.Option(10, help="The largest number of families to try.", min=1),
    ablate: bool = typer.Option(
        False,
        "--ablate",
        help="Ablate each family's exclusive edges, on its own prompts and on those of other families.",
    ),
    prompts: int = typer.Option(20, help="With --ablate: the number of prompts of each family.", min=1),
    seed: int = typer.Option(0, help="Seed of samples and controls.", min=0),
    out: str | None = typer.Option(
        None,
        help="Folder for families.json, clusters.png, stability.png, representatives.html (and ablation.png); or a "
        ".tex file for the table.",
    ),
    models: options.CircuitModels,
    json: options.Json = False,
) -> None:
    """
    Without --n, headtrace picks the number of families with the highest silhouette, among those that separate better
    than chance and are stable in bootstrap samples. If there is none, all circuits are one family.

    Examples:

      headtrace families runs/ioi --out families
      headtrace families circuits.parquet --grain edges --n 2 --json
      headtrace families runs/ioi --ablate --prompts 50 --out families
    """
    from headtrace.families.population import check_grain
    from headtrace.families.result import find_families

    compared_by = check_grain(grain)
    output = Output(json, out, [".tex"], folder=True)
    found = find_families(run, compared_by, n=n, distance=distance, k_max=k_max, seed=seed)
    files = "families.json, clusters.png, stability.png, representatives.html"
    if ablate:
        model = models.of(found.population.circuit(found.population.ids[0]))
        with progress_bar("Prompts") as progress:
            ablated = found.ablate_exclusive(model, prompts=prompts, seed=seed, progress=progress)
        found = found.with_ablation(ablated)
        files += ", ablation.png"
    shared = _shared_steps(run, found)
    if shared is not None:
        found = found.with_steps(shared)
    content = found.file
    output.finish(
        content.to_dict,
        lambda: _show_families(found, content),
        save=found.save,
        table=found.table,
        files=files,
    )


def _shared_steps(place: str, found: Families) -> SharedSteps | None:
    """The steps of each family, where the circuits are a run's that kept mechanisms."""
    from headtrace.families import shared_steps
    from headtrace.families.files import run_at

    run = run_at(place)
    return None if run is None or "steps" not in run.manifest.tables else shared_steps(run, found.labels)


def _show_families(found: Families, content: FamiliesFile) -> None:
    """How many there are and why, then one line per family, agreement and stability."""
    say(f"{len(found.family)} circuits by {found.grain}: {found.choice}")
    if found.population.left_out:
        say(
            f"{len(found.population.left_out)} prompts left out: they failed, or their circuits have no edges."
        )
    stable = {row["family"]: row for row in (content.more or {})["stability"]["families"]}
    rows = [
        {"edges": None, "members": None} | stable.get(row["family"], {}) | row
        for row in found.table().to_dicts()
    ]
    columns = {"family": "{family}", "circuits": "{circuits}", "exclusive edges": "{exclusive}"}
    columns |= {"stability": "{edges:.2f}", "members": "{members:.2f}", "representative": "{representative}"}
    show_table(rows, columns, left=0)
    for name, agreed in content.agreement.items():
        say(f"{name}: ARI {agreed['ari']:.3f}, NMI {agreed['nmi']:.3f}, p {agreed['p']:.3g}")
    if found.ablated is not None:
        for row in found.ablated.contrasts().to_dicts():
            low, high = row["difference_low"], row["difference_high"]
            interval = "" if low is None else f" ({low:+.3f} to {high:+.3f})"
            what = f"{found.ablated.metric} on own prompts minus others': {row['difference']:+.3f}{interval}"
            say(f"{row['edges']} exclusive edges of family {row['edges_of']} ablated, {what}")
    if found.steps is not None:
        say(found.steps.summary())


# -- headtrace signals -------------------------------------------------------------------------------------------

Side = Annotated[
    str,
    typer.Argument(
        metavar="CIRCUIT",
        help="A circuit (c.json, many.parquet#3, RUN#id), many (a table, a folder), or a family (RUN#2).",
    ),
]


def signals(
    *,
    a: Side,
    b: Side,
    families: str | None = typer.Option(
        None,
        help="Folder with families.json, so that SOURCE#2 is family 2 (default: the folder 'families' of the run).",
    ),
    most: int = typer.Option(50, help="At most this many circuits of each side, drawn at random.", min=1),
    seed: int = typer.Option(0, help="Seed of samples and intervals.", min=0),
    out: str | None = typer.Option(
        None, help="Folder for signals.json and signals.png; or a .tex file for the table."
    ),
    models: options.CircuitModels,
    json: options.Json = False,
) -> None:
    """
    A cosine near 1 means that the head looks for the same thing in both, near 0 for something else, and below 0 for
    the opposite. The control is the same head in two circuits of one side.

    Examples:

      headtrace signals mary.json john.json
      headtrace signals circuits.parquet#1 circuits.parquet#2 --families families
      headtrace signals runs/ioi#1 runs/ioi#2 --out signals
    """
    from headtrace.families.files import circuit_group
    from headtrace.families.head_signals import compare_signals

    output = Output(json, out, [".tex"], folder=True)
    one, other = (circuit_group(each, families, most=most, seed=seed) for each in (a, b))
    model = models.of(one.circuits[0])
    with progress_bar("Circuits") as progress:
        found = compare_signals(
            one.circuits,
            other.circuits,
            model,
            names=(one.name, other.name),
            seed=seed,
            progress=progress,
        )
    output.finish(
        found.to_dict,
        lambda: _show_signals(found),
        save=found.save,
        table=found.frame,
        files="signals.json, signals.png",
    )


def _show_signals(found: SignalComparison) -> None:
    """Heads that do the same, something else, the opposite."""
    sides = [
        f"{name} ({count} circuit{'s' if count > 1 else ''})"
        for name, count in zip(found.names, found.circuits, strict=True)
    ]
    say(f"{' and '.join(sides)}: {found.table.height} head sides in both")
    columns = {"head": lambda row: head_name(row["layer"], row["head"]), "side": "{side}"}
    columns |= {name: f"{{{name}:+.3f}}" for name in ("cosine", "low", "high", "control")}
    columns["reads"] = lambda row: found.verdict(row["cosine"], row["control"], row["in_a"], row["in_b"])
    rows = found.table.sort("cosine", descending=True, maintain_order=True).to_dicts()
    show_table(rows, columns, left=2)


# -- headtrace compare -------------------------------------------------------------------------------------------


def compare(
    *,
    circuits: list[str] = typer.Argument(
        metavar="CIRCUIT|RUN|MODEL ...",
        help="Circuit files, Parquet files (or one circuit: many.parquet#3), folders, RUN#id; at least two. Two runs, "
        "or with --prompts two models, are compared prompt by prompt.",
    ),
    prompts: PromptsFile = None,
    paths: str | None = typer.Option(None, help="With --prompts: what is followed, as for run."),
    grain: GrainChoice = "edges",
    by: str | None = typer.Option(
        None,
        help="What matches: positions (default for one prompt), components (for several), or roles (default for runs "
        "that have them).",
    ),
    show: int = typer.Option(20, help="How many items to list.", min=0),
    out: str | None = typer.Option(
        None,
        help="A .json, .tex, .png, .pdf, .svg or .html file, or a folder for table, figure and page (and runs; of runs "
        "no .html).",
    ),
    place: options.ModelOptions,
    json: options.Json = False,
) -> None:
    """
    The order matters: given checkpoints from first to last, it shows when edges appear and disappear. For two runs,
    it shows how often each node and edge is in each of them, with intervals. Prompts are paired by their ids.

    Examples:

      headtrace compare mary.json john.json
      headtrace compare runs/base runs/tuned --out compared
      headtrace compare smollm2-135m ./finetuned --prompts prompts.jsonl --out changed
      headtrace compare runs/ioi#00001 runs/ioi#00002 --by roles --out compared
      headtrace compare step100.json step1000.json step10000.json --out emergence.png
    """
    from headtrace.families.compare import check_by, compare_circuits
    from headtrace.families.files import circuits_at, run_at
    from headtrace.families.population import check_grain

    matched = None if by is None else check_by(by)
    runs: list[Any] = [] if prompts is not None or len(circuits) != 2 else [run_at(each) for each in circuits]
    if paths is not None and prompts is None:
        raise InputError("--paths goes with --prompts: circuits and runs were traced already.")
    if prompts is not None or (runs and all(each is not None for each in runs)):
        output = Output(json, out, [".json", ".tex", ".png", ".pdf", ".svg"], folder=True)
        if runs:
            from headtrace.families.compare_runs import compare_runs

            _finish_runs(output, compare_runs(runs[0], runs[1], by=matched), show)
        else:
            _compare_models(output, circuits, str(prompts), place, paths, matched, show)
        return
    output = Output(json, out, [".json", ".png", ".pdf", ".svg", ".html", ".tex"], folder=True)
    named = [each for source in circuits for each in circuits_at(source)]
    found = compare_circuits(
        [each.circuit for each in named],
        names=_short([each.name for each in named]),
        grain=check_grain(grain),
        by=matched,
        roles=[each.roles for each in named],
    )
    for warning in found.warnings:
        warn(warning)
    writers = {".json": found.write_json, ".html": found.to_html, "": found.save}
    output.finish(
        found.to_dict,
        lambda: _show_comparison(found, show),
        save=writers.get(output.ending, found.plot),
        table=found.frame,
        files="comparison.json, comparison.png, comparison.html",
    )


def _compare_models(
    output: Output,
    names: list[str],
    prompts: str,
    place: options.ModelOptions,
    paths: str | None,
    by: By | None,
    show: int,
) -> None:
    """Trace two models on one file of prompts, and compare."""
    from headtrace.families.compare_runs import compare_models

    if len(names) != 2:
        raise InputError(
            f"--prompts compares two models, and there are {len(names)}: give a base model and another."
        )
    lines = read_requests(prompts)
    report_skipped(lines)
    TraceRequest.create("checks the options", paths=paths)
    base, other = (place.load(each) for each in names)
    examples: Any = lines.then(lambda each, _: each.to_json())
    kept = output.out if output.ending == "" else None
    short = _short(names)
    with progress_bar("Two models", 100) as progress:
        found = compare_models(
            base, other, examples, names=(short[0], short[1]), by=by, out=kept, progress=progress, paths=paths
        )
    _finish_runs(output, found, show)
    exit_by_share(*skipped_of([lines]))


def _finish_runs(output: Output, found: RunComparison, show: int) -> None:
    for warning in found.warnings:
        warn(warning)
    writers = {".json": found.write_json, "": found.save}
    signals = "" if found.signals is None else ", signals.png"
    output.finish(
        found.to_dict,
        lambda: _show_runs(found, show),
        save=writers.get(output.ending, found.plot),
        table=found.frame,
        files=f"comparison.json, comparison.png{signals}",
    )


def _show_runs(found: RunComparison, count: int) -> None:
    """What was compared, then the items that differ most, and the heads that read something else."""
    import polars as pl

    say(found.summary())
    columns: dict[str, Any] = {
        "item": "{item}",
        "a": "{a:.0%}",
        "b": "{b:.0%}",
        "difference": "{difference:+.0%}",
    }
    columns |= {"95 %": "{low:+.0%} to {high:+.0%}", "q": "{q:.2g}"}
    for kind in ("step", "node", "edge"):
        rows = found.table.filter(kind=kind).filter(pl.col("difference") != 0).head(count).to_dicts()
        if rows:
            show_table(rows, columns, title=f"{kind.capitalize()}s that differ most, as shares of prompts")
    if found.signals is not None and count:
        other = found.signals.frame().filter(pl.col("reads").is_in(["something else", "the opposite"]))
        if other.height:
            show_table(
                other.head(count).to_dicts(),
                {
                    "head": "{name}",
                    "side": "{side}",
                    "cosine": "{cosine:+.2f}",
                    "control": "{control:+.2f}",
                    "reads": "{reads}",
                },
                title="Heads that read something else",
                left=2,
            )


def _short(names: list[str]) -> list[str]:
    """Without folder and extension, where that leaves them different; a circuit that is given twice is numbered."""
    short = [Path(name).name.replace(".json", "") for name in names]
    short = short if len(set(short)) == len(short) else names
    return [name if short.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(short)]


def _show_comparison(found: CircuitComparison, count: int) -> None:
    """How much is shared, what each circuit has alone, then the items with the most influence."""
    kinds = ["node"] if found.grain == "components" else ["node", "edge"]
    shared = ", ".join(
        f"{found.shared.filter(kind=k).height} of {found.table.filter(kind=k).height} {k}s" for k in kinds
    )
    say(f"{len(found.names)} circuits, matched by {found.by}: {shared} are in all")
    for i, name in enumerate(found.names):
        parts = [f"{found.exclusive(i).filter(kind=k).height} {k}s only here" for k in kinds]
        if len(found.names) > 2:
            parts.append(f"{found.appearing(i).filter(kind=found.unit).height} {found.unit}s first here")
            parts.append(f"{found.disappearing(i).filter(kind=found.unit).height} last here")
        say(f"  {i}: {name}: {', '.join(parts)}")
    if count:
        columns = {found.unit: "{item}"}
        columns |= {str(i): f"{{influence[{i}]:.3f}}" for i in range(len(found.names))}
        rows = found.table.filter(kind=found.unit).head(count).to_dicts()
        show_table(rows, columns, title="Influence that passes through, by circuit")
