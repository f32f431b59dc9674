"""The identities that make a recording trustworthy, and the one place that says how exactly they must hold.

Tolerances are relative to the size of what is added up, not to what is left of it where terms cancel: for a residual
the summed norms of all that was written, for attention logits the largest one of a row, for output logits the largest
one or what such writes could give, whichever is larger. In float32 a residual is a sum of up to a few thousand terms,
each rounded at 6e-8, and scores multiply two such sums, so errors of 1e-6 to 1e-5 are rounding; 1e-4 leaves a decade
and is far below any real mistake (a missing bias or a wrong scale gives 1e-2 or more). In float64 the same count gives
1e-14 to 1e-12; 1e-9 leaves room for ill-conditioned norms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.errors import IdentityError
from headtrace.models.attention import softcap
from headtrace.models.devices import device_of, dtype_name
from headtrace.models.forward import forward
from headtrace.models.integrity import require_same_weights
from headtrace.models.observer import Observer, Rotary

if TYPE_CHECKING:
    from headtrace.models.model import Model
    from headtrace.models.recording import Recording

ROUNDING_BOUND = {"residual": 8, "queries": 16, "keys": 16, "values": 16, "mlp": 32, "logits": 32}
"""The largest rounding parts of a model in half precision, in units of its eps: of a residual relative to it, of others
relative to the longest vector of their kind, of logits to the largest one. One rounding is half an eps; SmolLM2 has 1,
1.5 and 5 eps in residuals, queries and attention logits, and what is left is room for sums that cancel."""

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


@dataclass(frozen=True)
class IdentityReport:
    """The largest relative error of each identity over all layers, heads and positions."""

    residual: float
    """Components sum to the residual at every layer."""
    attention: float
    """Folded q . k reproduces the attention logits."""
    output: float
    """The shares at the final norm reproduce the output logits."""
    tolerance: float
    pattern: float = 0.0
    """Attention logits, softcap and mask give the attention patterns."""
    tokens: float = 0.0
    """The tokens, embedded by the model, are the residual at the first layer."""
    rounding: tuple[LayerRounding, ...] = ()
    """In half precision, what rounding added in each layer. Errors of residual, attention and output are then the
    sizes of the rounding parts: with these as components, everything adds up in float32."""

    @property
    def worst(self) -> float:
        return max(self.residual, self.attention, self.output, self.pattern, self.tokens)


@dataclass(frozen=True)
class LayerRounding:
    """What rounding added to the residual in one layer, relative to the residual of its token."""

    worst: float
    median: float


def tolerance_for(dtype: torch.dtype) -> float:
    return TOLERANCE[dtype]


def rounding_bound(model: Model, what: str) -> float:
    """The largest rounding part of its kind that a model in half precision may have, relative to the whole."""
    return ROUNDING_BOUND[what] * torch.finfo(model.hf.dtype).eps


@torch.inference_mode()
def check_identities(recording: Recording, tolerance: float | None = None) -> IdentityReport:
    """Measure the identities; an error beyond tolerance names where it is and stops."""
    require_same_weights(recording)
    if recording.model.half:
        return _check_rounding(recording, tolerance)
    allowed = tolerance_for(recording.model.dtype) if tolerance is None else tolerance
    tokens = check_tokens(recording, allowed)
    check_values(recording)
    residual = attention = pattern = 0.0
    # The embedding, and what positions add where that is a component of its own.
    total = recording.embedding + recording.tensors.get("position_embedding", 0.0)
    size = total.norm(dim=-1)
    for layer in range(recording.model.n_layers):
        residual = max(residual, _residual_error(recording, total, size, layer, allowed))
        attention = max(attention, _attention_error(recording, total, layer, allowed))
        pattern = max(pattern, _pattern_error(recording, layer, allowed))
        written, mlp = recording.layer_writes(layer), recording.mlp_writes[layer]
        total += written
        size = size + (written - mlp).norm(dim=-1) + mlp.norm(dim=-1)
    residual = max(residual, _residual_error(recording, total, size, recording.model.n_layers, allowed))
    output = _output_error(recording, total, size, allowed)
    return IdentityReport(residual, attention, output, allowed, pattern, tokens)


def _check_rounding(recording: Recording, tolerance: float | None) -> IdentityReport:
    """In half precision: what must hold in float32, and how large the rounding parts are that make up the rest."""
    exact = tolerance_for(recording.model.dtype)
    tokens = check_tokens(recording, exact)
    check_values(recording)
    allowed = rounding_bound(recording.model, "logits") if tolerance is None else tolerance
    pattern = attention = 0.0
    for layer in range(recording.model.n_layers):
        recording.reading_roundings(layer)
        attention = max(attention, _attention_error(recording, recording.residuals[layer], layer, allowed))
        pattern = max(pattern, _pattern_error(recording, layer, exact))
    final = recording.residuals[-1]
    output = _output_error(recording, final, final.norm(dim=-1), allowed)
    layers = rounding_sizes(recording)
    return IdentityReport(max(l.worst for l in layers), attention, output, allowed, pattern, tokens, layers)


def rounding_sizes(recording: Recording) -> tuple[LayerRounding, ...]:
    """What rounding added in each layer, relative to the residual of its token: the worst token, and the median."""
    shares = recording.roundings.norm(dim=-1) / recording.residuals[1:].norm(dim=-1).clamp_min(1e-30)
    shares = shares[:, _real(recording)]
    worst, median = shares.amax(dim=-1).tolist(), shares.median(dim=-1).values.tolist()
    return tuple(LayerRounding(*pair) for pair in zip(worst, median, strict=True))


PROBE = 16
"""Random tokens by which the rounding of a model in half precision is measured."""


def probe_rounding(model: Model) -> tuple[LayerRounding, ...]:
    """What rounding adds in each layer to a few tokens, drawn by a fixed seed; nothing in full precision.

    >>> import headtrace
    >>> len(probe_rounding(headtrace.load("builtin", dtype="bfloat16"))), probe_rounding(headtrace.load("builtin"))
    (3, ())
    """
    if not model.half:
        return ()
    drawn = torch.randint(model.d_vocab, (PROBE,), generator=torch.Generator().manual_seed(0))
    return model.record([drawn.tolist()]).check().rounding


def roundings_of(recording: Recording) -> list[float] | list[None]:
    """By prompt, the largest part of a residual that rounding added in one layer; None in full precision."""
    if not recording.model.half:
        return [None] * len(recording)
    shares = recording.roundings.norm(dim=-1) / recording.residuals[1:].norm(dim=-1).clamp_min(1e-30)
    return (shares * _real(recording)).amax(dim=(0, 2)).tolist()


_OF_THE_MODEL = (
    "The model does not add up the way its architecture says, so nothing that builds on it can be trusted. Is the "
    "model patched, quantised or of a variant that headtrace does not know?"
)
_OF_THE_RECORDING = (
    "Was the recording changed after it was made, or is it another prompt's? Record the prompt again."
)


def _worst(
    error: Tensor,
    allowed: float,
    what: str,
    names: tuple[str, ...],
    device: Callable[[], torch.device],
    advice: str = _OF_THE_MODEL,
) -> float:
    """The largest error, or an IdentityError that says where it is, and on which device. NaN counts as failure."""
    flat = int(torch.nan_to_num(error, nan=torch.inf).argmax())
    value = float(error.flatten()[flat])
    if not value <= allowed:
        place = torch.unravel_index(torch.tensor(flat), error.shape)
        where = ", ".join(f"{name} {int(i)}" for name, i in zip(names, place, strict=True))
        raise IdentityError(
            f"{what}: relative error {value:.2e} (allowed {allowed:.0e}) at {where}, computed on {str(device())!r}. "
            f"{advice}{_doubt(device())}"
        )
    return value


def _doubt(device: torch.device) -> str:
    """The CPU is what a device is held against."""
    if device.type == "cpu":
        return ""
    return (
        f" Or does {str(device)!r} compute wrongly? Load the model with device='cpu': if it adds up there, the device, "
        "its driver or this version of PyTorch is at fault."
    )


def _device_below(recording: Recording, layer: int) -> torch.device:
    """Where the layer runs that was the last to write before another one; at first, where tokens are embedded."""
    return recording.model.device_of(layer - 1) if layer else recording.model.device


class _FirstResidual(Observer):
    """Keeps what is there before the first layer; with or without what positions add."""

    residual: Tensor

    def __init__(self, positions: bool = True) -> None:
        self.positions = positions

    def position_embedding(self, write: Tensor) -> Tensor | None:
        return None if self.positions else torch.zeros_like(write)

    def layer_input(self, layer: int, residual: Tensor, rotary: Rotary | None) -> None:
        if layer == 0:
            self.residual = residual


@torch.inference_mode()
def check_tokens(recording: Recording, allowed: float | None = None) -> float:
    """The model's own embedding of the recorded tokens, compared with the first recorded residual."""
    allowed = tolerance_for(recording.model.dtype) if allowed is None else allowed
    seen, ends = _FirstResidual(), recording.logit_positions[:, -1:]
    # Without its layers, the model only embeds.
    forward(recording.model, recording.token_ids, seen, lengths=recording.lengths, keep=ends, layers=range(0))
    recorded = recording.residuals[0]
    error = (seen.residual - recorded).norm(dim=-1) / seen.residual.norm(dim=-1).clamp_min(1e-30)
    what = "The first residual is not the embedding of the recorded tokens"
    names = ("prompt", "position")
    worst = _worst(
        error * _real(recording), allowed, what, names, lambda: recording.model.device, _OF_THE_RECORDING
    )
    return max(worst, _check_positions(recording, allowed)) if recording.positions_apart else worst


