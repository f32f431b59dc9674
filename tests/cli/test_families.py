"""``headtrace families``, ``signals`` and ``compare`` end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headtrace.circuits import write_parquet
from headtrace.cli import app
from headtrace.families import load_families
from tests.families.populations import made_up, traced


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    _, circuits = traced("ioi", 1)
    write_parquet(circuits, tmp_path / "many.parquet")
    circuits[0].save(tmp_path / "a.json")
    circuits[1].save(tmp_path / "b.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: object, code: int = 0):
    done = CliRunner().invoke(app, [str(each) for each in arguments])
    assert done.exit_code == code, done.output + str(done.exception)
    return done


def test_families_are_shown_written_and_printed_as_json(here: Path) -> None:
    shown = run("families", "many.parquet", "--grain", "edges", "--n", "2", "--out", "found").stdout
    assert "30 circuits by edges: 2 families (given)" in shown
    assert {p.name for p in (here / "found").iterdir()} == {
        "families.json", "clusters.png", "stability.png", "representatives.html",
    }  # fmt: skip
    printed = json.loads(run("families", "many.parquet", "--grain", "edges", "--n", "2", "--json").stdout)
    assert printed["labels"] == json.loads((here / "found" / "families.json").read_text())["labels"]
    assert load_families(here / "found").n == 2


def test_exclusive_edges_are_ablated_on_request(here: Path) -> None:
    done = run("families", "many.parquet", "--n", "2", "--ablate", "--prompts", "2", "--out", "found")
    assert "exclusive edges of family" in done.stdout
    assert (here / "found" / "ablation.png").is_file()
    assert "ablation" in json.loads((here / "found" / "families.json").read_text())


def test_signals_of_circuits_and_of_families(here: Path) -> None:
    run("families", "many.parquet", "--grain", "edges", "--n", "2", "--out", "found")
    shown = run(
        "signals", "many.parquet#1", "many.parquet#2", "--families", "found", "--most", "3", "--out", "s"
    ).stdout
    assert "family 1 of many.parquet (3 circuits)" in shown
    assert {p.name for p in (here / "s").iterdir()} == {"signals.json", "signals.png"}
    printed = json.loads(run("signals", "many.parquet#1", "b.json", "--json").stdout)
    assert printed["circuits"] == [1, 1]
    assert printed["table"][0]["cosine"] == pytest.approx(1.0)
    done = run("signals", "many.parquet#7", "b.json", "--families", "found", code=2)
    assert "has no family '7'; it has: 1, 2" in done.stderr


def test_circuits_are_compared_as_table_figure_and_page(here: Path) -> None:
    shown = run("compare", "a.json", "b.json").stdout
    assert "2 circuits, matched by components" in shown
    for name in ("c.json", "c.png", "c.html"):
        run("compare", "a.json", "b.json", "--out", name)
        assert (here / name).stat().st_size > 100
    run("compare", "many.parquet", "--grain", "components", "--out", "all")
    assert {p.name for p in (here / "all").iterdir()} == {
        "comparison.json",
        "comparison.png",
        "comparison.html",
    }
    printed = json.loads(run("compare", "a.json", "a.json", "b.json", "--json").stdout)
    assert [each["name"] for each in printed["circuits"]] == ["a.json (0)", "a.json (1)", "b.json"]


def test_what_a_user_can_mend_is_said_with_exit_code_2(here: Path) -> None:
    made_up([(0, 0, (1,))], sha="cd" * 32).save(here / "other.json")
    for words, told in (
        (("families", "a.json"), "at least 3 circuits"),
        (("families", "nowhere.parquet"), "nowhere.parquet"),
        (("families", "many.parquet", "--grain", "heads"), "grain='heads'"),
        (("families", "many.parquet", "--out", "a.json"), "a.json"),
        (("compare", "a.json"), "at least two circuits"),
        (("compare", "a.json", "other.json"), "(weights cdcdcdcdcdcd)"),
        (("compare", "a.json", "b.json", "--out", "c.docx"), "end its name in .json, .png"),
        (("signals", "a.json", "other.json"), "(weights cdcdcdcdcdcd)"),
        (("signals", "a.json", "b.json", "--families", "nowhere"), ""),
    ):
        if told:
            assert told in run(*words, code=2).stderr


def test_weights_that_differ_are_a_warning_when_only_they_do(here: Path) -> None:
    from dataclasses import replace

    from headtrace.circuits import load_circuit

    circuit = load_circuit("a.json")
    replace(circuit, model=replace(circuit.model, weights_sha256="ef" * 32)).save("step2.json")
    done = run("compare", "a.json", "step2.json")
    assert "The weights differ" in done.stderr
    assert "(weights efefefefefef," in done.stderr, (
        "twelve digits of a hash tell models apart, and can be read"
    )
    assert (
        "channels are computed from weights"
        in run("compare", "a.json", "step2.json", "--grain", "edge-channel", code=2).stderr
    )
