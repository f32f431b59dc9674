"""More pairs than head dimensions: the lowest-logit pairs share the smallest singular vector.

Target logits are low here (the lowest is 2), so at the default weight of the attention loss some heads leave
a dimension unused; with the weight of the single-pair model they do not.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from headtrace.progress import Progress, part_of
from headtrace.toy.alignment import channels, cosines
from headtrace.toy.experiment import Experiment, against_paper
from headtrace.toy.model import Setting, falling_pairs
from headtrace.toy.train import ToyModel, train

ATTENTION_WEIGHT = 20.0


def _settings(d_head: int, counts: list[int]) -> list[Setting]:
    """Twice as many model dimensions as head dimensions, four times as many features; logits n + 1 - i."""
    return [
        Setting(
            falling_pairs(count, count + 1.0),
            n_features=4 * d_head,
            d_model=2 * d_head,
            d_head=d_head,
            attention_weight=ATTENTION_WEIGHT,
        )
        for count in counts
    ]


class Training(NamedTuple):
    """Heads of one size; the larger ones need more steps."""

    settings: list[Setting]
    seeds: int
    steps: int

    @property
    def model_steps(self) -> int:
        return len(self.settings) * self.seeds * self.steps


def capacity(*, quick: bool = False, seed: int = 0, progress: Progress | None = None) -> Experiment:
    """Train heads that have to superpose, and see where each pair goes."""
    rows: list[dict[str, object]] = []
    arrays: dict[str, np.ndarray] = {}
    plan = [
        Training(_settings(5, [5, 6, 7, 8, 9, 10]), 5, 30_000),
        Training(_settings(10, [10, 12, 15, 18, 20]), 2, 60_000),
    ]
    if quick:
        plan = [Training(_settings(5, [5, 7]), 1, 6000)]
    done = 0
    for part in plan:
        reported = part_of(progress, done, sum(each.model_steps for each in plan))
        trained = train(part.settings, range(seed, seed + part.seeds), part.steps, progress=reported)
        done += part.model_steps
        rows += [{"steps": part.steps, **row} for model in trained.models for row in _rows(model)]
        for index, setting in enumerate(part.settings):
            model = trained.of(index, seed)
            found = channels(model.query[-1], model.key[-1])
            chosen = [pair.query for pair in setting.ordered_pairs]
            name = f"{setting.d_head}_{len(setting.pairs)}"
            arrays[f"left_{name}"] = cosines(found.left, model.features[-1]).abs().numpy()[chosen]
    table = pl.DataFrame(rows)
    summed = summary(table)
    shares = _shares(summed)
    low, high = shares.values()
    findings: dict[str, object] = {
        "quick": quick,
        "attention_weight": ATTENTION_WEIGHT,
        "shares": shares,
        "by_head": {
            f"H = {d_head}": {"steps": steps, "seeds": part["seed"].n_unique(), **_shares(part)}
            for (d_head, steps), part in summed.group_by("d_head", "steps", maintain_order=True)
        },
        "by_model": summed.to_dicts(),
        "paper": [
            against_paper(
                "all lowest-logit pairs share the smallest singular vector",
                "all",
                low,
                low >= 0.95,
                "share of pairs",
            ),
            against_paper(
                "high-logit pairs keep a singular vector each", "most", high, high >= 0.5, "share of pairs"
            ),
        ],
    }
    return Experiment("capacity", findings, table, arrays)


def _rows(model: ToyModel) -> list[dict[str, object]]:
    found = channels(model.query[-1], model.key[-1])
    left = cosines(found.left, model.features[-1]).abs()
    right = cosines(found.right, model.features[-1]).abs()
    rows: list[dict[str, object]] = []
    for place, pair in enumerate(model.setting.ordered_pairs):
        both = left[pair.query] * right[pair.key]
        best = int(both.argmax())
        rows.append(
            {
                "d_head": model.setting.d_head,
                "pairs": len(model.setting.pairs),
                "seed": model.seed,
                "pair": place,
                "target_logit": pair.logit,
                "channel": best,
                "query_cosine": float(left[pair.query, best]),
                "key_cosine": float(right[pair.key, best]),
                "singular_value": float(found.values[best]),
                "smallest_singular_value": float(found.values[-1]),
            }
        )
    return rows


def summary(table: pl.DataFrame) -> pl.DataFrame:
    """For each model: how many high-logit pairs have a channel of their own, how many others share the last.

    A head with H channels can give a channel of its own to H - 1 pairs if the rest must share one.
    """
    high = pl.col("pair") < pl.col("d_head") - 1
    last = pl.col("channel") == pl.col("d_head") - 1
    own = (pl.col("channel") == pl.col("pair")) & (pl.min_horizontal("query_cosine", "key_cosine") >= 0.95)
    over = pl.col("pairs") > pl.col("d_head")
    return table.group_by("d_head", "pairs", "steps", "seed", maintain_order=True).agg(
        (high & own).sum().alias("high_with_own_channel"),
        high.sum().alias("high"),
        (~high & last).sum().alias("low_on_last_channel"),
        (~high).sum().alias("low"),
        over.first().alias("over_capacity"),
        pl.col("smallest_singular_value").first(),
    )


def _shares(summed: pl.DataFrame) -> dict[str, float]:
    over = summed.filter(pl.col("over_capacity"))

    def share(part: str, whole: str) -> float:
        return float(over[part].to_numpy().sum() / over[whole].to_numpy().sum())

    return {
        "low_pairs_on_the_smallest_channel": share("low_on_last_channel", "low"),
        "high_pairs_with_a_channel_of_their_own": share("high_with_own_channel", "high"),
    }
