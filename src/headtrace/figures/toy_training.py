"""Figures of the toy lab: what happens while models train, and alignment over many settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from headtrace.figures import style
from headtrace.figures.style import BLUE, GREY, HEAT, INK, SEQUENCE
from headtrace.toy.experiments.dynamics import in_order
from headtrace.toy.experiments.robustness import ALIGNED, DEFAULT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from headtrace.toy.experiment import Experiment


@style.house_style()
def dynamics(experiment: Experiment, path: str | Path | None = None) -> Figure:
    """Alignment of each pair, singular values and the attention loss, over one training."""
    arrays = experiment.arrays
    steps, logits = arrays["steps"], arrays["logits"]
    figure, [[aligned], [values], [loss]] = style.new_figure(6.4, 6.4, rows=3, sharex=True)
    for pair, (logit, colour) in enumerate(zip(logits, SEQUENCE, strict=False)):
        label = f"pair {pair} (logit {logit:g})"
        aligned.plot(steps, arrays["query_cosine"][:, pair], color=colour, label=label)
        aligned.plot(steps, arrays["key_cosine"][:, pair], color=colour, linestyle="--", linewidth=0.8)
        values.plot(steps, arrays["values"][:, pair], color=colour)
        values.axhline(logit, color=colour, linestyle=":", linewidth=0.8)
    aligned.set(ylabel="|cosine| with its vector\n(solid: query, dashed: key)", ylim=(0, 1.03))
    aligned.legend(loc="lower right")
    values.set_ylabel("singular value (logits;\ndotted: target logit)")
    loss.plot(steps, arrays["excess_attention_loss"], color=INK)
    style.log_scale(loss, "y")
    loss.set(ylabel="attention loss\nabove its floor", xlabel="training step")
    return style.save(figure, path, "One training: pairs align one after the other")


@style.house_style()
def paths(experiment: Experiment, path: str | Path | None = None) -> Figure:
    """|cosine| between vectors at different times: singular vectors, features, and one with the other."""
    arrays = experiment.arrays
    last, pairs = int(arrays["steps"][-1]), len(arrays["logits"])
    rows = (("vector", "uₖ(t) and uₖ(t')"), ("feature", "wₖ(t) and wₖ(t')"), ("both", "uₖ(t) and wₖ(t')"))
    figure, axes = style.new_figure(2.0 * pairs + 1.2, 6.0, rows=3, columns=pairs, sharex=True, sharey=True)
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
    return style.save(
        figure,
        path,
        "Directions at two times of one training: singular vectors, features, one with the other",
    )


@style.house_style()
def order(experiment: Experiment, path: str | Path | None = None) -> Figure:
    """When each pair was aligned and when it was learned, over all seeds, for each size of the first weights."""
    arrays = experiment.arrays
    starts = [name.removeprefix("aligned_at_") for name in arrays if name.startswith("aligned_at_")]
    figure, axes = style.new_figure(
        2.3 * len(starts) + 0.4, 4.8, rows=2, columns=len(starts), sharex=True, sharey="row"
    )
    for line, event in zip(axes, ("aligned", "learned"), strict=True):
        for axis, start in zip(line, starts, strict=True):
            at = arrays[f"{event}_at_{start}"]
            # Seeds as thin lines over pairs, their median as a thick one; a pair that never came leaves a gap.
            shown, middle = (np.where(np.isfinite(x), x, np.nan) for x in (at, np.median(at, axis=0)))
            axis.plot(shown.T, color=GREY, alpha=0.5, linewidth=0.8)
            axis.plot(middle, color=INK, marker="o", ms=4, label="median over seeds")
            size = "Xavier" if start == "1" else f"{start} of Xavier"
            exact = f"{sum(in_order(row) for row in at)} of {len(at)} seeds in exact order"
            axis.set_title(f"first weights: {size}\n{exact}", fontsize=8)
            axis.set_xticks(range(at.shape[1]))
        line[0].set_ylabel(f"{event} from training step")
    for axis in axes[-1]:
        axis.set_xlabel("pair, by falling logit")
    axes[0][0].legend()
    return style.save(
        figure,
        path,
        "When pairs align and when they are learned, for smaller and smaller first weights",
        "Grey: one seed each.",
    )


@style.house_style()
def sparsity(experiment: Experiment, path: str | Path | None = None) -> Figure:
    """Sparseness of relative attention over training, with 95% intervals, and its rotated control."""
    arrays, steps = experiment.arrays, experiment.arrays["steps"]
    labels = {"one": "one pair of interest", "two": "two pairs", "none": "none"}
    figure, [[axis]] = style.new_figure(5.8, 3.6)
    for (name, label), colour in zip(labels.items(), SEQUENCE, strict=False):
        for basis, line in (("svd", "-"), ("rotated", ":")):
            middle, half = arrays[f"curve_{name}_{basis}"], arrays[f"interval_{name}_{basis}"]
            text = label if basis == "svd" else f"{label}, rotated"
            axis.plot(steps, middle, color=colour, linestyle=line, label=text)
            axis.fill_between(steps, middle - half, middle + half, color=colour, alpha=0.2, linewidth=0)
    axis.set(xlabel="training step", ylabel="sparseness (smaller is sparser)", ylim=(0, 0.8))
    axis.legend(ncols=2, loc="upper right")
    return style.save(
        figure,
        path,
        "Sparseness of relative attention over training",
        "Bands: 95% intervals over token pairs. Rotated: the same scores in a rotated basis.",
    )


def _bars(axis: Axes, values: np.ndarray, colours: str | list[str]) -> None:
    axis.bar(np.arange(len(values)), values, color=colours)
    axis.axhline(0, color=INK, linewidth=0.5)


@style.house_style()
def examples(experiment: Experiment, path: str | Path | None = None) -> Figure:
    """Relative attention of five token pairs each, with and without a pair of interest, early and late."""
    arrays = experiment.arrays
    kinds = [(kind, when) for kind in ("one", "none") for when in ("early", "late")]
    figure, axes = style.new_figure(9.0, 6.0, rows=4, columns=5, sharex=True)
    for line, (kind, when) in zip(axes, kinds, strict=True):
        for axis, values in zip(line, arrays[f"{kind}_{when}"], strict=True):
            _bars(axis, values, BLUE if kind == "one" else GREY)
        step = f"step {int(arrays['early_step'])}" if when == "early" else "trained"
        line[0].set_ylabel(
            f"relative attention\n{'pair 0 only' if kind == 'one' else 'no pair'}, {step}", fontsize=8
        )
    for axis in axes[-1]:
        axis.set_xlabel("channel")
    return style.save(figure, path, "Relative attention by channel, five token pairs each")


@style.house_style()
def strength(experiment: Experiment, path: str | Path | None = None) -> Figure:
    """Five token pairs as they come, and every term against the product of feature strengths."""
    arrays = experiment.arrays
    figure, axes = style.new_figure(9.0, 5.8, rows=3, columns=5, height_ratios=[1.0, 1.0, 1.5])
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
        axis.set(title=f"channel {pair}", xlabel="relative strength")
    axes[2][0].set_ylabel("term of relative attention")
    return style.save(
        figure,
        path,
        "Relative attention follows how strongly the features of a pair are present",
        "Upper rows: five token pairs, one per column. Below: every token pair is a dot.",
    )


LABELS = {
    "probability": "feature probability p",
    "attention_weight": "loss weight λ",
    "n_features": "features N (D = 10)",
    "d_head": "head dimension H",
    "context": "context length m",
}
TICKS: dict[str, list[float]] = {
    "probability": [0.02, 0.05, 0.1, 0.2, 0.5, 1.0],
    "attention_weight": [0.4, 1.0, 4.0, 10.0, 40.0],
    "context": [2.0, 4.0, 8.0, 16.0, 32.0],
}
"""Sweeps over ratios: a logarithmic axis with these ticks."""


def _pairs(axis: Axes, part: pl.DataFrame, column: str) -> None:
    """Mean over seeds of each pair's number, and the range over seeds."""
    numbers = pl.col(column)
    for (pair, logit), rows in part.group_by("pair", "target_logit", maintain_order=True):
        curve = rows.group_by("value").agg(
            numbers.mean(), numbers.min().alias("low"), numbers.max().alias("high")
        )
        value, mean, low, high = (curve.sort("value")[name] for name in ("value", column, "low", "high"))
        colour, label = SEQUENCE[int(str(pair))], f"pair {pair} (logit {logit:g})"
        axis.plot(value, mean, color=colour, marker="o", ms=3, label=label)
        axis.fill_between(value, low, high, color=colour, alpha=0.12, linewidth=0)


