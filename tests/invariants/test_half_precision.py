"""What holds of every architecture in bfloat16 and float16: with rounding as a component, everything adds up in
float32, and predictions come true in the running model."""

from __future__ import annotations

from copy import deepcopy
from functools import cache

import pytest
import torch

import headtrace
from headtrace.errors import IdentityError, InputError
from headtrace.models.identities import tolerance_for
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
    total = recording.plain_writes[:, : 1 + recording.positions_apart].sum(1)
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


@both
@each
def test_attention_is_that_of_float32_as_far_as_the_precision_goes(name: str, dtype: torch.dtype) -> None:
    hf = tiny_hf(name).to(dtype)
    half, full = (
        headtrace.load(hf).record(prompts()[0]),
        headtrace.load(deepcopy(hf).float()).record(prompts()[0]),
    )
    size = max(1.0, *(float(full.raw_logits(layer).abs().max()) for layer in range(full.model.n_layers)))
    # No change of logits by x moves attention by more than x / 2.
    allowed = torch.finfo(dtype).eps * (10 * full.model.n_layers) ** 0.5 * size
    assert float((half.patterns - full.patterns).abs().max()) < allowed


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
    moved = sorted(flagged())
    assert len(moved) > 1
    widest = max(range(1, len(moved)), key=lambda i: moved[i] - moved[i - 1])
    monkeypatch.setattr(assemble, "RESTS_ON_ROUNDING", (moved[widest - 1] + moved[widest]) / 2)
    assert sorted(flagged()) == pytest.approx(moved[widest:], rel=1e-2)


def test_models_are_loaded_in_half_precision_or_as_they_were_saved(tmp_path) -> None:
    tiny_hf("llama").to(torch.bfloat16).save_pretrained(tmp_path / "saved")
    found = {
        dtype: headtrace.load(tmp_path / "saved", dtype=dtype).own_dtype
        for dtype in ("auto", "float16", None)
    }
    assert found == {"auto": "bfloat16", "float16": "float16", None: "float32"}
    with pytest.raises(InputError, match="'bfloat16', 'float16', 'float32', 'float64', or 'auto'"):
        headtrace.load(tmp_path / "saved", dtype="int8")
