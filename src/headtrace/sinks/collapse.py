"""What happens to sinks when the common directions of their signals are removed inside the running model.

On the query side, every destination past the first token loses its component along the directions before the layer's
queries are computed; on the key side, every sink does before its keys are. Norms then act on what is left, with scales
of their own; values, MLPs and the residual stream itself keep everything, so that what changes is where heads attend
and what follows from that. It is done in every layer from the first one whose heads have signals on that side.

The control removes as much in other directions: as many random ones, drawn for each prompt, with the removed part of
every token scaled to the length that the signals' directions would have removed there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import polars as pl
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headtrace.causal.changes import DirectionRemoval, Intervention
from headtrace.causal.execute import Changes
from headtrace.models.devices import on_host
from headtrace.models.observer import AttentionCall, Observer
from headtrace.progress import Progress
from headtrace.prompts import batches
from headtrace.sinks.tokens import SinkPrompt, SinkRule, sink_mass
from headtrace.statistics import intervals
from headtrace.vocabulary import AttentionSide

if TYPE_CHECKING:
    from headtrace.models import Model
    from headtrace.sinks.sink_signals import MeanSignals

Removed = Literal["nothing", "signals", "random"]
Sides = Literal["query", "key", "both"]
SIDES: tuple[Sides, ...] = ("query", "key", "both")
MEASURES = ("sink mass", "loss", "logit difference", "accuracy", "removed")
"""Mean attention on sinks over all heads; next-token cross-entropy (nats) over the prompt; right over wrong answers at
its end (logits), and how often that is above 0; the share of a token's residual, by length, that is removed."""
TOKENS_AT_ONCE = 512
"""Output logits are needed at every token: over a large vocabulary more would take much memory."""


@dataclass(frozen=True)
class RemovalCondition:
    """What is removed in a pass: a number of directions, on one side or both."""

    side: Sides
    directions: int
    removed: Removed

    @property
    def sides(self) -> tuple[AttentionSide, ...]:
        return ("query", "key") if self.side == "both" else (self.side,)


NOTHING = RemovalCondition("both", 0, "nothing")


class SinkMass(Observer):
    """Attention on sinks while the model runs."""

    def __init__(self, sinks: Bool[Tensor, "batch token"], lengths: Sequence[int]) -> None:
        self.sinks, self.lengths, self.by_layer = sinks, lengths, list[Tensor]()

    def see(self, call: AttentionCall, pattern: Tensor) -> None:
        self.by_layer.append(sink_mass(pattern, self.sinks, self.lengths).mean(1))

    def mean(self) -> Float[Tensor, " batch"]:
        """The mean over all heads, for each prompt."""
        return torch.stack(self.by_layer).mean(0)


class MeasuredRemoval(Changes):
    """Removes directions from what queries or keys read, and measures how much of the residual that takes away."""

    def __init__(self, model: Model, removals: Sequence[Sequence[DirectionRemoval]], length: int) -> None:
        super().__init__(model, length, [Intervention(tuple(each)) for each in removals])
        self.shares: list[Tensor] = []

    def query_input(self, layer: int, residual: Tensor) -> Tensor | None:
        return self._measured("query", residual, super().query_input(layer, residual))

    def key_input(self, layer: int, residual: Tensor) -> Tensor | None:
        return self._measured("key", residual, super().key_input(layer, residual))

    def _measured(self, side: AttentionSide, residual: Tensor, changed: Tensor | None) -> Tensor | None:
        if changed is not None:
            where = next(removal.positions for _, removal in self.removed if removal.side == side)
            norm = torch.linalg.vector_norm
            share = norm(residual - changed, dim=-1) / norm(residual, dim=-1)
            self.shares.append(share.sum(1) / where.sum(1))
        return changed

    def share(self) -> Float[Tensor, " batch"]:
        """The removed share of residuals by length, for each prompt: the mean over layers, sides and tokens."""
        return torch.stack(self.shares).mean(0) if self.shares else torch.zeros(len(self.attention))


