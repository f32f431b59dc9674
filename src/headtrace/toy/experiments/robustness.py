"""The default model with one thing changed at a time: alignment over p, lambda, N, H, m and seeds.

Every setting is trained with every seed, all at once. Features that hardly ever occur may only need more
time, so the low probabilities are trained a second time for longer.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl

from headtrace.toy.alignment import alignment
from headtrace.toy.experiment import Experiment, against_paper
from headtrace.toy.setting import Setting
from headtrace.toy.train import Model, Progress, train

DEFAULT = Setting()
ALIGNED = 0.99
# From 1 down to 0.02 in twelve equal ratios; 0.52 and 0.038, which the paper names, are rungs of this ladder.
PROBABILITIES = tuple(
    round(float(p), 3) if p < 0.5 else round(float(p), 2) for p in np.geomspace(1, 0.02, 13)
)
RARE = 0.1
"""Below this probability models are trained again, for longer, with the first few of the seeds."""
RARE_SEEDS = 3


def sweeps(quick: bool = False) -> dict[str, list[Setting]]:
    """The settings of each sweep, by the name of the field that it changes."""
    chosen: dict[str, list[float]] = {
        "probability": list(PROBABILITIES),
        "attention_weight": [round(float(x), 2) for x in np.geomspace(0.4, 40, 9)],
        "n_features": [10, 15, 20, 25, 30],
        "d_head": [10, 8, 6, 4],
        "context": [2, 4, 8, 16, 32],
    }
    if quick:
        chosen = {"probability": [0.52, 0.02], "n_features": [10], "d_head": [8]}
    return {name: [replace(DEFAULT, **{name: value}) for value in values] for name, values in chosen.items()}


def distinct(quick: bool) -> list[Setting]:
    """Every setting once; the default is part of several sweeps."""
    return list(dict.fromkeys(setting for sweep in sweeps(quick).values() for setting in sweep))


def _plan(quick: bool) -> tuple[int, int, int]:
    """Seeds, steps, steps of the longer training (0: none)."""
    return (1, 6000, 0) if quick else (5, 10_000, 30_000)


def _rare(quick: bool) -> list[Setting]:
    return [s for s in sweeps(quick)["probability"] if s.probability < RARE]


def units(quick: bool) -> int:
    seeds, steps, longer = _plan(quick)
    return seeds * len(distinct(quick)) * steps + RARE_SEEDS * len(_rare(quick)) * longer


def robustness(*, quick: bool = False, seed: int = 0, progress: Progress | None = None) -> Experiment:
    """Train the whole family, and the rare-feature models for longer."""
    n_seeds, steps, longer = _plan(quick)
    seeds, settings = range(seed, seed + n_seeds), distinct(quick)
    trained = train(settings, seeds, steps, snapshots=range(0, steps, steps // 20), progress=progress)
    rows: list[dict[str, object]] = []
    for name, sweep in sweeps(quick).items():
        for setting in sweep:
            index = settings.index(setting)
            for one in seeds:
                rows += _rows(name, trained.of(index, one), steps)
    if longer:
        again = train(_rare(quick), seeds[:RARE_SEEDS], longer, progress=progress)
        for model in again.models:
            rows += _rows("probability", model, longer)
    table = pl.DataFrame(rows, infer_schema_length=None)
    return Experiment("robustness", _findings(table, quick, list(seeds), steps, longer), table, {})


def _rows(sweep: str, model: Model, steps: int) -> list[dict[str, object]]:
    aligned = alignment(model)
    together = (aligned.worst >= ALIGNED).all(1).numpy()
    first = int(np.argmax(together)) if together.any() else None
    return [
        {
            "sweep": sweep,
            "value": float(getattr(model.setting, sweep)),
            "seed": model.seed,
            "steps": steps,
            "pair": place,
            "target_logit": pair.logit,
            "query_cosine": float(aligned.query[-1, place]),
            "key_cosine": float(aligned.key[-1, place]),
            "singular_value": float(aligned.values[-1, place]),
            "value_error": float(aligned.value_error[-1, place]),
            "all_aligned_at": None if first is None else model.snapshot_steps[first],
        }
        for place, pair in enumerate(model.setting.ordered_pairs)
    ]


def summary(table: pl.DataFrame) -> pl.DataFrame:
    """One row for each sweep, value and length of training: the worst and mean cosine, and seeds aligned."""
    return (
        table.with_columns(pl.min_horizontal("query_cosine", "key_cosine").alias("cosine"))
        .group_by("sweep", "value", "steps", "seed", maintain_order=True)
        .agg(
            pl.col("cosine").min().alias("worst"),
            pl.col("cosine").mean(),
            pl.col("value_error").max(),
            pl.col("all_aligned_at").first(),
        )
        .group_by("sweep", "value", "steps", maintain_order=True)
        .agg(
            pl.col("worst").min(),
            pl.col("cosine").mean().alias("mean"),
            pl.col("value_error").max(),
            (pl.col("worst") >= ALIGNED).sum().alias("seeds_aligned"),
            pl.len().alias("seeds"),
            pl.col("all_aligned_at").median(),
        )
    )


def _fails_below(summed: pl.DataFrame, steps: int) -> float | None:
    """The smallest p at and above which every seed is aligned."""
    part = summed.filter(pl.col("sweep") == "probability", pl.col("steps") == steps).sort(
        "value", descending=True
    )
    good: float | None = None
    for value, aligned, seeds in part.select("value", "seeds_aligned", "seeds").iter_rows():
        if aligned < seeds:
            break
        good = float(value)
    return good


def _findings(
    table: pl.DataFrame, quick: bool, seeds: list[int], steps: int, longer: int
) -> dict[str, object]:
    summed = summary(table)
    short = summed.filter(pl.col("steps") == steps)
    default = short.filter(pl.col("sweep") == "probability", pl.col("value") == 0.52).row(0, named=True)
    holds = {
        name: bool((part["seeds_aligned"] == part["seeds"]).all())
        for (name,), part in short.group_by("sweep", maintain_order=True)
    }
    limit = _fails_below(summed, steps)
    findings: dict[str, object] = {
        "quick": quick,
        "seeds": seeds,
        "steps": steps,
        "models": len(distinct(quick)) * len(seeds),
        "default_setting": {
            "smallest_cosine": default["worst"],
            "largest_value_error": default["value_error"],
        },
        "every_seed_aligned": holds,
        "aligned_down_to_p": limit,
        "by_setting": summed.to_dicts(),
    }
    if longer:
        rare = summed.filter(pl.col("steps") == longer)
        findings["longer_steps"] = longer
        findings["aligned_down_to_p_longer"] = _fails_below(
            pl.concat(
                [
                    short.filter(pl.col("value") >= RARE).with_columns(
                        pl.lit(longer).cast(pl.Int64).alias("steps")
                    ),
                    rare,
                ]
            ),
            longer,
        )
    findings["paper"] = [
        against_paper(
            "alignment over p down to",
            0.038,
            limit,
            limit is not None and limit <= 0.038,
            f"smallest p of the ladder at and above which every seed has all cosines at least {ALIGNED}",
        ),
        *(
            against_paper(
                f"alignment over {name}", "robust", "every seed" if held else "not every seed", held
            )
            for name, held in holds.items()
            if name != "probability"
        ),
    ]
    return findings
