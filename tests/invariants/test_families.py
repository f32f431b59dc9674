"""The architectures beyond the first ten, each on one small model: a chosen few of the invariants of the ten.

Recording (components, scores, output, Hugging Face's own numbers), channels, predictions shown by the model, the frozen
sweep, and the model left as it was. What does not depend on an architecture's facts is tested on the ten alone.
"""

from __future__ import annotations

import pytest
import torch

import headtrace
from headtrace.channels import firing_places, terms_of
from headtrace.errors import UnsupportedModelError
from headtrace.models.forward import sample
from headtrace.models.frozen import CONTENT_FIELDS, FrozenMLP, gradients
from headtrace.models.identities import tolerance_for
from headtrace.models.observer import Observer
from tests.channels.test_decomposition import assert_sums
from tests.models.test_forward import state
from tests.rounding import forward_terms, rounding
from tests.tiny import MORE, prompts, tiny_hf, top_two

IN_FLOAT32 = ("cohere", "cohere2", "ernie4_5")


@pytest.fixture(scope="module", params=MORE)
def model(request: pytest.FixtureRequest) -> headtrace.Model:
    return headtrace.load(tiny_hf(request.param))


@pytest.fixture(scope="module")
def recording(model: headtrace.Model) -> headtrace.Recording:
    return model.record(prompts(), keep=CONTENT_FIELDS)


def test_the_identities_hold_and_the_numbers_are_hugging_faces_own(
    model: headtrace.Model, recording: headtrace.Recording
) -> None:
    bound = rounding(model.dtype, forward_terms(model))
    assert recording.check().worst < bound
    for i, ids in enumerate(prompts()):
        with torch.inference_mode():
            output = model.hf(torch.tensor([ids]), output_attentions=True)
        size = float(output.logits.abs().max())
        torch.testing.assert_close(recording[i].logits[0], output.logits[0], rtol=0, atol=bound * size)
        for layer, pattern in enumerate(output.attentions):
            # Attention multiplies two such sums, and a softmax passes their difference on once.
            size = max(1.0, float(recording[i].raw_logits(layer).abs().max()))
            torch.testing.assert_close(recording[i].patterns[layer], pattern, rtol=0, atol=2 * bound * size)


@pytest.mark.parametrize("name", [name for name in MORE if name not in IN_FLOAT32])
def test_the_identities_are_exact_in_float64(name: str) -> None:
    recording = headtrace.load(tiny_hf(name, dtype=torch.float64)).record(prompts())
    assert recording.check().worst < rounding(torch.float64, forward_terms(recording.model))


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_a_model_that_computes_in_float32_whatever_its_dtype_is_refused_in_float64(name: str) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"rotate queries and keys in float32.*Load the model in float32"
    ):
        headtrace.load(tiny_hf(name, dtype=torch.float64))


# Files of experts have a tensor for each; those of Gemma-3 with images have names of an older layout.
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "gemma3", "phi3", "falcon"])
def test_a_folder_gives_the_same_model(name: str, tmp_path) -> None:
    hf = tiny_hf(name)
    hf.save_pretrained(tmp_path)
    loaded = headtrace.load(tmp_path)
    expected = headtrace.load(hf).record(prompts()[0]).logits
    allowed = rounding(torch.float32, forward_terms(loaded), float(expected.abs().max()))
    torch.testing.assert_close(loaded.record(prompts()[0]).logits, expected, rtol=0, atol=allowed)


def test_terms_of_the_channels_sum_to_every_score(recording: headtrace.Recording) -> None:
    terms = terms_of(recording, firing_places(recording, above=-1.0, skip_first=False))
    assert_sums(recording, terms)
    facts = recording.model.architecture
    # Centred queries turn out of the space that their head's channels span: that part of a score is the remainder.
    centred = facts.query_key_norm is not None and facts.query_key_norm_kind == "layer"
    assert bool(terms.remainder.any()) == centred


