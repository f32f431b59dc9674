"""Theorems 1 to 4, each put to a numerical test that a reader can run.

1. The minimum of the expected loss, found by optimisation, against its closed form.
2. On tight frames its singular vectors are the features.
3. Off a tight frame the angle stays under the bound, for sets of every kind near isotropy.
4. With attention fixed, a second feature pair minimises its loss orthogonally, or within the bound.
"""

from __future__ import annotations

import numpy as np
import polars as pl
import torch

from headtrace.progress import Progress
from headtrace.toy.experiment import Experiment, against_paper
from headtrace.toy.theory import (
    FRAMES,
    FixedHead,
    attention_loss,
    bound,
    closed_form,
    deviation,
    minimise,
    minimise_expected_loss,
    pushed_frame,
    relaxed_frame,
    sine,
    unit_columns,
)

ROWS = pl.Schema(
    {
        "theorem": pl.Int64,
        "case": pl.String,
        "measure": pl.String,
        "parameter": pl.Float64,
        "measured": pl.Float64,
        "bound": pl.Float64,
    }
)
Row = tuple[int, str, str, float, float, float | None]

ORTHOGONAL_TARGET = FixedHead(first=6.0, second=4.0, gap_a=6.0, gap_b=-4.0)
OVERLAPPING_TARGET = FixedHead(first=6.0, second=4.0, gap_a=3.0, gap_b=-4.0)


def theorems(*, quick: bool = False, seed: int = 0, progress: Progress | None = None) -> Experiment:
    """Check all four; the findings say how close the equalities and how far the bounds are."""
    generator = torch.Generator().manual_seed(seed)
    rows: list[Row] = []
    checks = (_closed_form, _tight_frames, _bound, _orthogonalisation)
    for number, check in enumerate(checks, 1):
        rows += check(quick, generator)
        if progress is not None:
            progress(number, len(checks))
    table = pl.DataFrame(rows, schema=ROWS, orient="row")
    whole = table.filter(pl.col("measure") == "sine against tau/(1 - tau)")
    arrays = {f"third_{name}": whole[name].to_numpy() for name in ("parameter", "measured", "bound")}
    for case in ("orthogonal", "overlapping"):
        chosen = table.filter(pl.col("theorem") == 4, pl.col("case") == case)
        for name in ("parameter", "measured", "bound"):
            arrays[f"fourth_{case}_{name}"] = chosen[name].to_numpy()
    return Experiment("theorems", _findings(table, quick, seed), table, arrays)


def _closed_form(quick: bool, generator: torch.Generator) -> list[Row]:
    """Random features that are far from isotropic, so that the whitening in the closed form matters."""
    d, n = (3, 4) if quick else (4, 6)
    rows: list[Row] = []
    for trial in range(2 if quick else 5):
        x, y = (unit_columns(torch.randn(d, n, generator=generator, dtype=torch.float64)) for _ in range(2))
        best = minimise_expected_loss(x, y, probability=0.4, scale=3.0, generator=generator)
        left, right = best.sines(torch.linalg.solve(x @ x.T, x[:, 0]), torch.linalg.solve(y @ y.T, y[:, 0]))
        raw = best.sines(x[:, 0], y[:, 0])
        rows += [
            (1, "random", "relative error of Omega", float(trial), best.relative_error, None),
            (1, "random", "second singular value / first", float(trial), best.second_value, None),
            (1, "random", "sine to whitened features", float(trial), max(left, right), None),
            (1, "random", "sine to the features themselves", float(trial), max(raw), None),
        ]
    return rows


def _tight_frames(quick: bool, generator: torch.Generator) -> list[Row]:
    rows: list[Row] = []
    for name, frame in FRAMES.items():
        small = (2, 4) if quick or name == "antipodal" else (4, 6)
        x, y = frame(*small, generator), frame(*small, generator)
        best = minimise_expected_loss(x, y, probability=0.4, scale=3.0, generator=generator)
        rows.append(
            (2, name, "sine, by optimisation", float(small[1]), max(best.sines(x[:, 0], y[:, 0])), None)
        )
        for d, n in ((10, 20), (50, 100)):
            x, y = frame(d, n, generator), frame(d, n, generator)
            left, _, right = torch.linalg.svd(closed_form(x, y, 1.0))
            angle = max(sine(left[:, 0], x[:, 0]), sine(right[0], y[:, 0]))
            rows += [
                (2, name, "sine, by closed form", float(n), angle, None),
                (2, name, "distance from isotropy", float(n), max(deviation(x), deviation(y)), None),
            ]
    return rows


