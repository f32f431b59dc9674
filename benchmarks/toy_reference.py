"""The toy model written out plainly, one model at a time, with PyTorch's own gradients and optimiser.

The ensemble of `headtrace.toy.train` must do the same arithmetic; tests hold the two side by side, and the
benchmark times them against each other.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headtrace.toy.model import BatchShape, Setting, UniformStream, Weights, strengths
from headtrace.toy.train import BETAS, EPSILON, LEARNING_RATE, WEIGHT_DECAY


class PlainToyModel(nn.Module):
    """An autoencoder with an attention head."""

    target: Tensor

    def __init__(self, setting: Setting, seed: int) -> None:
        super().__init__()
        first = Weights.initial([setting], [seed])
        self.setting = setting
        self.features = nn.Parameter(first.features[0].clone())
        self.bias = nn.Parameter(first.bias[0].clone())
        self.query = nn.Parameter(first.query[0].clone())
        self.key = nn.Parameter(first.key[0].clone())
        self.register_buffer("target", setting.target())

    def forward(
        self, queries: Float[Tensor, "queries features"], keys: Float[Tensor, "context queries features"]
    ) -> Tensor:
        """The loss: reconstruction of all tokens plus lambda times the cross-entropy of attention."""
        tokens = torch.cat([queries[None], keys]) @ self.features.T
        restored = torch.relu(tokens @ self.features + self.bias)
        error = (restored - torch.cat([queries[None], keys])).square().sum(-1).mean()
        logits = ((tokens[0] @ self.query.T) * (tokens[1:] @ self.key.T)).sum(-1)
        wanted = ((queries @ self.target) * keys).sum(-1).softmax(0)
        attention = -(wanted * logits.log_softmax(0)).sum(0).mean()
        return error + self.setting.attention_weight * attention


def train_one(setting: Setting, seed: int, steps: int, schedule: int | None = None) -> PlainToyModel:
    """Train one model for `steps` of a cosine schedule of `schedule` steps (by default, all of it)."""
    model = PlainToyModel(setting, seed)
    shape = BatchShape(setting.context, setting.n_features)
    stream = UniformStream(seed, shape)
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY
    )
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, schedule or steps)
    for _ in range(steps):
        drawn = strengths(stream.draw(), setting.probability)[:-1].T
        optimiser.zero_grad()
        loss = model(drawn[: shape.queries], drawn[shape.queries :].unflatten(0, (setting.context, -1)))
        loss.backward()
        optimiser.step()
        cosine.step()
    return model
