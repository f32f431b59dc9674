"""The control signals of sinks: what upstream components wrote so that heads attend there, and what heads share.

A firing's signal on one side is the sum of its causes' signals, as one residual vector: the vector of least norm that
carries exactly the coefficients of the claimed channels and none in the others (`headtrace.causal.signals` has the
same for one edge). On the query side it stands at the destination, on the key side at the sink. A head's own bias
(``offset``) is left out: no component wrote it, and it is the same for every prompt by construction.

Signals are compared by direction: each is scaled to length one, and a head's mean signal is the mean of those, scaled
to length one again.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headtrace.models.devices import exact, rounded
from headtrace.models.observer import Rotary
from headtrace.sinks.tokens import SinkPrompt
from headtrace.statistics import RESAMPLES
from headtrace.tracing.causes import Causes
from headtrace.tracing.components import Firings
from headtrace.tracing.signal_directions import readings_at
from headtrace.vocabulary import ATTENTION_SIDES, AttentionSide, Firing, head_name

if TYPE_CHECKING:
    from headtrace.models import Model, Recording
    from headtrace.tracing import Tracer

AT_ONCE = 128
"""Firings whose readings (d_model x channels each) are built together."""
SHARED = 0.9
"""A head shares a direction if its mean signal has at least this |cosine| with it."""
MOST_DIRECTIONS = 16
"""Directions that are kept and listed."""


@dataclass(frozen=True)
class SinkFiring:
    """A head that attends to a sink in one prompt."""

    prompt: int
    firing: Firing
    attention: float


@dataclass(frozen=True, eq=False)
class SinkSignals:
    """Signals of many firings: a row of ``table`` is a row of each side's ``vectors``."""

    table: pl.DataFrame
    """layer, head, prompt, task, dest, src, attention, query_causes, key_causes."""
    vectors: Mapping[AttentionSide, Float[Tensor, "firing d_model"]]

    def __len__(self) -> int:
        return len(self.table)


def one_firing_per_head(
    tracer: Tracer, recording: Recording, prompt: int, sinks: Bool[Tensor, " token"], key: tuple[int, ...]
) -> Iterator[Firing]:
    """For every head past the first layer that attends to a sink, one firing: a destination at random, by ``key``."""
    n = recording.lengths[prompt]
    attention = recording.patterns[1:, prompt, :, :n, :n] * sinks[:n].to(recording.patterns.dtype)
    before = torch.ones(n, n, dtype=torch.bool, device=attention.device).tril(-1)
    strongest, src = (attention * before).max(dim=-1)
    seen = recording.visible_keys[1:, prompt, :n]
    limits = {keys: tracer.method.threshold(keys) for keys in seen.unique().tolist()}
    limit = strongest.new_tensor([[limits[keys] for keys in row] for row in seen.tolist()])
    fires = (strongest >= limit[:, None]) & (strongest > 0)
    # Equal prompts are given equal draws, whatever else runs with them.
    generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    draw = torch.rand(fires.shape, generator=generator).to(fires.device) * fires
    dest = draw.argmax(dim=-1, keepdim=True)
    places = torch.cat((dest, src.gather(-1, dest)), dim=-1).tolist()
    for layer, head in fires.any(dim=-1).nonzero().tolist():
        yield Firing(layer + 1, head, *places[layer][head])


def choose_firings(
    found: Sequence[SinkFiring], cases: Sequence[SinkPrompt], per_head: int, seed: int
) -> list[SinkFiring]:
    """At most ``per_head`` firings of each head, from prompts drawn at random, as many of each task as there are."""
    order = torch.randperm(len(cases), generator=torch.Generator().manual_seed(seed)).tolist()
    rank = {prompt: place for place, prompt in enumerate(order)}
    of_head: dict[tuple[int, int], dict[str, list[SinkFiring]]] = {}
    for each in sorted(found, key=lambda each: rank[each.prompt]):
        head = (each.firing.layer, each.firing.head)
        of_head.setdefault(head, {}).setdefault(cases[each.prompt].task, []).append(each)
    chosen: list[SinkFiring] = []
    for tasks in of_head.values():
        turn = sorted((place, task) for task, group in tasks.items() for place in range(len(group)))
        chosen += [tasks[task][place] for place, task in turn[:per_head]]
    return sorted(chosen, key=lambda each: (each.prompt, each.firing))


