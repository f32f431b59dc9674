"""Figures of alignment over many settings."""

from __future__ import annotations

import polars as pl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from headtrace.toy.experiment import Experiment
from headtrace.toy.experiments.robustness import ALIGNED

LABELS = {
    "probability": "feature probability p",
    "attention_weight": "loss weight $\\lambda$",
    "n_features": "features N (D = 10)",
    "d_head": "head dimension H",
    "context": "context length m",
}


def _pairs(axes: Axes, part: pl.DataFrame) -> None:
    """Mean over seeds of each pair's smaller cosine, and the range over seeds."""
    for (pair, logit), rows in part.group_by("pair", "target_logit", maintain_order=True):
        curve = (
            rows.group_by("value")
            .agg(
                pl.col("cosine").mean(),
                pl.col("cosine").min().alias("low"),
                pl.col("cosine").max().alias("high"),
            )
            .sort("value")
        )
        color = f"C{pair}"
        axes.plot(
            curve["value"],
            curve["cosine"],
            "o-",
            color=color,
            markersize=3,
            label=f"pair {pair} (logit {logit:g})",
        )
        axes.fill_between(curve["value"], curve["low"], curve["high"], color=color, alpha=0.12, linewidth=0)
    axes.set_ylim(-0.03, 1.03)


def robustness(experiment: Experiment) -> Figure:
    """One panel per sweep, and one for the seeds of the default setting."""
    table = experiment.table.with_columns(pl.min_horizontal("query_cosine", "key_cosine").alias("cosine"))
    table = table.filter(pl.col("steps") == pl.col("steps").min())
    names = [name for name in LABELS if (table["sweep"] == name).any()]
    figure, grid = plt.subplots(2, 3, figsize=(13, 6.4), layout="constrained", sharey=True)
    for axes, name in zip(grid.flat, names, strict=False):
        _pairs(axes, table.filter(pl.col("sweep") == name))
        axes.set(
            xlabel=LABELS[name],
            xscale="log" if name in ("probability", "attention_weight", "context") else "linear",
        )
    seeds = table.filter(pl.col("sweep") == "probability", pl.col("value") == 0.52)
    last = grid.flat[len(names)]
    _pairs(last, seeds.with_columns(pl.col("seed").cast(pl.Float64).alias("value")))
    last.set(xlabel="seed (default setting)", xticks=sorted(set(seeds["seed"].to_list())))
    for axes in list(grid.flat)[len(names) + 1 :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("smaller |cosine| of pair")
    grid.flat[0].legend(frameon=False, fontsize=8)
    return figure


def probability(experiment: Experiment) -> Figure:
    """Alignment against p for both lengths of training, and when it arises."""
    table = experiment.table.filter(pl.col("sweep") == "probability")
    table = table.with_columns(pl.min_horizontal("query_cosine", "key_cosine").alias("cosine"))
    figure, axes = plt.subplots(1, 2, figsize=(10.5, 4), layout="constrained")
    for (steps,), part in table.group_by("steps", maintain_order=True):
        curve = part.group_by("value").agg(pl.col("cosine").mean()).sort("value")
        axes[0].plot(curve["value"], curve["cosine"], "o-", markersize=4, label=f"{steps:,} steps")
    axes[0].axvline(0.038, color="k", linestyle=":", linewidth=1, label="paper: fails at 0.038 and below")
    axes[0].set(xscale="log", xlabel=LABELS["probability"], ylabel="mean of smaller |cosine|", ylim=(0, 1.03))
    axes[0].legend(frameon=False)
    short = table.filter(pl.col("steps") == pl.col("steps").min(), pl.col("pair") == 0)
    reached = short.filter(pl.col("all_aligned_at").is_not_null())
    axes[1].plot(reached["value"], reached["all_aligned_at"], "o", alpha=0.5, color="tab:gray")
    axes[1].set(
        xscale="log",
        xlabel=LABELS["probability"],
        ylabel=f"step at which all pairs reach {ALIGNED:g} (each seed)",
    )
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
        for axes in line:
            axes.set_visible(axes.has_data())
        line[0].set_ylabel("query feature, by falling logit")
    if image is not None:
        figure.colorbar(image, ax=grid, shrink=0.6, label="|cosine|")
    return figure
