"""Architectures of a user's own classes: unusual ones work, folders load by the command line, wrong facts are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headtrace
from headtrace.errors import IdentityError, InputError, UnsupportedModelError
from headtrace.models import ARCHITECTURES, Architecture, conformance, register_architecture
from headtrace.models.architectures.facts import MLPParts, Projections, plain_mlp, separate_linears
from headtrace.roots import LogitDifference
from headtrace.tracing.difference import DIFFERENCE_FIELDS, difference_flow
from tests.models.made_up import MADE_UP, made_up
from tests.rounding import forward_terms, rounding
from tests.starting import Started, command_with
from tests.tiny import tiny_hf, top_two

UNUSUAL: dict[str, dict[str, Any]] = {
    "usual": {},
    "no final norm": {"final": "none", "norm": "layer"},
    "a final nn.Identity": {"final": "identity"},
    "fewer outputs": {"outputs": 7},
    "more outputs": {"outputs": 31},
    "heads of other sizes": {"head_sizes": (4, 8, 6)},
    "MLPs beside attention": {"beside": True},
    "LayerNorms with an offset": {"norm": "layer", "offset": 1.0},
}
IDS = [7, 8, 2, 1, 9, 3]


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ARCHITECTURES, "_known", dict(ARCHITECTURES))
    register_architecture(MADE_UP)


@pytest.mark.parametrize("options", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_models_conform_and_predictions_come_true(options: dict[str, Any]) -> None:
    found = conformance(made_up(**options))
    model = headtrace.load(made_up(**options).double())
    for dtype in (torch.float64, torch.float32):
        name = str(dtype).removeprefix("torch.")
        assert found.worst[name] < rounding(dtype, forward_terms(model))
    assert model.record([IDS, IDS[:3]]).check().worst < rounding(torch.float64, forward_terms(model))
    predictions = 0
    for ids in (IDS, IDS[::-1], [1, 2, 3, 4, 5], [5, 5, 11, 20, 5], [14, 3, 17, 2, 9, 9]):
        circuit = headtrace.Tracer(model).trace(ids, *top_two(model, ids))
        report = headtrace.verify(circuit, model, edges="none")
        assert report.max_prediction_error < rounding(torch.float64, forward_terms(model))
        predictions += len(report.predictions)
    assert predictions


def test_predictions_come_true_where_heads_have_other_sizes_whatever_is_changed() -> None:
    """Interventions mix values and edit scores in layers whose heads are smaller than headtrace's tensors."""
    model = headtrace.load(made_up(head_sizes=(4, 8, 6)).double())
    circuit = headtrace.Tracer(model).trace(IDS, *top_two(model, IDS))
    report = headtrace.verify(circuit, model)
    assert report.predictions
    assert not report.failures
    assert model.d_head == 8
    assert model.head_sizes == (4, 8, 6)


def test_differences_are_followed_without_a_final_norm() -> None:
    model = headtrace.load(made_up(final="none").double())
    runs = [model.record(ids, keep=DIFFERENCE_FIELDS) for ids in (IDS, [*IDS[:2], 5, *IDS[3:]])]
    flow = difference_flow(*runs, LogitDifference((1,), (2,)))
    changed = float(flow.value[0] - flow.other_value[0])
    assert abs(changed) > 0.1
    assert float(flow.embedding().sum()) == pytest.approx(changed, rel=1e-9)


def test_outputs_of_another_vocabulary_are_numbers() -> None:
    model = headtrace.load(made_up(outputs=31))
    recording = model.record(IDS)
    assert recording.logits.shape[-1] == model.d_output == 31
    assert recording.top_answers(1)[0][0].startswith("#")
    assert model.token_id(30) == 30
    with pytest.raises(InputError, match="valid ids are 0 to 30"):
        model.token_id(31)
    with pytest.raises(InputError, match="token ids 0 to 22"):
        model.record([30])
    with pytest.raises(InputError, match=r"vocabulary of their own \(31 tokens, its prompts 23\).*0 to 30"):
        model.token_id(" Mary")


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "gpt_neox", "qwen3", "mixtral", "olmo2", "gptj"])
def test_architectures_of_headtrace_conform(name: str) -> None:
    """Norms of all kinds and places, fused projections, experts, own attention, MLPs beside attention."""
    assert conformance(tiny_hf(name)).worst.keys() == {"float64", "float32"}


