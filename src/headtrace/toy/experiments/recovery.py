"""Blind recovery of feature pairs from Omega, as a function of interference: when to trust the method.

Two kinds of heads. Ideal ones over fixed feature sets, from the arrangement that training finds to a random
one, show what interference alone does. Trained ones, at every snapshot of their training, show the same for
heads and features that have found each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import polars as pl
import torch

from headtrace.progress import Progress
from headtrace.statistics import Proportion
from headtrace.toy.alignment import Recovered, ideal_omega, interference, recover
from headtrace.toy.experiment import Experiment
from headtrace.toy.model import Setting
from headtrace.toy.theory import orthogonal, unit_columns
from headtrace.toy.train import train

BINS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
TRUSTED = 0.95


def recovery(*, quick: bool = False, seed: int = 0, progress: Progress | None = None) -> Experiment:
    """Recover pairs from ideal and trained heads, and say up to which interference that works."""
    sets, n_seeds, steps = (100, 1, 3000) if quick else (3000, 3, 10_000)
    probabilities = (0.52,) if quick else (0.52, 0.196, 0.102, 0.053)
    generator = torch.Generator().manual_seed(seed)
    rows = list(_ideal(sets, generator))
    settings = [replace(Setting(), probability=p) for p in probabilities]
    trained = train(
        settings,
        range(seed, seed + n_seeds),
        steps,
        snapshots=range(0, steps, steps // 40),
        progress=progress,
    )
    for model in trained.models:
        for place, step in enumerate(model.snapshot_steps):
            found = recover(model.omega[place], model.features[place])
            rows.append(_row("trained", model.setting, model.features[place], found, step))
    table = pl.DataFrame(rows, infer_schema_length=None)
    curves = {kind: _curve(table.filter(pl.col("kind") == kind)) for kind in ("ideal", "trained")}
    arrays = {
        f"{kind}_{name}": curve[name].to_numpy() for kind, curve in curves.items() for name in curve.columns
    }
    final = table.filter(pl.col("kind") == "trained", pl.col("step") == steps)
    findings: dict[str, object] = {
        "quick": quick,
        "seed": seed,
        "feature_sets": sets,
        "trained_models": len(trained.models),
        "steps": steps,
        "recovered_by_interference": {kind: curve.to_dicts() for kind, curve in curves.items()},
        "trusted_up_to_interference": {kind: _trusted(curve) for kind, curve in curves.items()},
        "recovered_after_training": float(final["recovered"].to_numpy().mean()),
        "precision_by_margin": _by_margin(table),
    }
    return Experiment("recovery", findings, table, arrays)


def _ideal(sets: int, generator: torch.Generator) -> Iterator[dict[str, object]]:
    setting = Setting()
    for _ in range(sets):
        noise = 10 ** float(torch.rand((), generator=generator) * 2.5 - 2)
        frame = _spread(setting, generator)
        push = torch.randn(frame.shape, generator=generator, dtype=torch.float64) / setting.d_model**0.5
        features = unit_columns(frame + noise * push)
        found = recover(ideal_omega(features, setting.target()), features)
        yield _row("ideal", setting, features, found, None)


def _spread(setting: Setting, generator: torch.Generator) -> torch.Tensor:
    """How trained models arrange their features: those of interest orthogonal, the others in what is left."""
    chosen = sorted({pair.query for pair in setting.pairs} | {pair.key for pair in setting.pairs})
    basis = orthogonal(setting.d_model, generator)
    rest = basis[:, len(chosen) :]
    mix = torch.randn(rest.shape[1], setting.n_features, generator=generator, dtype=torch.float64)
    features = unit_columns(rest @ mix)
    features[:, chosen] = basis[:, : len(chosen)]
    return features


def _row(
    kind: str, setting: Setting, features: torch.Tensor, found: Recovered, step: int | None
) -> dict[str, object]:
    true = {(pair.query, pair.key) for pair in setting.pairs}
    chosen = [feature for pair in setting.pairs for feature in (pair.query, pair.key)]
    return {
        "kind": kind,
        "probability": setting.probability,
        "step": step,
        "interference": float(interference(features, chosen).mean()),
        "recovered": found.share_of(true),
        "precision": found.precision(true),
        "channels_in_use": len(found.pairs),
        "smallest_margin": min(found.margin),
        "pairs_found": len(found.pairs),
        "pairs_true": len(true & set(found.pairs)),
        "pairs_sought": len(true),
    }


def _curve(table: pl.DataFrame) -> pl.DataFrame:
    """Recovery in bins of interference, with the Wilson 95% interval of the share of pairs."""
    place = np.clip(np.digitize(table["interference"].to_numpy(), BINS) - 1, 0, len(BINS) - 2)
    found = (
        table.with_columns(pl.Series("bin", place))
        .group_by("bin")
        .agg(
            pl.col("interference").mean(),
            pl.col("pairs_true").sum(),
            pl.col("pairs_sought").sum(),
            pl.col("pairs_found").sum(),
            pl.len().alias("heads"),
        )
        .sort("bin")
    )
    intervals = [
        Proportion(true, sought).interval
        for true, sought in found.select("pairs_true", "pairs_sought").iter_rows()
    ]
    return found.select(
        pl.Series("from", [BINS[i] for i in found["bin"]]),
        pl.Series("to", [BINS[i + 1] for i in found["bin"]]),
        "interference",
        "heads",
        (pl.col("pairs_true") / pl.col("pairs_sought")).alias("recovered"),
        pl.Series("low", [low for low, _ in intervals]),
        pl.Series("high", [high for _, high in intervals]),
        (pl.col("pairs_true") / pl.col("pairs_found")).alias("precision"),
    )


def _trusted(curve: pl.DataFrame) -> float | None:
    """The end of the last bin, from the lowest on, in which at least 95% of the pairs are recovered."""
    good: float | None = None
    for end, recovered in curve.select("to", "recovered").iter_rows():
        if recovered < TRUSTED:
            break
        good = float(end)
    return good


def _by_margin(table: pl.DataFrame) -> dict[str, float]:
    """What a user can see without the truth: heads by their least clear match, and how right they are."""
    bands = ((0.0, 0.1), (0.1, 0.3), (0.3, 0.6), (0.6, 1.01))
    answer: dict[str, float] = {}
    for low, high in bands:
        part = table.filter(pl.col("smallest_margin") >= low, pl.col("smallest_margin") < high)
        if part.height:
            answer[f"{low:g} to {min(high, 1):g}"] = float(part["pairs_true"].sum()) / float(
                part["pairs_found"].sum()
            )
    return answer
