"""Models spread by a device map: weights that wait on the CPU or on disk change nothing of what a model is or does.

No GPU is needed for it: accelerate takes weights away and brings them back on the CPU just the same.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload

import headtrace
from headtrace.errors import InputError
from headtrace.models import devices
from headtrace.runs.engines import ModelPlace
from tests.rounding import forward_terms, rounding
from tests.tiny import prompts, tiny_hf, top_two

FAMILIES = {  # with norms, biases and embeddings of every kind
    "llama": ("model.", {"embed_tokens", "norm", "rotary_emb"}),
    "gpt2": ("transformer.", {"wte", "wpe", "ln_f"}),
    "qwen3": ("model.", {"embed_tokens", "norm", "rotary_emb"}),
}
IDS = prompts()[0]


def half_on_disk(family: str) -> dict[str, str]:
    """The first two layers in memory, everything after them on disk (but for an unembedding that is tied)."""
    prefix, others = FAMILIES[family]
    blocks = f"{prefix}{'h' if family == 'gpt2' else 'layers'}"
    layers = {f"{blocks}.{i}": "disk" if i > 1 else "cpu" for i in range(4)}
    around = {prefix + name: "disk" if name in ("norm", "ln_f") else "cpu" for name in others}
    return {**layers, **around, "lm_head": "cpu" if family == "gpt2" else "disk"}


def spread(family: str, how: str, folder: Path) -> headtrace.Model:
    if how == "memory":
        hf = tiny_hf(family)
        cpu_offload(hf, execution_device=torch.device("cpu"))
        return headtrace.load(hf)
    tiny_hf(family).save_pretrained(folder)
    return headtrace.load(folder, device_map=half_on_disk(family))


@pytest.mark.parametrize("how", ["disk", "memory"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_whose_weights_are_set_aside_is_the_same_model(family: str, how: str, tmp_path) -> None:
    whole, model = headtrace.load(tiny_hf(family)), spread(family, how, tmp_path)
    assert any(parameter.device.type == "meta" for parameter in model.hf.parameters())
    assert (model.device, model.device_of(3)) == (torch.device("cpu"), torch.device("cpu"))
    assert model.weights_sha256 == whole.weights_sha256
    stamp, recording = model.refresh(), model.record(prompts())
    expected = whole.record(prompts())
    for name, tensor in expected.tensors.items():
        torch.testing.assert_close(recording.tensors[name], tensor)
    assert recording.check().worst < 1e-4
    assert torch.equal(model.weights.W_O, whole.weights.W_O)
    assert torch.equal(model.weights.W_U, whole.weights.W_U)
    assert model.refresh() is stamp
    answer, wrong = top_two(whole, IDS)
    circuits = [headtrace.Tracer(m).trace(IDS, answer, wrong, paths="complete") for m in (model, whole)]
    assert circuits[0].root.value == pytest.approx(circuits[1].root.value, rel=1e-4)
    allowed = rounding(torch.float32, forward_terms(model), 20.0)  # logits are below twenty
    assert headtrace.verify(circuits[0], model, edges="top:3").max_prediction_error < allowed


def test_a_worker_puts_the_parts_of_a_model_where_they_were(tmp_path) -> None:
    model = spread("llama", "disk", tmp_path)
    place = ModelPlace.of(model)
    assert place.device == "auto"
    assert place.device_map == half_on_disk("llama")
    assert ModelPlace(**json.loads(json.dumps(place.options()))).load().device_map == model.device_map
    whole = ModelPlace.of(headtrace.load(tmp_path))
    assert (whole.device, whole.device_map) == ("cpu", None)


def test_weights_set_aside_in_memory_are_watched(tmp_path) -> None:
    hf = tiny_hf("llama")
    state = {name: tensor.clone() for name, tensor in hf.state_dict().items()}
    cpu_offload(hf, execution_device=torch.device("cpu"), state_dict=state)
    model = headtrace.load(hf)
    recording, before = model.record(IDS), model.weights_sha256
    state["model.layers.1.self_attn.q_proj.weight"].mul_(2)
    with pytest.raises(InputError, match="changed after this recording was made"):
        recording.check()
    assert model.weights_sha256 != before
    assert model.record(IDS).check().worst < 1e-4


def test_a_spread_model_of_float64_is_exact_to_float64(tmp_path) -> None:
    tiny_hf("qwen3").save_pretrained(tmp_path)
    model = headtrace.load(tmp_path, device_map=half_on_disk("qwen3"), dtype="float64")
    whole = headtrace.load(tmp_path, dtype="float64")
    recording = model.record(IDS)
    recording.check()
    torch.testing.assert_close(recording.logits, whole.record(IDS).logits)


def test_a_weight_on_disk_that_is_not_finite_is_named(tmp_path) -> None:
    hf = tiny_hf("llama")
    with torch.no_grad():
        hf.model.layers[3].mlp.up_proj.weight[3, 5] = torch.nan
    hf.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"'model\.layers\.3\.mlp\.up_proj\.weight' is not finite"):
        headtrace.load(tmp_path, device_map=half_on_disk("llama"))


def test_a_device_map_needs_no_memory_for_the_whole_model(tmp_path, monkeypatch) -> None:
    tiny_hf("llama").save_pretrained(tmp_path)
    monkeypatch.setattr("headtrace.models.checkpoint.available_bytes", lambda: 1000)
    with pytest.raises(MemoryError, match="device_map='auto' to leave some"):
        headtrace.load(tmp_path)
    headtrace.load(tmp_path, device_map="auto")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_map": "auto", "device": "cpu"}, "Give one of them"),
        ({"device_map": "everywhere"}, "device_map='everywhere': expected 'auto'"),
        ({"device_map": {}}, r"device_map=\{\}: expected"),
        ({"device_map": {"": "nowhere"}}, "no device 'nowhere'"),
        ({"device_map": {"": "meta"}}, "'meta' holds shapes only"),
        ({"device_map": {"": "mps"}, "dtype": "float64"}, "no float64"),
        (
            {"device_map": {"": "cpu", "model.layer.0": "cpu"}},
            r"'model\.layer\.0', and .* one of 'model\.layers",
        ),
    ],
)
def test_a_device_map_that_cannot_be_is_refused_with_the_reason(
    options: dict, message: str, tmp_path
) -> None:
    tiny_hf("llama").save_pretrained(tmp_path)
    with pytest.raises(InputError, match=message):
        headtrace.load(tmp_path, **options)


def test_a_loaded_model_stays_where_it_is() -> None:
    with pytest.raises(InputError, match=r"device_map='auto', but the model .* loaded already"):
        headtrace.load(tiny_hf("llama"), device_map="auto")


@pytest.mark.parametrize(
    ("cuda", "mps", "dtype", "best"),
    [
        (True, True, torch.float64, "cuda"),
        (False, True, torch.float32, "mps"),
        (False, True, torch.float64, "cpu"),
        (False, False, torch.bfloat16, "cpu"),
    ],
)
def test_auto_is_cuda_then_mps_then_the_cpu(cuda: bool, mps: bool, dtype, best: str, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert devices.best_device(dtype) == best


def test_a_forward_method_that_others_put_in_place_is_left_there() -> None:
    model = headtrace.load(tiny_hf("llama"))
    layer, calls = model.layers[0], []
    real = layer.forward
    layer.forward = lambda *args, **kwargs: calls.append(0) or real(*args, **kwargs)
    recording = model.record(IDS)
    recording.check()  # runs the model without its layers
    calls.clear()
    model.record(IDS)
    assert calls == [0]
