"""Head components of a prompt that are patched: kept live or replaced, one by one or as a whole set.

A component (layer, head, dest, src) is what a head read from one source and wrote at one destination. A kept one is
computed live: ``A[d,s] v[s] W_O`` with the patterns and values of the patched run itself. One that is not kept writes
what it wrote in a run on a counterfactual prompt of the same length, or a mean or zero value. Embeddings, MLPs and
biases run live, so keeping nothing does not make the counterfactual prompt of this one.

A ranking is the order in which components are kept: a circuit's own, or that of a baseline. It holds all components of
a prompt, so that all curves have the same ends. A method that names only some (a circuit) is continued by the attention
of the rest in the clean run, highest first; ``own`` says where that begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headtrace.causal.changes import Intervention, Patch, Source
from headtrace.causal.execute import Changes, Copy, Replaced, run_copies
from headtrace.causal.metric import Metric
from headtrace.causal.opening import rounded_sums
from headtrace.circuits import Circuit
from headtrace.errors import InputError, OutOfMemoryError
from headtrace.models.devices import available_bytes
from headtrace.models.forward import forward
from headtrace.progress import Progress
from headtrace.tables import human
from headtrace.vocabulary import ATTENTION_SIDES, Firing, Site

if TYPE_CHECKING:
    from headtrace.models import Model, Recording

IG_POINTS = 8
"""Masks over which the integrated gradients of a baseline are averaged."""
Ranked = Circuit | Sequence[Firing | str]
"""What a user may give: a circuit (its heads by falling influence), or head components, the most important first."""


@dataclass(frozen=True, eq=False)
class PatchingCase:
    """One prompt, the metric that is read on it, and the source that its head components are patched from."""

    recording: Recording
    metric: Metric
    source: Source

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

    def rounding(self) -> float:
        """How far apart two right computations of the metric may be: errors of a pass grow as a random walk."""
        dtype = self.model.dtype
        size = max(float(self.recording.logits.abs().max()), abs(self.clean), 1.0)
        return 2 * torch.finfo(dtype).eps * math.sqrt(rounded_sums(self.model, dtype)) * size

    def keeping(self, places: Int[Tensor, " chosen"]) -> Copy:
        """A copy of the prompt in which only these head components run live: all others are patched."""
        patch = Patch(self.source, places=places, all_but=("head",))
        return Copy(self.recording, Intervention((patch,)), self.metric)

    def without(self, places: Int[Tensor, " chosen"]) -> Copy:
        """A copy of the prompt in which these head components are patched, and all others run live."""
        return Copy(self.recording, Intervention((Patch(self.source, places=places),)), self.metric)


def measure(copies: Sequence[Copy], progress: Progress | None = None) -> list[float]:
    """The metric of each copy, whatever their prompts: those of one length run together."""
    values = run_copies(copies, progress).metric
    assert values is not None
    return values.tolist()


# -- gradients -------------------------------------------------------------------------------------------------


def mask_metric(
    case: PatchingCase, masks: Sequence[Float[Tensor, "copy head dest src"]], grad: bool = False
) -> Float[Tensor, " copy"]:
    """The metric under masks on all head components, layer by layer: 1 keeps one, 0 patches it."""
    n, device = len(masks[0]), case.model.device
    changes = Changes(case.model, case.length, [Intervention(())] * n)
    shares = [1 - mask for mask in masks]
    changes.replaced = [Replaced(case.source, torch.arange(n, device=device), {"head": shares})]
    reading = case.metric.reading()
    keep = torch.tensor(case.metric.positions or (case.length - 1,), device=device).expand(n, -1)
    ids = case.recording.token_ids.expand(n, -1)
    return reading.value(forward(case.model, ids, changes, reading, keep=keep, grad=grad))


def mask_gradients(case: PatchingCase, levels: Sequence[float]) -> Float[Tensor, "layer head dest src"]:
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
            value = mask_metric(case, masks, grad=True).sum()
            # A metric may be read below the last layers: those take no part.
            slopes = torch.autograd.grad(value, masks, allow_unused=True, materialize_grads=True)
        total += torch.stack([slope.sum(0) for slope in slopes])
    return total / len(levels)


def _copies_that_fit(case: PatchingCase, wanted: int) -> int:
    """How many copies can be differentiated at once; an error if not even one can."""
    model = case.model
    hidden = getattr(model.config, "intermediate_size", None) or 4 * model.d_model
    # Kept for the way back: per layer some seven tensors like a pattern, and what each block computes per token.
    numbers = 8 * math.prod(case.shape) + model.n_layers * case.length * (16 * model.d_model + 6 * hidden)
    needed = torch.finfo(model.dtype).bits // 8 * (numbers + 3 * model.d_output)
    on_gpu = model.device.type == "cuda"
    available = (torch.cuda.mem_get_info(model.device)[0] if on_gpu else available_bytes()) // 2
    if needed > available:
        raise OutOfMemoryError(
            f"A gradient for each of the {math.prod(case.shape):,} components of a prompt of {case.length} tokens "
            f"needs about {human(needed)}, and {human(available)} can be used. Shorten the prompt, or leave out "
            "the baselines that take gradients (attribution patching, integrated gradients)."
        )
    return max(1, min(wanted, int(available // needed), 2048 // case.length))


# -- controls --------------------------------------------------------------------------------------------------


def random_like(recording: Recording, site: Site, generator: torch.Generator) -> Site:
    """A firing of the same layer that is somewhere else: any head, any destination, any key it sees."""
    layer: Any = site.layer
    places = recording.visible[layer][0].nonzero()
    dest, src = places[int(torch.randint(len(places), (1,), generator=generator))].tolist()
    head = int(torch.randint(recording.model.n_heads, (1,), generator=generator))
    return Site("head", layer, head, dest, src)


def drawn_like(
    recording: Recording,
    firings: Sequence[Site],
    generator: torch.Generator,
    nearest: int | None = None,
    sources: Bool[Tensor, "layer src"] | None = None,
) -> list[Site]:
    """For each firing another head component of its layer, none of them a firing and none twice.

    With ``nearest`` it is drawn from as many components whose attention is nearest to the firing's own, with
    ``sources`` from those that read one of these tokens. A layer where no such component is left gives none.
    """
    patterns = recording.patterns[:, 0]
    free = torch.stack([v[0] for v in recording.visible])[:, None].expand(patterns.shape).clone()
    if sources is not None:
        free &= sources[:, None, None]
    for site in firings:
        place: Any = (site.layer, site.head, site.dest, site.src)
        free[place] = False
    chosen: list[Site] = []
    for site in firings:
        layer: Any = site.layer
        count, pattern = int(free[layer].sum()), patterns[layer]
        if not count:
            continue
        if nearest is None:
            near = free[layer].flatten().nonzero()[:, 0]
        else:
            gap = (pattern - pattern[site.head, site.dest, site.src]).abs()
            gap = gap.masked_fill(~free[layer], float("inf"))
            near = gap.flatten().topk(min(nearest, count), largest=False).indices
        place = near[int(torch.randint(len(near), (1,), generator=generator))]
        head, dest, src = (int(i) for i in torch.unravel_index(place, pattern.shape))
        free[layer, head, dest, src] = False
        chosen.append(Site("head", layer, head, dest, src))
    return chosen


NEAREST = 16
"""How many components of about the same attention a matched control is drawn from."""


# -- rankings --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ComponentRanking:
    """All components of a prompt, the most important first."""

    places: Int[Tensor, " component"]
    own: int
    """How many of them the method itself ranked."""

    def first(self, n: int) -> Int[Tensor, " kept"]:
        return self.places[:n]


def ranked_firings(given: Ranked, recording: Recording | None = None) -> list[Firing]:
    """Head components in their order: those of a circuit by falling influence. Words are read in the recording.

    Heads that oppose the root carry no influence: they are left out, unless the circuit has no others. The influence
    of a difference circuit is the size of a flow, so that its heads go by flow: those against the difference are left
    out as well.
    """
    if isinstance(given, Circuit):
        if given.difference is not None:
            sign = 1 if given.difference.change > 0 else -1
            flows = {node.site.firing: sign * (node.flow or 0.0) for node in given.heads()}
            carrying = {firing: flow for firing, flow in flows.items() if flow > 0}
            return sorted(carrying or flows, key=lambda firing: -flows[firing])
        heads = [node for node in given.heads() if node.influence is None or node.influence > 0]
        order = sorted(
            heads or given.heads(), key=lambda n: (-(n.influence or 0.0), -(n.contribution or 0.0), n.id)
        )
        return [node.site.firing for node in order]
    if recording is None:
        return list(dict.fromkeys(Firing.parse(each) for each in given))
    return list(dict.fromkeys(recording.find_firing(each)[0] for each in given))


def as_given(case: PatchingCase, given: Ranked) -> ComponentRanking:
    """A circuit's own order, or that of a list, continued by attention."""
    own = case.places_of(ranked_firings(given, case.recording))
    free = ~torch.isin(case.places, own)
    order = case.attention[free].argsort(descending=True, stable=True)
    return ComponentRanking(torch.cat((own, case.places[free][order])), len(own))


