"""``headtrace sinks``: attention sinks of a model, and the control signals behind them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from headtrace.cli import options
from headtrace.cli.failures import progress_bar
from headtrace.cli.output import Output, note, say
from headtrace.cli.request_options import exit_by_share, report_skipped, skipped_of
from headtrace.errors import InputError
from headtrace.lines import Lines
from headtrace.request import read_requests
from headtrace.tasks import TASKS

if TYPE_CHECKING:
    from headtrace.models import Model

TASK_NAMES = ", ".join(TASKS)


def sinks(
    *,
    model: options.ModelName,
    task: list[str] | None = typer.Option(None, "--task", help=f"A task: {TASK_NAMES}. Repeatable."),
    prompts: list[str] | None = typer.Option(
        None, "--prompts", metavar="FILE.jsonl", help="Prompts of your own, as for trace and run. Repeatable."
    ),
    number: int = typer.Option(
        100, "--number", "-n", min=1, help="Number of prompts of each task, and of each file."
    ),
    threshold: float = typer.Option(
        0.3, help="A token at any position is a sink if its mean incoming attention is at least this."
    ),
    firings: int = typer.Option(
        24, help="Trace at most this many firings (attended pairs of positions) of each head.", min=2
    ),
    directions: str = typer.Option(
        "1,4,16", help="Numbers of shared directions to remove, one test each: 1,4,16 (empty: none)."
    ),
    seed: int = typer.Option(0, help="Seed of prompts, firings and random directions."),
    out: str | None = typer.Option(
        None, help="Folder for sinks.json, tables and figures; or a .tex file for the mass by head."
    ),
    place: options.ModelOptions,
    json: options.Json = False,
) -> None:
    """
    Constancy is the mean cosine of a head's signals over prompts of different tasks, so give several tasks.

    Examples:

      headtrace sinks smollm2-135m --task ioi -n 100 --out sinks
      headtrace sinks builtin --task ioi --task facts -n 10 --directions 1 --json
      headtrace sinks smollm2-135m --prompts mine.jsonl --out sinks
    """
    from headtrace.sinks import find_sinks

    if not task and not prompts:
        raise InputError(
            "Say which prompts to study: --task ioi (several times, if you like), or --prompts FILE.jsonl."
        )
    tasks = [name for name in task or [] if not name.endswith(".jsonl")]
    files = [*(prompts or []), *(name for name in task or [] if name not in tasks)]
    for name in tasks:
        if name not in TASKS:
            raise InputError(
                f"There is no task {name!r}. Use one of {', '.join(TASKS)}, or --prompts FILE.jsonl."
            )
    output = Output(json, out, [".tex"], folder=True)
    counts = options.parse_ids(directions)
    loaded = place.load(model)
    sets = _prompts_by_task(loaded, tasks, number, seed)
    lines: dict[str, Lines[Any]] = {}
    for file in dict.fromkeys(files):
        # With their right and wrong answers, if they have them.
        read = read_requests(file).then(
            lambda each, _: each.resolve(loaded) if "wrong" in each.about else each.token_ids(loaded)
        )
        report_skipped(read)
        name = file if Path(file).stem in sets else Path(file).stem
        sets[name], lines[name] = read.values[:: max(1, len(read) // number)][:number], read
    with progress_bar("Sinks", 100) as progress:
        found = find_sinks(
            loaded,
            sets,
            threshold=threshold,
            firings_per_head=firings,
            directions=counts,
            seed=seed,
            progress=progress,
        )
    skipped = {name: read.skipped_rows for name, read in lines.items() if read.skipped}
    found = replace(found, settings=replace(found.settings, skipped=skipped))
    output.finish(
        found.to_dict,
        lambda: say(found.summary()),
        save=found.save,
        table=found.frame,
        files="sinks.json, tables, sinks-*.png",
    )
    exit_by_share(*skipped_of(lines.values()))


def _prompts_by_task(model: Model, tasks: list[str], number: int, seed: int) -> dict[str, Any]:
    """At most ``number`` prompts of each task, spread over its cells."""
    from headtrace.tasks import load_task

    found: dict[str, Any] = {}
    for name in tasks:
        per_cell = -(-number // TASKS[name].n_cells)
        found[name] = load_task(name, model.tokenizer, n_per_cell=per_cell, seed=seed).spread(number)
        if len(found[name]) < number:
            note(f"{name}: {len(found[name])} prompts, all that there are for this vocabulary.")
    return found
