"""Roots: what is being explained, and which components it starts from.

``linear`` takes the logit of an answer (less that of a wrong one), ``probability`` the log-likelihood of one
or more answers, ``direction`` any vector at any layer and position (a probe). Norms are frozen, so every
component has an exact share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headtrace.errors import IdentityError, InputError
from headtrace.models.identities import tolerance_for
from headtrace.tracing.attribution import IG_STEPS, path_weights
from headtrace.tracing.upstream import Catalogue
from headtrace.vocabulary import Component, head_name, parse_head

if TYPE_CHECKING:
    from headtrace.models import Recording

DROP = 0.8
"""A probability root keeps the components whose removal takes J this share of the way down to the bias-only value."""

RootKind = Literal["linear", "probability", "direction"]


@dataclass(frozen=True)
class Seed:
    """A component that the root rests on; the weight is its contribution in logits, or its attribution in nats."""

    component: Component
    weight: float


@dataclass(frozen=True)
class RootSeeds:
    """The root of one prompt: its value, where it is read, and the components that it rests on."""

    kind: RootKind
    value: float
    position: int
    layer: int
    seeds: tuple[Seed, ...]
    reason: str | None = None
    """Why there are no seeds, if there are none."""
    support: tuple[int, ...] | None = None
    label: str | None = None
    """What the root is, where neither answers nor a direction say it."""


@dataclass(frozen=True)
class Shares:
    """Components of one prompt's residual at one position, before one layer's attention (or the final norm)."""

    recording: Recording
    prompt: int
    position: int
    layer: int

    @property
    def catalogue(self) -> Catalogue:
        return Catalogue(self.layer, self.recording.model.n_heads, self.position + 1)

    def onto(self, direction: Float[Tensor, " d_model"]) -> Float[Tensor, " component"]:
        """Every component's write along a direction. The offset's place holds zero: it writes nothing."""
        rec, l, b, t = self.recording, self.layer, self.prompt, self.position
        weights = rec.model.weights
        plain = torch.cat((rec.embedding[None, b, t], rec.mlp_writes[:l, b, t])) @ direction
        bias, read = weights.attention_bias[:l] @ direction, weights.W_O[:l] @ direction
        values = (rec.values[:l, b, :, : t + 1] - weights.b_V[:l, :, None]).repeat_interleave(
            weights.group, dim=1
        )
        heads = (values @ read[..., None])[..., 0] * rec.patterns[:l, b, :, t, : t + 1]
        if rec.post_norm_scales is not None:
            post = rec.post_norm_scales[:l, b, t]
            bias, heads = bias / post, heads / post[:, None, None]
        return torch.cat((plain, bias, bias.new_zeros(1), heads.flatten()))

    def writes(self, numbers: Int[Tensor, " n"]) -> Float[Tensor, "n d_model"]:
        """The write vectors of a few components, by number."""
        components = (self.catalogue.component(number) for number in numbers.tolist())
        return torch.stack([self.recording.write(c, self.prompt)[self.position] for c in components])

    def require(self, total: float, recorded: float, size: float) -> None:
        """The shares of the root must sum to what the model put out."""
        error, allowed = abs(total - recorded) / max(size, 1e-30), tolerance_for(self.recording.model.dtype)
        if not error <= allowed:
            raise IdentityError(
                f"The shares at layer {self.layer}, position {self.position} (prompt {self.prompt}) sum to "
                f"{total:.6g}, the model has {recorded:.6g}: relative error {error:.1e}, allowed {allowed:.0e}."
            )


def _reader(recording: Recording, vector: Float[Tensor, " d_model"], scale: float | Tensor) -> Tensor:
    """A direction after the final norm as a direction before it, with the norm's scale frozen."""
    direction = vector * recording.model.weights.final_gain / scale
    if recording.model.architecture.norm == "layer":
        direction = direction - direction.mean()
    return direction


def _final(recording: Recording, prompt: int) -> Shares:
    return Shares(recording, prompt, recording.lengths[prompt] - 1, recording.model.n_layers)


