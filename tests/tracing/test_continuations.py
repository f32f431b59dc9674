"""A continuation against a continuation: read where they first differ, with what follows measured beside it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import headtrace
from headtrace.circuits import LogitDifference
from headtrace.cli import app
from headtrace.errors import InputError
from headtrace.request import TraceRequest
from tests.conftest import IOI
from tests.rounding import rounding
from tests.tiny import prompts, tiny_model

FLIPPED = IOI.replace("John gave", "Mary gave")
PATHS: list[dict[str, Any]] = [{}, {"paths": "complete"}, {"paths": "difference", "counterfactual": FLIPPED}]


@pytest.fixture(scope="module")
def builtin() -> headtrace.Model:
    return headtrace.load("builtin")


def log_likelihood(model: headtrace.Model, ids: list[int], continuation: tuple[int, ...]) -> torch.Tensor:
    """Of a continuation, by the Hugging Face model alone: one pass over everything."""
    with torch.no_grad():
        logits = model.hf(input_ids=torch.tensor([[*ids, *continuation]])).logits[0]
    found = logits[len(ids) - 1 : -1].log_softmax(-1)
    return found[range(len(continuation)), list(continuation)].sum()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize(
    ("answer", "wrong"),
    [((5, 9), (7, 3)), ((4, 5, 9), (4, 7)), ((4, 6, 5), (4, 6, 8, 2, 2)), ((5,), (7, 7, 1))],
    ids=["apart", "one shared", "two shared", "one token"],
)
def test_value_and_rests_are_the_log_odds_of_the_continuations(
    name: str, answer: tuple[int, ...], wrong: tuple[int, ...]
) -> None:
    model, ids = tiny_model(name, dtype=torch.float64), prompts()[0]
    root = LogitDifference.of_continuations(answer, wrong)
    given = [*ids, *root.answer_prefix]
    expected = float(log_likelihood(model, ids, answer) - log_likelihood(model, ids, wrong))
    if expected < 0:  # else there is nothing to explain
        root, expected = LogitDifference.of_continuations(wrong, answer), -expected
    found = headtrace.Tracer(model).trace(ids, root=root, paths="complete")
    assert list(found.prompt.token_ids) == given
    # Norms of the Llama family compute in float32 whatever the weights are.
    bound = rounding(torch.float64 if name == "gpt2" else torch.float32, 256, 10.0)
    assert found.root.log_odds == pytest.approx(expected, abs=bound)
    if found.edges:
        assert headtrace.verify(found, model, edges="none").verdict == "PASS"


@pytest.mark.parametrize("how", PATHS, ids=["attention", "complete", "difference"])
def test_a_shared_beginning_is_given_to_the_model(builtin: headtrace.Model, how: dict[str, Any]) -> None:
    found = headtrace.Tracer(builtin).trace(IOI, answer=" Mary and Tom", wrong=" Mary and Anna", **how)
    assert found.prompt.tokens[-2:] == ("Mary", "and")
    assert (found.root.answer_tokens, found.root.wrong_tokens) == (("Tom",), ("Anna",))
    assert "differ first at" in found.summary()
    if found.root.adds_up and "counterfactual" not in how:
        one, other = builtin.end_logits([[*builtin.to_ids(IOI), *found.root.answer_prefix]])[0][
            [found.root.answer[0], found.root.wrong[0]]
        ]
        assert found.root.value == pytest.approx(float(one - other), abs=1e-4)
    assert headtrace.verify(found, builtin, edges="none").verdict == "PASS"
    assert all(node.dest is None or node.dest < len(found.prompt.tokens) for node in found.nodes)


def test_no_number_of_it_can_be_falsified(builtin: headtrace.Model) -> None:
    found = headtrace.Tracer(builtin).trace(IOI, answer=" Mary and", wrong=" John and")
    assert headtrace.verify(found, builtin, edges="none").verdict == "PASS"
    assert all(rest < 0 for rest in found.root.rest)
    one, other = found.root.continuations
    for wrong in (
        replace(found.root, rest=(found.root.rest[0] + 0.01, found.root.rest[1])),
        replace(found.root, rest=None),
        replace(found.root, continuations=((*one[:-1], one[-1] + 1), other)),
    ):
        assert headtrace.verify(replace(found, root=wrong), builtin, edges="none").verdict != "PASS"
    moved = replace(found.root, continuations=(one, (other[0] + 1, *other[1:])))
    with pytest.raises(InputError, match=r"root\.continuations: expected to differ first where"):
        headtrace.verify(replace(found, root=moved), builtin, edges="none")


def test_request_run_and_command_line_take_it(builtin: headtrace.Model, tmp_path: Path) -> None:
    line = {"text": IOI, "answer": " Mary and Tom", "wrong": " Mary and Anna"}
    assert TraceRequest.from_json(line).to_json() == line
    expected = headtrace.Tracer(builtin).trace(line)
    run = headtrace.run(builtin, [line], out=tmp_path / "run")
    assert run.circuit(0) == expected
    words = ["trace", "builtin", "-p", IOI, "--answer", line["answer"], "--wrong", line["wrong"], "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    root = json.loads(done.stdout)["root"]
    assert root["continuations"] == [list(each) for each in expected.root.continuations]
    assert expected.save(tmp_path / "c.json").exists()
    assert headtrace.load_circuit(tmp_path / "c.json") == expected


@pytest.mark.parametrize(
    ("answer", "wrong", "message"),
    [
        (" Mary and", " Mary", r"'Maryand' and the wrong answer 'Mary' begin alike"),
        (" Mary and", " Mary and", "are the same"),
        (" Mary and", [" John", " Tom and"], "It must be one token"),
    ],
)
def test_answers_between_which_no_token_decides_are_refused(
    builtin: headtrace.Model, answer: Any, wrong: Any, message: str
) -> None:
    with pytest.raises(InputError, match=message) as error:
        headtrace.Tracer(builtin).trace(IOI, answer=answer, wrong=wrong)
    assert "\n" not in str(error.value)
