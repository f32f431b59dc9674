"""The signals of firings on sinks: what upstream components wrote so that a head attends there.

A firing's signal on one side is the sum of its causes' signals, as one residual vector: the vector of least norm that
carries exactly the coefficients of the claimed channels and none in the others (`headtrace.causal.signals` has the
same for one edge). On the query side it stands at the destination, on the key side at the sink. A head's own bias
(``offset``) is left out: no component wrote it, and it is the same for every prompt by construction.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headtrace.models.devices import exact, rounded
from headtrace.models.observer import Rotary
from headtrace.sinks.cases import Case
from headtrace.tracing.causes import Causes
from headtrace.tracing.components import Firings
from headtrace.tracing.signals import readings_at, write_at
from headtrace.vocabulary import ATTENTION_SIDES, AttentionSide, Firing, Site

if TYPE_CHECKING:
    from headtrace.models import Model, Recording
    from headtrace.tracing import Tracer

AT_ONCE = 128
"""Firings whose readings (d_model x channels each) are built together."""


@dataclass(frozen=True)
class SinkFiring:
    """A head that attends to a sink in one prompt."""

    prompt: int
    firing: Firing
    attention: float


@dataclass(frozen=True, eq=False)
class Signals:
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


def choose(found: Sequence[SinkFiring], cases: Sequence[Case], per_head: int, seed: int) -> list[SinkFiring]:
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
        sites = [(each.prompt, each.site) for each in causes]
        readings = readings_at(recording, sites, side)
        coefficients = readings.new_zeros(len(causes), readings.shape[-1])
        for row, each in enumerate(causes):
            for cause in each.side(side).causes:
                if _written(cause.site) and cause.channels:
                    channels = list(cause.channels)
                    write = write_at(recording, each.prompt, cause.site)
                    coefficients[row, channels] += write @ readings[row][:, channels]
        return self._carrying(recording, Firings.of(sites, self.model.device), coefficients, side)

    def _carrying(
        self,
        recording: Recording,
        firings: Firings,
        coefficients: Float[Tensor, "firing channel"],
        side: AttentionSide,
    ) -> Float[Tensor, "firing d_model"]:
        """The residual vectors of least norm that carry these coefficients at the firings' tokens."""
        group = self.model.weights.group
        layer, b, query = firings.layer, firings.prompt, side == "query"
        at = firings.dest if query else firings.src
        # The other side's basis is the inverse of this one's (G_d G_s^T = 1).
        channels = self.model.channels.at(layer, firings.head)
        back = channels.to_key if query else channels.to_query
        inside = (coefficients[:, None] @ back.mT)[:, 0]
        inside = _turned_back(recording, firings, at, inside)
        reader = firings.head if query else firings.head // group
        scales = recording.query_scales if query else recording.key_scales
        if scales is not None:
            inside = inside * scales[layer, b, reader, at][:, None]
        inverse = self._inverse(int(layer[0]), side)[reader]
        return (inside[:, None] @ inverse)[:, 0] * recording.norm_scales[layer, b, at][:, None]

    def _inverse(self, layer: int, side: AttentionSide) -> Float[Tensor, "head d_head d_model"]:
        if (layer, side) not in self._inverses:
            weights = self.model.weights
            W = weights.W_Q[layer] if side == "query" else weights.W_K[layer]
            self._inverses[layer, side] = rounded(torch.linalg.pinv(exact(W)), like=W)
        return self._inverses[layer, side]


def _written(site: Site) -> bool:
    """Whether a cause was written into the residual at the place where it is read."""
    return site.kind not in ("offset", "rounding") and site.possible


def _turned_back(recording: Recording, firings: Firings, at: Tensor, x: Tensor) -> Tensor:
    rotary = recording.rotary[int(firings.layer[0])]
    if rotary is None:
        return x
    rows = firings.prompt if rotary.cos.shape[0] > 1 else torch.zeros_like(firings.prompt)
    here = Rotary(rotary.cos[rows, at][:, None], rotary.sin[rows, at][:, None])
    return here.inverse.rotate(x[:, None, None])[:, 0, 0].to(x.dtype)


def traced_signals(
    tracer: Tracer,
    vectors: SignalVectors,
    recording: Recording,
    firings: Sequence[SinkFiring],
    places: Mapping[int, int],
    cases: Sequence[Case],
) -> Signals:
    """Trace firings of a recording's prompts (``places``: where each prompt is in it), and add their signals up."""
    asked = [each.firing for each in firings]
    causes = tracer.trace_firings(recording, asked, [places[each.prompt] for each in firings])
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
    return Signals(
        pl.DataFrame(rows),
        {side: vectors.summed(recording, causes, side).float().cpu() for side in ATTENTION_SIDES},
    )


def together(parts: Sequence[Signals]) -> Signals:
    """Signals of several recordings as one table, head by head."""
    table = pl.concat([part.table for part in parts]).with_row_index("row")
    table = table.sort("layer", "head", "prompt")
    order = table["row"].to_list()
    vectors: dict[AttentionSide, Tensor] = {
        side: torch.cat([part.vectors[side] for part in parts])[order] for side in ATTENTION_SIDES
    }
    return Signals(table.drop("row"), vectors)
