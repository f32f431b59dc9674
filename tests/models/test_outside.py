"""Architectures that a user's own package brings: facts only, registered by a call or an entry point."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import headtrace
from headtrace import registry
from headtrace.errors import HeadtraceError, InputError, UnsupportedModelError
from headtrace.models import ARCHITECTURES, Architecture, register_architecture
from headtrace.models.architectures.facts import fused_linear
from headtrace.registry import Registry
from tests.rounding import forward_terms, rounding
from tests.tiny import SIZES, prompts, randomise, top_two

PERSIMMON = Architecture(
    name="Persimmon",
    model_type="persimmon",
    layers="model.layers",
    final_norm="model.final_layernorm",
    attention="self_attn",
    attention_norm="input_layernorm",
    mlp="mlp",
    mlp_norm="post_attention_layernorm",
    mlp_write="mlp",
    projections=fused_linear("query_key_value", "dense", "groups"),
    norm="layer",
    refuse=lambda config: "its norms of queries and keys have biases" if config.qk_layernorm else None,
)


@pytest.fixture
def known(monkeypatch) -> None:
    monkeypatch.setattr(ARCHITECTURES, "_known", dict(ARCHITECTURES))
    register_architecture(PERSIMMON)


def outside(dtype: torch.dtype, **changes) -> headtrace.Model:
    options = {**SIZES, "qk_layernorm": False, **changes}
    config = AutoConfig.for_model("persimmon", **options, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    hf = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype)
    return headtrace.load(randomise(hf, dtype))


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_identities_hold_and_predictions_come_true(dtype: torch.dtype) -> None:
    model, ids = outside(dtype), prompts()[0]
    assert model.record(prompts()).check().worst < rounding(dtype, forward_terms(model))
    circuit = headtrace.Tracer(model).trace(ids, *top_two(model, ids))
    report = headtrace.verify(circuit, model, edges="none")
    assert len(report.predictions) >= 4
    # Attention is a softmax of products of two sums through the model; its slope is at most 1/4.
    size = max(float(model.record(ids).raw_logits(layer).abs().max()) for layer in range(model.n_layers))
    assert report.max_prediction_error < rounding(dtype, forward_terms(model), max(1.0, size))


@pytest.mark.usefixtures("known")
def test_a_variant_is_refused_with_the_reason_of_its_facts() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"Persimmon model .* norms of queries and keys have biases"
    ):
        outside(torch.float32, qk_layernorm=True)


def test_a_name_is_taken_once(known) -> None:
    register_architecture(PERSIMMON)  # the same again changes nothing
    with pytest.raises(InputError, match="architecture 'persimmon' is already known"):
        ARCHITECTURES.add("persimmon", replace(PERSIMMON, name="Another"))
    with pytest.raises(InputError, match="not something to register"):
        ARCHITECTURES.add("new", object())  # type: ignore[arg-type]


def test_entry_points_add_things_and_a_broken_one_is_named(monkeypatch) -> None:
    points = [EntryPoint("half", "fractions:Fraction", "example.group")]
    monkeypatch.setattr(registry, "entry_points", lambda group: EntryPoints(points).select(group=group))
    found = Registry("number", "example.group", {"one": 1})
    assert set(found) == {"one", "half"}
    points[0] = EntryPoint("half", "no_such_module:thing", "example.group")
    with pytest.raises(HeadtraceError, match=r"'half'.*'no_such_module:thing' cannot be imported"):
        Registry("number", "example.group", {})["half"]
