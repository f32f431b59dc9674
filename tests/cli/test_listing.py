"""The list of commands: each is a function of its name, with a help of its own, and none is imported to be listed."""

from __future__ import annotations

from importlib import import_module
from keyword import iskeyword

import typer
from typer.testing import CliRunner

from headtrace.circuits.exports import TEXTS
from headtrace.cli import app
from headtrace.cli.destinations import FORMATS
from headtrace.cli.main import COMMANDS


def test_help_begins_with_the_line_of_the_list_and_goes_on_with_the_docstring() -> None:
    found = typer.main.get_command(app).commands
    assert list(found) == list(COMMANDS)
    for name, (module, line) in COMMANDS.items():
        first, *more = found[name].help.split("\n\n")
        assert first == line
        documented = getattr(
            import_module(f"headtrace.cli.{module}"), f"{name}_" if iskeyword(name) else name
        ).__doc__
        assert not more or more[0].split()[0] == documented.split()[0]


def test_a_name_that_is_nearly_a_command_is_understood() -> None:
    done = CliRunner().invoke(app, ["veiw", "c.json"])
    assert done.exit_code == 2
    assert "view" in done.output


def test_the_formats_that_help_names_are_those_that_can_be_written() -> None:
    assert (*TEXTS, "parquet", "html") == FORMATS
