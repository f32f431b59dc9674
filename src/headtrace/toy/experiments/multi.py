"""Twenty pairs among 100 features in 50 dimensions: all align, in the order of their target logits."""

from __future__ import annotations

import polars as pl
import torch

from headtrace.toy.alignment import alignment, channels, cosines
from headtrace.toy.experiment import Experiment, against_paper
from headtrace.toy.geometry import interference, kept
from headtrace.toy.setting import Setting, falling_pairs
from headtrace.toy.train import Progress, train

SETTING = Setting(falling_pairs(20, 26.0), n_features=100, d_model=50, d_head=50, probability=0.2)
QUICK = Setting(falling_pairs(6, 26.0), n_features=24, d_model=12, d_head=12, probability=0.4)


def _plan(quick: bool) -> tuple[Setting, int, int]:
    return (QUICK, 1, 5000) if quick else (SETTING, 5, 20_000)


def units(quick: bool) -> int:
    _, seeds, steps = _plan(quick)
    return seeds * steps


def multi(*, quick: bool = False, seed: int = 0, progress: Progress | None = None) -> Experiment:
    """Train the head with twenty pairs (six when quick) and match pair k with singular pair k."""
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
    aligned = worst.filter(pl.col("cosine") >= 0.99).height
    error = (table["singular_value"] / table["target_logit"] - 1).abs().to_numpy()
    smallest = float(worst["cosine"].to_numpy().min())
    return {
        "quick": quick,
        "seeds": sorted(set(table["seed"].to_list())),
        "steps": steps,
        "lambda": setting.attention_weight,
        "p": setting.probability,
        "pairs_of_all_seeds": table.height,
        "pairs_aligned_in_order": aligned,
        "smallest_cosine": smallest,
        "smallest_cosine_by_seed": worst.group_by("seed")
        .agg(pl.col("cosine").min())
        .sort("seed")["cosine"]
        .to_list(),
        "largest_singular_value_error": float(error.max()),
        "largest_interference_of_a_pair": float(table["interference"].to_numpy().max()),
        "paper": [
            against_paper(
                f"all {len(setting.pairs)} pairs align, pair k with singular pair k",
                table.height,
                aligned,
                aligned == table.height,
                "pairs of all seeds with both cosines at least 0.99",
            ),
            against_paper(
                "singular values reflect the target logits",
                "decline with the logits",
                float(error.max()),
                bool(error.max() < 0.05),
                "largest relative difference",
            ),
        ],
    }
