"""Signals as directions of the residual, and what causes those that an MLP wrote.

A component's coefficients in the channels of a firing are ``a = o M`` with M the head's reading of a write at that
position. The direction ``n = M a / (a . a)`` measures any write against that signal: one for the component itself, a
half for a write that carries half of it.

Through an MLP: the components that it reads are sorted by their frozen-gate contribution to the signal and removed one
by one from the real MLP's input (norm scales frozen, gates live) until the signal is below half of what it was. Where
hidden units are saturated, what drives them has no frozen-gate contribution at all, so every component whose removal
alone brings the signal below half is a cause as well; and one without which it would be half as large again holds it
down (it has a negative weight, like all that opposes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headtrace.errors import IdentityError
from headtrace.models.frozen import FrozenMLP, mlp_rounding
from headtrace.models.identities import tolerance_for
from headtrace.tracing.attribute_root import Place, ProjectedWrites, carries_nothing, project_writes
from headtrace.tracing.causes import Cause, PromptSite
from headtrace.tracing.components import ChannelRotary, ComponentIndex, Firings
from headtrace.tracing.firing import FiringScores, attention_on
from headtrace.tracing.secants import activation_slope
from headtrace.vocabulary import AttentionSide, Side, Site

if TYPE_CHECKING:
    from headtrace.models import Recording

HALF = 0.5
"""A signal is gone when less than this share of it is left."""
ATTENTION_CHANGED = 0.25
"""An attention that changes by more than this share depends on what was removed."""
EQUAL_VALUES = 1e-3
"""Singular values that differ by no more than this share are equal."""
IDLE = 0.05
"""What changes by less than this share is as it was."""
REMOVED_ALONE = 16
"""Components that are removed one at a time: the longest writes that an MLP reads."""
FIRST_PREFIX, PREFIX_GROWTH = 16, 4
"""Components that are removed at first, more than most signals need; then four times as many, and so on."""


@dataclass(frozen=True)
class SignalDirection:
    """What a site writes into another one, on one side: channels of a firing, or what it moves."""

    prompt: int
    source: Site
    target: Site
    side: Side
    direction: Float[Tensor, " d_model"]
    """Of the source's write: one along it is the whole signal."""


def readings_at(
    recording: Recording, sites: Sequence[PromptSite], side: AttentionSide
) -> Float[Tensor, "firing d_model channel"]:
    """For firings of one layer, what their heads read of a write at the destination (query) or the source (key)."""
    firings = Firings.of(sites, recording.model.device)
    layer, b = firings.layer, firings.prompt
    weights = recording.model.weights
    channels = recording.model.channels.at(layer, firings.head)
    if side == "query":
        at, head, basis, scales = firings.dest, firings.head, channels.to_query, recording.query_scales
        W = weights.W_Q[layer, head]
    else:
        at, head, basis = firings.src, firings.head // weights.group, channels.to_key
        W, scales = weights.W_K[layer, head], recording.key_scales
    scale = recording.norm_scales[layer, b, at]
    if scales is not None:
        scale = scale * scales[layer, b, head, at]
    rotary = ChannelRotary.of(recording, sites[0][1].layer or 0, b, recording.token_ids.shape[1])
    return W @ rotary.basis_at(basis, at) / scale[:, None, None]


