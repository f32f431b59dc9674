"""How much of a root each component contributes, and which components tracing starts from.

Norms are frozen, so every component has an exact share of the output logits, or of any direction of the residual
stream. What differs between roots (which directions, which components are enough) is in `headtrace.roots`; here is what
they have in common: a point of the residual stream that is read, the contributions of all components there, and the
selection of seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headtrace.errors import IdentityError
from headtrace.models.identities import tolerance_for
from headtrace.tracing.causes import Cause
from headtrace.tracing.components import ComponentIndex
from headtrace.tracing.methods import IG_STEPS
from headtrace.vocabulary import Site, head_name

if TYPE_CHECKING:
    from headtrace.models import Recording
    from headtrace.roots import Root


# -- writes along directions ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A residual that is read: of one prompt, at one position, before a layer's attention, or behind it."""

    prompt: int
    position: int
    layer: int
    behind_attention: bool = False
    """Whether that layer's attention has written already: an MLP reads there, unless its block is parallel."""

    @property
    def attention_layers(self) -> int:
        """How many layers' attention has written."""
        return self.layer + self.behind_attention


@dataclass(frozen=True)
class ProjectedWrites:
    """What every component upstream of some places writes along one direction for each of them."""

    places: Sequence[Place]
    index: ComponentIndex
    shares: Float[Tensor, "place component"]
    """In the order of ``index``; zero for what is not upstream of a place."""


def carries_nothing(dtype: torch.dtype) -> float:
    """A share of a sum that is smaller than this, relative to the sizes of all its terms, may be rounding."""
    return 64 * torch.finfo(dtype).eps


@torch.inference_mode()
def project_writes(
    recording: Recording, places: Sequence[Place], directions: Float[Tensor, "place d_model"]
) -> ProjectedWrites:
    """Project every component's write at each place onto that place's direction: its share of anything linear.

    A root reads the final residual along a direction, a head's value reads its source's residual, an MLP its own
    token's, a probe any of them.
    """
    top = max(place.attention_layers for place in places)
    length = max(place.position for place in places) + 1
    index = ComponentIndex.of(recording, top, length)
    b = torch.tensor([place.prompt for place in places], device=directions.device)
    t = torch.tensor([place.position for place in places], device=directions.device)
    layers = torch.arange(top, device=directions.device)
    mlps = layers < layers.new_tensor([place.layer for place in places])[:, None]
    attention = layers < layers.new_tensor([place.attention_layers for place in places])[:, None]
    weights = recording.model.weights
    shares = directions.new_zeros(len(places), index.n_components)
    plain = (recording.plain_writes[b, : index.mlps.stop, t] @ directions[..., None])[..., 0]
    shares[:, : index.mlps.stop] = plain
    shares[:, index.mlps] *= mlps
    strength = attention.to(directions.dtype)
    if recording.post_norm_scales is not None:
        strength = strength / recording.post_norm_scales[:top, b, t].T
    if index.biased:
        shares[:, index.biases] = directions @ weights.attention_bias[:top].T * strength
    if recording.model.half:
        rounding = (recording.roundings[:top, b, t].transpose(0, 1) @ directions[..., None])[..., 0]
        shares[:, index.roundings] = rounding * mlps
    if top:
        heads = shares[:, index.n_non_head :].unflatten(1, (top, recording.model.n_heads, length))
        _head_shares(recording, places, directions, heads)
        heads *= strength[..., None, None]
    return ProjectedWrites(places, index, shares)


def _head_shares(
    recording: Recording,
    places: Sequence[Place],
    directions: Float[Tensor, "place d_model"],
    out: Float[Tensor, "place layer head src"],
) -> None:
    """``A[t, j] v[j] W_O . direction`` for every head component; one product per prompt."""
    _, top, _, length = out.shape
    rows_of: dict[int, list[int]] = {}
    for row, place in enumerate(places):
        rows_of.setdefault(place.prompt, []).append(row)
    moved = _moved_along(recording, rows_of, directions, top, length)
    for (prompt, rows), along in zip(rows_of.items(), moved, strict=True):
        at = torch.tensor([places[row].position for row in rows], device=along.device)
        patterns = recording.attention.rows(top, torch.full_like(at, prompt), at, length)
        out[rows] = along * patterns


