"""What causes what an MLP wrote: shares through frozen gates, put right by removing components from the real MLP.

The components that an MLP reads are sorted by their frozen-gate contribution to a signal and removed one by one from
the real MLP's input (norm scales frozen, gates live) until the signal is below half of what it was. Where hidden units
are saturated, what drives them has no frozen-gate contribution at all, so every component whose removal alone brings
the signal below half is a cause as well; and one without which it would be half as large again holds it down (it has a
negative weight, like all that opposes).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headtrace.errors import IdentityError
from headtrace.models.frozen import FrozenMLP, HiddenInputs, mlp_rounding
from headtrace.models.identities import tolerance_for
from headtrace.tracing.attribute_root import Place, ProjectedWrites, carries_nothing, project_writes
from headtrace.tracing.causes import Cause, PromptSite
from headtrace.tracing.components import ComponentIndex, Firings
from headtrace.tracing.firing import FiringScores, attention_on
from headtrace.tracing.secants import activation_slope
from headtrace.tracing.signal_directions import SignalDirection, readings_at
from headtrace.vocabulary import Side, Site

if TYPE_CHECKING:
    from headtrace.models import Recording

HALF = 0.5
"""A signal is gone when less than this share of it is left."""
MAIN_READER = 0.25
"""An MLP that carries at least this share of what another one is followed for is asked what it does without parts."""
ATTENTION_CHANGED = 0.25
"""An attention that changes by more than this share depends on what was removed."""
IDLE = 0.05
"""What changes by less than this share is as it was."""
REMOVED_ALONE = 16
"""Components that are removed one at a time: the longest writes that an MLP reads."""
FIRST_PREFIX, PREFIX_GROWTH = 16, 4
"""Components that are removed at first, more than most signals need; then four times as many, and so on."""


@dataclass(frozen=True)
class MlpReader:
    """An MLP that reads what another one wrote at the same place, and the direction of what it writes that matters."""

    place: Place
    direction: Float[Tensor, " d_model"]


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
    recording: Recording,
    layer: int,
    removals: SingleRemovals,
    rows: list[int],
    signals: Sequence[SignalDirection],
) -> list[MlpSignalCauses]:
    """The causes of signals that one layer's MLP wrote, each at one of the places (``rows``) that it read."""
    device, mlp = recording.model.device, removals.mlp.at(rows)
    places = [removals.places[row] for row in rows]
    directions = torch.stack([signal.direction for signal in signals])
    pulled = mlp.back(directions)
    part, constant = project_writes(recording, places, pulled.direction), pulled.constant
    if recording.model.half:
        prompts, positions = ([p.prompt for p in places], [p.position for p in places])
        read = torch.tensor(prompts, device=device), torch.tensor(positions, device=device)
        constant = constant + (mlp_rounding(recording, layer, read) * directions).sum(-1)
    _require_whole(recording, part, constant, signals)
    alone = causes_alone(recording, removals, rows, directions, signals)
    half = _half(recording)
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
            end = next((n for n in range(positive) if still[n] < half), None)
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


def _half(recording: Recording) -> float:
    """Just below a half: where two parts carry a half each, both are causes, whatever rounding does."""
    return HALF - tolerance_for(recording.model.dtype)


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
    whole: Float[Tensor, "place d_model"]
    """What it writes with all of them."""
    hidden: HiddenInputs
    """What its hidden units read with all of them, then without each: rows of places, this one's in ``rows``."""
    rows: tuple[int, ...]

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
        without = mlp.inputs[:, None] - mlp.before.forward(removed)
        hidden = mlp.hidden_inputs(torch.cat((mlp.inputs[:, None], without), dim=1))
        written, rows = mlp.written_by(hidden), tuple(range(len(places)))
        return cls(tuple(places), mlp, sites, removed, written[:, 1:], written[:, 0], hidden, rows)

    def at(self, rows: list[int]) -> SingleRemovals:
        """Those of some of the places; one may be there several times."""
        return SingleRemovals(
            tuple(self.places[row] for row in rows),
            self.mlp.at(rows),
            tuple(self.sites[row] for row in rows),
            self.removed[rows],
            self.written[rows],
            self.whole[rows],
            self.hidden,
            tuple(self.rows[row] for row in rows),
        )

    def secants(
        self, rows: list[int], numbers: list[int], directions: Float[Tensor, "chosen d_model"]
    ) -> Float[Tensor, "chosen d_model"]:
        """Directions of what the MLP writes as those of what it reads: secants between all and without one."""
        mlp, at = self.mlp.at(rows), [self.rows[row] for row in rows]
        units = mlp.after.back(directions) @ mlp.parts.W_out.T
        before, after = self.hidden.at(at, 0), self.hidden.at(at, [number + 1 for number in numbers])
        return _secant_back(mlp, before, after, units)