def _plain_log_axis(axis: Axes, ticks: list[float]) -> None:
    style.log_scale(axis, "x")
    axis.set_xticks(ticks)
    axis.minorticks_off()


def _sweeps(experiment: Experiment, column: str, ylabel: str) -> tuple[Figure, list[Axes]]:
    """One panel per sweep, and one for the seeds of the default setting; the legend below them."""
    table = experiment.table.filter(pl.col("steps") == pl.col("steps").min()).with_columns(
        pl.min_horizontal("query_cosine", "key_cosine").alias("cosine"),
        (pl.col("singular_value") / pl.col("target_logit")).alias("ratio"),
    )
    names = [name for name in LABELS if (table["sweep"] == name).any()]
    figure, grid = style.new_figure(9.6, 5.2, rows=2, columns=3, sharey=True)
    axes = [axis for line in grid for axis in line]
    for axis, name in zip(axes, names, strict=False):
        part = table.filter(pl.col("sweep") == name)
        _pairs(axis, part, column)
        axis.set_xlabel(LABELS[name])
        if name in TICKS:
            _plain_log_axis(axis, TICKS[name])
        else:
            axis.set_xticks(sorted(set(part["value"].to_list())))
    seeds = table.filter(pl.col("sweep") == "probability", pl.col("value") == DEFAULT.probability)
    last = axes[len(names)]
    _pairs(last, seeds.with_columns(pl.col("seed").cast(pl.Float64).alias("value")), column)
    last.set_xlabel("seed (default setting)")
    last.set_xticks(sorted(set(seeds["seed"].to_list())))
    for axis in axes[len(names) + 1 :]:
        axis.set_visible(False)
    for line in grid:
        line[0].set_ylabel(ylabel)
    handles, labels = last.get_legend_handles_labels()
    n_seeds = table["seed"].n_unique()
    note = f"Dots: mean over {n_seeds} seeds; bands: smallest to largest. " if n_seeds > 1 else ""
    note += f"Each panel changes one thing of the default setting; {table['steps'].min():,} training steps."
    figure.legend(handles, labels, loc="outside lower center", ncols=4, title=note, title_fontsize=8)
    return figure, axes


