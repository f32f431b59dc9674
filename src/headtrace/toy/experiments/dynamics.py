"""Four pairs over training: they align one by one, in the order of their target logits.

A pair is aligned from the first snapshot after which both of its cosines stay above 0.95. Who moves first,
singular vector or feature, is asked in two ways: which of the two first comes, for good, within a cosine of
0.95 of where it ends; and whether the singular vector now is more like the feature later than the other way
round.
"""

from __future__ import annotations

import numpy as np
import polars as pl
import torch

from headtrace.toy.alignment import Channels, align, channels, cosines
from headtrace.toy.experiment import Experiment, against_paper
from headtrace.toy.setting import Setting
from headtrace.toy.train import Model, Progress, train

CLOSE = 0.95


def _plan(quick: bool) -> tuple[int, int, int]:
    """Seeds, steps, steps between snapshots."""
    return (1, 5000, 100) if quick else (5, 10_000, 50)


def units(quick: bool) -> int:
    seeds, steps, _ = _plan(quick)
    return seeds * steps


def dynamics(*, quick: bool = False, seed: int = 0, progress: Progress | None = None) -> Experiment:
    """Follow the default model through training and time every alignment."""
    n_seeds, steps, every = _plan(quick)
    trained = train(
        [Setting()], range(seed, seed + n_seeds), steps, snapshots=range(0, steps, every), progress=progress
    )
    rows = [row for model in trained.models for row in _rows(model)]
    table = pl.DataFrame(rows)
    return Experiment("dynamics", _findings(table, trained.models, quick), table, _arrays(trained.models[0]))


def settled(close: np.ndarray, steps: tuple[int, ...]) -> int | None:
    """The first step from which `close` holds to the end.

    >>> settled(np.array([True, False, True, True]), (0, 10, 20, 30))
    20
    """
    if not close[-1]:
        return None
    wrong = np.flatnonzero(~close)
    return steps[0 if len(wrong) == 0 else int(wrong[-1]) + 1]


def followed(found: Channels, last: int) -> Channels:
    """Channels of all snapshots, each put in the place of the final channel that it is most like.

    Early in training singular values cross, so the k-th largest is not the same direction from one snapshot
    to the next.
    """
    from scipy.optimize import linear_sum_assignment

    left, right, values = found.left.clone(), found.right.clone(), found.values.clone()
    for step in range(len(found.values)):
        like = cosines(found.left[step], found.left[last]).abs() * cosines(found.right[step], found.right[last]).abs()
        order = linear_sum_assignment(-like.numpy())[1]
        left[step], right[step] = found.left[step][:, order], found.right[step][:, order]
        values[step] = found.values[step][order]
    return Channels(left, values, right)


def _similarity(a: torch.Tensor, b: torch.Tensor) -> np.ndarray:
    """|cosine| of one vector's path (snapshots x d_model) with another's."""
    return cosines(a.T, b.T).abs().T.numpy()


def _rows(model: Model) -> list[dict[str, object]]:
    found = channels(model.query, model.key)
    ranked = align(model.setting, model.features, found)
    traced = followed(found, -1)
    steps = model.snapshot_steps
    rows: list[dict[str, object]] = []
    for place, pair in enumerate(model.setting.ordered_pairs):
        for side, vectors, feature in (("query", traced.left, pair.query), ("key", traced.right, pair.key)):
            vector, path = vectors[:, :, place], model.features[:, :, feature].double()
            later = _similarity(vector, path)
            upper, lower = np.triu_indices(len(steps), 1), np.tril_indices(len(steps), -1)
            rows.append(
                {
                    "seed": model.seed,
                    "pair": place,
                    "side": side,
                    "target_logit": pair.logit,
                    "aligned_at": settled((ranked.worst[:, place] >= CLOSE).numpy(), steps),
                    "vector_settled_at": settled(_similarity(vector, vector)[:, -1] >= CLOSE, steps),
                    "feature_settled_at": settled(_similarity(path, path)[:, -1] >= CLOSE, steps),
                    "vector_now_feature_later": float(later[upper].mean()),
                    "feature_now_vector_later": float(later[lower].mean()),
                    "final_cosine": float(later[-1, -1]),
                }
            )
    return rows


