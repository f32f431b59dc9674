"""Scores as sums over channels, for every firing of every architecture."""

from __future__ import annotations

import pytest
import torch

import headtrace
from headtrace.channels import decompose, decompose_all, firing_places, layer_svd, terms_of
from headtrace.channels.terms import FiringTerms, exact_channels
from headtrace.errors import IdentityError, InputError
from headtrace.vocabulary import Firing
from tests.channels.counts import assert_reaches, assert_signal
from tests.channels.damaged import deficient_model
from tests.conftest import IOI
from tests.tiny import NAMES, prompts, tiny_model


def rounding(recording: headtrace.Recording, layer: int) -> torch.Tensor:
    """How far a score may lie from the sum of its terms: (batch, head, dest, src).

    The model multiplies queries and keys in its own precision: a dot product of r numbers, each product and each sum
    rounded once. The terms are made in float64, from r numbers on either side: the inverse in ``to_key`` makes them
    large where a head is ill-conditioned.
    """
    model, eps = recording.model, torch.finfo(torch.float64).eps
    channels, r = exact_channels(model), model.d_head
    q = recording.queries[layer].double().abs()
    k = recording.keys[layer].double().abs().repeat_interleave(model.weights.group, dim=1)
    recorded = (r + 2) * torch.finfo(model.dtype).eps * (q @ k.mT)
    made = 4 * r * eps * (q @ channels.to_query[layer].abs()) @ (k @ channels.to_key[layer].abs()).mT
    outside = 4 * r * eps * (q.sum(-1, keepdim=True) @ k.sum(-1, keepdim=True).mT)
    return (recorded + made + outside) * recording.scales[layer]


