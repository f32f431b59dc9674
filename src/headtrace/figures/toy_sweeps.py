"""Figures of alignment over many settings."""

from __future__ import annotations

import polars as pl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from headtrace.toy.experiment import Experiment
from headtrace.toy.experiments.robustness import ALIGNED, DEFAULT

LABELS = {
    "probability": "feature probability p",
    "attention_weight": "loss weight $\\lambda$",
    "n_features": "features N (D = 10)",
    "d_head": "head dimension H",
    "context": "context length m",
}


def _pairs(axes: Axes, part: pl.DataFrame, column: str = "cosine") -> None:
    """Mean over seeds of each pair's number, and the range over seeds."""
    for (pair, logit), rows in part.group_by("pair", "target_logit", maintain_order=True):
        curve = (
            rows.group_by("value")
            .agg(
                pl.col(column).mean(),
                pl.col(column).min().alias("low"),
                pl.col(column).max().alias("high"),
            )
            .sort("value")
        )
        color, label = f"C{pair}", f"pair {pair} (logit {logit:g})"
        axes.plot(curve["value"], curve[column], "o-", color=color, markersize=3, label=label)
        axes.fill_between(curve["value"], curve["low"], curve["high"], color=color, alpha=0.12, linewidth=0)


def _plain_log_axis(axes: Axes, ticks: list[float]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


TICKS: dict[str, list[float]] = {
    "probability": [0.02, 0.05, 0.1, 0.2, 0.5, 1],
    "attention_weight": [0.4, 1, 4, 10, 40],
    "context": [2, 4, 8, 16, 32],
}


def _sweeps(table: pl.DataFrame, column: str, ylabel: str) -> Figure:
    """One panel per sweep, and one for the seeds of the default setting."""
    names = [name for name in LABELS if (table["sweep"] == name).any()]
    figure, grid = plt.subplots(2, 3, figsize=(13, 6.4), layout="constrained", sharey=True)
    for axes, name in zip(grid.flat, names, strict=False):
        _pairs(axes, table.filter(pl.col("sweep") == name), column)
        axes.set_xlabel(LABELS[name])
        if name in TICKS:
            _plain_log_axis(axes, TICKS[name])
        else:
            axes.set_xticks(sorted(set(table.filter(pl.col("sweep") == name)["value"].to_list())))
    seeds = table.filter(pl.col("sweep") == "probability", pl.col("value") == DEFAULT.probability)
    last = grid.flat[len(names)]
    _pairs(last, seeds.with_columns(pl.col("seed").cast(pl.Float64).alias("value")), column)
    last.set(xlabel="seed (default setting)", xticks=sorted(set(seeds["seed"].to_list())))
    for axes in list(grid.flat)[len(names) + 1 :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel(ylabel)
    last.legend(frameon=False, fontsize=8, loc="center")
    return figure


def _first_training(experiment: Experiment) -> pl.DataFrame:
    table = experiment.table.filter(pl.col("steps") == pl.col("steps").min())
    return table.with_columns(
        pl.min_horizontal("query_cosine", "key_cosine").alias("cosine"),
        (pl.col("singular_value") / pl.col("target_logit")).alias("ratio"),
    )


def robustness(experiment: Experiment) -> Figure:
    """The smaller cosine of every pair with the channel of its rank."""
    figure = _sweeps(_first_training(experiment), "cosine", "smaller |cosine| of pair")
    figure.axes[0].set_ylim(-0.03, 1.03)
    return figure


def values(experiment: Experiment) -> Figure:
    """Singular values as a share of their target logits."""
    return _sweeps(_first_training(experiment), "ratio", "singular value / target logit")


def probability(experiment: Experiment) -> Figure:
    """Alignment against p for both lengths of training: on the own channel, and on any; and when it arises."""
    table = experiment.table.filter(pl.col("sweep") == "probability")
    table = table.with_columns(pl.min_horizontal("query_cosine", "key_cosine").alias("cosine"))
    figure, axes = plt.subplots(1, 2, figsize=(11.5, 4.2), layout="constrained")
    for number, ((steps,), part) in enumerate(table.group_by("steps", maintain_order=True)):
        curve = (
            part.group_by("value")
            .agg(pl.col("cosine").median(), pl.col("nearest_cosine").median())
            .sort("value")
        )
        for column, line, name in (
            ("nearest_cosine", "o-", "any channel"),
            ("cosine", "s:", "channel of its rank"),
        ):
            axes[0].plot(
                curve["value"],
                curve[column],
                line,
                color=f"C{number}",
                markersize=4,
                label=f"{name}, {steps:,} steps",
            )
    axes[0].axvline(0.038, color="k", linestyle="--", linewidth=0.8, label="paper: aligned down to 0.038")
    axes[0].set(
        xlabel=LABELS["probability"], ylabel="median over pairs and seeds of |cosine|", ylim=(0, 1.03)
    )
    axes[0].legend(frameon=False, fontsize=8, loc="lower right")
    short = table.filter(pl.col("steps") == pl.col("steps").min(), pl.col("pair") == 0)
    reached = short.filter(pl.col("all_aligned_at").is_not_null())
    axes[1].plot(reached["value"], reached["all_aligned_at"], "o", alpha=0.5, color="tab:gray")
    axes[1].set(
        xlabel=LABELS["probability"],
        ylabel=f"step at which all pairs reach {ALIGNED:g},\neach on the channel of its rank (each seed)",
    )
    for panel in axes:
        _plain_log_axis(panel, TICKS["probability"])
        panel.set_xlim(0.017, 1.2)
    return figure


def capacity(experiment: Experiment) -> Figure:
    """|cosine| of every query feature of interest with every left singular vector, for ever more pairs."""
    names = [name.removeprefix("left_") for name in experiment.arrays if name.startswith("left_")]
    rows = sorted({int(name.split("_")[0]) for name in names})
    columns = max(sum(name.startswith(f"{row}_") for name in names) for row in rows)
    figure, grid = plt.subplots(
        len(rows), columns, figsize=(2.3 * columns + 1, 3.6 * len(rows)), layout="constrained", squeeze=False
    )
    image = None
    for line, d_head in zip(grid, rows, strict=True):
        for axes, name in zip(line, [n for n in names if n.startswith(f"{d_head}_")], strict=False):
            matrix = experiment.arrays[f"left_{name}"]
            image = axes.imshow(matrix, cmap="Greys", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
            axes.set(title=f"H = {d_head}, {len(matrix)} pairs", xlabel="channel")
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        for axes in line:
            axes.set_visible(axes.has_data())
        line[0].set_ylabel("query feature, by falling logit")
    if image is not None:
        figure.colorbar(image, ax=grid, shrink=0.6, label="|cosine|")
    return figure
