"""Exact secants: how an operation passes on the difference between two runs.

For two inputs ``x`` and ``x'`` of one operation, write ``D x = x - x'`` and ``x~ = (x + x') / 2``. A secant is a linear
map with ``D f = secant(D x)``, exactly and not only to first order; its transpose pulls a multiplier of ``f`` back to a
multiplier of ``x``. Everything that a transformer computes has one:

- sums, linear maps, rotary positions: the same map;
- products: ``D(a b) = b~ D a + a~ D b``;
- elementwise functions: ``(f(z) - f(z')) / (z - z')``, or the derivative where z and z' nearly agree;
- norms: their scale differs too, ``D(1/s) = -D(mean x^2) / (s s' (s + s'))``;
- softmax: ``diag(m) - m m^T / sum(m)``, with m the logarithmic means of the two patterns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headtrace.models.attention import softcap
from headtrace.models.frozen import mlp_parts
from headtrace.models.observer import Rotary
from headtrace.models.patterns import NUMBERS_AT_ONCE
from headtrace.models.weights import FoldedWeights, fold_weights, norm_eps, norm_gain, norm_scale
from headtrace.vocabulary import Firing, Side

if TYPE_CHECKING:
    from headtrace.models import Model, Recording

NEAR = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Elementwise inputs closer than this take the derivative between them: its error is of the order of the square."""


# -- elementwise functions -----------------------------------------------------------------------------------


def activation_slope(
    activation: Callable[[Tensor], Tensor], z: Float[Tensor, "*place"], other: Float[Tensor, "*place"]
) -> Float[Tensor, "*place"]:
    """``(f(z) - f(z')) / (z - z')``; where they nearly agree ``f'(z~)``, if it gives the same difference to rounding.

    (It does not if a kink lies between them.)

    >>> activation_slope(torch.relu, torch.tensor([2.0, 1.0, 3.0]), torch.tensor([-2.0, 1.0, 1.0]))
    tensor([0.5000, 1.0000, 1.0000])
    """
    difference, value, value_other = z - other, activation(z), activation(other)
    safe = torch.where(difference == 0, torch.ones_like(difference), difference)
    slope = (value - value_other) / safe
    # Everywhere, and chosen afterwards: to look for the near ones first would be to wait for the device.
    middle = (z + other) / 2
    with torch.inference_mode(False), torch.enable_grad():
        leaf = middle.clone().requires_grad_()
        derivative = torch.autograd.grad(activation(leaf).sum(), leaf)[0]
    near = difference.abs() <= NEAR[z.dtype] * (1 + z.abs())
    left = derivative * difference - (value - value_other)
    rounding = 16 * torch.finfo(z.dtype).eps * (value.abs() + derivative.abs() + middle.abs())
    return torch.where(near & (left.abs() <= rounding), derivative, slope)


def softcap_slope(z: Sequence[Float[Tensor, "*place"]], cap: float | None) -> Float[Tensor, "*place"] | float:
    """The secant of ``cap tanh(z / cap)`` between two runs, from
    ``tanh a - tanh b = tanh(a - b) (1 - tanh a tanh b)``."""
    if cap is None:
        return 1.0
    step = (z[0] - z[1]) / cap
    rate = torch.where(step == 0, 1.0, step.tanh() / torch.where(step == 0, 1.0, step))
    return rate * (1 - (z[0] / cap).tanh() * (z[1] / cap).tanh())


