"""Figures of features and singular vectors as they stand after training."""

from __future__ import annotations

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator

from headtrace.toy.experiment import Experiment


def heat(axes: Axes, matrix: np.ndarray, title: str, x: str = "", y: str = "") -> AxesImage:
    """Cosines from -1 (blue) to 1 (red)."""
    image = axes.imshow(matrix, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return image


def spectrum(axes: Axes, values: np.ndarray, logits: np.ndarray) -> None:
    """Singular values as bars, target logits as marks."""
    axes.bar(np.arange(len(values)), values, color="tab:gray", label="singular value")
    axes.plot(np.arange(len(logits)), logits, "k_", markersize=9, label="target logit")
    axes.set(title="Spectrum of $\\Omega$", xlabel="channel")
    axes.legend(frameon=False)


def isotropy(experiment: Experiment) -> Figure:
    """Features pair off as opposites, and W W^T is a multiple of the identity."""
    arrays, order = experiment.arrays, experiment.arrays["order"]
    figure, axes = plt.subplots(1, 3, figsize=(12.5, 3.9), layout="constrained")
    heat(axes[0], arrays["cosines"], "Cosines of the features", "feature", "feature")
    image = heat(axes[1], arrays["cosines"][np.ix_(order, order)], "... each next to its opposite")
    axes[1].set(xticks=range(len(order)), yticks=range(len(order)))
    axes[1].set_xticklabels(order, fontsize=6)
    axes[1].set_yticklabels(order, fontsize=6)
    figure.colorbar(image, ax=axes[:2], shrink=0.8)
    moment = arrays["moment"]
    largest = float(np.abs(moment).max())
    shown = axes[2].imshow(moment, cmap="RdBu_r", vmin=-largest, vmax=largest)
    axes[2].set(title="$WW^\\top$", xlabel="dimension", ylabel="dimension")
    figure.colorbar(shown, ax=axes[2], shrink=0.8)
    return figure


def single(experiment: Experiment) -> Figure:
    """w0 is u0, w1 is v0, one singular value, and the pair is orthogonal to everything else."""
    arrays = experiment.arrays
    figure, axes = plt.subplots(
        1, 4, figsize=(14, 4.6), layout="constrained", gridspec_kw={"width_ratios": [1, 1, 1.1, 1.8]}
    )
    heat(axes[0], arrays["left"], "Features and left\nsingular vectors", "$u_k$", "feature $w_i$")
    heat(axes[1], arrays["right"], "Features and right\nsingular vectors", "$v_k$", "feature $w_i$")
    spectrum(axes[2], arrays["values"], np.array([1.0]))
    image = heat(axes[3], arrays["cosines"], "Cosines of the features", "feature", "feature")
    figure.colorbar(image, ax=axes[3], shrink=0.8)
    return figure


def single_moment(experiment: Experiment) -> Figure:
    """W W^T with one pair of interest: still close to isotropic over the other features."""
    moment = experiment.arrays["moment"]
    figure, axes = plt.subplots(figsize=(4.4, 3.7), layout="constrained")
    largest = float(np.abs(moment).max())
    image = axes.imshow(moment, cmap="RdBu_r", vmin=-largest, vmax=largest)
    axes.set(title="$WW^\\top$ with one pair of interest", xlabel="dimension", ylabel="dimension")
    figure.colorbar(image, ax=axes)
    return figure


def multi(experiment: Experiment) -> Figure:
    """Pair k on singular pair k, for every pair."""
    arrays = experiment.arrays
    figure, axes = plt.subplots(
        1, 3, figsize=(13, 7.5), layout="constrained", gridspec_kw={"width_ratios": [1, 1, 0.9]}
    )
    heat(axes[0], arrays["left"], "Features and left singular vectors", "$u_k$", "feature $w_i$")
    image = heat(axes[1], arrays["right"], "Features and right singular vectors", "$v_k$", "feature $w_i$")
    figure.colorbar(image, ax=axes[:2], shrink=0.5, location="bottom", label="cosine")
    spectrum(axes[2], arrays["values"], arrays["logits"])
    return figure


def multi_features(experiment: Experiment) -> Figure:
    """Features of interest are orthogonal to the others and to each other."""
    figure, axes = plt.subplots(figsize=(6.4, 5.4), layout="constrained")
    image = heat(axes, experiment.arrays["cosines"], "Cosines of the features", "feature", "feature")
    edge = 2 * len(experiment.arrays["logits"]) - 0.5
    axes.axhline(edge, color="k", linewidth=0.6)
    axes.axvline(edge, color="k", linewidth=0.6)
    figure.colorbar(image, ax=axes)
    return figure