@torch.inference_mode()
def causes_alone(
    recording: Recording,
    removals: SingleRemovals,
    rows: list[int],
    directions: Float[Tensor, "direction d_model"],
    signals: Sequence[SignalDirection] = (),
    readers: Sequence[Sequence[MlpReader]] = (),
) -> list[RemovedAlone]:
    """For each direction of what an MLP writes at one of the places (``rows``), the components without which it writes
    less than half of what it does along it, or half as much again: removed one at a time from the real MLP's input,
    the longest writes only.

    A direction measures the whole write as one. With ``signals`` (one of a query or key for each direction), also those
    without which the attention of the head would change by a quarter: an MLP that writes something else besides still
    writes its signal. With ``readers`` (some for each place), also those without which another MLP, its gates live,
    would do half of what the write makes it do, or half as much again: one that needs two parts of the write at once
    does nothing without either.
    """
    every, removals = removals, removals.at(rows)
    sites, written = removals.sites, removals.written
    left = (written @ directions[..., None])[..., 0]
    half = _half(recording)
    along, changed = directions[:, None].expand_as(written).clone(), (1 - left).abs() > half
    idle = (1 - left).abs() < IDLE
    if signals:
        heads: list[tuple[PromptSite, Side]] = [((s.prompt, s.target), s.side) for s in signals]
        attention, read = _attention_left(recording, heads, removals.whole[:, None] - written)
        attends = (1 - attention).abs() > ATTENTION_CHANGED
        changed &= (left < 1) | attends  # a signal that grows where attention cannot is held down by nothing
        hidden = ~changed & attends
        left, along = torch.where(hidden, attention, left), torch.where(hidden[..., None], read, along)
        changed |= hidden
        idle |= (1 - attention).abs() < IDLE
    if readers:
        changes = every.whole[:, None] - every.written
        for reader in _ReadOn.all_of(recording, readers, every.whole, changes):
            mine = [number for number, row in enumerate(rows) if row in reader.rows]
            its = [reader.rows.index(rows[number]) for number in mine]
            read_on = reader.left[its]
            hidden = ~changed[mine] & ((1 - read_on).abs() > half)
            idle[mine] |= (1 - read_on).abs() < IDLE
            numbers, ns = hidden.nonzero().unbind(1)
            if numbers.numel():
                own, its = (torch.tensor(each, device=ns.device)[numbers] for each in (mine, its))
                left[own, ns], changed[own, ns] = read_on[numbers, ns], True
                along[own, ns] = reader.secants(its, ns)
    no_larger = (left < 1 + IDLE).tolist()
    size, change = _written_otherwise(removals)
    other = ~changed & idle & (size > half)
    left = torch.where(other, 1 - size.clamp_max(1.0), left)
    along = torch.where(other[..., None], change, along)
    changed |= other
    found: list[list[CauseAlone]] = [[] for _ in sites]
    rest, alone = torch.stack((left, changed.to(left))).tolist()
    chosen = [(row, n) for row, mine in enumerate(alone) for n, is_cause in enumerate(mine) if is_cause]
    if chosen:  # all together: each by itself would be waited for
        numbers, ns = [row for row, _ in chosen], [n for _, n in chosen]
        backs = removals.secants(numbers, ns, along[numbers, ns])
        for (row, n), back in zip(chosen, backs, strict=True):
            found[row].append(CauseAlone(Cause(sites[row][n], 1 - rest[row][n]), back))
    return [
        RemovedAlone(
            tuple(mine), frozenset(site for site, not_larger in zip(*both, strict=True) if not_larger)
        )
        for mine, *both in zip(found, sites, no_larger, strict=True)
    ]