def _check_positions(recording: Recording, allowed: float) -> float:
    """The model's own embedding without what positions add, compared with the recorded component of the tokens."""
    model, ends = recording.model, recording.logit_positions[:, -1:]
    if model.half:  # the model rounds the sum of the two, which is added up in float32 here
        allowed = max(allowed, rounding_bound(model, "residual"))
    seen = _FirstResidual(positions=False)
    forward(model, recording.token_ids, seen, lengths=recording.lengths, keep=ends, layers=range(0))
    size = recording.residuals[0].norm(dim=-1) + recording.tensors["position_embedding"].norm(dim=-1)
    error = (seen.residual - recording.embedding).norm(dim=-1) / size.clamp_min(1e-30)
    facts = model.architecture
    what = (
        f"What {facts.position_embedding!r} gives is not added to the token embeddings as it is, as the facts of "
        f"{facts.name} say (position_embedding)"
    )
    worst = _worst(error * _real(recording), allowed, what, ("prompt", "position"), lambda: model.device)
    return 0.0 if model.half else worst


def require_rounding(
    recording: Recording, what: str, rounding: Tensor, whole: Tensor, layer: int | None = None
) -> None:
    """The rounding parts of a model in half precision are no larger than rounding can be; else it is something else."""
    real = _real(recording)
    size = torch.linalg.vector_norm(whole, dim=-1)
    if what != "residual":
        size = size.amax(dim=-1, keepdim=True)
    share = torch.linalg.vector_norm(rounding, dim=-1) / size.clamp_min(1e-30)
    share = share * (real if share.ndim != 3 or what == "residual" else real[:, None])
    dtype, bound = recording.model.hf.dtype, rounding_bound(recording.model, what)
    value = float(torch.nan_to_num(share, nan=torch.inf).max())
    if not value <= bound:
        where = "" if layer is None else f" of layer {layer}"
        device = recording.model.device if layer is None else recording.model.device_of(layer)
        raise IdentityError(
            f"What is left of the {what}{where} when all components are taken away is {value:.2g} of the whole: more "
            f"than rounding to {dtype_name(dtype)} can be (at most {bound:.2g}), computed on "
            f"{str(device)!r}. {_OF_THE_MODEL} Load it in float32 to see whether it adds up there.{_doubt(device)}"
        )