def assert_sums(recording: headtrace.Recording, terms: FiringTerms) -> None:
    """Terms and remainder give the recorded logits, and relative attention worked out key by key."""
    for layer in range(recording.model.n_layers):
        rows = terms.places[:, 0] == layer
        _, p, h, d, s = terms.places[rows].T
        raw, allowed = recording.raw_logits(layer).double(), rounding(recording, layer)
        made = (terms.terms.sum(-1) + terms.remainder)[rows]
        assert ((made - raw[p, h, d, s]).abs() <= allowed[p, h, d, s]).all()
    for row in range(0, len(terms), max(1, len(terms) // 40)):
        layer, p, h, d, s = terms.places[row].tolist()
        raw, allowed = recording.raw_logits(layer)[p, h, d].double(), rounding(recording, layer)[p, h, d]
        others = [t for t in recording.visible[layer][p, d].nonzero()[:, 0].tolist() if t != s]
        mean, more = (float(x[others].mean()) if others else 0.0 for x in (raw, allowed))
        made = float(terms.relative_terms[row].sum() + terms.relative_remainder[row])
        assert abs(made - (float(raw[s]) - mean)) <= float(allowed[s]) + more


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_terms_sum_to_the_recorded_logit_of_every_firing(name: str, dtype: torch.dtype) -> None:
    model = tiny_model(name, dtype=dtype)
    recording = model.record(prompts())
    places = firing_places(recording, above=-1.0, skip_first=False)
    pairs = sum(
        int(recording.visible[layer][i, :n, :n].sum())
        for layer in range(model.n_layers)
        for i, n in enumerate(recording.lengths)
    )
    assert len(places) == pairs * model.n_heads, "every visible pair of every head and prompt"
    terms = terms_of(recording, places)
    assert_sums(recording, terms)
    assert not terms.remainder.any()


@pytest.mark.smollm2
def test_terms_sum_to_the_recorded_logit_of_every_firing_of_smollm2(smollm2) -> None:
    recording = smollm2.record(IOI)
    terms = decompose_all(recording)
    n = recording.lengths[0]
    assert len(terms) == 30 * 9 * n * (n + 1) // 2
    assert_sums(recording, terms)
    assert terms.sparseness.min() >= 1 / 64
    assert terms.sparseness.max() <= 1


def test_terms_sum_to_the_recorded_logit_of_every_firing_of_the_built_in_model() -> None:
    model = headtrace.load("builtin")
    recording = model.record(IOI)
    terms = decompose_all(recording)
    n = recording.lengths[0]
    assert len(terms) == model.n_layers * model.n_heads * n * (n + 1) // 2
    assert_sums(recording, terms)


@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rank_deficient_heads_get_an_explicit_remainder(name: str, dtype: torch.dtype) -> None:
    model = deficient_model(name, dtype)
    recording = model.record(prompts())
    terms = terms_of(recording, firing_places(recording, above=-1.0, skip_first=False))
    assert_sums(recording, terms)
    damaged = terms.rank < model.d_head
    assert terms.remainder[damaged].abs().max() > 0.01, "biases and rotation leave the channels"
    assert not terms.remainder[~damaged].any()
    beyond = torch.arange(model.d_head) >= terms.rank[:, None]
    assert not terms.terms[beyond].any()
    one = decompose(recording, "L2H0:6:3")
    assert one.rank == model.d_head - 3
    assert float(one.terms.sum()) + one.remainder == pytest.approx(one.logit, rel=1e-4, abs=1e-5)
    assert len(one.top(100)) == one.rank


def test_without_bias_or_rotary_a_deficient_head_has_no_remainder() -> None:
    model = deficient_model("gpt2", torch.float64)
    recording = model.record(prompts())
    terms = terms_of(recording, firing_places(recording, above=-1.0, skip_first=False), bias="homogeneous")
    assert terms.remainder.abs().max() < 1e-10, "homogeneous coordinates leave nothing outside"


def test_nearly_deficient_heads_stay_exact_in_a_float32_model() -> None:
    model = deficient_model("qwen2", near=1e-6)
    recording = model.record(prompts())
    terms = terms_of(recording, firing_places(recording, above=-1.0, skip_first=False))
    assert_sums(recording, terms)
    assert (terms.rank == model.d_head).all()


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_homogeneous_terms_are_those_of_the_extended_matrix(name: str) -> None:
    model = tiny_model(name, dtype=torch.float64)
    recording = model.record(prompts()[0])
    for layer, head, dest, src in ((0, 1, 5, 2), (3, 2, 10, 7)):
        x = recording.residuals[layer, 0] / recording.norm_scales[layer, 0][:, None]
        x = torch.cat((x, torch.ones_like(x[:, :1])), dim=1)
        svd = layer_svd(model, layer, bias="homogeneous")
        U, S, V = svd.U[head], svd.S[head], svd.V[head]
        expected = (x[dest] @ U) * S * (x[src] @ V) * recording.scales[layer]
        made = decompose(recording, Firing(layer, head, dest, src), bias="homogeneous")
        torch.testing.assert_close(made.terms, expected, rtol=1e-8, atol=1e-10)
        assert made.logit == pytest.approx(float(expected.sum()), rel=1e-9)
        other = decompose(recording, Firing(layer, head, dest, src))
        assert not torch.allclose(other.terms, made.terms), "the bias is spread over the channels differently"


def test_one_firing_is_a_row_of_all() -> None:
    model = tiny_model("gemma2")
    recording = model.record(prompts())
    every = decompose_all(recording, prompt=1)
    row = 77
    one = model.decompose(recording, every.firing(row), prompt=1)
    torch.testing.assert_close(one.terms, every.terms[row], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(one.relative_terms, every.relative_terms[row], rtol=1e-9, atol=1e-9)
    rounding_of_sums = len(one.terms) * torch.finfo(torch.float64).eps * float(one.terms.abs().sum())
    assert_reaches(one.n_recon, every.relative_terms[row], rounding_of_sums)
    assert_signal(one.signal_set, every.terms[row], rounding_of_sums)
    assert one.attention == pytest.approx(
        float(recording.patterns[one.firing.layer, 1, one.firing.head, one.firing.dest, one.firing.src])
    )
    assert one.tokens == recording.tokens(1)
    values = [t.relative_term for t in one.top(4)]
    assert values == sorted(values, reverse=True)
    assert values[0] == pytest.approx(float(one.relative_terms.max()))
    assert float(one.rotated(20).sparseness.mean()) > 1 / model.d_head


def test_attention_above_uniform_means_positive_relative_attention() -> None:
    recording = tiny_model("llama").record(prompts())
    terms = terms_of(recording, firing_places(recording, skip_first=False))
    seen = torch.stack([recording.visible[int(l)][int(p), int(d)].sum() for l, p, _, d, _ in terms.places])
    # Attention is rounded in float32: a few units in the last place of 1 are no preference.
    above = terms.attention > 1 / seen + 8 * torch.finfo(torch.float32).eps
    assert above.sum() > 100
    assert (terms.relative[above & (seen > 1)] > 0).all()


def test_sums_are_checked_at_run_time_and_the_place_is_named() -> None:
    model = tiny_model("llama")
    recording = model.record(prompts())
    with torch.inference_mode():
        exact_channels(model).to_key[2, 1] *= 1.01
    with pytest.raises(IdentityError, match=r"L2H1 \d+->\d+ .*relative error"):
        terms_of(recording, firing_places(recording))
    damaged = recording.with_tensors(keys=recording.keys * torch.nan)
    with pytest.raises(IdentityError):
        decompose(damaged, "L0H0:3:1")


@pytest.mark.parametrize(
    ("firing", "prompt", "message"),
    [
        ("L9H0:3:1", 0, "no head L9H0"),
        ("L0H4:3:1", 0, "heads 0 to 3"),
        ("L0H0:8:1", 1, "7 tokens"),
        ("L0H0:1:3", 0, "does not see position 3"),
        ("L0H0:10:2", 0, "sees 6 to 10"),
        ("L0H0:3:1", 2, "no prompt 2"),
        ("head 3", 0, "not a firing"),
    ],
)
def test_impossible_firings_say_what_is_wrong(firing: str, prompt: int, message: str) -> None:
    recording = tiny_model("mistral").record(prompts())
    with pytest.raises(InputError, match=message):
        recording.model.decompose(recording, firing, prompt=prompt)
