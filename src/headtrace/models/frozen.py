"""The model with attention patterns, norm scales and MLP gates frozen: affine in the residual, exact where recorded.

A gated MLP ``(act(x W_gate) * (x W_in)) W_out`` keeps ``act(x W_gate)``; a plain one ``act(z) W_out`` keeps
``r = act(z) / z``. What is left is linear, so a direction J of the residual has one gradient at every place, and what a
component contributes to J is its write along that gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from headtrace.errors import UnsupportedModelError
from headtrace.models.architectures.facts import MLPParts
from headtrace.models.devices import with_values
from headtrace.models.fit import read_by
from headtrace.models.recording import Recording
from headtrace.models.weights import in_compute_dtype, norm_bias, norm_gain

if TYPE_CHECKING:
    from headtrace.models.model import Model

CONTENT_FIELDS = (
    *(name for name, field in Recording.FIELDS.items() if field.by_default),
    "mlp_inputs",
    "mlp_norm_scales",
    "mlp_post_norm_scales",
)
"""What a recording must keep to be frozen: the usual tensors, and what the MLPs read."""


def mlp_parts(model: Model, layer: int) -> MLPParts:
    """The matrices of one MLP, or an error for an MLP of a shape that cannot be frozen."""
    read = model.architecture.mlp_parts
    if read is None:
        raise UnsupportedModelError(
            f"The MLPs of {model.architecture.name} have no known shape (one gate or none, one activation), so content "
            'cannot be followed through them. Trace with paths="attention", or say in the architecture\'s facts where '
            "the MLP's matrices are (mlp_parts)."
        )
    block = with_values(model.layers[layer])
    found: MLPParts = read_by(model.architecture, "mlp_parts", lambda: read(block), layer)
    parts = _at_home(model, layer, in_compute_dtype(found))
    times = model.architecture.write_multiplier
    if times == 1:
        return parts
    b_out = None if parts.b_out is None else parts.b_out * times
    return replace(parts, W_out=parts.W_out * times, b_out=b_out)


def _at_home(model: Model, layer: int, parts: MLPParts) -> MLPParts:
    """The parts of an MLP where recordings are kept; what is a module there (a router, an activation that was learned)
    is asked where it is."""
    home, there = model.device, model.device_of(layer)
    if home == there:
        return parts

    def asked(module: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: module(x.to(there)).to(home)

    tensors = {f.name: value for f in fields(parts) if isinstance(value := getattr(parts, f.name), Tensor)}
    learned = isinstance(parts.activation, nn.Module) and any(True for _ in parts.activation.parameters())
    return replace(
        parts,
        **{name: tensor.to(home) for name, tensor in tensors.items()},
        activation=asked(parts.activation) if learned else parts.activation,
        route=None if parts.route is None else asked(parts.route),
    )


Rows = tuple[Int[Tensor, " row"], Int[Tensor, " row"]] | tuple[slice, slice]
"""Prompts and positions of some tokens."""


@dataclass(frozen=True)
class FrozenNorm:
    """A norm with its scale frozen: a linear map and a constant; the identity where there is no norm."""

    model: Model
    gain: Float[Tensor, " d_model"] | None = None
    bias: Float[Tensor, " d_model"] | None = None
    scale: Float[Tensor, "*place"] | None = None

    @classmethod
    def of(
        cls, model: Model, layer: int, path: str | None, scales: Tensor | None, rows: Rows | None
    ) -> FrozenNorm:
        if path is None or scales is None:
            return cls(model)
        norm: nn.Module = model.layers[layer].get_submodule(path)
        bias = norm_bias(norm)
        gain = norm_gain(norm, model.architecture, like=scales.new_empty(model.d_model)).detach()
        own = scales[layer] if rows is None else scales[layer][rows]
        bias = None if bias is None else bias.detach().to(own.device)
        return cls(model, gain.to(own.device), bias, own)

    def forward(self, x: Float[Tensor, "*place d_model"]) -> Float[Tensor, "*place d_model"]:
        """What the norm makes of a part of its input: its bias belongs to no part."""
        if self.gain is None or self.scale is None:
            return x
        return self.model.architecture.centred(x) * self.gain / self._spread(x)

    def back(self, g: Float[Tensor, "*place d_model"]) -> Float[Tensor, "*place d_model"]:
        """A direction after the norm as a direction before it."""
        if self.gain is None or self.scale is None:
            return g
        return self.model.architecture.centred(g * self.gain) / self._spread(g)

    def constant(self, g: Float[Tensor, "*place d_model"]) -> Float[Tensor, "*place"]:
        """What the norm's own bias contributes along a direction after it."""
        return g.new_zeros(g.shape[:-1]) if self.bias is None else g @ self.bias

    def at(self, rows: list[int]) -> FrozenNorm:
        """The norm at some of its places."""
        return self if self.scale is None else replace(self, scale=self.scale[rows])

    def _spread(self, x: Tensor) -> Tensor:
        assert self.scale is not None
        return self.scale.reshape(*self.scale.shape, *[1] * (x.ndim - self.scale.ndim))


