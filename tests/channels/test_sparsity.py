"""Sparseness, n_recon, the signal set and rotations, by their definitions and by brute force."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headtrace.channels.sparsity import (
    random_rotations,
    rotated_terms,
    rotation_control,
    signal_set,
)
from headtrace.measures import n_recon, sparseness

# Quarters are exact in binary, so brute force and the code add without rounding.
quarters = st.integers(-40, 40).map(lambda i: i / 4)
few_terms = st.lists(quarters, min_size=1, max_size=8)
any_terms = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


def vector(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def subsets(n: int):
    return (chosen for size in range(n + 1) for chosen in combinations(range(n), size))


@given(any_terms)
def test_sparseness_lies_between_one_nth_and_one(values: list[float]) -> None:
    made = float(sparseness(vector(values)))
    assert 1 / len(values) - 1e-12 <= made <= 1 + 1e-12


@given(st.integers(1, 30), st.floats(1e-150, 1e150))
def test_sparseness_reaches_both_ends(n: int, size: float) -> None:
    one = torch.zeros(n, dtype=torch.float64)
    one[-1] = -size
    assert float(sparseness(one)) == pytest.approx(1 / n)
    assert float(sparseness(torch.full((n,), size, dtype=torch.float64))) == pytest.approx(1)


@given(any_terms.filter(lambda v: max(map(abs, v)) > 1e-100))
def test_sparseness_is_the_ratio_of_its_definition(values: list[float]) -> None:
    v = vector(values) / max(map(abs, values))
    expected = v.abs().mean() ** 2 / v.square().mean()
    assert float(sparseness(vector(values))) == pytest.approx(float(expected), rel=1e-9)


def test_padding_with_zeros_does_not_count_as_channels() -> None:
    padded = vector([3, 1, -2, 0, 0])
    assert float(sparseness(padded, 3)) == pytest.approx(float(sparseness(padded[:3])))
    assert float(sparseness(padded)) != pytest.approx(float(sparseness(padded[:3])))


@settings(max_examples=200)
@given(few_terms)
def test_n_recon_is_minimal_by_brute_force(values: list[float]) -> None:
    total = sum(values)
    smallest = min(len(chosen) for chosen in subsets(len(values)) if sum(values[i] for i in chosen) >= total)
    assert int(n_recon(vector(values))) == smallest


@given(any_terms)
def test_n_recon_never_needs_more_than_the_positive_terms(values: list[float]) -> None:
    assert 0 <= int(n_recon(vector(values))) <= sum(v > 0 for v in values)


@settings(max_examples=200)
@given(few_terms)
def test_signal_set_leaves_the_largest_set_with_sum_at_most_zero(values: list[float]) -> None:
    mirrored = [-v for v in values] if sum(values) < 0 else values
    largest = max(len(chosen) for chosen in subsets(len(values)) if sum(mirrored[i] for i in chosen) <= 0)
    signal = signal_set(vector(values)).tolist()
    noise = [v for v, chosen in zip(mirrored, signal, strict=True) if not chosen]
    kept = [v for v, chosen in zip(mirrored, signal, strict=True) if chosen]
    assert len(noise) == largest
    assert sum(noise) <= 0
    assert all(v > 0 for v in kept)
    assert not kept or not noise or min(kept) >= max(noise)


@given(few_terms)
def test_negative_logits_mirror_the_signs(values: list[float]) -> None:
    signal, mirrored = signal_set(vector(values)), signal_set(-vector(values))
    if sum(values) != 0 and len(set(map(abs, values))) == len(values):
        assert torch.equal(signal, mirrored)
    if sum(values) == 0:
        assert not signal.any()


def test_batches_give_what_single_vectors_give() -> None:
    """In quarters, which add without rounding in any order: counts must then be the same to the last one."""
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(-40, 41, (3, 4, 7), generator=generator).double() / 4
    for measure in (sparseness, n_recon, signal_set):
        rows = torch.stack([measure(row) for row in batch.reshape(12, 7)])
        # Sparseness divides once more; counts are compared exactly.
        torch.testing.assert_close(measure(batch).reshape(rows.shape), rows)


def coefficients(n: int, r: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(n, r, dtype=torch.float64, generator=generator) for _ in range(2))
    S = torch.rand(n, r, dtype=torch.float64, generator=generator).sort(descending=True).values + 0.01
    return a, b, S


@given(st.integers(1, 12), st.integers(0, 10_000))
def test_the_sum_of_the_terms_does_not_change_under_rotation_of_the_basis(r: int, seed: int) -> None:
    a, b, S = coefficients(4, r, seed)
    P = random_rotations(3, r, torch.Generator().manual_seed(seed))
    turned = rotated_terms(a, b, S, (P, P), "basis")
    torch.testing.assert_close(turned.sum(-1), (a * b).sum(-1).expand(3, -1), rtol=1e-9, atol=1e-9)


@given(st.integers(2, 12), st.integers(0, 10_000))
def test_rotating_the_spectrum_gives_the_terms_of_a_head_with_the_same_singular_values(
    r: int, seed: int
) -> None:
    """The terms must be those of ``(U P) S (V Q)^T``, whose spectrum is S, for the same tokens."""
    generator = torch.Generator().manual_seed(seed)
    d = r + 3
    U, V = (torch.linalg.qr(torch.randn(d, r, dtype=torch.float64, generator=generator)).Q for _ in range(2))
    x, y = (torch.randn(d, dtype=torch.float64, generator=generator) for _ in range(2))
    S = torch.rand(r, dtype=torch.float64, generator=generator) + 0.1
    P, Q = random_rotations(1, r, generator), random_rotations(1, r, generator)
    turned = rotated_terms((x @ U * S)[None], (y @ V)[None], S[None], (P, Q), "spectrum")[0, 0]
    omega = (U @ P[0] * S) @ (V @ Q[0]).T
    torch.testing.assert_close(turned.sum(), x @ omega @ y, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        torch.linalg.svdvals(omega)[:r], S.sort(descending=True).values, rtol=1e-9, atol=1e-9
    )
    torch.testing.assert_close(turned, (x @ U @ P[0]) * S * (y @ V @ Q[0]), rtol=1e-9, atol=1e-9)


def test_rotations_are_orthogonal_and_repeatable() -> None:
    first, again = (random_rotations(5, 6, torch.Generator().manual_seed(1)) for _ in range(2))
    torch.testing.assert_close(first @ first.mT, torch.eye(6, dtype=torch.float64).expand(5, 6, 6))
    torch.testing.assert_close(first, again)
    assert (first[0] - first[1]).abs().max() > 0.1


def test_low_rank_is_sparse_under_the_spectrum_control_and_dense_in_rotated_bases() -> None:
    """Which is why there are two controls: a head of nearly rank one looks sparse whatever its directions."""
    a, b, _ = coefficients(50, 16, 0)
    S = torch.full((50, 16), 1e-6, dtype=torch.float64)
    S[:, 0] = 1
    rank = torch.full((50,), 16)
    true = sparseness(a * S * b)
    same_spectrum = rotation_control(a * S, b, S, rank, rotations=40, control="spectrum")
    other_basis = rotation_control(a * S, b, S, rank, rotations=40, control="basis")
    assert true.mean() < 0.07
    assert same_spectrum.mean_sparseness.mean() < 0.07
    assert other_basis.mean_sparseness.mean() > 0.2


def test_aligned_tokens_are_sparse_and_every_rotation_undoes_it() -> None:
    """Tokens along one singular pair of a head with a flat spectrum: sparse, and not by low rank."""
    r = 16
    a = torch.full((1, r), 0.01, dtype=torch.float64)
    a[0, 11] = 3
    S, rank = torch.ones(1, r, dtype=torch.float64), torch.tensor([r])
    assert float(sparseness(a * a)) < 0.08
    for control in ("basis", "spectrum"):
        low, high = rotation_control(a, a, S, rank, rotations=100, control=control).interval()
        assert 0.1 < low < high


def test_heads_of_lower_rank_rotate_within_their_channels() -> None:
    a, b, S = coefficients(6, 8, 3)
    rank = torch.tensor([8, 5, 5, 8, 1, 0])
    inside = torch.arange(8) < rank[:, None]
    made = rotation_control(a * inside, b * inside, S, rank, rotations=7)
    alone = rotation_control(a[1:2, :5], b[1:2, :5], S[1:2, :5], torch.tensor([5]), rotations=7)
    torch.testing.assert_close(made.sparseness[:, 1], alone.sparseness[:, 0])
    assert (made.sparseness[:, 4] == 1).all(), "one channel cannot be rotated"
    assert (made.n_recon[:, 5] == 0).all()
