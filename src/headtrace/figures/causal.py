"""Figures of interventions: single edges beside random channels, circuits kept alone, sufficiency, importance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from headtrace.figures import style
from headtrace.figures.style import BLUE, GREY, INK, ORANGE, SEQUENCE, VERMILION

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from headtrace.causal import Report
    from headtrace.causal.experiments import Additivity, EdgesIntoHead, ResidualChanges, SingleEdges
    from headtrace.causal.faithfulness import Faithfulness
    from headtrace.causal.importance import Importance
    from headtrace.causal.sufficiency import Curve, Sufficiency


VIOLINS = (
    "Each dot is one edge (grey: one draw of random channels of the same head; 600 at most are shown).\n"
    "The width of a violin shows how many dots lie at that height; a white diamond is the mean.\n"
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
    ticks = _ticks(linear, reach)
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


def _ticks(linear: float, reach: float) -> list[float]:
    """Powers of ten on both sides of zero, beyond the linear part; also twice and five times them where one would
    stand alone, since an axis with a single step cannot be read as logarithmic."""
    powers = [10.0**k for k in range(int(np.floor(np.log10(linear))), int(np.floor(np.log10(reach))) + 1)]

    def within(steps: tuple[int, ...]) -> list[float]:
        return [step * power for power in powers for step in steps if linear <= step * power <= reach]

    above = within((1,)) if len(within((1,))) > 1 else within((1, 2, 5))
    return [*(-tick for tick in reversed(above)), 0.0, *above]


def _density(data: np.ndarray, linear: float) -> tuple[np.ndarray, np.ndarray] | None:
    """Outline of a violin on the symlog axis: heights, and widths up to one. None where there is nothing to spread."""
    from scipy.stats import gaussian_kde

    squeezed = np.arcsinh(data / linear)
    if data.size < 4 or np.ptp(squeezed) < 1e-9:
        return None
    grid = np.linspace(squeezed.min(), squeezed.max(), 120)
    width = gaussian_kde(squeezed)(grid)
    return np.sinh(grid) * linear, width / width.max()


def _actions(changes: Callable[[str], tuple[list[float], list[float]]]) -> list[Group]:
    """Violins of ablation and of boost, each beside that of random channels."""
    groups: list[Group] = []
    for action, colour in (("ablate", VERMILION), ("boost", BLUE)):
        claimed, random = changes(action)
        groups += [(action, claimed, colour), (f"{action}\nrandom", random, GREY)]
    return groups


@style.house_style()
def edge_effects(reports: Sequence[Report], path: str | Path | None = None) -> Figure:
    """Ablation and boost of every measured edge beside random channels: change of attention, change of the metric."""
    effects = [effect for report in reports for effect in report.effects]
    metric = next((report.metric for report in reports if report.metric), None)
    names = {"attention": "attention"} | ({} if metric is None else {"metric": metric})

    def changes(name: str, action: str) -> tuple[list[float], list[float]]:
        claimed = [getattr(effect, f"{action}_{name}") for effect in effects]
        random = [value for effect in effects for value in getattr(effect, f"control_{action}_{name}")]
        return [v for v in claimed if v is not None], [v for v in random if v is not None]

    figure, axes = style.new_figure(3.9 * max(2, len(names)) + 0.6, 4.2, columns=len(names))
    for axis, (name, measure) in zip(axes[0], names.items(), strict=True):
        violins(axis, [group for group in _actions(partial(changes, name)) if group[1]])
        axis.set(ylabel=f"change of {style.with_unit(measure)}", xlabel=DONE)
    how = f" ({reports[0].reach}, scope {reports[0].scope})" if reports else ""
    return style.save(
        figure, path, f"{len(effects)} edges{how}: claimed signals and random channels", VIOLINS
    )


@style.house_style()
def single_edge_violins(found: SingleEdges, path: str | Path | None = None) -> Figure:
    """Rows: attention, metric. Columns: local, global. Violins: ablate, boost, and each with random channels."""
    reaches = found.table["reach"].unique(maintain_order=True).to_list()
    measures = found.table["measure"].unique(maintain_order=True).to_list()

    def changes(reach: str, measure: str, action: str) -> tuple[list[float], list[float]]:
        part = found.table.filter(reach=reach, action=action, measure=measure)
        return part["change"].to_list(), part["randoms"].explode().drop_nulls().to_list()

    width, height = 3.9 * max(2, len(reaches)) + 0.6, 2.6 * len(measures) + 1.1
    figure, axes = style.new_figure(width, height, len(measures), len(reaches), sharey="row")
    for row, measure in zip(axes, measures, strict=True):
        groups = [_actions(partial(changes, reach, measure)) for reach in reaches]
        scale = symlog_scale([group for four in groups for group in four])
        for axis, reach, four in zip(row, reaches, groups, strict=True):
            violins(axis, four, scale)
            edges = found.table.filter(reach=reach, action="ablate", measure=measure).height
            axis.set_title(f"{reach}: {edges} edges")
        name = (found.metric or "metric") if measure == "metric" else measure
        row[0].set_ylabel(f"change of {style.with_unit(name)}")
    for axis in axes[-1]:
        axis.set_xlabel(DONE)
    return style.save(
        figure, path, "Single edges: claimed signals, and random channels of the same heads", VIOLINS
    )


@style.house_style()
def edges_into_head_bars(found: EdgesIntoHead, path: str | Path | None = None) -> Figure:
    """Edges into one head from the lightest to the heaviest: fall of attention and of the metric, local and global."""
    known = set(found.table["reach"].to_list())
    reaches = [reach for reach in ("local", "global") if reach in known]
    figure, axes = style.new_figure(7.2, 2.3 * len(reaches) + 0.6, rows=len(reaches), columns=2, sharex="row")
    for row, reach in zip(axes, reaches, strict=True):
        part = found.table.filter(reach=reach).sort("rank")
        for axis, name, colour in ((row[0], "attention", ORANGE), (row[1], "metric", BLUE)):
            axis.bar(range(part.height), part[name].to_list(), color=colour, width=0.9)
            axis.axhline(0, color=INK, linewidth=0.6)
            axis.set_title(f"{reach} ablation")
            axis.set_ylabel(
                f"change of {style.with_unit((found.metric or 'metric') if name == 'metric' else name)}",
                fontsize=8,
            )
    for axis in axes[-1]:
        axis.set_xlabel("edge, by rising weight")
    return style.save(figure, path, f"Edges into {found.head}, ablated one by one: ablated minus clean")


@style.house_style()
def additivity_scatter(found: Additivity, path: str | Path | None = None) -> Figure:
    """Joint effect of two edges against the sum of their single effects; on the diagonal they add up."""
    kinds = found.table["arrangement"].unique(maintain_order=True).to_list()
    figure, axes = style.new_figure(3.5 * len(kinds) + 0.4, 3.6, columns=len(kinds), sharex=True, sharey=True)
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
        axis.set(
            title=f"{kind} edges", xlabel=f"sum of the single changes of\n{style.with_unit(found.metric)}"
        )
        axis.legend(loc="upper left")
    axes[0][0].set_ylabel(f"joint change of {style.with_unit(found.metric)}")
    return style.save(
        figure,
        path,
        "Two edges ablated together, and one by one",
        "Each mark is a pair of edges of one circuit.",
    )


@style.house_style()
def residual_distributions(found: ResidualChanges, path: str | Path | None = None) -> Figure:
    """Cumulative share of edges, and of whole sides, up to a cosine and up to a norm ratio of their residuals."""
    lines = (("edge", "ablate"), ("edge", "boost"), ("side", "ablate"), ("side", "boost"))
    figure, axes = style.new_figure(7.2, 3.2, columns=2, sharey=True)
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
    return style.save(figure, path, "The residual that a head reads, before and after an intervention")


@style.house_style()
def faithfulness_curves(found: Sequence[Faithfulness], path: str | Path | None = None) -> Figure:
    """Faithfulness over circuit size, firings by falling influence, beside random firings of the same layers."""
    figure, axes = style.new_figure(5.2, 3.4)
    axis = axes[0][0]
    for one, colour in zip(found, SEQUENCE * len(found), strict=False):
        sizes = one.curve["firings"].to_list()
        label = f"{one.ablation}, {one.unit}, MLPs {'kept' if one.mlps == 'keep' else 'ablated'}"
        axis.plot(sizes, one.curve["faithfulness"].to_list(), color=colour, marker="o", ms=3, label=label)
        if one.curve["random"].null_count() == 0:
            axis.plot(
                sizes, one.curve["random"].to_list(), color=colour, linestyle=":", label="random firings"
            )
    axis.axhline(0, color=INK, linewidth=0.6)
    axis.axhline(1, color=INK, linewidth=0.6, linestyle="--")
    axis.set(
        ylabel="faithfulness (1: as the whole model)", xlabel="number of firings kept, by falling influence"
    )
    axis.legend()
    return style.save(figure, path, "How much of the metric the kept firings bring back")


# -- circuits kept alone -------------------------------------------------------------------------------------


LOWEST, HIGHEST = -1.0, 3.0
"""Curves may leave this range (a random set can do anything); the panel does not."""


@style.house_style()
def sufficiency_curves(found: Sufficiency, path: str | Path | None = None) -> Figure:
    """The circuit's curve and those of its baselines; dashed where a circuit is continued by attention."""
    figure, [[axis]] = style.new_figure(8.6, 4.2)
    colours = iter((*SEQUENCE[1:], INK) * (1 + len(found.compared)))
    for name, curve in found.compared.items():
        _line(axis, curve, name, GREY if name == "random" else next(colours), 1.2)
    _line(axis, found.kept, f"this circuit ({found.size} components)", BLUE, 2.4)
    axis.scatter([found.size], [found.sufficiency], s=46, color=BLUE, edgecolor="white", zorder=5)
    axis.axhline(0, color=INK, linewidth=0.6)
    axis.axhline(1, color=INK, linewidth=0.6, linestyle="--")
    low, high = axis.get_ylim()
    axis.set_ylim(max(low, LOWEST), min(high, HIGHEST))
    style.log_scale(axis, "x")
    paired = found.ablation == "counterfactual"
    others = "from the counterfactual prompt" if paired else f"replaced by {found.ablation}"
    axis.set(
        xlabel=f"head components kept, of {len(found.case.places):,}; others {others}",
        ylabel=f"sufficiency: share of the {found.metric}",
    )
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), title="kept in the order of")
    nothing = "counterfactual" if paired else "nothing kept"
    figure.suptitle(
        f"Is the circuit enough? {found.metric} {found.clean:.2f} (1), {nothing} {found.counterfactual:.2f} (0)",
        fontsize=11,
    )
    text = found.circuit.prompt.text or "".join(found.circuit.prompt.tokens)
    axis.set_title(text if len(text) <= 90 else text[:89] + "…", loc="left", fontsize=8)
    return style.save(figure, path)


