"""The SVD of every head: against an independent implementation, the full matrix, and damaged weights.

Tolerances of 1e-9 are what `thin_triangle` promises. Rounding is far below: float64 times d_model times the condition
number of these heads (under ten) squared is 1e-13.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import headtrace
from headtrace.channels import condition_numbers, decompose_model, layer_svd, model_channels
from headtrace.channels.svd import svd_heads
from headtrace.errors import InputError
from tests.channels.damaged import deficient_model
from tests.tiny import NAMES, tiny_hf, tiny_model


@pytest.mark.parametrize("name", ["gpt2", "neox", "llama", "qwen2"])
def test_singular_values_equal_the_oracles(name: str, oracle_folder: Path) -> None:
    oracle = json.loads((oracle_folder / name / "oracle.json").read_text())
    model = headtrace.load(oracle_folder / name)
    expected = torch.tensor(oracle["singular_values"])
    torch.testing.assert_close(model.channels.singular_values, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_heads_agree_with_the_svd_of_the_full_matrix(name: str) -> None:
    model = tiny_model(name, dtype=torch.float64)
    weights = model.weights
    for layer in range(model.n_layers):
        svd = layer_svd(model, layer)
        W_K = weights.W_K[layer].repeat_interleave(weights.group, dim=0)
        omega = weights.W_Q[layer] @ W_K.mT
        full = torch.linalg.svdvals(omega)
        torch.testing.assert_close(svd.S, full[:, : model.d_head], rtol=1e-9, atol=1e-12)
        assert full[:, model.d_head :].abs().max() < 1e-12 * full.max()
        torch.testing.assert_close((svd.U * svd.S[:, None]) @ svd.V.mT, omega, rtol=1e-9, atol=1e-11)
        identity = torch.eye(model.d_head, dtype=torch.float64).expand(model.n_heads, -1, -1)
        torch.testing.assert_close(svd.U.mT @ svd.U, identity, rtol=0, atol=1e-10)
        torch.testing.assert_close(svd.V.mT @ svd.V, identity, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_the_change_of_basis_is_the_identity_inside_a_head(name: str) -> None:
    channels = decompose_model(tiny_model(name))
    identity = torch.eye(channels.to_query.shape[-1], dtype=torch.float64).expand_as(channels.to_query)
    torch.testing.assert_close(channels.to_query @ channels.to_key.mT, identity, rtol=0, atol=1e-10)
    assert channels.deficient == []


def test_without_rotary_or_bias_coefficients_are_the_projections_of_the_residual() -> None:
    model = tiny_model("gpt2", dtype=torch.float64)
    x = torch.randn(5, model.d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    svd, weights = layer_svd(model, 1), model.weights
    a, b = x @ weights.W_Q[1] @ svd.to_query, x @ weights.W_K[1] @ svd.to_key
    torch.testing.assert_close(a, x @ svd.U * svd.S[:, None], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(b, x @ svd.V, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "gemma3_text"])
def test_signs_do_not_depend_on_the_signs_of_the_weights(name: str) -> None:
    """W_Q -> -W_Q, W_K -> -W_K is the same query-key form, so it must give the same channels."""
    model = tiny_model(name, dtype=torch.float64)
    from headtrace.channels import svd_heads

    W_Q, W_K = model.weights.W_Q[0], model.weights.W_K[0]
    first, second = svd_heads(W_Q, W_K), svd_heads(-W_Q, -W_K)
    torch.testing.assert_close(first.U, second.U, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(first.V, second.V, rtol=1e-8, atol=1e-10)
    largest = first.U.gather(1, first.U.abs().argmax(dim=1, keepdim=True))
    assert (largest > 0).all()


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_homogeneous_bias_is_the_svd_of_the_extended_matrix(name: str) -> None:
    model = tiny_model(name, dtype=torch.float64)
    weights = model.weights
    for layer in range(model.n_layers):
        svd = layer_svd(model, layer, bias="homogeneous")
        for head in range(model.n_heads):
            W_Q, W_K = weights.W_Q[layer, head], weights.W_K[layer, head]
            b_Q, b_K = weights.b_Q[layer, head], weights.b_K[layer, head]
            top = torch.cat((W_Q @ W_K.T, (W_Q @ b_K)[:, None]), dim=1)
            bottom = torch.cat((b_Q @ W_K.T, (b_Q @ b_K)[None]))
            omega = torch.cat((top, bottom[None]))
            made = (svd.U[head] * svd.S[head]) @ svd.V[head].T
            torch.testing.assert_close(made, omega, rtol=1e-9, atol=1e-11)
            full = torch.linalg.svdvals(omega)[: model.d_head]
            torch.testing.assert_close(svd.S[head], full, rtol=1e-9, atol=1e-12)


def test_homogeneous_bias_is_refused_for_rotary_models() -> None:
    with pytest.raises(InputError, match="rotary"):
        layer_svd(tiny_model("llama"), 0, bias="homogeneous")


@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_rank_deficient_heads_are_reported(name: str) -> None:
    model = deficient_model(name)
    channels = decompose_model(model)
    group = model.weights.group
    expected = {(1, 0)} | {(2, h) for h in range(group)}
    assert set(channels.deficient) == expected
    assert channels.rank[1, 0] == model.d_head - 2
    assert channels.rank[2, 0] == model.d_head - 3
    condition_q, condition_k = condition_numbers(model)
    assert condition_q[1, 0] == torch.inf
    assert condition_k[2, 0] == torch.inf
    assert torch.isfinite(condition_q).sum() == condition_q.numel() - 1


def test_condition_numbers_are_those_of_the_matrices() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    for W, made in zip((model.weights.W_Q, model.weights.W_K), condition_numbers(model), strict=True):
        torch.testing.assert_close(made, torch.linalg.cond(W), rtol=1e-6, atol=0)


def test_weights_that_are_not_finite_are_named() -> None:
    hf = tiny_hf("llama")
    with torch.no_grad():
        hf.model.layers[2].self_attn.q_proj.weight[0, 0] = torch.nan
    with pytest.raises(
        InputError, match=r"layers\.2\.self_attn\.q_proj\.weight.*not finite: 1 of 1024.*\(0, 0\)"
    ):
        decompose_model(headtrace.load(hf))


def test_the_cache_is_keyed_by_the_layers_weights_and_survives_damage(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HEADTRACE_CACHE", str(tmp_path))
    monkeypatch.setattr("headtrace.channels.svd.KEPT_FROM_NUMBERS", 0)
    model = tiny_model("llama")
    made = model_channels(model).singular_values
    files = sorted(tmp_path.rglob("*.safetensors"))
    assert len(files) == model.n_layers

    with monkeypatch.context() as patched:  # read, not made again
        patched.setattr("headtrace.channels.svd.heads_svd", None)
        assert torch.equal(model_channels(model).singular_values, made)

    file = files[0]
    whole, kept = file.read_bytes(), load_file(file)
    save_file({**kept, "singular_values": kept["singular_values"] * 2}, file)
    torch.testing.assert_close(model_channels(model).singular_values, made)
    for damaged in (whole[:100], whole[:-1] + bytes([whole[-1] ^ 1]), b""):
        file.write_bytes(damaged)
        torch.testing.assert_close(model_channels(model).singular_values, made)
    hf = tiny_hf("llama")  # one layer of another model: the others are known
    with torch.no_grad():
        hf.model.layers[2].self_attn.q_proj.weight.mul_(1.5)
    assert model_channels(headtrace.load(hf)).singular_values.shape == made.shape
    assert len(list(tmp_path.rglob("*.safetensors"))) == model.n_layers + 1


def test_channels_are_made_while_another_thread_holds_the_models_lock(tmp_path, monkeypatch) -> None:
    """Heads are made in the background: whoever computes something cached of the model may be waiting for them."""
    monkeypatch.setenv("HEADTRACE_CACHE", str(tmp_path))
    monkeypatch.setattr("headtrace.channels.svd.KEPT_FROM_NUMBERS", 0)
    model = tiny_model("llama")
    channels = model_channels(model)
    maker = threading.Thread(target=channels.at, args=(1, 0), daemon=True)

    def made_meanwhile() -> bool:
        maker.start()
        maker.join(timeout=60)
        return not maker.is_alive()

    assert model.cached("something that waits for channels", made_meanwhile)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_heads_are_decomposed_when_they_are_asked_for_and_are_those_of_all(
    name, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("HEADTRACE_CACHE", str(tmp_path))
    monkeypatch.setattr("headtrace.channels.svd.KEPT_FROM_NUMBERS", 0)
    model = tiny_model(name)
    channels, whole = model_channels(model, dtype=torch.float64), decompose_model(model)
    some = channels.at(torch.tensor([1, 3]), torch.tensor([2, 0]))
    assert channels.n_known == 2
    for name_, tensor in some.tensors().items():
        expected = getattr(whole, name_)[[1, 3], [2, 0]]
        torch.testing.assert_close(tensor, expected.to(tensor.dtype), rtol=1e-9, atol=1e-9)
    assert torch.equal(channels.at(1, 2).to_key, some.to_key[0])
    torch.testing.assert_close(channels.singular_values, whole.singular_values)
    assert channels.n_known == model.n_layers * model.n_heads


def test_when_many_heads_of_a_layer_were_asked_for_the_rest_follows_in_the_background(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("HEADTRACE_CACHE", str(tmp_path))
    monkeypatch.setattr("headtrace.channels.svd.KEPT_FROM_NUMBERS", 0)
    model = tiny_model("llama")
    channels = model_channels(model)
    channels.at(0, 1)
    assert channels.n_known == 1
    channels.at(0, 2)
    for thread in [t for t in threading.enumerate() if t.name == "headtrace-channels"]:
        thread.join()
    assert channels.n_known == model.n_heads
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1, "a whole layer goes into the cache"


def test_a_head_wider_than_the_residual_has_as_many_channels_as_the_residual_has_dimensions() -> None:
    """Of six dimensions of the head only four can be reached: the other channels are empty, and all adds up."""
    generator = torch.Generator().manual_seed(0)
    W_Q, W_K = torch.randn(2, 3, 4, 6, dtype=torch.float64, generator=generator)
    svd = svd_heads(W_Q, W_K)
    full = torch.linalg.svdvals(W_Q @ W_K.mT)
    torch.testing.assert_close(svd.S[:, :4], full, rtol=1e-9, atol=0)
    assert svd.S[:, 4:].max() < 1e-12 * full.max()
    torch.testing.assert_close((W_Q @ svd.to_query) @ (W_K @ svd.to_key).mT, W_Q @ W_K.mT, rtol=0, atol=1e-9)
