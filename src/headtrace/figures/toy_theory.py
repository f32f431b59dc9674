"""Figures of the theorems and of blind recovery."""

from __future__ import annotations

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from headtrace.toy.experiment import Experiment


def theorems(experiment: Experiment) -> Figure:
    """Theorem 3: every measured angle under its bound. Theorem 4: overlap and bound over lambda."""
    arrays = experiment.arrays
    figure, axes = plt.subplots(1, 2, figsize=(10.5, 4.2), layout="constrained")
    axes[0].loglog(
        arrays["third_bound"], arrays["third_measured"], ".", markersize=3, alpha=0.5, label="feature sets"
    )
    line = np.array([arrays["third_bound"].min(), arrays["third_bound"].max()])
    axes[0].loglog(line, line, "k-", linewidth=1, label="bound")
    axes[0].set(title="Theorem 3", xlabel="bound $\\tau/(1-\\tau)$", ylabel="measured sine of the angle")
    axes[0].legend(frameon=False)
    weight = arrays["fourth_overlapping_parameter"]
    axes[1].loglog(
        weight,
        arrays["fourth_overlapping_measured"],
        "o-",
        markersize=4,
        label="$|y_2 \\cdot y_1|$ at the minimum",
    )
    axes[1].loglog(weight, arrays["fourth_overlapping_bound"], "k-", linewidth=1, label="bound")
    axes[1].set(
        title="Theorem 4, when orthogonality costs attention",
        xlabel="reconstruction weight $\\lambda$",
        ylabel="overlap",
    )
    axes[1].legend(frameon=False)
    return figure


def recovery(experiment: Experiment) -> Figure:
    """The share of feature pairs recovered from Omega, against interference."""
    arrays = experiment.arrays
    figure, axes = plt.subplots(figsize=(6.6, 4.2), layout="constrained")
    for kind, label in (("ideal", "ideal heads on fixed features"), ("trained", "heads during training")):
        x, y = arrays[f"{kind}_interference"], arrays[f"{kind}_recovered"]
        spread = np.stack([y - arrays[f"{kind}_low"], arrays[f"{kind}_high"] - y]).clip(min=0)
        axes.errorbar(x, y, yerr=spread, fmt="o-", capsize=2, markersize=4, label=label)
    axes.axhline(0.95, color="k", linestyle=":", linewidth=1)
    axes.set(
        xlabel="interference: mean over features of interest of\nthe largest |cosine| with another feature",
        ylabel="share of pairs recovered",
        xlim=(0, 1),
        ylim=(-0.02, 1.02),
    )
    axes.legend(frameon=False)
    return figure
