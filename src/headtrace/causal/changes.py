"""A recorded prompt run once more with some of its parts changed, all at once, and continued.

>>> import headtrace
>>> from headtrace.vocabulary import Site
>>> model = headtrace.load("builtin")
>>> recording = model.record("When Mary and John went to the store, John gave a drink to")
>>> changed = rerun(recording, [ComponentChange(Site("head", 1, 2, dest=14)), ComponentChange(Site("head", 1, 3))])
>>> recording.top_answers(1)[0][0], "Mary" in (token for token, *_ in changed.top_answers(1))
('Mary', False)
>>> len(continued(recording, 3, [ComponentChange(Site("head", 1, 3))]))
3

A *signal* is changed as `headtrace.causal.intervene` changes it: what it was in the recording, times ``factor - 1``, is
added where its firing reads it (local) or to what its component writes (global). A *component* is changed live: what
it writes in this very run, with everything below it changed, is multiplied by its factor. Changes of one thing
multiply. What a layer's heads write is changed before the norm that some models put behind attention; a head's part of
the value bias is no head's, but the layer's ``attention_bias``.

When tokens are appended, a change at a position stays at that position; one without a position (``dest=None``) also
holds at every new token; a signal is one of the prompt, and changes nothing at new ones (they see its effect on the
keys and values of the prompt).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headtrace.causal.edges import ABLATE, Reach, edit
from headtrace.causal.edits import Intervention, observers_of
from headtrace.causal.measuring import check_options
from headtrace.causal.signals import Signal
from headtrace.errors import InputError
from headtrace.models.attention import per_query_head
from headtrace.models.checks import require_same_weights
from headtrace.models.forward import continue_greedily
from headtrace.models.observer import AttentionCall, NormPlace, Observer, Rotary
from headtrace.models.record import record
from headtrace.models.weights import norm_eps, norm_scale
from headtrace.vocabulary import Component, Kind, Site

if TYPE_CHECKING:
    from headtrace.models import Recording

KEPT = ("patterns", "residuals")
"""What a changed run keeps: enough for attention and every metric. Its components do not add up: no more is kept."""


@dataclass(frozen=True)
class SignalChange:
    """What a component writes into the channels that a firing reads, times ``factor``."""

    signal: Signal
    factor: float = ABLATE
    reach: Reach = "local"


@dataclass(frozen=True)
class ComponentChange:
    """What a head, an MLP, the embedding or an attention bias writes, times ``factor``, for every reader.

    Without ``dest`` the site is everywhere; a head without ``src`` is all that it writes there.
    """

    site: Site
    factor: float = ABLATE


Change = SignalChange | ComponentChange
"""Either of the two, wherever changes are asked for."""

_LAYERED: tuple[Kind, ...] = ("head", "mlp", "attention_bias")


@torch.inference_mode()
def rerun(recording: Recording, changes: Sequence[Change], *, keep: Iterable[str] | None = KEPT) -> Recording:
    """The recorded prompt (one) in the model with all these changes, in one forward pass."""
    in_prompt, everywhere = _observers(recording, changes)
    model = recording.model
    with model.assume_weights_unchanged():
        return record(
            model,
            recording.token_ids,
            recording.lengths,
            last_logits=recording.logits.shape[1],
            keep=keep,
            observers=(*in_prompt, everywhere),
        )


def continued(recording: Recording, n: int, changes: Sequence[Change] = ()) -> list[int]:
    """The ``n`` tokens that follow a recorded prompt (one) under these changes, the likeliest each time."""
    if n < 1:
        raise InputError(f"n={n}: expected at least 1 token to continue with.")
    model = recording.model
    most = model.max_positions
    if most is not None and recording.lengths[0] + n > most:
        raise InputError(
            f"{recording.lengths[0]} tokens and {n} more are beyond the context of {model.name!r}, which is {most}."
        )
    in_prompt, everywhere = _observers(recording, changes)
    with model.assume_weights_unchanged():
        return continue_greedily(model, recording.token_ids, n, everywhere, prompt_only=in_prompt)


def _observers(recording: Recording, changes: Sequence[Change]) -> tuple[list[Observer], Factors]:
    """What acts in the pass over the prompt alone, and what acts wherever its components write."""
    if len(recording) != 1:
        raise InputError(f"The recording has {len(recording)} prompts: choose one, like recording[0].")
    require_same_weights(recording)
    for change in changes:
        _check(recording, change)
    signals = [change for change in changes if isinstance(change, SignalChange)]
    edits = tuple(edit(recording, each.signal, each.factor, each.reach) for each in signals)
    local: list[Observer] = [*observers_of(recording, [Intervention(edits)])] if edits else []
    return local, Factors(recording, [each for each in changes if isinstance(each, ComponentChange)])


class Factors(Observer):
    """Multiplies what components write, at the tokens of this pass: those that follow the ones it saw before."""

    def __init__(self, recording: Recording, changes: Sequence[ComponentChange]) -> None:
        self.model = recording.model
        self.first = self.end = 0
        self.changes: dict[tuple[Kind, int], list[ComponentChange]] = {}
        for change in changes:
            place = (change.site.kind, change.site.layer or 0)
            self.changes.setdefault(place, []).append(change)
        self.scales: dict[int, Tensor] = {}

    def wants(self, place: str) -> bool:
        needed: dict[str, Kind] = {"mlp_write": "mlp", "attention_write": "attention_bias"}
        needed |= {"norm_input": "attention_bias", "mix": "head"}
        kinds = {kind for kind, _ in self.changes}
        return super().wants(place) and (place not in needed or needed[place] in kinds)

    def _factor(self, kind: Kind, layer: int, like: Tensor) -> Float[Tensor, "token 1"] | None:
        """What each token's write is multiplied by; None where nothing changes."""
        changes = self.changes.get((kind, layer))
        if not changes:
            return None
        factor = like.new_ones(self.end - self.first, 1)
        for change in changes:
            factor[self._tokens(change.site.dest)] *= change.factor
        return factor

    def _tokens(self, dest: int | None) -> slice:
        """A position among the tokens of this pass: all of them, one, or none."""
        if dest is None:
            return slice(None)
        here = dest - self.first
        return slice(here, here + 1) if 0 <= here < self.end - self.first else slice(0)

    def layer_input(self, layer: int, residual: Tensor, rotary: Rotary | None) -> Tensor | None:
        if layer:
            return None
        self.first, self.end = self.end, self.end + residual.shape[1]
        factor = self._factor("embedding", 0, residual)
        return None if factor is None else residual * factor

    def mlp_write(self, layer: int, write: Tensor) -> Tensor | None:
        factor = self._factor("mlp", layer, write)
        return None if factor is None else write * factor

    def norm_input(self, place: NormPlace, layer: int, x: Tensor, norm: nn.Module) -> None:
        if place == "attention_post_norm" and ("attention_bias", layer) in self.changes:
            self.scales[layer] = norm_scale(x, norm_eps(norm), self.model.architecture.norm)[..., None]

    def attention_write(self, layer: int, write: Tensor) -> Tensor | None:
        factor = self._factor("attention_bias", layer, write)
        if factor is None:
            return None
        return write + (factor - 1) * (self.model.weights.attention_bias[layer] / self.scales.get(layer, 1.0))

    def mix(self, call: AttentionCall, pattern: Tensor) -> Float[Tensor, "batch head dest d_head"] | None:
        changes = self.changes.get(("head", call.layer))
        if not changes:
            return None
        weights, n_src = self.model.weights, pattern.shape[-1]
        mixed = torch.matmul(pattern, per_query_head(call.value, pattern.shape[1]))
        for head in {change.site.head or 0 for change in changes}:
            factor = pattern.new_ones(pattern.shape[-2:])
            for change in (each for each in changes if each.site.head == head):
                src = change.site.src
                # A window may have dropped the first keys: the last one is always that of the last token.
                place = slice(None) if src is None else src - (self.end - n_src)
                if isinstance(place, slice) or 0 <= place < n_src:
                    factor[self._tokens(change.site.dest), place] *= change.factor
            kv = head // weights.group
            bare = call.value[:, kv] - weights.b_V[call.layer, kv]
            mixed[:, head] += (pattern[:, head] * (factor - 1)) @ bare
        return mixed


