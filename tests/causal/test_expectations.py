"""Circuits as tests: claims hold in their own model, and break, where it begins, in one that lost something."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import headtrace
from headtrace.causal.expectations import Claim, expect, make_claims, read_claims, save_claims
from headtrace.cli import app
from headtrace.errors import InputError
from tests.conftest import IOI


@pytest.fixture(scope="module")
def builtin():
    return headtrace.load("builtin")


@pytest.fixture(scope="module")
def claims(builtin):
    return make_claims(headtrace.Tracer(builtin).trace(IOI, " Mary", " John"), builtin)


@pytest.fixture(scope="module")
def damaged(builtin):
    """The builtin model without the queries of layer 1: its heads attend to whatever."""
    hf = copy.deepcopy(builtin.hf)
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if ".1." in name and ("c_attn" in name or "q_proj" in name):
                parameter[..., : builtin.d_model].zero_()
    return headtrace.load(hf, builtin.tokenizer, name="damaged")


def test_claims_of_a_circuit_hold_in_its_own_model(builtin, claims) -> None:
    found = expect(claims, builtin)
    assert found.passed
    assert found.first_broken is None
    assert {claim.kind for claim in claims} == {"answer", "attends", "carries", "causal"}
    for each in found.checked:
        assert each.measured == pytest.approx(2 * each.claim.at_least, rel=1e-4), (
            "half of what is there is expected"
        )
    answer = next(each for each in found.checked if each.claim.kind == "answer")
    assert answer.measured == pytest.approx(6.62, abs=0.01)
    assert found.frame()["verdict"].to_list() == ["PASS"] * len(claims)


def test_what_broke_first_is_where_the_model_was_damaged(claims, damaged) -> None:
    found = expect(claims, damaged)
    assert not found.passed
    assert found.first_broken is not None
    assert found.first_broken.claim.firing.startswith("L1H"), "layer 0 attends as it did"
    assert "The first claim that broke" in str(found)
    assert "FAIL" in str(found)


def test_steps_of_a_mechanism_are_claims_too(builtin, damaged, tmp_path) -> None:
    other = IOI.replace("Mary", "Susan")
    circuit = headtrace.Tracer(builtin).trace(IOI, " Mary", " John", paths="difference", counterfactual=other)
    claims = make_claims(circuit, builtin)
    steps = [claim for claim in claims if claim.kind == "step"]
    assert steps
    assert expect(claims, builtin).passed
    save_claims(claims, tmp_path / "c.json")
    assert list(read_claims(tmp_path / "c.json")) == list(claims)
    lost = [each for each in expect(claims, damaged).checked if each.claim.kind == "step" and not each.passed]
    assert any("copies *Mary*" in str(each) for each in lost), (
        "the heads of layer 1 that copied attend elsewhere"
    )
    assert str(lost[0]).startswith("FAIL  step: ")
    with pytest.raises(InputError, match="same number of tokens"):
        replace(steps[0], other=steps[0].other[1:])


def test_files_of_claims_and_the_command(builtin, claims, damaged, tmp_path) -> None:
    file = save_claims(claims, tmp_path / "ioi.claims.json")
    assert tuple(read_claims(file)) == tuple(claims)
    damaged.hf.save_pretrained(tmp_path / "damaged")
    builtin.tokenizer.save_pretrained(tmp_path / "damaged")
    good = CliRunner().invoke(app, ["expect", str(file), "--model", "builtin"])
    assert good.exit_code == 0
    assert "PASS" in good.output
    bad = CliRunner().invoke(app, ["expect", str(file), "--model", str(tmp_path / "damaged"), "--json"])
    assert bad.exit_code == 1
    assert json.loads(bad.stdout)["verdict"] == "FAIL"
    headtrace.Tracer(builtin).trace(IOI, " Mary", " John").save(tmp_path / "circuit.json")
    made = tmp_path / "made.json"
    assert (
        CliRunner().invoke(app, ["expect", str(tmp_path / "circuit.json"), "--out", str(made)]).exit_code == 0
    )
    assert read_claims(made) == read_claims(file)
    assert CliRunner().invoke(app, ["expect", str(file)]).exit_code == 2


@pytest.mark.slow
def test_pytest_runs_a_test_for_every_claim(claims, damaged, builtin, tmp_path, monkeypatch, capsys) -> None:
    save_claims(claims, tmp_path / "ioi.claims.json")
    damaged.hf.save_pretrained(tmp_path / "damaged")
    builtin.tokenizer.save_pretrained(tmp_path / "damaged")
    plugin = [
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
        "-q",
        "--rootdir",
        ".",
    ]
    monkeypatch.chdir(tmp_path)
    claimed = [*plugin, "ioi.claims.json", "--headtrace-model"]
    assert pytest.main([*claimed, "builtin"]) == 0  # in this process, which has torch already
    assert f"{len(claims)} passed" in capsys.readouterr().out
    assert pytest.main([*claimed, "damaged"]) == 1
    told = capsys.readouterr().out
    assert "FAIL  L1H" in told
    assert f"{len(claims)} passed" not in told


@pytest.mark.ill_typed
@pytest.mark.parametrize(
    ("claim", "said"),
    [
        ({"kind": "sings", "at_least": 1, "tokens": [1]}, r"claims\[0\]: There is no claim .sings."),
        ({"kind": "attends", "at_least": 1, "tokens": [1]}, "not a firing"),
        ({"kind": "answer", "at_least": 1, "tokens": [1]}, "needs an answer"),
        ({"kind": "answer"}, "expected kind, at_least, tokens"),
        ("attends", "expected kind, at_least, tokens"),
    ],
)
def test_a_claim_that_is_none_is_refused_by_its_number(tmp_path, claim: object, said: str) -> None:
    (tmp_path / "c.json").write_text(json.dumps({"schema": "headtrace.claims/1", "claims": [claim]}))
    with pytest.raises(InputError, match=said):
        read_claims(tmp_path / "c.json")


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"schema": "headtrace.circuit/2"}'])
def test_another_file_is_refused(tmp_path, text: str) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(InputError, match=r"claims|JSON"):
        read_claims(tmp_path / "c.json")


def test_claims_need_a_circuit_of_a_difference_and_a_prompt_that_fits(builtin) -> None:
    circuit = headtrace.Tracer(builtin).trace(IOI, " Mary")
    with pytest.raises(InputError, match="logit difference"):
        make_claims(circuit, builtin)
    with pytest.raises(InputError, match="no head L9H0"):
        expect([Claim("attends", 0.5, (1, 2, 3), firing="L9H0:2:1")], builtin)
