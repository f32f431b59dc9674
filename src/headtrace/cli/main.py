"""The ``headtrace`` command: all commands, and what turns errors into one clear message and an exit code."""

from __future__ import annotations

import os

import typer

from headtrace import __version__
from headtrace.cli.commands import MARKUP, ListedCommands
from headtrace.cli.failures import DEBUG
from headtrace.cli.output import tolerate_few_characters

app = typer.Typer(
    name="headtrace",
    cls=ListedCommands,
    help="Why does this attention head attend here? Exact circuits of transformer language models.",
    no_args_is_help=True,
    rich_markup_mode=MARKUP,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"headtrace {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
    version: bool = typer.Option(  # noqa: ARG001
        False, "--version", callback=_show_version, is_eager=True, help="Show the version."
    ),
) -> None:
    if debug:
        os.environ[DEBUG] = "1"


def main(arguments: list[str] | None = None) -> None:
    """Run the command line, and end the process: 0, or 2 with one message that says what to do; see `failures`."""
    tolerate_few_characters()
    app(args=arguments, prog_name="headtrace")
