"""``headtrace run`` and ``headtrace runs``: many prompts, one circuit each, in a folder that survives everything."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headtrace.cli import options, tracing_options
from headtrace.cli.engine_options import EngineName, RayAddress, Workers, check_engine, going_on
from headtrace.cli.options import console, printable
from headtrace.errors import InputError
from headtrace.lines import Lines
from headtrace.request import TraceRequest, read_requests

if TYPE_CHECKING:
    from headtrace.models import Model
    from headtrace.runs import Run, RunStatus
    from headtrace.tasks import TaskSet


def register(app: typer.Typer) -> None:
    app.command("run")(run)
    app.command("runs")(runs)


def run(
    model: options.ModelName,
    out: Annotated[
        str,
        typer.Option(help="A folder, or a URL such as s3://bucket/ioi; an existing run is resumed."),
    ],
    task: Annotated[
        str | None, typer.Option(help="A task: ioi, greater-than, pronoun, facts (see `headtrace tasks`).")
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            help="JSONL with text (or tokens, messages), answer, wrong, labels, roles: one prompt per line."
        ),
    ] = None,
    number: Annotated[
        int | None,
        typer.Option("--number", "-n", min=1, help="With --task: how many prompts in all, balanced."),
    ] = None,
    variant: Annotated[str, typer.Option(help="With --task: a variant of it, such as flipped.")] = "standard",
    seed: Annotated[int, typer.Option(help="With --task: the same seed gives the same prompts.")] = 0,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="A prompt that cannot be asked about is an error (default: kept as failed)."
        ),
    ] = False,
    paths: tracing_options.PathsName = "attention",
    method: tracing_options.MethodName = "acc++",
    tau: tracing_options.TauNumber = None,
    root: tracing_options.RootName = None,
    top_k: tracing_options.TopK = None,
    heads: tracing_options.HeadNames = None,
    max_firings: tracing_options.MaxFirings = 200,
    min_influence: tracing_options.MinInfluence = None,
    ig_steps: tracing_options.IgSteps = None,
    svt_channels: tracing_options.SvtChannels = None,
    signals: Annotated[
        bool,
        typer.Option("--signals", help="Keep the signals as vectors (a further forward pass per prompt)."),
    ] = False,
    engine: EngineName = "local",
    workers: Workers = None,
    ray_address: RayAddress = None,
    shard_size: Annotated[
        int, typer.Option(min=1, help="Prompts per shard: what a kill loses at most.")
    ] = 64,
    bos: options.Bos = None,
    revision: options.Revision = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    json: options.Json = False,
) -> None:
    """Trace many prompts, one circuit each, into a folder. Killed at any moment, the same command resumes it.

    A prompt that fails is kept with its reason and stops nothing. `headtrace runs DIR` says how far a run is; a
    circuit of it is `DIR#ID`, also for show, view, verify and export.

    Examples:

      headtrace run builtin --task ioi -n 300 --out runs/ioi

      headtrace run smollm2-135m --prompts prompts.jsonl --paths complete --out runs/mine

      headtrace run smollm2-135m --task ioi -n 3000 --engine ray --workers 8 --out s3://bucket/ioi
    """
    if (task is None) == (prompts is None):
        raise InputError("Give either --task NAME or --prompts FILE.jsonl.")
    if number is not None and task is None:
        raise InputError("-n belongs to --task: a file of prompts is taken as it is.")
    tracing_options.check_paths(paths)
    check_engine(engine)
    lines = None if prompts is None else _read(prompts, strict)
    from headtrace.runs.manifest import check_place
    from headtrace.runs.store import open_store

    check_place(open_store(out))
    if task is not None:
        _require_task(task)
    loaded = options.load_model(model, revision, dtype, device, device_map)
    examples: Any = [] if lines is None else [request.to_json() for request in lines.values]
    if task is not None:
        examples = _task(task, loaded, number, seed, variant)
    chosen = {"tau": tau, "ig_steps": ig_steps, "channels": svt_channels}
    how: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
    how |= {"paths": paths, "method": method, "signals": signals, "strict": strict}
    how |= {"root": root, "top_k": top_k, "heads": None if heads is None else heads.split(","), "bos": bos}
    how |= {"max_firings": max_firings or None, "min_influence": min_influence, "shard_size": shard_size}
    how |= {"engine": engine, "workers": workers, "ray_address": ray_address}
    made = _run(loaded, examples, out, seed if task is not None else None, how)
    status = made.status()
    options.emit(_content(made, status), as_json=json, show=lambda: _show(made, status))


def _run(model: Model, examples: Any, out: str, seed: int | None, how: dict[str, Any]) -> Run:
    """The run, with a bar; an interrupt says how to go on."""
    from headtrace.runs import run

    there = (0, 0)
    with options.progress_bar("Tracing prompts", resumes=True) as bar:

        def progress(done: int, of: int) -> None:
            nonlocal there
            there = (done, of)
            bar(done, of)

        def failures(count: int) -> None:
            bar.words(f"{count} failed" if count else "")

        try:
            return run(model, examples, out=out, seed=seed, progress=progress, failures=failures, **how)
        except KeyboardInterrupt:
            done, of = there
            far = f"Of {of} prompts, {done} were traced; those of whole shards are kept." if of else ""
            raise going_on(far) from None


def _read(path: str, strict: bool) -> Lines[TraceRequest]:
    """The prompts of a file; lines that cannot be read are reported."""
    lines = read_requests(path, strict=strict)
    for line in lines.report().splitlines():
        options.warn(line)
    return lines


def _require_task(name: str) -> None:
    from headtrace.tasks import TASKS

    if name not in TASKS:
        raise InputError(
            f"There is no task {name!r}. Use one of {', '.join(TASKS)}, or --prompts FILE.jsonl for your own."
        )


def _task(name: str, model: Model, number: int | None, seed: int, variant: str) -> TaskSet:
    from headtrace.cli.tasks import report_excluded
    from headtrace.tasks import TASKS, load_task

    task_set = load_task(name, model.tokenizer, n=number, seed=seed, variant=variant)
    report_excluded(task_set)
    task = TASKS[name]
    if number is not None and number % task.n_cells:
        few = number // task.n_cells
        options.note(
            f"{len(task_set)} prompts over {task.n_cells} cells ({task.cells}): {few} or {few + 1} of each."
        )
    return task_set


# -- headtrace runs ------------------------------------------------------------------------------------------------


def runs(
    place: Annotated[str, typer.Argument(metavar="DIR", help="The folder or URL of a run.")],
    json: options.Json = False,
) -> None:
    """What a run holds, how far it is, what failed and why.

    Every file is held against its checksum. A run may be looked at while it is going on.

    Examples:

      headtrace runs runs/ioi

      headtrace runs s3://bucket/ioi --json
    """
    from headtrace.runs import open_run

    found = open_run(place)
    status = found.status()
    options.emit(_content(found, status), as_json=json, show=lambda: _show(found, status))


def _content(run: Run, status: RunStatus) -> dict[str, Any]:
    manifest = run.manifest.model_dump(mode="json", by_alias=True)
    return {"out": run.path, **asdict(status), "left": status.left, "manifest": manifest}


def _show(run: Run, status: RunStatus) -> None:
    from headtrace.tables import human

    manifest = run.manifest
    what = f"{manifest.options['method']['name']}, paths {manifest.options['paths']}"
    task = f", task {manifest.task}, seed {manifest.seed}" if manifest.task else ""
    sizes = ", ".join(
        f"{name} {human(size)} ({status.rows[name]} rows)" for name, size in status.bytes.items()
    )
    lines = [
        f"{run.path}: {manifest.model.name}, {what}{task}",
        f"{status.prompts} prompts: {status.done} done, {status.failed} failed, {status.left} left",
        f"{status.shards_done} of {status.shards} shards: {sizes or 'nothing yet'}",
    ]
    if status.damaged:
        lines.append(f"Damaged shards, to be traced again: {', '.join(map(str, status.damaged))}")
    for kind, count in status.failures.items():
        lines.append(f"Failed, {kind}: {count}; the first is {status.examples.get(kind, '')}")
    if status.left:
        lines.append("The command that started it resumes with what is left.")
    elif status.done:
        lines.append(f"Next: headtrace show {run.path}#0")
    console.print(printable("\n".join(lines), lines=True), markup=False, highlight=False, soft_wrap=True)
