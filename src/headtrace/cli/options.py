"""Arguments and options that several commands share, and the small things they print alike."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from headtrace.cli.output import check_output, console, emit, note, notes, printable, warn
from headtrace.errors import InputError
from headtrace.progress import Progress
from headtrace.writing import check_folder_writable, check_writable, write_text

if TYPE_CHECKING:
    from headtrace.models import Model

__all__ = [
    "check_folder_writable",
    "check_output",
    "check_writable",
    "console",
    "emit",
    "note",
    "notes",
    "printable",
    "warn",
]

ModelName = Annotated[str, typer.Argument(help="An alias, hub name, local folder, GGUF file, or 'builtin'.")]
PromptText = Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt, as text.")]
TokenIds = Annotated[str | None, typer.Option("--tokens", help="The prompt as token ids: 1,2,3.")]
Bos = Annotated[
    bool | None,
    typer.Option("--bos/--no-bos", help="Begin with the BOS token or not (default: as the tokenizer does)."),
]
Revision = Annotated[str | None, typer.Option(help="Revision of a hub model, such as Pythia's step1000.")]
Dtype = Annotated[str, typer.Option(help="float32 or float64.")]
Json = Annotated[
    bool,
    typer.Option(
        "--json", help="Print one JSON object on standard output; everything else on standard error."
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")]


def load_model(name: str, revision: str | None = None, dtype: str = "float32", device: str = "auto") -> Model:
    """Load with a spinner: it takes a few seconds."""
    with notes.status(f"Loading {escape(printable(name))}"):
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
    with progress.Progress(*columns, console=notes, transient=True) as bar:
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
    return escape(printable(token))


def show_tokens(tokens: tuple[str, ...]) -> None:
    """The tokens in use, with their positions."""
    cells = [f"[dim]{i}[/][cyan]{token_text(t)}[/]" for i, t in enumerate(tokens)]
    console.print("Tokens  " + " [dim]|[/] ".join(cells), highlight=False)


def write_json(path: str, content: Any) -> None:
    """Numbers as a file that people can read as well."""
    import json

    from headtrace.cli.output import plain

    text = json.dumps(plain(content), indent=1, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: only its escape can be written
        text = json.dumps(plain(content), indent=1)
    write_text(path, text + "\n")
    note(f"Wrote {path}")
