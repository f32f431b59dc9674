"""What is printed: nothing wraps in a pipe, nothing from a file or a prompt steers the terminal, JSON is JSON."""

from __future__ import annotations

import io
import json

import pytest
from rich.table import Table
from rich.text import Text

from headtrace.cli.output import SafeConsole, check_output, console, emit, printable
from headtrace.errors import InputError

EVIL = "\x1b[2J\x9b31m\u202eevil\x07\ud800\u2066"


def test_control_characters_are_visible_and_harmless() -> None:
    shown = printable(EVIL)
    assert shown == "\\x1b[2J\\x9b31m\\u202eevil\\x07\\ud800\\u2066"
    assert printable("Zoë 数 \u200d") == "Zoë 数 \u200d"


@pytest.mark.parametrize("wrap", [str, Text, lambda text: _table(text)], ids=["text", "Text", "table"])
def test_the_console_lets_no_control_character_through(wrap) -> None:
    out = io.StringIO()
    SafeConsole(file=out).print(wrap(EVIL), markup=False)
    assert not set(out.getvalue()) & set("\x1b\x9b\u202e\x07\u2066\ud800")
    assert "evil" in out.getvalue()


def _table(text: str) -> Table:
    table = Table("a")
    table.add_row(text)
    return table


def test_nothing_wraps_when_piped() -> None:
    out = io.StringIO()
    SafeConsole(file=out).print("word " * 300)
    assert len(out.getvalue().splitlines()) == 1


def test_json_is_one_object_and_nothing_else(capsys) -> None:
    emit({"token": EVIL, "number": float("nan")}, as_json=True, show=lambda: console.print("for people"))
    printed = capsys.readouterr().out
    assert json.loads(printed) == {"token": EVIL, "number": None}
    assert printed.isascii()


def test_people_read_on_standard_error_where_a_file_has_standard_output(capsys) -> None:
    emit({}, as_json=False, show=lambda: console.print("for people"), out="-")
    emit({}, as_json=False, show=lambda: console.print("for all"))
    captured = capsys.readouterr()
    assert (captured.err, captured.out) == ("for people\n", "for all\n")


def test_standard_output_is_given_once() -> None:
    check_output(True, "c.json", None)
    with pytest.raises(InputError, match="asked for twice"):
        check_output(True, "-")
