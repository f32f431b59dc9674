"""What facts cannot describe is refused with the reason, and facts that are wrong are caught where the model runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

import headtrace
from headtrace.errors import IdentityError, UnsupportedModelError
from headtrace.models import ARCHITECTURES
from headtrace.models.architectures import UNFIT, find_architecture
from tests.tiny import prompts, tiny_hf, top_two

SMALL = {"hidden_size": 32, "vocab_size": 61, "n_layer": 1, "num_hidden_layers": 1, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("bloom", "biases on the attention scores"),
        ("mamba", "keep a state or a convolution instead of attending"),
        ("t5", "an encoder and a decoder"),
        ("gpt_oss", "learned sinks"),
        ("deepseek_v3", "compressed"),
    ],
)
def test_a_family_that_does_not_fit_is_refused_by_name_with_the_reason(model_type: str, reason: str) -> None:
    message = rf"'{model_type}' is not supported: .*{reason}.*Supported: .*llama"
    with pytest.raises(UnsupportedModelError, match=message):
        find_architecture(AutoConfig.for_model(model_type))


def test_a_module_and_a_folder_of_such_a_family_are_refused(tmp_path) -> None:
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model("bloom", **SMALL))
    with pytest.raises(UnsupportedModelError, match="'bloom' is not supported"):
        headtrace.load(hf)
    hf.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="'bloom' is not supported"):
        headtrace.load(tmp_path)


def test_a_family_that_nobody_wrote_facts_for_is_told_how_to_add_them() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'persimmon' is not supported\. .*add-an-architecture"):
        find_architecture(AutoConfig.for_model("persimmon"))


def test_no_family_is_both_known_and_unfit() -> None:
    listed = [model_type for families in UNFIT.values() for model_type in families]
    assert len(listed) == len(set(listed))
    assert not set(listed) & set(ARCHITECTURES)
    assert set(listed) <= set(CONFIG_MAPPING), "names as transformers spells them"


def test_the_docs_list_every_family_that_is_known_and_every_one_that_is_unfit() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "load-a-model.md").read_text(encoding="utf-8")
    section = page[page.index("## Which families") : page.index("## When weights change")]
    known, unfit = section.split("**What does not fit**")
    assert {name for name in ARCHITECTURES if f"`{name}`" not in known} == set()
    for reason, families in UNFIT.items():
        row = next(line for line in unfit.splitlines() if line.startswith(f"| {reason} |"))
        assert [name for name in families if f"`{name}`" not in row] == []


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("falcon", {"alibi": True}, "ALiBi"),
        ("phi", {"qk_layernorm": True}, "biases"),
        ("olmo", {"clip_qkv": 1.0}, "clips"),
    ],
)
def test_a_variant_that_does_not_fit_is_refused(name: str, changes: dict[str, object], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"cannot be decomposed exactly: .*{reason}"):
        headtrace.load(tiny_hf(name, **changes))


WRONG = [
    ("granite", {"write_multiplier": 1.0}),
    ("granite", {"logit_multiplier": 1.0}),
    ("cohere2", {"rotary_layers": None}),
    ("gemma", {"gain_offset": 0.0}),
    ("glm", {"rotary_pairs": "half-split"}),
    ("nanochat", {"rotary_backwards": False}),
    ("starcoder2", {"norm": "rms"}),
    ("stablelm/parallel", {"query_key_norm_kind": "rms"}),
]


@pytest.mark.parametrize(("name", "wrong"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_fact_is_caught_by_the_identities(name: str, wrong: dict[str, object], monkeypatch) -> None:
    hf = tiny_hf(name)
    facts = ARCHITECTURES[hf.config.model_type]
    right = facts.variant
    mistaken = replace(facts, variant=lambda config: {**right(config), **wrong})
    monkeypatch.setattr(ARCHITECTURES, "_known", {**ARCHITECTURES, hf.config.model_type: mistaken})
    with pytest.raises(IdentityError):
        headtrace.load(hf).record(prompts()).check()


def test_a_multiplier_that_is_not_the_configs_stops_a_trace() -> None:
    hf = tiny_hf("granite")
    model, ids = headtrace.load(hf), prompts()[0]
    answers = top_two(model, ids)
    hf.model.layers[0].residual_multiplier = 0.9
    with pytest.raises(IdentityError):
        headtrace.Tracer(model).trace(ids, *answers)


def test_biases_on_scores_and_learned_sinks_are_caught_where_the_model_runs(monkeypatch) -> None:
    """Also in a family whose facts say nothing of them."""
    unaware = replace(ARCHITECTURES["falcon"], refuse=lambda config: None)
    monkeypatch.setattr(ARCHITECTURES, "_known", {**ARCHITECTURES, "falcon": unaware})
    with pytest.raises(UnsupportedModelError, match="adds numbers to the attention scores"):
        headtrace.load(tiny_hf("falcon", alibi=True)).record(prompts()[0])
    sinks = replace(ARCHITECTURES["llama"], model_type="granite_swa")
    monkeypatch.setattr(ARCHITECTURES, "_known", {**ARCHITECTURES, "granite_swa": sinks})
    config = AutoConfig.for_model("granite_swa", **SMALL, num_key_value_heads=2, intermediate_size=48)
    hf = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with pytest.raises(UnsupportedModelError, match="learned sinks"):
        headtrace.load(hf.to(torch.float32)).record(prompts()[0])