@torch.inference_mode()
def linear_root(recording: Recording, prompt: int, answer: list[int], wrong: list[int] | None) -> RootSeeds:
    """Shares of the answer's logit (mean over several) less the wrong one's, or centred over the vocabulary."""
    weights, shares = recording.model.weights, _final(recording, prompt)
    against = weights.W_U.mean(dim=0) if wrong is None else weights.W_U[wrong].mean(dim=0)
    vector = weights.W_U[answer].mean(dim=0) - against
    scale = recording.norm_scales[-1, prompt, shares.position]
    contributions = shares.onto(_reader(recording, vector, scale))
    residual = recording.residuals[-1, prompt, shares.position]
    shares.require(
        float(contributions.sum()),
        float(residual @ _reader(recording, vector, scale)),
        float(recording.last_logits(prompt).abs().max()),
    )
    seeds, value = linear_seeds(contributions, shares.catalogue)
    what = (
        "the answer's logit is not above the vocabulary's mean"
        if wrong is None
        else ("the answer's logit is not above the wrong answer's")
    )
    reason = f"{what} (total {value:.4g}), so there is nothing to explain" if value <= 0 else None
    return _finish("linear", value, shares, seeds, reason)


def linear_seeds(
    contributions: Float[Tensor, " component"], catalogue: Catalogue
) -> tuple[list[Seed], float]:
    """Components at or above the cutoff: where the running sum first exceeds the total, at most half of the total."""
    total = float(contributions.sum())
    if total <= 0:
        return [], total
    values, order = contributions.sort(descending=True, stable=True)
    above = (values.cumsum(0) > total).nonzero()
    cutoff = float(values[int(above[0])]) if len(above) else float(values[-1])
    keep = values >= min(cutoff, total / 2)
    chosen = zip(order[keep].tolist(), values[keep].tolist(), strict=True)
    return [Seed(catalogue.component(number), value) for number, value in chosen], total


@torch.inference_mode()
def direction_root(
    recording: Recording, prompt: int, direction: Float[Tensor, " d_model"], layer: int, position: int
) -> RootSeeds:
    """Shares of the residual before a layer along a vector, as in ``linear``."""
    model = recording.model
    if direction.shape != (model.d_model,):
        raise InputError(f"The direction has shape {tuple(direction.shape)}; expected ({model.d_model},).")
    if not 0 <= layer <= model.n_layers:
        raise InputError(
            f"Layer {layer} does not exist: a direction is read before layer 0 to {model.n_layers}."
        )
    length = recording.lengths[prompt]
    if not -length <= position < length:
        raise InputError(f"Position {position} does not exist in a prompt of {length} tokens.")
    shares = Shares(recording, prompt, position % length, layer)
    vector = direction.to(model.dtype).to(model.device)
    contributions = shares.onto(vector)
    residual = recording.residuals[layer, prompt, shares.position]
    size = float(residual.norm() * vector.norm())
    shares.require(float(contributions.sum()), float(residual @ vector), size)
    seeds, value = linear_seeds(contributions, shares.catalogue)
    reason = (
        f"the residual has no positive part along the direction (total {value:.4g})" if value <= 0 else None
    )
    return _finish("direction", value, shares, seeds, reason)


@torch.inference_mode()
def heads_root(recording: Recording, prompt: int, heads: Sequence[str]) -> RootSeeds:
    """Start from given heads at the last token, each at the source it attends to most; weights are attention."""
    model, last = recording.model, recording.lengths[prompt] - 1
    seeds: list[Seed] = []
    for layer, head in dict.fromkeys(parse_head(name) for name in heads):
        if layer >= model.n_layers or head >= model.n_heads:
            raise InputError(
                f"There is no {head_name(layer, head)}: the model has layers 0 to {model.n_layers - 1} and heads 0 to "
                f"{model.n_heads - 1}."
            )
        row = recording.patterns[layer, prompt, head, last, : last + 1]
        src = int(row.argmax())
        seeds.append(Seed(Component("head", layer, head, src), float(row[src])))
    total = sum(seed.weight for seed in seeds)
    label = "attention of " + ", ".join(heads)
    return RootSeeds("linear", total, last, model.n_layers, tuple(seeds), None, None, label)


@torch.inference_mode()
def probability_root(
    recording: Recording,
    prompt: int,
    support: list[int],
    *,
    drop: float = DROP,
    ig_steps: int = IG_STEPS,
) -> RootSeeds:
    """Components without which the support's log-likelihood falls most of the way to the bias-only value."""
    weights, shares = recording.model.weights, _final(recording, prompt)
    objective = _Objective.of(recording, prompt, support)
    scale = recording.norm_scales[-1, prompt, shares.position]
    gradient = objective.path_gradient(ig_steps)
    attributions = shares.onto(_reader(recording, gradient @ weights.W_U, scale))
    clean, floor = float(objective.value(objective.clean)), float(objective.value(objective.base))
    shares.require(
        float(attributions.sum()),
        float(gradient @ (objective.clean - objective.base)),
        max(1.0, float(attributions.abs().sum())),
    )
    target = clean - drop * (clean - floor)
    seeds = [] if clean <= floor else _remove_shares(shares, objective, attributions, scale, target)
    reason = None
    if clean <= floor:
        reason = (
            f"the answer is no likelier (log-likelihood {clean:.4g}) than from the model's biases alone ({floor:.4g}), "
            "so there is nothing to explain"
        )
    return _finish("probability", clean, shares, seeds, reason, tuple(support))


