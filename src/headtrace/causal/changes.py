"""What can be changed in a running model: a small set of changes, each a frozen dataclass.

- ``SignalChange``: a signal (what a component writes into channels that a firing reads) is multiplied by a factor, for
  its one reader (local) or for every reader (global). The signal is that of the recording.
- ``ComponentChange``: what a component writes in this very run, with everything below it changed, times a factor.
- ``Patch``: components take what they had in another run, or a fixed value. With ``all_but`` every component except
  the named ones does: that is how only a circuit is kept.
- ``LocalEdit``, ``GlobalEdit``, ``MlpInputEdit``: a vector is added to a firing's query or keys, to what a component
  writes, or to what an MLP reads.
- ``DirectionRemoval``: directions are projected out of what queries or keys read.

An ``Intervention`` is a set of changes that act together; `headtrace.causal.execute` runs many at once. What a layer's
heads write is changed before the norm that some models put behind attention. A head's share of the value bias belongs
to no head, but to the layer's ``attention_bias``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headtrace.causal.signals import ABLATE, Scope, Signal, coefficients
from headtrace.errors import InputError
from headtrace.vocabulary import AttentionSide, Component, Firing, Kind, Site

if TYPE_CHECKING:
    from headtrace.models import Model, Recording

Reach = Literal["local", "global"]
_LAYERED: tuple[Kind, ...] = ("head", "mlp", "attention_bias")


# -- scaling ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SignalChange:
    """Multiplies what a component writes into the channels that a firing reads by ``factor``."""

    signal: Signal
    factor: float = ABLATE
    reach: Reach = "local"
    scope: Scope = "claim"

    @property
    def layer(self) -> int:
        """The first layer that is changed."""
        return self.signal.firing.layer if self.reach == "local" else self.signal.component.layer or 0


@dataclass(frozen=True)
class ComponentChange:
    """Multiplies what a head, an MLP, the embedding, a position or an attention bias writes by ``factor``, for
    every reader.

    Without ``dest`` the site is everywhere; a head without ``src`` is all that it writes there.
    """

    site: Site
    factor: float = ABLATE

    @property
    def layer(self) -> int:
        """The layer of the component; 0 for the embedding."""
        return self.site.layer or 0


Change = SignalChange | ComponentChange
"""A change by a factor."""


# -- adding ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalEdit:
    """Added to one firing's query, or to the keys that its head sees from its destination."""

    firing: Firing
    query: Float[Tensor, " d_head"] | None = None
    keys: Float[Tensor, "token d_head"] | None = None

    @property
    def layer(self) -> int:
        """The layer of the firing that is changed."""
        return self.firing.layer


@dataclass(frozen=True)
class GlobalEdit:
    """Added to a component's write."""

    component: Component
    write: Float[Tensor, "token d_model"]

    @property
    def layer(self) -> int:
        """The layer of the component whose write is changed; 0 for the embedding."""
        return self.component.layer or 0


@dataclass(frozen=True)
class MlpInputEdit:
    """Added to what one MLP reads at one token, after its norm."""

    layer: int
    position: int
    added: Float[Tensor, " d_model"]


def edit(
    recording: Recording,
    signal: Signal,
    factor: float = ABLATE,
    reach: Reach = "local",
    scope: Scope = "claim",
) -> LocalEdit | GlobalEdit:
    """Multiply a signal by ``factor`` (0 ablates it, 2 boosts it), for its reader only or for every reader."""
    reader, values = coefficients(recording, signal, scope)
    change = (factor - 1) * values
    if reach == "global":
        if signal.component.kind == "offset":
            raise InputError(
                f"The offset of {signal.firing} is the head's own bias: no component writes it, so a global "
                "intervention has nothing to change. Use a local one."
            )
        return GlobalEdit(signal.component, reader.in_residual(change))
    moved = reader.in_head(change)
    if signal.side == "query":
        return LocalEdit(signal.firing, query=moved[signal.firing.dest])
    return LocalEdit(signal.firing, keys=moved)


