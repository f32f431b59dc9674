"""What compiled and planted models found wrong: one test for each mistake, which fails on the code before its mend."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import headtrace
from headtrace.errors import IdentityError
from headtrace.models import ARCHITECTURES
from headtrace.models.frozen import CONTENT_FIELDS
from tests.tiny import prompts, tiny_model, top_two
from tests.truth.compiled import ABOUT, compiled_model
from tests.truth.programs import questions


@pytest.mark.parametrize("wrong", [{"gain_offset": 1.0}, {"norm": "layer"}], ids=["gain_offset", "norm"])
def test_a_wrong_fact_about_norms_is_noticed_in_float64(wrong, monkeypatch) -> None:
    facts = dict(ARCHITECTURES)
    monkeypatch.setattr(ARCHITECTURES, "_known", {**facts, "llama": replace(facts["llama"], **wrong)})
    model = tiny_model("llama", dtype=torch.float64)
    with pytest.raises(IdentityError, match=r"norm=.*gain_offset="):
        model.record(prompts())


@pytest.mark.parametrize("program", ABOUT)
def test_sums_that_cancel_are_judged_by_what_was_added_up(program: str) -> None:
    model = compiled_model(program, rotated=True)
    model.record([question.ids for question in questions(program, 8, seed=20)]).check()


def test_a_final_state_that_no_token_reads_is_no_error() -> None:
    """An unembedding orthogonal to what the first position holds: its logits are rounding, and nothing else."""
    model = tiny_model("llama", dtype=torch.float64)
    ids = prompts()[0]
    recording = model.record([ids])
    seen = recording.residuals[-1, 0, 0] * model.weights.final_gain
    weight = model.hf.get_output_embeddings().weight
    with torch.no_grad():
        weight -= torch.outer(weight @ seen / (seen @ seen), seen)
    model.record([ids]).check()


def test_attention_of_two_visible_keys_counts_below_one() -> None:
    method = headtrace.Tracer(tiny_model("llama", dtype=torch.float64)).method
    assert method.threshold(2) < 0.9999999
    assert [method.threshold(n) for n in (3, 5, 10)] == pytest.approx([2.5 / 3, 0.5, 0.25])


def test_firings_of_layer_0_have_causes() -> None:
    (ids, answer, wrong, _), *_ = questions("previous token", 1, seed=20)
    model = compiled_model("previous token")
    for paths in ("attention", "complete"):
        circuit = headtrace.Tracer(model).trace(ids, answer, wrong, root="linear", paths=paths)
        sides = {edge.side for edge in circuit.edges if circuit.node(edge.target).layer == 0}
        assert sides >= {"query", "key"}


def test_rounding_at_the_kink_of_an_activation_does_not_decide_what_tokens_contribute() -> None:
    """Every hidden unit of an OPT moved to within rounding of zero, on one side and on the other."""
    model, ids = tiny_model("opt", dtype=torch.float64), prompts()[0]
    answer, wrong = top_two(model, ids)
    found = []
    for target in (-1e-13, 1e-13):
        for layer in range(model.n_layers):
            recording = model.record([ids], keep=CONTENT_FIELDS)
            fc1 = model.layers[layer].fc1
            with torch.no_grad():
                fc1.bias += target - fc1(recording.mlp_inputs[layer][0, -1])
        circuit = headtrace.Tracer(model).trace(ids, answer, wrong, root="linear", paths="content")
        assert circuit.prompt.contributions is not None
        found.append(circuit.prompt.contributions)
    assert found[0] == pytest.approx(found[1], abs=1e-9)
