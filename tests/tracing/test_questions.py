"""What is asked is what is traced: roots as types, answers that mean the same everywhere, no option without effect."""

from __future__ import annotations

import pytest
import torch

import headtrace
from headtrace.circuits import Heads, Likelihood, LogitDifference
from headtrace.errors import InputError
from headtrace.tasks import load_task
from tests.conftest import IOI
from tests.rounding import forward_terms, rounding
from tests.tiny import NAMES, prompts, tiny_model, top_two


@pytest.fixture(scope="module")
def builtin():
    return headtrace.load("builtin")


@pytest.mark.parametrize("name", NAMES)
def test_a_linear_root_is_worth_the_models_own_logit_difference(name: str) -> None:
    """Final norm's bias, unembedding's bias and softcap included, on every architecture."""
    model, ids = tiny_model(name), prompts()[0]
    answer, wrong = top_two(model, ids)
    circuit = headtrace.Tracer(model).trace(ids, answer, wrong)
    logits = model.end_logits([ids])[0]
    allowed = rounding(torch.float32, forward_terms(model), float(logits.abs().max()))
    assert circuit.root.value == pytest.approx(float(logits[answer] - logits[wrong]), abs=allowed)
    constant = model.weights.W_U @ model.weights.final_bias
    assert circuit.root.bias == pytest.approx(float(constant[answer] - constant[wrong]), abs=allowed)
    seeds = {circuit.node(e.source).site: e.weight for e in circuit.edges if e.side == "root"}
    offsets = [weight for site, weight in seeds.items() if site.kind == "offset"]
    assert offsets == ([] if circuit.root.bias <= 0 or circuit.reason else [circuit.root.bias])


def test_the_output_bias_of_the_builtin_model_is_a_seed_of_its_own(builtin) -> None:
    circuit = headtrace.Tracer(builtin).trace(IOI, " Mary", " John")
    assert circuit.root.value == pytest.approx(6.62, abs=0.01)
    (offset,) = [e for e in circuit.edges if circuit.node(e.source).kind == "offset" and e.side == "root"]
    assert offset.weight == pytest.approx(circuit.root.bias)
    assert circuit.node(offset.source).name == "Offset root @14"


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_a_continuation_is_the_sum_of_its_tokens_log_probabilities(name: str) -> None:
    model, ids = tiny_model(name), prompts()[0]
    tokens = (17, 30, 4)
    circuit = headtrace.Tracer(model).trace(ids, root=Likelihood(tokens, continuation=True))
    logits = model.record([*ids, *tokens[:-1]]).logits[0].log_softmax(-1)
    wanted = sum(float(logits[len(ids) - 1 + i, token]) for i, token in enumerate(tokens))
    allowed = rounding(torch.float32, 3 * forward_terms(model), abs(wanted))
    assert circuit.root.value == pytest.approx(wanted, abs=allowed)
    assert circuit.prompt.token_ids == (*ids, *tokens[:-1])
    assert circuit.root.position == len(ids) - 1


def test_a_continuation_has_seeds_at_each_of_its_positions() -> None:
    """Tokens that heads decide, one after another."""
    model, ids = tiny_model("gpt2"), prompts()[0]
    tokens: list[int] = []
    for _ in range(3):
        tokens.append(top_two(model, [*ids, *tokens])[0])
    circuit = headtrace.Tracer(model).trace(ids, root=Likelihood(tuple(tokens), continuation=True))
    positions = {circuit.node(e.source).dest for e in circuit.edges if e.side == "root"}
    assert positions == {10, 11, 12}
    alone = headtrace.Tracer(model).trace(ids, tokens[0])
    assert alone.root == Likelihood(
        (tokens[0],),
        value=alone.root.value,
        position=10,
        support=(tokens[0],),
        answer_tokens=(f"#{tokens[0]}",),
    )
    assert headtrace.verify(circuit, model, edges="none").max_prediction_error < 1e-4


def test_text_of_several_tokens_is_a_continuation(builtin) -> None:
    circuit = headtrace.Tracer(builtin).trace("When Mary and John went to", " the store")
    assert circuit.root.continuation
    assert circuit.root.answer_tokens == ("the", "store")
    assert circuit.prompt.tokens[-1] == "the"
    against = headtrace.Tracer(builtin).trace("When Mary and John went to", " the store", " the park")
    assert against.root.answer_tokens == ("store",)
    assert against.root.wrong_tokens == ("park",)
    assert against.prompt.tokens[-1] == "the"