def test_a_model_that_turns_in_float32_is_checked_in_float32_alone() -> None:
    assert conformance(tiny_hf("cohere")).worst.keys() == {"float32"}


# -- wrong facts ---------------------------------------------------------------------------------------------

READ = separate_linears()
PARTS = plain_mlp("mlp.up", "mlp.down", "mlp.act")


def with_projections(**others: str) -> Callable[[nn.Module, int], Projections]:
    """Projections with one read in the place of another."""

    def read(attention: nn.Module, d_head: int) -> Projections:
        found = READ(attention, d_head)
        return replace(found, **{name: getattr(found, other) for name, other in others.items()})

    return read


def with_parts(**others: Any) -> Callable[[nn.Module], MLPParts]:
    return lambda block: replace(PARTS(block), **others)


MISFITS: list[tuple[str, dict[str, Any], str]] = [
    ("layers", {"layers": "bloks"}, r"layers = 'bloks', but the model has no 'bloks'.*blocks"),
    ("final_norm", {"final_norm": "lst"}, r"final_norm = 'lst'.*last"),
    ("no norm there", {"final_norm": "tokens"}, r"final_norm = 'tokens', but Embedding there is no norm"),
    ("attention", {"attention": "attention"}, r"attention = 'attention', but block 0.*attn"),
    ("attention_norm", {"attention_norm": "norm_9"}, r"attention_norm = 'norm_9', but block 0.*norm_1"),
    ("mlp", {"mlp": "MLP"}, r"mlp = 'MLP', but block 0"),
    ("mlp_write", {"mlp_write": "mlp.out"}, r"mlp_write = 'mlp.out', but block 0.*MLP has up, act, down"),
    ("query_key_norm", {"query_key_norm": ("q_norm", "k_norm")}, r"query_key_norm = .* has no 'q_norm'"),
    ("projections", {"projections": separate_linears("out_proj")}, r"projections, but .*out_proj"),
    ("head_sizes", {"head_sizes": (8, 4, 8)}, r"head_sizes = \(8, 4, 8\), but block 1 has W_Q"),
    ("too few head_sizes", {"head_sizes": (8, 8)}, r"head_sizes = \(8, 8\), but the model has 3 layers"),
    ("n_kv_heads", {"n_kv_heads": 1}, r"n_kv_heads = 1, but block 0 has W_K as \(2, 16, 8\)"),
]
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("norm", {"norm": "layer"}, r"fact norm = 'layer' of MadeUp is wrong.*agree with norm = 'rms'"),
    ("gain_offset", {"gain_offset": 1.0}, r"fact gain_offset = 1.0 .*agree with gain_offset = 0.0"),
    ("parallel", {"parallel": lambda config: True}, r"fact parallel = True .*agree with parallel = False"),
    ("query_prescaled", {"query_prescaled": True}, r"fact query_prescaled = True"),
    (
        "activation",
        {"mlp_parts": with_parts(activation=nn.ReLU())},
        r"activation = ReLU\(\) .*agree with mlp_parts: activation = GELU",
    ),
    ("b_in", {"mlp_parts": with_parts(b_in=None)}, r"the MLP of layer 0 writes.*decides it: mlp_parts"),
    (
        "W_V",
        {"projections": with_projections(W_V="W_K")},
        r"the values of layer 0.*it: projections \(W_V, b_V\)\.",
    ),
    (
        "W_Q",
        {"projections": with_projections(W_Q="W_K")},
        r"the queries of layer 0.*it: projections \(W_Q, b_Q\)",
    ),
    (
        "b_K",
        {"projections": with_projections(b_K="b_Q")},
        r"the keys of layer 0.*it: projections \(W_K, b_K\)",
    ),
    ("another norm", {"attention_norm": "norm_2"}, r"decides it: attention_norm, projections"),
    ("mlp_norm", {"mlp_norm": "norm_1"}, r"the MLP of layer 0 reads.*it: mlp, mlp_norm"),
    ("mlp_write", {"mlp_write": "attn"}, r"the residual behind layer 0.*mlp_write"),
    ("write_multiplier", {"write_multiplier": 2.0}, r"behind layer 0.*write_multiplier"),
    ("logit_multiplier", {"logit_multiplier": 3.0}, r"output logits.*logit_multiplier"),
    ("final_norm", {"final_norm": None}, r"behind layer 2.*final_norm"),
]