def _excess(model: Model) -> np.ndarray:
    return (model.attention_loss - model.attention_floor).clamp(min=1e-9).numpy()


def _drops(model: Model, aligned_at: list[int]) -> list[float]:
    """By what factor the excess attention loss falls from 10% of the run before an alignment to 5% after it."""
    steps, excess = np.array(model.snapshot_steps), _excess(model)
    window = steps[-1] // 20
    return [
        float(np.interp(max(0, at - 2 * window), steps, excess) / np.interp(at + window, steps, excess))
        for at in aligned_at
    ]


def _findings(table: pl.DataFrame, models: tuple[Model, ...], quick: bool) -> dict[str, object]:
    times = {
        model.seed: table.filter(pl.col("seed") == model.seed, pl.col("side") == "query")["aligned_at"].to_list()
        for model in models
    }
    ordered = {seed: None not in at and at == sorted(at) for seed, at in times.items()}
    strictly = {seed: None not in at and len(set(at)) == len(at) for seed, at in times.items()}
    first = (table["vector_settled_at"] <= table["feature_settled_at"]).to_numpy()
    leads = (table["vector_now_feature_later"] > table["feature_now_vector_later"]).to_numpy()
    drops = {
        model.seed: _drops(model, times[model.seed]) for model in models if None not in times[model.seed]
    }
    return {
        "quick": quick,
        "seeds": [model.seed for model in models],
        "steps": models[0].snapshot_steps[-1],
        "aligned_at": {str(seed): at for seed, at in times.items()},
        "order_of_alignment_is_order_of_logits": {str(seed): bool(value) for seed, value in ordered.items()},
        "no_two_pairs_at_once": {str(seed): bool(value) for seed, value in strictly.items()},
        "fall_of_excess_attention_loss_at_each_alignment": {str(seed): value for seed, value in drops.items()},
        "vectors_that_settle_no_later_than_their_feature": f"{int(first.sum())} of {len(first)}",
        "vectors_more_like_their_later_feature_than_the_reverse": f"{int(leads.sum())} of {len(leads)}",
        "median_settled_at": {
            "singular_vectors": float(np.median(table["vector_settled_at"].to_numpy())),
            "features": float(np.median(table["feature_settled_at"].to_numpy())),
        },
        "paper": [
            against_paper(
                "pairs align in the order of their target logits",
                "all",
                f"{sum(ordered.values())} of {len(ordered)} seeds",
                all(ordered.values()),
            ),
            against_paper(
                "singular vectors tend to shift first",
                "tend to",
                f"{first.mean():.0%} settle no later; {leads.mean():.0%} lead in likeness",
                bool(first.mean() > 0.5 and leads.mean() > 0.5),
            ),
        ],
    }


def _arrays(model: Model) -> dict[str, np.ndarray]:
    found = channels(model.query, model.key)
    traced, ranked = followed(found, -1), align(model.setting, model.features, found)
    arrays = {
        "steps": np.array(model.snapshot_steps),
        "excess_attention_loss": _excess(model),
        "reconstruction_loss": model.reconstruction_loss.numpy(),
        "query_cosine": ranked.query.numpy(),
        "key_cosine": ranked.key.numpy(),
        "values": found.values.numpy(),
        "logits": ranked.logits.numpy(),
    }
    for place, pair in enumerate(model.setting.ordered_pairs):
        vector, path = traced.left[:, :, place], model.features[:, :, pair.query].double()
        arrays[f"vector_{place}"] = _similarity(vector, vector)
        arrays[f"feature_{place}"] = _similarity(path, path)
        arrays[f"both_{place}"] = _similarity(vector, path)
    return arrays