def test_a_list_of_answers_means_alternatives_in_trace_and_in_trace_batch(builtin) -> None:
    tracer = headtrace.Tracer(builtin)
    one = tracer.trace(IOI, [" Mary", " Sarah"], " John")
    assert len(one.root.answer) == 2
    for circuit in tracer.trace_batch([IOI, IOI], [" Mary", " Sarah"], " John"):
        assert circuit.root.answer == one.root.answer
        assert {n.name for n in circuit.nodes} == {n.name for n in one.nodes}
    likely = tracer.trace_batch([IOI], [" Mary", " Sarah"])[0]
    assert likely.root.support == one.root.answer
    assert not likely.root.continuation


def test_prompts_bring_their_own_answers(builtin) -> None:
    tracer = headtrace.Tracer(builtin)
    example = load_task("ioi", builtin.tokenizer, n_per_cell=1)[0]
    record = {"text": example.text, "answer": example.answer, "wrong": example.wrong}
    by_ids = {"tokens": example.token_ids, "answer": example.answer_ids, "wrong": example.wrong_ids}
    traced = tracer.trace_batch([example, record, by_ids])
    assert len({circuit.root.answer for circuit in traced}) == 1
    assert [circuit.prompt.text for circuit in traced] == [example.text, example.text, None]
    others = tracer.trace_batch([example, IOI], answer=" Mary", wrong=" John")
    assert others[0].root.answer == traced[0].root.answer
    assert others[1].root.answer_tokens == ("Mary",)
    bare = tracer.trace_batch([{"text": IOI}, {"text": IOI, "answer": None}], answer=" Mary", wrong=" John")
    assert [circuit.root.answer_tokens for circuit in bare] == [("Mary",)] * 2
    with pytest.raises(InputError, match=r"needs .*'text' or 'tokens'"):
        tracer.trace({"prompt": IOI})


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"answer": 5, "wrong": 6, "top_k": 3}, "linear root does not use top_k.*root='probability'"),
        ({"answer": 5, "layer": 2}, "probability root does not use layer.*root='direction'"),
        ({"heads": ["L1H1"], "answer": 5}, "heads root does not use answer"),
        ({"root": LogitDifference((5,)), "answer": 5}, "already says what to explain"),
        (
            {"root": "sideways", "answer": 5},
            "no root 'sideways'.*'linear', 'probability', 'direction', 'heads'",
        ),
        ({"top_k": 0}, "top_k: expected a number of at least 1, got 0"),
        ({"top_k": 1000}, "top_k=1000: expected 1 to 61"),
        ({"top_p": 1.5}, "top_p: expected a number of at most 1.0, got 1.5"),
        ({"answer": []}, "list of answers is empty"),
        ({"direction": [1.0, 2.0], "layer": 1}, "has 2 numbers; the model's residual has 32"),
        ({"direction": torch.ones(32), "layer": 9}, "before layer 0 to 4"),
        ({"direction": torch.ones(32), "layer": 1, "position": 11}, "Position 11 does not exist"),
        ({"heads": ["L9H0"]}, "layers 0 to 3"),
    ],
)
def test_nothing_that_is_asked_for_is_left_without_effect(how: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        headtrace.Tracer(tiny_model("llama")).trace(prompts()[0], **how)


def test_integration_steps_reach_the_probability_root() -> None:
    model, ids = tiny_model("llama"), prompts()[0]
    rough, fine = (
        headtrace.Tracer(model, ig_steps=steps).trace(ids, root="probability", top_k=2) for steps in (1, 64)
    )
    assert (rough.method.ig_steps, fine.method.ig_steps) == (1, 64)
    weights = [{c.node(e.source).site: e.weight for e in c.edges if e.side == "root"} for c in (rough, fine)]
    shared = weights[0].keys() & weights[1].keys()
    assert any(abs(weights[0][site] - weights[1][site]) > 1e-3 for site in shared)


def test_heads_are_a_root_of_their_own(tmp_path) -> None:
    model, ids = tiny_model("llama"), prompts()[0]
    circuit = headtrace.Tracer(model, tau=0.05).trace(ids, heads=["L3H1", "L2H0"])
    assert circuit.root == Heads(("L3H1", "L2H0"), value=circuit.root.value, position=10)
    pattern = model.record(ids).patterns[:, 0]
    wanted = float(pattern[3, 1, 10].max() + pattern[2, 0, 10].max())
    assert circuit.root.value == pytest.approx(wanted, abs=1e-5)
    report = headtrace.verify(circuit, model, edges="top:2", controls=1)
    assert report.metric == "attention"
    report.save(tmp_path)
    assert headtrace.load_circuit(tmp_path / "circuit.json").root == circuit.root
    together = headtrace.Tracer(model, tau=0.05).trace_batch([ids, prompts()[1]], heads="L3H1")
    assert [c.root.heads for c in together] == [("L3H1",)] * 2
