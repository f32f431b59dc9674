"""Train many toy models at once: every setting with every seed, as one batched computation.

>>> trained = train([Setting(), Setting(probability=0.1)], seeds=range(3), steps=20, snapshots=[0])
>>> trained.of(setting=0, seed=2).omega.shape                         # before the first step and after the last
torch.Size([2, 10, 10])

Models of one shape (features, model dimension, context) form a group, and a group takes each step together;
head dimensions, probabilities, loss weights and targets may differ inside it. Models of a group that read the
same tokens and have the same teacher form a set, and a set shares all that does not depend on weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import cos, pi

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.errors import InputError
from headtrace.progress import Progress, part_of
from headtrace.toy.gradient import Batch, Room, Teacher, losses, write_gradient
from headtrace.toy.model import BatchShape, Setting, UniformStream, Weights, strengths

LEARNING_RATE = 1e-3
BETAS = (0.9, 0.999)
EPSILON = 1e-8
WEIGHT_DECAY = 0.01

# Steps are cheaper the more models share them, until memory no longer holds what they compute.
NUMBERS_AT_ONCE = 2_000_000
EVALUATION_KEYS = 8192


@dataclass(frozen=True)
class ToyModel:
    """One trained toy model and what it was at each snapshot."""

    setting: Setting
    seed: int
    snapshot_steps: tuple[int, ...]
    features: Float[Tensor, "snapshots d_model features"]
    bias: Float[Tensor, "snapshots features"]
    query: Float[Tensor, "snapshots d_head d_model"]
    key: Float[Tensor, "snapshots d_head d_model"]
    reconstruction_loss: Float[Tensor, " snapshots"]
    attention_loss: Float[Tensor, " snapshots"]
    attention_floor: Float[Tensor, " snapshots"]

    @property
    def omega(self) -> Float[Tensor, "snapshots d_model d_model"]:
        """The head's bilinear form W_Q^T W_K at each snapshot; the last one is the trained head."""
        return self.query.transpose(1, 2) @ self.key


@dataclass(frozen=True)
class Trained:
    """All models of a training run, setting by setting and seed by seed."""

    settings: tuple[Setting, ...]
    seeds: tuple[int, ...]
    models: tuple[ToyModel, ...]

    def of(self, setting: int, seed: int) -> ToyModel:
        """The model of the setting with this index and this seed."""
        return self.models[setting * len(self.seeds) + self.seeds.index(seed)]


def train(
    settings: Sequence[Setting],
    seeds: Iterable[int],
    steps: int,
    snapshots: Sequence[int] = (),
    progress: Progress | None = None,
) -> Trained:
    """Train every setting with every seed. Snapshots are taken before the given steps, and after the last.

    ``progress`` counts steps, added up over all models.
    """
    seeds = tuple(seeds)
    if steps < 1 or not settings or not seeds:
        raise InputError(
            f"{len(settings)} settings, {len(seeds)} seeds, {steps} steps; all must be at least 1."
        )
    taken = tuple(sorted({step for step in snapshots if 0 <= step < steps} | {steps}))
    runs = [(setting, seed) for setting in settings for seed in seeds]
    groups: dict[tuple[int, int, int], list[int]] = {}
    for index, (setting, _) in enumerate(runs):
        groups.setdefault((setting.n_features, setting.d_model, setting.context), []).append(index)
    models: dict[int, ToyModel] = {}
    with torch.no_grad():
        for members in groups.values():
            group = Group([runs[i][0] for i in members], [runs[i][1] for i in members], steps)
            reported = part_of(progress, len(models) * steps, len(runs) * steps)
            models.update(zip(members, group.run(taken, reported), strict=True))
    return Trained(tuple(settings), seeds, tuple(models[i] for i in range(len(runs))))


@dataclass(frozen=True)
class _Part:
    """Neighbouring sets of equally many models, few enough for one pass."""

    sets: slice
    models: slice
    batch: Batch