def _moved_along(
    recording: Recording,
    rows_of: Mapping[int, list[int]],
    directions: Float[Tensor, "place d_model"],
    top: int,
    length: int,
) -> Iterator[Float[Tensor, "mine layer head src"]]:
    """``v[j] W_O . direction`` for every head and source, prompt by prompt: from what heads write, where that is kept;
    else through the weights, for the directions of all prompts at once."""
    if recording.head_writes is not None:
        for prompt, rows in rows_of.items():
            writes = recording.head_writes[prompt, :top]
            yield (directions[rows] @ writes.flatten(0, 2).T).unflatten(1, writes.shape[:3])[..., :length]
        return
    model = recording.model
    W_O = model.weights.W_O[:top].flatten(0, 2)
    # A product with a single column runs on one core, and takes longer than one with two.
    columns = directions if len(directions) > 1 else directions.repeat(2, 1)
    read = (W_O @ columns.T)[:, : len(directions)].contiguous()
    # Heads that share values stand side by side.
    shared = read.unflatten(0, (top, model.n_kv_heads, -1, model.d_head)).transpose(2, 3)
    for prompt, rows in rows_of.items():
        values = recording.shared_values[:top, :, prompt, :length]
        mine = shared if len(rows) == len(directions) else shared[..., rows]
        moved = (values @ mine.flatten(3)).unflatten(3, mine.shape[3:])
        yield moved.permute(4, 0, 1, 3, 2).flatten(2, 3)


# -- roots ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seeds:
    """The root of one prompt with its value and position, and the components from which tracing starts."""

    root: Root
    causes: tuple[Cause, ...]
    reason: str | None = None
    """Why there are none, if there are none."""
    nothing: bool = False
    """Whether there is nothing to explain at all, rather than only no head among the seeds."""


@dataclass(frozen=True)
class ReadPoint:
    """The residual stream of one prompt at one position, before one layer's attention or before the final norm."""

    recording: Recording
    prompt: int
    position: int
    layer: int

    @classmethod
    def final(cls, recording: Recording, prompt: int, position: int | None = None) -> ReadPoint:
        """Before the final norm, at the last position unless another is given."""
        last = recording.lengths[prompt] - 1
        return cls(recording, prompt, last if position is None else position, recording.model.n_layers)

    @property
    def index(self) -> ComponentIndex:
        return ComponentIndex.of(self.recording, self.layer, self.position + 1)

    @property
    def residual(self) -> Float[Tensor, " d_model"]:
        return self.recording.residuals[self.layer, self.prompt, self.position]

    @property
    def final_scale(self) -> Float[Tensor, ""]:
        """The frozen scale of the final norm."""
        return self.recording.norm_scales[-1, self.prompt, self.position]

    @property
    def place(self) -> Place:
        return Place(self.prompt, self.position, self.layer)

    @torch.inference_mode()
    def add_logit_rounding(
        self, contributions: Float[Tensor, " component"], read: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, " component"]:
        """In half precision, add what rounding did to the output logits themselves as one more contribution."""
        model = self.recording.model
        if model.half and model.final_softcap is None:
            recorded = self.recording.logits_at(self.prompt, self.position)
            computed = self.logits_of(self.residual[None])[0] + model.weights.output_bias
            contributions[self.index.n_non_head - 1] = read(recorded - computed)
        return contributions

    def before_norm(self, vector: Float[Tensor, " d_model"]) -> Float[Tensor, " d_model"]:
        """A direction after the final norm as a direction before it, with the norm's scale frozen."""
        model = self.recording.model
        return model.architecture.centred_at_the_end(vector * model.weights.final_gain / self.final_scale)

    def logits_of(self, writes: Float[Tensor, "n d_model"]) -> Float[Tensor, "n vocab"]:
        """What some writes add to the output logits, before biases and softcap."""
        model = self.recording.model
        normed = model.architecture.centred_at_the_end(writes) / self.final_scale * model.weights.final_gain
        return normed @ model.weights.W_U.T

    def uncapped_logits(self) -> Float[Tensor, " vocab"]:
        """Output logits before the final softcap; undoing a saturated cap loses digits, so from the residual."""
        if self.recording.model.final_softcap is None:
            return self.recording.logits_at(self.prompt, self.position)
        return self.logits_of(self.residual[None])[0] + self.recording.model.weights.output_bias

    def writes(self, numbers: Int[Tensor, " n"]) -> Float[Tensor, "n d_model"]:
        """The write vectors of a few components, by number."""
        components = (self.index.component(number) for number in numbers.tolist())
        return torch.stack([self.recording.write(c, self.prompt, self.position) for c in components])

    def require_sum(self, total: float, recorded: float, size: float) -> None:
        """The contributions must sum to what the model computed; errors are relative to ``size``."""
        error, allowed = abs(total - recorded) / max(size, 1e-30), tolerance_for(self.recording.model.dtype)
        if not error <= allowed:
            raise IdentityError(
                f"The contributions at layer {self.layer}, position {self.position} (prompt {self.prompt}) sum to "
                f"{total:.6g}, the model has {recorded:.6g}: relative error {error:.1e}, allowed {allowed:.0e}."
            )

    def cause(self, number: int, weight: float) -> Cause:
        return Cause(self.index.component(number).at(self.position), weight)


