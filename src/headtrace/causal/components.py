"""Head components kept in the running model, while all others take what another run gave them.

A component (layer, head, dest, src) is what a head read from one source and wrote at one destination. A kept one is
computed live: ``A[d,s] v[s] W_O`` with the patterns and values of the patched run itself. One that is not kept writes
what it wrote in a run on a counterfactual prompt of the same length. Embeddings, MLPs and biases run live, so keeping
nothing does not make the counterfactual prompt of this one.

Many sets run at once, as copies of their prompts, in one forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headtrace.causal.faithfulness import replacement
from headtrace.causal.metric import Metric
from headtrace.causal.tolerance import rounded_sums
from headtrace.errors import InputError, OutOfMemoryError
from headtrace.models.attention import per_query_head
from headtrace.models.devices import available_bytes
from headtrace.models.forward import forward
from headtrace.models.observer import AttentionCall, Observer
from headtrace.progress import Progress
from headtrace.prompts import batches
from headtrace.tables import human
from headtrace.vocabulary import Firing

if TYPE_CHECKING:
    from headtrace.models import Model, Recording


@dataclass(frozen=True, eq=False)
class CounterfactualRun:
    """What every component wrote in the run on the counterfactual prompt: its own attention, its own values."""

    patterns: Float[Tensor, "layer head dest src"]
    values: Float[Tensor, "layer head src d_head"]

    @classmethod
    def of(cls, recording: Recording) -> CounterfactualRun:
        weights = recording.model.weights
        with torch.inference_mode(
            False
        ):  # tensors of a pass without gradients can take no part in one with them
            values = recording.values[:, 0].clone() - weights.b_V[:, :, None]
            return cls(recording.patterns[:, 0].clone(), values.repeat_interleave(weights.group, dim=1))

    def mixture(
        self, layer: int, pattern: Float[Tensor, "copy head dest src"], dropped: Tensor
    ) -> Float[Tensor, "copy head dest d_head"]:
        """The values that the dropped components of a layer mix in, their bias left out: it is no component's."""
        return (self.patterns[layer] * dropped) @ self.values[layer]


@dataclass(frozen=True, eq=False)
class ValueVectors:
    """One value vector per head, attended to as the patched run attends: the mean, or nothing."""

    vectors: Float[Tensor, "layer head d_head"]

    @classmethod
    def of(cls, recording: Recording, ablation: str) -> ValueVectors:
        vectors = replacement(recording, "zero" if ablation == "zero" else "mean", None)
        bias = replacement(recording, "zero", None)
        with torch.inference_mode(False):
            return cls(vectors.clone() - bias)

    def mixture(
        self, layer: int, pattern: Float[Tensor, "copy head dest src"], dropped: Tensor
    ) -> Float[Tensor, "copy head dest d_head"]:
        return (pattern * dropped).sum(-1, keepdim=True) * self.vectors[layer][:, None]


Instead = CounterfactualRun | ValueVectors
"""What components that are not kept write."""