# -- what can be wrong with a change -------------------------------------------------------------------------


def _check(recording: Recording, change: Change) -> None:
    """Said before anything runs."""
    if not math.isfinite(change.factor):
        raise InputError(f"factor={change.factor}: expected a finite number, like 0 (ablate) or 2 (double).")
    if isinstance(change, ComponentChange):
        _check_site(recording, change.site)
        return
    check_options(0, change.reach, "claim")
    signal, model = change.signal, recording.model
    recording.check_firing(signal.firing)
    wrong = [channel for channel in signal.channels if not 0 <= channel < model.d_head]
    if wrong:
        raise InputError(f"There is no channel {wrong[0]}: heads have channels 0 to {model.d_head - 1}.")
    component = signal.component
    if component.kind == "offset":
        return
    if component.kind == "head" and component.src is None:
        raise InputError(f"{component}: the signal of a head is of one source that it read. Name it (src).")
    _check_component(recording, component)
    if component.kind in _LAYERED and (component.layer or 0) >= signal.firing.layer:
        raise InputError(f"{signal.firing} does not read {component}: it is not below it.")


def _check_component(recording: Recording, component: Component) -> None:
    model = recording.model
    if component.kind not in (*_LAYERED, "embedding"):
        raise InputError(
            f"A {component.kind} is nothing that writes: change a head, an mlp, an embedding or an attention_bias."
        )
    layer, head = component.layer, component.head
    if component.kind in _LAYERED and (layer is None or not 0 <= layer < model.n_layers):
        raise InputError(
            f"{component.kind} of layer {layer}: the model has layers 0 to {model.n_layers - 1}. Name one of them."
        )
    if component.kind == "head" and (head is None or not 0 <= head < model.n_heads):
        raise InputError(
            f"Head {head} of layer {layer}: it has heads 0 to {model.n_heads - 1}. Name one of them."
        )
    if component.src is not None and not 0 <= component.src < recording.lengths[0]:
        raise InputError(_outside(component.src, recording))


def _check_site(recording: Recording, site: Site) -> None:
    _check_component(recording, site.component)
    if site.dest is not None and not 0 <= site.dest < recording.lengths[0]:
        raise InputError(_outside(site.dest, recording))
    if site.kind == "head" and site.dest is not None and site.src is not None:
        recording.check_firing(site.firing)


def _outside(position: int, recording: Recording) -> str:
    return f"Position {position} is outside the prompt, which has positions 0 to {recording.lengths[0] - 1}."
