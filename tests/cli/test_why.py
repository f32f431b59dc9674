"""``headtrace why``: the sentence on the screen, every form of file, and one clear line for what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import headtrace
from headtrace.cli import app

MARY = "When Mary and John went to the store, John gave a drink to"
OTHER = "When Mary and John went to the store, Mary gave a drink to"
QUICK = ("why", "builtin", "-p", MARY, "--counterfactual", OTHER)


def test_the_screen_has_the_sentence_the_steps_and_the_ledger() -> None:
    done = CliRunner().invoke(app, [*QUICK])
    assert done.exit_code == 0, done.output
    text = " ".join(done.stdout.split())
    assert 'Why "Mary" rather than "John"?' in text
    assert "removed:" in text
    assert "Straight into the answer:" in text
    assert "= +" in text


def test_json_is_the_file_that_load_mechanism_reads(tmp_path: Path) -> None:
    out = tmp_path / "m.json"
    done = CliRunner().invoke(app, [*QUICK, "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == json.loads(out.read_text())
    found = headtrace.load_mechanism(out)
    assert found.sentence == json.loads(done.stdout)["sentence"]


@pytest.mark.parametrize(("name", "holds"), [("m.html", "<main"), ("m.md", "| step |"), ("m.svg", "<svg")])
def test_every_form_is_written(name: str, holds: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*QUICK, "--no-measure", "--out", str(tmp_path / name)])
    assert done.exit_code == 0, done.output
    assert holds in (tmp_path / name).read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--out", "m.docx"), "end its name in .html, .json, .md, .svg"),
        (("--counterfactual", "When Mary"), "equally long"),
        (("--counterfactual", MARY.replace("went ", "")), "('went' is only in the prompt)"),
        (("--counterfactual", MARY), "prompt itself"),
        (("--answer", " Zorblax"), "Zorblax"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(options: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(app, ["why", "builtin", "-p", MARY, *options])
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


def test_a_run_that_is_not_there_is_named() -> None:
    done = CliRunner().invoke(app, ["why", "runs/none"])
    assert done.exit_code == 2
    assert "There is no run at 'runs/none'" in " ".join(done.output.split())