@dataclass(frozen=True)
class RootReading:
    """A point of the residual stream and the direction along which a root reads it."""

    point: ReadPoint
    direction: Float[Tensor, " d_model"]
    """With the final norm frozen: the root's gradient with respect to the residual at that point."""
    detail: Any = None
    """What the root itself keeps for its own later steps."""


@dataclass(frozen=True)
class RootPart(RootReading):
    """One point that a root reads, and what every component there contributes, in the unit of the root."""

    contributions: Float[Tensor, " component"] = None  # type: ignore[assignment]


@dataclass(frozen=True)
class RootAttribution:
    """A root with its value and position, and what every component contributes to it."""

    root: Root
    parts: tuple[RootPart, ...]
    size: float
    """The largest numbers that the value is added up from: what errors are measured against."""

    def weight(self, site: Site) -> float | None:
        """What a component contributes where it is read; None where the root does not read it."""
        part = next((part for part in self.parts if part.point.position == site.dest), None)
        if part is None:
            return None
        if site.kind == "offset":
            return getattr(self.root, "bias", None) if site.layer is None else None
        number = part.point.index.number(site.component)
        return None if number is None else float(part.contributions[number])


def find_seeds(roots: Sequence[Root], recording: Recording, ig_steps: int = IG_STEPS) -> list[Seeds]:
    """The components from which tracing starts, for every prompt of a recording."""
    read = [(prompt, root) for prompt, root in enumerate(roots) if root.has_directions]
    found = dict(zip(dict(read), attribute_roots(read, recording, ig_steps), strict=True))
    return [root.seeds(recording, prompt, found.get(prompt)) for prompt, root in enumerate(roots)]


def attribute_root(
    root: Root, recording: Recording, prompt: int = 0, ig_steps: int = IG_STEPS
) -> RootAttribution:
    """The value of a root in one prompt of a recording, and every component's contribution to it."""
    return attribute_roots([(prompt, root)], recording, ig_steps)[0]