def _real(recording: Recording) -> Tensor:
    """Which positions belong to a prompt, not to padding."""
    positions = torch.arange(recording.token_ids.shape[1], device=recording.token_ids.device)
    return positions < torch.tensor(recording.lengths, device=positions.device)[:, None]


def _residual_error(
    recording: Recording, total: Tensor, size: Float[Tensor, "batch token"], layer: int, allowed: float
) -> float:
    error = (total - recording.residuals[layer]).norm(dim=-1) / size.clamp_min(1e-30)
    what, names = f"The components do not sum to the residual at layer {layer}", ("prompt", "position")
    return _worst(error * _real(recording), allowed, what, names, lambda: _device_below(recording, layer))


def folded_queries_keys(
    recording: Recording, residual: Float[Tensor, "batch token d_model"], layer: int
) -> tuple[Tensor, Tensor]:
    """Queries and keys computed from a residual through the folded weights and the frozen scales."""
    weights = recording.model.weights
    xhat = residual / recording.norm_scales[layer][..., None]
    q = torch.einsum("btd,hdr->bhtr", xhat, weights.W_Q[layer]) + weights.b_Q[layer][:, None]
    k = torch.einsum("btd,hdr->bhtr", xhat, weights.W_K[layer]) + weights.b_K[layer][:, None]
    if recording.query_scales is not None and recording.key_scales is not None:
        q, k = q / recording.query_scales[layer][..., None], k / recording.key_scales[layer][..., None]
    rotary = recording.rotary[layer]
    return (q, k) if rotary is None else (rotary.rotate(q), rotary.rotate(k))