def by_score(case: PatchingCase, scores: Float[Tensor, " component"]) -> ComponentRanking:
    """Falling scores, one for each of the case's places."""
    order = scores.argsort(descending=True, stable=True)
    return ComponentRanking(case.places[order], len(order))


def by_attention(case: PatchingCase) -> ComponentRanking:
    """The components that attend most in the clean run."""
    return by_score(case, case.attention)


def at_random(case: PatchingCase, seed: int) -> ComponentRanking:
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(case.places), generator=generator).to(case.places.device)
    return ComponentRanking(case.places[order], len(order))


def attribution_patching(case: PatchingCase, points: int | None = None) -> ComponentRanking:
    """What the metric gains by keeping a component, to first order at the clean run.

    That is the metric's gradient times the component's difference from the counterfactual. With ``points`` the gradient
    is averaged over as many masks between nothing kept and everything kept: integrated gradients.
    """
    levels = [1.0] if points is None else [(point + 0.5) / points for point in range(points)]
    return by_score(case, mask_gradients(case, levels).flatten()[case.places])


def attention_circuit(case: PatchingCase, circuit: Circuit) -> ComponentRanking:
    """ACC++ alone: the circuit of attention, traced with the defaults; the given one, if that is what it is."""
    sides = {"root", *ATTENTION_SIDES}
    if circuit.method.name == "acc++" and all(edge.side in sides for edge in circuit.edges):
        return as_given(case, circuit)
    from headtrace.tracing import Tracer

    root, ids = circuit.root, list(circuit.prompt.token_ids)
    ids = ids[: len(ids) - len(root.answer_prefix)]  # the tracer puts a continuation behind the prompt itself
    return as_given(case, Tracer(case.model).trace(ids, root=root))


Baseline = Callable[[PatchingCase, Circuit], ComponentRanking]
BASELINES: Mapping[str, Baseline] = {
    "attention": lambda case, _: by_attention(case),
    "attribution patching": lambda case, _: attribution_patching(case),
    "integrated gradients": lambda case, _: attribution_patching(case, IG_POINTS),
    "acc++": attention_circuit,
}
"""Rankings to compare with, by name; ``random`` is one more, drawn several times."""
RANDOM = "random"


def chosen_baselines(given: bool | Sequence[str]) -> list[str]:
    """The names of baselines: all, none, or those that are listed."""
    known = [RANDOM, *BASELINES]
    if isinstance(given, bool):
        return known if given else []
    names = [given] if isinstance(given, str) else list(given)
    for name in names:
        if name not in known:
            raise InputError(f"There is no baseline {name!r}: choose from {', '.join(map(repr, known))}.")
    return names
