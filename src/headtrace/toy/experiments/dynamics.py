"""Four pairs over training: the smaller the first weights, the more strictly in the order of their logits.

A pair is aligned from the first snapshot after which both of its cosines stay above 0.9, and learned from the
one after which the head gives it at least half of its target logit, w_i^T Omega w_j >= T_ij / 2. From weights of
Xavier's size the random start decides much about a single run; from small weights pairs are learned one after
another. So the question is asked of many seeds and of several sizes of all first weights.

Who moves first, singular vector or feature? Asked in two ways: which of the two first comes, for good,
within a cosine of 0.9 of where it ends; and whether the singular vector now is more like the feature later
than the other way round.
"""

from __future__ import annotations

import numpy as np
import polars as pl
import torch
from jaxtyping import Float
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from headtrace.progress import Progress
from headtrace.toy.alignment import Channels, align, channels, cosines
from headtrace.toy.experiment import Experiment, against_paper
from headtrace.toy.model import Setting
from headtrace.toy.train import ToyModel, train

CLOSE, HALF = 0.9, 0.5
STARTS = (1.0, 0.3, 0.1, 0.03)
"""Sizes of the first weights, as multiples of Xavier's."""
EVENTS = ("aligned", "learned")
SHOWN = 0.1
"""The size whose first seed in exact order is drawn."""


def dynamics(*, quick: bool = False, seed: int = 0, progress: Progress | None = None) -> Experiment:
    """Follow default models through training and time every alignment."""
    n_seeds, steps = (1, 5000) if quick else (12, 20_000)
    settings = [Setting(initial=start) for start in STARTS]
    seeds = range(seed, seed + n_seeds)
    trained = train(settings, seeds, steps, snapshots=range(0, steps, 100), progress=progress)
    table = pl.DataFrame([row for model in trained.models for row in _rows(model)], infer_schema_length=None)
    shown = next(
        (s for s, at in zip(seeds, _when(table, SHOWN, "aligned_at"), strict=True) if in_order(at)), seed
    )
    arrays = _arrays(trained.of(STARTS.index(SHOWN), shown))
    for event in EVENTS:
        arrays |= {f"{event}_at_{start:g}": _when(table, start, f"{event}_at") for start in STARTS}
    findings = {"drawn": {"initial": SHOWN, "seed": shown}, **_findings(table, trained.models, quick, steps)}
    return Experiment("dynamics", findings, table, arrays)


def settled(close: np.ndarray, steps: tuple[int, ...]) -> int | None:
    """The first step from which `close` holds to the end.

    >>> settled(np.array([True, False, True, True]), (0, 10, 20, 30))
    20
    """
    if not close[-1]:
        return None
    wrong = np.flatnonzero(~close)
    return steps[0 if len(wrong) == 0 else int(wrong[-1]) + 1]


def in_order(at: np.ndarray) -> bool:
    """Whether every pair aligned, none before one with a higher logit.

    >>> in_order(np.array([100, 200, 200])), in_order(np.array([100, np.inf, np.inf]))
    (True, False)
    """
    return bool(np.isfinite(at).all() and (at[:-1] <= at[1:]).all())


def share_learned(model: ToyModel) -> Float[Tensor, "snapshots pairs"]:
    """The logit that the head gives to each pair of features, as a share of its target."""
    pairs = model.setting.ordered_pairs
    queries = model.features[:, :, [pair.query for pair in pairs]]
    keys = model.features[:, :, [pair.key for pair in pairs]]
    logits = torch.einsum("sdp,sde,sep->sp", queries, model.omega, keys)
    return logits / torch.tensor([pair.logit for pair in pairs])


def followed(found: Channels) -> Channels:
    """Channels of all snapshots, each put in the place of the final channel that it is most like.

    Early in training singular values cross, so the k-th largest is not the same direction from one snapshot
    to the next.
    """
    left, right, values = found.left.clone(), found.right.clone(), found.values.clone()
    for step in range(len(found.values)):
        like = cosines(found.left[step], found.left[-1]) * cosines(found.right[step], found.right[-1])
        order = linear_sum_assignment(-like.abs().numpy())[1]
        left[step], right[step] = found.left[step][:, order], found.right[step][:, order]
        values[step] = found.values[step][order]
    return Channels(left, values, right)


def _similarity(a: torch.Tensor, b: torch.Tensor) -> np.ndarray:
    """|cosine| of one vector's path (snapshots x d_model), down, with another's, across."""
    return cosines(a.T, b.T).abs().T.numpy()