@style.house_style()
def robustness(experiment: Experiment, path: str | Path | None = None) -> Figure:
    """The smaller cosine of every pair with the channel of its rank."""
    figure, axes = _sweeps(experiment, "cosine", "smaller |cosine| of pair")
    axes[0].set_ylim(-0.03, 1.03)
    return style.save(figure, path, "Alignment of each pair with the channel of its rank (1: aligned)")


@style.house_style()
def values(experiment: Experiment, path: str | Path | None = None) -> Figure:
    """Singular values as a share of their target logits."""
    figure, _ = _sweeps(experiment, "ratio", "singular value / target logit")
    return style.save(figure, path, "Singular values against their target logits (1: reached)")


@style.house_style()
def probability(experiment: Experiment, path: str | Path | None = None) -> Figure:
    """Alignment against p for both lengths of training: on the own channel, and on any; and when it arises."""
    table = experiment.table.filter(pl.col("sweep") == "probability")
    table = table.with_columns(pl.min_horizontal("query_cosine", "key_cosine").alias("cosine"))
    figure, [axes] = style.new_figure(8.6, 3.5, columns=2)
    _medians(axes[0], table)
    short = table.filter(pl.col("steps") == pl.col("steps").min(), pl.col("pair") == 0)
    reached = short.filter(pl.col("all_aligned_at").is_not_null())
    axes[1].scatter(reached["value"], reached["all_aligned_at"], color=GREY, alpha=0.6, linewidth=0)
    axes[1].set_ylabel(
        f"step at which all pairs reach {ALIGNED:g},\neach on the channel of its rank (each seed)"
    )
    for axis in axes:
        axis.set_xlabel(LABELS["probability"])
        _plain_log_axis(axis, TICKS["probability"])
        axis.set_xlim(0.017, 1.2)
    return style.save(figure, path, "Alignment and how often features occur, for two lengths of training")


def _medians(axis: Axes, table: pl.DataFrame) -> None:
    """Medians over pairs and seeds for each length of training."""
    kinds = (("nearest_cosine", "-", "o", "any channel"), ("cosine", ":", "s", "channel of its rank"))
    by_steps = table.group_by("steps", maintain_order=True)
    for ((steps,), part), colour in zip(by_steps, SEQUENCE, strict=False):
        curve = part.group_by("value").agg(pl.col(name).median() for name, *_ in kinds).sort("value")
        for column, line, marker, name in kinds:
            axis.plot(
                curve["value"],
                curve[column],
                color=colour,
                linestyle=line,
                marker=marker,
                ms=4,
                label=f"{name}, {steps:,} steps",
            )
    axis.axvline(0.038, color=INK, linestyle="--", linewidth=0.8, label="paper: aligned down to 0.038")
    axis.set(ylabel="median over pairs and seeds of |cosine|", ylim=(0, 1.03))
    axis.legend(loc="lower right")


@style.house_style()
def capacity(experiment: Experiment, path: str | Path | None = None) -> Figure:
    """|cosine| of every query feature of interest with every left singular vector, for ever more pairs."""
    names = [name.removeprefix("left_") for name in experiment.arrays if name.startswith("left_")]
    rows = sorted({int(name.split("_")[0]) for name in names})
    by_row = [[name for name in names if name.startswith(f"{row}_")] for row in rows]
    columns = max(len(line) for line in by_row)
    figure, grid = style.new_figure(1.5 * columns + 1, 2.9 * len(rows), rows=len(rows), columns=columns)
    for d_head, axes, line in zip(rows, grid, by_row, strict=True):
        for axis, name in zip(axes, line, strict=False):
            matrix = experiment.arrays[f"left_{name}"]
            axis.imshow(matrix, cmap=HEAT, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
            axis.set(title=f"H = {d_head},\n{len(matrix)} pairs", xlabel="channel")
            axis.locator_params(axis="x", nbins=5, integer=True)
            axis.locator_params(axis="y", integer=True)
        for spare in axes[len(line) :]:
            spare.set_visible(False)
        axes[0].set_ylabel("query feature, by falling logit")
    everywhere = [axis for axes in grid for axis in axes]
    figure.colorbar(grid[0][0].images[0], ax=everywhere, shrink=0.6, label="|cosine|")
    return style.save(
        figure, path, "Query features and left singular vectors, with ever more pairs than head dimensions"
    )
