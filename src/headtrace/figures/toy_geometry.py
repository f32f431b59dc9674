"""Figures of features and singular vectors as they stand after training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headtrace.figures.style import GREY, INK, SIGNED, headline, house_style, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

    from headtrace.toy.experiment import Experiment


def heat(
    axis: Axes, matrix: np.ndarray, title: str, x: str = "", y: str = "", *, largest: float = 1.0
) -> AxesImage:
    """A matrix from -largest (blue) over 0 (white) to largest (red); cosines if nothing else is said."""
    image = axis.imshow(matrix, cmap=SIGNED, vmin=-largest, vmax=largest, interpolation="nearest")
    axis.set_title(title)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.locator_params(integer=True)
    return image


def spectrum(axis: Axes, values: np.ndarray, logits: np.ndarray) -> None:
    """Singular values as bars, target logits as marks."""
    axis.bar(np.arange(len(values)), values, color=GREY, label="singular value")
    axis.plot(np.arange(len(logits)), logits, color=INK, marker="_", linestyle="", ms=9, label="target logit")
    axis.set_title("Spectrum of Ω")
    axis.set_xlabel("channel")
    axis.set_ylabel("singular value (attention logit)")
    axis.locator_params(axis="x", integer=True)
    axis.legend()


def moment(axis: Axes, matrix: np.ndarray, title: str) -> AxesImage:
    """A matrix of second moments, dimension by dimension, in colours that are symmetric about 0."""
    return heat(axis, matrix, title, "dimension", "dimension", largest=float(np.abs(matrix).max()))


def isotropy(experiment: Experiment, path: str | Path | None = None) -> Figure:
    """Features pair off as opposites, and W W^T is a multiple of the identity."""
    cosines, order = experiment.arrays["cosines"], experiment.arrays["order"]
    with house_style():
        figure, [axes] = new_figure(9.6, 3.2, columns=3)
        heat(axes[0], cosines, "Cosines of the features", "feature", "feature")
        image = heat(
            axes[1], cosines[np.ix_(order, order)], "… each next to its opposite", "feature", "feature"
        )
        axes[1].set_xticks(range(len(order)), order.tolist(), fontsize=5)
        axes[1].set_yticks(range(len(order)), order.tolist(), fontsize=5)
        figure.colorbar(image, ax=axes[:2], shrink=0.8, label="cosine")
        second = moment(axes[2], experiment.arrays["moment"], "W Wᵀ")
        figure.colorbar(second, ax=axes[2], shrink=0.8, label="entry of W Wᵀ")
        headline(
            figure, "Without a head, features spread evenly: opposites, and W Wᵀ a multiple of the identity"
        )
        return save(figure, path)


def single(experiment: Experiment, path: str | Path | None = None) -> Figure:
    """w0 is u0, w1 is v0, one singular value, and the pair is orthogonal to everything else."""
    arrays = experiment.arrays
    with house_style():
        figure, [axes] = new_figure(10.4, 3.5, columns=4, width_ratios=[1.0, 1.0, 1.1, 1.8])
        heat(axes[0], arrays["left"], "Features and left\nsingular vectors", "uₖ", "feature wᵢ")
        heat(axes[1], arrays["right"], "Features and right\nsingular vectors", "vₖ", "feature wᵢ")
        spectrum(axes[2], arrays["values"], np.array([1.0]))
        image = heat(axes[3], arrays["cosines"], "Cosines of the features", "feature", "feature")
        figure.colorbar(image, ax=axes[3], shrink=0.8, label="cosine")
        headline(figure, "One pair of interest: its features are the head's first singular vectors")
        return save(figure, path)


def single_moment(experiment: Experiment, path: str | Path | None = None) -> Figure:
    """W W^T with one pair of interest: still close to isotropic over the other features."""
    with house_style():
        figure, [[axis]] = new_figure(4.0, 3.3)
        image = moment(axis, experiment.arrays["moment"], "W Wᵀ with one pair of interest")
        figure.colorbar(image, ax=axis, label="entry of W Wᵀ")
        return save(figure, path)


def multi(experiment: Experiment, path: str | Path | None = None) -> Figure:
    """Pair k on singular pair k, for every pair."""
    arrays = experiment.arrays
    with house_style():
        figure, [axes] = new_figure(9.6, 5.6, columns=3, width_ratios=[1.0, 1.0, 0.9])
        heat(axes[0], arrays["left"], "Features and\nleft singular vectors", "uₖ", "feature wᵢ")
        image = heat(axes[1], arrays["right"], "Features and\nright singular vectors", "vₖ", "feature wᵢ")
        figure.colorbar(image, ax=axes[:2], shrink=0.5, location="bottom", label="cosine")
        spectrum(axes[2], arrays["values"], arrays["logits"])
        headline(figure, "Many pairs of interest: pair k lies on singular pair k")
        return save(figure, path)


def multi_features(experiment: Experiment, path: str | Path | None = None) -> Figure:
    """Features of interest are orthogonal to the others and to each other."""
    with house_style():
        figure, [[axis]] = new_figure(5.2, 4.4)
        image = heat(axis, experiment.arrays["cosines"], "Cosines of the features", "feature", "feature")
        edge = 2 * len(experiment.arrays["logits"]) - 0.5
        axis.axhline(edge, color=INK, linewidth=0.6)
        axis.axvline(edge, color=INK, linewidth=0.6)
        figure.colorbar(image, ax=axis, label="cosine")
        headline(
            figure,
            "Features of interest stand apart",
            "Lines: features of interest above and left, the others below and right.",
        )
        return save(figure, path)