class SignalVectors:
    """Signals as residual vectors, firing by firing; keeps the inverses of a model's projections."""

    def __init__(self, model: Model) -> None:
        self.model, self._inverses = model, dict[tuple[int, AttentionSide], Tensor]()

    def summed(
        self, recording: Recording, causes: Sequence[Causes], side: AttentionSide
    ) -> Float[Tensor, "firing d_model"]:
        """The summed signal of each firing on one side; zero where no component wrote one."""
        found = recording.residuals.new_zeros(len(causes), self.model.d_model)
        layers: dict[int, list[int]] = {}
        for row, each in enumerate(causes):
            layers.setdefault(each.firing.layer, []).append(row)
        for rows in layers.values():
            for start in range(0, len(rows), AT_ONCE):
                some = rows[start : start + AT_ONCE]
                found[some] = self._of_layer(recording, [causes[row] for row in some], side)
        return found

    def _of_layer(
        self, recording: Recording, causes: Sequence[Causes], side: AttentionSide
    ) -> Float[Tensor, "firing d_model"]:
        """The same for firings of one layer: coefficients in channels, then the residual that carries them."""
        sites = [(each.prompt, each.site) for each in causes]
        readings = readings_at(recording, sites, side)
        coefficients = readings.new_zeros(len(causes), readings.shape[-1])
        for row, each in enumerate(causes):
            for cause in each.side(side).causes:
                # Only what a component wrote into the residual at the place where it is read.
                if cause.site.kind not in ("offset", "rounding") and cause.site.possible and cause.channels:
                    channels = list(cause.channels)
                    write = recording.write(cause.site.component, each.prompt, cause.site.dest)
                    coefficients[row, channels] += write @ readings[row][:, channels]
        firings = Firings.of(sites, self.model.device)
        layer, b, query = int(firings.layer[0]), firings.prompt, side == "query"
        at = firings.dest if query else firings.src
        # The other side's basis is the inverse of this one's (G_d G_s^T = 1).
        channels = self.model.channels.at(firings.layer, firings.head)
        inside = (coefficients[:, None] @ (channels.to_key if query else channels.to_query).mT)[:, 0]
        rotary = recording.rotary[layer]
        if rotary is not None:
            rows = b if rotary.cos.shape[0] > 1 else torch.zeros_like(b)
            here = Rotary(rotary.cos[rows, at][:, None], rotary.sin[rows, at][:, None])
            inside = here.inverse.rotate(inside[:, None, None])[:, 0, 0].to(inside.dtype)
        reader = firings.head if query else firings.head // self.model.weights.group
        scales = recording.query_scales if query else recording.key_scales
        if scales is not None:
            inside = inside * scales[layer, b, reader, at][:, None]
        if (layer, side) not in self._inverses:
            W = self.model.weights.W_Q[layer] if query else self.model.weights.W_K[layer]
            self._inverses[layer, side] = rounded(torch.linalg.pinv(exact(W)), like=W)
        carried = (inside[:, None] @ self._inverses[layer, side][reader])[:, 0]
        return carried * recording.norm_scales[layer, b, at][:, None]


