"""The ensemble's own gradient and optimiser are those of the plain model under PyTorch's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from headtrace.toy.data import BatchShape, UniformStream, strengths
from headtrace.toy.gradient import Batch, Teacher, losses, write_gradient
from headtrace.toy.reference import PlainToyModel, train_one
from headtrace.toy.setting import FOUR_PAIRS, Pair, Setting
from headtrace.toy.train import train
from headtrace.toy.weights import Weights

SETTINGS = [
    Setting(),
    Setting(pairs=(Pair(2, 2, 5.0),), d_head=4, attention_weight=0.7, probability=0.1),
    Setting(pairs=(), attention_weight=0.0, probability=1.0),
]


@pytest.fixture
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def _batch(setting: Setting, shape: BatchShape, seed: int, into: torch.Tensor) -> torch.Tensor:
    into.copy_(strengths(UniformStream(seed, shape).draw(), setting.probability))
    into[-1] = 1
    return into[:-1].T


@pytest.mark.usefixtures("double")
def test_gradient_of_a_mixed_stack_equals_autograd_of_each_model() -> None:
    """Three sets, and in each two models that share their tokens and teacher."""
    shape = BatchShape(context=4, n_features=20, keys=64)
    models = [one for s in SETTINGS for one in (s, replace(s, d_head=7, attention_weight=2.0))]
    weights = Weights.initial(models, range(len(models)))
    weights.bias.normal_()
    gradient = weights.with_flat(torch.zeros_like(weights.flat))
    weight = torch.tensor([s.attention_weight for s in models]).view(-1, 1, 1)
    batch, teacher = Batch.empty(len(SETTINGS), 2, shape), Teacher.of(SETTINGS)
    drawn = [_batch(s, shape, seed, batch.strengths[seed]) for seed, s in enumerate(SETTINGS)]
    write_gradient(gradient, weights, batch, teacher, weight)
    lost = losses(weights, batch, teacher)
    for index, setting in enumerate(models):
        plain, tokens = PlainToyModel(setting, index), drawn[index // 2]
        plain.bias.data.copy_(weights.bias[index])
        loss = plain(tokens[: shape.queries], tokens[shape.queries :].unflatten(0, (4, -1)))
        loss.backward()
        total = lost.reconstruction[index] + setting.attention_weight * lost.attention[index]
        torch.testing.assert_close(total, loss.detach(), rtol=1e-12, atol=0)
        pairs = [
            (gradient.features[index], plain.features.grad),
            (gradient.bias[index], plain.bias.grad),
            (gradient.query[index, : setting.d_head], plain.query.grad),
            (gradient.key[index, : setting.d_head], plain.key.grad),
        ]
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-13)
        assert (gradient.query[index, setting.d_head :] == 0).all()


def test_training_follows_torch_adamw_with_cosine_decay() -> None:
    setting, steps = Setting(d_head=6), 60
    plain = train_one(setting, 3, steps)
    ours = train([setting], [3], steps).of(0, 3)
    # Single precision, sixty steps of 1e-3: rounding may move a weight by far less than one step.
    for mine, theirs in (
        (ours.features[-1], plain.features),
        (ours.query[-1], plain.query),
        (ours.bias[-1], plain.bias),
    ):
        torch.testing.assert_close(mine, theirs.detach(), rtol=0, atol=2e-5)
    moved = (plain.features.detach() - PlainToyModel(setting, 3).features.detach()).abs().max()
    assert moved > 1e-2


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
                getattr(together.of(index, 6), name), getattr(alone, name), rtol=0, atol=1e-5
            )


def test_training_is_reproducible_from_its_seed_to_the_last_bit() -> None:
    once, again = (train([Setting()], [1], 40, snapshots=[0, 20]).of(0, 1) for _ in range(2))
    other = train([Setting()], [2], 40).of(0, 2)
    assert torch.equal(once.features, again.features)
    assert torch.equal(once.omega, again.omega)
    assert torch.equal(once.attention_loss, again.attention_loss)
    assert not torch.equal(once.features[-1], other.features[-1])


def test_snapshots_hold_the_first_weights_and_the_last() -> None:
    model = train([Setting()], [0], 25, snapshots=[0, 10]).of(0, 0)
    assert model.snapshot_steps == (0, 10, 25)
    torch.testing.assert_close(
        model.features[0], PlainToyModel(Setting(), 0).features.detach(), rtol=0, atol=0
    )
    assert (model.attention_loss >= model.attention_floor).all()
    assert model.reconstruction_loss[-1] < model.reconstruction_loss[0]
