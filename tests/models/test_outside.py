"""Architectures that a user's own package brings: facts only, registered by a call or an entry point.

Both here have what none of the ten built-in families has: rotary pairs that are interleaved (GLM, Cohere), tables that
are, and a LayerNorm on queries and keys (Cohere).
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import headtrace
from headtrace import registry
from headtrace.errors import HeadtraceError, InputError, UnsupportedModelError
from headtrace.models import ARCHITECTURES, Architecture, register_architecture
from headtrace.models.architectures.facts import separate_linears
from headtrace.registry import Registry
from tests.rounding import forward_terms, rounding
from tests.tiny import GROUPED, SIZES, prompts, randomise, top_two

GLM = Architecture(
    name="GLM",
    model_type="glm",
    layers="model.layers",
    final_norm="model.norm",
    attention="self_attn",
    attention_norm="input_layernorm",
    mlp="mlp",
    mlp_norm="post_attention_layernorm",
    mlp_write="mlp",
    projections=separate_linears(),
    rotary_pairs="interleaved",
)
COHERE = Architecture(
    name="Cohere",
    model_type="cohere",
    layers="model.layers",
    final_norm="model.norm",
    attention="self_attn",
    attention_norm="input_layernorm",
    mlp="mlp",
    mlp_norm="input_layernorm",
    mlp_write="mlp",
    projections=separate_linears(),
    norm="layer",
    rotary_pairs="interleaved",
    rotary_tables="interleaved",
    query_key_norm=("q_norm", "k_norm"),
    query_key_norm_kind="layer",
    refuse=lambda config: None if config.logit_scale == 1 else "it scales its output logits",
)
OPTIONS = {
    "glm": {**SIZES, **GROUPED, "partial_rotary_factor": 0.5},
    "cohere": {**SIZES, "num_key_value_heads": 2, "use_qk_norm": True, "logit_scale": 1.0},
}


@pytest.fixture
def known(monkeypatch) -> None:
    monkeypatch.setattr(ARCHITECTURES, "_known", dict(ARCHITECTURES))
    register_architecture(GLM)
    register_architecture(COHERE)


def outside(name: str, dtype: torch.dtype, **changes) -> headtrace.Model:
    options = {**OPTIONS[name], **changes}
    config = AutoConfig.for_model(name, **options, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    hf = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype)
    return headtrace.load(randomise(hf, dtype))


@pytest.mark.usefixtures("known")
# Cohere turns its queries in float32 whatever the model's dtype, so that float64 would show nothing more.
@pytest.mark.parametrize(
    ("name", "dtype"), [("glm", torch.float32), ("glm", torch.float64), ("cohere", torch.float32)], ids=str
)
def test_identities_hold_and_predictions_come_true(name: str, dtype: torch.dtype) -> None:
    model, ids = outside(name, dtype), prompts()[0]
    assert model.record(prompts()).check().worst < rounding(dtype, forward_terms(model))
    circuit = headtrace.Tracer(model).trace(ids, *top_two(model, ids))
    report = headtrace.verify(circuit, model, edges="none")
    assert len(report.predictions) > 4
    # Attention is a softmax of products of two sums through the model; its slope is at most 1/4.
    size = max(float(model.record(ids).raw_logits(layer).abs().max()) for layer in range(model.n_layers))
    assert report.max_prediction_error < rounding(dtype, forward_terms(model), max(1.0, size))


def test_an_unknown_family_is_refused_and_a_variant_with_its_reason(known) -> None:
    with pytest.raises(UnsupportedModelError, match="scales its output logits"):
        outside("cohere", torch.float32, logit_scale=0.5)
    config = AutoConfig.for_model("bloom", hidden_size=32, n_layer=1, n_head=4, vocab_size=61)
    with pytest.raises(UnsupportedModelError, match=r"'bloom' is not supported.*add-an-architecture"):
        headtrace.load(AutoModelForCausalLM.from_config(config))


def test_a_name_is_taken_once(known) -> None:
    register_architecture(GLM)  # the same again changes nothing
    with pytest.raises(InputError, match="architecture 'glm' is already known"):
        ARCHITECTURES.add("glm", COHERE)
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
