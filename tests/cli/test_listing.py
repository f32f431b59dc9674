"""The list of commands: each is a function of its name, with a help of its own, and none is imported to be listed."""

from __future__ import annotations

from importlib import import_module
from keyword import iskeyword

import typer
from typer.testing import CliRunner

from headtrace.circuits.exports import TEXTS
from headtrace.cli import app
from headtrace.cli.main import COMMANDS, GROUPS
from headtrace.cli.output import FORMATS


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


def test_the_list_begins_with_why_and_shows_every_command_in_its_group() -> None:
    listed = CliRunner().invoke(app, ["--help"]).output
    places = [
        listed.index(text)
        for group, commands in GROUPS.items()
        for text in (f"─ {group} ─", *(f"│ {name} " for name in commands))
    ]
    assert next(iter(COMMANDS)) == "why"
    assert places == sorted(places)


def test_a_name_that_is_nearly_a_command_is_understood() -> None:
    done = CliRunner().invoke(app, ["veiw", "c.json"])
    assert done.exit_code == 2
    assert "view" in done.output


def test_the_formats_that_help_names_are_those_that_can_be_written() -> None:
    assert (*TEXTS, "parquet", "html") == FORMATS


def test_help_breaks_lines_where_the_terminal_does_and_not_where_the_source_does() -> None:
    for name, command in typer.main.get_command(app).commands.items():
        prose = [each for each in (command.help or "").split("\n\n") if "\n " not in f"\n{each}"]
        assert [each for each in prose if "\n" in each] == [], name
