"""No head at all: features spread out as antipodal pairs, and W W^T is a multiple of the identity."""

from __future__ import annotations

import numpy as np
import polars as pl

from headtrace.progress import Progress
from headtrace.toy.alignment import cosines
from headtrace.toy.experiment import Experiment, against_paper
from headtrace.toy.geometry import antipodal_pairs, isotropy_error, kept
from headtrace.toy.setting import Setting
from headtrace.toy.train import train

PROBABILITIES = (0.1, 0.2, 0.52)
SHOWN = 0.2
"""The probability that the figures show: the paper does not say which it used."""


def _plan(quick: bool) -> tuple[list[Setting], int, int]:
    chosen = (SHOWN,) if quick else PROBABILITIES
    settings = [Setting(pairs=(), attention_weight=0.0, probability=p) for p in chosen]
    return settings, 2 if quick else 5, 2500 if quick else 6000


def isotropy(*, quick: bool = False, seed: int = 0, progress: Progress | None = None) -> Experiment:
    """Train autoencoders without a head, over feature probabilities, and measure their geometry."""
    settings, n_seeds, steps = _plan(quick)
    trained = train(settings, range(seed, seed + n_seeds), steps, progress=progress)
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
    return Experiment("isotropy", _findings(table, shown, quick, seed, n_seeds, steps), table, arrays)


def _findings(
    table: pl.DataFrame, shown: pl.DataFrame, quick: bool, seed: int, n_seeds: int, steps: int
) -> dict[str, object]:
    pairs = [int(n) for n in shown["antipodal_pairs"]]
    error = float(shown["isotropy_error"].to_numpy().max())
    by_probability = {
        f"{p[0]:g}": {
            "antipodal_pairs": part["antipodal_pairs"].to_list(),
            "worst_isotropy_error": float(part["isotropy_error"].to_numpy().max()),
        }
        for p, part in table.group_by("probability", maintain_order=True)
    }
    return {
        "quick": quick,
        "seeds": list(range(seed, seed + n_seeds)),
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


def _paired_order(among: np.ndarray) -> np.ndarray:
    """Features with each one's opposite next to it, so that the pairs are seen."""
    left, order = set(range(len(among))), list[int]()
    while left:
        first = min(left)
        second = min(left, key=lambda other: among[first, other])
        order += [first] if second == first else [first, second]
        left -= {first, second}
    return np.array(order)