def _line(axis: Axes, curve: Curve, name: str, colour: str, width: float) -> None:
    """Solid up to what the method ranks itself, dashed beyond."""
    every = sorted(dict([*curve.points, *curve.continued]).items())
    own = [point for point in every if 0 < point[0] <= curve.own]
    beyond = [point for point in every if point[0] >= curve.own]
    label = f"{name}: CPR {curve.cpr:.2f}, CMD {curve.cmd:.2f}"
    axis.plot(*zip(*own, strict=True), color=colour, linewidth=width, marker="o", ms=2.5, label=label)
    if len(beyond) > 1:
        axis.plot(*zip(*beyond, strict=True), color=colour, linewidth=width, linestyle=(0, (3, 2)))


@style.house_style()
def importance_bars(found: Importance, path: str | Path | None = None) -> Figure:
    """The mean loss of each word over its replacements, every replacement as a dot; those that flip are filled."""
    words = found.words
    figure, [[axis]] = style.new_figure(max(4.5, 0.62 * len(words) + 1.5), 3.6)
    for place, word in enumerate(words):
        colour = GREY if word.kind != "content" else BLUE if word.mean >= 0 else VERMILION
        axis.bar(place, word.mean, color=colour, width=0.7, alpha=0.85)
        for change in word.changes:
            face = INK if change.flips else "white"
            axis.scatter(
                [place], [change.effect], s=11, facecolor=face, edgecolor=INK, linewidth=0.6, zorder=3
            )
    axis.axhline(0, color=INK, linewidth=0.6)
    labels = [style.token_label(word.text) for word in words]
    axis.set_xticks(range(len(words)), labels, rotation=45, ha="right")
    axis.set_ylabel(f"lost {style.with_unit(found.root.measure)}")
    return style.save(
        figure,
        path,
        f"What matters for {found.question} ({found.value:.2f})",
        "bar: mean over replacements; dots: each replacement, filled where it flips the answer; grey: function words",
    )