def _bound(quick: bool, generator: torch.Generator) -> list[Row]:
    """Sets pushed away from a tight frame, and random sets not quite moved to one; queries unlike keys."""

    def near_isotropic(d: int, n: int) -> torch.Tensor:
        chance = float(torch.rand((), generator=generator))
        if chance < 0.5:
            return pushed_frame(d, n, 10 ** (-0.3 - 6.4 * chance), generator)
        return relaxed_frame(d, n, generator, rounds=int(1 + 16 * (chance - 0.5)))

    rows: list[Row] = []
    for d, n in ((4, 12), (10, 20), (10, 60), (20, 200)):
        for _ in range(20 if quick else 500):
            x, y = near_isotropic(d, n), near_isotropic(d, n)
            e_x, e_y = deviation(x), deviation(y)
            tau = 4 * e_x * e_y + 2 * e_x + 2 * e_y
            if max(e_x, e_y) >= 0.5 or tau >= 1:
                continue
            left, _, right = torch.linalg.svd(closed_form(x, y, 1.0))
            angle = max(sine(left[:, 0], x[:, 0]), sine(right[0], y[:, 0]))
            rows.append((3, f"D={d}, N={n}", "sine against tau/(1 - tau)", tau, angle, tau / (1 - tau)))
            if tau < 0.5:
                rows.append((3, f"D={d}, N={n}", "sine against 2 tau", tau, angle, 2 * tau))
    return rows


def _orthogonalisation(quick: bool, _: torch.Generator) -> list[Row]:
    """A pair with y2 orthogonal to y1 is the comparison of the bound."""
    rows: list[Row] = []
    for name, head in (("orthogonal", ORTHOGONAL_TARGET), ("overlapping", OVERLAPPING_TARGET)):
        least = minimise(head, 0.0).cross_entropy
        orthogonal = float(attention_loss(head, torch.zeros((), dtype=torch.float64)))
        for weight in (0.1, 1.0, 10.0) if quick else np.logspace(-2, 4, 13).tolist():
            limit = bound(weight, orthogonal, least)
            rows.append((4, name, "overlap", weight, abs(minimise(head, weight).overlap), limit))
    return rows


def _largest(table: pl.DataFrame, theorem: int, measure: str, case: str | None = None) -> float:
    chosen = table.filter(pl.col("theorem") == theorem, pl.col("measure") == measure)
    chosen = chosen if case is None else chosen.filter(pl.col("case") == case)
    return float(chosen["measured"].to_numpy().max())


def _findings(table: pl.DataFrame, quick: bool, seed: int) -> dict[str, object]:
    third = table.filter(pl.col("theorem") == 3)
    violations = third.filter(pl.col("measured") >= pl.col("bound"))
    overlapping = table.filter(pl.col("theorem") == 4, pl.col("case") == "overlapping")
    broken = overlapping.filter(pl.col("measured") > pl.col("bound"))
    orthogonal = _largest(table, 4, "overlap", "orthogonal")
    return {
        "quick": quick,
        "seed": seed,
        "theorem_1": {
            "relative_error_of_omega": _largest(table, 1, "relative error of Omega"),
            "second_singular_value": _largest(table, 1, "second singular value / first"),
            "sine_to_whitened_features": _largest(table, 1, "sine to whitened features"),
            "sine_to_features": _largest(table, 1, "sine to the features themselves"),
        },
        "theorem_2": {
            "sine_by_optimisation": _largest(table, 2, "sine, by optimisation"),
            "sine_by_closed_form": _largest(table, 2, "sine, by closed form"),
            "distance_from_isotropy": _largest(table, 2, "distance from isotropy"),
        },
        "theorem_3": {
            "feature_sets": third.filter(pl.col("measure") == "sine against tau/(1 - tau)").height,
            "violations": violations.height,
            "largest_share_of_bound": float((third["measured"] / third["bound"]).to_numpy().max()),
            "median_share_of_bound": float(np.median((third["measured"] / third["bound"]).to_numpy())),
        },
        "theorem_4": {
            "largest_overlap_when_orthogonality_costs_nothing": orthogonal,
            "violations": broken.height,
            "overlap_by_lambda_when_it_costs": dict(
                zip(
                    (f"{value:.3g}" for value in overlapping["parameter"]),
                    overlapping["measured"].to_list(),
                    strict=True,
                )
            ),
        },
        "paper": [
            against_paper("theorem 3 holds for every set tried", 0, violations.height, violations.is_empty()),
            against_paper("theorem 4's bound holds for every lambda", 0, broken.height, broken.is_empty()),
        ],
    }