def signals_of(
    recording: Recording,
    sites: Sequence[PromptSite],
    causes: Sequence[Sequence[Cause]],
    side: AttentionSide,
) -> list[list[SignalDirection | None]]:
    """The signals of each firing's causes on one side, for firings of one layer; None for causes that are leaves."""
    matrices = readings_at(recording, sites, side)
    firings = Firings.of(sites, recording.model.device)
    values = recording.model.channels.at(firings.layer, firings.head).singular_values
    # Within channels of equal singular values any basis is as good: a signal is what it has in all of them.
    alike = (values[:, :, None] - values[:, None]).abs() <= EQUAL_VALUES * values[:, :, None]
    found: list[list[SignalDirection | None]] = [[None] * len(mine) for mine in causes]
    places, directions, sizes = list[tuple[int, int]](), list[Tensor](), list[Tensor]()
    for row, (prompt, _) in enumerate(sites):
        for number, cause in enumerate(causes[row]):
            source = cause.site
            if source.kind not in ("head", "mlp") or cause.channels is None or not source.possible:
                continue
            into = matrices[row][:, alike[row][list(cause.channels)].any(dim=0)]
            coefficients = recording.write(source.component, prompt, source.dest) @ into
            size = coefficients @ coefficients
            places.append((row, number))
            directions.append(into @ coefficients / size)
            sizes.append(size)
    positive = (torch.stack(sizes) > 0).tolist() if sizes else []
    for (row, number), direction, written in zip(places, directions, positive, strict=True):
        if written:
            prompt, target = sites[row]
            found[row][number] = SignalDirection(prompt, causes[row][number].site, target, side, direction)
    return found


# -- through MLPs --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CauseAlone:
    """A component whose removal alone changes what an MLP writes along a direction by more than half of it."""

    cause: Cause
    """With the share that its removal takes away; negative if the MLP would write more without it."""
    direction: Float[Tensor, " d_model"]
    """Of the residual that the MLP reads: the secant of the real MLP between its input with the component and
    without, so that the component's write along it is what its removal takes away."""


@dataclass(frozen=True)
class RemovedAlone:
    """What happens to an MLP's write along a direction if components are removed from its input one at a time."""

    causes: tuple[CauseAlone, ...]
    """Those that change it by more than half of it."""
    not_opposing: frozenset[Site]
    """Those without which it is no larger."""


@dataclass(frozen=True)
class MlpSignalCauses:
    """The causes of a signal that an MLP wrote, and what is left of the signal without them."""

    signal: SignalDirection
    causes: tuple[Cause, ...]
    """With their frozen-gate shares of the signal, in order of removal."""
    alone: RemovedAlone
    """What the removal of single components does to the signal."""
    held: float
    """The share that the MLP's own biases hold; 0 where it is of the size of rounding."""
    left: float
    """The share of the signal that the MLP still writes when they are removed from its input."""
    explained: bool
    """False if every component that supports the signal was removed and half of it is still written."""
    direction: Float[Tensor, " d_model"]
    """The direction of the MLP's input that carries the signal, through frozen gates."""


@torch.inference_mode()
def mlp_signal_causes(
    recording: Recording, layer: int, signals: Sequence[SignalDirection], removals: SingleRemovals
) -> list[MlpSignalCauses]:
    """The causes of signals that one layer's MLP wrote, each at the place that it read."""
    device, places, mlp = recording.model.device, removals.places, removals.mlp
    directions = torch.stack([signal.direction for signal in signals])
    pulled = mlp.back(directions)
    part, constant = project_writes(recording, places, pulled.direction), pulled.constant
    if recording.model.half:
        prompts, positions = ([p.prompt for p in places], [p.position for p in places])
        rows = torch.tensor(prompts, device=device), torch.tensor(positions, device=device)
        constant = constant + (mlp_rounding(recording, layer, rows) * directions).sum(-1)
    _require_whole(recording, part, constant, signals)
    alone = causes_alone(recording, removals, directions, signals)
    rounding = carries_nothing(directions.dtype) * (part.shares.abs().sum(dim=1) + constant.abs())
    held, least = torch.stack((torch.where(constant.abs() > rounding, constant, 0.0), rounding)).tolist()
    n_components = part.shares.shape[1]
    found: dict[int, MlpSignalCauses] = {}
    size, active = FIRST_PREFIX, list(range(len(signals)))
    while active:  # in growing prefixes, for all signals together
        k = min(size, n_components)
        values, order = part.shares[active].topk(k, dim=1)
        sites = [
            [part.index.component(number).at(places[row].position) for number in numbers]
            for row, numbers in zip(active, order.tolist(), strict=True)
        ]
        removed = torch.stack(
            [recording.writes(mine, signals[row].prompt) for row, mine in zip(active, sites, strict=True)]
        ).cumsum(dim=1)
        chosen = mlp.at(active)
        written = chosen.write(chosen.inputs[:, None] - chosen.before.forward(removed))
        left = (written @ directions[active][..., None])[..., 0]
        for i, (shares, still) in enumerate(torch.stack((values, left), dim=1).tolist()):
            row = active[i]
            positive = sum(share > least[row] for share in shares)  # they fall, so these come first
            end = next((n for n in range(positive) if still[n] < HALF), None)
            if end is None and positive == k < n_components:
                continue
            n = positive if end is None else end + 1
            causes = tuple(Cause(s, v) for s, v in zip(sites[i][:n], shares[:n], strict=True))
            rest = still[n - 1] if n else 1.0
            found[row] = MlpSignalCauses(
                signals[row], causes, alone[row], held[row], rest, end is not None, pulled.direction[row]
            )
        active = [row for row in active if row not in found]
        size *= PREFIX_GROWTH
    return [found[row] for row in range(len(signals))]