@dataclass(frozen=True)
class RemovalExperiment:
    """A model, its prompts and what its heads have in common."""

    model: Model
    cases: Sequence[SinkPrompt]
    rule: SinkRule
    means: Mapping[AttentionSide, MeanSignals]
    seed: int

    def conditions(self, directions: Sequence[int]) -> list[RemovalCondition]:
        """Nothing; then signals and random directions on either side and on both, as many as there are."""
        most = {side: len(found.directions) for side, found in self.means.items()}
        found = [NOTHING]
        for side in SIDES:
            condition = RemovalCondition(side, 0, "signals")
            there = max(most[each] for each in condition.sides)
            for k in sorted({min(k, there) for k in directions}):
                if k:
                    found += [RemovalCondition(side, k, "signals"), RemovalCondition(side, k, "random")]
        return found

    def measured(
        self, conditions: Sequence[RemovalCondition], progress: Progress | None = None
    ) -> Float[Tensor, "condition prompt measure"]:
        """Every measure of every prompt; NaN where a prompt has no answers."""
        found = torch.full((len(conditions), len(self.cases), len(MEASURES)), torch.nan, dtype=torch.float64)
        lengths = [case.length for case in self.cases]
        done = 0
        for group in batches(lengths, TOKENS_AT_ONCE):
            some = [self.cases[place] for place in group]
            for number, condition in enumerate(conditions):
                found[number, group] = self._run(some, group, condition)
                done += len(group)
                if progress is not None:
                    progress(done, len(conditions) * len(self.cases))
        return found

    def _run(
        self, cases: Sequence[SinkPrompt], places: Sequence[int], condition: RemovalCondition
    ) -> Float[Tensor, "prompt measure"]:
        lengths = [case.length for case in cases]
        width, device = max(lengths), self.model.device
        ids = torch.tensor(
            [[*case.ids, *[case.ids[-1]] * (width - case.length)] for case in cases], device=device
        )
        sinks = self.rule.mask(cases, width).to(device)
        removals = [
            self._removals(condition, place, sinks[row], lengths[row]) for row, place in enumerate(places)
        ]
        mass, removal = SinkMass(sinks, lengths), MeasuredRemoval(self.model, removals, width)
        logits = self.model.run(ids, removal, mass, lengths=lengths)
        values = [mass.mean(), *_of_logits(logits, ids, cases).T, removal.share()]
        return torch.stack([on_host(value) for value in values], dim=1)

    def _removals(
        self, condition: RemovalCondition, place: int, sinks: Bool[Tensor, " token"], length: int
    ) -> list[DirectionRemoval]:
        """Queries past the first token, and keys of sinks, without the directions; padding is unchanged."""
        token = torch.arange(len(sinks), device=sinks.device)
        positions = {"query": (token > 0) & (token < length), "key": sinks & (token < length)}
        found: list[DirectionRemoval] = []
        for side in condition.sides if condition.removed != "nothing" else ():
            mean = self.means[side]
            if mean.heads:
                own = mean.directions[: condition.directions].to(self.model.dtype).to(self.model.device)
                random = self._random(len(own), place, side) if condition.removed == "random" else None
                found.append(DirectionRemoval(side, own, mean.first_layer, positions[side], random))
        return found

    def _random(self, n: int, place: int, side: AttentionSide) -> Float[Tensor, "direction d_model"]:
        """Orthonormal random directions for one prompt and side."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + 2 * place + (side == "key"))
        drawn = torch.randn(self.model.d_model, n, generator=generator, dtype=torch.float64)
        return torch.linalg.qr(drawn).Q.T.to(self.model.dtype).to(self.model.device)


def _of_logits(logits: Tensor, ids: Tensor, cases: Sequence[SinkPrompt]) -> Float[Tensor, "prompt three"]:
    """Cross-entropy, logit difference (answers' probabilities added up) and whether it is above 0."""
    rows: list[list[float]] = []
    for row, case in enumerate(cases):
        n = case.length
        loss = torch.nn.functional.cross_entropy(logits[row, : n - 1].float(), ids[row, 1:n])
        difference = torch.nan
        if case.right and case.wrong:
            last = logits[row, n - 1]
            difference = float(last[list(case.right)].logsumexp(0) - last[list(case.wrong)].logsumexp(0))
        right = torch.nan if difference != difference else float(difference > 0)
        rows.append([float(loss), difference, right])
    return torch.tensor(rows, dtype=torch.float64)


def collapse_table(
    conditions: Sequence[RemovalCondition],
    values: Float[Tensor, "condition prompt measure"],
    tasks: Sequence[str],
    seed: int,
) -> pl.DataFrame:
    """A row per task (and all together), condition and measure: the mean with a 95 % interval over prompts.

    Rows ``signals - random`` are differences prompt by prompt.
    """
    numbers = values.numpy()
    place = {condition: row for row, condition in enumerate(conditions)}
    named: list[tuple[tuple[str, int, str], Any]] = [
        ((c.side, c.directions, c.removed), numbers[row]) for c, row in place.items()
    ]
    for c in conditions:
        control = RemovalCondition(c.side, c.directions, "random")
        if c.removed == "signals" and control in place:
            difference = numbers[place[c]] - numbers[place[control]]
            named.append(((c.side, c.directions, "signals - random"), difference))
    every = list(dict.fromkeys(tasks))
    groups = {"all": np.ones(len(tasks), bool)}
    if len(every) > 1:
        groups |= {task: np.asarray([each == task for each in tasks]) for task in every}
    rows: list[tuple[object, ...]] = []
    stacked = np.stack([values for _, values in named], axis=1) if named else numbers[:, :0]
    for task, members in groups.items():
        for k, measure in enumerate(MEASURES if named else ()):
            columns = stacked[members, :, k]
            columns = columns[~np.isnan(columns).any(axis=1)]
            if len(columns):
                low, high = intervals(columns, seed)
                rows += [
                    (task, *what, measure, *map(float, (mean, low[i], high[i])), len(columns))
                    for i, ((what, _), mean) in enumerate(zip(named, columns.mean(0), strict=True))
                ]
    schema = {"task": pl.String, "side": pl.String, "directions": pl.Int64, "removed": pl.String}
    schema |= {
        "measure": pl.String,
        **dict.fromkeys(("mean", "low", "high"), pl.Float64),
        "prompts": pl.Int64,
    }
    return pl.DataFrame(rows, schema=schema, orient="row")