# -- softmax -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SoftmaxSecant:
    """The secant of a softmax over its last axis: symmetric, so it is its own transpose."""

    mean: Float[Tensor, "*place n"]
    """``A~``, the mean of the two distributions."""
    difference: Float[Tensor, "*place n"]
    """``D A``."""
    log_mean: Float[Tensor, "*place n"]
    """``m = (A - A') / (ln A - ln A')``."""
    total: Float[Tensor, "*place 1"]

    @classmethod
    def of(
        cls,
        logits: Sequence[Float[Tensor, "*place n"]],
        visible: Bool[Tensor, "*#place n"] | None = None,
    ) -> SoftmaxSecant:
        """The secant between the logits of two runs."""
        logs = [each.log_softmax(-1) for each in logits]
        apart = (logs[0] - logs[1]).abs()
        if visible is not None:  # minus infinity less minus infinity
            apart = apart.masked_fill(~visible, 0.0)
        one, two = (log.exp() for log in logs)
        if visible is not None:
            one, two = one.masked_fill(~visible, 0.0), two.masked_fill(~visible, 0.0)
        rate = torch.where(apart == 0, 1.0, -torch.expm1(-apart) / torch.where(apart == 0, 1.0, apart))
        log_mean = torch.maximum(one, two) * rate
        total = log_mean.sum(-1, keepdim=True).clamp_min(torch.finfo(one.dtype).tiny)
        return cls((one + two) / 2, one - two, log_mean, total)

    def __call__(self, x: Float[Tensor, "*place n"]) -> Float[Tensor, "*place n"]:
        return self.log_mean * (x - (self.log_mean * x).sum(-1, keepdim=True) / self.total)

    def of_log(self, weights: Float[Tensor, "*place n"]) -> Float[Tensor, "*place n"]:
        """The multiplier of the logits for ``weights . ln A``; weights sum to one."""
        return weights - self.log_mean / self.total


