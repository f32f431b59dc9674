"""Where features and singular vectors stand after training, from no head to more pairs than the head has dimensions.

- `isotropy`: no head at all. Features spread out as antipodal pairs, and W W^T is a multiple of the identity.
- `single`: one pair of interest, (w0, w1) with target logit 1. The top singular vectors align with it.
- `multi`: twenty pairs among 100 features in 50 dimensions. All align, in the order of their target logits.
- `capacity`: more pairs than head dimensions. The lowest-logit pairs share the smallest singular vector. Target logits
  are low here (the lowest is 2), so at the default weight of the attention loss some heads leave a dimension unused;
  with the weight of the single-pair model they do not.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl
import torch

from headtrace.progress import Progress, part_of
from headtrace.toy.alignment import (
    alignment,
    antipodal_pairs,
    channels,
    cosines,
    interference,
    isotropy_error,
    kept,
)
from headtrace.toy.experiment import Experiment, against_paper
from headtrace.toy.model import FeaturePair, Setting, falling_pairs
from headtrace.toy.train import ToyModel, train

PROBABILITIES = (0.1, 0.2, 0.52)
SHOWN = 0.2
"""The probability that the figures show: the paper does not say which it used."""


def isotropy(*, quick: bool = False, seed: int = 0, progress: Progress | None = None) -> Experiment:
    """Train autoencoders without a head, over feature probabilities, and measure their geometry."""
    settings = [
        Setting(pairs=(), attention_weight=0.0, probability=p) for p in ((SHOWN,) if quick else PROBABILITIES)
    ]
    seeds, steps = range(seed, seed + (2 if quick else 5)), 2500 if quick else 6000
    trained = train(settings, seeds, steps, progress=progress)
    rows = [
        {
            "probability": model.setting.probability,
            "seed": model.seed,
            "antipodal_pairs": antipodal_pairs(model.features[-1]),
            "isotropy_error": isotropy_error(model.features[-1]),
            "features_kept": int(kept(model.features[-1]).sum()),
            "smallest_norm": float(model.features[-1].norm(dim=0).min()),
            "largest_norm": float(model.features[-1].norm(dim=0).max()),
            "reconstruction_loss": float(model.reconstruction_loss[-1]),
        }
        for model in trained.models
    ]
    table = pl.DataFrame(rows)
    shown = table.filter(pl.col("probability") == SHOWN)
    features = trained.of([s.probability for s in settings].index(SHOWN), seed).features[-1]
    arrays = {
        "cosines": cosines(features, features).numpy(),
        "moment": (features @ features.T).numpy(),
        "order": _paired_order(cosines(features, features).numpy()),
    }
    pairs = [int(n) for n in shown["antipodal_pairs"]]
    error = float(shown["isotropy_error"].to_numpy().max())
    by_probability = {
        f"{p[0]:g}": {
            "antipodal_pairs": part["antipodal_pairs"].to_list(),
            "worst_isotropy_error": float(part["isotropy_error"].to_numpy().max()),
        }
        for p, part in table.group_by("probability", maintain_order=True)
    }
    findings: dict[str, object] = {
        "quick": quick,
        "seeds": list(seeds),
        "steps": steps,
        "shown_probability": SHOWN,
        "by_probability": by_probability,
        "paper": [
            against_paper("antipodal pairs of 20 features in 10 dimensions", 10, pairs, set(pairs) == {10}),
            against_paper(
                "W W^T is a multiple of the identity",
                "isotropic",
                error,
                error < 0.01,
                "largest ||W W^T / c - I|| over seeds; at p = 0.52 some features stay short and it is not",
            ),
        ],
    }
    return Experiment("isotropy", findings, table, arrays)


def _paired_order(among: np.ndarray) -> np.ndarray:
    """Features with each one's opposite next to it, so that the pairs are seen."""
    left, order = set(range(len(among))), list[int]()
    while left:
        first = min(left)
        second = min(left, key=lambda other: among[first, other])
        order += [first] if second == first else [first, second]
        left -= {first, second}
    return np.array(order)


PAIR = (FeaturePair(0, 1, 1.0),)
ONE_PAIR = Setting(pairs=PAIR, attention_weight=20.0, probability=0.52)
"""Where the pair is aligned, orthogonal to all other features and has a singular value of 1.
The paper does not say which lambda and p it used."""
WEAK_HEAD = Setting(pairs=PAIR, attention_weight=4.0, probability=0.2)
"""Where the head is too weak against reconstruction to break up the antipodal pairs."""