@dataclass(frozen=True)
class HiddenInputs:
    """What the hidden units of one layer's MLP read, its gates live."""

    parts: MLPParts
    read: Float[Tensor, "*place d_hidden"]
    gate: Float[Tensor, "*place d_hidden"] | None
    """None where the MLP has no gates."""
    route: Float[Tensor, "*place d_hidden"] | None
    """The share of every unit's expert; None where there is no router."""

    def units(self) -> Float[Tensor, "*place d_hidden"]:
        """The hidden units."""
        act = self.parts.activation
        hidden = act(self.read) if self.gate is None else self.read * act(self.gate)
        return hidden if self.route is None else hidden * self.route

    def at(self, rows: list[int] | Tensor, number: list[int] | Tensor | int) -> HiddenInputs:
        """At some of the places, which have two axes."""
        gate, route = (None if x is None else x[rows, number] for x in (self.gate, self.route))
        return HiddenInputs(self.parts, self.read[rows, number], gate, route)


@dataclass(frozen=True)
class FrozenMLP:
    """One layer's MLP at all tokens of a recording, or at some, with its norms' scales and its gates frozen."""

    parts: MLPParts
    inputs: Float[Tensor, "*place d_model"]
    """What it read, after its norm."""
    before: FrozenNorm
    after: FrozenNorm

    @classmethod
    def of(cls, recording: Recording, layer: int, rows: Rows | None = None) -> FrozenMLP:
        model, facts = recording.model, recording.model.architecture
        inputs = recording.mlp_inputs[layer] if rows is None else recording.mlp_inputs[layer][rows]
        before = FrozenNorm.of(model, layer, facts.mlp_norm, recording.mlp_norm_scales, rows)
        after = FrozenNorm.of(model, layer, facts.mlp_post_norm, recording.mlp_post_norm_scales, rows)
        return cls(mlp_parts(model, layer), inputs, before, after)

    def at(self, rows: list[int]) -> FrozenMLP:
        """The MLP at some of its places, with the gates that are known."""
        some = FrozenMLP(self.parts, self.inputs[rows], self.before.at(rows), self.after.at(rows))
        if "gates" in vars(self):
            vars(some)["gates"] = self.gates[rows]
        return some

    @cached_property
    def gates(self) -> Float[Tensor, "*place d_hidden"]:
        """What every hidden unit is multiplied by, at its recorded value: its gate, and its expert's share."""
        parts = self.parts
        if parts.W_gate is None:
            z = _affine(self.inputs, parts.W_in, parts.b_in)
            size = self.inputs.norm(dim=-1, keepdim=True) * parts.W_in.norm(dim=0)
            size = size if parts.b_in is None else size + parts.b_in.abs()
            return slope_from_zero(z, parts.activation, AT_ZERO[z.dtype] * size)
        gates = parts.activation(_affine(self.inputs, parts.W_gate, parts.b_gate))
        return gates if parts.route is None else gates * parts.route(self.inputs)

    def by_unit(self, g: Float[Tensor, "*place d_model"]) -> Units:
        """A direction of what the MLP writes, hidden unit by hidden unit: its activation times its reading of it."""
        parts = self.parts
        written = self.after.back(g)
        hidden = self.gates * _affine(self.inputs, parts.W_in, parts.b_in)
        constant = self.after.constant(g)
        if parts.b_out is not None:
            constant = constant + written @ parts.b_out
        return Units(hidden * (written @ parts.W_out.T), constant)

    def hidden_inputs(self, inputs: Float[Tensor, "*place d_model"]) -> HiddenInputs:
        """What the hidden units of the MLP read for other inputs."""
        parts = self.parts
        return HiddenInputs(
            parts,
            _affine(inputs, parts.W_in, parts.b_in),
            None if parts.W_gate is None else _affine(inputs, parts.W_gate, parts.b_gate),
            None if parts.route is None else parts.route(inputs),
        )

    def write(self, inputs: Float[Tensor, "*place d_model"]) -> Float[Tensor, "*place d_model"]:
        """What the MLP itself writes for other inputs: its gates live, the norms' scales frozen."""
        return self.written_by(self.hidden_inputs(inputs))

    def written_by(self, hidden: HiddenInputs) -> Float[Tensor, "*place d_model"]:
        """What the MLP writes if its hidden units read this."""
        written = self.after.forward(_affine(hidden.units(), self.parts.W_out, self.parts.b_out))
        return written if self.after.bias is None else written + self.after.bias

    def frozen_write(self, residual: Float[Tensor, "*place d_model"]) -> Float[Tensor, "*place d_model"]:
        """What the MLP writes for a residual that it reads: norms' scales and gates frozen."""
        parts, read = self.parts, self.before.forward(residual)
        read = read if self.before.bias is None else read + self.before.bias
        hidden = self.gates * _affine(read, parts.W_in, parts.b_in)
        written = self.after.forward(_affine(hidden, parts.W_out, parts.b_out))
        return written if self.after.bias is None else written + self.after.bias

    def back(self, g: Float[Tensor, "*place d_model"]) -> Pulled:
        """A direction of what the MLP writes, as a direction of the residual that it reads."""
        parts = self.parts
        written = self.after.back(g)
        units = (written @ parts.W_out.T) * self.gates
        read = units @ parts.W_in.T
        constant = self.after.constant(g) + self.before.constant(read)
        if parts.b_out is not None:
            constant = constant + written @ parts.b_out
        if parts.b_in is not None:
            constant = constant + units @ parts.b_in
        return Pulled(self.before.back(read), constant, units)


