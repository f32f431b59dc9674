"""Figures of the theorems and of blind recovery."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headtrace.figures.style import BLUE, INK, VERMILION, headline, house_style, log_scale, new_figure, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headtrace.toy.experiment import Experiment


def theorems(experiment: Experiment, path: str | Path | None = None) -> Figure:
    """Theorem 3: every measured angle under its bound. Theorem 4: overlap and bound over lambda."""
    arrays = experiment.arrays
    with house_style():
        figure, [[third, fourth]] = new_figure(7.6, 3.2, columns=2)
        bounds = arrays["third_bound"]
        third.scatter(
            bounds, arrays["third_measured"], s=4, color=BLUE, alpha=0.5, linewidth=0, label="feature sets"
        )
        ends = [bounds.min(), bounds.max()]
        third.plot(ends, ends, color=INK, linewidth=1, label="bound")
        third.set_title("Theorem 3", loc="left")
        third.set_xlabel("bound τ/(1 - τ)")
        third.set_ylabel("measured sine of the angle")
        weight = arrays["fourth_overlapping_parameter"]
        measured, bound = (arrays[f"fourth_overlapping_{name}"] for name in ("measured", "bound"))
        fourth.plot(weight, measured, color=BLUE, marker="o", ms=4, label="|y₂ · y₁|")
        fourth.plot(weight, bound, color=INK, linewidth=1, label="bound")
        fourth.set_title("Theorem 4: orthogonality at a cost", loc="left")
        fourth.set_xlabel("reconstruction weight λ")
        fourth.set_ylabel("overlap |y₂ · y₁|")
        for axis in (third, fourth):
            log_scale(axis, "xy")
            axis.legend()
        headline(figure, "What is measured stays under what the theorems allow")
        return save(figure, path)


def recovery(experiment: Experiment, path: str | Path | None = None) -> Figure:
    """The share of feature pairs recovered from Omega, against interference."""
    arrays = experiment.arrays
    kinds = (
        ("ideal", "ideal heads on fixed features", BLUE, "-", "o"),
        ("trained", "heads during training", VERMILION, "--", "s"),
    )
    with house_style():
        figure, [[axis]] = new_figure(5.4, 3.5)
        for kind, label, colour, line, marker in kinds:
            x, y = arrays[f"{kind}_interference"], arrays[f"{kind}_recovered"]
            spread = np.stack([y - arrays[f"{kind}_low"], arrays[f"{kind}_high"] - y]).clip(min=0)
            axis.errorbar(
                x, y, yerr=spread, color=colour, linestyle=line, marker=marker, ms=4, capsize=2, label=label
            )
        axis.axhline(0.95, color=INK, linestyle=":", linewidth=1, label="95% of the pairs")
        axis.set_xlabel(
            "interference: mean over features of interest of\nthe largest |cosine| with another feature"
        )
        axis.set_ylabel("share of pairs recovered")
        axis.set_xlim(0, 1)
        axis.set_ylim(-0.02, 1.02)
        axis.legend(loc="lower left")
        headline(figure, "Feature pairs read off Ω alone, against interference")
        return save(figure, path)
