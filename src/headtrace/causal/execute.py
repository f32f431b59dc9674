"""Runs a model under changes (`headtrace.causal.changes`): many interventions in one pass, each in its own copy.

>>> import headtrace
>>> from headtrace.causal.changes import ComponentChange
>>> from headtrace.vocabulary import Site
>>> model = headtrace.load("builtin")
>>> recording = model.record("When Mary and John went to the store, John gave a drink to")
>>> changed = rerun(recording, [ComponentChange(Site("head", 1, 2, dest=14)), ComponentChange(Site("head", 1, 3))])
>>> recording.top_answers(1)[0][0], "Mary" in (token for token, *_ in changed.top_answers(1))
('Mary', False)
>>> len(continued(recording, 3, [ComponentChange(Site("head", 1, 3))]))
3

Layers below the first change are not run again: they would give what was recorded. When tokens are appended
(``continued``), a component changed at a position stays changed at that position, one without a position
(``dest=None``) is changed at every new token, too, and all other changes are of the prompt alone: new tokens see their
effect on the keys and values of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from headtrace.causal.changes import (
    ComponentChange,
    DirectionRemoval,
    Edit,
    GlobalEdit,
    Intervention,
    LocalEdit,
    MlpInputEdit,
    Patch,
    Source,
    check_edit,
)
from headtrace.causal.metric import Metric
from headtrace.errors import InputError
from headtrace.models.attention import per_query_head
from headtrace.models.forward import continue_greedily, forward
from headtrace.models.integrity import require_same_weights
from headtrace.models.observer import AttentionCall, NormPlace, Observer, Rotary
from headtrace.models.record import record
from headtrace.models.weights import norm_eps, norm_scale
from headtrace.progress import Progress
from headtrace.prompts import PASS_TOKENS, batches, cheapest_groups
from headtrace.vocabulary import AttentionSide, Kind

if TYPE_CHECKING:
    from headtrace.models import Model, Recording

_PLAIN = ("mlp", "embedding", "position")
"""Kinds that write at a token without looking at others."""
KEPT = ("patterns", "residuals")
"""What a changed run keeps: enough for attention and every metric. Its components do not add up: no more is kept."""


# -- the observer ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Replaced:
    """The share of each component that a source replaces, in some copies of a batch."""

    source: Source
    copies: Int[Tensor, " copy"]
    shares: dict[Kind, Sequence[Tensor]]
    """Layer by layer: (copy, head, dest, src) for heads, (copy, token) for MLPs and embeddings; 1 is replaced."""


@dataclass(frozen=True, eq=False)
class EditedRows:
    """Rows of one layer's attention scores: copy, head and destination, what is added to the query and to the keys."""

    place: tuple[Tensor, Tensor, Tensor]
    queries: Float[Tensor, "row d_head"] | None
    keys: Float[Tensor, "row token d_head"] | None