# -- norms ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NormSecant:
    """The secant of ``gain * x / s`` (x centred for LayerNorm), whose scale s differs between the runs."""

    middle: Float[Tensor, "*place d"]
    """``x~``, centred."""
    rate: Float[Tensor, "*place 1"]
    """The mean of ``1 / s``."""
    bend: Float[Tensor, "*place 1"]
    """``D(1/s)`` for one more of ``x~ . D x``."""
    gain: Tensor | float
    centred: bool

    @classmethod
    def of(
        cls,
        inputs: Sequence[Float[Tensor, "*place d"]],
        eps: float,
        kind: Literal["layer", "rms"],
        gain: Tensor | float = 1.0,
    ) -> NormSecant:
        """The secant between what a norm reads in two runs."""
        s, t = (norm_scale(each, eps, kind)[..., None] for each in inputs)
        middle = (inputs[0] + inputs[1]) / 2
        if kind == "layer":
            middle = middle - middle.mean(-1, keepdim=True)
        bend = -2 / (s * t * (s + t)) / middle.shape[-1]
        return cls(middle, (1 / s + 1 / t) / 2, bend, gain, kind == "layer")

    def at(self, *place: Tensor | int) -> NormSecant:
        """The norm at some of its places (only where one gain holds for all of them)."""
        return replace(self, middle=self.middle[place], rate=self.rate[place], bend=self.bend[place])

    def forward(self, dx: Float[Tensor, "*place d"]) -> Float[Tensor, "*place d"]:
        """``D`` of the result, or a part of it."""
        return self._scaled(self._centre(dx)) * self.gain

    def back(self, g: Float[Tensor, "*place d"]) -> Float[Tensor, "*place d"]:
        """A multiplier of the result as a multiplier of the input."""
        return self._centre(self._scaled(g * self.gain))

    def _scaled(self, x: Tensor) -> Tensor:
        return self.rate * x + self.bend * (self.middle * x).sum(-1, keepdim=True) * self.middle

    def _centre(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centred else x


# -- MLPs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MlpSecant:
    """The secant of one layer's MLP at all tokens, from the residual that it reads to what it writes."""

    before: NormSecant | None
    W_in: Float[Tensor, "d_model d_hidden"]
    up: Float[Tensor, "*place d_hidden"]
    """What a hidden unit passes on of its input."""
    W_gate: Float[Tensor, "d_model d_hidden"] | None
    gate: Float[Tensor, "*place d_hidden"] | None
    """... and of its gate's."""
    routed: Float[Tensor, "*place d_hidden"] | None
    """What the change of a router's weights adds to each hidden unit."""
    toward: Float[Tensor, "*place d_model"] | None
    """``D x / |D x|^2``: the router's choice is no smooth function, so its change goes to what changed its input."""
    W_out: Float[Tensor, "d_hidden d_model"]
    after: NormSecant | None
    inputs: Float[Tensor, "*place d_model"]
    """``D`` of what it reads behind its norm."""
    writes: Float[Tensor, "*place d_model"] | None
    """In half precision, ``D`` of what it writes, computed from what it reads."""

    @classmethod
    def of(
        cls,
        recording: Recording,
        other: Recording,
        layer: int,
        read: tuple[Float[Tensor, "batch some d_model"], Float[Tensor, "batch some d_model"]],
        tokens: Int[Tensor, " some"] | None = None,
    ) -> MlpSecant:
        """``read``: the residual that the MLP reads, in both runs, at all tokens or at those that are named."""
        model, facts = recording.model, recording.model.architecture
        parts, times = mlp_parts(model, layer), facts.write_multiplier
        inputs = recording.mlp_inputs[layer], other.mlp_inputs[layer]
        if tokens is not None:
            inputs = inputs[0][:, tokens], inputs[1][:, tokens]
        before = None
        if facts.mlp_norm is not None:
            before = NormSecant.of(read, *norm_facts(recording, layer, facts.mlp_norm))
        both = torch.stack(inputs)  # one product for both runs: short prompts wait for the weights
        into = both @ parts.W_in if parts.b_in is None else both @ parts.W_in + parts.b_in
        gate = routed = toward = None
        if parts.W_gate is None:
            up = activation_slope(parts.activation, into[0], into[1])
            hidden = list(parts.activation(into))
        else:
            gates = both @ parts.W_gate if parts.b_gate is None else both @ parts.W_gate + parts.b_gate
            open_ = parts.activation(gates)
            up = (open_[0] + open_[1]) / 2
            gate = activation_slope(parts.activation, gates[0], gates[1]) * (into[0] + into[1]) / 2
            hidden = list(open_ * into)
        if parts.route is not None:
            weights = [parts.route(x) for x in inputs]
            middle = (weights[0] + weights[1]) / 2
            routed = (hidden[0] + hidden[1]) / 2 * (weights[0] - weights[1])
            up, gate = up * middle, None if gate is None else gate * middle
            hidden = [h * w for h, w in zip(hidden, weights, strict=True)]
            moved = inputs[0] - inputs[1]
            toward = moved / moved.square().sum(-1, keepdim=True).clamp_min(torch.finfo(moved.dtype).tiny)
        W_out, after = parts.W_out, None
        writes = (hidden[0] - hidden[1]) @ W_out if model.half else None
        if facts.mlp_post_norm is not None:
            eps, kind, gain = norm_facts(recording, layer, facts.mlp_post_norm)
            W_out = W_out / times
            b_out = 0.0 if parts.b_out is None else parts.b_out / times
            after = NormSecant.of([h @ W_out + b_out for h in hidden], eps, kind, gain * times)
            writes = None if writes is None else after.forward(writes / times)
        return cls(
            before,
            parts.W_in,
            up,
            parts.W_gate,
            gate,
            routed,
            toward,
            W_out,
            after,
            inputs[0] - inputs[1],
            writes,
        )

    @property
    def n_numbers(self) -> int:
        """How many numbers it holds, but for the weights."""
        norms = [norm.middle for norm in (self.before, self.after) if norm is not None]
        held = [self.up, self.gate, self.routed, self.toward, self.inputs, self.writes, *norms]
        return sum(x.numel() for x in held if x is not None)

    def at(self, *place: Tensor | int) -> MlpSecant:
        """The secant at some of its places (batch, token), one row each."""

        def some(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[place]

        return replace(
            self,
            before=None if self.before is None else self.before.at(*place),
            up=self.up[place],
            gate=some(self.gate),
            routed=some(self.routed),
            toward=some(self.toward),
            after=None if self.after is None else self.after.at(*place),
            inputs=self.inputs[place],
            writes=some(self.writes),
        )

    def back(
        self, g: Float[Tensor, "*place d_model"]
    ) -> tuple[Float[Tensor, "*place d_model"], Float[Tensor, "*place d_model"]]:
        """A multiplier of what the MLP writes, as one of the residual that it reads; and of that behind its norm."""
        units = (g if self.after is None else self.after.back(g)) @ self.W_out.T
        read = (units * self.up) @ self.W_in.T
        if self.W_gate is not None and self.gate is not None:
            read = read + (units * self.gate) @ self.W_gate.T
        if self.routed is not None and self.toward is not None:
            read = read + (units * self.routed).sum(-1, keepdim=True) * self.toward
        return read if self.before is None else self.before.back(read), read


def norm_facts(
    recording: Recording, layer: int, path: str
) -> tuple[float, Literal["layer", "rms"], Float[Tensor, " d_model"]]:
    """Epsilon, kind and gain of a norm of a block."""
    facts, norm = recording.model.architecture, recording.model.layers[layer].get_submodule(path)
    gain = norm_gain(norm, facts, like=recording.residuals[0, 0, 0]).detach()
    return norm_eps(norm), facts.norm, gain.to(recording.residuals)


# -- attention -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AttentionRows:
    """Attention from some destinations: the secant of its softmax, and of the softcap before it."""

    some: slice
    softmax: SoftmaxSecant
    slope: Float[Tensor, "batch head dest src"] | float
    """``D`` of a logit as the softmax sees it for one more of ``D(q . k)``."""


@dataclass(frozen=True)
class HeadFlow:
    """The flow of every head component of a layer, and what enters it, all in the unit of the root."""

    moved: Float[Tensor, "batch head dest src"]
    """``A~ D v``: it moves something else."""
    attends: Float[Tensor, "batch head dest src"]
    """``v~ D A``: it attends differently."""
    value: Float[Tensor, "batch head dest src"]
    query: Float[Tensor, "batch head dest src"]
    key: Float[Tensor, "batch head dest src"]
    """What enters through the value, the query and all keys that the destination sees."""
    rounding: Float[Tensor, "batch head dest src"]
    """What rounding of values, queries and keys adds (zero unless the model runs in half precision)."""

    @property
    def flow(self) -> Float[Tensor, "batch head dest src"]:
        """The flow of every head component."""
        return self.moved + self.attends


@dataclass(frozen=True)
class AttentionSecant:
    """The secants of one layer's attention, from the residual that it reads to what it writes."""

    recording: Recording
    other: Recording
    layer: int
    norm: NormSecant | None
    query_norm: NormSecant | None
    key_norm: NormSecant | None
    after: NormSecant | None
    """The norm of what attention writes, where there is one."""
    rotates_first: bool = False
    """Whether queries and keys are rotated before they are normed. Without a gain the order makes no difference, but
    for tables in float32, whose rotations are as long as they should be to seven digits only."""

    @classmethod
    def of(cls, recording: Recording, other: Recording, layer: int) -> tuple[AttentionSecant, list[Tensor]]:
        """The secants, and what attention wrote in both runs."""
        model, facts = recording.model, recording.model.architecture
        weights, pair = raw_weights(model), (recording, other)
        norm = query_norm = key_norm = after = None
        rotates_first = False
        if facts.attention_norm is not None:  # its gain is in the weights
            eps, kind, _ = norm_facts(recording, layer, facts.attention_norm)
            norm = NormSecant.of([run.residuals[layer] for run in pair], eps, kind)
        if facts.query_key_norm is not None:
            read = [run.residuals[layer] / run.norm_scales[layer][..., None] for run in pair]
            attention = model.layers[layer].get_submodule(facts.attention)
            found: list[NormSecant] = []
            sides = (weights.W_Q, weights.b_Q), (weights.W_K, weights.b_K)
            for (W, b), path in zip(sides, facts.query_key_norm, strict=True):
                module, whole = attention.get_submodule(path), facts.query_key_norm_axes == "token projection"
                projected = [torch.einsum("btd,hdr->bthr", x, W[layer]) + b[layer] for x in read]
                if getattr(module, "weight", None) is None and not hasattr(module, "norms"):
                    rotates_first = True
                    projected = [_rotated(recording, layer, x) for x in projected]
                gain = norm_gain(module, facts, like=projected[0][0, 0].flatten() if whole else projected[0])
                gain = gain.detach().to(W)
                if whole:
                    gain = gain.unflatten(0, b[layer].shape)
                gain = gain if model.head_order is None else gain[..., model.head_order]
                if whole:
                    projected, gain = [x.flatten(2) for x in projected], gain.flatten()
                found.append(NormSecant.of(projected, norm_eps(module), facts.query_key_norm_kind, gain))
            query_norm, key_norm = found
        mixed = [run.attention.mixed(layer, run.bare_values[layer].transpose(0, 1)) for run in pair]
        bias = weights.attention_bias[layer]
        writes = [torch.einsum("bhtr,hrd->btd", z, weights.W_O[layer]) + bias for z in mixed]
        if facts.attention_post_norm is not None:
            eps, kind, gain = norm_facts(recording, layer, facts.attention_post_norm)
            times = facts.write_multiplier
            after = NormSecant.of(writes, eps, kind, gain * times)
            scales = [(x.square().mean(-1, keepdim=True) + eps).sqrt() for x in writes]
            writes = [x / s * gain * times for x, s in zip(writes, scales, strict=True)]
        return cls(recording, other, layer, norm, query_norm, key_norm, after, rotates_first), writes

    # -- what attention reads --------------------------------------------------------------------------------

    @cached_property
    def queries(self) -> Float[Tensor, "batch head token d_head"]:
        """``q~``."""
        return (self.recording.queries[self.layer] + self.other.queries[self.layer]) / 2

    @cached_property
    def keys(self) -> Float[Tensor, "batch head token d_head"]:
        """``k~``, one row per query head."""
        return self.per_head((self.recording.keys[self.layer] + self.other.keys[self.layer]) / 2)

    @cached_property
    def values(self) -> Float[Tensor, "batch head token d_head"]:
        """``v~`` without the bias, one row per query head."""
        pair = self.recording.bare_values[self.layer], self.other.bare_values[self.layer]
        return ((pair[0] + pair[1]) / 2).transpose(0, 1)

    def per_head(self, x: Float[Tensor, "batch kv_head token d_head"]) -> Tensor:
        """Keys or values, one row per query head."""
        return x.repeat_interleave(self.recording.model.weights.group, dim=1)

    def recorded(self) -> list[Tensor]:
        """``D`` of queries, keys and values as they were recorded: (batch, head, token, d_head)."""
        run, other, layer = self.recording, self.other, self.layer
        return [
            run.queries[layer] - other.queries[layer],
            run.keys[layer] - other.keys[layer],
            run.values[layer] - other.values[layer],
        ]

    def forward(self, dx: Float[Tensor, "batch token d_model"]) -> list[Tensor]:
        """``D`` of queries, keys and values for a difference of the residual: (batch, head, token, d_head)."""
        return [read.transpose(1, 2) for read in self.forward_at(dx)]

    def forward_at(
        self, dx: Float[Tensor, "*place d_model"], place: tuple[Tensor, Tensor] | None = None
    ) -> list[Float[Tensor, "*place _ d_head"]]:
        """``D`` of queries, keys and values for differences of the residual at all places (batch, token), or some."""
        weights, layer = raw_weights(self.recording.model), self.layer

        def there(norm: NormSecant) -> NormSecant:
            return norm if place is None else norm.at(*place)

        dx = dx if self.norm is None else there(self.norm).forward(dx)
        found: list[Tensor] = []
        for W, norm in ((weights.W_Q, self.query_norm), (weights.W_K, self.key_norm)):
            read = torch.einsum("...d,hdr->...hr", dx, W[layer])
            if self.rotates_first:
                read = _rotated(self.recording, layer, read, place)
            if norm is not None:
                flat = norm.middle.ndim == 3
                read = there(norm).forward(read.flatten(-2) if flat else read).reshape(read.shape)
            if not self.rotates_first:
                read = _rotated(self.recording, layer, read, place)
            found.append(read)
        return [*found, torch.einsum("...d,hdr->...hr", dx, weights.W_V[layer])]

    def back(
        self,
        sides: dict[Side, Float[Tensor, "*place _ d_head"]],
        place: tuple[Tensor, Tensor] | None = None,
    ) -> Float[Tensor, "*place d_model"]:
        """Multipliers of queries, keys and values as one of the residual: at all places (batch, token), or some."""
        weights, layer = raw_weights(self.recording.model), self.layer
        total: Tensor | float = 0.0
        for side, g in sides.items():
            if side == "value":
                total = total + torch.einsum("...hr,hdr->...d", g, weights.W_V[layer])
                continue
            W, norm = (weights.W_Q, self.query_norm) if side == "query" else (weights.W_K, self.key_norm)
            if not self.rotates_first:
                g = _rotated(self.recording, layer, g, place, back=True)
            if norm is not None:
                flat = norm.middle.ndim == 3
                norm = norm if place is None else norm.at(*place)
                g = norm.back(g.flatten(-2) if flat else g).reshape(g.shape)
            if self.rotates_first:
                g = _rotated(self.recording, layer, g, place, back=True)
            total = total + torch.einsum("...hr,hdr->...d", g, W[layer])
        assert isinstance(total, Tensor)
        if self.norm is None:
            return total
        return (self.norm if place is None else self.norm.at(*place)).back(total)

    # -- patterns --------------------------------------------------------------------------------------------

    def blocks(self) -> Iterator[AttentionRows]:
        """All rows of attention, some destinations at a time."""
        batch, heads, length, _ = self.queries.shape
        step = max(1, NUMBERS_AT_ONCE // (batch * heads * length))
        for first in range(0, length, step):
            yield self.rows(slice(first, min(first + step, length)))

    def rows(self, some: slice) -> AttentionRows:
        """Attention from some destinations."""
        run, layer = self.recording, self.layer
        scale, cap, visible = run.scales[layer], run.softcaps[layer], run.visible[layer][:, None, some]
        raw = [
            each.queries[layer][:, :, some] @ self.per_head(each.keys[layer]).transpose(-1, -2) * scale
            for each in (run, self.other)
        ]
        logits = [softcap(z, cap).masked_fill(~visible, -torch.inf) for z in raw]
        return AttentionRows(some, SoftmaxSecant.of(logits, visible), softcap_slope(raw, cap) * scale)

    def row(
        self, prompt: int, head: int | Int[Tensor, " n"], dest: int | Int[Tensor, " n"]
    ) -> tuple[SoftmaxSecant, Float[Tensor, "*n src"] | float]:
        """Attention of one head from one destination, or of several from theirs: its softmax's secant and its
        softcap's slope."""
        run, layer, kv = self.recording, self.layer, head // self.recording.model.weights.group
        scale, cap, visible = run.scales[layer], run.softcaps[layer], run.visible[layer][prompt, dest]
        raw = [
            (each.keys[layer][prompt, kv] @ each.queries[layer][prompt, head, dest][..., None])[..., 0]
            * scale
            for each in (run, self.other)
        ]
        logits = [softcap(z, cap).masked_fill(~visible, -torch.inf) for z in raw]
        return SoftmaxSecant.of(logits, visible), softcap_slope(raw, cap) * scale

    def onto_heads(self, g: Float[Tensor, "batch token d_model"]) -> Float[Tensor, "batch head token d_head"]:
        """A multiplier of what attention writes as multipliers of each head's mixture of values."""
        g = g if self.after is None else self.after.back(g)
        return torch.einsum("btd,hrd->bhtr", g, raw_weights(self.recording.model).W_O[self.layer])

    def of_patterns(self, onto: Tensor, rows: AttentionRows, read: Sequence[tuple[int, Firing]]) -> Tensor:
        """The multiplier of every attention weight: ``v~ . g``, and one more where the root reads the weight itself."""
        found = onto[:, :, rows.some] @ self.values.transpose(-1, -2)
        for prompt, firing in read:
            if firing.layer == self.layer and rows.some.start <= firing.dest < rows.some.stop:
                found[prompt, firing.head, firing.dest - rows.some.start, firing.src] += 1
        return found

    def pulled(
        self, onto: Tensor, rows: AttentionRows, patterns: Tensor
    ) -> tuple[Float[Tensor, "batch head dest d_head"], Tensor, Tensor]:
        """Multipliers of the queries of some destinations, and what these add to those of all keys and values."""
        logits = rows.softmax(patterns) * rows.slope
        keys = logits.transpose(-1, -2) @ self.queries[:, :, rows.some]
        return logits @ self.keys, keys, rows.softmax.mean.transpose(-1, -2) @ onto[:, :, rows.some]

    def entering(
        self, onto: Tensor, rows: AttentionRows, patterns: Tensor, read: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What differences of queries, keys and values give every head component: (batch, head, dest, src) each."""
        dq, dk, dv = read[0][:, :, rows.some], self.per_head(read[1]), self.per_head(read[2])
        value = rows.softmax.mean * (onto[:, :, rows.some] @ dv.transpose(-1, -2))
        query = patterns * rows.softmax(rows.slope * (dq @ self.keys.transpose(-1, -2)))
        key = patterns * rows.softmax(rows.slope * (self.queries[:, :, rows.some] @ dk.transpose(-1, -2)))
        return value, query, key

    def flow(self, onto: Tensor, rows: AttentionRows, patterns: Tensor, read: Sequence[Tensor]) -> HeadFlow:
        """The flow of the head components of some destinations; ``read``: what `forward` gives."""
        recorded, own = self.recorded(), rows.softmax
        moved = own.mean * (onto[:, :, rows.some] @ self.per_head(recorded[2]).transpose(-1, -2))
        value, query, key = self.entering(onto, rows, patterns, read)
        rounding = torch.zeros_like(value)
        if self.recording.model.half:
            left = [one - two for one, two in zip(recorded, read, strict=True)]
            rounding = sum(self.entering(onto, rows, patterns, left), rounding)
        return HeadFlow(moved, patterns * own.difference, value, query, key, rounding)


def _rotated(
    recording: Recording,
    layer: int,
    x: Float[Tensor, "*place head d_head"],
    place: tuple[Tensor, Tensor] | None = None,
    *,
    back: bool = False,
) -> Float[Tensor, "*place head d_head"]:
    """Queries or keys (``back``: multipliers of them) rotated by their positions: (batch, token), or some of those."""
    rotary = recording.rotary[layer]
    if rotary is None:
        return x
    cos, sin = rotary.cos.to(x.dtype), rotary.sin.to(x.dtype) * (-1 if back else 1)
    if place is None:
        return Rotary(cos, sin).rotate(x.transpose(1, 2)).transpose(1, 2)
    rows = place[0] if cos.shape[0] > 1 else torch.zeros_like(place[0])
    some = Rotary(cos[rows, place[1]][None], sin[rows, place[1]][None])
    return some.rotate(x.transpose(0, 1)[None])[0].transpose(0, 1)


def raw_weights(model: Model) -> FoldedWeights:
    """Folded weights without what norms inside attention do, whose scales differ between two runs."""
    facts = model.architecture
    if facts.query_key_norm is None and facts.attention_post_norm is None:
        return model.weights

    def fold() -> FoldedWeights:
        times = 1.0 if facts.attention_post_norm is not None else facts.write_multiplier
        bare = replace(facts, query_key_norm=None, attention_post_norm=None, write_multiplier=times)
        return fold_weights(model.hf, bare, model.d_head, model.head_order)

    return model.cached("weights without the norms inside attention", fold)
