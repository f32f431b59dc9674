"""What a recording promises of every supported architecture, in float32 and float64."""

from __future__ import annotations

import pytest
import torch

import headtrace
from headtrace.errors import IdentityError
from headtrace.models.identities import tolerance_for
from headtrace.vocabulary import Component
from tests.tiny import NAMES, prompts, tiny_hf, tiny_model

DTYPES = (torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_three_identities_hold_on_prompts_of_two_lengths(name: str, dtype: torch.dtype) -> None:
    recording = tiny_model(name, dtype=dtype).record(prompts())
    report = recording.check()
    assert report.worst <= tolerance_for(dtype)
    # Rounding, not luck: float64 must be orders of magnitude better than float32 can be.
    assert report.worst < (1e-5 if dtype == torch.float32 else 1e-11)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_output_logits_and_patterns_are_hugging_faces_own(name: str, dtype: torch.dtype) -> None:
    hf = tiny_hf(name, dtype=dtype)
    recording = headtrace.load(hf).record(prompts())
    for i, ids in enumerate(prompts()):
        with torch.inference_mode():
            output = hf(torch.tensor([ids]), output_attentions=True)
        # transformers computes some norms and the softmax in float32 even in a float64 model.
        torch.testing.assert_close(recording[i].logits[0], output.logits[0], rtol=1e-4, atol=2e-5)
        for layer, pattern in enumerate(output.attentions):
            torch.testing.assert_close(recording[i].patterns[layer], pattern, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_single_prompt_gives_bit_for_bit_the_eager_logits(name: str) -> None:
    hf = tiny_hf(name)
    ids = prompts()[0]
    with torch.inference_mode():
        expected = hf(torch.tensor([ids])).logits
    assert torch.equal(headtrace.load(hf).record(ids).logits, expected)
    assert hf.config._attn_implementation == "eager", "the model is left as it was"


@pytest.mark.parametrize("name", NAMES)
def test_writes_of_all_components_sum_to_the_final_residual(name: str) -> None:
    model = tiny_model(name, dtype=torch.float64)
    recording = model.record(prompts()[0])
    total = recording.write(Component("embedding")).clone()
    for layer in range(model.n_layers):
        total += recording.write(Component("mlp", layer)) + recording.write(
            Component("attention_bias", layer)
        )
        for head in range(model.n_heads):
            for src in range(recording.lengths[0]):
                total += recording.write(Component("head", layer, head, src))
    torch.testing.assert_close(total, recording.residuals[-1, 0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_softmax_of_the_attention_logits_is_the_pattern(name: str) -> None:
    recording = tiny_model(name).record(prompts())
    for i in range(len(recording)):
        for layer in range(recording.model.n_layers):
            made = recording[i].attention_logits(layer).softmax(-1)
            torch.testing.assert_close(made, recording[i].patterns[layer], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3_text"])
def test_sliding_windows_hide_far_keys(name: str) -> None:
    recording = tiny_model(name).record(prompts()[0])
    last_row_seen = {int(visible[0, -1].sum()) for visible in recording.visible}
    assert 5 in last_row_seen
    assert (11 in last_row_seen) == (name != "mistral"), (
        "Gemma alternates windows, Mistral has one in every layer"
    )


def test_a_model_that_does_not_add_up_is_named_and_stopped() -> None:
    hf = tiny_hf("llama")
    hf.model.layers[2].self_attn.register_forward_hook(lambda m, a, out: (out[0] * 1.01, out[1]))
    with pytest.raises(IdentityError, match=r"layer 3.*relative error"):
        headtrace.load(hf).record(prompts()[0]).check()


def test_recording_only_the_last_logits_keeps_the_right_positions() -> None:
    model = tiny_model("qwen2")
    full, last = model.record(prompts()), model.record(prompts(), last_logits=True)
    assert last.logits.shape[1] == 1
    for i in range(2):
        torch.testing.assert_close(last.last_logits(i), full.last_logits(i))
    last.check()


@pytest.mark.parametrize("name", ["gemma2", "qwen3", "gpt2"])
def test_a_saved_recording_comes_back_the_same(name: str, tmp_path) -> None:
    model = tiny_model(name)
    recording = model.record(prompts())
    recording.save(tmp_path)
    loaded = headtrace.Recording.load(tmp_path, model)
    for key, tensor in recording.tensors().items():
        assert torch.equal(loaded.tensors()[key], tensor), key
    assert loaded.check() == recording.check()
    with pytest.raises(headtrace.errors.InputError, match="weights"):
        headtrace.Recording.load(tmp_path, tiny_model(name, seed=5))
