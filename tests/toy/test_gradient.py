"""The ensemble's own gradient and optimiser are those of the plain model under PyTorch's.

Two ways of summing the same numbers are compared in double precision: there rounding stays rounding. In single
precision Adam would not let it: a gradient that is nearly zero counts as much as any other, and its sign is decided
by the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from benchmarks.toy_reference import PlainToyModel, train_one

from headtrace.toy.model import (
    FOUR_PAIRS,
    BatchShape,
    FeaturePair,
    Setting,
    UniformStream,
    Weights,
    strengths,
)
from headtrace.toy.train import LEARNING_RATE, Batch, Teacher, losses, train, write_gradient

SETTINGS = [
    Setting(),
    Setting(pairs=(FeaturePair(2, 2, 5.0),), d_head=4, attention_weight=0.7, probability=0.1),
    Setting(pairs=(), attention_weight=0.0, probability=1.0),
]
SHAPE = BatchShape(context=4, n_features=20, keys=64)
# A number of a gradient is a sum over all features of all tokens, of terms no larger than the largest gradient
# times what the sum of the others is; four matrices are multiplied on the way, two sides are compared.
ROUNDING = 2 * 4 * SHAPE.tokens * SHAPE.n_features * torch.finfo(torch.float64).eps


@pytest.fixture
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def _batch(setting: Setting, seed: int, into: torch.Tensor) -> torch.Tensor:
    into.copy_(strengths(UniformStream(seed, SHAPE).draw(), setting.probability))
    into[-1] = 1
    return into[:-1].T


@pytest.mark.usefixtures("double")
def test_gradient_of_a_mixed_stack_equals_autograd_of_each_model() -> None:
    """Three sets, and in each two models that share their tokens and teacher."""
    models = [one for s in SETTINGS for one in (s, replace(s, d_head=7, attention_weight=2.0))]
    weights = Weights.initial(models, range(len(models)))
    weights.bias.normal_(generator=torch.Generator().manual_seed(0))
    gradient = weights.with_flat(torch.zeros_like(weights.flat))
    weight = torch.tensor([s.attention_weight for s in models]).view(-1, 1, 1)
    batch, teacher = Batch.empty(len(SETTINGS), 2, SHAPE), Teacher.of(SETTINGS)
    drawn = [_batch(s, seed, batch.strengths[seed]) for seed, s in enumerate(SETTINGS)]
    write_gradient(gradient, weights, batch, teacher, weight)
    lost = losses(weights, batch, teacher)
    for index, setting in enumerate(models):
        plain, tokens = PlainToyModel(setting, index), drawn[index // 2]
        plain.bias.data.copy_(weights.bias[index])
        loss = plain(tokens[: SHAPE.queries], tokens[SHAPE.queries :].unflatten(0, (4, -1)))
        loss.backward()
        total = lost.reconstruction[index] + setting.attention_weight * lost.attention[index]
        torch.testing.assert_close(total, loss.detach(), rtol=ROUNDING, atol=0)
        pairs = [
            (gradient.features[index], plain.features.grad),
            (gradient.bias[index], plain.bias.grad),
            (gradient.query[index, : setting.d_head], plain.query.grad),
            (gradient.key[index, : setting.d_head], plain.key.grad),
        ]
        for ours, theirs in pairs:
            assert theirs is not None
            # A head that nobody asks for anything has a gradient of zero, up to the rounding of softmax.
            size = max(1.0, float(theirs.abs().max()))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=ROUNDING * size)
        assert (gradient.query[index, setting.d_head :] == 0).all(), "padding stays zero"


@pytest.mark.usefixtures("double")
def test_training_follows_torch_adamw_with_cosine_decay() -> None:
    setting, steps = Setting(d_head=6), 60
    plain, first = train_one(setting, 3, steps), PlainToyModel(setting, 3)
    ours = train([setting], [3], steps).of(0, 3)
    for mine, theirs, before in (
        (ours.features[-1], plain.features, first.features),
        (ours.query[-1], plain.query, first.query),
        (ours.key[-1], plain.key, first.key),
        (ours.bias[-1], plain.bias, first.bias),
    ):
        # The first step moves a weight by the learning rate, rounding by 1e-16 of it and of what it grew to:
        # a millionth of one step is far above that, and far below any other optimiser.
        torch.testing.assert_close(mine, theirs.detach(), rtol=0, atol=1e-6 * LEARNING_RATE)
        assert (theirs - before).abs().max() > 10 * LEARNING_RATE


@pytest.mark.usefixtures("double")
def test_a_model_is_the_same_alone_and_in_company() -> None:
    company = [
        Setting(),
        Setting(d_head=4),
        Setting(probability=0.1),
        Setting(n_features=10, pairs=FOUR_PAIRS),
    ]
    together = train(company, [5, 6], 30)
    for index, setting in enumerate(company):
        alone = train([setting], [6], 30).of(0, 6)
        for name in ("features", "query", "key", "bias"):
            torch.testing.assert_close(
                getattr(together.of(index, 6), name), getattr(alone, name), rtol=0, atol=1e-6 * LEARNING_RATE
            )


def test_everything_about_a_training_comes_from_its_seed() -> None:
    once = train([Setting()], [1], 40, snapshots=[0, 20]).of(0, 1)
    torch.manual_seed(1234)
    again = train([Setting()], [1], 40, snapshots=[0, 20]).of(0, 1)
    other = train([Setting()], [2], 40).of(0, 2)
    # The same operations in the same order: at most the first digits that rounding reaches in forty steps.
    for name in ("features", "omega", "attention_loss"):
        torch.testing.assert_close(getattr(once, name), getattr(again, name), rtol=1e-3, atol=1e-3)
    assert (once.features[-1] - other.features[-1]).abs().max() > 0.1


def test_snapshots_hold_the_first_weights_and_the_last() -> None:
    model = train([Setting()], [0], 25, snapshots=[0, 10]).of(0, 0)
    assert model.snapshot_steps == (0, 10, 25)
    assert torch.equal(model.features[0], PlainToyModel(Setting(), 0).features.detach()), (
        "copied, not computed"
    )
    assert (model.features[-1] - model.features[0]).abs().max() > 5 * LEARNING_RATE
    assert (model.attention_loss > model.attention_floor + 0.1).all(), "twenty-five steps do not teach a head"
    assert model.reconstruction_loss[-1] < 0.95 * model.reconstruction_loss[0]


def test_progress_counts_the_steps_of_all_models() -> None:
    told: list[tuple[int, int]] = []
    train([Setting(), Setting(context=2)], [0, 1], 25, progress=lambda *done: told.append(done))
    assert told == [(40, 100), (50, 100), (90, 100), (100, 100)]