@style.house_style()
def flow_against_patches(report: Report, path: str | Path | None = None) -> Figure:
    """Of a difference circuit, the flow of every node and group beside what patching it to the other run takes away."""
    assert report.patches is not None
    found = report.patches
    figure, [[axis]] = style.new_figure(5.2, 4.4)
    ends: list[float] = [0.0]
    for some, colour, label in ((found.nodes, BLUE, "a node"), (found.groups, ORANGE, "a group")):
        known = [(each.flow, each.measured) for each in some if each.flow is not None]
        x, y = [flow for flow, _ in known], [measured for _, measured in known]
        ends += [*x, *y]
        axis.scatter(x, y, s=18, color=colour, alpha=0.8, label=label)
    random = [(g.flow, g.random) for g in found.groups if g.random is not None and g.flow is not None]
    if random:
        axis.scatter(
            *zip(*random, strict=True), s=18, facecolor="none", edgecolor=GREY, label="as many at random"
        )
    axis.plot([min(ends), max(ends)], [min(ends), max(ends)], color=INK, linewidth=0.7, linestyle=":")
    axis.set_xlabel(f"flow {style.with_unit(report.circuit.root.measure)}")
    axis.set_ylabel("measured: lost with what the other run had")
    axis.legend(frameon=False, fontsize=8)
    how = "" if found.correlation is None else f"correlation {found.correlation:.2f}, "
    note = f"{how}median residual {found.residual or 0.0:.1%} of the difference; the two agree to first order only"
    return style.save(figure, path, "Difference flow against patches", note)