def traced_signals(
    tracer: Tracer,
    vectors: SignalVectors,
    recording: Recording,
    firings: Sequence[SinkFiring],
    places: Mapping[int, int],
    cases: Sequence[SinkPrompt],
) -> SinkSignals:
    """Trace firings of a recording's prompts (``places``: where each prompt is in it), and add their signals up."""
    causes = tracer.trace_firings(
        recording, [each.firing for each in firings], [places[each.prompt] for each in firings]
    )
    rows = [
        {
            "layer": each.firing.layer,
            "head": each.firing.head,
            "prompt": each.prompt,
            "task": cases[each.prompt].task,
            "dest": each.firing.dest,
            "src": each.firing.src,
            "attention": each.attention,
            **{f"{side}_causes": len(found.side(side).causes) for side in ATTENTION_SIDES},
        }
        for each, found in zip(firings, causes, strict=True)
    ]
    return SinkSignals(
        pl.DataFrame(rows),
        {side: vectors.summed(recording, causes, side).float().cpu() for side in ATTENTION_SIDES},
    )


def concatenate(parts: Sequence[SinkSignals]) -> SinkSignals:
    """Signals of several recordings as one table, head by head."""
    table = pl.concat([part.table for part in parts]).with_row_index("row")
    table = table.sort("layer", "head", "prompt")
    order = table["row"].to_list()
    vectors: dict[AttentionSide, Tensor] = {
        side: torch.cat([part.vectors[side] for part in parts])[order] for side in ATTENTION_SIDES
    }
    return SinkSignals(table.drop("row"), vectors)


# -- what heads have in common -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class MeanSignals:
    """One side: the heads that have a signal, their mean signals, and common directions, strongest first."""

    heads: tuple[tuple[int, int], ...]
    means: Float[Tensor, "head d_model"]
    directions: Float[Tensor, "direction d_model"]
    """Orthonormal: the right singular vectors of ``means``."""
    explained: tuple[float, ...]
    """The share of the squared length of all mean signals that lies along each direction."""

    @property
    def names(self) -> list[str]:
        return [head_name(*head) for head in self.heads]

    @property
    def first_layer(self) -> int:
        return min(layer for layer, _ in self.heads)

    def cosines(self) -> Float[Tensor, "head head"]:
        return self.means @ self.means.T

    def shared(self) -> list[int]:
        """How many heads share each direction."""
        return ((self.means @ self.directions.T).abs() >= SHARED).sum(0).tolist()


Means = dict[AttentionSide, MeanSignals]
"""The mean signals of both sides."""


