"""How constant signals are, how alike those of different heads, and the few directions that explain them.

Signals are compared by direction: each is brought to length one, a head's mean signal is the mean of those, brought to
length one again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
import torch
from jaxtyping import Float
from torch import Tensor

from headtrace.sinks.signals import Signals
from headtrace.statistics import RESAMPLES
from headtrace.vocabulary import ATTENTION_SIDES, AttentionSide, head_name

SHARED = 0.9
"""A head shares a direction if its mean signal has at least this |cosine| with it."""
MOST_DIRECTIONS = 16
"""Directions that are kept and listed."""


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


def mean_signals(signals: Signals, side: AttentionSide) -> MeanSignals:
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


def _rows_of_heads(signals: Signals) -> list[tuple[tuple[int, int], list[int]]]:
    rows: dict[tuple[int, int], list[int]] = {}
    for row, head in enumerate(signals.table.select("layer", "head").iter_rows()):
        rows.setdefault((head[0], head[1]), []).append(row)
    return sorted(rows.items())


def constancy_table(signals: Signals, seed: int) -> pl.DataFrame:
    """For each head and side, the mean cosine of its signals over pairs of prompts.

    ``constancy`` takes pairs of different tasks (of different prompts, where there is one task only), ``within`` pairs
    of one task; the 95 % interval of ``constancy`` draws prompts again.
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
    """The mean over chosen pairs, and its 95 % interval: prompts are drawn again, a prompt is no pair with itself."""
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
                | {"heads": _named(found, members), "layers": len({found.heads[m][0] for m in members})}
            )
            left = [head for head in left if head not in members]
    schema = {"side": pl.String, "size": pl.Int64, "centre": pl.String}
    schema |= {"heads": pl.List(pl.String), "layers": pl.Int64}
    return pl.DataFrame(rows, schema=schema)


def _named(found: MeanSignals, members: Sequence[int]) -> list[str]:
    return [found.names[member] for member in members]
