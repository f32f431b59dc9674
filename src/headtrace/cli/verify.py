"""``headtrace verify``: every claim of a circuit, put to the test in the running model."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headtrace.cli import options
from headtrace.cli.export import CircuitSource
from headtrace.cli.options import console
from headtrace.errors import HeadtraceError, InputError
from headtrace.progress import Progress, scaled

if TYPE_CHECKING:
    from rich.table import Table

    from headtrace.causal import Report
    from headtrace.circuits import Circuit
    from headtrace.models import Model

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
REFUSED = "REFUSED"
"""In place of a verdict: the circuit cannot be compared with this model at all."""
EXIT_CODES = {"PASS": 0, "FAIL": 1, REFUSED: 2, "NOTHING TO VERIFY": 3}


def register(app: typer.Typer) -> None:
    app.command("verify")(verify)


def verify(
    circuit: CircuitSource,
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
        typer.Option(
            help="Folder for verification.json, edges.parquet, circuit.json and effects.png; for many circuits, "
            "one folder each in it."
        ),
    ] = None,
    update: Annotated[
        bool, typer.Option("--update", help="Write the measured effects into the circuit file itself.")
    ] = False,
    json: options.Json = False,
    dtype: options.Dtype = "float32",
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
) -> None:
    """Put a circuit to the test: PASS, FAIL or NOTHING TO VERIFY.

    For every firing and side the claimed signals are removed in the running model, and the attention that it then shows
    is compared with the prediction. Every other number in the file that the model can reproduce is compared, too:
    attention, weights, the root, influence, flags, tokens. Then every edge is ablated and boosted, beside random
    channels of the same head.

    Exit code: 0 PASS, 1 FAIL, 3 NOTHING TO VERIFY (no prediction in the file), 2 if the input cannot be used. Of many
    circuits, one that fails fails them all.

    Examples:

      headtrace verify circuit.json

      headtrace verify circuits.parquet --edges none

      headtrace verify circuit.json --edges top:20 --controls 4 --out verification

      headtrace verify circuit.json --reach global --scope token --update
    """
    from headtrace.causal.effects import check_options, choose_edges
    from headtrace.circuits.sources import named_circuits

    check_options(controls, reach, scope, seed)
    if out is not None:
        options.check_folder_writable(out)
    named = named_circuits(circuit)
    choose_edges(named[0][1], edges)
    updated = _files_of(circuit, [name for name, _ in named]) if update else []
    models = ModelsOf(model, dtype, device, device_map)
    how = {"edges": edges, "controls": controls, "reach": reach, "scope": scope, "seed": seed}
    tested = _test_all(named, models, how, say=not json)
    content = _content(tested)
    options.emit(content, as_json=json, show=lambda: _show(tested, show))
    if out is not None:
        _save(tested, Path(out))
    for file in updated:
        _update(file, tested)
    raise typer.Exit(_exit_code(tested))


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
        told = {"verdict": self.verdict, "why": self.why} if self.report is None else self.report.to_dict()
        return {"circuit": self.name, **told}

    def __str__(self) -> str:
        return f"{self.verdict}  {self.name}: {self.why}"


class ModelsOf:
    """The models of circuits, by name unless another place is given; each is loaded once."""

    def __init__(self, place: str | None, dtype: str, device: str, device_map: str | None = None) -> None:
        self.place, self.how = place, (dtype, device, device_map)
        self.loaded: dict[tuple[str, str | None], Model] = {}

    def __call__(self, circuit: Circuit) -> Model:
        name, revision = circuit.model.name, circuit.model.revision
        key = (name, revision) if self.place is None else (self.place, None)
        if key not in self.loaded:
            dtype, device, device_map = self.how
            # A circuit of half precision belongs to the rounded weights.
            said = (circuit.method.settings or {}).get("dtype")
            self.loaded[key] = options.load_model(
                *key, said if isinstance(said, str) else dtype, device, device_map
            )
        return self.loaded[key]


def _test_all(
    named: Sequence[tuple[str, Circuit]], models: ModelsOf, how: dict[str, Any], *, say: bool
) -> list[Tested]:
    """Verify every circuit. Of many, one that cannot be compared does not keep the others from it."""
    if len(named) == 1:
        name, circuit = named[0]
        model = models(circuit)
        with options.progress_bar("Interventions") as progress:
            return [Tested(name, _verified(circuit, model, progress, how))]
    tested: list[Tested] = []
    with options.progress_bar("Circuits", len(named)) as progress:
        for place, (name, circuit) in enumerate(named):
            tested.append(_tested(name, circuit, models, scaled(progress, place, 1, len(named)), how))
            if say:
                console.print(f"{tested[-1]}", markup=False, highlight=False, soft_wrap=True)
            progress(place + 1, len(named))
    return tested


def _tested(
    name: str, circuit: Circuit, models: ModelsOf, progress: Progress | None, how: dict[str, Any]
) -> Tested:
    try:
        return Tested(name, _verified(circuit, models(circuit), progress, how))
    except HeadtraceError as error:
        return Tested(name, error=str(error))


def _verified(circuit: Circuit, model: Model, progress: Progress | None, how: dict[str, Any]) -> Report:
    from headtrace.causal import verify as put_to_the_test

    return put_to_the_test(circuit, model, progress=progress, **how)


# -- what is told --------------------------------------------------------------------------------------------


def _overall(tested: Sequence[Tested]) -> str:
    """One failure fails all; what could not be compared is neither a pass nor nothing."""
    from headtrace.causal import overall

    verdict = overall(one.report.verdict for one in tested if one.report is not None)
    refused = any(one.report is None for one in tested)
    return REFUSED if refused and verdict != "FAIL" else verdict


def _exit_code(tested: Sequence[Tested]) -> int:
    return EXIT_CODES[_overall(tested)]


def _content(tested: Sequence[Tested]) -> dict[str, Any]:
    """What --json prints: one report, or all of them under their verdict."""
    if len(tested) == 1:
        return tested[0].to_dict()
    return {"verdict": _overall(tested), "circuits": [one.to_dict() for one in tested]}


def _show(tested: Sequence[Tested], rows: int) -> None:
    if len(tested) > 1:
        counts = Counter(one.verdict for one in tested)
        told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        console.print(f"{_overall(tested)}: {len(tested)} circuits ({told})", highlight=False)
        return
    report = tested[0].report
    assert report is not None
    console.print(report.summary(), markup=False, highlight=False, soft_wrap=True)
    if rows and report.effects:
        metric = "" if report.metric is None else f" and {report.metric} (metric)"
        title = f"Change of attention{metric} when ablated, and with random channels (mean)"
        options.show_table(title, _table(report, rows))


def _table(report: Report, rows: int) -> Table:
    """The edges that move attention most, with the average of their random channels beside them."""
    from rich import box
    from rich.table import Table

    from headtrace.causal.effects import mean

    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in ("from", "into", "side"):
        table.add_column(name, no_wrap=True)
    for name in ("weight", "attention", "random", "metric", "random"):
        table.add_column(name, justify="right", no_wrap=True, min_width=len(name))
    for effect in report.strongest(rows):
        numbers = (
            effect.ablate_attention,
            mean(effect.control_ablate_attention),
            effect.ablate_metric,
            mean(effect.control_ablate_metric),
        )
        cells = ("" if number is None else f"{number:+.4f}" for number in numbers)
        table.add_row(effect.source, effect.target, effect.edge.side, f"{effect.edge.weight:.4f}", *cells)
    return table


# -- what is written -----------------------------------------------------------------------------------------


def _save(tested: Sequence[Tested], folder: Path) -> None:
    """The files of one report in the folder; of many, in a folder each, and all verdicts beside them."""
    for number, one in enumerate(tested):
        if one.report is None:
            continue
        place = folder if len(tested) == 1 else folder / f"circuit-{number:05d}"
        one.report.save(place)
        files = ["verification.json", "edges.parquet", "circuit.json"]
        if one.report.effects:
            one.report.plot(place / "effects.png")
            files.append("effects.png")
        if len(tested) == 1:
            options.note(f"Wrote {place}: {', '.join(files)}")
    if len(tested) > 1:
        lines = [{"circuit": one.name, "verdict": one.verdict, "why": one.why} for one in tested]
        options.write_json(str(folder / "verdicts.json"), {"verdict": _overall(tested), "circuits": lines})


def _files_of(source: str, names: Sequence[str]) -> list[str]:
    """The files that hold these circuits, all of which can be written."""
    if source == "-":
        raise InputError("--update writes into the circuit file, and standard input is none: give the file.")
    files = list(dict.fromkeys(_file_of(name) for name in names))
    for file in files:
        options.check_writable(file)
    return files


def _file_of(name: str) -> str:
    return name if os.path.lexists(name) else name.rpartition("#")[0]


def _update(file: str, tested: Sequence[Tested]) -> None:
    """Measured effects into the file that the circuits came from; in a table, the other circuits stay as they are."""
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
        options.note(f"Wrote the measured effects into {file}")