@dataclass(frozen=True)
class SingleRemovals:
    """What an MLP writes at each of some places without one of the longest writes that it reads, each by itself."""

    places: tuple[Place, ...]
    mlp: FrozenMLP
    """At these places."""
    sites: tuple[tuple[Site, ...], ...]
    """The components that are removed, for each place; k of them."""
    removed: Float[Tensor, "place k d_model"]
    """Their writes; zero for what is not upstream."""
    written: Float[Tensor, "place k d_model"]

    @classmethod
    @torch.inference_mode()
    def of(cls, recording: Recording, layer: int, places: Sequence[Place]) -> SingleRemovals:
        device = recording.model.device
        rows = (
            torch.tensor([place.prompt for place in places], device=device),
            torch.tensor([place.position for place in places], device=device),
        )
        mlp = FrozenMLP.of(recording, layer, rows)
        sizes, numbers, index = longest_writes(recording, places, REMOVED_ALONE)
        sites = tuple(
            tuple(index.component(number).at(place.position) for number in mine)
            for place, mine in zip(places, numbers.tolist(), strict=True)
        )
        writes = [recording.writes(mine, place.prompt) for place, mine in zip(places, sites, strict=True)]
        removed = torch.stack(writes) * (sizes > 0).to(mlp.inputs.dtype)[..., None]
        written = mlp.write(mlp.inputs[:, None] - mlp.before.forward(removed))
        return cls(tuple(places), mlp, sites, removed, written)

    def at(self, rows: list[int]) -> SingleRemovals:
        """Those of some of the places; one may be there several times."""
        return SingleRemovals(
            tuple(self.places[row] for row in rows),
            self.mlp.at(rows),
            tuple(self.sites[row] for row in rows),
            self.removed[rows],
            self.written[rows],
        )


