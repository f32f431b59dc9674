"""Figures of what happens while a toy model trains: alignment and sparsity."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headtrace.figures.style import (
    BLUE,
    GREY,
    HEAT,
    INK,
    SEQUENCE,
    headline,
    house_style,
    log_scale,
    new_figure,
    save,
)
from headtrace.toy.experiments.dynamics import in_order

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from headtrace.toy.experiment import Experiment


def dynamics(experiment: Experiment, path: str | Path | None = None) -> Figure:
    """Alignment of each pair, singular values and the attention loss, over one training."""
    arrays = experiment.arrays
    steps, logits = arrays["steps"], arrays["logits"]
    with house_style():
        figure, [[aligned], [values], [loss]] = new_figure(6.4, 6.4, rows=3, sharex=True)
        for pair, (logit, colour) in enumerate(zip(logits, SEQUENCE, strict=False)):
            label = f"pair {pair} (logit {logit:g})"
            aligned.plot(steps, arrays["query_cosine"][:, pair], color=colour, label=label)
            aligned.plot(steps, arrays["key_cosine"][:, pair], color=colour, linestyle="--", linewidth=0.8)
            values.plot(steps, arrays["values"][:, pair], color=colour)
            values.axhline(logit, color=colour, linestyle=":", linewidth=0.8)
        aligned.set_ylabel("|cosine| with its vector\n(solid: query, dashed: key)")
        aligned.set_ylim(0, 1.03)
        aligned.legend(loc="lower right")
        values.set_ylabel("singular value (logits;\ndotted: target logit)")
        loss.plot(steps, arrays["excess_attention_loss"], color=INK)
        log_scale(loss, "y")
        loss.set_ylabel("attention loss\nabove its floor")
        loss.set_xlabel("training step")
        headline(figure, "One training: pairs align one after the other")
        return save(figure, path)


def paths(experiment: Experiment, path: str | Path | None = None) -> Figure:
    """|cosine| between vectors at different times: singular vectors, features, and one with the other."""
    arrays = experiment.arrays
    last, pairs = int(arrays["steps"][-1]), len(arrays["logits"])
    rows = (("vector", "uₖ(t) and uₖ(t')"), ("feature", "wₖ(t) and wₖ(t')"), ("both", "uₖ(t) and wₖ(t')"))
    with house_style():
        figure, axes = new_figure(2.0 * pairs + 1.2, 6.0, rows=3, columns=pairs, sharex=True, sharey=True)
        for line, (name, label) in zip(axes, rows, strict=True):
            for pair, axis in enumerate(line):
                likeness, extent = arrays[f"{name}_{pair}"], (0, last, 0, last)
                axis.imshow(likeness, vmin=0, vmax=1, origin="lower", extent=extent, cmap=HEAT)
                axis.set_xticks([0, last // 2])
                axis.set_yticks([0, last // 2, last])
            line[0].set_ylabel(f"{label}\nstep t")
        for pair, logit in enumerate(arrays["logits"]):
            axes[0][pair].set_title(f"pair {pair} (logit {logit:g})")
            axes[-1][pair].set_xlabel("step t'")
        everywhere = [axis for line in axes for axis in line]
        figure.colorbar(axes[0][0].images[0], ax=everywhere, shrink=0.5, label="|cosine|")
        headline(
            figure, "Directions at two times of one training: singular vectors, features, one with the other"
        )
        return save(figure, path)


def order(experiment: Experiment, path: str | Path | None = None) -> Figure:
    """When each pair was aligned and when it was learned, over all seeds, for each size of the first weights."""
    arrays = experiment.arrays
    starts = [name.removeprefix("aligned_at_") for name in arrays if name.startswith("aligned_at_")]
    with house_style():
        figure, axes = new_figure(
            2.3 * len(starts) + 0.4, 4.8, rows=2, columns=len(starts), sharex=True, sharey="row"
        )
        for line, event in zip(axes, ("aligned", "learned"), strict=True):
            for axis, start in zip(line, starts, strict=True):
                _times(axis, arrays[f"{event}_at_{start}"])
                size = "Xavier" if start == "1" else f"{start} of Xavier"
                axis.set_title(f"first weights: {size}\n{axis.get_title()}", fontsize=8)
            line[0].set_ylabel(f"{event} from training step")
        for axis in axes[-1]:
            axis.set_xlabel("pair, by falling logit")
        axes[0][0].legend()
        headline(
            figure,
            "When pairs align and when they are learned, for smaller and smaller first weights",
            "Grey: one seed each.",
        )
        return save(figure, path)


def _times(axis: Axes, at: np.ndarray) -> None:
    """Seeds as thin lines over pairs, their median as a thick one; a pair that never came leaves a gap."""
    median = np.median(at, axis=0)
    shown, middle = (np.where(np.isfinite(times), times, np.nan) for times in (at, median))
    axis.plot(np.arange(at.shape[1]), shown.T, color=GREY, alpha=0.5, linewidth=0.8)
    axis.plot(np.arange(at.shape[1]), middle, color=INK, marker="o", ms=4, label="median over seeds")
    axis.set_title(f"{sum(in_order(row) for row in at)} of {len(at)} seeds in exact order")
    axis.set_xticks(range(at.shape[1]))


def sparsity(experiment: Experiment, path: str | Path | None = None) -> Figure:
    """Sparseness of relative attention over training, with 95% intervals, and its rotated control."""
    arrays, steps = experiment.arrays, experiment.arrays["steps"]
    labels = {"one": "one pair of interest", "two": "two pairs", "none": "none"}
    with house_style():
        figure, [[axis]] = new_figure(5.8, 3.6)
        for (name, label), colour in zip(labels.items(), SEQUENCE, strict=False):
            for basis, style in (("svd", "-"), ("rotated", ":")):
                middle, half = arrays[f"curve_{name}_{basis}"], arrays[f"interval_{name}_{basis}"]
                text = label if basis == "svd" else f"{label}, rotated"
                axis.plot(steps, middle, color=colour, linestyle=style, label=text)
                axis.fill_between(steps, middle - half, middle + half, color=colour, alpha=0.2, linewidth=0)
        axis.set_xlabel("training step")
        axis.set_ylabel("sparseness (smaller is sparser)")
        axis.set_ylim(0, 0.8)
        axis.legend(ncols=2, loc="upper right")
        headline(
            figure,
            "Sparseness of relative attention over training",
            "Bands: 95% intervals over token pairs. Rotated: the same scores in a rotated basis.",
        )
        return save(figure, path)


def _bars(axis: Axes, values: np.ndarray, colours: str | list[str]) -> None:
    axis.bar(np.arange(len(values)), values, color=colours)
    axis.axhline(0, color=INK, linewidth=0.5)


def examples(experiment: Experiment, path: str | Path | None = None) -> Figure:
    """Relative attention of five token pairs each, with and without a pair of interest, early and late."""
    arrays = experiment.arrays
    kinds = [(kind, when) for kind in ("one", "none") for when in ("early", "late")]
    with house_style():
        figure, axes = new_figure(9.0, 6.0, rows=4, columns=5, sharex=True)
        for line, (kind, when) in zip(axes, kinds, strict=True):
            for axis, values in zip(line, arrays[f"{kind}_{when}"], strict=True):
                _bars(axis, values, BLUE if kind == "one" else GREY)
            step = f"step {int(arrays['early_step'])}" if when == "early" else "trained"
            line[0].set_ylabel(
                f"relative attention\n{'pair 0 only' if kind == 'one' else 'no pair'}, {step}", fontsize=8
            )
        for axis in axes[-1]:
            axis.set_xlabel("channel")
        figure.suptitle("Relative attention by channel, five token pairs each", fontsize=11)
        return save(figure, path)


def strength(experiment: Experiment, path: str | Path | None = None) -> Figure:
    """Five token pairs as they come, and every term against the product of feature strengths."""
    arrays = experiment.arrays
    with house_style():
        figure, axes = new_figure(9.0, 5.8, rows=3, columns=5, height_ratios=[1.0, 1.0, 1.5])
        for column in range(5):
            terms, products = arrays["mixed_terms"][column], arrays["mixed_products"][column]
            _bars(axes[0][column], terms, BLUE)
            axes[0][column].set_xlabel("channel")
            _bars(axes[1][column], products, list(SEQUENCE[: len(products)]))
            axes[1][column].set_xlim(-0.5, len(terms) - 0.5)
            axes[1][column].set_xticks(range(len(products)))
            axes[1][column].set_xlabel("pair")
        axes[0][0].set_ylabel("relative attention")
        axes[1][0].set_ylabel("relative strength\nof the pair")
        axes[2][4].set_visible(False)
        for pair, (axis, colour) in enumerate(zip(axes[2][:4], SEQUENCE, strict=False)):
            axis.scatter(arrays[f"product_{pair}"], arrays[f"term_{pair}"], s=2, color=colour, linewidth=0)
            axis.set_title(f"channel {pair}")
            axis.set_xlabel("relative strength")
        axes[2][0].set_ylabel("term of relative attention")
        headline(
            figure,
            "Relative attention follows how strongly the features of a pair are present",
            "Upper rows: five token pairs, one per column. Below: every token pair is a dot.",
        )
        return save(figure, path)
