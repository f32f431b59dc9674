"""Figures of what happens while a toy model trains: alignment and sparsity."""

from __future__ import annotations

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from headtrace.toy.experiment import Experiment
from headtrace.toy.experiments.dynamics import in_order


def dynamics(experiment: Experiment) -> Figure:
    """Alignment of each pair, singular values and the attention loss, over one training."""
    arrays = experiment.arrays
    steps, logits = arrays["steps"], arrays["logits"]
    figure, axes = plt.subplots(3, 1, figsize=(8, 8), layout="constrained", sharex=True)
    for pair, logit in enumerate(logits):
        color, label = f"C{pair}", f"pair {pair} (logit {logit:g})"
        axes[0].plot(steps, arrays["query_cosine"][:, pair], color=color, label=label)
        axes[0].plot(steps, arrays["key_cosine"][:, pair], color=color, linestyle="--", linewidth=0.8)
        axes[1].plot(steps, arrays["values"][:, pair], color=color)
        axes[1].axhline(logit, color=color, linestyle=":", linewidth=0.8)
    axes[0].set(ylabel="|cosine| with its singular vector\n(solid: query, dashed: key)", ylim=(0, 1.03))
    axes[0].legend(frameon=False, loc="lower right")
    axes[1].set(ylabel="singular value\n(dotted: target logit)")
    axes[2].semilogy(steps, arrays["excess_attention_loss"], color="k")
    axes[2].set(ylabel="attention loss\nabove its floor", xlabel="training step")
    return figure


