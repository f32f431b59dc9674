"""The loss of the toy model and its gradient, for a stack of models at once.

Tokens meet the weights only through two small matrices: G = W^T W reconstructs (ReLU(G f + b)) and
A = W^T W_Q^T W_K W attends (f_r A f_s). So the large products are with G and A, the gradient with respect to
them is two more products, and the rest of the chain rule happens on matrices of a few hundred numbers.

Models that read the same tokens and have the same teacher form a set. Their strengths and target attention
are computed once, and their products with the strengths are one product of the stacked matrices.

Every token has one more strength, which is always 1: it carries the bias through the same products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headtrace.toy.model import BatchShape, Setting, Weights


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
