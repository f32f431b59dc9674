"""``headtrace tasks``: tasks as a model's tokenizer sees them, and its answers. ``headtrace toy``: the toy lab."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.markup import escape

from headtrace.cli import options
from headtrace.cli.failures import progress_bar
from headtrace.cli.main import COMMANDS
from headtrace.cli.output import Output, console, emit, note, show_table, token_text, warn
from headtrace.errors import InputError
from headtrace.tasks.registry import TASKS
from headtrace.writing import check_folder_writable

if TYPE_CHECKING:
    from headtrace.tasks import Accuracy, TaskSet
    from headtrace.tasks.examples import Example


tasks = typer.Typer(
    help=COMMANDS["tasks"][1],
    epilog="Examples: [cyan]headtrace tasks[/]  ·  [cyan]headtrace tasks show ioi --model builtin[/]  ·  "
    "[cyan]headtrace tasks accuracy builtin ioi[/]",
    rich_markup_mode="rich",
)

TASK = typer.Argument(help="A task (see [cyan]headtrace tasks[/]) or a .jsonl file of your own.")
SEED = typer.Option(0, "--seed", help="The same seed gives the same set on any machine.")
VARIANT = typer.Option(
    "standard", "--variant", help="IOI only: standard, or one of its controls flipped, random-names."
)


@tasks.callback(invoke_without_command=True, help=COMMANDS["tasks"][1])
def list_tasks(context: typer.Context, json: options.Json = False) -> None:
    if context.invoked_subcommand is not None:
        return
    known = [
        {"name": task.name, "summary": task.summary, "prompts": task.n_cells * task.n_per_cell}
        | {"roles": task.roles, "variants": task.variants}
        for task in TASKS.values()
    ]
    emit({"tasks": known}, as_json=json, show=_show_tasks)


def _show_tasks() -> None:
    lines: list[str] = []
    for task in TASKS.values():
        size = f"{task.n_cells} cells x {task.n_per_cell} = {task.n_cells * task.n_per_cell} prompts"
        lines += [
            f"[bold cyan]{task.name}[/]  {task.summary}",
            f"    balanced over {task.cells}: {size}",
            f"    roles: {', '.join(task.roles)}",
        ]
        if len(task.variants) > 1:
            lines.append(f"    variants: {', '.join(task.variants)}")
    lines += [
        "[bold cyan]FILE.jsonl[/]  Your own prompts, one JSON object per line",
        "    fields: text, answer, wrong; labels and roles if you like",
        "Next: headtrace tasks show ioi, or headtrace tasks accuracy builtin ioi",
    ]
    console.print("\n".join(lines), highlight=False)


@tasks.command(epilog="Example: [cyan]headtrace tasks show ioi --model builtin -n 3[/]")
def show(
    task: str = TASK,
    model: str = typer.Option("builtin", "--model", "-m", help="The model whose tokenizer splits the text."),
    number: int = typer.Option(5, "--number", "-n", min=1, help="How many examples to show."),
    seed: int = SEED,
    variant: str = VARIANT,
    json: options.Json = False,
) -> None:
    """Preview a task as a model's tokenizer sees it, with the token at each role."""
    from headtrace.tasks import load_task

    task_set = load_task(task, options.load_model(model).tokenizer, seed=seed, variant=variant)
    # One example of each cell in turn, so that a short preview shows different forms.
    examples = task_set.spread(number).examples
    content = {"task": task, "examples": examples, "excluded": task_set.excluded_counts()}
    emit(content, as_json=json, show=lambda: _show_examples(examples))
    report_excluded(task_set)


def _show_examples(examples: Sequence[Example]) -> None:
    for example in examples:
        labels = " ".join(f"{key}={value}" for key, value in example.labels.items())
        roles = "  ".join(f"{role} {position}" for role, position in example.roles.items())
        lines = (
            f"[dim]{token_text(example.id)}  {token_text(labels)}[/]",
            f"  {token_text(example.text)} [bold]___[/]",
            f"  [green]{escape(repr(example.answer))}[/] over [red]{escape(repr(example.wrong))}[/]   "
            f"[dim]positions:[/] {token_text(roles)}   [dim]tokens:[/] {len(example.token_ids)}",
        )
        console.print("\n".join(lines), highlight=False, soft_wrap=True)


@tasks.command(
    epilog="Examples: [cyan]headtrace tasks accuracy builtin ioi[/]  ·  "
    "[cyan]headtrace tasks accuracy smollm2-135m my.jsonl --out accuracy.json[/]"
)
def accuracy(
    model: str = typer.Argument(help="A model name, a local folder or a GGUF file."),
    task: str = TASK,
    number: int | None = typer.Option(
        None, "--n", "-n", min=1, help="Examples per cell of the task (for IOI: one form and order)."
    ),
    seed: int = SEED,
    variant: str = VARIANT,
    batch_size: int | None = typer.Option(
        None, "--batch-size", min=1, help="At most this many prompts per forward pass."
    ),
    out: options.NumbersFile = None,
    json: options.Json = False,
) -> None:
    """How often a model prefers the right answer, with Wilson 95% intervals."""
    from headtrace.tasks import accuracy as measure
    from headtrace.tasks import load_task

    output = Output(json, out, [".json", ".tex"])
    loaded = options.load_model(model)
    task_set = load_task(task, loaded.tokenizer, n_per_cell=number, seed=seed, variant=variant)
    with progress_bar(f"{model} on {task_set.task}", len(task_set)) as progress:
        result = measure(loaded, task_set, batch_size=batch_size, progress=progress)
    content = {"model": model, "seed": seed, **result.to_dict()}
    output.finish(content, lambda: _show_accuracy(model, result), table=result.frame)
    report_excluded(task_set)


def _show_accuracy(model: str, result: Accuracy) -> None:
    measured = [("answer beats wrong", "", result), ("answer is first choice", "", result.top1)]
    measured += [
        (label, value, each) for label, values in result.by_label.items() for value, each in values.items()
    ]
    columns = {"": "{0[0]}", "value": "{0[1]}", "right": "{0[2].count}", "of": "{0[2].total}"}
    columns |= {"rate": "{0[2].value:.1%}", "Wilson 95%": "{0[2].interval[0]:.1%} to {0[2].interval[1]:.1%}"}
    show_table(measured, columns, title=f"{model} on {result.task}", left=2)
    console.print(f"Mean logit difference {result.mean_logit_difference:.2f}", highlight=False)


def report_excluded(task_set: TaskSet) -> None:
    """Say what a set leaves out, and why."""
    for reason, count in task_set.excluded_counts().items():
        items = [each.item for each in task_set.excluded if each.reason == reason]
        shown = ", ".join(items[:8]) + (", ..." if len(items) > 8 else "")
        warn(f"Left out {count}: {reason} ({shown})")


def toy(
    name: str = typer.Argument(help="An experiment, or 'all'."),
    quick: bool = typer.Option(False, "--quick", help="A small version, in seconds."),
    seed: int = typer.Option(0, "--seed", min=0, help="The same seed gives the same results."),
    out: Path = typer.Option(
        Path("toy"), "--out", help="Folder for figures, Parquet table and JSON findings."
    ),
    json: options.Json = False,
) -> None:
    """
    Experiments: isotropy (no head), single (one feature pair), multi (twenty), dynamics (one by one),
    sparsity (attention in the SVD basis), robustness (sweeps over p, lambda, N, H, m and seeds), capacity (more
    pairs than head dimensions), theorems (1 to 4, checked numerically), recovery (features read from the head alone),
    all (every one of them).

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