# -- patching --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class OtherRun:
    """What every component wrote in another run of the same length: with that run's attention and values."""

    patterns: Float[Tensor, "layer head dest src"]
    values: Float[Tensor, "layer head src d_head"]
    """Value vectors without their bias, one per query head."""
    mlp_writes: Float[Tensor, "layer token d_model"] | None = None
    embeddings: Float[Tensor, "token d_model"] | None = None

    @classmethod
    def of(cls, recording: Recording) -> OtherRun:
        """From a recording of one prompt with patterns and values; MLPs and embeddings where they were kept."""
        weights, kept = recording.model.weights, recording.tensors
        with torch.inference_mode(False):  # tensors made in inference mode cannot take part in a gradient
            values = recording.values[:, 0].clone() - weights.b_V[:, :, None]
            return cls(
                recording.patterns[:, 0].clone(),
                values.repeat_interleave(weights.group, dim=1),
                recording.mlp_writes[:, 0].clone() if "mlp_writes" in kept else None,
                recording.residuals[0, 0].clone() if "residuals" in kept else None,
            )

    def mixture(
        self,
        layer: int,
        pattern: Float[Tensor, "copy head dest src"],
        share: Float[Tensor, "copy head dest src"],
    ) -> Float[Tensor, "copy head dest d_head"]:
        """What the replaced components of a layer add to its mixture of values, without the bias."""
        return (self.patterns[layer] * share) @ self.values[layer]

    def write(self, kind: Kind, layer: int) -> Float[Tensor, "token d_model"]:
        """What an MLP or the embedding writes in its place."""
        found = self.embeddings if kind == "embedding" else self.mlp_writes
        if found is None:
            raise InputError(
                f"The other run was recorded without what patching a {kind} needs: record it again without keep=."
            )
        return found if kind == "embedding" else found[layer]


@dataclass(frozen=True, eq=False)
class FixedValues:
    """A mean or zero value vector per head, attended to as the patched run attends, and a write per MLP."""

    vectors: Float[Tensor, "layer head d_head"]
    """Value vectors without their bias, one per query head."""
    mlp_writes: Float[Tensor, "layer d_model"] | None = None

    @classmethod
    def of(cls, recording: Recording, ablation: str) -> FixedValues:
        """``mean`` over all positions of all prompts of a recording, or ``zero`` (the value bias is no head's)."""
        weights, n = recording.model.weights, recording.lengths
        bias = weights.b_V.repeat_interleave(weights.group, dim=1)
        has_mlps = "mlp_writes" in recording.tensors
        with torch.inference_mode(False):
            if ablation == "zero":
                mlps = recording.mlp_writes[:, 0, 0] if has_mlps else None
                return cls(torch.zeros_like(bias), None if mlps is None else torch.zeros_like(mlps))
            values = torch.cat([recording.values[:, b, :, :end] for b, end in enumerate(n)], dim=2).mean(
                dim=2
            )
            mlps = None
            if has_mlps:
                mlps = torch.cat([recording.mlp_writes[:, b, :end] for b, end in enumerate(n)], dim=1).mean(
                    dim=1
                )
            return cls(values.repeat_interleave(weights.group, dim=1) - bias, mlps)

    def mixture(
        self,
        layer: int,
        pattern: Float[Tensor, "copy head dest src"],
        share: Float[Tensor, "copy head dest src"],
    ) -> Float[Tensor, "copy head dest d_head"]:
        """What the replaced components of a layer add to its mixture of values, without the bias."""
        return (pattern * share).sum(-1, keepdim=True) * self.vectors[layer][:, None]

    def write(self, kind: Kind, layer: int) -> Float[Tensor, " d_model"]:
        """What an MLP writes in its place."""
        if kind == "embedding" or self.mlp_writes is None:
            raise InputError(f"A {kind} cannot be replaced by its mean or by zero: patch heads and MLPs.")
        return self.mlp_writes[layer]


