"""Is a circuit enough: sufficiency over the number of components kept, beside the baselines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from headtrace.figures.style import BLUE, GREY, INK, SEQUENCE, house_style, log_scale, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from headtrace.causal.sufficiency_result import Curve, Sufficiency

LOWEST, HIGHEST = -1.0, 3.0
"""Curves may leave this range (a random set can do anything); the panel does not."""


def sufficiency_curves(found: Sufficiency, path: str | Path | None = None) -> Figure:
    """The circuit's curve and those of its baselines; dashed where a circuit is continued by attention."""
    with house_style():
        figure, [[axis]] = new_figure(8.6, 4.2)
        colours = iter((*SEQUENCE[1:], INK) * (1 + len(found.compared)))
        for name, curve in found.compared.items():
            _line(axis, curve, name, GREY if name == "random" else next(colours), 1.2)
        _line(axis, found.kept, f"this circuit ({found.size} components)", BLUE, 2.4)
        axis.scatter([found.size], [found.sufficiency], s=46, color=BLUE, edgecolor="white", zorder=5)
        axis.axhline(0, color=INK, linewidth=0.6)
        axis.axhline(1, color=INK, linewidth=0.6, linestyle="--")
        low, high = axis.get_ylim()
        axis.set_ylim(max(low, LOWEST), min(high, HIGHEST))
        log_scale(axis, "x")
        axis.set_xlabel(f"head components kept, of {len(found.case.places):,}; others {_rest(found)}")
        axis.set_ylabel(f"sufficiency: share of the {found.metric}")
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), title="kept in the order of")
        nothing = "counterfactual" if found.ablation == "counterfactual" else "nothing kept"
        figure.suptitle(
            f"Is the circuit enough? {found.metric} {found.clean:.2f} (1), {nothing} {found.counterfactual:.2f} (0)",
            fontsize=11,
        )
        axis.set_title(
            _short(found.circuit.prompt.text or "".join(found.circuit.prompt.tokens)), loc="left", fontsize=8
        )
        return save(figure, path)


def _line(axis: Axes, curve: Curve, name: str, colour: str, width: float) -> None:
    """Solid up to what the method ranks itself, dashed beyond."""
    every = sorted(dict([*curve.points, *curve.continued]).items())
    own = [point for point in every if 0 < point[0] <= curve.own]
    beyond = [point for point in every if point[0] >= curve.own]
    label = f"{name}: CPR {curve.cpr:.2f}, CMD {curve.cmd:.2f}"
    axis.plot(*zip(*own, strict=True), color=colour, linewidth=width, marker="o", ms=2.5, label=label)
    if len(beyond) > 1:
        axis.plot(*zip(*beyond, strict=True), color=colour, linewidth=width, linestyle=(0, (3, 2)))


def _rest(found: Sufficiency) -> str:
    if found.ablation == "counterfactual":
        return "from the counterfactual prompt"
    return f"replaced by {found.ablation}"


def _short(text: str, width: int = 90) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


COMPARED = {
    "random": (GREY, ":"),
    "attention": (GREY, "--"),
    "attribution patching": (INK, "--"),
    "integrated gradients": (INK, "-."),
}
"""What circuits are compared with: neither in a colour nor solid."""


def _styles(methods: Sequence[str]) -> list[tuple[str, Any]]:
    """A colour and a line for each method: no two alike."""
    fresh = ((colour, line) for line in ("-", (0, (5, 1)), (0, (1, 1))) for colour in SEQUENCE)
    return [COMPARED[method] if method in COMPARED else next(fresh) for method in methods]


def sufficiency_by_method(table: pl.DataFrame, path: str | Path | None = None) -> Figure:
    """Median sufficiency over the number of components, a panel per task and a line per method.

    Bands are quartiles, for what is drawn solid.

    ``table`` has a row per task, prompt, method and number of components, with its sufficiency.
    """
    tasks = table["task"].unique(maintain_order=True).to_list()
    methods = table["method"].unique(maintain_order=True).to_list()
    with house_style():
        figure, [axes] = new_figure(3.3 * len(tasks) + 1.6, 3.4, columns=len(tasks), sharey=True)
        for axis, task in zip(axes, tasks, strict=True):
            part = table.filter(pl.col("task") == task)
            for method, (colour, dashes) in zip(methods, _styles(methods), strict=True):
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
                    axis.fill_between(
                        x, rows["low"].to_list(), rows["high"].to_list(), color=colour, alpha=0.12
                    )
            axis.axhline(0, color=INK, linewidth=0.6)
            axis.axhline(1, color=INK, linewidth=0.6, linestyle="--")
            log_scale(axis, "x")
            axis.set_title(f"{task} ({part['prompt'].n_unique()} prompts)", loc="left")
            axis.set_xlabel("head components kept")
        low, high = axes[0].get_ylim()
        axes[0].set_ylim(max(low, LOWEST), min(high, HIGHEST))
        axes[0].set_ylabel("median sufficiency")
        axes[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
        figure.suptitle(
            "What is enough: components kept, all others from a counterfactual prompt", fontsize=11
        )
        return save(figure, path)
