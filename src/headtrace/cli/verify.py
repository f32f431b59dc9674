"""``headtrace verify``: every claim of a circuit, put to the test. ``headtrace bench``: methods side by side."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headtrace.cli import options
from headtrace.cli.failures import progress_bar
from headtrace.cli.output import Output, note, number, say, show_table, warn, write_json
from headtrace.cli.request_options import exit_by_share
from headtrace.errors import HeadtraceError, InputError
from headtrace.progress import scaled
from headtrace.writing import check_writable

if TYPE_CHECKING:
    import polars as pl

    from headtrace.causal import Report


ReachChoice = Annotated[
    str,
    typer.Option(help="local: only one head sees the change; global: every reader of the component does."),
]
ScopeChoice = Annotated[
    str,
    typer.Option(
        help="On the key side, remove the signal at every visible key, as traced (claim), or at one position (token)."
    ),
]
REFUSED = "REFUSED"
"""In place of a verdict: the circuit cannot be compared with this model at all."""
EXIT_CODES = {
    "PASS": 0,
    "FAIL": 1,
    REFUSED: 2,
    "NOTHING TO VERIFY": 3,
    "OTHER PRECISION": 4,
    "NOT REPRODUCED": 5,
}


def verify(
    *,
    circuit: options.CircuitSource,
    edges: str = typer.Option("all", help="Edges to measure: all, none, top:N (heaviest) or random:N."),
    controls: int = typer.Option(8, help="Draws of random channels per edge, as a control.", min=0),
    reach: ReachChoice = "local",
    scope: ScopeChoice = "claim",
    seed: int = typer.Option(0, help="Seed of the random channels."),
    show: int = typer.Option(10, help="How many of the strongest edges to list.", min=0),
    out: str | None = typer.Option(
        None,
        help="Folder for verification.json, edges.parquet, circuit.json and effects.png. For many circuits, "
        "one subfolder each. Or a .tex file for the table of edges (of predictions, if no edges were measured; of "
        "verdicts, for many circuits).",
    ),
    update: bool = typer.Option(
        False, "--update", help="Write the measured effects into the circuit file itself."
    ),
    counterfactual: str | None = typer.Option(
        None,
        help="Also test sufficiency against this prompt, with the same number of tokens.",
    ),
    models: options.CircuitModels,
    json: options.Json = False,
) -> None:
    """
    For every attending head in the circuit, the claimed query or key signals are removed in the running model, and
    the attention that is left is compared with the prediction. Every other number in the file that the model can
    reproduce is compared as well: attention, weights, the root, influence, flags, tokens. Then every edge is ablated
    and boosted, with random channels of the same head as a control.

    PASS means that the numbers reproduce. Whether the circuit is sufficient for the answer is reported separately. It
    is tested against the prompt of --counterfactual, or that of a difference circuit; otherwise it is "not tested".

    Exit code: 0 PASS, 1 FAIL, 3 NOTHING TO VERIFY (no prediction in the file), 4 OTHER PRECISION (the file was made
    in a different precision than the model runs in), 5 NOT REPRODUCED (no number is wrong, but tracing again gives
    other nodes or edges), 2 if the input cannot be used. For many circuits, the worst code counts.

    Examples:

      headtrace verify circuit.json
      headtrace verify circuits.parquet --edges none
      headtrace verify circuit.json --counterfactual "When Anna and Tom went to the store, Emma gave a drink to"
      headtrace verify circuit.json --edges top:20 --controls 4 --out verification
      headtrace verify circuit.json --reach global --scope token --update
    """
    from headtrace.causal import verify as verify_circuit
    from headtrace.causal.effects import check_options, choose_edges
    from headtrace.circuits.files import named_circuits

    check_options(controls, reach, scope, seed)
    output = Output(json, out, [".tex"], folder=True)
    named = named_circuits(circuit)
    choose_edges(named[0][1], edges)
    updated = _files_of(circuit, [name for name, _ in named]) if update else []
    how: Any = {"edges": edges, "controls": controls, "reach": reach, "scope": scope, "seed": seed}
    how["counterfactual"] = counterfactual
    tested: list[Tested] = []
    if len(named) == 1:
        name, only = named[0]
        model = models.of(only)
        with progress_bar("Interventions") as progress:
            tested.append(Tested(name, verify_circuit(only, model, progress=progress, **how)))
    else:
        with progress_bar("Circuits", len(named)) as progress:
            for place, (name, each) in enumerate(named):
                inside = scaled(progress, place, 1, len(named))
                try:  # a circuit that cannot be compared with its model does not keep the others from it
                    tested.append(Tested(name, verify_circuit(each, models.of(each), progress=inside, **how)))
                except HeadtraceError as error:
                    tested.append(Tested(name, error=str(error)))
                if not json:
                    say(str(tested[-1]))
                progress(place + 1, len(named))
    verdict = _overall(tested)
    content: dict[str, Any] = {"verdict": verdict, "circuits": [one.to_dict() for one in tested]}
    output.finish(
        tested[0].to_dict() if len(tested) == 1 else content,
        lambda: _show(tested, show),
        save=lambda folder: _save(tested, Path(folder)),
        table=lambda: _table(tested),
        files=_files(tested),
    )
    for file in updated:
        _update(file, tested)
    raise typer.Exit(EXIT_CODES[verdict])


@dataclass
class Tested:
    """One circuit of a source: what its verification reported, or why there was none."""

    name: str
    report: Report | None = None
    error: str | None = None

    @property
    def verdict(self) -> str:
        return REFUSED if self.report is None else self.report.verdict

    @property
    def why(self) -> str:
        return self.error or "" if self.report is None else self.report.why

    def to_dict(self) -> dict[str, Any]:
        found = {"verdict": self.verdict, "why": self.why} if self.report is None else self.report.to_dict()
        return {"circuit": self.name, **found}

    def __str__(self) -> str:
        enough = "" if self.report is None else f"; enough: {self.report.enough}"
        return f"{self.verdict}  {self.name}: {self.why}{enough}"


def _overall(tested: Sequence[Tested]) -> str:
    """One failure fails all; what could not be compared is neither a pass nor nothing."""
    from headtrace.causal import overall

    verdict = overall(one.report.verdict for one in tested if one.report is not None)
    refused = any(one.report is None for one in tested)
    return REFUSED if refused and verdict != "FAIL" else verdict


def _show(tested: Sequence[Tested], count: int) -> None:
    """The verdict; of a single circuit, the edges that move attention most, beside their random channels."""
    if len(tested) > 1:
        verdicts = Counter(one.verdict for one in tested)
        parts = ", ".join(f"{times} {verdict}" for verdict, times in verdicts.items())
        say(f"{_overall(tested)}: {len(tested)} circuits ({parts})")
        return
    from headtrace.causal.effects import mean

    report = tested[0].report
    assert report is not None
    say(report.summary())
    if count and report.effects:
        metric = "" if report.metric is None else f" and {report.metric} (metric)"
        shown = report.strongest(count)
        most = (
            ""
            if len(shown) == len(report.effects)
            else f", the {len(shown)} strongest of {len(report.effects)} edges"
        )
        title = f"Change of attention{metric} when ablated, and with random channels (mean){most}"
        columns = {
            "from": "{0.source}",
            "into": "{0.target}",
            "side": "{0.edge.side}",
            "weight": "{0.edge.weight:.4f}",
            "attention": "{0.ablate_attention:+.4f}",
            "attention,\nrandom": lambda effect: number(mean(effect.control_ablate_attention), "+.4f"),
            "metric": "{0.ablate_metric:+.4f}",
            "metric,\nrandom": lambda effect: number(mean(effect.control_ablate_metric), "+.4f"),
        }
        show_table(shown, columns, title=title, left=3)


# -- what is written -----------------------------------------------------------------------------------------


def _table(tested: Sequence[Tested]) -> pl.DataFrame:
    """Of one report what was measured of its edges, or else its predictions; of many the verdicts."""
    import polars as pl

    report = tested[0].report
    if len(tested) == 1 and report is not None:
        effects = ("ablate_attention", "control_ablate_attention", "ablate_metric", "control_ablate_metric")
        shown = ("source_name", "target_name", "side", "weight", *effects)
        return report.edges.select(shown) if report.effects else report.firings
    return pl.DataFrame([{"circuit": one.name, "verdict": one.verdict, "why": one.why} for one in tested])


def _files(tested: Sequence[Tested]) -> str:
    """What ``_save`` writes, in words."""
    if len(tested) > 1:
        return f"verdicts.json, circuit-00000/ to circuit-{len(tested) - 1:05d}/"
    figure = ", effects.png" if tested[0].report is not None and tested[0].report.effects else ""
    return f"verification.json, edges.parquet, circuit.json{figure}"


def _save(tested: Sequence[Tested], folder: Path) -> None:
    """The files of one report in the folder; of many, in a folder each, and all verdicts beside them."""
    for index, one in enumerate(tested):
        if one.report is None:
            continue
        place = folder if len(tested) == 1 else folder / f"circuit-{index:05d}"
        one.report.save(place)
        if one.report.effects:
            one.report.plot(place / "effects.png")
    if len(tested) > 1:
        lines = [{"circuit": one.name, "verdict": one.verdict, "why": one.why} for one in tested]
        write_json(str(folder / "verdicts.json"), {"verdict": _overall(tested), "circuits": lines})


def _files_of(source: str, names: Sequence[str]) -> list[str]:
    """The files that hold these circuits, all of which can be written."""
    if source == "-":
        raise InputError(
            "--update writes into the circuit file, and this one came from standard input: give the file instead of -."
        )
    files = list(dict.fromkeys(_file_of(name) for name in names))
    for file in files:
        if os.path.isdir(file):  # of a run, whose circuits stay as they were traced
            raise InputError(
                f"--update writes into files of circuits, and {file!r} is a run. Make a file of its circuits first: "
                f"`headtrace export {source} --out circuits.parquet`."
            )
        check_writable(file)
    return files


def _file_of(name: str) -> str:
    return name if os.path.lexists(name) else name.rpartition("#")[0]


def _update(file: str, tested: Sequence[Tested]) -> None:
    """Write measured effects into the file that the circuits came from; other circuits of a table do not change."""
    from headtrace.circuits import read_parquet, write_parquet

    mine = {one.name: one.report for one in tested if one.report is not None and _file_of(one.name) == file}
    if file in mine:
        mine[file].annotated().save(file)
    elif mine:
        circuits = [
            mine[name].annotated() if (name := f"{file}#{number}") in mine else circuit
            for number, circuit in enumerate(read_parquet(file))
        ]
        write_parquet(circuits, file)
    if mine:
        note(f"Wrote the measured effects into {file}")


def bench(
    *,
    model: options.ModelName,
    prompts: list[str] = typer.Option(
        help="A .jsonl file of prompts with answer, wrong and counterfactual, or a folder of such files; can be "
        "repeated."
    ),
    methods: str | None = typer.Option(
        None,
        help="Separated by commas, some of acc++, content, complete, difference, attribution patching, integrated "
        "gradients and random.",
    ),
    number: int = typer.Option(20, "--n", "-n", min=1, help="How many prompts of each file to use."),
    to: str | None = typer.Option(
        None, help="mib: write scores of edges for the MIB benchmark to --out x.json."
    ),
    out: str | None = typer.Option(
        None,
        help="Folder for bench.json, bench.parquet and bench.png; a table as .tex; with --to mib a .json.",
    ),
    place: options.ModelOptions,
    json: options.Json = False,
) -> None:
    """
    Each method ranks head components; the first 5, 10, 20 and 40 are kept, and all others are set to their values on
    the counterfactual prompt. A score of 1 means that the whole answer comes back. CPR is the area below that curve,
    CMD its distance from 1. The cost is in forward passes of the same prompt.

    Examples:

      headtrace bench smollm2-135m --prompts pairs/ --out bench
      headtrace bench gemma-3-270m --prompts ioi.jsonl --methods acc++,difference,random -n 50 --json
      headtrace bench smollm2-135m --prompts ioi.jsonl --methods difference --to mib --out ioi-edges.json
    """
    from headtrace.causal.bench import METHODS
    from headtrace.causal.bench import bench as measure
    from headtrace.writing import write_report

    if to not in (None, "mib"):
        raise InputError(f"There is no format {to!r} for scores: choose mib.")
    chosen = METHODS if methods is None else tuple(each.strip() for each in methods.split(","))
    if to == "mib" and (out is None or "difference" not in chosen):
        raise InputError(
            "--to mib writes flows of edges: give --out x.json, and difference among the methods."
        )
    output = Output(json, out, [".json"] if to == "mib" else [".tex"], folder=to is None)
    loaded = place.load(model)
    with progress_bar(f"Methods on {model}") as progress:
        found = measure(loaded, prompts, methods=chosen, n=number, progress=progress)
    columns = {"set": "{0[set]}", "method": "{0[method]}", "prompts": "{0[prompts]}"}
    columns |= {f"at {size}": f"{{0[at {size}]:.2f}}" for size in (5, 10, 20, 40)}
    columns |= {"CPR": "{0[cpr]:.2f}", "CMD": "{0[cmd]:.2f}", "cost": "{0[cost]:.1f}"}

    output.finish(
        found.to_dict,
        lambda: show_table(
            found.medians.to_dicts(),
            columns,
            title="Median sufficiency by components kept; cost in forward passes",
            left=2,
        ),
        save=found.save if to is None else lambda path: write_report(path, found.mib()),
        table=lambda: found.medians,
        files="bench.json, bench.parquet, bench.png",
    )
    for name, counts in found.passed.items():
        left = {why: count for why, count in counts.items() if why != "used"}
        if left:
            note(f"{name}: passed over {', '.join(f'{count} ({why})' for why, count in left.items())}")
    for name, lines in found.skipped.items():
        warn(
            f"{name}: {len(lines)} lines skipped; the first is line {lines[0]['line']}: {lines[0]['reason']}"
        )
    exit_by_share(sum(map(len, found.skipped.values())), found.lines)