Source = OtherRun | FixedValues
"""What patched components write instead of their own."""


@dataclass(frozen=True, eq=False)
class Patch:
    """Sets components to their values in a source (another run, a mean, zero), while everything else runs live.

    Components are named by their sites (a head without ``dest`` or ``src`` everywhere, as in ``ComponentChange``), or,
    where there are thousands, by ``places``: indices into the flattened (layer, head, dest, src). ``all_but`` names
    kinds of components of which all but the named ones are patched: ``Patch(source, circuit, all_but=("head",))`` keeps
    only the circuit's heads.
    """

    source: Source
    sites: tuple[Site, ...] = ()
    places: Int[Tensor, " component"] | None = None
    all_but: tuple[Kind, ...] = ()

    @property
    def layer(self) -> int:
        """The first layer that may be patched. With ``all_but`` that is 0, even if every component is kept."""
        if self.all_but:
            return 0
        named = [site.layer or 0 for site in self.sites]
        return min(named, default=0) if self.places is None else 0

    def masks(self, model: Model, length: int) -> Mapping[Kind, Bool[Tensor, "*place"]]:
        """Which components are patched: (layer, head, dest, src) for heads, (layer, token) for MLPs, (token)."""
        shapes: dict[Kind, tuple[int, ...]] = {
            "head": (model.n_layers, model.n_heads, length, length),
            "mlp": (model.n_layers, length),
            "embedding": (length,),
        }
        kinds = {
            *self.all_but,
            *(site.kind for site in self.sites),
            *(() if self.places is None else ("head",)),
        }
        named: dict[Kind, Tensor] = {
            k: torch.zeros(shapes[k], dtype=torch.bool, device=model.device) for k in shapes if k in kinds
        }
        if self.places is not None:
            named["head"].view(-1)[self.places] = True
        for site in self.sites:
            place = {
                "head": (site.layer, site.head, site.dest, site.src),
                "mlp": (site.layer, site.dest),
                "embedding": (site.dest,),
            }[site.kind]
            named[site.kind][tuple(slice(None) if i is None else i for i in place)] = True
        return {kind: ~mask if kind in self.all_but else mask for kind, mask in named.items()}