@torch.inference_mode()
def mlp_rounding(
    recording: Recording, layer: int, rows: Rows | None = None
) -> Float[Tensor, "*place d_model"]:
    """What rounding added to what a layer's MLP wrote, from the residual that it read on (half precision)."""
    model, written = recording.model, recording.mlp_writes[layer]
    read = recording.residuals[layer]
    if not model.architecture.parallel(model.config):
        read = read + recording.layer_writes(layer) - written
    if rows is not None:
        read, written = read[rows], written[rows]
    return written - FrozenMLP.of(recording, layer, rows).frozen_write(read)


def _affine(x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
    return x @ W if b is None else x @ W + b


@dataclass(frozen=True)
class Pulled:
    """A direction pulled back through an MLP."""

    direction: Float[Tensor, "*place d_model"]
    """Of the residual that it reads."""
    constant: Float[Tensor, "*place"]
    """What the MLP's own biases contribute."""
    units: Float[Tensor, "*place d_hidden"]
    """What one more in a hidden unit would contribute, through its gate."""


@dataclass(frozen=True)
class Units:
    """What the hidden units of an MLP contribute along a direction of what it writes."""

    contributions: Float[Tensor, "*place d_hidden"]
    constant: Float[Tensor, "*place"]
    """What the biases behind the hidden units contribute, which belong to none of them."""


AT_ZERO = {torch.float32: 1e-6, torch.float64: 1e-11}
"""A hidden unit whose input is smaller than this share of what it is added up from may as well be zero."""


def slope_from_zero(z: Tensor, activation: object, at_zero: Tensor | float = 0.0) -> Tensor:
    """``act(z) / z``, with its limit from below where the input is zero to rounding (``at_zero``, in absolute terms).

    The slope of a ReLU jumps there: without this, rounding would decide between all that its terms carry and nothing.
    """
    tiny = torch.finfo(z.dtype).eps ** 0.5
    safe = torch.where(z.abs() <= at_zero, torch.full_like(z, -tiny), z)
    return activation(safe) / safe  # type: ignore[operator]


@dataclass(frozen=True)
class Gradients:
    """``dJ/dx`` in the frozen model, wherever something is written, for every prompt's own J."""

    recording: Recording
    start: Float[Tensor, "layer_and_final batch token d_model"]
    """Where J reads: a direction of the residual at the input of a layer (last: of the final norm)."""
    residual: Float[Tensor, "batch token d_model"]
    """Of the embedding."""
    attention: Float[Tensor, "layer batch token d_model"]
    """Of what attention writes."""
    mlp: Float[Tensor, "layer batch token d_model"]
    """Of what the MLP writes."""
    through_mlp: Float[Tensor, "layer batch token d_model"]
    """Of the residual that the MLP reads, through the MLP."""
    mlp_constant: Float[Tensor, "layer batch token"]
    """What an MLP's own biases contribute."""
    values: Float[Tensor, "layer batch head token d_head"]
    """Of a head's mixture of values, at each destination."""

    def embedding(self) -> Float[Tensor, "batch token"]:
        """What each token's embedding contributes to J, on all ways."""
        return (self.recording.embedding * self.residual).sum(-1)

    def position(self) -> Float[Tensor, "batch token"]:
        """What each token has because of its position contributes to J, on all ways; nothing where that is no
        component of its own."""
        if not self.recording.positions_apart:
            return torch.zeros_like(self.residual[..., 0])
        return (self.recording.tensors["position_embedding"] * self.residual).sum(-1)

    def mlps(self) -> Float[Tensor, "layer batch token"]:
        """What each MLP contributes to J."""
        return (self.recording.mlp_writes * self.mlp).sum(-1)

    def attention_biases(self) -> Float[Tensor, "layer batch token"]:
        """What each layer's constant write contributes to J."""
        rec = self.recording
        bias = torch.einsum("lbtd,ld->lbt", self.attention, rec.model.weights.attention_bias)
        return bias if rec.post_norm_scales is None else bias / rec.post_norm_scales

    @cached_property
    def mlp_roundings(self) -> Float[Tensor, "layer batch token"]:
        """What rounding inside each MLP contributes to J (half precision)."""
        layers = range(self.recording.model.n_layers)
        return torch.stack([(mlp_rounding(self.recording, l) * self.mlp[l]).sum(-1) for l in layers])

    def value_rounding(self, layer: int, prompt: int, head: int, dest: int, src: int) -> Float[Tensor, ""]:
        """What rounding of the value that one head component moves contributes to J."""
        rec = self.recording
        rounding = rec.value_roundings(layer)[prompt, head // rec.model.weights.group, src]
        return rec.attention.at(layer, prompt, head, dest, src) * (
            self.values[layer, prompt, head, dest] @ rounding
        )

    def roundings(self) -> Float[Tensor, "layer batch token"]:
        """What all rounding in a layer contributes to J, by the token where it was rounded (half precision)."""
        rec, group = self.recording, self.recording.model.weights.group
        found = (rec.roundings * self.mlp).sum(-1) + self.mlp_roundings
        for layer in range(rec.model.n_layers):
            moved = rec.attention.turned(layer, self.values[layer]).unflatten(1, (-1, group)).sum(dim=2)
            found[layer] += (moved * rec.value_roundings(layer)).sum(dim=(1, 3))
        return found

    def heads(self, layer: int) -> Float[Tensor, "batch head dest src"]:
        """What each head component of a layer contributes to J: ``A[d, s] v[s] W_O . g[d]``."""
        rec = self.recording
        return rec.pattern(layer) * (
            self.values[layer] @ rec.bare_values[layer].transpose(0, 1).transpose(-1, -2)
        )

    def value_direction(
        self, layer: int, head: int, prompt: int, dest: int, src: int
    ) -> Float[Tensor, " d_model"]:
        """The direction of the residual at ``src`` along which a head component carries content to J."""
        rec, weights = self.recording, self.recording.model.weights
        W_V = weights.W_V[layer, head // weights.group]
        strength = rec.attention.at(layer, prompt, head, dest, src) / rec.norm_scales[layer, prompt, src]
        return strength * (W_V @ self.values[layer, prompt, head, dest])


@torch.inference_mode()
def gradients(recording: Recording, start: Float[Tensor, "layer_and_final batch token d_model"]) -> Gradients:
    """One backward sweep over a recording, through frozen patterns, norms and gates."""
    shape = recording.mlp_writes.shape
    attention, mlp, through = (recording.mlp_writes.new_empty(shape) for _ in range(3))
    constant = recording.mlp_writes.new_empty(shape[:-1])
    values, below = torch.empty_like(recording.queries), start[-1]
    for level in levels(recording, start):
        layer = level.layer
        attention[layer], mlp[layer], through[layer] = level.attention, level.mlp, level.pulled.direction
        constant[layer], values[layer], below = level.pulled.constant, level.values, level.below
    return Gradients(recording, start, below, attention, mlp, through, constant, values)


@dataclass(frozen=True)
class Level:
    """``dJ/dx`` at one layer: of what its MLP and its attention write, and of the residual at its input."""

    layer: int
    mlp: Float[Tensor, "batch token d_model"]
    pulled: Pulled
    """Through the MLP."""
    attention: Float[Tensor, "batch token d_model"]
    values: Float[Tensor, "batch head token d_head"]
    below: Float[Tensor, "batch token d_model"]


def levels(
    recording: Recording, start: Float[Tensor, "layer_and_final batch token d_model"], first: int = 0
) -> Iterator[Level]:
    """The backward sweep, layer by layer from the last: who needs only the upper ones stops there.

    With ``first``, only positions from there on: what they write is read by none before them.
    """
    parallel = recording.model.architecture.parallel(recording.model.config)
    rows = (slice(None), slice(first, None)) if first else None
    start = start[:, :, first:]
    g = start[-1]
    for layer in reversed(range(recording.model.n_layers)):
        pulled = FrozenMLP.of(recording, layer, rows).back(g)
        written = g if parallel else g + pulled.direction
        values = _onto_heads(recording, layer, written)
        below = g + pulled.direction + _through_values(recording, layer, values) + start[layer]
        yield Level(layer, g, pulled, written, values, below)
        g = below


def _onto_heads(
    recording: Recording, layer: int, g: Float[Tensor, "batch token d_model"]
) -> Float[Tensor, "batch head token d_head"]:
    """A direction of what attention writes at the last tokens, as directions of each head's mixture of values."""
    if recording.post_norm_scales is not None:
        g = g / recording.post_norm_scales[layer][:, -g.shape[1] :, None]
    W_O = recording.model.weights.W_O[layer]
    n_heads, d_head, d_model = W_O.shape
    flat = g @ W_O.reshape(n_heads * d_head, d_model).T
    return flat.unflatten(-1, (n_heads, d_head)).transpose(1, 2)


def _through_values(
    recording: Recording, layer: int, onto: Float[Tensor, "batch head token d_head"]
) -> Float[Tensor, "batch token d_model"]:
    """Directions of mixtures of values at the last tokens, as a direction of what attention reads there."""
    weights, n = recording.model.weights, onto.shape[2]
    before = recording.token_ids.shape[1] - n
    moved = recording.attention.turned(
        layer, torch.nn.functional.pad(onto, (0, 0, before, 0)) if before else onto
    )
    moved = moved[:, :, before:]
    moved = moved.unflatten(1, (-1, weights.group)).sum(dim=2)
    W_V = weights.W_V[layer]
    read = moved.transpose(1, 2).flatten(2) @ W_V.transpose(1, 2).reshape(-1, W_V.shape[1])
    return read / recording.norm_scales[layer][:, -n:, None]