@torch.inference_mode()
def test_tokens_and_biases_contribute_all_that_is_read_and_frozen_mlps_are_the_mlps(
    model: headtrace.Model, recording: headtrace.Recording
) -> None:
    generator = torch.Generator().manual_seed(3)
    start = torch.zeros_like(recording.residuals)
    for prompt, length in enumerate(recording.lengths):
        start[-1, prompt, length - 1] = torch.randn(model.d_model, generator=generator)
    found = gradients(recording, start)
    before = torch.stack((found.embedding(), found.position()))
    parts = torch.cat((before, found.attention_biases(), found.mlp_constant))
    recorded = (recording.residuals * start).sum((0, 2, 3))
    error = (parts.sum((0, 2)) - recorded).abs() / parts.abs().sum((0, 2))
    assert float(error.max()) < tolerance_for(model.dtype) / 10
    for layer in range(model.n_layers):
        mlp, written = FrozenMLP.of(recording, layer), recording.mlp_writes[layer]
        allowed = rounding(model.dtype, forward_terms(model), float(written.abs().max()))
        torch.testing.assert_close(mlp.write(mlp.inputs), written, rtol=0, atol=allowed)


def test_the_model_shows_what_a_complete_trace_predicted_and_stays_as_it_was(model: headtrace.Model) -> None:
    before = state(model.hf)
    for ids in (one for seed in range(4) for one in prompts(seed)):
        circuit = headtrace.Tracer(model).trace(ids, *top_two(model, ids), paths="complete")
        if sum(node.expanded for node in circuit.nodes) >= 2:
            break
    else:
        pytest.fail("no prompt has a circuit to test")
    report = headtrace.verify(circuit, model, edges="top:1", controls=1, reach="global")
    size = max(float(model.record(ids).raw_logits(layer).abs().max()) for layer in range(model.n_layers))
    assert report.max_prediction_error < rounding(model.dtype, forward_terms(model), max(1.0, size))
    assert max(abs(c.clean - c.predicted) for c in report.predictions) > 0.05, (
        "removing the signals does something"
    )
    assert state(model.hf) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MORE)
def test_in_half_precision_rounding_is_small_and_predictions_come_true(name: str, dtype: torch.dtype) -> None:
    model, ids = headtrace.load(tiny_hf(name).to(dtype)), prompts()[0]
    report = model.record(prompts()).check()
    assert all(0 < layer.worst < 2 * torch.finfo(dtype).eps for layer in report.rounding)
    circuit = headtrace.Tracer(model).trace(ids, *top_two(model, ids), paths="complete")
    shown = headtrace.verify(circuit, model, edges=())
    # The prediction is computed in float32 from what was recorded; the model computes the same scores in float32.
    assert shown.max_prediction_error < rounding(torch.float32, forward_terms(model), 20.0)


@pytest.mark.parametrize("name", ["gptj", "gpt_neo", "falcon", "mixtral", "granite"])
def test_a_pass_with_gradients_and_drawn_text_are_those_of_the_plain_pass(name: str) -> None:
    model, ids = headtrace.load(tiny_hf(name, dtype=torch.float64)), torch.tensor([prompts()[0]])

    class Scaled(Observer):
        factor = torch.ones((), dtype=torch.float64, requires_grad=True)

        def attention_write(self, layer: int, write: torch.Tensor) -> torch.Tensor:
            return self.factor * write

        def mlp_write(self, layer: int, write: torch.Tensor) -> torch.Tensor:
            return self.factor * write

    expected, scaled = model.run(ids), Scaled()
    logits = model.run(ids, scaled, grad=True)
    allowed = rounding(torch.float64, forward_terms(model), float(expected.abs().max()))
    assert float((logits.detach() - expected).abs().max()) <= allowed
    logits[0, -1].max().backward()
    assert scaled.factor.grad is not None
    drawn = sample(model, ids[:, :6], 12, torch.Generator().manual_seed(0))
    generator, found = torch.Generator().manual_seed(0), ids[:, :6]
    while found.shape[1] < 12:
        chances = model.run(found)[:, -1].double().softmax(-1)
        found = torch.cat((found, torch.multinomial(chances, 1, generator=generator)), dim=1)
    assert torch.equal(drawn, found)