def attribute_roots(
    roots: Sequence[tuple[int, Root]], recording: Recording, ig_steps: int = IG_STEPS
) -> list[RootAttribution]:
    """The same for roots of several prompts: writes along all their directions are computed together."""
    readings = [root.readings(recording, prompt, ig_steps) for prompt, root in roots]
    flat = [reading for mine in readings for reading in mine]
    together: dict[tuple[int, int], list[int]] = {}
    for i, reading in enumerate(flat):
        together.setdefault((reading.point.layer, reading.point.position), []).append(i)
    written: dict[int, Tensor] = {}
    for mine in together.values():
        directions = torch.stack([flat[i].direction for i in mine])
        found = project_writes(recording, [flat[i].point.place for i in mine], directions)
        written |= dict(zip(mine, found.shares, strict=True))
    ordered = iter([written[i] for i in range(len(flat))])
    return [
        root.attribute(recording, mine, [next(ordered) for _ in mine])
        for (_, root), mine in zip(roots, readings, strict=True)
    ]


# -- which components are seeds ------------------------------------------------------------------------------


def above_cutoff(contributions: Float[Tensor, " component"]) -> list[tuple[int, float]]:
    """Components at or above the cutoff: where the running sum reaches the total, at most half of the total.

    Sums are known to rounding only, so the total is reached when what is missing is of that size. A contribution
    that the tolerance of the identity checks would not notice is never a seed.

    >>> above_cutoff(torch.tensor([1.0, 0.0, 0.0, 0.0]))
    [(0, 1.0)]
    """
    total = float(contributions.sum())
    if total <= 0:
        return []
    values, order = contributions.sort(descending=True, stable=True)
    rounding = torch.finfo(values.dtype).eps * float(values.abs().sum())
    reached = (values.cumsum(0) >= total - rounding).nonzero()
    cutoff = float(values[int(reached[0])]) if len(reached) else float(values[-1])
    least = max(rounding, tolerance_for(values.dtype) * total)
    keep = (values >= min(cutoff, total / 2)) & (values > least)
    return list(zip(order[keep].tolist(), values[keep].tolist(), strict=True))


NO_HEAD = "no head is among"
"""How the reason begins where attention has nothing to begin with, but MLPs do."""


def seeds_or_reason(found: list[Cause], attribution: RootAttribution, advice: str) -> Seeds:
    """Seeds, if a head is among them; else none, with the reason and what to try instead."""
    if any(cause.site.kind == "head" for cause in found):
        return Seeds(attribution.root, tuple(found))
    components = "one component" if len(found) == 1 else f"{len(found)} components"
    reason = f"{NO_HEAD} the {components} that the root depends on"
    advice = f'follow MLPs and what is moved as well (paths="complete", --paths complete), or {advice}'
    return replace(no_seeds(attribution, reason, advice), nothing=False)


def no_seeds(attribution: RootAttribution, reason: str, advice: str) -> Seeds:
    """No seeds: why, what contributes most for and against the root, and what to try instead."""

    def strongest(sign: int, only_heads: bool = False) -> list[Cause]:
        found: list[Cause] = []
        for part in attribution.parts:
            first = part.point.index.n_non_head if only_heads else 0
            signed = sign * part.contributions[first:]
            values, numbers = signed.topk(min(3, len(signed)))
            pairs = zip(numbers.tolist(), values.tolist(), strict=True)
            found += [part.point.cause(first + n, sign * v) for n, v in pairs if v > 0]
        return sorted(found, key=lambda cause: (-abs(cause.weight), cause.site))[:3]

    listed = [
        f"strongest {word} it: " + ", ".join(f"{cause.site} ({cause.weight:+.3g})" for cause in causes)
        for word, causes in (("for", strongest(1)), ("against", strongest(-1)))
        if causes
    ]
    heads = [cause.site for cause in strongest(1, only_heads=True)]
    names = dict.fromkeys(head_name(site.layer or 0, site.head or 0) for site in heads)
    start = f", or start from heads that contribute to it ({', '.join(names)})" if names else ""
    text = f"{reason}; {'; '.join(listed)}. To find a circuit, {advice}{start}"
    return Seeds(attribution.root, (), text, nothing=True)