def facts(**wrong: Any) -> Architecture:
    return replace(MADE_UP, variant=lambda config: {}, **wrong)


@pytest.mark.parametrize(
    ("wrong", "message"), [(w, m) for _, w, m in MISFITS], ids=[n for n, _, _ in MISFITS]
)
def test_facts_that_do_not_fit_are_named_when_a_model_is_loaded(
    wrong: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ARCHITECTURES._known, "made_up", facts(**wrong))
    with pytest.raises(UnsupportedModelError, match=message):
        headtrace.load(made_up())


@pytest.mark.parametrize(("wrong", "message"), [(w, m) for _, w, m in WRONG], ids=[n for n, _, _ in WRONG])
def test_facts_that_are_wrong_are_named_by_conformance(
    wrong: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ARCHITECTURES._known, "made_up", facts(**wrong))
    with pytest.raises(IdentityError, match=message):
        conformance(made_up())


def test_the_parts_of_an_mlp_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = facts(mlp_parts=plain_mlp("mlp.upp", "mlp.down", "mlp.act"))
    monkeypatch.setitem(ARCHITECTURES._known, "made_up", wrong)
    with pytest.raises(UnsupportedModelError, match=r"mlp_parts, but reading block 0.*upp"):
        conformance(made_up())


def test_sizes_that_a_config_does_not_say_are_named() -> None:
    hf = made_up()
    del hf.config.num_attention_heads
    with pytest.raises(UnsupportedModelError, match="does not say 'num_attention_heads'"):
        headtrace.load(hf)


def test_a_model_without_a_cache_cannot_continue_a_text_and_says_so() -> None:
    model = headtrace.load(made_up())
    with pytest.raises(UnsupportedModelError, match="does not take 'past_key_values'"):
        headtrace.models.forward.continue_greedily(model, torch.tensor([IDS]), 2)


# -- from a folder, by the command line ----------------------------------------------------------------------


def install(folder: Path, code: str) -> None:
    """A package with this code and an entry point."""
    (folder / "its_package.py").write_text(code)
    info = folder / "its_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: its-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[headtrace.architectures]\nmade_up = its_package:FACTS\n")


@pytest.mark.slow
def test_a_class_that_transformers_does_not_know_is_loaded_from_a_folder(tmp_path: Path) -> None:
    made_up(outputs=31).save_pretrained(tmp_path / "model")
    install(
        tmp_path,
        "from tests.models.made_up import MADE_UP as FACTS, register_with_transformers as it\nit()\n",
    )
    process = Started(command_with, str(tmp_path), "info", str(tmp_path / "model"), "--json")
    told = process.stdout.read()
    assert process.wait() == 0, process.told()
    assert json.loads(told)["d_vocab"] == 23


@pytest.mark.slow
def test_a_class_that_nobody_told_transformers_about_is_named(tmp_path: Path) -> None:
    made_up().save_pretrained(tmp_path / "model")
    install(tmp_path, "from tests.models.made_up import MADE_UP as FACTS\n")
    process = Started(command_with, str(tmp_path), "info", str(tmp_path / "model"), "--json")
    told = process.told()
    assert process.wait() == 2
    assert "AutoConfig.register('made_up', YourConfig)" in " ".join(told.split())
