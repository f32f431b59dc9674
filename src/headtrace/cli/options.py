"""Arguments and options that several commands share, and the small things they print alike."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from headtrace.cli.output import check_output, console, emit, note, notes, printable, warn
from headtrace.errors import InputError
from headtrace.progress import Progress
from headtrace.writing import STANDARD_OUTPUT, check_folder_writable, check_writable, write_text

if TYPE_CHECKING:
    from rich.table import Table

    from headtrace.models import Model
    from headtrace.vocabulary import Prompt

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
PromptText = Annotated[
    str | None, typer.Option("--prompt", "-p", help="The prompt, as text; - reads standard input.")
]
PromptFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="A file whose text is the prompt; a line break at its very end is left out.",
    ),
]
Chat = Annotated[
    bool, typer.Option("--chat", help="Take the text as a user's message, through the model's chat template.")
]
TokenIds = Annotated[str | None, typer.Option("--tokens", help="The prompt as token ids: 1,2,3.")]
Bos = Annotated[
    bool | None,
    typer.Option("--bos/--no-bos", help="Begin with the BOS token or not (default: as the tokenizer does)."),
]
Revision = Annotated[str | None, typer.Option(help="Revision of a hub model, such as Pythia's step1000.")]
Dtype = Annotated[str, typer.Option(help="float32, float64, bfloat16, float16, or auto: as saved.")]
Device = Annotated[str, typer.Option(help="auto (cuda, else mps, else cpu), cpu, cuda, cuda:1, mps ...")]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        metavar="STRATEGY|FILE",
        help="Spread the model instead: auto, balanced, balanced_low_0, sequential, or a JSON file {module: device}.",
    ),
]
NumbersFile = Annotated[
    str | None, typer.Option("--out", help="Write the numbers into this file (.json; - for standard output).")
]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object on standard output, and nothing else there."),
]


_LONGEST = 100_000_000
"""Bytes of a prompt file; a device could be read for ever."""


def load_model(
    name: str,
    revision: str | None = None,
    dtype: str = "float32",
    device: str = "auto",
    device_map: str | None = None,
) -> Model:
    """Load with a spinner: it takes a few seconds."""
    places = device_kwargs(device, device_map)
    with notes.status(f"Loading {escape(printable(name))}"):
        from headtrace.models import load

        return load(name, revision=revision, dtype=dtype, **places)


def device_kwargs(device: str, device_map: str | None) -> dict[str, Any]:
    """Where a model goes, as ``headtrace.load`` is told: one device, or a device map, which a file may hold.

    >>> device_kwargs("cpu", None), device_kwargs("auto", "balanced")
    ({'device': 'cpu'}, {'device_map': 'balanced'})
    """
    if device_map is None:
        return {"device": device}
    if device != "auto":
        raise InputError(
            f"--device {device} is one place for the whole model, and --device-map {device_map} says where its parts "
            "go. Give one of them."
        )
    return {"device_map": _device_map_file(device_map) if device_map.endswith(".json") else device_map}


def _device_map_file(path: str) -> dict[str, Any]:
    import json

    expected = (
        'Expected a JSON object from modules to devices: {"model.layers.0": 0, "model.layers.1": "cpu", ...}.'
    )
    try:
        with open(path, encoding="utf-8") as file:
            found: Any = json.load(file)
    except OSError as error:
        raise InputError(f"--device-map {path!r} cannot be read: {error.strerror}. {expected}") from None
    except ValueError as error:
        raise InputError(f"--device-map {path!r} is not JSON: {error}. {expected}") from None
    if not isinstance(found, dict) or not all(type(place) in (int, str) for place in found.values()):  # type: ignore[union-attr]
        raise InputError(f"--device-map {path!r} is not a device map. {expected}")
    return found  # type: ignore[return-value]


class Bar:
    """A progress that can also be told a few words: how many failed, say."""

    def __init__(self, tell: Progress, words: Callable[[str], None]) -> None:
        self._tell, self.words = tell, words

    def __call__(self, done: int, of: int) -> None:
        self._tell(done, of)


@contextmanager
def progress_bar(what: str, total: int | None = None, *, resumes: bool = False) -> Generator[Bar]:
    """Rate and time that remains; the block gets a function to call with how much is done, and of how much.

    On a terminal a bar, in a log a line now and then. Where work ``resumes``, the first call says what was there
    before, which took no time now.
    """
    if not notes.is_terminal:
        lines = _Lines(what, resumes)
        yield Bar(lines, lambda words: setattr(lines, "words", words))
        return
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[rate]}"),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left:"),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[words]}", style="yellow"),
    )
    with progress.Progress(*columns, console=notes, transient=True) as bar:
        task = bar.add_task(escape(printable(what)), total=total, words="", rate="")
        begun = not resumes

        def tell(done: int, of: int) -> None:
            nonlocal begun
            if not begun:
                bar.reset(task, completed=done, total=of)
                begun = True
            speed = bar.tasks[0].speed
            bar.update(task, completed=done, total=of, rate="" if not speed else f"{speed:.3g}/s")

        yield Bar(tell, lambda words: bar.update(task, words=escape(printable(words))))


class _Lines:
    """Progress where nobody sees a bar: at most one line in ten seconds."""

    every = 10.0

    def __init__(self, what: str, resumes: bool = False) -> None:
        self.what, self.words = what, ""
        self.start = self.told = time.monotonic()
        self.before: int | None = None if resumes else 0

    def __call__(self, done: int, of: int) -> None:
        now = time.monotonic()
        if self.before is None:
            self.before = done
        if now - self.told < self.every:
            return
        self.told, passed = now, now - self.start
        new = done - self.before
        left = "" if not new else f", about {passed * (of - done) / new:.0f} s left ({new / passed:.3g}/s)"
        words = f", {self.words}" if self.words else ""
        note(f"{self.what}: {done} of {of}{left}{words}")


def read_prompt(
    prompt: str | None, tokens: str | None, file: str | None = None, chat: bool = False
) -> Prompt:
    """The prompt from ``-p``, ``--prompt-file`` or ``--tokens``; exactly one of them must be given."""
    if sum(each is not None for each in (prompt, tokens, file)) != 1:
        raise InputError(
            "Give the prompt either as text (-p 'When Mary ...', or --prompt-file FILE) or as token ids "
            "(--tokens 1,2,3), and once."
        )
    if tokens is not None:
        if chat:
            raise InputError("--chat needs the prompt as text: token ids are taken as they are.")
        return parse_ids(tokens)
    text = _file_text(file) if file is not None else _standard_input() if prompt == "-" else prompt or ""
    return as_chat(text) if chat else text


def as_chat(text: str) -> Any:
    """A text as what a user says to a chat model."""
    return [{"role": "user", "content": text}]


def _file_text(file: str) -> str:
    if file == "-":
        return _standard_input()
    try:
        with open(file, "rb") as opened:
            content = opened.read(_LONGEST + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"The prompt file {file!r} cannot be read: {reason}. Give a text file.") from None
    if len(content) > _LONGEST:
        raise InputError(
            f"The prompt file {file!r} holds more than {_LONGEST // 10**6} MB: that is no prompt."
        )
    return _without_last_break(content, f"The prompt file {file!r}")


def _standard_input() -> str:
    stream = getattr(sys.stdin, "buffer", None)
    content = sys.stdin.read().encode() if stream is None else stream.read()
    return _without_last_break(content, "Standard input")


def _without_last_break(content: bytes, what: str) -> str:
    """Editors and echo end a file with a line break, which is not part of what is meant."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{what} is not UTF-8 text (byte {error.start}). Save it as UTF-8.") from None
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise InputError(f"{what} is empty: it should hold the prompt.")
    return text


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