def _written_otherwise(
    removals: SingleRemovals,
) -> tuple[Float[Tensor, "place k"], Float[Tensor, "place k d_model"]]:
    """By how much all that an MLP writes changes without each component, as a share of its squared length; and a
    direction for each that measures the change as one."""
    change = removals.whole[:, None] - removals.written
    size, tiny = change.square().sum(dim=-1), torch.finfo(change.dtype).tiny
    whole = removals.whole.square().sum(dim=-1, keepdim=True)
    return size / whole.clamp_min(tiny), change / size.clamp_min(tiny)[..., None]


@dataclass(frozen=True)
class _ReadOn:
    """MLPs of one layer that read what others wrote: at most one for each place."""

    rows: list[int]
    """The places whose write is read."""
    mlp: FrozenMLP
    hidden: HiddenInputs
    """What its hidden units read: as recorded, without the write, and without each of the changes."""
    along: Float[Tensor, "reader d_hidden"]
    """Its direction, as one of its hidden units."""
    whole: Float[Tensor, " reader"]
    """What the whole write makes the reader write along its direction, its gates live."""
    left: Float[Tensor, "reader n"]
    """What is left of it if some changes are taken away from the write, as a share; one where it is nothing."""

    @classmethod
    def all_of(
        cls,
        recording: Recording,
        readers: Sequence[Sequence[MlpReader]],
        written: Float[Tensor, "place d_model"],
        changes: Float[Tensor, "place n d_model"],
    ) -> Iterator[_ReadOn]:
        """The first readers of every place, layer by layer, then the second ones, and so on."""
        for number in range(max(map(len, readers), default=0)):
            rows_of: dict[int, list[int]] = {}
            for row, mine in enumerate(readers):
                if number < len(mine):
                    rows_of.setdefault(mine[number].place.layer, []).append(row)
            for layer, rows in rows_of.items():
                which = [readers[row][number] for row in rows]
                places = torch.tensor([(r.place.prompt, r.place.position) for r in which]).to(written.device)
                mlp = FrozenMLP.of(recording, layer, (places[:, 0], places[:, 1]))
                along = mlp.after.back(torch.stack([r.direction for r in which])) @ mlp.parts.W_out.T
                removed = mlp.before.forward(torch.cat((written[rows, None], changes[rows]), dim=1))
                inputs = mlp.inputs[:, None]
                hidden = mlp.hidden_inputs(torch.cat((inputs, inputs - removed), dim=1))
                units = hidden.units()
                effect = ((units[:, :1] - units[:, 1:]) @ along[..., None])[..., 0]
                whole = effect[:, 0]
                share = torch.where((whole.abs() < IDLE)[:, None], 1.0, 1 - effect[:, 1:] / whole[:, None])
                yield cls(rows, mlp, hidden, along, whole, share)

    def secants(
        self, numbers: Int[Tensor, " chosen"], ns: Int[Tensor, " chosen"]
    ) -> Float[Tensor, "chosen d_model"]:
        """Of chosen readers, one change each: a direction of the write along which the change is what it takes away."""
        mlp, before, after = (
            self.mlp.at(numbers.tolist()),
            self.hidden.at(numbers, 0),
            self.hidden.at(numbers, ns + 2),
        )
        return _secant_back(mlp, before, after, self.along[numbers]) / self.whole[numbers, None]


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
    mlp: FrozenMLP, before: HiddenInputs, after: HiddenInputs, units: Float[Tensor, "place d_hidden"]
) -> Float[Tensor, "place d_model"]:
    """Directions of the hidden units of an MLP as those of the residual that it reads, through the secants of the units
    between two inputs (a router's choice stays as it was before)."""
    parts = mlp.parts
    if before.route is not None:
        units = units * before.route
    if parts.W_gate is None or before.gate is None or after.gate is None:
        back = (units * activation_slope(parts.activation, before.read, after.read)) @ parts.W_in.T
    else:
        opened = (parts.activation(before.gate) + parts.activation(after.gate)) / 2
        back = (units * opened) @ parts.W_in.T
        slope = activation_slope(parts.activation, before.gate, after.gate)
        back = back + (units * (before.read + after.read) / 2 * slope) @ parts.W_gate.T
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
