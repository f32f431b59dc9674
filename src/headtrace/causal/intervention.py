"""Interventions inside the model's own forward pass, many at once as copies of the prompt.

A *local* edit changes what one head sees at one destination; a *global* edit changes a component's write for every
reader. Layers below the first edit are not run again: they would give what was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from headtrace.models.attention import AttentionCall, AttentionObserver, through
from headtrace.models.capture import full_precision_norms
from headtrace.models.partial import only_layers
from headtrace.vocabulary import Component, Firing

if TYPE_CHECKING:
    from headtrace.models import Recording

TOKENS_AT_ONCE = 2048
"""Copies of the prompt run together as long as their tokens number at most this many."""


@dataclass(frozen=True)
class LocalEdit:
    """Added to one firing's query, or to the keys that its head sees from its destination."""

    firing: Firing
    query: Float[Tensor, " d_head"] | None = None
    keys: Float[Tensor, "token d_head"] | None = None

    @property
    def layer(self) -> int:
        return self.firing.layer


@dataclass(frozen=True)
class GlobalEdit:
    """Added to a component's write."""

    component: Component
    write: Float[Tensor, "token d_model"]

    @property
    def layer(self) -> int:
        return self.component.layer or 0


@dataclass(frozen=True)
class Intervention:
    """Edits that act together in one copy of the prompt, and the firing whose attention is read."""

    edits: tuple[LocalEdit | GlobalEdit, ...]
    firing: Firing | None = None

    @property
    def first_layer(self) -> int:
        return min((edit.layer for edit in self.edits), default=0)


@dataclass(frozen=True)
class Outcome:
    """What the model shows under each intervention."""

    attention: Float[Tensor, " intervention"]
    """Attention of each intervention's firing (NaN where none was named)."""
    logits: Float[Tensor, "intervention vocab"] | None
    """Output logits at the last position, unless only attention was asked for."""


class _Acting(AttentionObserver):
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


def _global_hooks(recording: Recording, interventions: Sequence[Intervention], stack: ExitStack) -> None:
    """One hook per place that is written to: attention output (after its norm), MLP write, or the embedding."""
    places: dict[tuple[str, int], Tensor] = {}
    shape = (len(interventions), recording.lengths[0], recording.model.d_model)
    for copy, intervention in enumerate(interventions):
        for edit in intervention.edits:
            if isinstance(edit, GlobalEdit):
                kind = edit.component.kind if edit.component.kind in ("mlp", "embedding") else "attention"
                total = places.setdefault((kind, edit.layer), edit.write.new_zeros(shape))
                total[copy] += edit.write
    for (kind, layer), total in places.items():
        stack.callback(_add_to(recording, kind, layer, total).remove)


def _add_to(recording: Recording, kind: str, index: int, total: Tensor) -> Any:
    facts = recording.model.architecture
    layers = list(recording.model.hf.get_submodule(facts.layers).children())
    if kind == "embedding":

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            if args:
                return (args[0] + total, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": kwargs["hidden_states"] + total}

        return layers[0].register_forward_pre_hook(before, with_kwargs=True)

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0] + total.reshape(output[0].shape), *output[1:])
        return output + total.reshape(output.shape)

    attention = facts.attention if facts.attention_post_norm is None else facts.attention_post_norm
    path = facts.mlp_write if kind == "mlp" else attention
    return layers[index].get_submodule(path).register_forward_hook(after)


@torch.inference_mode()
def run(
    recording: Recording,
    interventions: Sequence[Intervention],
    *,
    attention_only: bool = False,
    on_done: Callable[[int], None] | None = None,
) -> Outcome:
    """Run a recorded prompt (one, without padding) under many interventions, each in its own copy."""
    model = recording.model
    attention = torch.empty(len(interventions), dtype=model.dtype, device=model.device)
    logits = None if attention_only else attention.new_empty(len(interventions), model.d_vocab)
    for chunk in _chunks(interventions, recording.lengths[0]):
        acting = [interventions[i] for i in chunk]
        seen, out = _run_chunk(recording, acting, attention_only)
        attention[chunk] = seen
        if logits is not None and out is not None:
            logits[chunk] = out
        if on_done is not None:
            on_done(len(chunk))
    return Outcome(attention, logits)


def _chunks(interventions: Sequence[Intervention], length: int) -> Iterator[list[int]]:
    """Interventions that begin at similar layers together, so that as few layers as possible run."""
    order = sorted(range(len(interventions)), key=lambda i: interventions[i].first_layer)
    size = max(1, TOKENS_AT_ONCE // length)
    for start in range(0, len(order), size):
        yield order[start : start + size]


def _run_chunk(
    recording: Recording, acting: list[Intervention], attention_only: bool
) -> tuple[Tensor, Float[Tensor, "copy vocab"] | None]:
    model = recording.model
    start = min(i.first_layer for i in acting)
    stop = (
        max((i.firing.layer + 1 for i in acting if i.firing), default=start + 1)
        if attention_only
        else model.n_layers
    )
    residual = recording.residuals[start].expand(len(acting), -1, -1)
    observer = _Acting(recording, acting)
    with ExitStack() as stack:
        if model.dtype == torch.float64:
            stack.enter_context(full_precision_norms(model))
        stack.enter_context(only_layers(model, start, stop, residual))
        _global_hooks(recording, acting, stack)
        stack.enter_context(through(observer, model.hf))
        ids = recording.token_ids.expand(len(acting), -1)
        output: Any = model.hf(input_ids=ids, use_cache=False, logits_to_keep=1)
    return observer.attention, None if attention_only else output.logits[:, -1]
