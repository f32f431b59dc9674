"""`headtrace toy NAME`: run an experiment of the toy lab, and write its figures, table and findings."""

from __future__ import annotations

from pathlib import Path

import typer

from headtrace.cli import options
from headtrace.cli.output import console, emit, note, token_text
from headtrace.cli.progress import progress_bar
from headtrace.errors import InputError
from headtrace.writing import check_folder_writable


def toy(
    name: str = typer.Argument(help="An experiment, or 'all'."),
    quick: bool = typer.Option(False, "--quick", help="A small version, in seconds."),
    seed: int = typer.Option(0, "--seed", min=0, help="Everything random comes from here."),
    out: Path = typer.Option(
        Path("toy"), "--out", help="Folder for figures, Parquet table and JSON findings."
    ),
    json: options.Json = False,
) -> None:
    """
    Experiments: isotropy (no head), single (one feature pair), multi (twenty), dynamics (one by one),
    sparsity (attention in the SVD basis), robustness (sweeps over p, lambda, N, H, m and seeds), capacity (more
    pairs than head dimensions), theorems (1 to 4, checked numerically), recovery (read off Omega, blind), all
    (every one of them).

    Examples:

      headtrace toy single --quick
      headtrace toy robustness --seed 7 --out results/
      headtrace toy theorems
    """
    from headtrace.toy.experiments import EXPERIMENTS

    if name not in (*EXPERIMENTS, "all"):
        raise InputError(f"No toy experiment {name!r}. Choose one of: {', '.join(EXPERIMENTS)}, all.")
    check_folder_writable(out)
    done = [_run(one, quick, seed, out, json) for one in (EXPERIMENTS if name == "all" else (name,))]
    emit({"experiments": done}, as_json=json, show=lambda: None)


def _run(name: str, quick: bool, seed: int, out: Path, as_json: bool) -> dict[str, object]:
    """Run one experiment, and print its comparison with the paper as soon as it is done."""
    from headtrace.figures.toy import draw
    from headtrace.toy.experiment import write
    from headtrace.toy.experiments import EXPERIMENTS

    entry = EXPERIMENTS[name]
    with progress_bar(f"{name}: {entry.shows}") as progress:
        experiment = entry.run(quick=quick, seed=seed, progress=progress)
    written = [*write(experiment, out), *draw(experiment, out)]
    if not as_json:
        console.print(f"[bold]{name}[/]: {entry.shows}")
        _print_comparison(experiment.findings.get("paper"))
    for path in written:
        note(f"Wrote {path}")
    return {"experiment": name, "findings": experiment.findings, "files": written}


def _print_comparison(lines: object) -> None:
    for line in lines if isinstance(lines, list) else []:
        mark = "[green]agrees[/]" if line["agrees"] else "[yellow]differs[/]"
        paper, measured = _readable(line["paper"]), _readable(line["measured"])
        words = f"{line['claim']}: paper {paper}, measured {measured}"
        remark = f" ({line['remark']})" if "remark" in line else ""
        console.print(f"  {mark} {token_text(words + remark)}", highlight=False)


def _readable(value: object) -> str:
    """A number, or several, with as many digits as people read.

    >>> _readable([0.123456789, {"a": 2}])
    '[0.1235, a: 2]'
    """
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_readable(each) for each in value)}]"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_readable(each)}" for key, each in value.items())
    return str(value)
