"""``headtrace run`` and ``headtrace runs``: many prompts, one circuit each, in a folder that can be resumed."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from headtrace.cli import options
from headtrace.cli.failures import progress_bar
from headtrace.cli.output import emit, note, say
from headtrace.cli.request_options import PromptsFile, RequestOptions, Strict, exit_by_share, report_skipped
from headtrace.errors import InputError
from headtrace.request import TraceRequest, read_requests
from headtrace.tasks import TASKS

if TYPE_CHECKING:
    from headtrace.models import Model
    from headtrace.runs import Run, RunStatus
    from headtrace.tasks import TaskSet


def run(
    *,
    model: options.ModelName,
    out: str = typer.Option(
        help="A folder, or a URL such as s3://bucket/ioi. An existing run there is resumed."
    ),
    task: str | None = typer.Option(None, help=f"A task: {', '.join(TASKS)} (see `headtrace tasks`)."),
    prompts: PromptsFile = None,
    chat: options.Chat = False,
    number: int | None = typer.Option(
        None,
        "--number",
        "-n",
        min=1,
        help="With --task: the total number of prompts, balanced over the task's forms.",
    ),
    variant: str = typer.Option("standard", help="With --task: a variant of the task, such as flipped."),
    seed: int = typer.Option(0, help="With --task: the same seed gives the same prompts."),
    strict: Strict = False,
    request: RequestOptions,
    signals: bool = typer.Option(
        False, "--signals", help="Also store the signals as vectors (one more forward pass per prompt)."
    ),
    mechanisms: bool = typer.Option(
        False,
        "--mechanisms",
        help="Also keep each prompt's mechanism: its steps, flows and measurements (headtrace why RUN says which "
        "steps prompts share). --paths is then difference by default.",
    ),
    engine: options.EngineOptions,
    shard_size: int = typer.Option(
        64, min=1, help="Prompts per shard; an interruption loses at most one shard."
    ),
    place: options.ModelOptions,
    json: options.Json = False,
) -> None:
    """
    A prompt that fails, or a line that cannot be read, is stored with its reason and does not stop the run. The exit
    code is 3 if more than one in ten failed (an empty circuit is not a failure), else 0. `headtrace runs DIR` says how
    far a run is. Commands that take a circuit (show, view, verify, export) take one of a run as `DIR#ID`.

    Examples:

      headtrace run builtin --task ioi -n 300 --out runs/ioi
      headtrace run smollm2-135m --prompts prompts.jsonl --paths complete --out runs/mine
      headtrace run builtin --task ioi -n 60 --mechanisms --out runs/why
      headtrace run smollm2-135m --task ioi -n 3000 --engine ray --workers 8 --out s3://bucket/ioi
    """
    if (task is None) == (prompts is None):
        raise InputError("Give either --task NAME or --prompts FILE.jsonl.")
    if task is None and number is not None:
        raise InputError("-n belongs to --task: a file of prompts is traced whole.")
    if task is not None and task not in TASKS:
        raise InputError(
            f"There is no task {task!r}. Use one of {', '.join(TASKS)}, or --prompts FILE.jsonl for your own."
        )
    TraceRequest.create("checks the options", **request.options)
    processes = engine.check()
    lines = None if prompts is None else read_requests(prompts, strict=strict, chat=chat)
    if lines is not None:
        report_skipped(lines)
    from headtrace.runs.manifest import check_place
    from headtrace.runs.store import open_store, require_lasting

    require_lasting(out)
    check_place(open_store(out))
    loaded = place.load(model)
    examples: Any = None if lines is None else lines.then(lambda each, _: each.to_json())
    if task is not None:
        examples = _examples(task, loaded, number, seed, variant)
    how: dict[str, Any] = {**request.options, **request.settings, **processes}
    how |= {"signals": signals, "mechanisms": mechanisms, "strict": strict, "shard_size": shard_size}
    traced = _run(loaded, examples, out, None if task is None else seed, how)
    status = traced.status()
    emit(lambda: _content(traced, status), as_json=json, show=lambda: _show(traced, status))
    exit_by_share(status.failed - status.failures.get("no circuit", 0), status.prompts)


def _examples(task: str, model: Model, n: int | None, seed: int, variant: str) -> TaskSet:
    from headtrace.cli.tasks import report_excluded
    from headtrace.tasks import load_task

    examples = load_task(task, model.tokenizer, n=n, seed=seed, variant=variant)
    report_excluded(examples)
    cells = TASKS[task].n_cells
    if n is not None and n % cells:
        few = n // cells
        note(f"{len(examples)} prompts over {cells} cells ({TASKS[task].cells}): {few} or {few + 1} of each.")
    return examples


def _run(model: Model, examples: Any, out: str, seed: int | None, how: dict[str, Any]) -> Run:
    """The run, with a bar; an interrupt says how to resume it."""
    from headtrace.runs import run

    reached = (0, 0)
    with progress_bar("Tracing prompts", resumes=True) as bar:

        def progress(done: int, of: int) -> None:
            nonlocal reached
            reached = (done, of)
            bar(done, of)

        def failures(count: int) -> None:
            bar.words(f"{count} failed" if count else "")

        try:
            return run(model, examples, out=out, seed=seed, progress=progress, failures=failures, **how)
        except KeyboardInterrupt:
            done, of = reached
            far = f"Of {of} prompts, {done} were traced; those of whole shards are kept." if of else ""
            raise options.interrupted(far) from None


# -- headtrace runs ----------------------------------------------------------------------------------------------


def runs(
    place: str = typer.Argument(metavar="DIR", help="The folder or URL of a run."),
    json: options.Json = False,
) -> None:
    """
    Every file is compared with its checksum. A run may be looked at while it is being traced.

    Examples:

      headtrace runs runs/ioi
      headtrace runs s3://bucket/ioi --json
    """
    from headtrace.runs import open_run

    found = open_run(place)
    status = found.status()
    emit(lambda: _content(found, status), as_json=json, show=lambda: _show(found, status))


def _content(run: Run, status: RunStatus) -> dict[str, Any]:
    manifest = run.manifest.model_dump(mode="json", by_alias=True)
    skipped = manifest["plan"]["skipped"]
    return {
        "out": run.path,
        **asdict(status),
        "left": status.left,
        "skipped": skipped,
        "manifest": manifest,
    }


def _show(run: Run, status: RunStatus) -> None:
    from headtrace.tables import human

    manifest = run.manifest
    what = f"{manifest.options['method']['name']}, paths {manifest.options['paths']}"
    task = f", task {manifest.task}, seed {manifest.seed}" if manifest.task else ""
    sizes = ", ".join(
        f"{name} {human(size)} ({status.rows[name]} rows)" for name, size in status.bytes.items()
    )
    say(f"{run.path}: {manifest.model.name}, {what}{task}")
    say(f"{status.prompts} prompts: {status.done} done, {status.failed} failed, {status.left} left")
    say(f"{status.shards_done} of {status.shards} shards: {sizes or 'nothing yet'}")
    if manifest.plan.skipped:
        first = manifest.plan.skipped_lines[0]
        say(
            f"{manifest.plan.skipped} lines could not be read; the first is line {first.line}: {first.reason}"
        )
    if status.damaged:
        say(f"Damaged shards, to be traced again: {', '.join(map(str, status.damaged))}")
    for kind, count in status.failures.items():
        say(f"Failed, {kind}: {count}; the first is {status.examples.get(kind, '')}")
    if status.left:
        say("The command that started it resumes it.")
    elif status.done:
        told = "mechanisms" in manifest.tables
        say(f"Next: headtrace {f'why {run.path}' if told else f'show {run.path}#0'}")