def single(*, quick: bool = False, seed: int = 0, progress: Progress | None = None) -> Experiment:
    """Train the one-pair head where it wins and where it is weak."""
    seeds, steps = range(seed, seed + (2 if quick else 5)), 3000 if quick else 10_000
    trained = train([ONE_PAIR, WEAK_HEAD], seeds, steps, progress=progress)
    table = pl.DataFrame([_single_row(model) for model in trained.models])
    model = trained.of(0, seed)
    found = channels(model.query[-1], model.key[-1])
    features = model.features[-1]
    arrays = {
        "left": cosines(found.left, features).numpy(),
        "right": cosines(found.right, features).numpy(),
        "values": found.values.numpy(),
        "cosines": (cosines(features, features) * kept(features) * kept(features)[:, None]).numpy(),
        "moment": (features @ features.T).numpy(),
    }
    strong, weak = _single_summary(table, ONE_PAIR), _single_summary(table, WEAK_HEAD)
    cosine = float(str(strong["smallest_cosine"]))
    ratio = float((table["second_value"] / table["first_value"]).to_numpy().max())
    apart = float(str(strong["largest_interference_of_the_pair"]))
    findings: dict[str, object] = {
        "quick": quick,
        "seeds": list(seeds),
        "steps": steps,
        "aligned": strong,
        "weak_head": weak,
        "paper": [
            against_paper("w0 is u0 and w1 is v0", "aligned", cosine, cosine >= 0.99, "smallest cosine"),
            against_paper(
                "one large singular value", "single", ratio, ratio < 0.05, "second over first, worst"
            ),
            against_paper(
                "w0 and w1 are orthogonal to all other features",
                "orthogonal",
                apart,
                apart < 0.1,
                "largest |cosine| with a kept feature; with the weak head the pair stays antipodal",
            ),
        ],
    }
    return Experiment("single", findings, table, arrays)


def _single_row(model: ToyModel) -> dict[str, object]:
    aligned, features = alignment(model), model.features[-1]
    values = channels(model.query[-1], model.key[-1]).values
    return {
        "attention_weight": model.setting.attention_weight,
        "probability": model.setting.probability,
        "seed": model.seed,
        "query_cosine": float(aligned.query[-1, 0]),
        "key_cosine": float(aligned.key[-1, 0]),
        "first_value": float(values[0]),
        "second_value": float(values[1]),
        "interference": float(interference(features, [0, 1]).max()),
        "features_kept": int(kept(features).sum()),
        "isotropy_error": isotropy_error(features),
        "excess_attention_loss": float(model.attention_loss[-1] - model.attention_floor[-1]),
    }


def _single_summary(table: pl.DataFrame, setting: Setting) -> dict[str, object]:
    part = table.filter(
        pl.col("attention_weight") == setting.attention_weight, pl.col("probability") == setting.probability
    )
    return {
        "lambda": setting.attention_weight,
        "p": setting.probability,
        "smallest_cosine": float(part.select(pl.min_horizontal("query_cosine", "key_cosine").min()).item()),
        "first_singular_values": part["first_value"].to_list(),
        "second_singular_values": part["second_value"].to_list(),
        "largest_interference_of_the_pair": float(part["interference"].to_numpy().max()),
        "features_kept": part["features_kept"].to_list(),
    }


TWENTY_PAIRS = Setting(
    falling_pairs(20, 26.0),
    n_features=100,
    d_model=50,
    d_head=50,
    attention_weight=25.0,
    probability=0.35,
)
"""Lambda and p are not in the paper. At lambda = 4 the pairs of lowest logit are not learned."""
THREE_PAIRS = Setting(tuple(FeaturePair(i, i + 3, 24.0 - 6 * i) for i in range(3)))
ALIGNED = 0.95


def multi(*, quick: bool = False, seed: int = 0, progress: Progress | None = None) -> Experiment:
    """Train the head with twenty pairs (three when quick) and match pair k with singular pair k."""
    setting, n_seeds, steps = (THREE_PAIRS, 1, 5000) if quick else (TWENTY_PAIRS, 3, 60_000)
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
    worst = table.with_columns(pl.min_horizontal("query_cosine", "key_cosine").alias("cosine"))
    aligned = worst.filter(pl.col("cosine") >= ALIGNED).height
    ratio = (table["singular_value"] / table["target_logit"]).to_numpy()
    by_seed = worst.group_by("seed").agg(pl.col("cosine").min()).sort("seed")
    findings: dict[str, object] = {
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
    return Experiment("multi", findings, table, arrays)


CAPACITY_WEIGHT = 20.0


def _capacity_settings(d_head: int, counts: list[int]) -> list[Setting]:
    """Twice as many model dimensions as head dimensions, four times as many features; logits n + 1 - i."""
    return [
        Setting(
            falling_pairs(count, count + 1.0),
            n_features=4 * d_head,
            d_model=2 * d_head,
            d_head=d_head,
            attention_weight=CAPACITY_WEIGHT,
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
        Training(_capacity_settings(5, [5, 6, 7, 8, 9, 10]), 5, 30_000),
        Training(_capacity_settings(10, [10, 12, 15, 18, 20]), 2, 60_000),
    ]
    if quick:
        plan = [Training(_capacity_settings(5, [5, 7]), 1, 6000)]
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
    summed = capacity_summary(table)
    shares = _shares(summed)
    low, high = shares.values()
    findings: dict[str, object] = {
        "quick": quick,
        "attention_weight": CAPACITY_WEIGHT,
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


def capacity_summary(table: pl.DataFrame) -> pl.DataFrame:
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
