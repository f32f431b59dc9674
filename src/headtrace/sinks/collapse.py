"""What happens to sinks when the common directions are taken away inside the running model.

On the query side, every destination past the first token loses its component along the directions before the layer's
queries are computed; on the key side, every sink does before its keys are. Norms then act on what is left, with scales
of their own; values, MLPs and the residual stream itself keep everything, so that what changes is where heads attend
and what follows from that. It is done in every layer from the first one whose heads have signals on that side.

The control takes as much away in other directions: as many random ones, drawn for each prompt, with the removed part
of every token brought to the length of what the signals' directions would have removed there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import polars as pl
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headtrace.models.devices import on_host
from headtrace.models.observer import AttentionCall, Observer
from headtrace.progress import Progress
from headtrace.prompts import batches
from headtrace.sinks.cases import Case
from headtrace.sinks.mass import sink_mass
from headtrace.sinks.tokens import SinkRule
from headtrace.statistics import intervals
from headtrace.vocabulary import AttentionSide

if TYPE_CHECKING:
    from headtrace.models import Model
    from headtrace.sinks.directions import MeanSignals

Removed = Literal["nothing", "signals", "random"]
Sides = Literal["query", "key", "both"]
SIDES: tuple[Sides, ...] = ("query", "key", "both")
MEASURES = ("sink mass", "loss", "logit difference", "accuracy", "removed")
"""Mean attention on sinks over all heads; next-token cross-entropy (nats) over the prompt; right over wrong answers at
its end (logits), and how often that is above 0; the share of a token's residual, by length, that is taken away."""
TOKENS_AT_ONCE = 512
"""Output logits are needed at every token: over a large vocabulary more would take much memory."""


@dataclass(frozen=True)
class Condition:
    """What is removed in a pass: so many directions, on one side or both."""

    side: Sides
    directions: int
    removed: Removed

    @property
    def sides(self) -> tuple[AttentionSide, ...]:
        return ("query", "key") if self.side == "both" else (self.side,)


NOTHING = Condition("both", 0, "nothing")


@dataclass(frozen=True, eq=False)
class Removal:
    """Directions to take away on one side, from a layer on; ``instead``: other directions, for as much."""

    directions: Float[Tensor, "direction d_model"]
    first_layer: int
    instead: Float[Tensor, "batch direction d_model"] | None = None

    def part(self, x: Float[Tensor, "batch token d_model"]) -> Float[Tensor, "batch token d_model"]:
        """What is taken away from residuals."""
        own = (x @ self.directions.T) @ self.directions
        if self.instead is None:
            return own
        other = (x @ self.instead.mT) @ self.instead
        size = torch.linalg.vector_norm(other, dim=-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
        return other * (torch.linalg.vector_norm(own, dim=-1, keepdim=True) / size)


class Removing(Observer):
    """Takes directions out of what queries read at destinations and keys at sinks; sums up attention on sinks."""

    def __init__(
        self,
        sinks: Bool[Tensor, "batch token"],
        lengths: Sequence[int],
        removals: Mapping[AttentionSide, Removal],
    ) -> None:
        self.sinks, self.lengths, self.removals = sinks, lengths, removals
        real = torch.arange(sinks.shape[1], device=sinks.device)
        inside = real < torch.tensor(lengths, device=sinks.device)[:, None]
        self.where: dict[AttentionSide, Tensor] = {"query": inside & (real > 0), "key": inside & sinks}
        self.masses: list[Tensor] = []
        self.shares: list[Tensor] = []

    def query_input(self, layer: int, residual: Tensor) -> Tensor | None:
        return self._without("query", layer, residual)

    def key_input(self, layer: int, residual: Tensor) -> Tensor | None:
        return self._without("key", layer, residual)

    def _without(self, side: AttentionSide, layer: int, residual: Tensor) -> Tensor | None:
        removal = self.removals.get(side)
        if removal is None or layer < removal.first_layer:
            return None
        where = self.where[side]
        part = removal.part(residual) * where[..., None]
        share = torch.linalg.vector_norm(part, dim=-1) / torch.linalg.vector_norm(residual, dim=-1)
        self.shares.append(share.sum(1) / where.sum(1))
        return residual - part

    def see(self, call: AttentionCall, pattern: Tensor) -> None:
        self.masses.append(sink_mass(pattern, self.sinks, self.lengths).mean(1))

    def mass(self) -> Float[Tensor, " batch"]:
        """Of each prompt, the mean over all heads."""
        return torch.stack(self.masses).mean(0)

    def share(self) -> Float[Tensor, " batch"]:
        """The share of residuals that was taken away, mean over layers and tokens."""
        return torch.stack(self.shares).mean(0) if self.shares else torch.zeros(len(self.sinks))


@dataclass(frozen=True)
class Experiment:
    """A model, its prompts and what its heads have in common."""

    model: Model
    cases: Sequence[Case]
    rule: SinkRule
    means: Mapping[AttentionSide, MeanSignals]
    seed: int

    def conditions(self, directions: Sequence[int]) -> list[Condition]:
        """Nothing; then signals and random directions on either side and on both, as many as there are."""
        most = {side: len(found.directions) for side, found in self.means.items()}
        found = [NOTHING]
        for side in SIDES:
            condition = Condition(side, 0, "signals")
            there = max(most[each] for each in condition.sides)
            for k in sorted({min(k, there) for k in directions}):
                if k:
                    found += [Condition(side, k, "signals"), Condition(side, k, "random")]
        return found

    def measured(
        self, conditions: Sequence[Condition], progress: Progress | None = None
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
        self, cases: Sequence[Case], places: Sequence[int], condition: Condition
    ) -> Float[Tensor, "prompt measure"]:
        lengths = [case.length for case in cases]
        width, device = max(lengths), self.model.device
        rows = [[*case.ids, *[case.ids[-1]] * (width - case.length)] for case in cases]
        ids = torch.tensor(rows, device=device)
        observer = Removing(
            self.rule.mask(cases, width).to(device), lengths, dict(self._removals(condition, places))
        )
        logits = self.model.run(ids, observer, lengths=lengths)
        values = [observer.mass(), *_of_logits(logits, ids, cases).T, observer.share()]
        return torch.stack([on_host(value) for value in values], dim=1)

    def _removals(
        self, condition: Condition, places: Sequence[int]
    ) -> Iterator[tuple[AttentionSide, Removal]]:
        for side in condition.sides if condition.removed != "nothing" else ():
            mean = self.means[side]
            if not mean.heads:
                continue
            own = mean.directions[: condition.directions].to(self.model.dtype).to(self.model.device)
            instead = None
            if condition.removed == "random":
                instead = torch.stack([self._random(len(own), place, side) for place in places])
                instead = instead.to(self.model.dtype).to(self.model.device)
            yield side, Removal(own, mean.first_layer, instead)

    def _random(self, n: int, place: int, side: AttentionSide) -> Float[Tensor, "direction d_model"]:
        """Orthonormal random directions for one prompt and side."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + 2 * place + (side == "key"))
        drawn = torch.randn(self.model.d_model, n, generator=generator, dtype=torch.float64)
        return torch.linalg.qr(drawn).Q.T


def _of_logits(logits: Tensor, ids: Tensor, cases: Sequence[Case]) -> Float[Tensor, "prompt three"]:
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
    conditions: Sequence[Condition],
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
        control = Condition(c.side, c.directions, "random")
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
