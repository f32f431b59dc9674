"""One pair of interest, (w0, w1) with target logit 1: the top singular vectors align with it."""

from __future__ import annotations

import polars as pl

from headtrace.progress import Progress
from headtrace.toy.alignment import alignment, channels, cosines
from headtrace.toy.experiment import Experiment, against_paper
from headtrace.toy.geometry import interference, isotropy_error, kept
from headtrace.toy.setting import Pair, Setting
from headtrace.toy.train import ToyModel, train

PAIR = (Pair(0, 1, 1.0),)
SETTING = Setting(pairs=PAIR, attention_weight=20.0, probability=0.52)
"""Where the pair is aligned, orthogonal to all other features and has a singular value of 1.
The paper does not say which lambda and p it used."""
WEAK = Setting(pairs=PAIR, attention_weight=4.0, probability=0.2)
"""Where the head is too weak against reconstruction to break up the antipodal pairs."""


def _plan(quick: bool) -> tuple[int, int]:
    return (2, 3000) if quick else (5, 10_000)


def single(*, quick: bool = False, seed: int = 0, progress: Progress | None = None) -> Experiment:
    """Train the one-pair head where it wins and where it is weak."""
    n_seeds, steps = _plan(quick)
    trained = train([SETTING, WEAK], range(seed, seed + n_seeds), steps, progress=progress)
    table = pl.DataFrame([_row(model) for model in trained.models])
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
    return Experiment("single", _findings(table, quick, seed, n_seeds, steps), table, arrays)


def _row(model: ToyModel) -> dict[str, object]:
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


def _summary(table: pl.DataFrame, setting: Setting) -> dict[str, object]:
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


def _findings(table: pl.DataFrame, quick: bool, seed: int, n_seeds: int, steps: int) -> dict[str, object]:
    strong, weak = _summary(table, SETTING), _summary(table, WEAK)
    cosine = float(str(strong["smallest_cosine"]))
    ratio = float((table["second_value"] / table["first_value"]).to_numpy().max())
    apart = float(str(strong["largest_interference_of_the_pair"]))
    return {
        "quick": quick,
        "seeds": list(range(seed, seed + n_seeds)),
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
