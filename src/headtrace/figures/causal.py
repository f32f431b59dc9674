"""Figures of interventions: what claimed signals do, beside random channels of the same head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headtrace.figures.style import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    SEQUENCE,
    VERMILION,
    headline,
    house_style,
    new_figure,
    save,
    with_unit,
)

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from headtrace.causal import Report
    from headtrace.causal.experiments import Additivity, EdgesIntoHead, ResidualChanges, SingleEdges
    from headtrace.causal.faithfulness import Faithfulness


VIOLINS = (
    "Each dot is one edge (grey: one draw of random channels of the same head; 600 at most are shown).\n"
    "A violin is as wide as dots are many at that height, against its own widest place; a white diamond is the mean.\n"
    "The axis is linear within the shaded band and logarithmic beyond it."
)
"""What the marks of violins mean; it stands under every figure that has some."""
DONE = "what is done in the running model"


Group = tuple[str, Sequence[float], str]
"""A violin: its label, its values, its colour."""


def symlog_scale(groups: Sequence[Group]) -> tuple[float, float]:
    """How far the axis of some violins is linear, and how far it reaches; panels that share an axis share both."""
    reach = max((abs(v) for _, values, _ in groups for v in values), default=1.0) or 1.0
    first = np.median([abs(v) for v in groups[0][1]] or [reach]) if groups else reach
    return max(reach * 1e-3, float(first) / 10), reach  # most of the first group still shows


def violins(axis: Axes, groups: Sequence[Group], scale: tuple[float, float] | None = None) -> None:
    """One violin per group, with every value as a point and the mean as a white diamond.

    Effects are mostly tiny and sometimes large, so the axis is linear around zero (where it is shaded) and logarithmic
    beyond (symlog).
    """
    linear, reach = scale or symlog_scale(groups)
    axis.set_yscale("symlog", linthresh=linear, linscale=0.6)
    decades = [10.0**k for k in range(int(np.ceil(np.log10(linear))), int(np.floor(np.log10(reach))) + 1)]
    ticks = [*(-d for d in reversed(decades)), 0.0, *decades]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.axhspan(-linear, linear, color=INK, alpha=0.06, linewidth=0, zorder=0)
    jitter = np.random.default_rng(0)
    for place, (_, values, colour) in enumerate(groups):
        if not len(values):
            continue
        data = np.asarray(values, dtype=float)
        spread = _density(data, linear)
        if spread is not None:
            heights, widths = spread
            axis.fill_betweenx(
                heights, place - 0.4 * widths, place + 0.4 * widths, color=colour, alpha=0.3, linewidth=0
            )
        shown = data if data.size <= 600 else jitter.choice(data, 600, replace=False)
        axis.scatter(
            place + jitter.uniform(-0.12, 0.12, shown.size), shown, s=3, color=colour, alpha=0.5, linewidth=0
        )
        axis.scatter(
            [place], [data.mean()], marker="D", s=26, color="white", edgecolor=INK, linewidth=1, zorder=5
        )
    axis.axhline(0, color=INK, linewidth=0.6)
    axis.set_xticks(range(len(groups)), [label for label, _, _ in groups])
    axis.set_xlim(-0.6, len(groups) - 0.4)


def _density(data: np.ndarray, linear: float) -> tuple[np.ndarray, np.ndarray] | None:
    """Outline of a violin on the symlog axis: heights, and widths up to one. None where there is nothing to spread."""
    from scipy.stats import gaussian_kde

    squeezed = np.arcsinh(data / linear)
    if data.size < 4 or np.ptp(squeezed) < 1e-9:
        return None
    grid = np.linspace(squeezed.min(), squeezed.max(), 120)
    width = gaussian_kde(squeezed)(grid)
    return np.sinh(grid) * linear, width / width.max()


def edge_effects(reports: Sequence[Report], path: str | Path | None = None) -> Figure:
    """Ablation and boost of every measured edge beside random channels: change of attention, change of the metric."""
    effects = [effect for report in reports for effect in report.effects]
    metric = next((report.metric for report in reports if report.metric), None)
    names = ["attention"] + ([] if metric is None else ["metric"])
    with house_style():
        figure, axes = new_figure(3.9 * max(2, len(names)) + 0.6, 4.2, columns=len(names))
        for axis, name in zip(axes[0], names, strict=True):
            groups: list[Group] = []
            for action, colour in (("ablate", VERMILION), ("boost", BLUE)):
                own = [v for e in effects if (v := getattr(e, f"{action}_{name}")) is not None]
                random = [v for e in effects for v in getattr(e, f"control_{action}_{name}") if v is not None]
                groups += [(action, own, colour), (f"{action}\nrandom", random, GREY)]
            violins(axis, [g for g in groups if g[1]])
            axis.set_ylabel(
                f"change of {with_unit(name if metric is None or name == 'attention' else metric)}"
            )
            axis.set_xlabel(DONE)
        first = reports[0] if reports else None
        how = "" if first is None else f" ({first.reach}, scope {first.scope})"
        headline(figure, f"{len(effects)} edges{how}: claimed signals and random channels", VIOLINS)
        return save(figure, path)


def single_edge_violins(found: SingleEdges, path: str | Path | None = None) -> Figure:
    """Rows: attention, metric. Columns: local, global. Violins: ablate, boost, and each with random channels."""
    reaches = found.table["reach"].unique(maintain_order=True).to_list()
    measures = found.table["measure"].unique(maintain_order=True).to_list()
    with house_style():
        figure, axes = new_figure(
            3.9 * max(2, len(reaches)) + 0.6,
            2.6 * len(measures) + 1.1,
            len(measures),
            len(reaches),
            sharey="row",
        )
        for row, measure in zip(axes, measures, strict=True):
            groups = [_four(found, reach, measure) for reach in reaches]
            scale = symlog_scale([group for four in groups for group in four])
            for axis, reach, four in zip(row, reaches, groups, strict=True):
                violins(axis, four, scale)
                edges = found.table.filter(reach=reach, action="ablate", measure=measure).height
                axis.set_title(f"{reach}: {edges} edges", loc="left")
            row[0].set_ylabel(
                f"change of {with_unit((found.metric or 'metric') if measure == 'metric' else measure)}"
            )
        for axis in axes[-1]:
            axis.set_xlabel(DONE)
        headline(figure, "Single edges: claimed signals, and random channels of the same heads", VIOLINS)
        return save(figure, path)


def _four(found: SingleEdges, reach: str, measure: str) -> list[Group]:
    groups: list[Group] = []
    for action, colour in (("ablate", VERMILION), ("boost", BLUE)):
        part = found.table.filter(reach=reach, action=action, measure=measure)
        randoms = part["randoms"].explode().drop_nulls().to_list()
        groups += [(action, part["change"].to_list(), colour), (f"{action}\nrandom", randoms, GREY)]
    return groups


def edges_into_head_bars(found: EdgesIntoHead, path: str | Path | None = None) -> Figure:
    """Edges into one head from the lightest to the heaviest: fall of attention and of the metric, local and global."""
    known = set(found.table["reach"].to_list())
    reaches = [reach for reach in ("local", "global") if reach in known]
    with house_style():
        figure, axes = new_figure(7.2, 2.3 * len(reaches) + 0.6, rows=len(reaches), columns=2, sharex="row")
        for row, reach in zip(axes, reaches, strict=True):
            part = found.table.filter(reach=reach).sort("rank")
            for axis, name, colour in ((row[0], "attention", ORANGE), (row[1], "metric", BLUE)):
                axis.bar(range(part.height), part[name].to_list(), color=colour, width=0.9)
                axis.axhline(0, color=INK, linewidth=0.6)
                axis.set_title(f"{reach} ablation", loc="left")
                axis.set_ylabel(
                    f"change of {with_unit((found.metric or 'metric') if name == 'metric' else name)}",
                    fontsize=8,
                )
        for axis in axes[-1]:
            axis.set_xlabel("edge, by rising weight")
        headline(figure, f"Edges into {found.head}, ablated one by one: ablated minus clean")
        return save(figure, path)


def additivity_scatter(found: Additivity, path: str | Path | None = None) -> Figure:
    """Joint effect of two edges against the sum of their single effects; on the diagonal they add up."""
    kinds = found.table["arrangement"].unique(maintain_order=True).to_list()
    with house_style():
        figure, axes = new_figure(3.5 * len(kinds) + 0.4, 3.6, columns=len(kinds), sharex=True, sharey=True)
        for axis, kind in zip(axes[0], kinds, strict=True):
            part = found.table.filter(arrangement=kind)
            ends = [float(min(part["sum"].min() or 0, 0)), float(max(part["sum"].max() or 0, 0))]  # type: ignore[type-var]
            axis.plot(ends, ends, color=INK, linewidth=0.8, label="joint = sum")
            for reach, colour, marker in (("local", ORANGE, "o"), ("global", BLUE, "^")):
                some = part.filter(reach=reach)
                axis.scatter(
                    some["sum"].to_list(), some["joint"].to_list(), s=16, color=colour, marker=marker, alpha=0.7,
                    linewidth=0, label=f"{reach} ({some.height} pairs)",
                )  # fmt: skip
            axis.set_title(f"{kind} edges", loc="left")
            axis.set_xlabel(f"sum of the single changes of\n{with_unit(found.metric)}")
            axis.legend(loc="upper left")
        axes[0][0].set_ylabel(f"joint change of {with_unit(found.metric)}")
        headline(
            figure,
            "Two edges ablated together, and one by one",
            "Each mark is a pair of edges of one circuit.",
        )
        return save(figure, path)


def residual_distributions(found: ResidualChanges, path: str | Path | None = None) -> Figure:
    """Cumulative share of edges, and of whole sides, up to a cosine and up to a norm ratio of their residuals."""
    lines = (("edge", "ablate"), ("edge", "boost"), ("side", "ablate"), ("side", "boost"))
    with house_style():
        figure, axes = new_figure(7.2, 3.2, columns=2, sharey=True)
        for axis, name in zip(axes[0], ("cosine", "norm_ratio"), strict=True):
            for what, action in lines:
                values = sorted(found.table.filter(what=what, action=action)[name].to_list())
                axis.step(
                    values,
                    np.arange(1, len(values) + 1) / len(values),
                    where="post",
                    color=VERMILION if action == "ablate" else BLUE,
                    linestyle="-" if what == "edge" else "--",
                    label=f"{action}, {'one edge' if what == 'edge' else 'a whole side'} ({len(values)})",
                )
            axis.axvline(1, color=INK, linewidth=0.6)
            axis.set_xlabel("cosine, before and after" if name == "cosine" else "norm after / norm before")
        axes[0][0].set_ylabel("share of edges or sides at or below")
        axes[0][0].legend(loc="upper left")
        headline(figure, "The residual that a head reads, before and after an intervention")
        return save(figure, path)


def faithfulness_curves(found: Sequence[Faithfulness], path: str | Path | None = None) -> Figure:
    """Faithfulness over circuit size, firings by falling influence, beside random firings of the same layers."""
    with house_style():
        figure, axes = new_figure(5.2, 3.4)
        axis = axes[0][0]
        for one, colour in zip(found, SEQUENCE * len(found), strict=False):
            sizes = one.curve["firings"].to_list()
            label = f"{one.ablation}, {one.unit}, MLPs {'kept' if one.mlps == 'keep' else 'ablated'}"
            axis.plot(sizes, one.curve["faithfulness"].to_list(), color=colour, marker="o", ms=3, label=label)
            if one.curve["random"].null_count() == 0:
                axis.plot(
                    sizes, one.curve["random"].to_list(), color=colour, linestyle=":", label="random firings"
                )
        _faithfulness_axis(axis)
        axis.set_ylabel("faithfulness (1: as the whole model)")
        axis.set_xlabel("number of firings kept, by falling influence")
        axis.legend()
        headline(figure, "How much of the metric the kept firings bring back")
        return save(figure, path)


def faithfulness_panels(table: pl.DataFrame, metric: str, path: str | Path | None = None) -> Figure:
    """Curves of many circuits, one panel per way of ablating: the share of each circuit kept, thin lines per prompt."""
    ways = table["way"].unique(maintain_order=True).to_list()
    columns = 3
    rows = -(-len(ways) // columns)
    grid = np.linspace(0, 1, 41)
    with house_style():
        figure, axes = new_figure(7.4, 2.4 * rows + 0.6, rows, columns, sharex=True, sharey=True)
        for axis, way in zip([a for row in axes for a in row], ways, strict=False):
            lines: dict[str, list[np.ndarray]] = {"faithfulness": [], "random": []}
            for (_,), part in table.filter(way=way).group_by("circuit", maintain_order=True):
                share = np.asarray(part["firings"].to_list()) / max(1, int(part["firings"].max()))  # type: ignore[arg-type]
                for name, colour in (("faithfulness", BLUE), ("random", GREY)):
                    lines[name].append(np.interp(grid, share, part[name].to_list()))
                    axis.plot(share, part[name].to_list(), color=colour, alpha=0.3, linewidth=0.7)
            for name, colour, label in (
                ("faithfulness", BLUE, "circuit"),
                ("random", GREY, "random firings"),
            ):
                axis.plot(grid, np.mean(lines[name], axis=0), color=colour, linewidth=2.2, label=label)
            _faithfulness_axis(axis)
            axis.set_ylim(-1.5, 1.5)  # where the metric hardly changes at all, the ratio can be anything
            axis.set_title(way, loc="left", fontsize=8)
        axes[0][0].legend(loc="lower left")
        for row in axes:
            row[0].set_ylabel("faithfulness\n(1: whole model)")
        flat = [a for row in axes for a in row]
        for spare in flat[len(ways) :]:
            spare.set_visible(False)
        for axis in flat[max(0, len(ways) - columns) : len(ways)]:  # the lowest shown panel of each column
            axis.set_xlabel("share of firings kept")
            axis.tick_params(labelbottom=True)
        note = "Thin: one prompt each. Thick: their mean. Dashed line: the whole model."
        headline(figure, f"Keeping only the circuit: share of the {metric} that attention brings", note)
        return save(figure, path)


def _faithfulness_axis(axis: Axes) -> None:
    axis.axhline(0, color=INK, linewidth=0.6)
    axis.axhline(1, color=INK, linewidth=0.6, linestyle="--")
