"""Twenty pairs among 100 features in 50 dimensions: all align, in the order of their target logits."""

from __future__ import annotations

import numpy as np
import polars as pl
import torch

from headtrace.progress import Progress
from headtrace.toy.alignment import alignment, channels, cosines
from headtrace.toy.experiment import Experiment, against_paper
from headtrace.toy.geometry import interference, kept
from headtrace.toy.setting import Pair, Setting, falling_pairs
from headtrace.toy.train import train

SETTING = Setting(
    falling_pairs(20, 26.0),
    n_features=100,
    d_model=50,
    d_head=50,
    attention_weight=25.0,
    probability=0.35,
)
"""Lambda and p are not in the paper. At lambda = 4 the pairs of lowest logit are not learned."""
QUICK = Setting(tuple(Pair(i, i + 3, 24.0 - 6 * i) for i in range(3)))
ALIGNED = 0.95


def _plan(quick: bool) -> tuple[Setting, int, int]:
    return (QUICK, 1, 5000) if quick else (SETTING, 3, 60_000)


def multi(*, quick: bool = False, seed: int = 0, progress: Progress | None = None) -> Experiment:
    """Train the head with twenty pairs (three when quick) and match pair k with singular pair k."""
    setting, n_seeds, steps = _plan(quick)
    trained = train([setting], range(seed, seed + n_seeds), steps, progress=progress)
    rows: list[dict[str, object]] = []
    for model in trained.models:
        aligned, features = alignment(model), model.features[-1]
        for place, pair in enumerate(setting.ordered_pairs):
            rows.append(
                {
                    "seed": model.seed,
                    "pair": place,
                    "target_logit": pair.logit,
                    "singular_value": float(aligned.values[-1, place]),
                    "query_cosine": float(aligned.query[-1, place]),
                    "key_cosine": float(aligned.key[-1, place]),
                    "interference": float(interference(features, [pair.query, pair.key]).max()),
                    "features_kept": int(kept(features).sum()),
                }
            )
    table = pl.DataFrame(rows)
    model = trained.of(0, seed)
    found, features = channels(model.query[-1], model.key[-1]), model.features[-1]
    present = kept(features)
    arrays = {
        "left": cosines(found.left, features).numpy(),
        "right": cosines(found.right, features).numpy(),
        "values": found.values.numpy(),
        "logits": torch.tensor([pair.logit for pair in setting.ordered_pairs]).numpy(),
        "cosines": (cosines(features, features) * present * present[:, None]).numpy(),
    }
    return Experiment("multi", _findings(table, setting, quick, steps), table, arrays)


def _findings(table: pl.DataFrame, setting: Setting, quick: bool, steps: int) -> dict[str, object]:
    worst = table.with_columns(pl.min_horizontal("query_cosine", "key_cosine").alias("cosine"))
    aligned = worst.filter(pl.col("cosine") >= ALIGNED).height
    ratio = (table["singular_value"] / table["target_logit"]).to_numpy()
    by_seed = worst.group_by("seed").agg(pl.col("cosine").min()).sort("seed")
    return {
        "quick": quick,
        "seeds": by_seed["seed"].to_list(),
        "steps": steps,
        "lambda": setting.attention_weight,
        "p": setting.probability,
        "pairs_of_all_seeds": table.height,
        "pairs_aligned_in_order": aligned,
        "smallest_cosine": float(worst["cosine"].to_numpy().min()),
        "mean_cosine": float(worst["cosine"].to_numpy().mean()),
        "smallest_cosine_by_seed": by_seed["cosine"].to_list(),
        "singular_value_over_logit": [float(ratio.min()), float(ratio.max())],
        "correlation_of_values_and_logits": float(
            np.corrcoef(table["singular_value"], table["target_logit"])[0, 1]
        ),
        "largest_interference_of_a_pair": float(table["interference"].to_numpy().max()),
        "features_kept": table.group_by("seed")
        .agg(pl.col("features_kept").first())
        .sort("seed")["features_kept"]
        .to_list(),
        "paper": [
            against_paper(
                f"all {len(setting.pairs)} pairs align, pair k with singular pair k",
                table.height,
                aligned,
                aligned == table.height,
                f"pairs of all seeds with both cosines at least {ALIGNED}",
            ),
            against_paper(
                "singular values reflect the target logits",
                "decline with the logits",
                [float(ratio.min()), float(ratio.max())],
                bool(ratio.max() / ratio.min() < 1.5),
                "range of singular value over target logit",
            ),
        ],
    }
