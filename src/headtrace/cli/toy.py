"""`headtrace toy NAME`: run an experiment of the toy lab, and write its figures, table and findings."""

from __future__ import annotations

from pathlib import Path

import typer

from headtrace.cli.options import console
from headtrace.errors import InputError

HELP = """Watch singular vectors align with features, in small models whose features are known.

Experiments: isotropy (no head), single (one feature pair), multi (twenty), dynamics (one by one),
sparsity (attention in the SVD basis), robustness (sweeps over p, lambda, N, H, m and seeds), capacity (more
pairs than head dimensions), theorems (1 to 4, checked numerically), recovery (read off Omega, blind), all
(every one of them).

Examples:

  headtrace toy single --quick

  headtrace toy robustness --seed 7 --out results/

  headtrace toy theorems
"""


def toy(
    name: str = typer.Argument(help="An experiment, or 'all'."),
    quick: bool = typer.Option(False, "--quick", help="A small version, in seconds."),
    seed: int = typer.Option(0, "--seed", min=0, help="Everything random comes from here."),
    out: Path = typer.Option(
        Path("toy"), "--out", help="Folder for figures, Parquet table and JSON findings."
    ),
) -> None:
    from headtrace.toy.experiments import EXPERIMENTS

    if name not in (*EXPERIMENTS, "all"):
        raise InputError(f"No toy experiment {name!r}. Choose one of: {', '.join(EXPERIMENTS)}, all.")
    for one in EXPERIMENTS if name == "all" else (name,):
        _run(one, quick, seed, out)


def _run(name: str, quick: bool, seed: int, out: Path) -> None:
    from rich import progress

    from headtrace.figures.toy import draw
    from headtrace.toy.experiment import write
    from headtrace.toy.experiments import EXPERIMENTS

    entry = EXPERIMENTS[name]
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"{name}: {entry.shows}", total=None)
        experiment = entry.run(
            quick=quick,
            seed=seed,
            progress=lambda done, of_all: bar.update(task, completed=done, total=of_all),
        )
    written = [*write(experiment, out), *draw(experiment, out)]
    console.print(f"[bold]{name}[/]: {entry.shows}")
    _print_comparison(experiment.findings.get("paper"))
    for path in written:
        console.print(f"  {path}", highlight=False)


def _print_comparison(lines: object) -> None:
    from rich.markup import escape

    for line in lines if isinstance(lines, list) else []:
        mark = "[green]agrees[/]" if line["agrees"] else "[yellow]differs[/]"
        told = f"{line['claim']}: paper {line['paper']}, measured {line['measured']}"
        remark = f" ({line['remark']})" if "remark" in line else ""
        console.print(f"  {mark} {escape(told + remark)}", highlight=False)


def register(app: typer.Typer) -> None:
    app.command("toy", help=HELP)(toy)
