"""Figures of interventions: what claimed signals do, beside random channels of the same head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headtrace.figures.style import BLUE, GREY, INK, VERMILION, house_style, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from headtrace.causal import Report


def violins(axis: Axes, groups: Sequence[tuple[str, Sequence[float], str]]) -> None:
    """One violin per (label, values, colour), with every value as a point and the mean as a white diamond.

    Effects are mostly tiny and sometimes large, so the axis is linear around zero and logarithmic beyond (symlog).
    """
    reach = max((abs(v) for _, values, _ in groups for v in values), default=1.0) or 1.0
    linear = max(
        reach * 1e-3, float(np.median([abs(v) for v in groups[0][1]] or [reach])) / 10
    )  # where most of the first group still shows
    axis.set_yscale("symlog", linthresh=linear, linscale=0.6)
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


def _density(data: Any, linear: float) -> tuple[Any, Any] | None:
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
        figure, axes = new_figure(3.7 * len(names) + 0.6, 3.6, columns=len(names))
        for axis, name in zip(axes[0], names, strict=True):
            groups: list[tuple[str, list[float], str]] = []
            for action, colour in (("ablate", VERMILION), ("boost", BLUE)):
                own = [v for e in effects if (v := getattr(e, f"{action}_{name}")) is not None]
                random = [v for e in effects for v in getattr(e, f"control_{action}_{name}") if v is not None]
                groups += [(action, own, colour), (f"{action}\nrandom", random, GREY)]
            violins(axis, [g for g in groups if g[1]])
            axis.set_title(f"change of {'attention' if name == 'attention' else metric}", loc="left")
        first = reports[0] if reports else None
        how = "" if first is None else f" ({first.reach}, scope {first.scope})"
        figure.suptitle(f"{len(effects)} edges{how}: claimed signals and random channels", fontsize=11)
        return save(figure, path)