def _uncapped(recording: Recording, prompt: int, base: Float[Tensor, " vocab"]) -> Float[Tensor, " vocab"]:
    """Output logits before the final softcap, from the residual: undoing a saturated cap would lose digits."""
    weights, position = recording.model.weights, recording.lengths[prompt] - 1
    residual = recording.residuals[-1, prompt, position]
    if recording.model.architecture.norm == "layer":
        residual = residual - residual.mean()
    scale = recording.norm_scales[-1, prompt, position]
    return weights.W_U @ (residual / scale * weights.final_gain) + base


@dataclass(frozen=True)
class _Objective:
    """``J(z) = sum over the support of q log softmax(cap(z))`` and the two ends of its path."""

    clean: Float[Tensor, " vocab"]
    """Logits before the final softcap."""
    base: Float[Tensor, " vocab"]
    q: Float[Tensor, " vocab"]
    cap: float | None

    @classmethod
    def of(cls, recording: Recording, prompt: int, support: list[int]) -> _Objective:
        weights, cap = recording.model.weights, recording.model.final_softcap
        base = weights.W_U @ weights.final_bias
        if weights.b_U is not None:
            base = base + weights.b_U
        recorded = recording.last_logits(prompt)
        clean = recorded if cap is None else _uncapped(recording, prompt, base)
        q = torch.zeros_like(recorded)
        q[support] = recorded[support].softmax(-1)
        return cls(clean, base, q, cap)

    def capped(self, z: Tensor) -> Tensor:
        return z if self.cap is None else torch.tanh(z / self.cap) * self.cap

    def value(self, z: Float[Tensor, "*any vocab"]) -> Float[Tensor, "*any"]:
        scores = self.capped(z)
        return scores @ self.q - scores.logsumexp(-1)

    def path_gradient(self, steps: int) -> Float[Tensor, " vocab"]:
        """The mean gradient of J on the straight path from the bias-only logits to the clean ones."""
        alphas, weights = path_weights(steps, self.clean)
        z = self.base + alphas[:, None] * (self.clean - self.base)
        gradient = self.q - self.capped(z).softmax(-1)
        if self.cap is not None:
            gradient = gradient * (1 - torch.tanh(z / self.cap).square())
        return weights @ gradient


def _remove_shares(
    shares: Shares, objective: _Objective, attributions: Tensor, scale: Tensor, target: float
) -> list[Seed]:
    """Remove components by attribution (positive ones only) until J is at or below the target."""
    weights = shares.recording.model.weights
    values, order = attributions.sort(descending=True, stable=True)
    order = order[values > 0]
    left, done, size = objective.clean, 0, 16
    kept = order.numel()
    while done < order.numel():
        writes = shares.writes(order[done : done + size])
        if shares.recording.model.architecture.norm == "layer":
            writes = writes - writes.mean(-1, keepdim=True)
        remaining = left - ((writes / scale * weights.final_gain) @ weights.W_U.T).cumsum(0)
        reached = (objective.value(remaining) <= target).nonzero()
        if len(reached):
            kept = done + int(reached[0]) + 1
            break
        left, done, size = remaining[-1], done + len(remaining), size * 2
    chosen = zip(order[:kept].tolist(), values[:kept].tolist(), strict=True)
    return [Seed(shares.catalogue.component(number), value) for number, value in chosen]


def _finish(
    kind: RootKind,
    value: float,
    shares: Shares,
    seeds: list[Seed],
    reason: str | None,
    support: tuple[int, ...] | None = None,
) -> RootSeeds:
    if reason is None and not any(seed.component.kind == "head" for seed in seeds):
        reason = f"no head is among the {len(seeds)} component(s) that the root rests on"
    return RootSeeds(
        kind, value, shares.position, shares.layer, () if reason else tuple(seeds), reason, support
    )