class Group:
    """Models of one shape that take every step together."""

    def __init__(self, settings: Sequence[Setting], seeds: Sequence[int], steps: int) -> None:
        self.steps = steps
        self.shape = BatchShape(settings[0].context, settings[0].n_features)
        most = max(1, NUMBERS_AT_ONCE // (self.shape.tokens * self.shape.strengths))
        sets = _sets(settings, seeds, most)
        self.order = [model for members in sets for model in members]
        self.settings, self.seeds = [settings[i] for i in self.order], [seeds[i] for i in self.order]
        self.weights = Weights.initial(self.settings, self.seeds)
        flat = self.weights.flat
        self.gradient = self.weights.with_flat(torch.zeros_like(flat))
        self.momentum, self.variance = torch.zeros_like(flat), torch.zeros_like(flat)
        self.attention_weight = torch.tensor([s.attention_weight for s in self.settings]).view(-1, 1, 1)
        self.sets = [(seeds[members[0]], settings[members[0]]) for members in sets]
        self.teacher = Teacher.of([setting for _, setting in self.sets])
        self.parts = self._parts([len(members) for members in sets], min(most, len(settings)))
        self.streams = {seed: UniformStream(seed, self.shape) for seed in seeds}

    def _parts(self, sizes: list[int], most: int) -> list[_Part]:
        """Sets of one size side by side, at most `most` models to a part."""
        room = Room(most, most, self.shape)
        parts: list[_Part] = []
        first_set = first_model = 0
        for size, alike in groupby(sizes):
            left = len(list(alike))
            while left:
                count = min(left, most // size)
                sets = slice(first_set, first_set + count)
                models = slice(first_model, first_model + count * size)
                parts.append(_Part(sets, models, Batch.within(room, count, size)))
                first_set, first_model, left = sets.stop, models.stop, left - count
        return parts

    def run(self, snapshots: tuple[int, ...], progress: Progress | None) -> list[ToyModel]:
        """Train all steps, and give each model with its snapshots."""
        taken: list[tuple[Tensor, Tensor]] = []
        for step in range(self.steps):
            if step in snapshots:
                taken.append(self._snapshot())
            self.step(step)
            if progress is not None and ((step + 1) % 20 == 0 or step + 1 == self.steps):
                progress((step + 1) * len(self.seeds), self.steps * len(self.seeds))
        taken.append(self._snapshot())
        return self._models(snapshots, taken)

    def step(self, step: int) -> None:
        """One step of every model of the group."""
        uniform = {seed: stream.draw() for seed, stream in self.streams.items()}
        for part in self.parts:
            for room, (seed, setting) in zip(part.batch.strengths, self.sets[part.sets], strict=True):
                strengths(uniform[seed], setting.probability, out=room)
            write_gradient(
                self.gradient.with_flat(self.gradient.flat[part.models]),
                self.weights.with_flat(self.weights.flat[part.models]),
                part.batch,
                self.teacher.part(part.sets),
                self.attention_weight[part.models],
            )
        self._adamw(step)

    def _adamw(self, step: int) -> None:
        """AdamW as PyTorch defines it, with the learning rate on a cosine from its start to zero."""
        rate = LEARNING_RATE * (1 + cos(pi * step / self.steps)) / 2
        flat, gradient = self.weights.flat, self.gradient.flat
        flat.mul_(1 - rate * WEIGHT_DECAY)
        self.momentum.lerp_(gradient, 1 - BETAS[0])
        self.variance.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        scale = self.variance.sqrt().div_((1 - BETAS[1] ** (step + 1)) ** 0.5).add_(EPSILON)
        flat.addcdiv_(self.momentum, scale, value=-rate / (1 - BETAS[0] ** (step + 1)))

    def _snapshot(self) -> tuple[Tensor, Tensor]:
        """The weights, and their losses on a held-out batch that stays the same during the whole training."""
        shape = BatchShape(self.shape.context, self.shape.n_features, EVALUATION_KEYS)
        drawn = {s: UniformStream(s, shape, evaluation=True).draw() for s in self.streams}
        batch = Batch.empty(1, 1, shape)
        rows: list[Tensor] = []
        for index, (setting, seed) in enumerate(zip(self.settings, self.seeds, strict=True)):
            strengths(drawn[seed], setting.probability, out=batch.strengths[0])
            one = self.weights.with_flat(self.weights.flat[index : index + 1])
            lost = losses(one, batch, Teacher.of([setting]))
            rows.append(torch.cat([lost.reconstruction, lost.attention, lost.floor]))
        return self.weights.flat.clone(), torch.stack(rows)

    def _models(self, steps: tuple[int, ...], taken: list[tuple[Tensor, Tensor]]) -> list[ToyModel]:
        lost = torch.stack([row for _, row in taken])
        stacked = [self.weights.with_flat(flat) for flat, _ in taken]
        models = [
            ToyModel(
                setting=setting,
                seed=seed,
                snapshot_steps=steps,
                features=torch.stack([weights.features[index] for weights in stacked]),
                bias=torch.stack([weights.bias[index] for weights in stacked]),
                query=torch.stack([weights.query[index, : setting.d_head] for weights in stacked]),
                key=torch.stack([weights.key[index, : setting.d_head] for weights in stacked]),
                reconstruction_loss=lost[:, index, 0],
                attention_loss=lost[:, index, 1],
                attention_floor=lost[:, index, 2],
            )
            for index, (setting, seed) in enumerate(zip(self.settings, self.seeds, strict=True))
        ]
        return [model for _, model in sorted(zip(self.order, models, strict=True), key=lambda pair: pair[0])]


def _sets(settings: Sequence[Setting], seeds: Sequence[int], most: int) -> list[list[int]]:
    """Which models share tokens and teacher, at most `most` to a set, sets of one size next to each other."""
    sharing: dict[object, list[int]] = {}
    for index, (setting, seed) in enumerate(zip(settings, seeds, strict=True)):
        sharing.setdefault((seed, setting.probability, setting.pairs), []).append(index)
    sets = [members[i : i + most] for members in sharing.values() for i in range(0, len(members), most)]
    return sorted(sets, key=len)
