"""Figures of families: cluster maps, stability, ablations of exclusive edges, signals and circuits compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from headtrace.errors import InputError
from headtrace.figures import style
from headtrace.figures.style import BLUE, GREY, HEAT, INK, SEQUENCE, SIGNED, VERMILION

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from headtrace.families import (
        CircuitComparison,
        ExclusiveAblation,
        Families,
        RunComparison,
        SignalComparison,
        Stability,
    )

MOST_CIRCUITS, MOST_BRANCHES, MOST_VALUES, MOST_ITEMS = 1500, 400, 8, 45


@style.house_style()
def cluster_map(
    families: Families, path: str | Path | None = None, columns: Sequence[str] | None = None
) -> Figure:
    """Distances in the order of the tree; above them the tree, beside them families and labels as coloured bars."""
    from scipy.cluster import hierarchy

    from headtrace.families.clustering import square

    population = families.population
    chosen = list(population.labels.columns if columns is None else columns)
    bars = [("family", [f"{f}" for f in families.family])]
    bars += [(name, population.column(name).to_list()) for name in chosen]
    order = hierarchy.leaves_list(families.tree)
    shown = order[np.unique(np.linspace(0, len(order) - 1, min(len(order), MOST_CIRCUITS)).astype(int))]
    figure, axes = style.new_figure(
        7.4, 6.6 + 0.16 * max(len(bars) - 2, 0), 2 + len(bars), 2,
        height_ratios=[1.3, *[0.17] * len(bars), 5], width_ratios=[5, 1.5],
    )  # fmt: skip
    left, right = [row[0] for row in axes], [row[1] for row in axes]
    _tree(left[0], families.tree, order)
    for axis, beside, (name, values) in zip(left[1:-1], right[1:-1], bars, strict=True):
        _bar(axis, name, [values[i] for i in order])
        beside.set_axis_off()
    image = left[-1].imshow(
        square(families.sets.matrix[shown]),
        cmap=HEAT,
        vmin=0,
        vmax=1,
        aspect="auto",
        interpolation="nearest",
    )
    drawn = "" if len(order) == len(shown) else f" ({len(shown):,} of {len(order):,} drawn)"
    label = f"circuits, in the order of the tree{drawn}"
    left[-1].set(xticks=[], yticks=[], xlabel=label, ylabel="the same circuits")
    figure.colorbar(
        image,
        ax=left[-1],
        location="bottom",
        shrink=0.6,
        label="Jaccard distance (0: all in common, 1: nothing)",
    )
    _legends(right, bars)
    grain = {"components": "components", "edges": "edges", "edge-channel": "edges and their channels"}
    found = f"{families.n} famil{'y' if families.n == 1 else 'ies'}"
    return style.save(
        figure, path, f"{len(order)} circuits compared by their {grain[families.grain]}: {found}"
    )


def _tree(axis: Axes, tree: np.ndarray, order: np.ndarray) -> None:
    """The upper part of the tree, every branch where its circuits are below."""
    from matplotlib.collections import LineCollection

    n = len(order)
    place, height = np.empty(2 * n - 1), np.zeros(2 * n - 1)
    place[order] = np.arange(n) + 0.5
    lines: list[Any] = []
    for merge, (a, b, distance, _) in enumerate(tree):
        left, right = int(a), int(b)
        place[n + merge], height[n + merge] = (place[left] + place[right]) / 2, distance
        if merge >= n - 1 - MOST_BRANCHES:
            lines.append(
                [
                    (place[left], height[left]),
                    (place[left], distance),
                    (place[right], distance),
                    (place[right], height[right]),
                ]
            )
    axis.add_collection(LineCollection(lines, colors=INK, linewidths=0.7))
    axis.set(
        xlim=(0, n), ylim=(0, 1.02), xticks=[], yticks=[0, 0.5, 1], ylabel="mean distance\nof merged groups"
    )
    axis.spines["bottom"].set_visible(False)


def colours_of(values: Iterable[Any]) -> dict[Any, str]:
    """A colour for each value, that colour-blind readers can tell apart: the house palette for a few, an even scale of
    lightness for many; none is grey. The explorer's map has the same."""
    import matplotlib as mpl
    from matplotlib.colors import to_hex

    known = sorted(
        {v for v in values if v is not None},
        key=lambda v: (not str(v).isdigit(), int(v) if str(v).isdigit() else 0, str(v)),
    )
    if len(known) <= len(SEQUENCE):
        return {None: "#dddddd", **dict(zip(known, SEQUENCE, strict=False))}
    scale = mpl.colormaps["viridis"]
    return {None: "#dddddd", **{v: to_hex(scale((i + 0.5) / len(known))) for i, v in enumerate(known)}}