def show_tokens(tokens: Sequence[str]) -> None:
    """The tokens in use, quoted, with their positions."""
    cells = [f'[dim]{i}:[/][cyan]"{token_text(token)}"[/]' for i, token in enumerate(tokens)]
    console.print("Tokens  " + "  ".join(cells), highlight=False)


def show_table(title: str, table: Table) -> None:
    """A table under its title, which may be longer than the table is wide."""
    console.print(title, style="italic", markup=False, highlight=False, soft_wrap=True)
    console.print(table)


def readable(value: object) -> str:
    """A number, or several, with as many digits as people read.

    >>> readable([0.123456789, {"a": 2}])
    '[0.1235, a: 2]'
    """
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(readable(each) for each in value)}]"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {readable(each)}" for key, each in value.items())
    return str(value)


def check_figure(path: str | None) -> None:
    """Raise ``InputError``, before anything is computed, if a figure cannot be drawn there."""
    if path is not None:
        from headtrace.figures.style import figure_kind

        figure_kind(path)
        check_writable(path)


def check_numbers(path: str | None) -> None:
    """Raise ``InputError``, before anything is computed, if numbers cannot be written there as JSON."""
    if path is None:
        return
    check_writable(path)
    from headtrace.cli.destinations import is_stream

    if not path.lower().endswith(".json") and not is_stream(path):
        raise InputError(f"--out {path!r}: the numbers are written as JSON, so end its name in .json.")


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
    if path != STANDARD_OUTPUT:
        note(f"Wrote {path}")