def unit(x: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """Rows of length one; rows of zeros stay."""
    return torch.nn.functional.normalize(x, dim=-1)


def mean_signals(signals: SinkSignals, side: AttentionSide) -> MeanSignals:
    """Each head's mean signal, and the directions that they have in common."""
    vectors = unit(signals.vectors[side].double())
    heads: list[tuple[int, int]] = []
    means: list[Tensor] = []
    for head, rows in _rows_of_heads(signals):
        total = vectors[rows].mean(0)
        if float(total.norm()) > 0:
            heads.append(head)
            means.append(total / total.norm())
    if not heads:
        empty = vectors.new_zeros(0, vectors.shape[1])
        return MeanSignals((), empty.float(), empty.float(), ())
    stacked = torch.stack(means)
    directions, explained = common_directions(stacked)
    return MeanSignals(tuple(heads), stacked.float(), directions.float(), tuple(explained))


def common_directions(means: Float[Tensor, "head d_model"]) -> tuple[Tensor, list[float]]:
    """Right singular vectors, pointing where most heads do, and the share that each explains."""
    _, size, right = torch.linalg.svd(means, full_matrices=False)
    kept = right[:MOST_DIRECTIONS]
    sign = (means @ kept.T).sum(0).sign()
    kept = kept * torch.where(sign == 0, torch.ones_like(sign), sign)[:, None]
    return kept, (size.square() / size.square().sum())[: len(kept)].tolist()


def _rows_of_heads(signals: SinkSignals) -> list[tuple[tuple[int, int], list[int]]]:
    rows: dict[tuple[int, int], list[int]] = {}
    for row, head in enumerate(signals.table.select("layer", "head").iter_rows()):
        rows.setdefault((head[0], head[1]), []).append(row)
    return sorted(rows.items())


def constancy_table(signals: SinkSignals, seed: int) -> pl.DataFrame:
    """For each head and side, the mean cosine of its signals over pairs of prompts.

    ``constancy`` takes pairs of different tasks (of different prompts, where there is one task only), ``within`` pairs
    of one task; the 95 % interval of ``constancy`` resamples prompts.
    """
    tasks = signals.table["task"].to_list()
    several = len(set(tasks)) > 1
    rows: list[dict[str, Any]] = []
    for side in ATTENTION_SIDES:
        vectors = unit(signals.vectors[side].double())
        for (layer, head), mine in _rows_of_heads(signals):
            used = [row for row in mine if float(vectors[row].norm()) > 0]
            cosines = (vectors[used] @ vectors[used].T).numpy()
            task = np.asarray([tasks[row] for row in used])
            other = task[:, None] != task[None]
            apart = ~np.eye(len(used), dtype=bool)
            mean, low, high = mean_of_pairs(cosines, other if several else apart, seed)
            within, _, _ = mean_of_pairs(cosines, apart & ~other, seed)
            rows.append(
                {"layer": layer, "head": head, "side": side, "firings": len(used), "tasks": len(set(task))}
                | {"constancy": mean, "low": low, "high": high, "within": within}
            )
    schema = {"layer": pl.Int64, "head": pl.Int64, "side": pl.String, "firings": pl.Int64, "tasks": pl.Int64}
    schema |= dict.fromkeys(("constancy", "low", "high", "within"), pl.Float64)
    return pl.DataFrame(rows, schema=schema)


def mean_of_pairs(cosines: Any, pairs: Any, seed: int) -> tuple[float | None, float | None, float | None]:
    """The mean over chosen pairs, and its 95 % interval: prompts are resampled, and a prompt is no pair with itself."""
    if not pairs.any():
        return None, None, None
    n = len(cosines)
    counts = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), RESAMPLES).astype(float)
    totals = ((counts @ (cosines * pairs)) * counts).sum(1)
    sizes = ((counts @ pairs.astype(float)) * counts).sum(1)
    means = totals[sizes > 0] / sizes[sizes > 0]
    low, high = np.quantile(means, (0.025, 0.975))
    return float(cosines[pairs].mean()), float(low), float(high)


def direction_table(means: Means) -> pl.DataFrame:
    """A row per side and common direction: what it explains, and how many heads share it."""
    rows = [
        {"side": side, "direction": k, "explained": share, "cumulative": sum(found.explained[: k + 1])}
        | {"shared": shared, "heads": len(found.heads)}
        for side, found in means.items()
        for k, (share, shared) in enumerate(zip(found.explained, found.shared(), strict=True))
    ]
    schema = {"side": pl.String, "direction": pl.Int64, "explained": pl.Float64, "cumulative": pl.Float64}
    schema |= {"shared": pl.Int64, "heads": pl.Int64}
    return pl.DataFrame(rows, schema=schema)


def group_table(means: Means) -> pl.DataFrame:
    """Heads that share a signal with one of them: the largest such group first, then the largest of the rest.

    Singular directions stand at right angles to each other, and what groups of heads share need not.
    """
    rows: list[dict[str, Any]] = []
    for side, found in means.items():
        near = found.cosines().abs() >= SHARED
        left = list(range(len(found.heads)))
        while left:
            sizes = near[left][:, left].sum(1)
            centre = left[int(sizes.argmax())]
            members = [head for head in left if bool(near[centre, head]) or head == centre]
            rows.append(
                {"side": side, "size": len(members), "centre": found.names[centre]}
                | {
                    "heads": [found.names[m] for m in members],
                    "layers": len({found.heads[m][0] for m in members}),
                }
            )
            left = [head for head in left if head not in members]
    schema = {"side": pl.String, "size": pl.Int64, "centre": pl.String}
    schema |= {"heads": pl.List(pl.String), "layers": pl.Int64}
    return pl.DataFrame(rows, schema=schema)
