"""The ``headtrace`` command: collects the commands, and turns errors into one clear message and exit code 2."""

from __future__ import annotations

import os
import sys
from importlib import import_module

import typer
from rich.console import Console

from headtrace import __version__
from headtrace.errors import HeadtraceError

app = typer.Typer(
    name="headtrace",
    help="Why does this attention head attend here? Exact circuits of transformer language models.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# One module per command (or family of commands); each has `register(app)`.
COMMANDS = [
    "models",
    "record",
    "decompose",
    "emerge",
    "trace",
    "show",
    "view",
    "verify",
    "sufficiency",
    "intervene",
    "tasks",
    "toy",
]


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"headtrace {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version."
    ),
) -> None:
    if debug:
        os.environ["HEADTRACE_DEBUG"] = "1"


for _name in COMMANDS:
    import_module(f"headtrace.cli.{_name}").register(app)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. Errors that a user can act on end with exit code 2 and no traceback."""
    try:
        app(args=arguments, prog_name="headtrace")
    except HeadtraceError as error:
        if os.environ.get("HEADTRACE_DEBUG"):
            raise
        Console(stderr=True).print(f"[bold red]Error:[/] {_escape(str(error))}", soft_wrap=True)
        sys.exit(2)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