@dataclass(frozen=True, eq=False)
class Case:
    """One prompt, the number that is measured on it, and what its components are replaced by."""

    recording: Recording
    metric: Metric
    instead: Instead

    @property
    def model(self) -> Model:
        return self.recording.model

    @property
    def length(self) -> int:
        return self.recording.lengths[0]

    @cached_property
    def shape(self) -> tuple[int, int, int, int]:
        """Of a mask over all components: (layer, head, dest, src)."""
        return self.model.n_layers, self.model.n_heads, self.length, self.length

    @cached_property
    def places(self) -> Int[Tensor, " component"]:
        """Every component that there can be (causal, visible), as a place in the flattened mask."""
        visible = torch.stack([v[0] for v in self.recording.visible])[:, None].expand(self.shape)
        return visible.flatten().nonzero()[:, 0]

    @cached_property
    def attention(self) -> Float[Tensor, " component"]:
        """The attention of each of ``places`` in the clean run."""
        return self.recording.patterns[:, 0].flatten()[self.places]

    @cached_property
    def clean(self) -> float:
        """The metric of the model as it is."""
        return self.metric.of(self.recording)

    def places_of(self, firings: Iterable[Firing]) -> Int[Tensor, " chosen"]:
        """Firings as places, each once; one that the prompt or the model does not have is an error."""
        chosen = list(dict.fromkeys(firings))
        for firing in chosen:
            self.recording.check_firing(firing)
        _, heads, length, _ = self.shape
        flat = [((f.layer * heads + f.head) * length + f.dest) * length + f.src for f in chosen]
        return torch.tensor(flat, dtype=torch.int64, device=self.model.device)

    def firings(self, places: Int[Tensor, " chosen"]) -> list[Firing]:
        """Places as firings."""
        columns = torch.unravel_index(places, self.shape)
        return [Firing(*place) for place in torch.stack(columns, dim=1).tolist()]

    def mixed(self, layer: int, pattern: Tensor, values: Tensor, kept: Tensor) -> Tensor:
        """A layer's mixture of values: live where kept, replaced elsewhere; the value bias is always there."""
        weights = self.model.weights
        bias = weights.b_V[layer].repeat_interleave(weights.group, dim=0)[:, None]
        live = (pattern * kept) @ (values - bias)
        return live + self.instead.mixture(layer, pattern, 1 - kept) + bias

    def rounding(self) -> float:
        """How far apart two right computations of the metric may be: errors of a pass grow as a random walk."""
        dtype = self.model.dtype
        size = max(float(self.recording.logits.abs().max()), abs(self.clean), 1.0)
        return 2 * torch.finfo(dtype).eps * math.sqrt(rounded_sums(self.model, dtype)) * size


@dataclass(frozen=True, eq=False)
class Keep:
    """One copy of a prompt that keeps some components; ``without`` keeps all others instead."""

    case: Case
    places: Int[Tensor, " chosen"]
    without: bool = False

    def mask(self) -> Bool[Tensor, "layer head dest src"]:
        chosen = torch.zeros(self.case.shape, dtype=torch.bool, device=self.case.model.device)
        chosen.view(-1)[self.places] = True
        return ~chosen if self.without else chosen


Masks = Sequence[Tensor]
"""Layer by layer (copy, head, dest, src): 1 keeps a component, 0 replaces it, what lies between mixes both."""


class Patching(Observer):
    """Mixes kept and replaced values in every layer, copy by copy; the copies of one case stand together."""

    def __init__(self, parts: Sequence[tuple[Case, Masks]]) -> None:
        self.parts = parts
        self.sizes = [len(masks[0]) for _, masks in parts]

    def mix(self, call: AttentionCall, pattern: Tensor) -> Float[Tensor, "batch head dest d_head"]:
        values = per_query_head(call.value, call.query.shape[1])
        pieces = zip(self.parts, pattern.split(self.sizes), values.split(self.sizes), strict=True)
        mixed = [
            case.mixed(call.layer, own, theirs, masks[call.layer].to(own.dtype))
            for (case, masks), own, theirs in pieces
        ]
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)


def measure(keeps: Sequence[Keep], progress: Progress | None = None) -> list[float]:
    """The metric of each copy, whatever their prompts: those of one length run together."""
    found: dict[int, float] = {}
    kinds: dict[tuple[int, int], list[int]] = {}
    for place, keep in enumerate(keeps):
        case = keep.case
        kinds.setdefault((case.length, len(case.metric.positions)), []).append(place)
    for (length, _), members in kinds.items():
        members.sort(key=lambda place: id(keeps[place].case))
        for group in batches([length] * len(members)):
            chosen = [members[i] for i in group]
            found.update(zip(chosen, _measure([keeps[i] for i in chosen]), strict=True))
            if progress is not None:
                progress(len(found), len(keeps))
    return [found[place] for place in range(len(keeps))]


def _measure(keeps: Sequence[Keep]) -> list[float]:
    parts: list[tuple[Case, Masks]] = []
    for _, group in groupby(keeps, key=lambda keep: id(keep.case)):
        copies = list(group)
        parts.append((copies[0].case, torch.stack([keep.mask() for keep in copies]).unbind(dim=1)))
    return [number for values in run_parts(parts) for number in values.tolist()]


