"""Arguments and options that several commands share, and the small things they print alike."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from headtrace.errors import InputError
from headtrace.progress import Progress

if TYPE_CHECKING:
    from headtrace.models import Model

console = Console()

ModelName = Annotated[str, typer.Argument(help="An alias, hub name, local folder, GGUF file, or 'builtin'.")]
PromptText = Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt, as text.")]
TokenIds = Annotated[str | None, typer.Option("--tokens", help="The prompt as token ids: 1,2,3.")]
Bos = Annotated[
    bool | None,
    typer.Option("--bos/--no-bos", help="Begin with the BOS token or not (default: as the tokenizer does)."),
]
Revision = Annotated[str | None, typer.Option(help="Revision of a hub model, such as Pythia's step1000.")]
Dtype = Annotated[str, typer.Option(help="float32 or float64.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")]


def load_model(name: str, revision: str | None = None, dtype: str = "float32", device: str = "auto") -> Model:
    """Load with a spinner: it takes a few seconds."""
    with console.status(f"Loading {escape(name)}"):
        from headtrace.models import load

        return load(name, revision=revision, dtype=dtype, device=device)


@contextmanager
def progress_bar(what: str, total: int | None = None) -> Generator[Progress]:
    """A bar with the remaining time; the block gets a function to call with how much is done, and of how much."""
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done, of: bar.update(task, completed=done, total=of)


def read_prompt(prompt: str | None, tokens: str | None) -> str | list[int]:
    """The prompt from ``-p`` or ``--tokens``; exactly one of them must be given."""
    if (prompt is None) == (tokens is None):
        raise InputError(
            "Give the prompt either as text (-p 'When Mary ...') or as token ids (--tokens 1,2,3)."
        )
    return prompt if tokens is None and prompt is not None else parse_ids(tokens or "")


def parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise InputError(
            f"{text!r} is not a list of token ids. Write numbers with commas, like 1,2,3."
        ) from None


def token_text(token: str) -> str:
    """A token as it is shown: spaces and line breaks visible, markup harmless."""
    return escape(token.replace("\n", "⏎").replace("\t", "⇥"))


def show_tokens(tokens: tuple[str, ...]) -> None:
    """The tokens in use, with their positions."""
    cells = [f"[dim]{i}[/][cyan]{token_text(t)}[/]" for i, t in enumerate(tokens)]
    console.print("Tokens  " + " [dim]|[/] ".join(cells), highlight=False)


def write_json(path: str, content: Any) -> None:
    import json
    from pathlib import Path

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    console.print(f"Wrote {path}")