def _attention_error(recording: Recording, total: Tensor, layer: int, allowed: float) -> float:
    q, k = folded_queries_keys(recording, total, layer)
    k = k.repeat_interleave(recording.model.weights.group, dim=1)
    folded = (q @ k.transpose(-1, -2)) * recording.scales[layer]
    recorded = recording.raw_logits(layer)
    hidden = ~recording.visible[layer][:, None]
    size = recorded.masked_fill(hidden, 0).abs().amax(dim=-1).clamp_min(1.0)
    error = (folded - recorded).masked_fill_(hidden, 0).abs_().amax(dim=-1) / size
    what = f"Folded queries and keys do not give the attention logits of layer {layer}"
    names, real = ("prompt", "head", "position"), _real(recording)[:, None]
    return _worst(error * real, allowed, what, names, lambda: recording.model.device_of(layer))


@torch.inference_mode()
def check_values(recording: Recording) -> float:
    """Values are what the folded weights read from the residual: the largest relative error, or an IdentityError.

    Attention logits do not depend on them, so nothing else shows an adapter or a hook that changes values, and what it
    adds to a norm's bias would be called a head's. Each head's values are compared along one fixed random direction,
    which costs a d_head-th of computing them.
    """
    model, weights = recording.model, recording.model.weights

    def along() -> tuple[Tensor, Tensor, Tensor]:
        shape, generator = weights.b_V.shape, torch.Generator().manual_seed(0)
        drawn = torch.randn(shape, generator=generator, device="cpu").to(weights.b_V)
        drawn = drawn / drawn.norm(dim=-1, keepdim=True)
        return drawn, (weights.W_V @ drawn[..., None])[..., 0].mT, (weights.b_V * drawn).sum(-1)

    direction, reads, offset = model.cached("values along a direction", along)
    read = (
        recording.residuals[:-1].flatten(1, 2) @ reads / recording.norm_scales[:-1].flatten(1, 2)[..., None]
    )
    expected = (read + offset[:, None]).mT.unflatten(2, recording.token_ids.shape)
    found = (recording.values.transpose(1, 2) @ direction[:, :, None, :, None])[..., 0]
    # Relative to what is added up, not to what is left of it where it cancels.
    lengths = recording.residuals[:-1].norm(dim=-1) / recording.norm_scales[:-1]
    most = (weights.W_V.square().sum((-1, -2)) / weights.W_V.shape[-1]).sqrt()
    size = recording.values.transpose(1, 2).norm(dim=-1).amax(dim=(-1, -2)) + weights.b_V.norm(dim=-1)
    size = torch.maximum(size[..., None, None], lengths[:, None] * most[..., None, None])
    error = (found - expected).abs() / size.clamp_min(1e-30) * _real(recording)
    allowed = rounding_bound(model, "values") if model.half else tolerance_for(model.dtype)
    layer = int(error.amax(dim=(1, 2, 3)).nan_to_num(nan=torch.inf).argmax())
    what = f"The values of layer {layer} are not what its weights read"
    names, advice = ("KV head", "prompt", "position"), f"{_OF_THE_MODEL} {_HOOKED}"
    return _worst(error[layer], allowed, what, names, lambda: model.device_of(layer), advice)