class Changes(Observer):
    """Makes the changes of many interventions in one pass, each in its own copy, and reads attention of their firings.

    ``scales`` are the attention scales of the layers (``recording.scales``), which local edits need. A continuation
    has passes over new tokens after the one over the prompt: ``continuing`` counts them.
    """

    def __init__(
        self,
        model: Model,
        length: int,
        interventions: Sequence[Intervention],
        scales: Sequence[float] = (),
        *,
        continuing: bool = False,
    ) -> None:
        self.model, self.length, self.scales, self.continuing = model, length, scales, continuing
        self.first, self.end = 0, 0 if continuing else length
        self.attention = torch.full((len(interventions),), torch.nan, dtype=model.dtype, device=model.device)
        self.post_norm_scales: dict[int, Tensor] = {}
        self.positions: Tensor | None = None
        self.scaled: dict[tuple[Kind, int], list[tuple[int, ComponentChange]]] = {}
        self.added: dict[tuple[str, int], Float[Tensor, "copy token d_model"]] = {}
        self.read: dict[int, tuple[Tensor, ...]] = {}
        local: list[tuple[int, LocalEdit]] = []
        patches: dict[int, list[tuple[int, Patch]]] = {}
        removals: dict[tuple[object, ...], list[tuple[int, DirectionRemoval]]] = {}
        shape = (len(interventions), length, model.d_model)
        for copy, intervention in enumerate(interventions):
            for edit in intervention.edits:
                match edit:
                    case ComponentChange(site=site):
                        self.scaled.setdefault((site.kind, edit.layer), []).append((copy, edit))
                    case LocalEdit():
                        local.append((copy, edit))
                    case GlobalEdit(component=component):
                        place = component.kind if component.kind in _PLAIN else "attention"
                        total = self.added.setdefault((place, edit.layer), edit.write.new_zeros(shape))
                        total[copy] += edit.write
                    case MlpInputEdit():
                        total = self.added.setdefault(("mlp_input", edit.layer), edit.added.new_zeros(shape))
                        total[copy, edit.position] += edit.added
                    case Patch():
                        patches.setdefault(id(edit.source), []).append((copy, edit))
                    case DirectionRemoval():
                        alike = edit.side, edit.first_layer, len(edit.directions), edit.instead is None
                        removals.setdefault(alike, []).append((copy, edit))
                    case _:
                        raise TypeError(f"{type(edit).__name__} has to be resolved with a recording first.")
        self.grouped = {i: what.sources for i, what in enumerate(interventions) if what.sources}
        for layer in {what.firing.layer for what in interventions if what.firing}:
            mine = [(i, what.firing) for i, what in enumerate(interventions) if what.firing]
            places = [(i, f.head, f.dest, f.src) for i, f in mine if f.layer == layer]
            self.read[layer] = torch.tensor(places, device=model.device).unbind(dim=1)
        self.edited = self._edited_rows(local)
        self.replaced = [self._stacked(group) for group in patches.values()]
        self.removed: list[tuple[list[int], DirectionRemoval]] = [
            (
                [copy for copy, _ in group],
                replace(
                    group[0][1],
                    directions=torch.stack([each.directions for _, each in group]),
                    positions=torch.stack([each.positions for _, each in group]),
                    instead=None
                    if group[0][1].instead is None
                    else torch.stack([each.instead for _, each in group if each.instead is not None]),
                ),
            )
            for group in removals.values()
        ]

    def _edited_rows(self, edits: Sequence[tuple[int, LocalEdit]]) -> dict[int, EditedRows]:
        """Local edits layer by layer. Edits that meet in one row of scores act together: (q + dq) . (k + dk)."""
        rows: dict[int, dict[tuple[int, int, int], list[LocalEdit]]] = {}
        for copy, edit in edits:
            f = edit.firing
            rows.setdefault(f.layer, {}).setdefault((copy, f.head, f.dest), []).append(edit)
        found: dict[int, EditedRows] = {}
        for layer, places in rows.items():
            queries = [sum(e.query for e in some if e.query is not None) for some in places.values()]
            keys = [sum(e.keys for e in some if e.keys is not None) for some in places.values()]
            copy, head, dest = torch.tensor(list(places), device=self.model.device).unbind(dim=1)
            found[layer] = EditedRows((copy, head, dest), _stack(queries), _stack(keys))
        return found

    def _stacked(self, group: Sequence[tuple[int, Patch]]) -> Replaced:
        """The patches of one source: masks of all copies, layer by layer."""
        masks = [patch.masks(self.model, self.length) for _, patch in group]
        shares: dict[Kind, Sequence[Tensor]] = {}
        kinds: list[Kind] = [kind for each in masks for kind in each]
        for kind in dict.fromkeys(kinds):
            like = next(each[kind] for each in masks if kind in each)
            every = torch.stack([each.get(kind, torch.zeros_like(like)) for each in masks])
            shares[kind] = [every] if kind == "embedding" else every.unbind(dim=1)
        copies = torch.tensor([copy for copy, _ in group], device=self.model.device)
        return Replaced(group[0][1].source, copies, shares)

    def watches(self, place: str) -> bool:
        return self._places.get(place, False)

    @cached_property
    def _places(self) -> dict[str, bool]:
        """Where there is something to change or to read."""
        added, scaled = {place for place, _ in self.added}, {kind for kind, _ in self.scaled}
        replaced = {kind for part in self.replaced for kind in part.shares}
        sides = {removal.side for _, removal in self.removed}
        return {
            "layer_input": self.continuing or bool({"embedding", "position"} & (added | scaled | replaced)),
            "position_embedding": bool({"embedding", "position"} & scaled),
            "query_input": "query" in sides,
            "key_input": "key" in sides,
            "edit_scores": bool(self.edited),
            "mix": "head" in scaled | replaced,
            "see": bool(self.read),
            "norm_input": "attention_bias" in scaled,
            "attention_write": "attention" in added or "attention_bias" in scaled,
            "mlp_input": "mlp_input" in added,
            "mlp_write": "mlp" in added | scaled | replaced,
        }

    # -- places ----------------------------------------------------------------------------------------------

    def position_embedding(self, write: Tensor) -> None:
        self.positions = write

    def layer_input(self, layer: int, residual: Tensor, rotary: Rotary | None) -> Tensor | None:
        if layer:
            return None
        if self.continuing:
            self.first, self.end = self.end, self.end + residual.shape[1]
        changed = self._written("embedding", 0, residual)
        factor = self._token_factors("position", 0, residual)
        if factor is not None and self.positions is not None:
            changed = (residual if changed is None else changed) + (factor - 1) * self.positions
        added = None if self.first else self.added.get(("position", 0))
        return changed if added is None else (residual if changed is None else changed) + added

    def query_input(self, layer: int, residual: Tensor) -> Tensor | None:
        return self._projected("query", layer, residual)

    def key_input(self, layer: int, residual: Tensor) -> Tensor | None:
        return self._projected("key", layer, residual)

    def _projected(self, side: AttentionSide, layer: int, residual: Tensor) -> Tensor | None:
        acting = [(copies, r) for copies, r in self.removed if r.side == side and layer >= r.first_layer]
        if not acting or self.first:
            return None
        changed = residual.clone()
        for copies, removal in acting:
            changed[copies] -= removal.part(residual[copies])
        return changed

    def edit_scores(self, call: AttentionCall, scores: Tensor) -> None:
        if call.layer not in self.edited or self.first:
            return
        rows = self.edited[call.layer]
        copy, head, dest = rows.place
        # Where the model scales queries itself, the recorded scale is not the one that attention is called with.
        scale = self.scales[call.layer]
        keys = call.key[copy, head // self.model.weights.group]
        added = call.query.new_zeros(len(copy), scores.shape[-1])
        if rows.queries is not None:
            seen = keys if rows.keys is None else keys + rows.keys
            added += (seen @ rows.queries[..., None])[..., 0] * scale
        if rows.keys is not None:
            added += (rows.keys @ call.query[copy, head, dest][..., None])[..., 0] * call.scale
        scores[copy, head, dest] += added

    def see(self, call: AttentionCall, pattern: Tensor) -> None:
        if call.layer in self.read and not self.first:
            copy, head, dest, src = self.read[call.layer]
            self.attention[copy] = pattern[copy, head, dest, src]
            for one, its_head, its_dest in zip(copy.tolist(), head.tolist(), dest.tolist(), strict=True):
                if one in self.grouped:
                    self.attention[one] = pattern[one, its_head, its_dest, list(self.grouped[one])].sum()

    def mix(self, call: AttentionCall, pattern: Tensor) -> Float[Tensor, "batch head dest d_head"] | None:
        layer, weights = call.layer, self.model.weights
        scaled = self.scaled.get(("head", layer), [])
        replaced = [] if self.first else [part for part in self.replaced if "head" in part.shares]
        if not scaled and not replaced:
            return None
        live = self._head_factors(scaled, pattern) if scaled else None
        taken: list[tuple[Tensor, Tensor]] = []
        for part in replaced:
            share = part.shares["head"][layer].to(pattern.dtype)
            if live is None and len(part.copies) == len(pattern):
                live, own = 1 - share, pattern
            else:
                live = torch.ones_like(pattern) if live is None else live
                live, own = (
                    live.index_copy(0, part.copies, live[part.copies] * (1 - share)),
                    pattern[part.copies],
                )
            taken.append((part.copies, part.source.mixture(layer, own, share)))
        assert live is not None
        # The value bias belongs to no head: it stays, whatever the heads' components are multiplied by.
        bias = weights.b_V[layer].repeat_interleave(weights.group, dim=0)[:, None]
        mixed = (pattern * live) @ (per_query_head(call.value, pattern.shape[1]) - bias) + bias
        for copies, values in taken:
            mixed = mixed.index_add(0, copies, values)
        return mixed

    def _head_factors(self, changes: Sequence[tuple[int, ComponentChange]], pattern: Tensor) -> Tensor:
        """What each (copy, head, dest, src) of a layer is multiplied by."""
        factor, n_src = torch.ones_like(pattern), pattern.shape[-1]
        for copy, change in changes:
            src = change.site.src
            # A window may have dropped the first keys: the last one is always that of the last token.
            place = slice(None) if src is None else src - (self.end - n_src)
            if isinstance(place, slice) or 0 <= place < n_src:
                factor[copy, change.site.head or 0, self._tokens(change.site.dest), place] *= change.factor
        return factor

    def _tokens(self, dest: int | None) -> slice:
        """A position among the tokens of this pass: all of them, one, or none."""
        if dest is None:
            return slice(None)
        here = dest - self.first
        return slice(here, here + 1) if 0 <= here < self.end - self.first else slice(0)

    def norm_input(self, place: NormPlace, layer: int, x: Tensor, norm: nn.Module) -> None:
        if place == "attention_post_norm" and ("attention_bias", layer) in self.scaled:
            scale = norm_scale(x, norm_eps(norm), self.model.architecture.norm)
            self.post_norm_scales[layer] = scale[..., None]

    def attention_write(self, layer: int, write: Tensor) -> Tensor | None:
        changed = self._written("attention", layer, write)
        factor = self._token_factors("attention_bias", layer, write)
        if factor is None:
            return changed
        bias = self.model.weights.attention_bias[layer] / self.post_norm_scales.get(layer, 1.0)
        return (write if changed is None else changed) + (factor - 1) * bias

    def mlp_input(self, layer: int, read: Tensor) -> Tensor | None:
        added = None if self.first else self.added.get(("mlp_input", layer))
        return None if added is None else read + added

    def mlp_write(self, layer: int, write: Tensor) -> Tensor | None:
        return self._written("mlp", layer, write)

    def _written(self, place: str, layer: int, write: Tensor) -> Tensor | None:
        """A write scaled, patched and added to; None where nothing changes."""
        changed: Tensor | None = None
        if place == "mlp" or place == "embedding":
            factor = self._token_factors(place, layer, write)
            if factor is not None:
                own = write if place == "mlp" or self.positions is None else write - self.positions
                changed = write + (factor - 1) * own
            for part in self.replaced if not self.first else ():
                if place in part.shares:
                    changed = write.clone() if changed is None else changed
                    share = part.shares[place][layer][..., None]
                    instead = part.source.write(place, layer)
                    changed[part.copies] = torch.where(share, instead, changed[part.copies])
        added = None if self.first else self.added.get((place, layer))
        if added is None:
            return changed
        return (write if changed is None else changed) + added

    def _token_factors(self, kind: Kind, layer: int, like: Tensor) -> Float[Tensor, "copy token 1"] | None:
        changes = self.scaled.get((kind, layer))
        if not changes:
            return None
        factor = like.new_ones(*like.shape[:2], 1)
        for copy, change in changes:
            factor[copy, self._tokens(change.site.dest)] *= change.factor
        return factor


def _stack(rows: Sequence[Tensor | int]) -> Tensor | None:
    """Rows of one shape, zero where there is none; None if there is none at all."""
    like = next((row for row in rows if isinstance(row, Tensor)), None)
    if like is None:
        return None
    return torch.stack([row if isinstance(row, Tensor) else torch.zeros_like(like) for row in rows])


# -- many interventions ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What the model shows under each intervention."""

    attention: Float[Tensor, " intervention"]
    """Attention of each intervention's firing (NaN where none was named)."""
    metric: Float[Tensor, " intervention"] | None
    """The metric, where one is read."""


@dataclass(frozen=True, eq=False)
class Copy:
    """One copy of a recorded prompt (one, without padding): what is changed in it, and the metric that is read."""

    recording: Recording
    intervention: Intervention
    metric: Metric | None = None


def run(
    recording: Recording,
    interventions: Sequence[Intervention],
    metric: Metric | None = None,
    *,
    progress: Progress | None = None,
) -> Outcome:
    """Run a recorded prompt under many interventions, each in its own copy.

    Without a metric only attention is read, and layers above the last firing do not run.
    """
    return run_copies([Copy(recording, each, metric) for each in interventions], progress, recording.model)


@torch.inference_mode()
def run_copies(
    copies: Sequence[Copy], progress: Progress | None = None, model: Model | None = None
) -> Outcome:
    """Run many copies of prompts, those of one length together, each with changes and a metric of its own."""
    model = copies[0].recording.model if model is None else model
    attention = torch.empty(len(copies), dtype=model.dtype, device=model.device)
    values = torch.empty_like(attention) if all(copy.metric is not None for copy in copies) else None
    alike: dict[tuple[int, int], list[int]] = {}
    prompts: dict[int, int] = {}
    for place, copy in enumerate(copies):
        positions = 0 if copy.metric is None else len(copy.metric.positions)
        alike.setdefault((copy.recording.lengths[0], positions), []).append(place)
        prompts.setdefault(id(copy.recording), place)
    done = 0
    for (length, _), members in alike.items():
        # Interventions that begin at similar layers together, so that as few layers as possible run.
        members.sort(key=lambda i: (copies[i].intervention.first_layer, prompts[id(copies[i].recording)]))
        starts = [copies[i].intervention.first_layer for i in members]
        cost = _cost(length, model.n_layers)
        chunks = [
            [members[some[place]] for place in group]
            for _, some in cheapest_groups(starts, cost)
            for group in batches([length] * len(some))
        ]
        for chunk in chunks:
            seen, numbers = _run_batch(model, [copies[i] for i in chunk])
            attention[chunk] = seen
            if values is not None and numbers is not None:
                values[chunk] = numbers
            done += len(chunk)
            if progress is not None:
                progress(done, len(copies))
    return Outcome(attention, values)


def _cost(length: int, n_layers: int) -> Callable[[int, int], float]:
    """What a pass of so many copies from some layer on costs: their tokens, and reading the weights, in each layer."""
    return lambda copies, first: (PASS_TOKENS + copies * length) * (n_layers - first)


def _run_batch(
    model: Model, copies: Sequence[Copy]
) -> tuple[Float[Tensor, " copy"], Float[Tensor, " copy"] | None]:
    length, n_layers = copies[0].recording.lengths[0], model.n_layers
    metrics = {id(copy.metric): copy.metric for copy in copies if copy.metric is not None}
    firings = [copy.intervention.firing for copy in copies if copy.intervention.firing is not None]
    starts = [copy.intervention.first_layer for copy in copies]
    start = min([*starts, *(metric.first_layer(n_layers) for metric in metrics.values())])
    ends = [start, *(f.layer for f in firings), *(metric.layers(n_layers) - 1 for metric in metrics.values())]
    changes = Changes(
        model,
        length,
        [copy.intervention.resolved(copy.recording) for copy in copies],
        copies[0].recording.scales,
    )
    readings = {key: metric.reading() for key, metric in metrics.items()}
    positions = [(copy.metric.positions if copy.metric else ()) or (length - 1,) for copy in copies]
    logits = forward(
        model,
        torch.cat([copy.recording.token_ids for copy in copies]),
        changes,
        *readings.values(),
        keep=torch.tensor(positions, device=model.device),
        layers=range(start, 1 + max(ends)),
        residual=torch.cat([copy.recording.residuals[start] for copy in copies]),
    )
    if not readings:
        return changes.attention, None
    found = {key: reading.value(logits) for key, reading in readings.items()}
    if len(found) == 1:
        return changes.attention, next(iter(found.values()))
    return changes.attention, torch.stack([found[id(copy.metric)][i] for i, copy in enumerate(copies)])


# -- one changed run -------------------------------------------------------------------------------------------


@torch.inference_mode()
def rerun(recording: Recording, changes: Sequence[Edit], *, keep: Iterable[str] | None = KEPT) -> Recording:
    """The recorded prompt (one) in the model with all these changes, in one forward pass."""
    observer = _all_at_once(recording, changes)
    model = recording.model
    with model.assume_weights_unchanged():
        return record(
            model,
            recording.token_ids,
            recording.lengths,
            last_logits=recording.logits.shape[1],
            keep=keep,
            observers=(observer,),
        )


def continued(recording: Recording, n: int, changes: Sequence[Edit] = ()) -> list[int]:
    """The ``n`` tokens that follow a recorded prompt (one) under these changes, the likeliest each time."""
    if n < 1:
        raise InputError(f"n={n}: expected at least 1 token to continue with.")
    model, length = recording.model, recording.lengths[0]
    most = model.max_positions
    if most is not None and length + n > most:
        raise InputError(
            f"{length} tokens and {n} more are beyond the context of {model.name!r}, which is {most}."
        )
    observer = _all_at_once(recording, changes, continuing=True)
    with model.assume_weights_unchanged():
        return continue_greedily(model, recording.token_ids, n, observer)


def _all_at_once(recording: Recording, changes: Sequence[Edit], continuing: bool = False) -> Changes:
    """What makes all these changes in one copy of a prompt, checked."""
    if len(recording) != 1:
        raise InputError(f"The recording has {len(recording)} prompts: choose one, like recording[0].")
    require_same_weights(recording)
    for change in changes:
        check_edit(recording, change)
    together = Intervention(tuple(changes)).resolved(recording)
    return Changes(recording.model, recording.lengths[0], [together], recording.scales, continuing=continuing)
