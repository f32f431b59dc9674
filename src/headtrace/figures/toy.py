"""Figures of the toy lab: `draw(experiment, folder)` makes all of one experiment's and gives their paths."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from headtrace.figures import style, toy_training
from headtrace.figures.style import BLUE, GREY, INK, SIGNED, VERMILION

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
    axis.set(title=title, xlabel=x, ylabel=y)
    axis.locator_params(integer=True)
    return image


def spectrum(axis: Axes, values: np.ndarray, logits: np.ndarray) -> None:
    """Singular values as bars, target logits as marks."""
    axis.bar(np.arange(len(values)), values, color=GREY, label="singular value")
    axis.plot(np.arange(len(logits)), logits, color=INK, marker="_", linestyle="", ms=9, label="target logit")
    axis.set(title="Spectrum of Ω", xlabel="channel", ylabel="singular value (attention logit)")
    axis.locator_params(axis="x", integer=True)
    axis.legend()


def moment(axis: Axes, matrix: np.ndarray, title: str) -> AxesImage:
    """A matrix of second moments, dimension by dimension, in colours that are symmetric about 0."""
    return heat(axis, matrix, title, "dimension", "dimension", largest=float(np.abs(matrix).max()))


@style.house_style()
def isotropy(experiment: Experiment, path: str | Path | None = None) -> Figure:
    """Features pair off as opposites, and W W^T is a multiple of the identity."""
    cosines, order = experiment.arrays["cosines"], experiment.arrays["order"]
    figure, [axes] = style.new_figure(9.6, 3.2, columns=3)
    heat(axes[0], cosines, "Cosines of the features", "feature", "feature")
    image = heat(axes[1], cosines[np.ix_(order, order)], "… each next to its opposite", "feature", "feature")
    axes[1].set_xticks(range(len(order)), order.tolist(), fontsize=5)
    axes[1].set_yticks(range(len(order)), order.tolist(), fontsize=5)
    figure.colorbar(image, ax=axes[:2], shrink=0.8, label="cosine")
    second = moment(axes[2], experiment.arrays["moment"], "W Wᵀ")
    figure.colorbar(second, ax=axes[2], shrink=0.8, label="entry of W Wᵀ")
    return style.save(
        figure, path, "Without a head, features spread evenly: opposites, and W Wᵀ a multiple of the identity"
    )


@style.house_style()
def single(experiment: Experiment, path: str | Path | None = None) -> Figure:
    """w0 is u0, w1 is v0, one singular value, and the pair is orthogonal to everything else."""
    arrays = experiment.arrays
    figure, [axes] = style.new_figure(10.4, 3.5, columns=4, width_ratios=[1.0, 1.0, 1.1, 1.8])
    heat(axes[0], arrays["left"], "Features and left\nsingular vectors", "uₖ", "feature wᵢ")
    heat(axes[1], arrays["right"], "Features and right\nsingular vectors", "vₖ", "feature wᵢ")
    spectrum(axes[2], arrays["values"], np.array([1.0]))
    image = heat(axes[3], arrays["cosines"], "Cosines of the features", "feature", "feature")
    figure.colorbar(image, ax=axes[3], shrink=0.8, label="cosine")
    return style.save(
        figure, path, "One pair of interest: its features are the head's first singular vectors"
    )


@style.house_style()
def single_moment(experiment: Experiment, path: str | Path | None = None) -> Figure:
    """W W^T with one pair of interest: still close to isotropic over the other features."""
    figure, [[axis]] = style.new_figure(4.0, 3.3)
    image = moment(axis, experiment.arrays["moment"], "W Wᵀ with one pair of interest")
    figure.colorbar(image, ax=axis, label="entry of W Wᵀ")
    return style.save(figure, path)


@style.house_style()
def multi(experiment: Experiment, path: str | Path | None = None) -> Figure:
    """FeaturePair k on singular pair k, for every pair."""
    arrays = experiment.arrays
    figure, [axes] = style.new_figure(9.6, 5.6, columns=3, width_ratios=[1.0, 1.0, 0.9])
    heat(axes[0], arrays["left"], "Features and\nleft singular vectors", "uₖ", "feature wᵢ")
    image = heat(axes[1], arrays["right"], "Features and\nright singular vectors", "vₖ", "feature wᵢ")
    figure.colorbar(image, ax=axes[:2], shrink=0.5, location="bottom", label="cosine")
    spectrum(axes[2], arrays["values"], arrays["logits"])
    return style.save(figure, path, "Many pairs of interest: pair k lies on singular pair k")


@style.house_style()
def multi_features(experiment: Experiment, path: str | Path | None = None) -> Figure:
    """Features of interest are orthogonal to the others and to each other."""
    figure, [[axis]] = style.new_figure(5.2, 4.4)
    image = heat(axis, experiment.arrays["cosines"], "Cosines of the features", "feature", "feature")
    edge = 2 * len(experiment.arrays["logits"]) - 0.5
    axis.axhline(edge, color=INK, linewidth=0.6)
    axis.axvline(edge, color=INK, linewidth=0.6)
    figure.colorbar(image, ax=axis, label="cosine")
    return style.save(
        figure,
        path,
        "Features of interest stand apart",
        "Lines: features of interest above and left, the others below and right.",
    )


@style.house_style()
def theorems(experiment: Experiment, path: str | Path | None = None) -> Figure:
    """Theorem 3: every measured angle under its bound. Theorem 4: overlap and bound over lambda."""
    arrays = experiment.arrays
    figure, [[third, fourth]] = style.new_figure(7.6, 3.2, columns=2)
    bounds = arrays["third_bound"]
    third.scatter(
        bounds, arrays["third_measured"], s=4, color=BLUE, alpha=0.5, linewidth=0, label="feature sets"
    )
    ends = [bounds.min(), bounds.max()]
    third.plot(ends, ends, color=INK, linewidth=1, label="bound")
    third.set(title="Theorem 3", xlabel="bound τ/(1 - τ)", ylabel="measured sine of the angle")
    weight = arrays["fourth_overlapping_parameter"]
    measured, bound = (arrays[f"fourth_overlapping_{name}"] for name in ("measured", "bound"))
    fourth.plot(weight, measured, color=BLUE, marker="o", ms=4, label="|y₂ · y₁|")
    fourth.plot(weight, bound, color=INK, linewidth=1, label="bound")
    fourth.set(
        title="Theorem 4: orthogonality at a cost",
        xlabel="reconstruction weight λ",
        ylabel="overlap |y₂ · y₁|",
    )
    for axis in (third, fourth):
        style.log_scale(axis, "xy")
        axis.legend()
    return style.save(figure, path, "What is measured stays under what the theorems allow")


@style.house_style()
def recovery(experiment: Experiment, path: str | Path | None = None) -> Figure:
    """The share of feature pairs recovered from Omega, against interference."""
    arrays = experiment.arrays
    kinds = (
        ("ideal", "ideal heads on fixed features", BLUE, "-", "o"),
        ("trained", "heads during training", VERMILION, "--", "s"),
    )
    figure, [[axis]] = style.new_figure(5.4, 3.5)
    for kind, label, colour, line, marker in kinds:
        x, y = arrays[f"{kind}_interference"], arrays[f"{kind}_recovered"]
        spread = np.stack([y - arrays[f"{kind}_low"], arrays[f"{kind}_high"] - y]).clip(min=0)
        axis.errorbar(
            x, y, yerr=spread, color=colour, linestyle=line, marker=marker, ms=4, capsize=2, label=label
        )
    axis.axhline(0.95, color=INK, linestyle=":", linewidth=1, label="95% of the pairs")
    axis.set(
        xlabel="interference: mean over features of interest of\nthe largest |cosine| with another feature",
        ylabel="share of pairs recovered",
        xlim=(0, 1),
        ylim=(-0.02, 1.02),
    )
    axis.legend(loc="lower left")
    return style.save(figure, path, "Feature pairs read off Ω alone, against interference")


@runtime_checkable
class Drawing(Protocol):
    """A figure of an experiment, written if a path is given."""

    def __call__(self, experiment: Experiment, path: str | Path | None = None) -> Figure: ...


FIGURES: dict[str, dict[str, Drawing]] = {
    "isotropy": {"isotropy": isotropy},
    "single": {"single": single, "single-moment": single_moment},
    "multi": {"multi": multi, "multi-features": multi_features},
    "dynamics": {
        "dynamics": toy_training.dynamics,
        "dynamics-paths": toy_training.paths,
        "dynamics-order": toy_training.order,
    },
    "sparsity": {
        "sparsity": toy_training.sparsity,
        "sparsity-examples": toy_training.examples,
        "sparsity-strength": toy_training.strength,
    },
    "robustness": {
        "robustness": toy_training.robustness,
        "robustness-values": toy_training.values,
        "robustness-p": toy_training.probability,
    },
    "capacity": {"capacity": toy_training.capacity},
    "theorems": {"theorems": theorems},
    "recovery": {"recovery": recovery},
}


def draw(experiment: Experiment, folder: Path) -> list[Path]:
    """Write the experiment's figures as `toy-NAME.png`."""
    drawings = FIGURES[experiment.name]
    paths = [folder / f"toy-{name}.png" for name in drawings]
    for drawing, path in zip(drawings.values(), paths, strict=True):
        drawing(experiment, path)
    return paths
