"""``headtrace show``: the tree holds the circuit, and token text is never read as markup."""

from __future__ import annotations

import os

from made_up import TOKENS, complete_circuit, content_circuit, small_circuit, worded_circuit
from rich.console import Console
from typer.testing import CliRunner

from headtrace.cli import app, main
from headtrace.cli.circuits import tree
from headtrace.vocabulary import SIDES


def _lines(circuit, **options) -> list[str]:
    console = Console(width=160, record=True, file=open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    console.print(tree(circuit, **options))
    return console.export_text().splitlines()


def test_the_tree_shows_every_edge_once():
    lines = _lines(small_circuit())
    titles = 1 + 4  # the root, and a query and a key branch under each of two firings
    words = [line for line in lines if line.endswith("a name, again")]
    assert len(words) == 1, "what an edge says is printed under it"
    assert len(lines) == titles + len(small_circuit().edges) + len(words)
    assert any("L5H2 7->6" in line and "0.3000" in line and "channels 1, 4" in line for line in lines)


def test_words_come_with_the_verdict_of_their_test():
    lines = [line.strip(" │└├─") for line in _lines(worded_circuit())]
    assert lines.count("The source is a name. (supported, p 2e-10)") == 2
    assert "The destination is a verb. (unsupported, p 0.31)" in lines
    assert "Anything. (unsupported, not judged)" in lines


def test_the_tree_goes_on_through_mlps():
    lines = _lines(content_circuit())
    titles = 1 + 4  # the root, query, key and value of the firing, input of the MLP
    assert len(lines) == titles + len(content_circuit().edges)
    assert [line.split()[-1] for line in lines if line.split()[-1] in SIDES] == [
        "query",
        "key",
        "value",
        "input",
    ]
    assert any("MLP 5 @1" in line and "..." in line for line in _lines(content_circuit(), depth=2))


def test_the_tree_of_a_complete_circuit_names_what_opposes_what_is_left_and_neurons():
    lines = _lines(complete_circuit())
    assert any("L8H4 7->3" in line and "-1.2500" in line and "opposing" in line for line in lines)
    assert any("MLP 5 @1" in line and "25% left without its input" in line for line in lines)
    assert any("MLP 5 @1" in line and "units 12 (+1.250), 3 (-0.500)" in line for line in lines)
    assert any("MLP 2 @6" in line and "-0.0625" in line for line in lines)


def test_show_begins_with_what_the_tokens_contribute(tmp_path):
    result = CliRunner().invoke(app, ["show", str(complete_circuit().save(tmp_path / "c.json"))])
    assert result.output.index("By token:") < result.output.index("Root (")
    assert '+3.7500  " Mary" 1' in result.output


def test_depth_and_leaves_shorten_the_tree_and_say_so():
    assert any("..." in line for line in _lines(small_circuit(), depth=1))
    assert any("and 2 more leaves" in line for line in _lines(small_circuit(), leaves=1))


def test_tokens_are_not_markup():
    lines = _lines(small_circuit(("[bold]", "[/]", *TOKENS[2:])))
    assert any('"[/]" -> "[bold]"' in line for line in lines)


def test_show_prints_summary_and_tree(tmp_path):
    path = small_circuit().save(tmp_path / "c.json")
    result = CliRunner().invoke(app, ["show", str(path), "--min-weight", "0.12"])
    assert result.exit_code == 0
    assert 'Why " Mary" rather than " John"?' in result.output
    assert "L4H0 1->0" in result.output
    assert "Offset" not in result.output


def test_show_of_a_damaged_file_exits_with_2_and_names_the_field(tmp_path, capsys):
    path = tmp_path / "c.json"
    path.write_text(small_circuit().save(path).read_text().replace('"side": "key"', '"side": "keys"', 1))
    try:
        main(["show", str(path)])
        code = 0
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert ".side: expected one of query, key" in capsys.readouterr().err.replace("\n", " ")
