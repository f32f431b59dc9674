"""Train many toy models at once: every setting with every seed, as one batched computation.

>>> trained = train([Setting(), Setting(probability=0.1)], seeds=range(3), steps=20, snapshots=[0])
>>> trained.of(setting=0, seed=2).omega.shape                         # before the first step and after the last
torch.Size([2, 10, 10])

Models of one shape (features, model dimension, context) form a group, and a group takes each step together; head
dimensions, probabilities, loss weights and targets may differ inside it. Models of a group that read the same tokens
and have the same teacher form a set. Their strengths and target attention are computed once, and their products with
the strengths are one product of the stacked matrices.

The gradient is written out. Tokens meet the weights only through two small matrices: G = W^T W reconstructs
(ReLU(G f + b)) and A = W^T W_Q^T W_K W attends (f_r A f_s). So the large products are with G and A, the gradient with
respect to them is two more products, and the rest of the chain rule happens on matrices of a few hundred numbers. Every
token has one more strength, which is always 1: it carries the bias through the same products.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import cos, pi

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headtrace.errors import InputError
from headtrace.progress import Progress, part_of
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


@dataclass(frozen=True)
class Losses:
    """Means over tokens and queries. `attention` is a cross-entropy, so `floor` is the least it can be."""

    reconstruction: Float[Tensor, " models"]
    attention: Float[Tensor, " models"]
    floor: Float[Tensor, " sets"]


class Room:
    """Memory for the strengths of a step and for what is computed from them, kept from step to step and
    shared by all parts of a group: fresh memory costs more than the arithmetic done in it."""

    def __init__(self, sets: int, models: int, shape: BatchShape) -> None:
        self.shape = shape
        self.strengths, self.by_token = (torch.ones(sets * shape.strengths * shape.tokens) for _ in range(2))
        numbers = models * shape.n_features * shape.tokens
        self.restored, self.error, self.weighted = (torch.empty(numbers) for _ in range(3))


@dataclass(frozen=True)
class Batch:
    """The strengths of one step, for `sets` sets of equally many models."""

    strengths: Float[Tensor, "sets strengths tokens"]
    by_token: Float[Tensor, "sets tokens strengths"]
    """A copy the other way round: products that sum over tokens are several times faster with it."""
    restored: Float[Tensor, "sets rows tokens"]
    error: Float[Tensor, "sets rows tokens"]
    weighted: Float[Tensor, "sets members features context queries"]
    shape: BatchShape

    @classmethod
    def within(cls, room: Room, sets: int, members: int) -> Batch:
        """A batch in the first part of the room."""
        shape = room.shape
        tokens = (sets, members * shape.n_features, shape.tokens)
        keys = (sets, members, shape.n_features, shape.context, shape.queries)
        return cls(
            _view(room.strengths, (sets, shape.strengths, shape.tokens)),
            _view(room.by_token, (sets, shape.tokens, shape.strengths)),
            _view(room.restored, tokens),
            _view(room.error, tokens),
            _view(room.weighted, keys),
            shape,
        )

    @classmethod
    def empty(cls, sets: int, members: int, shape: BatchShape) -> Batch:
        """A batch with memory of its own."""
        return cls.within(Room(sets, sets * members, shape), sets, members)

    @property
    def members(self) -> int:
        """Models of a set."""
        return self.weighted.shape[1]

    @property
    def features(self) -> Float[Tensor, "sets features tokens"]:
        """The strengths without the row of ones."""
        return self.strengths[:, :-1]

    @property
    def queries(self) -> Float[Tensor, "sets features queries"]:
        """Strengths of the tokens that are queries."""
        return self.features[..., : self.shape.queries]

    @property
    def keys(self) -> Float[Tensor, "sets features context queries"]:
        """Strengths of the tokens that are keys, by their place in the context."""
        return self.features[..., self.shape.queries :].unflatten(2, (self.shape.context, -1))

    def scores(
        self, attention: Float[Tensor, "models features features"]
    ) -> Float[Tensor, "sets members context queries"]:
        """f_r A f_s for each query and each of its keys, given A^T."""
        sought = torch.bmm(self.stacked(attention), self.queries).unflatten(1, (self.members, -1))
        return torch.mul(self.keys.unsqueeze(1), sought.unsqueeze(3), out=self.weighted).sum(2)

    def stacked(self, matrices: Float[Tensor, "models rows columns"]) -> Float[Tensor, "sets more columns"]:
        """The matrices of each set's models under each other, ready to meet the set's strengths."""
        return matrices.reshape(len(self.strengths), -1, matrices.shape[2])


def _view(memory: Tensor, shape: tuple[int, ...]) -> Tensor:
    return memory[: torch.Size(shape).numel()].view(shape)


@dataclass(frozen=True)
class Teacher:
    """The pairs of each set and their target logits; sets with fewer pairs are filled up with logits of 0."""

    query: Int[Tensor, "sets pairs"]
    key: Int[Tensor, "sets pairs"]
    logit: Float[Tensor, "sets pairs 1"]

    @classmethod
    def of(cls, settings: Sequence[Setting]) -> Teacher:
        """The teacher of each set, from the setting of one of its models."""
        most = max(len(setting.pairs) for setting in settings)
        pairs = [[*setting.pairs, *[(0, 0, 0.0)] * (most - len(setting.pairs))] for setting in settings]
        query, key, logit = (
            torch.tensor([[pair[place] for pair in of_set] for of_set in pairs]).view(len(pairs), most)
            for place in range(3)
        )
        return cls(query.long(), key.long(), logit.to(torch.get_default_dtype()).unsqueeze(2))

    def part(self, sets: slice) -> Teacher:
        """The teacher of some of the sets."""
        return Teacher(self.query[sets], self.key[sets], self.logit[sets])

    def scores(self, batch: Batch) -> Float[Tensor, "sets context queries"]:
        """The target logit of each query and each of its keys."""
        sets = torch.arange(len(self.query)).unsqueeze(1)
        sought = batch.queries[sets, self.query] * self.logit
        return (batch.keys[sets, self.key] * sought.unsqueeze(2)).sum(1)


@dataclass(frozen=True)
class _Products:
    restore: Float[Tensor, "models features strengths"]
    sought: Float[Tensor, "models d_head features"]
    offered: Float[Tensor, "models d_head features"]
    attention: Float[Tensor, "models features features"]

    @classmethod
    def of(cls, weights: Weights) -> _Products:
        """G with the bias as last column, W_Q W, W_K W, and A^T, from one product of all vectors with W."""
        vectors, n = weights.vectors, weights.n_features
        inner = torch.bmm(vectors, vectors[:, :n].transpose(1, 2))
        sought, offered = inner[:, n : n + weights.d_head], inner[:, n + weights.d_head :]
        restore = torch.cat([inner[:, :n], weights.bias.unsqueeze(2)], 2)
        return cls(restore, sought, offered, torch.bmm(offered.transpose(1, 2), sought))


def losses(weights: Weights, batch: Batch, teacher: Teacher) -> Losses:
    """Squared error summed over features and averaged over tokens; cross-entropy averaged over queries."""
    products = _Products.of(weights)
    restored = torch.bmm(batch.stacked(products.restore), batch.strengths, out=batch.restored).clamp_(min=0)
    error = restored.unflatten(1, (batch.members, -1)) - batch.features.unsqueeze(1)
    log_head = batch.scores(products.attention).log_softmax(2)
    log_wanted = teacher.scores(batch).log_softmax(1)
    wanted = log_wanted.exp()
    return Losses(
        reconstruction=error.square().sum(2).mean(2).flatten(),
        attention=-(wanted.unsqueeze(1) * log_head).sum(2).mean(2).flatten(),
        floor=-(wanted * log_wanted).sum(1).mean(1),
    )


def write_gradient(
    gradient: Weights,
    weights: Weights,
    batch: Batch,
    teacher: Teacher,
    attention_weight: Float[Tensor, "models 1 1"],
) -> None:
    """Write d(reconstruction + lambda attention)/d(weights) into `gradient`."""
    n, end, models = weights.n_features, weights.n_features + weights.d_head, len(weights.flat)
    products, members, shape = _Products.of(weights), batch.members, batch.shape
    restored = torch.bmm(batch.stacked(products.restore), batch.strengths, out=batch.restored)
    each = (members, n)
    by_token = batch.by_token.copy_(batch.strengths.transpose(1, 2))
    torch.sub(restored.unflatten(1, each), batch.features.unsqueeze(1), out=batch.error.unflatten(1, each))
    # Where the ReLU lets nothing through, nothing comes back.
    torch.ops.aten.threshold_backward(batch.error, restored, 0, grad_input=batch.error)
    to_restore = torch.bmm(batch.error, by_token).mul_(2 / shape.tokens)
    to_restore = to_restore.view(models, n, n + 1)

    miss = batch.scores(products.attention).softmax(2).sub_(teacher.scores(batch).softmax(1).unsqueeze(1))
    miss.mul_((attention_weight / shape.queries).view(-1, members, 1, 1))
    found = torch.mul(batch.keys.unsqueeze(1), miss.unsqueeze(2), out=batch.weighted).sum(3)
    to_attention = torch.bmm(found.flatten(1, 2), by_token[:, : shape.queries, :n]).view(models, n, n)

    # The inner products of all vectors have this gradient; the vectors have its symmetric double.
    inner = torch.zeros(models, end + weights.d_head, end + weights.d_head)
    inner[:, :n, :n] = to_restore[..., :n]
    inner[:, n:end, :n] = torch.bmm(products.offered, to_attention)
    inner[:, end:, :n] = torch.bmm(products.sought, to_attention.transpose(1, 2))
    gradient.vectors.copy_(torch.bmm(inner + inner.transpose(1, 2), weights.vectors))
    gradient.bias.copy_(to_restore[..., n])
