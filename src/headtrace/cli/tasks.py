"""``headtrace tasks``: the tasks, how a model's tokenizer sees them, and how well it does on them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from headtrace.tasks import Accuracy, Example, TaskSet

tasks = typer.Typer(
    help="Prompts with known answers: list them, preview them, measure a model on them.",
    epilog="Examples: [cyan]headtrace tasks[/]  ·  [cyan]headtrace tasks show ioi --model builtin[/]  ·  "
    "[cyan]headtrace tasks accuracy builtin ioi[/]",
    rich_markup_mode="rich",
)

TASK = typer.Argument(help="A task (see [cyan]headtrace tasks[/]) or a .jsonl file of your own.")
SEED = typer.Option(0, "--seed", help="The same seed gives the same set on any machine.")
VARIANT = typer.Option(
    "standard", "--variant", help="IOI only: standard, or one of its controls flipped, random-names."
)


def register(app: typer.Typer) -> None:
    app.add_typer(tasks, name="tasks")


@tasks.callback(invoke_without_command=True)
def list_tasks(context: typer.Context) -> None:
    """Prompts with known answers: list them, preview them, measure a model on them."""
    if context.invoked_subcommand is not None:
        return
    from rich.console import Console

    from headtrace.tasks.registry import TASKS

    console = Console(highlight=False)
    for task in TASKS.values():
        console.print(f"[bold cyan]{task.name}[/]  {task.summary}")
        size = f"{task.n_cells} cells x {task.n_per_cell} = {task.n_cells * task.n_per_cell} prompts"
        console.print(f"    balanced over {task.cells}: {size}")
        console.print(f"    roles: {', '.join(task.roles)}")
        if len(task.variants) > 1:
            console.print(f"    variants: {', '.join(task.variants)}")
    console.print("[bold cyan]FILE.jsonl[/]  Your own prompts, one JSON object per line")
    console.print("    fields: text, answer, wrong; labels and roles if you like")
    console.print("Next: headtrace tasks show ioi, or headtrace tasks accuracy builtin ioi")


@tasks.command(epilog="Example: [cyan]headtrace tasks show ioi --model builtin -n 3[/]")
def show(
    task: str = TASK,
    model: str = typer.Option("builtin", "--model", "-m", help="The model whose tokenizer splits the text."),
    number: int = typer.Option(5, "--number", "-n", min=1, help="How many examples to show."),
    seed: int = SEED,
    variant: str = VARIANT,
) -> None:
    """Preview a task as a model's tokenizer sees it, with the token at each role."""
    from rich.console import Console
    from rich.markup import escape

    from headtrace.models import load

    console = Console(highlight=False, soft_wrap=True)
    task_set = _load(task, load(model).tokenizer, None, seed, variant)
    # One example of each cell in turn, so that a short preview shows different forms.
    step = max(1, len(task_set) // number)
    for example in task_set.examples[::step][:number]:
        labels = " ".join(f"{key}={value}" for key, value in example.labels.items())
        console.print(f"[dim]{escape(example.id)}  {escape(labels)}[/]")
        console.print(f"  {_marked(example)}")
        roles = "  ".join(f"{role} {position}" for role, position in example.roles.items())
        console.print(
            f"  [green]{escape(repr(example.answer))}[/] over [red]{escape(repr(example.wrong))}[/]   "
            f"[dim]positions:[/] {escape(roles)}   [dim]tokens:[/] {len(example.token_ids)}"
        )
    _report_excluded(console, task_set)


@tasks.command(
    epilog="Examples: [cyan]headtrace tasks accuracy builtin ioi[/]  ·  "
    "[cyan]headtrace tasks accuracy smollm2-135m my.jsonl --json accuracy.json[/]"
)
def accuracy(
    model: str = typer.Argument(help="A model name, a local folder or a GGUF file."),
    task: str = TASK,
    number: int | None = typer.Option(
        None, "--n", "-n", min=1, help="Examples per cell (form and order, say)."
    ),
    seed: int = SEED,
    variant: str = VARIANT,
    batch_size: int = typer.Option(32, "--batch-size", min=1, help="Prompts per forward pass."),
    json_file: Path | None = typer.Option(None, "--json", help="Also write the result to this file."),
) -> None:
    """How often a model prefers the right answer, with Wilson 95% intervals."""
    import json

    from rich.console import Console
    from rich.progress import Progress

    from headtrace.models import load
    from headtrace.tasks import accuracy as measure

    console = Console()
    loaded = load(model)
    task_set = _load(task, loaded.tokenizer, number, seed, variant)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(f"{model} on {task_set.task}", total=len(task_set))
        result = measure(
            loaded,
            task_set,
            batch_size=batch_size,
            progress=lambda done, _: progress.update(bar, completed=done),
        )
    _print_accuracy(console, model, result)
    _report_excluded(console, task_set)
    if json_file is not None:
        content = {"model": model, "seed": seed, **result.to_dict()}
        json_file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        console.print(f"Written to {json_file}", highlight=False)


def _load(task: str, tokenizer: object, number: int | None, seed: int, variant: str) -> TaskSet:
    from typing import Any, cast

    from headtrace.tasks import load_task

    return load_task(task, cast(Any, tokenizer), n_per_cell=number, seed=seed, variant=variant)


def _print_accuracy(console: object, model: str, result: Accuracy) -> None:
    from rich.console import Console
    from rich.table import Table

    assert isinstance(console, Console)
    table = Table("", "value", "right", "of", "rate", "Wilson 95%", title=f"{model} on {result.task}")
    rows = [("answer beats wrong", "", result), ("answer is first choice", "", result.top1)]
    rows += [
        (label, value, each) for label, values in result.by_label.items() for value, each in values.items()
    ]
    for label, value, each in rows:
        low, high = each.interval
        table.add_row(
            label, value, str(each.correct), str(each.total), f"{each.rate:.1%}", f"{low:.1%} to {high:.1%}"
        )
    console.print(table)
    console.print(f"Mean logit difference {result.mean_logit_difference:.2f}", highlight=False)


def _marked(example: Example) -> str:
    """The prompt with an underscore where the answer goes."""
    from rich.markup import escape

    return f"{escape(example.text)} [bold]___[/]"


def _report_excluded(console: object, task_set: TaskSet) -> None:
    from rich.console import Console

    assert isinstance(console, Console)
    for reason, count in task_set.excluded_counts().items():
        items = [each.item for each in task_set.excluded if each.reason == reason]
        shown = ", ".join(items[:8]) + (", ..." if len(items) > 8 else "")
        console.print(f"Left out {count}: {reason} ({shown})", style="yellow", highlight=False, markup=False)