@torch.inference_mode()
def causes_alone(
    recording: Recording,
    removals: SingleRemovals,
    directions: Float[Tensor, "place d_model"],
    signals: Sequence[SignalDirection] = (),
) -> list[RemovedAlone]:
    """For each place that an MLP reads, the components without which it writes less than half of what it does along a
    direction, or half as much again: removed one at a time from the real MLP's input, the longest writes only.

    A direction measures the whole write as one. With ``signals`` (one of a query or key for each place), also those
    without which the attention of the head would change by a quarter: an MLP that writes something else besides still
    writes its signal.
    """
    mlp, sites, removed, written = removals.mlp, removals.sites, removals.removed, removals.written
    left = (written @ directions[..., None])[..., 0]
    along, changed = directions[:, None].expand_as(written), (1 - left).abs() > HALF
    if signals:
        readers: list[tuple[PromptSite, Side]] = [((s.prompt, s.target), s.side) for s in signals]
        attention, read = _attention_left(recording, readers, mlp.write(mlp.inputs[:, None]) - written)
        attends = (1 - attention).abs() > ATTENTION_CHANGED
        changed &= (left < 1) | attends  # a signal that grows where attention cannot is held down by nothing
        hidden = ~changed & attends
        left, along = torch.where(hidden, attention, left), torch.where(hidden[..., None], read, along)
        changed |= hidden
    found: list[list[CauseAlone]] = [[] for _ in sites]
    rest, alone = torch.stack((left, changed.to(left))).tolist()
    chosen = [(row, n) for row, mine in enumerate(alone) for n, is_cause in enumerate(mine) if is_cause]
    if chosen:  # all together: each by itself would be waited for
        rows, ns = [row for row, _ in chosen], [n for _, n in chosen]
        backs = _secant_back(mlp.at(rows), removed[rows, ns], along[rows, ns])
        for (row, n), back in zip(chosen, backs, strict=True):
            found[row].append(CauseAlone(Cause(sites[row][n], 1 - rest[row][n]), back))
    no_larger = [[share < 1 + IDLE for share in mine] for mine in rest]
    return [
        RemovedAlone(
            tuple(mine), frozenset(site for site, not_larger in zip(*both, strict=True) if not_larger)
        )
        for mine, *both in zip(found, sites, no_larger, strict=True)
    ]


@torch.inference_mode()
def held_down_by(
    recording: Recording, sites: Sequence[PromptSite], attention: Sequence[float]
) -> list[tuple[Site, ...]]:
    """For each firing, the components at its destination without which its head would attend there far more: removed
    one at a time from its query, norm scale frozen, they leave at most half of the way to attending to nothing else.

    ACC++ removes what makes a head attend; what keeps it from attending is seen here, of the longest writes only.
    """
    places = [Place(prompt, site.dest or 0, site.layer or 0) for prompt, site in sites]
    sizes, numbers, index = longest_writes(recording, places, REMOVED_ALONE)
    writers = [
        [index.component(number).at(place.position) for number in mine]
        for place, mine in zip(places, numbers.tolist(), strict=True)
    ]
    removed = torch.stack(
        [recording.writes(mine, place.prompt) for place, mine in zip(places, writers, strict=True)]
    )
    removed = removed * (sizes > 0).to(removed)[..., None]
    readers: list[tuple[PromptSite, Side]] = [(site, "query") for site in sites]
    left, _ = _attention_left(recording, readers, removed)
    now = left.new_tensor(attention)[:, None]
    most = (left * now > (1 + now) / 2).tolist()
    return [
        tuple(writer for writer, holds in zip(mine, which, strict=True) if holds)
        for mine, which in zip(writers, most, strict=True)
    ]


def _attention_left(
    recording: Recording,
    readers: Sequence[tuple[PromptSite, Side]],
    changes: Float[Tensor, "reader n d_model"],
) -> tuple[Float[Tensor, "reader n"], Float[Tensor, "reader n d_model"]]:
    """What is left of the attention of firings, as a share, if some changes are taken away from what each reads on one
    side; and a direction for each change that measures what the head reads of it as one."""
    left, directions = torch.ones_like(changes[..., 0]), torch.zeros_like(changes)
    rows_of: dict[tuple[int, Side], list[int]] = {}
    for row, ((_, target), side) in enumerate(readers):
        rows_of.setdefault((target.layer or 0, side), []).append(row)
    for (_, side), rows in rows_of.items():
        sites = [readers[row][0] for row in rows]
        firings = Firings.of(sites, changes.device)
        scores = FiringScores.of(recording, firings, recording.token_ids.shape[1], 1)
        into = readings_at(recording, sites, "query" if side == "query" else "key")
        read = changes[rows] @ into
        if side == "query":
            taken = read @ scores.b.mT
        else:
            at_source = torch.nn.functional.one_hot(firings.src, scores.logits.shape[1])
            taken = (read @ scores.a[..., None]) * at_source[:, None]
        rest = scores.logits[:, None] - taken * scores.scale
        attention = attention_on(rest, scores.visible, firings.src, scores.cap)
        left[rows] = attention / scores.attention(scores.logits)[:, None]
        size = (read * read).sum(-1, keepdim=True).clamp_min(torch.finfo(read.dtype).tiny)
        directions[rows] = read @ into.mT / size
    return left, directions


