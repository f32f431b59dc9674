"""More pairs than head dimensions: the lowest-logit pairs share the smallest singular vector."""

from __future__ import annotations

import numpy as np
import polars as pl

from headtrace.toy.alignment import channels, cosines
from headtrace.toy.experiment import Experiment, against_paper
from headtrace.toy.setting import Setting, falling_pairs
from headtrace.toy.train import Model, Progress, train


def _settings(d_head: int, counts: list[int]) -> list[Setting]:
    """Twice as many model dimensions as head dimensions, four times as many features; logits n + 1 - i."""
    return [
        Setting(falling_pairs(count, count + 1.0), n_features=4 * d_head, d_model=2 * d_head, d_head=d_head)
        for count in counts
    ]


def _plan(quick: bool) -> tuple[list[Setting], int, int]:
    if quick:
        return _settings(5, [5, 7]), 1, 6000
    return [*_settings(5, list(range(5, 11))), *_settings(10, [10, 15, 20])], 2, 8000


def units(quick: bool) -> int:
    settings, seeds, steps = _plan(quick)
    return len(settings) * seeds * steps


def capacity(*, quick: bool = False, seed: int = 0, progress: Progress | None = None) -> Experiment:
    """Train heads that have to superpose, and see where each pair goes."""
    settings, n_seeds, steps = _plan(quick)
    trained = train(settings, range(seed, seed + n_seeds), steps, progress=progress)
    table = pl.DataFrame([row for model in trained.models for row in _rows(model)])
    arrays: dict[str, np.ndarray] = {}
    for index, setting in enumerate(settings):
        model = trained.of(index, seed)
        found = channels(model.query[-1], model.key[-1])
        chosen = [pair.query for pair in setting.ordered_pairs]
        name = f"{setting.d_head}_{len(setting.pairs)}"
        arrays[f"left_{name}"] = cosines(found.left, model.features[-1]).abs().numpy()[chosen]
        arrays[f"values_{name}"] = found.values.numpy()
    return Experiment("capacity", _findings(table, quick, seed, n_seeds, steps), table, arrays)


def _rows(model: Model) -> list[dict[str, object]]:
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
                "query_norm": float(model.features[-1][:, pair.query].norm()),
                "key_norm": float(model.features[-1][:, pair.key].norm()),
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
    return table.group_by("d_head", "pairs", "seed", maintain_order=True).agg(
        (high & own).sum().alias("high_with_own_channel"),
        high.sum().alias("high"),
        (~high & last).sum().alias("low_on_last_channel"),
        (~high).sum().alias("low"),
        over.first().alias("over_capacity"),
    )


def _findings(table: pl.DataFrame, quick: bool, seed: int, n_seeds: int, steps: int) -> dict[str, object]:
    summed = summary(table)
    over = summed.filter(pl.col("over_capacity"))
    low = float(over["low_on_last_channel"].sum()) / float(over["low"].sum())
    high = float(over["high_with_own_channel"].sum()) / float(over["high"].sum())
    return {
        "quick": quick,
        "seeds": list(range(seed, seed + n_seeds)),
        "steps": steps,
        "share_of_low_pairs_on_the_smallest_channel": low,
        "share_of_high_pairs_with_a_channel_of_their_own": high,
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
