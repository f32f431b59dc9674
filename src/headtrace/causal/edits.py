"""Interventions inside the model's own forward pass, many at once as copies of the prompt.

A *local* edit changes what one head sees at one destination; a *global* edit changes a component's write for every
reader. Layers below the first edit are not run again: they would give what was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.causal.metric import Metric
from headtrace.models.forward import forward
from headtrace.models.observer import AttentionCall, Observer, Rotary
from headtrace.prompts import batches
from headtrace.vocabulary import Component, Firing

if TYPE_CHECKING:
    from headtrace.models import Recording


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
class Intervention:
    """Edits that act together in one copy of the prompt, and the firing whose attention is read."""

    edits: tuple[LocalEdit | GlobalEdit, ...]
    firing: Firing | None = None

    @property
    def first_layer(self) -> int:
        """Where it begins; without edits, where attention is read."""
        unchanged = self.firing.layer if self.firing else 0
        return min((edit.layer for edit in self.edits), default=unchanged)


@dataclass(frozen=True)
class Outcome:
    """What the model shows under each intervention."""

    attention: Float[Tensor, " intervention"]
    """Attention of each intervention's firing (NaN where none was named)."""
    metric: Float[Tensor, " intervention"] | None
    """The metric, if one was asked for."""


class LocalEdits(Observer):
    """Adds local edits to scores, and reads the attention of each copy's firing."""

    def __init__(self, recording: Recording, interventions: Sequence[Intervention]) -> None:
        model = recording.model
        self.recording, self.group = recording, model.weights.group
        self.attention = torch.full((len(interventions),), torch.nan, dtype=model.dtype, device=model.device)
        self.edits = _merged(recording, interventions)
        self.read: dict[int, tuple[Tensor, ...]] = {}
        for layer in {what.firing.layer for what in interventions if what.firing}:
            mine = [(i, what.firing) for i, what in enumerate(interventions) if what.firing]
            places = [(i, f.head, f.dest, f.src) for i, f in mine if f.layer == layer]
            self.read[layer] = torch.tensor(places, device=model.device).unbind(dim=1)

    def edit_scores(self, call: AttentionCall, scores: Tensor) -> None:
        if call.layer not in self.edits:
            return
        (copy, head, dest), queries, keys = self.edits[call.layer]
        # Where the model scales queries itself, the recorded scale is not the one that attention is called with.
        scale = self.recording.scales[call.layer]
        theirs = call.key[copy, head // self.group]
        rows = call.query.new_zeros(len(copy), scores.shape[-1])
        if queries is not None:
            rows += ((theirs if keys is None else theirs + keys) @ queries[..., None])[..., 0] * scale
        if keys is not None:
            rows += (keys @ call.query[copy, head, dest][..., None])[..., 0] * call.scale
        scores[copy, head, dest] += rows

    def see(self, call: AttentionCall, pattern: Tensor) -> None:
        if call.layer in self.read:
            copy, head, dest, src = self.read[call.layer]
            self.attention[copy] = pattern[copy, head, dest, src]


Merged = tuple[tuple[Tensor, Tensor, Tensor], Tensor | None, Tensor | None]
"""Copy, head and destination of every edited row of scores; what is added to its query; what is added to its keys."""


def _merged(recording: Recording, interventions: Sequence[Intervention]) -> dict[int, Merged]:
    """Local edits layer by layer. Edits that meet in one row of scores act together: (q + dq) . (k + dk)."""
    model, length = recording.model, recording.lengths[0]
    rows: dict[int, dict[tuple[int, int, int], list[LocalEdit]]] = {}
    for copy, intervention in enumerate(interventions):
        for edit in intervention.edits:
            if isinstance(edit, LocalEdit):
                f = edit.firing
                rows.setdefault(f.layer, {}).setdefault((copy, f.head, f.dest), []).append(edit)
    merged: dict[int, Merged] = {}
    for layer, places in rows.items():
        zero = recording.residuals.new_zeros(())
        queries, keys = zero.new_zeros(len(places), model.d_head), None
        if any(e.keys is not None for edits in places.values() for e in edits):
            keys = zero.new_zeros(len(places), length, model.d_head)
        for row, edits in enumerate(places.values()):
            for edit in edits:
                if edit.query is not None:
                    queries[row] += edit.query
                if edit.keys is not None and keys is not None:
                    keys[row] += edit.keys
        none = all(e.query is None for edits in places.values() for e in edits)
        copy, head, dest = torch.tensor(list(places), device=model.device).unbind(dim=1)
        merged[layer] = ((copy, head, dest), None if none else queries, keys)
    return merged


class GlobalEdits(Observer):
    """Adds to what is written: by attention (after its norm), by an MLP, or before the first layer."""

    def __init__(self, recording: Recording, interventions: Sequence[Intervention]) -> None:
        self.added: dict[tuple[str, int], Tensor] = {}
        shape = (len(interventions), recording.lengths[0], recording.model.d_model)
        for copy, intervention in enumerate(interventions):
            for edit in intervention.edits:
                if isinstance(edit, GlobalEdit):
                    kind = edit.component.kind if edit.component.kind in ("mlp", "embedding") else "attention"
                    total = self.added.setdefault((kind, edit.layer), edit.write.new_zeros(shape))
                    total[copy] += edit.write

    def _with(self, kind: str, layer: int, own: Tensor) -> Tensor | None:
        added = self.added.get((kind, layer))
        return None if added is None else own + added

    def layer_input(self, layer: int, residual: Tensor, rotary: Rotary | None) -> Tensor | None:
        return self._with("embedding", layer, residual)

    def attention_write(self, layer: int, write: Tensor) -> Tensor | None:
        return self._with("attention", layer, write)

    def mlp_write(self, layer: int, write: Tensor) -> Tensor | None:
        return self._with("mlp", layer, write)


def observers_of(
    recording: Recording, interventions: Sequence[Intervention]
) -> list[LocalEdits | GlobalEdits]:
    """What acts in a pass: local edits (and the reading of attention), and global ones if there are any."""
    local, everywhere = LocalEdits(recording, interventions), GlobalEdits(recording, interventions)
    return [local, everywhere] if everywhere.added else [local]


@torch.inference_mode()
def run(
    recording: Recording,
    interventions: Sequence[Intervention],
    metric: Metric | None = None,
    *,
    on_done: Callable[[int], None] | None = None,
) -> Outcome:
    """Run a recorded prompt (one, without padding) under many interventions, each in its own copy.

    Without a metric only attention is read, and layers above the last firing do not run.
    """
    attention = torch.empty(len(interventions), dtype=recording.model.dtype, device=recording.model.device)
    values = None if metric is None else torch.empty_like(attention)
    # Interventions that begin at similar layers together, so that as few layers as possible run.
    order = sorted(range(len(interventions)), key=lambda i: interventions[i].first_layer)
    for places in batches([recording.lengths[0]] * len(order)):
        chunk = [order[place] for place in places]
        seen, numbers = _run_chunk(recording, [interventions[i] for i in chunk], metric)
        attention[chunk] = seen
        if values is not None and numbers is not None:
            values[chunk] = numbers
        if on_done is not None:
            on_done(len(chunk))
    return Outcome(attention, values)


def _run_chunk(
    recording: Recording, acting: list[Intervention], metric: Metric | None
) -> tuple[Float[Tensor, " copy"], Float[Tensor, " copy"] | None]:
    model = recording.model
    start = min(i.first_layer for i in acting)
    stop = max([start + 1, *(i.firing.layer + 1 for i in acting if i.firing)])
    if metric is not None:
        stop = max(stop, metric.layers(model.n_layers))
    local, *others = observers_of(recording, acting)
    reading = None if metric is None else metric.reading()
    positions = () if metric is None else metric.positions
    logits = forward(
        model,
        recording.token_ids.expand(len(acting), -1),
        local,
        *others,
        *([] if reading is None else [reading]),
        keep=torch.tensor(positions or (recording.lengths[0] - 1,), device=model.device).expand(
            len(acting), -1
        ),
        layers=range(start, stop),
        residual=recording.residuals[start].expand(len(acting), -1, -1),
    )
    assert isinstance(local, LocalEdits)
    return local.attention, None if reading is None else reading.value(logits)
