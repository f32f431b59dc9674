"""``headtrace sinks``: attention sinks of a model, and the control signals behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headtrace.cli import options
from headtrace.cli.options import console
from headtrace.errors import InputError

if TYPE_CHECKING:
    from headtrace.models import Model
    from headtrace.tasks import TaskSet


def register(app: typer.Typer) -> None:
    app.command("sinks")(sinks)


def sinks(
    model: options.ModelName,
    task: Annotated[
        list[str] | None,
        typer.Option("--task", help="A task (see headtrace tasks); may be given several times."),
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option("--prompts", metavar="FILE.jsonl", help="Prompts of your own: text, answer, wrong."),
    ] = None,
    number: Annotated[int, typer.Option("--number", "-n", min=1, help="Prompts of each task.")] = 100,
    threshold: Annotated[
        float, typer.Option(help="Mean incoming attention from which a token is a sink wherever it stands.")
    ] = 0.3,
    firings: Annotated[int, typer.Option(help="Firings that are traced of each head, at most.", min=2)] = 24,
    directions: Annotated[
        str, typer.Option(help="How many common directions are removed: 1,4,16 (empty: none).")
    ] = "1,4,16",
    seed: Annotated[int, typer.Option(help="Seed of prompts, firings and random directions.")] = 0,
    out: Annotated[str | None, typer.Option(help="Folder for sinks.json, tables and figures.")] = None,
    revision: options.Revision = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    json: options.Json = False,
) -> None:
    """Attention sinks: how much they take of each head, the signals that send heads there, what is left without them.

    Constancy is the mean cosine of a head's signals over prompts of different tasks, so give several.

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
    if out is not None:
        options.check_folder_writable(out)
    counts = options.parse_ids(directions)
    loaded = options.load_model(model, revision, dtype, device, device_map)
    sets = _sets(loaded, [*(task or []), *(prompts or [])], number, seed)
    with options.progress_bar("Sinks", 100) as progress:
        found = find_sinks(
            loaded,
            sets,
            threshold=threshold,
            firings_per_head=firings,
            directions=counts,
            seed=seed,
            progress=progress,
        )
    if out is not None:
        found.save(out)
        options.note(f"Wrote {out}: sinks.json, tables, sinks-*.png")
    options.emit(
        found.to_dict(),
        as_json=json,
        show=lambda: console.print(found.summary(), markup=False, highlight=False, soft_wrap=True),
    )


def _sets(model: Model, names: list[str], number: int, seed: int) -> list[TaskSet]:
    """The prompts of each task, spread over its cells, as many as there are."""
    from headtrace.tasks import TASKS, load_task

    sets: list[TaskSet] = []
    for name in dict.fromkeys(names):
        cells = TASKS[name].n_cells if name in TASKS else 1
        loaded = load_task(name, model.tokenizer, n_per_cell=-(-number // cells), seed=seed)
        chosen = loaded.spread(number)
        if len(chosen) < number and name in TASKS:
            options.note(f"{name}: {len(chosen)} prompts, all that there are for this vocabulary.")
        sets.append(chosen)
    return sets
