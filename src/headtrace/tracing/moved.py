"""What a head moved: the part of its write that came from one source, read as tokens and against a root.

>>> import headtrace
>>> from headtrace.models.frozen import CONTENT_FIELDS
>>> model = headtrace.load("builtin")
>>> tracer = headtrace.Tracer(model)
>>> recording = model.record("When Mary and John went to the store, John gave a drink to", keep=CONTENT_FIELDS)
>>> question = tracer.ask(recording.token_ids[0], answer=" Mary", wrong=" John")
>>> found = moved(recording, "L1H2:14:2", question.root)
>>> found.promotes[0][0], found.measure, found.contribution > 1
('Mary', 'logit difference', True)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.errors import IdentityError, InputError
from headtrace.models.frozen import Level, levels, mlp_rounding
from headtrace.models.identities import tolerance_for
from headtrace.roots import Root
from headtrace.tracing.attribute_root import ReadPoint, attribute_root
from headtrace.tracing.firing import IG_STEPS
from headtrace.vocabulary import Firing

if TYPE_CHECKING:
    from headtrace.models import Recording


@dataclass(frozen=True)
class Moved:
    """What a head wrote at the destination of a firing from its source."""

    firing: Firing
    norm: float
    """Its length, relative to that of the residual at the input of the layer, into which it is written."""
    promotes: tuple[tuple[str, float], ...]
    """The tokens that it raises most if it is read straight through the final norm (its scale frozen) and the
    unembedding, with the logits that it adds; strongest first."""
    suppresses: tuple[tuple[str, float], ...]
    """Those that it lowers most."""
    contribution: float | None = None
    """To the root, on all ways through frozen attention, norms and gates, in the unit of the root."""
    measure: str | None = None
    """What the contribution is measured in."""


@torch.inference_mode()
def moved(
    recording: Recording,
    firing: Firing | str,
    root: Root | None = None,
    *,
    prompt: int = 0,
    k: int = 8,
    ig_steps: int = IG_STEPS,
) -> Moved:
    """What a firing moved, with the ``k`` tokens that it raises and lowers most.

    With a root (``tracer.ask(...).root``) also what it contributes to it, for which the recording must have kept what
    MLPs read (``keep=headtrace.models.frozen.CONTENT_FIELDS``).
    """
    firing = Firing.parse(firing)
    recording.check_firing(firing, prompt)
    if k < 1:
        raise InputError(f"k={k}: expected at least 1 token.")
    prompt %= len(recording)
    written = recording.write(firing.site.component, prompt)[firing.dest]
    residual = recording.residuals[firing.layer, prompt, firing.dest]
    logits = ReadPoint(recording, prompt, firing.dest, recording.model.n_layers).logits_of(written[None])[0]
    contribution = None
    if root is not None:
        onto = attention_gradient(recording, root, firing.layer, prompt, ig_steps, first=firing.dest)
        contribution = float(written @ onto[firing.dest - recording.lengths[prompt]])
    return Moved(
        firing,
        float(written.norm() / residual.norm()),
        _extremes(recording, logits, k),
        tuple((token, -value) for token, value in _extremes(recording, -logits, k)),
        contribution,
        None if root is None else root.measure,
    )


def _extremes(recording: Recording, logits: Float[Tensor, " vocab"], k: int) -> tuple[tuple[str, float], ...]:
    values, ids = logits.topk(min(k, len(logits)))
    return tuple(zip(recording.model.token_labels(ids.tolist()), values.tolist(), strict=True))


@torch.inference_mode()
def attention_gradient(
    recording: Recording,
    root: Root,
    layer: int,
    prompt: int = 0,
    ig_steps: int = IG_STEPS,
    *,
    first: int = 0,
) -> Float[Tensor, "token d_model"]:
    """The direction, at every token from ``first`` on, along which what a layer's attention writes contributes to a
    root.

    The frozen model is swept from the top to that layer and from the last token to the first that is asked for, no
    further; what is read there and what was written behind must sum to what the root reads.
    """
    one = recording if len(recording) == 1 else recording[prompt]
    first = 0 if one.model.half else first  # what rounding did is known of whole layers only
    start = torch.zeros_like(one.residuals)
    for part in attribute_root(root, one, 0, ig_steps).parts:
        start[part.point.layer, 0, part.point.position] += part.direction
    others: list[Tensor] = []
    for level in levels(one, start, first):
        others += _beside(one, level, first)
        if level.layer == layer:
            _require_sum(one, start, layer, first, level.below, others)
            return level.attention[0]
    raise InputError(f"There is no layer {layer}: the model has layers 0 to {recording.model.n_layers - 1}.")


def _beside(recording: Recording, level: Level, first: int) -> list[Float[Tensor, "batch token"]]:
    """What a layer contributes without the residual from ``first`` on: its biases, what heads move from before, and
    what rounding did."""
    layer = level.layer
    bias = (recording.attention_bias(layer)[:, first:] * level.attention).sum(-1)
    values = recording.bare_values[layer].transpose(0, 1)[:, :, :first]
    before = recording.pattern(layer)[:, :, first:, :first] * (level.values @ values.transpose(-1, -2))
    found = [level.pulled.constant, bias, before.sum((1, 3))]
    return [*found, _rounding(recording, level)] if recording.model.half else found


def _rounding(recording: Recording, level: Level) -> Float[Tensor, "batch token"]:
    """What rounding in a layer of a model in half precision contributes."""
    layer, group = level.layer, recording.model.weights.group
    values = recording.value_roundings(layer).repeat_interleave(group, dim=1)
    read = (recording.pattern(layer) * (level.values @ values.transpose(-1, -2))).sum((1, 2))
    written = recording.roundings[layer] + mlp_rounding(recording, layer)
    return read + (written * level.mlp).sum(-1)


def _require_sum(
    recording: Recording, start: Tensor, layer: int, first: int, below: Tensor, others: list[Tensor]
) -> None:
    """The residual below a layer, and all that is not of it from there on, give what the root reads from there on."""
    parts = torch.cat(((recording.residuals[layer, :, first:] * below).sum(-1), *others))
    found, read = float(parts.sum()), recording.residuals[layer:, :, first:] * start[layer:, :, first:]
    recorded, size = float(read.sum()), float(parts.abs().sum())
    error = abs(found - recorded) / max(size, abs(recorded), 1e-30)
    if not error <= tolerance_for(recording.model.dtype):
        raise IdentityError(
            f"What passes layer {layer} contributes {found:.6g} to the root, which reads {recorded:.6g}: relative "
            f"error {error:.1e}, allowed {tolerance_for(recording.model.dtype):.0e}."
        )
