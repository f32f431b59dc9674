"""The list of commands is stated apart from the commands, so that help is quick: here it is held against them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import typer
from typer.testing import CliRunner

import headtrace.cli
from headtrace.circuits.exports import TEXTS
from headtrace.cli import app
from headtrace.cli.commands import COMMANDS
from headtrace.cli.destinations import FORMATS


def test_the_list_says_what_each_command_says_first() -> None:
    found = typer.main.get_command(app).commands
    told = {name: (command.short_help or command.help).split("\n\n")[0] for name, command in found.items()}
    assert told == {name: line for name, (_, line) in COMMANDS.items()}


def test_no_module_with_a_command_is_missing_from_the_list() -> None:
    names = {file.stem for file in Path(headtrace.cli.__file__).parent.glob("*.py")} - {"__init__", "main"}
    with_commands = {name for name in names if hasattr(import_module(f"headtrace.cli.{name}"), "register")}
    assert with_commands == {module for module, _ in COMMANDS.values()}


def test_a_name_that_is_nearly_a_command_is_understood() -> None:
    done = CliRunner().invoke(app, ["veiw", "c.json"])
    assert done.exit_code == 2
    assert "view" in done.output


def test_the_formats_that_help_names_are_those_that_can_be_written() -> None:
    assert (*TEXTS, "parquet", "html") == FORMATS
