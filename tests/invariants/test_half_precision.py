"""What holds of every architecture in bfloat16 and float16: with rounding as a component, everything adds up in
float32, and predictions come true in the running model."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import headtrace
from headtrace.errors import IdentityError, InputError
from headtrace.models.identities import ROUNDING_BOUND, tolerance_for
from headtrace.vocabulary import Component
from tests.rounding import forward_terms, rounding
from tests.tiny import NAMES, prompts, tiny_hf, top_two

HALF = (torch.bfloat16, torch.float16)
each = pytest.mark.parametrize("name", NAMES)
both = pytest.mark.parametrize("dtype", HALF, ids=str)


@cache
def half_model(name: str, dtype: torch.dtype) -> headtrace.Model:
    return headtrace.load(tiny_hf(name).to(dtype))


@both
@each
def test_components_and_rounding_sum_to_the_residual_and_rounding_is_small(
    name: str, dtype: torch.dtype
) -> None:
    model = half_model(name, dtype)
    recording = model.record(prompts())
    assert recording.residuals.dtype == recording.patterns.dtype == torch.float32
    total = recording.embedding.clone()
    for layer in range(model.n_layers):
        total += recording.layer_writes(layer) + recording.roundings[layer]
    error = (total - recording.residuals[-1]).norm(dim=-1) / recording.residuals[-1].norm(dim=-1)
    assert float(error.max()) < rounding(torch.float32, forward_terms(model))
    report, eps = recording.check(), torch.finfo(dtype).eps
    assert len(report.rounding) == model.n_layers
    # At least a tenth of one rounding: the parts are measured, not assumed to be nothing.
    assert all(0.05 * eps < layer.median <= layer.worst < 2 * eps for layer in report.rounding)
    assert report.pattern <= tolerance_for(torch.float32), "scores are kept in float32"


@both
@each
def test_output_logits_are_hugging_faces_own_as_far_as_its_precision_goes(
    name: str, dtype: torch.dtype
) -> None:
    model, ids = half_model(name, dtype), prompts()[0]
    model.hf.set_attn_implementation("eager")
    with torch.inference_mode():
        theirs = model.hf(torch.tensor([ids])).logits.float()
    ours = model.record(ids).logits
    # Four layers of about ten rounded tensors, and scores that are rounded there and not here.
    allowed = 2 * torch.finfo(dtype).eps * (10 * model.n_layers) ** 0.5 * float(theirs.abs().max())
    assert float((ours - theirs).abs().max()) < allowed


@both
@each
def test_predictions_of_complete_circuits_come_true_in_the_running_model(
    name: str, dtype: torch.dtype
) -> None:
    model, ids = half_model(name, dtype), prompts()[0]
    answer, wrong = top_two(model, ids)
    circuit = headtrace.Tracer(model).trace(ids, answer=answer, wrong=wrong, paths="complete", neurons=2)
    assert circuit.edges
    assert (circuit.method.settings or {})["dtype"] == str(dtype).removeprefix("torch.")
    assert 0 < (circuit.method.settings or {})["rounding"] < 2 * torch.finfo(dtype).eps
    report = headtrace.verify(circuit, model, edges=())
    # The prediction is computed in float32 from what was recorded; the model computes the same scores in float32.
    assert report.max_prediction_error < rounding(torch.float32, forward_terms(model), 20.0)


@each
def test_circuits_in_float16_are_nearly_those_of_float32(name: str) -> None:
    def edges(model: headtrace.Model) -> set[tuple[str, str, str]]:
        answer, wrong = top_two(half_model(name, torch.float16), prompts()[0])
        circuit = headtrace.Tracer(model).trace(prompts()[0], answer=answer, wrong=wrong)
        assert circuit.edges
        return {(circuit.node(e.source).name, circuit.node(e.target).name, e.side) for e in circuit.edges}

    half, full = edges(half_model(name, torch.float16)), edges(headtrace.load(tiny_hf(name)))
    assert len(half & full) >= 0.9 * len(half | full)


def test_likelihoods_batches_and_other_methods_add_up_in_half_precision() -> None:
    model = half_model("llama", torch.bfloat16)
    for method in ("acc++", "acc", "svt"):
        circuits = headtrace.Tracer(model, method=method).trace_batch(prompts(), answer=[5, 6])
        assert all(circuit.root.value is not None for circuit in circuits)


def test_a_rounding_component_writes_what_rounding_added() -> None:
    model = half_model("llama", torch.bfloat16)
    recording = model.record(prompts()[0])
    torch.testing.assert_close(recording.write(Component("rounding", 2)), recording.roundings[2, 0])


def test_a_model_that_does_not_add_up_is_refused_also_in_half_precision() -> None:
    hf = tiny_hf("llama").to(torch.float16)
    model = headtrace.load(hf)
    layer = model.layers[1]
    layer.mlp.register_forward_hook(lambda _, __, output: output * 0.9)  # seen by the recording
    layer.self_attn.register_forward_hook(
        lambda _, __, output: (output[0] * 0.9, *output[1:])
    )  # not seen by it
    with pytest.raises(IdentityError, match="more than rounding to float16 can be"):
        model.record(prompts()[0]).check()


def test_a_firing_that_rests_on_rounding_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import headtrace.tracing.assemble as assemble

    model, ids = half_model("qwen2", torch.bfloat16), prompts()[0]
    answer, wrong = top_two(model, ids)

    def flagged() -> list[float]:
        circuit = headtrace.Tracer(model).trace(ids, answer=answer, wrong=wrong)
        return [node.rounding for node in circuit.nodes if node.rounding is not None]

    monkeypatch.setattr(assemble, "RESTS_ON_ROUNDING", 0.0)
    moved = flagged()
    assert moved
    limit = sorted(moved)[len(moved) // 2]
    monkeypatch.setattr(assemble, "RESTS_ON_ROUNDING", limit)
    assert sorted(flagged()) == [m for m in sorted(moved) if m > limit]
    recording = model.record([ids])
    assert max(moved) < 64 * torch.finfo(torch.bfloat16).eps
    assert recording.model.half


def test_models_are_loaded_in_half_precision_or_as_they_were_saved(tmp_path) -> None:
    tiny_hf("llama").to(torch.bfloat16).save_pretrained(tmp_path / "saved")
    found = {
        dtype: headtrace.load(tmp_path / "saved", dtype=dtype).own_dtype
        for dtype in ("auto", "float16", None)
    }
    assert found == {"auto": "bfloat16", "float16": "float16", None: "float32"}
    with pytest.raises(InputError, match="'bfloat16', 'float16', 'float32', 'float64', or 'auto'"):
        headtrace.load(tmp_path / "saved", dtype="int8")


def test_bounds_say_what_they_bound() -> None:
    assert set(ROUNDING_BOUND) == {"residual", "queries", "keys", "values", "mlp", "logits"}