def run_parts(parts: Sequence[tuple[Case, Masks]], grad: bool = False) -> list[Float[Tensor, " copy"]]:
    """One pass over the copies of some cases of one length; the metric of each, case by case."""
    model, device = parts[0][0].model, parts[0][0].model.device
    patching = Patching(parts)
    readings = [case.metric.reading() for case, _ in parts]
    ids = [case.recording.token_ids.expand(n, -1) for (case, _), n in zip(parts, patching.sizes, strict=True)]
    keep = [
        torch.tensor(case.metric.positions or (case.length - 1,), device=device).expand(n, -1)
        for (case, _), n in zip(parts, patching.sizes, strict=True)
    ]
    logits = forward(model, torch.cat(ids), patching, *readings, keep=torch.cat(keep), grad=grad)
    rows = [reading.value(logits).split(patching.sizes) for reading in readings]
    return [own[place] for place, own in enumerate(rows)]


def mask_gradients(case: Case, levels: Sequence[float]) -> Float[Tensor, "layer head dest src"]:
    """The metric's gradient with respect to a mask on all components, averaged over masks of one level throughout.

    At level 1 (the clean run) it is attribution patching: to first order, what the metric loses when a component takes
    what it had in the counterfactual run. Averaged from 0 to 1 it is integrated gradients.
    """
    at_once = _copies_that_fit(case, len(levels))
    total = torch.zeros(case.shape, dtype=case.model.dtype, device=case.model.device)
    for start in range(0, len(levels), at_once):
        chosen = levels[start : start + at_once]
        with torch.inference_mode(False), torch.enable_grad():
            height = total.new_tensor(chosen)[:, None, None, None]
            masks = [
                height.expand(-1, *case.shape[1:]).clone().requires_grad_() for _ in range(case.shape[0])
            ]
            value = run_parts([(case, masks)], grad=True)[0].sum()
            # A metric may be read below the last layers: those take no part.
            slopes = torch.autograd.grad(value, masks, allow_unused=True, materialize_grads=True)
        total += torch.stack([slope.sum(0) for slope in slopes])
    return total / len(levels)


def _copies_that_fit(case: Case, wanted: int) -> int:
    """How many copies can be differentiated at once; an error if not even one can."""
    model = case.model
    hidden = getattr(model.config, "intermediate_size", None) or 4 * model.d_model
    # Kept for the way back: per layer some seven tensors like a pattern, and what each block computes per token.
    numbers = 8 * math.prod(case.shape) + model.n_layers * case.length * (16 * model.d_model + 6 * hidden)
    needed = torch.finfo(model.dtype).bits // 8 * (numbers + 3 * model.d_vocab)
    on_gpu = model.device.type == "cuda"
    available = (torch.cuda.mem_get_info(model.device)[0] if on_gpu else available_bytes()) // 2
    if needed > available:
        raise OutOfMemoryError(
            f"A gradient for each of the {math.prod(case.shape):,} components of a prompt of {case.length} tokens "
            f"needs about {human(needed)}, and {human(available)} can be used. Shorten the prompt, or leave out "
            "the baselines that take gradients (attribution patching, integrated gradients)."
        )
    return max(1, min(wanted, int(available // needed), 2048 // case.length))


def check_same_length(given: Sequence[int], expected: Sequence[int], labels: Sequence[str]) -> None:
    """A counterfactual must have the prompt's length, and differ from it."""
    if len(given) != len(expected):
        raise InputError(
            f"The counterfactual prompt has {len(given)} tokens ({' | '.join(labels)}) and the circuit's prompt "
            f"{len(expected)}: components are exchanged position by position, so both need the same number. Choose "
            "words with as many tokens as those they replace."
        )
    if list(given) == list(expected):
        raise InputError(
            "The counterfactual prompt is the circuit's own prompt, token by token: nothing would change. Exchange "
            "what decides the answer (in IOI, the names)."
        )