# -- directions ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class DirectionRemoval:
    """Orthonormal directions projected out of what queries or keys read, in every layer from ``first_layer`` on.

    Norms act on what is left; values, MLPs and the residual stream itself keep everything. With ``instead`` other
    directions are removed, each token's removed part scaled to the length that ``directions`` would have removed.
    """

    side: AttentionSide
    directions: Float[Tensor, "*copy direction d_model"]
    first_layer: int
    positions: Bool[Tensor, "*copy token"]
    instead: Float[Tensor, "*copy direction d_model"] | None = None

    @property
    def layer(self) -> int:
        """The first layer that is changed."""
        return self.first_layer

    def part(self, x: Float[Tensor, "*copy token d_model"]) -> Float[Tensor, "*copy token d_model"]:
        """What is removed from residuals; zero outside ``positions``."""
        own = (x @ self.directions.mT) @ self.directions
        if self.instead is not None:
            other = (x @ self.instead.mT) @ self.instead
            size = torch.linalg.vector_norm(other, dim=-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
            own = other * (torch.linalg.vector_norm(own, dim=-1, keepdim=True) / size)
        return own * self.positions[..., None]


Edit = SignalChange | ComponentChange | LocalEdit | GlobalEdit | MlpInputEdit | Patch | DirectionRemoval
"""Anything that an intervention can change."""


@dataclass(frozen=True)
class Intervention:
    """Changes that act together in one copy of the prompt, and the firing whose attention is read."""

    edits: tuple[Edit, ...]
    firing: Firing | None = None
    sources: tuple[int, ...] | None = None
    """Where attention on several sources is read together: all of them."""

    @property
    def first_layer(self) -> int:
        """Where it begins; without changes, where attention is read."""
        unchanged = self.firing.layer if self.firing else 0
        return min((edit.layer for edit in self.edits), default=unchanged)

    def resolved(self, recording: Recording) -> Intervention:
        """The same with signals as the vectors that they have in a recording."""
        edits = (
            edit(recording, each.signal, each.factor, each.reach, each.scope)
            if isinstance(each, SignalChange)
            else each
            for each in self.edits
        )
        return replace(self, edits=tuple(edits))


# -- what can be wrong -----------------------------------------------------------------------------------------


def check_reach(reach: str, scope: str) -> None:
    """Raise ``InputError`` unless these are a ``Reach`` and a ``Scope``."""
    if reach not in ("local", "global"):
        raise InputError(f"reach={reach!r}: expected 'local' (one head) or 'global' (every reader).")
    if scope not in ("claim", "token"):
        raise InputError(f"scope={scope!r}: expected 'claim' (every visible key) or 'token' (one position).")


def check_factor(factor: float) -> None:
    """Raise ``InputError`` unless a factor is a finite number."""
    if not math.isfinite(factor):
        raise InputError(f"factor={factor}: expected a finite number, like 0 (ablate) or 2 (boost).")


def check_edit(recording: Recording, change: Edit) -> None:
    """Raise ``InputError``, before anything runs, for a change that names what the model or prompt does not have."""
    if isinstance(change, ComponentChange):
        check_factor(change.factor)
        _check_site(recording, change.site)
    elif isinstance(change, Patch):
        for site in change.sites:
            if site.kind in ("attention_bias", "position"):
                what = "an attention bias" if site.kind == "attention_bias" else "what a position adds"
                raise InputError(f"{site}: {what} is the same in every run. Patch another component.")
            _check_site(recording, site)
    elif isinstance(change, SignalChange):
        check_factor(change.factor)
        check_reach(change.reach, change.scope)
        _check_signal(recording, change.signal)


def _check_signal(recording: Recording, signal: Signal) -> None:
    model, component = recording.model, signal.component
    recording.check_firing(signal.firing)
    wrong = [channel for channel in signal.channels if not 0 <= channel < model.d_head]
    if wrong:
        raise InputError(f"There is no channel {wrong[0]}: heads have channels 0 to {model.d_head - 1}.")
    if component.kind == "offset":
        return
    if component.kind == "head" and component.src is None:
        raise InputError(f"{component}: a head's signal comes from one source position. Name it (src).")
    _check_component(recording, component)
    if component.kind in _LAYERED and (component.layer or 0) >= signal.firing.layer:
        raise InputError(f"{signal.firing} does not read {component}, which is not upstream of it.")


def _check_component(recording: Recording, component: Component) -> None:
    model, layer, head = recording.model, component.layer, component.head
    if component.kind not in (*_LAYERED, "embedding", "position"):
        raise InputError(
            f"A {component.kind} writes nothing that can be changed: choose a head, an mlp, an embedding, "
            "a position or an attention_bias."
        )
    if component.kind == "position":
        recording.write(component)  # says what is wrong in a model, or a recording, that has none
    if component.kind in _LAYERED and (layer is None or not 0 <= layer < model.n_layers):
        raise InputError(
            f"{component.kind} of layer {layer}: the model has layers 0 to {model.n_layers - 1}. Name one of them."
        )
    if component.kind == "head" and (head is None or not 0 <= head < model.n_heads):
        raise InputError(
            f"Head {head} of layer {layer}: it has heads 0 to {model.n_heads - 1}. Name one of them."
        )


def _check_site(recording: Recording, site: Site) -> None:
    _check_component(recording, site.component)
    length = recording.lengths[0]
    for position in (site.dest, site.src):
        if position is not None and not 0 <= position < length:
            raise InputError(
                f"Position {position} is outside the prompt, which has positions 0 to {length - 1}."
            )
    if site.kind == "head" and site.dest is not None and site.src is not None:
        recording.check_firing(site.firing)
