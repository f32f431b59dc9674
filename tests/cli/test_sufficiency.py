"""``headtrace sufficiency`` end to end."""

from __future__ import annotations

import json

import pytest

import headtrace
from headtrace.cli import main

TEXT = "When Mary and John went to the store, John gave a drink to"
OTHER = "When Anna and Tom went to the store, Emma gave a drink to"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The built-in model, and the file of a circuit traced on it."""
    model = headtrace.load("builtin")
    circuit = headtrace.Tracer(model).trace(TEXT, " Mary", " John")
    return model, circuit, circuit.save(tmp_path_factory.mktemp("circuit") / "c.json")


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as done:
        main([str(a) for a in arguments])
    return int(done.value.code or 0)


def test_it_prints_a_summary_and_writes_numbers_and_a_figure(made, tmp_path, capsys) -> None:
    model, circuit, file = made
    out = tmp_path / "found"
    assert run("sufficiency", file, "--counterfactual", OTHER, "--baselines", "--out", out) == 0
    shown = capsys.readouterr().out
    for word in ("Sufficiency of the circuit's", "Necessity", "attribution patching", "at own size"):
        assert word in shown
    saved = json.loads((out / "sufficiency.json").read_text())
    assert {"curve", "cpr", "cmd", "necessity", "baselines"} <= set(saved)
    expected = headtrace.sufficiency(circuit, model, OTHER)
    got = {point["components"]: point["sufficiency"] for point in saved["curve"]}
    assert got == pytest.approx(expected.curve, abs=1e-3)
    assert set(saved["baselines"]) == {
        "random", "attention", "attribution patching", "integrated gradients", "acc++",
    }  # fmt: skip
    assert (out / "sufficiency.png").read_bytes().startswith(b"\x89PNG")


def test_json_is_one_object_and_token_ids_do_as_well_as_text(made, capsys) -> None:
    model, _, file = made
    ids = ",".join(map(str, model.to_ids(OTHER)))
    assert run("sufficiency", file, "--counterfactual-ids", ids, "--json") == 0
    by_ids = json.loads(capsys.readouterr().out)
    assert run("sufficiency", file, "--counterfactual", OTHER, "--json") == 0
    assert json.loads(capsys.readouterr().out)["curve"] == by_ids["curve"]
    assert by_ids["baselines"] == {}


def test_mean_ablation_needs_no_counterfactual(made, capsys) -> None:
    assert run("sufficiency", made[2], "--ablation", "mean", "--json") == 0
    assert json.loads(capsys.readouterr().out)["ablation"] == "mean"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "Give a counterfactual prompt"),
        (("--counterfactual", OTHER + " the"), "has 16 tokens"),
        (("--counterfactual", TEXT), "own prompt"),
        (("--counterfactual", OTHER, "--counterfactual-ids", "1,2"), "not both"),
        (("--counterfactual-ids", "one"), "not a list of token ids"),
        (("--counterfactual", OTHER, "--ablation", "none"), "expected one of"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(made, capsys, options, said) -> None:
    assert run("sufficiency", made[2], *options) == 2
    assert said in " ".join(capsys.readouterr().err.split())