def _rows(model: ToyModel) -> list[dict[str, object]]:
    found = channels(model.query, model.key)
    ranked, traced, steps = align(model.setting, model.features, found), followed(found), model.snapshot_steps
    learned = share_learned(model).numpy()
    upper, lower = np.triu_indices(len(steps), 1), np.tril_indices(len(steps), -1)
    rows: list[dict[str, object]] = []
    for place, pair in enumerate(model.setting.ordered_pairs):
        for side, vectors, feature in (("query", traced.left, pair.query), ("key", traced.right, pair.key)):
            vector, path = vectors[:, :, place], model.features[:, :, feature].double()
            likeness = _similarity(vector, path)
            rows.append(
                {
                    "initial": model.setting.initial,
                    "seed": model.seed,
                    "pair": place,
                    "side": side,
                    "target_logit": pair.logit,
                    "aligned_at": settled((ranked.worst[:, place] >= CLOSE).numpy(), steps),
                    "learned_at": settled(learned[:, place] >= HALF, steps),
                    "vector_settled_at": settled(_similarity(vector, vector)[:, -1] >= CLOSE, steps),
                    "feature_settled_at": settled(_similarity(path, path)[:, -1] >= CLOSE, steps),
                    "vector_now_feature_later": float(likeness[upper].mean()),
                    "feature_now_vector_later": float(likeness[lower].mean()),
                    "final_cosine": float(ranked.worst[-1, place]),
                }
            )
    return rows


def _excess(model: ToyModel) -> np.ndarray:
    return (model.attention_loss - model.attention_floor).clamp(min=1e-7).numpy()


def _when(table: pl.DataFrame, start: float, column: str) -> np.ndarray:
    """Seeds x pairs; infinite where a pair never did."""
    part = table.filter(pl.col("initial") == start, pl.col("side") == "query")
    return part[column].cast(pl.Float64).fill_null(np.inf).to_numpy().reshape(-1, part["pair"].n_unique())


def _drops(models: list[ToyModel], at: np.ndarray) -> list[float]:
    """The median factor by which excess attention loss falls within 300 steps of each alignment."""
    falls: list[list[float]] = []
    for model, times in zip(models, at, strict=True):
        steps, excess = np.array(model.snapshot_steps), _excess(model)
        if np.isfinite(times).all():
            before = np.interp(np.maximum(times - 300, 0), steps, excess)
            after = np.interp(times + 300, steps, excess)
            falls.append((before / after).tolist())
    return [float(x) for x in np.median(falls, axis=0)] if falls else []


def _timing(at: np.ndarray) -> dict[str, object]:
    """What the times of one event (seeds x pairs) say about order."""
    median = np.median(at, axis=0)
    return {
        "at": [[int(t) if np.isfinite(t) else None for t in row] for row in at],
        "median": [float(t) if np.isfinite(t) else None for t in median],
        "median_is_in_order_of_logits": in_order(median),
        "seeds_in_exact_order": float(np.mean([in_order(row) for row in at])),
        "highest_before_lowest": float((at[:, 0] < at[:, -1]).mean()),
        "neighbours_in_order": float((at[:, :-1] <= at[:, 1:]).mean()),
    }


def _start(table: pl.DataFrame, models: tuple[ToyModel, ...], start: float) -> dict[str, object]:
    at = _when(table, start, "aligned_at")
    part = table.filter(pl.col("initial") == start)
    first = part.drop_nulls(["vector_settled_at", "feature_settled_at"])
    earlier = (first["vector_settled_at"] <= first["feature_settled_at"]).to_numpy()
    leads = (part["vector_now_feature_later"] > part["feature_now_vector_later"]).to_numpy()
    return {
        "fall_of_excess_attention_loss_at_alignment": _drops(
            [model for model in models if model.setting.initial == start], at
        ),
        "vectors_settled_no_later_than_their_feature": float(earlier.mean()),
        "vectors_leading_in_likeness": float(leads.mean()),
        "median_settled_at": {
            "singular_vectors": float(np.median(first["vector_settled_at"].to_numpy())),
            "features": float(np.median(first["feature_settled_at"].to_numpy())),
        },
        "smallest_final_cosine": float(part["final_cosine"].to_numpy().min()),
    }


def _findings(
    table: pl.DataFrame, models: tuple[ToyModel, ...], quick: bool, steps: int
) -> dict[str, object]:
    timings = {
        (start, event): _timing(_when(table, start, f"{event}_at")) for event in EVENTS for start in STARTS
    }
    starts = {
        start: {event: timings[start, event] for event in EVENTS} | _start(table, models, start)
        for start in STARTS
    }
    leading = {
        f"{start:g}": found["vectors_settled_no_later_than_their_feature"] for start, found in starts.items()
    }
    return {
        "quick": quick,
        "seeds": sorted({model.seed for model in models}),
        "steps": steps,
        "aligned_means_both_cosines_stay_above": CLOSE,
        "learned_means_a_share_of_the_target_logit_of": HALF,
        "by_size_of_first_weights": {f"{start:g}": found for start, found in starts.items()},
        "paper": [
            *(
                against_paper(
                    f"pairs are {event} in the order of their target logits, first weights {start:g} of Xavier's",
                    "always",
                    timing["median"],
                    bool(timing["median_is_in_order_of_logits"]),
                    f"median steps over seeds; share of seeds in exact order: {timing['seeds_in_exact_order']:.2f}",
                )
                for (start, event), timing in timings.items()
            ),
            against_paper(
                "singular vectors tend to shift first",
                "tend to",
                leading,
                all(float(str(share)) > 0.5 for share in leading.values()),
                "share of singular vectors that settle no later than their feature",
            ),
        ],
    }


def _arrays(model: ToyModel) -> dict[str, np.ndarray]:
    found = channels(model.query, model.key)
    traced, ranked = followed(found), align(model.setting, model.features, found)
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