_HOOKED = "Does it have an adapter that is not merged, or a hook that changes what a projection returns?"


def _pattern_error(recording: Recording, layer: int, allowed: float) -> float:
    """Errors of logits grow with their size, and a softmax passes them on: so they are relative to it."""
    recorded = recording.pattern(layer)
    size = recording.raw_logits(layer).masked_fill_(~recording.visible[layer][:, None], 0).abs_()
    error = (recording.attention_logits(layer).softmax(dim=-1) - recorded).abs_().amax(dim=-1)
    error = error / size.amax(dim=-1).clamp_min(1.0)
    what = f"Attention logits and mask do not give the attention patterns of layer {layer}"
    names = ("prompt", "head", "position")
    # Behind a short prompt, padding may see nothing through a window: that is not a number, and no error.
    error = error.masked_fill(~_real(recording)[:, None], 0.0)
    return _worst(error, allowed, what, names, lambda: recording.model.device, _OF_THE_RECORDING)


def typical_reading(model: Model) -> float:
    """The root mean square, over the vocabulary, of how long a token's reading of the normed residual is: what a write
    of length one gives at most in a typical logit."""
    gained = model.weights.W_U * model.weights.final_gain
    return float(gained.square().sum(dim=-1).mean().sqrt())


def output_logits(
    recording: Recording, residual: Float[Tensor, "batch kept d_model"], scale: Float[Tensor, "batch kept"]
) -> Float[Tensor, "batch kept vocab"]:
    """Output logits of a final residual, with the final norm's scale frozen."""
    model, weights = recording.model, recording.model.weights
    normed = model.architecture.centred_at_the_end(residual) / scale[..., None] * weights.final_gain
    return softcap(normed @ weights.W_U.T + weights.output_bias, model.final_softcap)


def _output_error(
    recording: Recording, total: Tensor, written: Float[Tensor, "batch token"], allowed: float
) -> float:
    where = recording.logit_positions
    scale = recording.norm_scales[-1].gather(1, where)
    kept = total.gather(1, where[..., None].expand(-1, -1, total.shape[-1]))
    largest = recording.logits.abs().amax(dim=-1)
    size = torch.maximum(largest, written.gather(1, where) * typical_reading(recording.model) / scale)
    error = (output_logits(recording, kept, scale) - recording.logits).abs().amax(dim=-1) / size.clamp_min(
        1e-30
    )
    real = _real(recording).gather(1, where)
    what = "The shares at the final norm do not give the output"
    hf: Any = recording.model.hf
    return _worst(
        error * real,
        allowed,
        what,
        ("prompt", "position"),
        lambda: device_of(hf.get_output_embeddings()),
    )
