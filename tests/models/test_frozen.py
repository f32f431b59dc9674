"""The frozen model: affine in the residual, and equal to the real one where it was recorded."""

from __future__ import annotations

import pytest
import torch

import headtrace
from headtrace.errors import UnsupportedModelError
from headtrace.models.frozen import CONTENT_FIELDS, FrozenMLP, Gradients, gradients, slope_from_zero
from headtrace.models.identities import tolerance_for
from tests.tiny import NAMES, prompts, tiny_model

EVERY = pytest.mark.parametrize("name", NAMES)
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def swept(model: headtrace.Model, seed: int = 3) -> Gradients:
    """Gradients of random directions: read before the last norm, and before a layer in the middle."""
    recording = model.record(prompts(), keep=CONTENT_FIELDS)
    generator = torch.Generator().manual_seed(seed)
    start = torch.zeros_like(recording.residuals)
    for prompt, length in enumerate(recording.lengths):
        for layer, position in ((model.n_layers, length - 1), (2, length - 2)):
            direction = torch.randn(model.d_model, generator=generator, dtype=torch.float64)
            start[layer, prompt, position] = direction.to(model.dtype)
    return gradients(recording, start)


@EVERY
@BOTH
def test_tokens_and_biases_contribute_all_that_is_read(name: str, dtype: torch.dtype) -> None:
    found = swept(tiny_model(name, dtype=dtype))
    before = torch.stack((found.embedding(), found.position()))
    parts = torch.cat((before, found.attention_biases(), found.mlp_constant))
    recorded = (found.recording.residuals * found.start).sum((0, 2, 3))
    error = (parts.sum((0, 2)) - recorded).abs() / parts.abs().sum((0, 2))
    assert float(error.max()) < tolerance_for(dtype) / 10


@EVERY
@torch.inference_mode()
def test_a_frozen_mlp_is_the_mlp_where_it_was_recorded(name: str) -> None:
    """Its own matrices give what the model's module wrote, and its frozen parts add up to it."""
    model = tiny_model(name, dtype=torch.float64)
    recording = model.record(prompts(), keep=CONTENT_FIELDS)
    for layer in range(model.n_layers):
        mlp = FrozenMLP.of(recording, layer)
        written = recording.mlp_writes[layer]
        torch.testing.assert_close(mlp.write(mlp.inputs), written, rtol=1e-10, atol=1e-10)
        direction = torch.randn_like(written)
        pulled = mlp.back(direction)
        read = recording.residuals[layer]
        if not model.architecture.parallel(model.hf.config):
            read = read + recording.layer_writes(layer) - written
        real = torch.arange(read.shape[1]) < torch.tensor(recording.lengths)[:, None]
        made = (read * pulled.direction).sum(-1) + pulled.constant
        torch.testing.assert_close(made[real], (written * direction).sum(-1)[real], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "gpt_neox", "olmo2"])
@torch.inference_mode()
def test_gradients_are_those_of_the_real_model_with_gates_and_scales_held(name: str) -> None:
    """Moving an embedding a little moves J by the gradient, in a model whose frozen parts are put back by hand."""
    model = tiny_model(name, dtype=torch.float64)
    found = swept(model)
    recording, facts = found.recording, model.architecture
    step = torch.randn_like(recording.embedding)
    moved = step.clone()
    total = torch.zeros(len(recording), dtype=torch.float64)
    for layer in range(model.n_layers):
        total += (moved * found.start[layer]).sum((1, 2))
        read = moved / recording.norm_scales[layer][..., None]
        values = torch.einsum("btd,hdr->bhtr", read, model.weights.W_V[layer])
        mixed = recording.patterns[layer] @ values.repeat_interleave(model.weights.group, dim=1)
        written = torch.einsum("bhtr,hrd->btd", mixed, model.weights.W_O[layer])
        if recording.post_norm_scales is not None:
            written = written / recording.post_norm_scales[layer][..., None]
        mlp = FrozenMLP.of(recording, layer)
        into = mlp.before.forward(moved if facts.parallel(model.hf.config) else moved + written)
        hidden = (into @ mlp.parts.W_in) * mlp.gates
        moved = moved + written + mlp.after.forward(hidden @ mlp.parts.W_out)
    total += (moved * found.start[-1]).sum((1, 2))
    torch.testing.assert_close((step * found.residual).sum((1, 2)), total, rtol=1e-9, atol=1e-9)


def test_an_activation_over_its_input_has_its_limit_at_zero() -> None:
    z = torch.tensor([-2.0, 0.0, 3.0], dtype=torch.float64)
    assert slope_from_zero(z, torch.relu).tolist() == [0.0, 0.0, 1.0]
    assert float(slope_from_zero(z, torch.nn.functional.gelu)[1]) == pytest.approx(0.5, abs=1e-6)


def test_an_mlp_of_unknown_shape_is_named_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    model = tiny_model("llama")
    monkeypatch.setattr(model, "architecture", replace(model.architecture, mlp_parts=None))
    with pytest.raises(UnsupportedModelError, match='paths="attention"'):
        headtrace.Tracer(model).trace(prompts()[0], answer=5, wrong=6, paths="content")
