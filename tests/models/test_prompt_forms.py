"""Whatever form a prompt has, the same tokens run, wherever a prompt is taken."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from docs.studies.survey import survey

import headtrace
from headtrace.channels.emergence import strongest_cases
from headtrace.errors import InputError
from tests.conftest import IOI

CHAT = [{"role": "user", "content": IOI}]


@pytest.fixture(scope="module")
def model() -> headtrace.Model:
    loaded = headtrace.load("builtin")
    tokenizer = copy.deepcopy(loaded.tokenizer)
    tokenizer.chat_template = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.pad_token = tokenizer.bos_token
    return headtrace.load(loaded.hf, tokenizer=tokenizer)


def forms(model: headtrace.Model) -> dict[str, Any]:
    tokenizer = model.tokenizer
    return {
        "ids": tokenizer(IOI)["input_ids"],
        "BatchEncoding": tokenizer(IOI),
        "BatchEncoding of tensors": tokenizer(IOI, return_tensors="pt"),
        "1-D tensor": tokenizer(IOI, return_tensors="pt")["input_ids"][0],
        "2-D tensor": tokenizer(IOI, return_tensors="pt")["input_ids"],
        "numpy": tokenizer(IOI, return_tensors="np")["input_ids"],
        "chat": CHAT,
    }


def test_every_form_of_a_prompt_runs_the_same_tokens(model: headtrace.Model) -> None:
    wanted = model.record(IOI)
    tracer = headtrace.Tracer(model)
    circuit = tracer.trace(IOI, " Mary", " John")
    why = str(tracer.explain(IOI, "L2H0:14:10"))
    for name, given in forms(model).items():
        assert torch.equal(model.record(given).token_ids, wanted.token_ids), name
        assert torch.equal(model.end_logits(given), model.end_logits(IOI)), name
        found = tracer.trace(given, " Mary", " John")
        assert (found.prompt.token_ids, found.edges) == (circuit.prompt.token_ids, circuit.edges), name
        assert tracer.trace_batch(given, " Mary", " John") == [found], name
        assert str(tracer.explain(given, "L2H0:14:10")) == why, name
        assert survey(model, given).frame.equals(survey(model, IOI).frame), name
        assert strongest_cases(model, given, 2)[0].firing == strongest_cases(model, IOI, 2)[0].firing, name


def test_a_list_of_conversations_is_a_batch(model: headtrace.Model) -> None:
    wanted = model.record(CHAT).token_ids
    assert torch.equal(model.record([CHAT, CHAT]).token_ids, torch.cat((wanted, wanted)))
    assert len(headtrace.Tracer(model).trace_batch([CHAT, CHAT], " Mary", " John")) == 2
    assert len(model.end_logits([CHAT, CHAT])) == 2


def test_a_padded_batch_is_its_prompts(model: headtrace.Model) -> None:
    texts = [IOI, "When Mary and John went to"]
    for side in ("left", "right"):
        model.tokenizer.padding_side = side
        batch = model.tokenizer(texts, padding=True, return_tensors="pt")
        recording = model.record(batch)
        assert recording.lengths == (15, 7)
        assert recording.tokens(1) == model.record(texts[1]).tokens()
        circuits = headtrace.Tracer(model).trace_batch(batch, root="probability", top_k=1)
        assert [len(circuit.prompt.tokens) for circuit in circuits] == [15, 7]


def test_a_circuit_of_a_conversation_keeps_its_text(model: headtrace.Model) -> None:
    circuit = headtrace.Tracer(model).trace({"messages": CHAT, "answer": " Mary", "wrong": " John"})
    assert circuit.prompt.text == "<|endoftext|>" + IOI
    assert circuit.prompt.tokens[:2] == ("<|endoftext|>", "When")


@pytest.mark.ill_typed
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tekst": IOI}, "mapping"),
        (5, "got int"),
        (b"When", "got bytes"),
        ({"input_ids": [5], "inputs_embeds": 1}, "inputs_embeds"),
    ],
)
def test_what_is_no_prompt_is_refused_everywhere(model: headtrace.Model, given: Any, message: str) -> None:
    tracer = headtrace.Tracer(model)
    calls = [
        lambda: model.record(given),
        lambda: model.end_logits(given),
        lambda: tracer.explain(given, "L0H0:0:0"),
    ]
    for call in calls:
        with pytest.raises(InputError, match=message):
            call()
    for call in (lambda: tracer.trace(given, 5), lambda: tracer.trace_batch(given, 5)):
        with pytest.raises(InputError):
            call()


def test_a_model_without_a_chat_template_says_so() -> None:
    with pytest.raises(InputError, match="The tokenizer of 'builtin' has no chat template"):
        headtrace.load("builtin").record(CHAT)