def _bar(axis: Axes, name: str, values: Sequence[Any]) -> None:
    from matplotlib.colors import to_rgb

    colours = colours_of(values)
    axis.imshow(np.array([[to_rgb(colours[v]) for v in values]]), aspect="auto", interpolation="nearest")
    axis.set(xticks=[], yticks=[0])
    axis.set_yticklabels([style.token_label(name)])
    axis.tick_params(length=0)
    for spine in axis.spines.values():
        spine.set_visible(False)


def _legends(axes: Sequence[Axes], bars: Sequence[tuple[str, Sequence[Any]]]) -> None:
    """What the colours of the bars mean, in the free space beside the map."""
    from matplotlib.patches import Patch

    axes[0].set_axis_off()
    axis = axes[-1]
    axis.set_axis_off()
    top = 1.0
    for name, values in bars:
        colours = {v: c for v, c in colours_of(values).items() if v is not None or None in values}
        many = len(colours) > MOST_VALUES
        counts = {v: sum(each == v for each in values) for v in colours}
        some = list(colours)[:: max(1, -(-len(colours) // MOST_VALUES))] if many else list(colours)
        labels = [f"{'none' if v is None else style.token_label(str(v))} ({counts[v]})" for v in some]
        title = style.token_label(name, 20) + (f": {len(colours)} values" if many else "")
        legend = axis.legend(
            [Patch(color=colours[v]) for v in some], labels, title=title, loc="upper left",
            bbox_to_anchor=(0, top), fontsize=7, title_fontsize=8, alignment="left", handlelength=1,
        )  # fmt: skip
        axis.add_artist(legend)
        top -= 0.052 * (len(some) + 1.6)


# -- what is said about families -----------------------------------------------------------------------------


@style.house_style()
def stability_bars(found: Stability, path: str | Path | None = None) -> Figure:
    """Similarity of each family with its counterparts in bootstrap samples."""
    table = found.table
    figure, axes = style.new_figure(max(4.6, 1.6 + 0.7 * table.height), 3.2)
    axis = axes[0][0]
    x = np.arange(table.height)
    mean = table["edges"].to_numpy()
    error = np.abs([mean - table["edges_low"].to_numpy(), table["edges_high"].to_numpy() - mean])
    axis.bar(x - 0.2, mean, 0.38, color=BLUE, label="edges that most circuits have")
    axis.errorbar(x - 0.2, mean, error, fmt="none", ecolor=INK, elinewidth=0.8, capsize=2)
    axis.bar(x + 0.2, table["members"].to_numpy(), 0.38, color=GREY, label="members")
    axis.axhline(0.8, color=INK, linewidth=0.8, linestyle="--")
    axis.set(ylim=(0, 1.02), xticks=x, ylabel="mean Jaccard similarity", xlabel="family (circuits in it)")
    axis.set_xticklabels([f"{f}\n({c})" for f, c in table.select("family", "circuits").rows()])
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=2)
    note = "Lines: 95 % of the samples. Dashed: 0.8, which counts as stable."
    return style.save(figure, path, f"Families found again in {found.resamples} bootstrap samples", note)


@style.house_style()
def ablation_bars(found: ExclusiveAblation, path: str | Path | None = None) -> Figure:
    """For each family's exclusive edges: change of the metric on prompts of every family, beside random edges."""
    table = found.summary()
    sets = [f for f, edges in found.edges.items() if edges]
    columns = min(3, len(sets))
    rows = -(-len(sets) // columns)
    width = max(5.4, 1.2 + columns * (0.9 + 0.4 * table["family"].n_unique()))
    figure, axes = style.new_figure(width, 1.2 + 2.5 * rows, rows, columns, sharey=True)
    flat = [axis for line in axes for axis in line]
    for spare in flat[len(sets) :]:
        spare.set_visible(False)
    for axis, edges_of in zip(flat, sets, strict=False):
        part = table.filter(edges_of=edges_of)
        x = np.arange(part.height)
        own = part["own"].to_list()
        _bars_with_intervals(axis, x - 0.2, part, "change", [VERMILION if o else BLUE for o in own])
        _bars_with_intervals(axis, x + 0.2, part, "random", [GREY] * len(own))
        axis.axhline(0, color=INK, linewidth=0.6)
        axis.set(xticks=x, xlabel="prompts of family")
        axis.set_xticklabels(
            [f"{f}" + ("\n(own)" if o else "") for f, o in zip(part["family"], own, strict=True)]
        )
        count = len(found.edges[edges_of])
        axis.set_title(f"{count} edge{'s' if count > 1 else ''} of family {edges_of}", loc="left", fontsize=9)
    for line in axes:
        line[0].set_ylabel(f"change of {style.with_unit(found.metric)}")
    note = (
        "Red: on the family's own prompts. Blue: on others'. Lines: 95 % over prompts.\n"
        "Grey: as many random edges of the prompt's own circuit. No bar: the edges could not be applied."
    )
    return style.save(figure, path, "Exclusive edges of families, ablated together", note)


def _bars_with_intervals(
    axis: Axes, x: np.ndarray, part: pl.DataFrame, name: str, colours: list[str]
) -> None:
    mean, low, high = (part[key].cast(pl.Float64).to_numpy() for key in (name, f"{name}_low", f"{name}_high"))
    axis.bar(x, np.nan_to_num(mean), 0.38, color=colours)
    axis.errorbar(
        x, mean, np.abs([mean - low, high - mean]), fmt="none", ecolor=INK, elinewidth=0.8, capsize=2
    )


# -- signals -------------------------------------------------------------------------------------------------


@style.house_style()
def signal_maps(found: SignalComparison, path: str | Path | None = None) -> Figure:
    """Cosines over layers and heads: query and key side, and below them the control where there is one."""
    controlled = found.table["control"].drop_nulls().len() > 0
    rows = [("cosine", "")] + ([("control", ", control")] if controlled else [])
    high = 0.9 + max(1.2, 0.26 * found.n_layers)
    figure, axes = style.new_figure(
        max(5.6, 2.0 + 0.62 * found.n_heads), high * len(rows) + 0.7, len(rows), 2
    )
    image = None
    for line, (name, title) in zip(axes, rows, strict=True):
        for axis, side in zip(line, ("query", "key"), strict=True):
            image = _heads(axis, found, side, name)
            axis.set_title(f"{side} signals{title}")
    if image is not None:
        every = [axis for line in axes for axis in line]
        figure.colorbar(image, ax=every, label="cosine (1: the same, -1: the opposite)", shrink=0.8)
    note = "Hatched: a head that only one of them has, or none."
    note += "\nControl: the same head in two circuits of one and the same side." if controlled else ""
    names = [
        name if circuits == 1 else f"{name} ({circuits} circuits)"
        for name, circuits in zip(found.names, found.circuits, strict=True)
    ]
    return style.save(figure, path, f"What heads read in {' and in '.join(names)}", note)


def _heads(axis: Axes, found: SignalComparison, side: str, name: str) -> Any:
    from matplotlib.ticker import MaxNLocator

    values = np.full((found.n_layers, found.n_heads), np.nan)
    for layer, head, value in found.table.filter(side=side).select("layer", "head", name).rows():
        values[layer, head] = np.nan if value is None else value
    axis.patch.set(hatch="////", edgecolor="#c8c8c8", facecolor="#f2f2f2")
    image = axis.imshow(
        np.ma.masked_invalid(values), cmap=SIGNED, vmin=-1, vmax=1, aspect="auto", origin="lower"
    )
    if found.n_heads <= 12 and found.n_layers <= 12:
        for (layer, head), value in np.ndenumerate(values):
            if not np.isnan(value):
                colour = "white" if abs(value) > 0.65 else INK
                axis.text(head, layer, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)
    axis.set(xlabel="head", ylabel="layer")
    for one in (axis.xaxis, axis.yaxis):
        one.set_major_locator(MaxNLocator(integer=True))
    return image


# -- runs side by side ---------------------------------------------------------------------------------------


@style.house_style()
def run_differences(found: RunComparison, path: str | Path | None = None) -> Figure:
    """The items that differ most between two runs: shares of prompts on the left, their difference on the right."""
    if not found.table.height:
        raise InputError("The runs have no nodes or edges, so there is nothing to draw.")
    parts = [found.table.filter(kind=kind).head(MOST_ITEMS // 3) for kind in ("step", "node", "edge")]
    shown = pl.concat([part.filter(pl.col("difference") != 0) for part in parts])
    shown = shown if shown.height else pl.concat(parts).head(5)
    longest = max(len(item) for item in shown["item"])
    figure, ((left, right),) = style.new_figure(
        4.6 + 0.062 * longest, 1.6 + 0.17 * shown.height, 1, 2, width_ratios=[1, 1], sharey=True
    )
    place = np.arange(shown.height)
    for name, colour, label in (("a", GREY, found.names[0]), ("b", BLUE, found.names[1])):
        left.scatter(shown[name], place, color=colour, s=14, label=style.token_label(label, 24), zorder=3)
    left.hlines(place, shown["a"], shown["b"], color="#c8c8c8", linewidth=1, zorder=1)
    left.set(xlim=(-0.03, 1.03), xlabel="share of prompts", yticks=place)
    left.set_yticklabels(
        [style.token_label(item, 70).replace("␣", " ") for item in shown["item"]], fontsize=6.5
    )
    left.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, frameon=False, fontsize=7)
    clear = (shown["q"] <= 0.05).to_list()
    colours = [VERMILION if each else GREY for each in clear]
    right.hlines(place, shown["low"], shown["high"], colors=colours, linewidth=1.2)
    right.scatter(shown["difference"], place, c=colours, s=14, zorder=3)
    right.axvline(0, color=INK, linewidth=0.6)
    right.set(xlim=(-1.05, 1.05), xlabel="difference, with its 95 % interval")
    left.invert_yaxis()
    note = "Orange: clear after correction for the number of items (q at most 0.05)."
    title = f"What {found.names[1]} has more or less often than {found.names[0]} ({found.pairs} prompts)"
    return style.save(figure, path, title, note)


# -- circuits side by side -----------------------------------------------------------------------------------


@style.house_style()
def comparison_grid(found: CircuitComparison, path: str | Path | None = None) -> Figure:
    """Which edges (at the grain of components: which nodes) each circuit has, darker where more influence passes."""
    from matplotlib import colormaps
    from matplotlib.colors import LinearSegmentedColormap

    table = found.table.filter(kind=found.unit)
    if not table.height:
        raise InputError("The circuits have no item at this grain, so there is nothing to draw.")
    strongest = table.with_row_index("order").sort(
        pl.col("influence").list.max(), descending=True, maintain_order=True
    )
    shown = strongest.head(MOST_ITEMS).sort("order")
    names = [style.token_label(name, 24) for name in found.names]
    several = len(names) > 2
    longest = max(len(item) for item in shown["item"])
    grid, matrix = 0.55 * len(names), 0.5 * len(names) if several else 0.01
    figure, axes = style.new_figure(
        1.9 + 0.068 * longest + grid + (matrix + 1.2 if several else 0.9), 1.9 + 0.17 * shown.height, 1, 2,
        width_ratios=[grid, matrix],
    )  # fmt: skip
    axis, other = axes[0]
    values = np.array([[np.nan if v is None else v for v in row] for row in shown["influence"].to_list()])
    # Not from white, which says that something is not there.
    visible = LinearSegmentedColormap.from_list("visible", colormaps["Blues"](np.linspace(0.25, 1, 64)))
    image = axis.imshow(
        np.ma.masked_invalid(values), cmap=visible, vmin=0, aspect="auto", interpolation="nearest"
    )
    axis.set(xticks=range(len(names)), yticks=range(shown.height))
    axis.set_xticklabels(names, rotation=45, ha="right")
    axis.set_yticklabels(
        [style.token_label(item, 60).replace("␣", " ") for item in shown["item"]], fontsize=6.5
    )
    axis.set_xticks(np.arange(len(names) + 1) - 0.5, minor=True)
    axis.set_yticks(np.arange(shown.height + 1) - 0.5, minor=True)
    axis.grid(which="minor", color="#e4e4e4", linewidth=0.5)
    axis.tick_params(which="both", length=0)
    label = "share of the root's whole that passes through"
    figure.colorbar(image, ax=axis, label=label, shrink=min(0.9, 8 / shown.height + 0.2))
    if several:
        other.imshow(found.similarity, cmap="Greys", vmin=0, vmax=1.6)
        other.set_anchor("N")
        for (i, j), value in np.ndenumerate(found.similarity):
            other.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7)
        other.set(xticks=range(len(names)), yticks=range(len(names)))
        other.set_xticklabels(names, rotation=45, ha="right")
        other.set_yticklabels(names)
        other.set_title(f"{found.unit}s that two share,\nof all they have", loc="left", fontsize=8)
        other.tick_params(length=0)
    else:
        other.set_axis_off()
    in_all = found.shared.filter(kind=found.unit).height
    shared = f"{in_all} of {table.height} {found.unit}s are in {'all' if several else 'both'}"
    which = f"The {shown.height} strongest of them" if shown.height < table.height else "All of them"
    note = f"{which}, in the order in which they first appear.\nWhite: not in the circuit."
    return style.save(figure, path, shared, note)