COMPARED = {
    "random": (GREY, ":"),
    "attention": (GREY, "--"),
    "attribution patching": (INK, "--"),
    "integrated gradients": (INK, "-."),
}
"""What circuits are compared with: neither in a colour nor solid."""


@style.house_style()
def sufficiency_by_method(table: pl.DataFrame, path: str | Path | None = None) -> Figure:
    """Median sufficiency over the number of components, a panel per task and a line per method.

    Bands are quartiles, for what is drawn solid.

    ``table`` has a row per task, prompt, method and number of components, with its sufficiency.
    """
    tasks = table["task"].unique(maintain_order=True).to_list()
    methods = table["method"].unique(maintain_order=True).to_list()
    fresh = ((colour, line) for line in ("-", (0, (5, 1)), (0, (1, 1))) for colour in SEQUENCE)
    styles: list[tuple[str, Any]] = [COMPARED[name] if name in COMPARED else next(fresh) for name in methods]
    figure, [axes] = style.new_figure(3.3 * len(tasks) + 1.6, 3.4, columns=len(tasks), sharey=True)
    for axis, task in zip(axes, tasks, strict=True):
        part = table.filter(pl.col("task") == task)
        for method, (colour, dashes) in zip(methods, styles, strict=True):
            rows = part.filter(method=method).group_by("components").agg(
                pl.col("sufficiency").median().alias("median"),
                pl.col("sufficiency").quantile(0.25, "linear").alias("low"),
                pl.col("sufficiency").quantile(0.75, "linear").alias("high"),
            ).sort("components")  # fmt: skip
            x = rows["components"].to_list()
            axis.plot(
                x,
                rows["median"].to_list(),
                color=colour,
                linestyle=dashes,
                marker="o",
                ms=3,
                label=method,
            )
            if dashes == "-":  # bands of all would hide each other
                axis.fill_between(x, rows["low"].to_list(), rows["high"].to_list(), color=colour, alpha=0.12)
        axis.axhline(0, color=INK, linewidth=0.6)
        axis.axhline(1, color=INK, linewidth=0.6, linestyle="--")
        style.log_scale(axis, "x")
        # The sizes that were measured; powers of ten and what lies between them would be none of these.
        axis.set_xticks(sizes := sorted(part["components"].unique().to_list()), list(map(str, sizes)))
        axis.minorticks_off()
        axis.set(title=f"{task} ({part['prompt'].n_unique()} prompts)", xlabel="head components kept")
    low, high = axes[0].get_ylim()
    axes[0].set(ylim=(max(low, LOWEST), min(high, HIGHEST)), ylabel="median sufficiency")
    axes[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    title = "What is enough: components kept, all others from a counterfactual prompt"
    return style.save(figure, path, title if len(tasks) > 1 else title.replace(": ", ":\n"))