def _secant_back(
    mlp: FrozenMLP, removed: Float[Tensor, "place d_model"], directions: Float[Tensor, "place d_model"]
) -> Float[Tensor, "place d_model"]:
    """Directions of what the MLP writes as those of the residual that it reads, through the secants of its hidden units
    between its recorded input and that without a component (a router's choice stays as it was)."""
    parts, before = mlp.parts, mlp.inputs
    after = before - mlp.before.forward(removed)
    units = mlp.after.back(directions) @ parts.W_out.T
    if parts.route is not None:
        units = units * parts.route(mlp.inputs)

    def read(x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
        return x @ W if b is None else x @ W + b

    inputs = [read(x, parts.W_in, parts.b_in) for x in (before, after)]
    if parts.W_gate is None:
        back = (units * activation_slope(parts.activation, *inputs)) @ parts.W_in.T
    else:
        gates = [read(x, parts.W_gate, parts.b_gate) for x in (before, after)]
        opened = (parts.activation(gates[0]) + parts.activation(gates[1])) / 2
        back = (units * opened) @ parts.W_in.T
        slope = activation_slope(parts.activation, *gates)
        back = back + (units * (inputs[0] + inputs[1]) / 2 * slope) @ parts.W_gate.T
    return mlp.before.back(back)


def longest_writes(
    recording: Recording, places: Sequence[Place], k: int
) -> tuple[Float[Tensor, "place k"], Int[Tensor, "place k"], ComponentIndex]:
    """The components that write most at each place: the lengths of what they write (0: not upstream), their numbers."""
    top, length = max(p.attention_layers for p in places), max(p.position for p in places) + 1
    index = ComponentIndex.of(recording, top, length)
    device = recording.token_ids.device
    b = torch.tensor([place.prompt for place in places], device=device)
    t = torch.tensor([place.position for place in places], device=device)
    layers = torch.arange(top, device=device)
    mlps = layers < layers.new_tensor([place.layer for place in places])[:, None]
    attention = layers < layers.new_tensor([place.attention_layers for place in places])[:, None]
    plain = recording.plain_writes[b, : index.mlps.stop, t].norm(dim=-1)
    size = plain.new_zeros(len(places), index.n_components)
    size[:, : index.mlps.stop] = plain
    size[:, index.mlps] *= mlps
    if top:
        heads = recording.attention.rows(top, b, t, length) * recording.moved_norms[
            :top, :, b, :length
        ].movedim(2, 0)
        if recording.post_norm_scales is not None:
            heads = heads / recording.post_norm_scales[:top, b, t].T[..., None, None]
        size[:, index.n_non_head :] = (heads * attention[..., None, None]).flatten(1)
    largest = size.topk(min(k, index.n_components), dim=1)
    return largest.values, largest.indices, index


def _require_whole(
    recording: Recording,
    part: ProjectedWrites,
    constant: Float[Tensor, " signal"],
    signals: Sequence[SignalDirection],
) -> None:
    """Frozen shares and the MLP's own biases sum to the whole signal, which is one by definition."""
    total, size = part.shares.sum(1) + constant, part.shares.abs().sum(1).clamp_min(1.0)
    error = torch.nan_to_num((total - 1).abs() / size, nan=torch.inf)
    allowed = tolerance_for(recording.model.dtype)
    if bool((error > allowed).any()):
        worst = int(error.argmax())
        signal = signals[worst]
        raise IdentityError(
            f"The frozen shares of the {signal.side} signal from {signal.source} to {signal.target} (prompt "
            f"{signal.prompt}) sum to {float(total[worst]):.6g}, not to 1: relative error "
            f"{float(error[worst]):.1e}, allowed {allowed:.0e}."
        )