def paths(experiment: Experiment) -> Figure:
    """|cosine| between vectors at different times: singular vectors, features, and one with the other."""
    arrays = experiment.arrays
    last, pairs = int(arrays["steps"][-1]), len(arrays["logits"])
    figure, grid = plt.subplots(
        3, pairs, figsize=(2.7 * pairs + 1, 8), layout="constrained", sharex=True, sharey=True
    )
    image = None
    rows = (
        ("vector", "$u_k(t)$ and $u_k(t')$"),
        ("feature", "$w_k(t)$ and $w_k(t')$"),
        ("both", "$u_k(t)$ and $w_k(t')$"),
    )
    for line, (name, label) in zip(grid, rows, strict=True):
        for pair, axes in enumerate(line):
            image = axes.imshow(
                arrays[f"{name}_{pair}"],
                vmin=0,
                vmax=1,
                origin="lower",
                extent=(0, last, 0, last),
                cmap="viridis",
            )
            if name == "vector":
                axes.set_title(f"pair {pair} (logit {arrays['logits'][pair]:g})")
            axes.set_xticks([0, last // 2])
        line[0].set_ylabel(f"{label}\nstep t")
    for axes in grid[-1]:
        axes.set_xlabel("step t'")
    if image is not None:
        figure.colorbar(image, ax=grid, shrink=0.5, label="|cosine|")
    return figure


def order(experiment: Experiment) -> Figure:
    """When each pair was aligned and when it was learned, over all seeds, for each size of the first weights."""
    arrays = experiment.arrays
    starts = [name.removeprefix("aligned_at_") for name in arrays if name.startswith("aligned_at_")]
    figure, grid = plt.subplots(
        2, len(starts), figsize=(3.4 * len(starts), 6.2), layout="constrained", sharex=True, sharey="row"
    )
    for line, event in zip(grid, ("aligned", "learned"), strict=True):
        for axes, start in zip(line, starts, strict=True):
            at = arrays[f"{event}_at_{start}"]
            shown, median = np.where(np.isfinite(at), at, np.nan), np.median(at, axis=0)
            exact = sum(in_order(row) for row in at)
            axes.plot(np.arange(at.shape[1]), shown.T, color="tab:gray", alpha=0.35, linewidth=0.8)
            axes.plot(np.where(np.isfinite(median), median, np.nan), "ko-", label="median over seeds")
            size = "Xavier" if start == "1" else f"{start} of Xavier"
            axes.set_title(f"first weights: {size}\n{exact} of {len(at)} seeds in exact order", fontsize=9)
            axes.set_xticks(range(at.shape[1]))
        line[0].set_ylabel(f"{event} from step")
    for axes in grid[-1]:
        axes.set_xlabel("pair, by falling logit")
    grid[0, 0].legend(frameon=False)
    return figure


def sparsity(experiment: Experiment) -> Figure:
    """Sparseness of relative attention over training, with 95% intervals, and its rotated control."""
    arrays = experiment.arrays
    figure, axes = plt.subplots(figsize=(7, 4.3), layout="constrained")
    labels = {"one": "one pair of interest", "two": "two pairs", "none": "none"}
    for index, (name, label) in enumerate(labels.items()):
        for basis, style in (("svd", "-"), ("rotated", ":")):
            middle, half = arrays[f"curve_{name}_{basis}"], arrays[f"interval_{name}_{basis}"]
            text = label if basis == "svd" else f"{label}, rotated"
            axes.plot(arrays["steps"], middle, style, color=f"C{index}", label=text)
            axes.fill_between(
                arrays["steps"], middle - half, middle + half, color=f"C{index}", alpha=0.2, linewidth=0
            )
    axes.set(xlabel="training step", ylabel="sparseness S (smaller is sparser)", ylim=(0, 0.8))
    axes.legend(frameon=False, ncols=2, fontsize=8)
    return figure


def examples(experiment: Experiment) -> Figure:
    """Relative attention of five token pairs each, with and without a pair of interest, early and late."""
    arrays = experiment.arrays
    kinds = [(kind, when) for kind in ("one", "none") for when in ("early", "late")]
    figure, grid = plt.subplots(4, 5, figsize=(12, 8), layout="constrained", sharex=True)
    for line, (kind, when) in zip(grid, kinds, strict=True):
        terms = arrays[f"{kind}_{when}"]
        for axes, values in zip(line, terms, strict=True):
            axes.bar(np.arange(len(values)), values, color="tab:blue" if kind == "one" else "tab:gray")
            axes.axhline(0, color="k", linewidth=0.5)
        step = f"step {int(arrays['early_step'])}" if when == "early" else "trained"
        line[0].set_ylabel(f"{'pair 0 only' if kind == 'one' else 'no pair'}\n{step}")
    for axes in grid[-1]:
        axes.set_xlabel("channel")
    figure.suptitle("Relative attention by channel, five token pairs each")
    return figure


def strength(experiment: Experiment) -> Figure:
    """Five token pairs as they come, and every term against the product of feature strengths."""
    arrays = experiment.arrays
    figure, grid = plt.subplots(3, 5, figsize=(12, 7.6), layout="constrained", height_ratios=[1, 1, 1.5])
    for column in range(5):
        terms, products = arrays["mixed_terms"][column], arrays["mixed_products"][column]
        grid[0, column].bar(np.arange(len(terms)), terms, color="tab:blue")
        grid[1, column].bar(np.arange(len(products)), products, color=[f"C{i}" for i in range(len(products))])
        grid[1, column].set(xlabel="pair", xlim=(-0.5, len(terms) - 0.5), xticks=range(len(products)))
        for axes in grid[:2, column]:
            axes.axhline(0, color="k", linewidth=0.5)
    grid[0, 0].set_ylabel("relative attention\nby channel")
    grid[1, 0].set_ylabel("relative strength\n$f_i^{(r)} f_j^{(s)}$")
    for axes in grid[2, 4:]:
        axes.set_visible(False)
    for pair, axes in enumerate(grid[2, :4]):
        axes.plot(arrays[f"product_{pair}"], arrays[f"term_{pair}"], ".", markersize=2, color=f"C{pair}")
        axes.set(title=f"channel {pair}", xlabel="relative strength")
    grid[2, 0].set_ylabel("term of relative attention")
    return figure
