"""Small parts of the toy lab: data, alignment, measures, frames, recovery."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from headtrace.errors import InputError
from headtrace.toy.alignment import (
    align,
    antipodal_pairs,
    channels,
    channels_in_use,
    ideal_omega,
    isotropy_error,
    recover,
)
from headtrace.toy.experiments.dynamics import settled
from headtrace.toy.experiments.sparsity import TokenPairs
from headtrace.toy.model import BatchShape, FeaturePair, Setting, UniformStream, falling_pairs, strengths
from headtrace.toy.theory import (
    FRAMES,
    FixedHead,
    deviation,
    minimise,
    minimise_expected_loss,
    orthogonal,
    unit_columns,
)

# Everything here is made of at most 12 x 12 numbers of size 1 in float64, multiplied a few times: 1e-14 or less.
ROUNDING = 100 * 12 * torch.finfo(torch.float64).eps


@pytest.mark.parametrize("probability", [1.0, 0.52, 0.05])
def test_strengths_are_bernoulli_times_uniform(probability: float) -> None:
    shape = BatchShape(context=4, n_features=40)
    stream = UniformStream(0, shape)
    drawn = torch.cat([strengths(stream.draw(), probability)[:-1].clone() for _ in range(4)]).flatten()
    present = drawn[drawn > 0].numpy()
    share = len(present) / len(drawn)
    assert abs(share - probability) < 4 * (probability * (1 - probability) / len(drawn)) ** 0.5 + 1e-6
    assert kstest(present, "uniform").pvalue > 1e-3


def test_the_extra_strength_is_one() -> None:
    drawn, probability = UniformStream(0, BatchShape(4, 20)).draw(), 0.02
    # 1 - (1 - p) is rounded at the size of 1, and divided by p.
    rounding = torch.finfo(torch.float32).eps / probability
    np.testing.assert_allclose(strengths(drawn, probability)[-1].numpy(), 1, rtol=rounding)


@pytest.mark.parametrize(
    "wrong", [{"probability": 0.0}, {"context": 1}, {"d_head": 11}, {"pairs": (FeaturePair(0, 20, 1.0),)}]
)
def test_a_setting_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError):
        Setting(**wrong)  # type: ignore[arg-type]


def test_alignment_of_a_head_built_from_its_features_is_exact() -> None:
    setting = Setting(
        pairs=(FeaturePair(3, 1, 2.0), FeaturePair(0, 2, 5.0)), n_features=6, d_model=6, d_head=4
    )
    features = orthogonal(6, torch.Generator().manual_seed(0))
    features[:, 3] *= -1
    omega_query = torch.stack([5 * features[:, 0], 2 * features[:, 3]])
    omega_key = torch.stack([features[:, 2], features[:, 1]])
    pad = torch.zeros(2, 6, dtype=torch.float64)
    aligned = align(setting, features, channels(torch.cat([omega_query, pad]), torch.cat([omega_key, pad])))
    torch.testing.assert_close(aligned.worst, torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(
        aligned.value_error, torch.zeros(2, dtype=torch.float64), atol=ROUNDING, rtol=0
    )


def test_pairs_of_opposite_features_are_found_on_the_one_channel_they_share() -> None:
    setting = Setting(
        pairs=(FeaturePair(0, 1, 3.0), FeaturePair(2, 3, 2.0), FeaturePair(4, 5, 1.0)),
        n_features=6,
        d_model=4,
        d_head=4,
    )
    features = torch.eye(4, dtype=torch.float64)[:, [0, 1, 0, 1, 2, 3]]
    features[:, [2, 3]] *= -1
    query, key = torch.zeros(4, 4, dtype=torch.float64), torch.zeros(4, 4, dtype=torch.float64)
    query[0, 0], key[0, 1], query[1, 2], key[1, 3] = 5.0, 1.0, 1.0, 1.0
    aligned = align(setting, features, channels(query, key))
    assert aligned.channel.tolist() == [0, 0, 1]
    torch.testing.assert_close(aligned.nearest, torch.ones(3, dtype=torch.float64))
    assert aligned.worst[1] < ROUNDING, "channel 1, which the second pair's rank asks for, holds the third"


def test_terms_sum_to_relative_attention_and_rotation_keeps_the_spectrum() -> None:
    generator = torch.Generator().manual_seed(1)
    query, key = (torch.randn(4, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    r, s, others = (
        torch.randn(*n, 7, generator=generator, dtype=torch.float64) for n in ((5,), (5,), (5, 3))
    )
    found = channels(query, key)
    omega = query.T @ key
    wanted = torch.einsum("pd,de,pe->p", r, omega, s - others.mean(1))
    tokens = TokenPairs(r, s, others)  # features along the axes: strengths are coordinates
    torch.testing.assert_close(tokens.terms(torch.eye(7), found).sum(1), wanted)
    turned = found.rotated(generator)
    torch.testing.assert_close(turned.left.T @ turned.left, torch.eye(4, dtype=torch.float64))
    assert not torch.allclose(turned.left, found.left)


@pytest.mark.parametrize("name", FRAMES)
def test_frames_are_tight_and_of_unit_length(name: str) -> None:
    frame = FRAMES[name](6, 12, torch.Generator().manual_seed(2))
    assert deviation(frame) < ROUNDING
    torch.testing.assert_close(frame.norm(dim=0), torch.ones(12, dtype=torch.float64))


def test_the_expected_loss_has_its_minimum_at_the_closed_form_from_any_start() -> None:
    generator = torch.Generator().manual_seed(4)
    x, y = (unit_columns(torch.randn(3, 4, generator=generator, dtype=torch.float64)) for _ in range(2))
    for _ in range(3):
        best = minimise_expected_loss(x, y, probability=0.4, scale=3.0, generator=generator)
        # The gradient is a sum over 4,096 cases, the least curvature is above 1e-4 of the largest.
        assert best.relative_error < 1e4 * 4096 * torch.finfo(torch.float64).eps
        assert max(best.sines(x[:, 0], y[:, 0])) > 0.1, "these features are far from a tight frame"


@pytest.mark.parametrize("weight", [0.0, 0.3, 10.0, 3000.0])
@pytest.mark.parametrize(("gap_a", "gap_b"), [(6.0, -4.0), (3.0, -4.0), (6.0, -9.0), (20.0, 9.0)])
def test_no_pair_of_unit_vectors_does_better_than_the_minimum_over_overlaps(
    gap_a: float, gap_b: float, weight: float
) -> None:
    head = FixedHead(first=6.0, second=4.0, gap_a=gap_a, gap_b=gap_b)
    best = minimise(head, weight)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(200_000, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    y[:, 0] = best.overlap * y[:, 1:].norm(dim=1) + 0.3 * y[:, 0]  # more of them near the minimum
    x, y = x / x.norm(dim=1, keepdim=True), y / y.norm(dim=1, keepdim=True)
    omega = torch.diag(torch.tensor([6.0, 4.0, 0.0, 0.0], dtype=torch.float64))
    first = torch.eye(4, dtype=torch.float64)[0]
    loss = torch.zeros(len(x), dtype=torch.float64)
    for query, wanted in ((first.expand_as(x), gap_a), (x, gap_b)):
        gap = ((query @ omega) * (first - y)).sum(1)
        loss += torch.nn.functional.softplus(gap) - torch.tensor(wanted, dtype=torch.float64).sigmoid() * gap
    tried = loss + weight / 2 * y[:, 0].square()
    assert tried.min() > best.objective - ROUNDING
    assert tried.min() < best.objective + 0.02, "and some come near"


def test_geometry_of_antipodal_pairs() -> None:
    basis = orthogonal(5, torch.Generator().manual_seed(0))
    assert antipodal_pairs(torch.cat([basis, -basis], dim=1)) == 5
    assert antipodal_pairs(basis) == 0
    assert isotropy_error(basis) < ROUNDING
    assert isotropy_error(torch.cat([basis, basis[:, :1]], dim=1)) > 0.5


def test_recovery_reads_the_pairs_off_a_clean_head() -> None:
    setting = Setting(pairs=falling_pairs(3, 9.0), n_features=12, d_model=8, d_head=8)
    frame = orthogonal(8, torch.Generator().manual_seed(3))
    features = torch.cat(
        [
            frame,
            -frame[:, 6:],
            frame[:, 6:] * 0.5,
        ],
        dim=1,
    )
    found = recover(ideal_omega(features, setting.target()), features)
    assert found.share_of({(0, 3), (1, 4), (2, 5)}) == 1
    assert found.precision({(0, 3), (1, 4), (2, 5)}) == 1
    assert min(found.margin) > 0.99


def test_channels_in_use_stop_at_the_steepest_fall() -> None:
    assert channels_in_use(torch.tensor([9.0, 8.0, 7.0, 1e-9, 1e-12])) == 3


def test_settled_needs_the_condition_to_hold_to_the_end() -> None:
    assert settled(np.array([True, False, True]), (0, 5, 10)) == 10
    assert settled(np.array([True, True]), (0, 5)) == 0
    assert settled(np.array([True, False]), (0, 5)) is None
