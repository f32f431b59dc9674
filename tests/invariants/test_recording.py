"""What a recording promises of every supported architecture, in float32 and float64."""

from __future__ import annotations

import pytest
import torch

import headtrace
from headtrace.errors import IdentityError, InputError
from headtrace.models import Recording
from headtrace.models.identities import tolerance_for
from headtrace.vocabulary import Component
from tests.rounding import forward_terms, rounding
from tests.tiny import NAMES, prompts, tiny_hf, tiny_model

DTYPES = (torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_three_identities_hold_on_prompts_of_two_lengths(name: str, dtype: torch.dtype) -> None:
    recording = tiny_model(name, dtype=dtype).record(prompts())
    report = recording.check()
    assert report.worst <= tolerance_for(dtype)
    # Rounding, not luck: an error is at most what the sums along one path through the model can round.
    assert report.worst < rounding(dtype, forward_terms(recording.model))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_output_logits_and_patterns_are_hugging_faces_own(name: str, dtype: torch.dtype) -> None:
    hf = tiny_hf(name, dtype=dtype)
    recording = headtrace.load(hf).record(prompts())
    for i, ids in enumerate(prompts()):
        with torch.inference_mode():
            output = hf(torch.tensor([ids]), output_attentions=True)
        # transformers computes some norms and the softmax in float32 even in a float64 model.
        allowed = rounding(torch.float32, forward_terms(recording.model))
        torch.testing.assert_close(
            recording[i].logits[0], output.logits[0], rtol=0, atol=allowed * float(output.logits.abs().max())
        )
        for layer, pattern in enumerate(output.attentions):
            # Attention multiplies two such sums, and a softmax passes their difference on once.
            size = float(recording[i].raw_logits(layer).abs().max())
            torch.testing.assert_close(
                recording[i].patterns[layer], pattern, rtol=0, atol=2 * allowed * max(1.0, size)
            )


@pytest.mark.parametrize("name", NAMES)
def test_recording_changes_nothing_about_the_logits(name: str) -> None:
    hf = tiny_hf(name)
    ids = prompts()[0]
    with torch.inference_mode():
        expected = hf(torch.tensor([ids])).logits
    model = headtrace.load(hf)
    found = model.record(ids).logits
    # The same operations in the same order: only alignment can make a difference, as between two runs of the model.
    allowed = rounding(torch.float32, forward_terms(model), float(expected.abs().max()))
    assert float((found - expected).abs().max()) <= allowed
    assert hf.config._attn_implementation == "eager", "the model is left as it was"


@pytest.mark.parametrize("name", NAMES)
def test_writes_of_all_components_sum_to_the_final_residual(name: str) -> None:
    model = tiny_model(name, dtype=torch.float64)
    recording = model.record(prompts()[0])
    total = recording.write(Component("embedding")).clone()
    if model.architecture.position_embedding is not None:
        total += recording.write(Component("position"))
    for layer in range(model.n_layers):
        total += recording.write(Component("mlp", layer)) + recording.write(
            Component("attention_bias", layer)
        )
        for head in range(model.n_heads):
            for src in range(recording.lengths[0]):
                total += recording.write(Component("head", layer, head, src))
    size = float(recording.residuals[-1, 0].abs().max())
    allowed = rounding(torch.float64, 20 * forward_terms(model), size)  # some 200 components are added here
    torch.testing.assert_close(total, recording.residuals[-1, 0], rtol=0, atol=allowed)


@pytest.mark.parametrize("name", NAMES)
def test_softmax_of_the_attention_logits_is_the_pattern(name: str) -> None:
    recording = tiny_model(name).record(prompts())
    for i in range(len(recording)):
        for layer in range(recording.model.n_layers):
            made = recording[i].attention_logits(layer).softmax(-1)
            size = float(recording[i].raw_logits(layer).abs().max())
            allowed = rounding(torch.float32, recording.model.d_head + recording.lengths[i], max(1.0, size))
            torch.testing.assert_close(made, recording[i].patterns[layer], rtol=0, atol=allowed)


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
        allowed = rounding(torch.float32, forward_terms(model), float(full.last_logits(i).abs().max()))
        torch.testing.assert_close(last.last_logits(i), full.last_logits(i), rtol=0, atol=allowed)
    last.check()
    two = model.record(prompts(), last_logits=2)
    assert two.logit_positions.tolist() == [[9, 10], [5, 6]]
    torch.testing.assert_close(two.logits_at(1, 5), full.logits_at(1, 5), rtol=0, atol=allowed)
    two.check()
    with pytest.raises(InputError, match="position 3 were not kept"):
        two.logits_at(0, 3)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_mlp_inputs_are_the_normed_residual_behind_attention(name: str) -> None:
    """What the MLP reads follows from what was written before it, with the recorded scale of its norm."""
    model = tiny_model(name, dtype=torch.float64)
    keep = [*Recording.FIELDS]
    recording = model.record(prompts(), keep=keep)
    facts = model.architecture
    for layer, block in enumerate(model.layers):
        read = recording.residuals[layer]
        if name != "gpt_neox":  # a parallel block reads the residual before attention
            read = read + recording.layer_writes(layer) - recording.mlp_writes[layer]
        read = facts.centred(read) if facts.mlp_norm else read
        expected = read / recording.mlp_norm_scales[layer][..., None]
        if facts.mlp_norm is not None:
            norm = block.get_submodule(facts.mlp_norm)
            expected = expected * (norm.weight + facts.gain_offset)
            if getattr(norm, "bias", None) is not None:
                expected = expected + norm.bias
        for i, n in enumerate(recording.lengths):
            size = float(expected[i, :n].abs().max())
            allowed = rounding(torch.float64, 20 * forward_terms(model), size)
            torch.testing.assert_close(
                recording.mlp_inputs[layer, i, :n], expected[i, :n], rtol=0, atol=allowed
            )
    assert (recording.mlp_post_norm_scales is not None) == (facts.mlp_post_norm is not None)


def test_a_recording_keeps_what_is_asked_for_and_says_what_it_lacks() -> None:
    model = tiny_model("qwen3")
    recording = model.record(prompts(), keep=["patterns"])
    assert set(recording.tensors) == {"patterns", *Recording.ALWAYS}
    full = model.record(prompts())
    assert torch.equal(recording.patterns, full.patterns)
    assert full.post_norm_scales is None, "Qwen3 has no norm after attention"
    with pytest.raises(InputError, match=r"without 'residuals'.*keep="):
        _ = recording[0].residuals
    with pytest.raises(InputError, match="keep='pattern': a recording has token_ids, logits"):
        model.record(prompts(), keep=["pattern"])
    with pytest.raises(InputError, match=r"'patterns' has the axes .*expected \(4, 2, 4, 11, 11\)"):
        full.with_tensors(patterns=full.patterns[:, :1])
    with pytest.raises(InputError, match="no tensor 'pattern'"):
        full.with_tensors(pattern=full.patterns)


@pytest.mark.parametrize("name", ["gemma2", "qwen3", "gpt2"])
def test_a_saved_recording_comes_back_the_same(name: str, tmp_path) -> None:
    model = tiny_model(name)
    recording = model.record(prompts())
    recording.save(tmp_path)
    loaded = headtrace.Recording.load(tmp_path, model)
    assert loaded.tensors.keys() == recording.tensors.keys()
    for key, tensor in recording.tensors.items():
        assert torch.equal(loaded.tensors[key], tensor), key  # copies, not computations
    assert (loaded.lengths, loaded.scales, loaded.softcaps) == (
        recording.lengths,
        recording.scales,
        recording.softcaps,
    )
    for mine, theirs in zip(loaded.visible, recording.visible, strict=True):
        assert torch.equal(mine, theirs)
    for layer in range(model.n_layers):
        assert (loaded.rotary[layer] is None) == (recording.rotary[layer] is None)
    loaded.check()
    with pytest.raises(headtrace.errors.InputError, match="weights"):
        headtrace.Recording.load(tmp_path, tiny_model(name, seed=5))


@pytest.mark.parametrize("patterns", ["keep", "recompute"])
@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "llama", "gemma2"])
def test_a_write_at_one_position_or_in_every_prompt_is_the_same_write(name: str, patterns: str) -> None:
    model = tiny_model(name, dtype=torch.float64)
    recording = model.record(prompts(), patterns=patterns)
    components = [
        Component("embedding"),
        Component("mlp", 1),
        Component("head", 1, 0),
        Component("head", 1, 1, 2),
    ]
    for component in components:
        whole = [recording.write(component, prompt) for prompt in range(len(recording))]
        everywhere = recording.write(component, None, 3)
        assert everywhere.shape == (len(recording), model.d_model)
        for prompt, expected in enumerate(whole):
            assert torch.allclose(recording.write(component, prompt, 3), expected[3], atol=1e-12)
            assert torch.allclose(everywhere[prompt], expected[3], atol=1e-12)
