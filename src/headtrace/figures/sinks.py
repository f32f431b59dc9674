"""Sinks: where attention goes, how alike heads' signals are, and what is left without what they share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from headtrace.figures import style
from headtrace.figures.style import BLUE, GREY, HEAT, INK, SEQUENCE, SIGNED, VERMILION

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from headtrace.sinks.result import Sinks

_SIDES = {"query": "destination (query) signals", "key": "source (key) signals"}
_MEASURES = {
    "sink mass": "mean attention on sinks",
    "loss": "next-token loss (nats)",
    "logit difference": "logit difference (logits)",
    "accuracy": "right over wrong (share)",
}
_COLOURS = {"first": BLUE, "itself": GREY}


@style.house_style()
def sink_masses(found: Sinks, path: str | Path | None = None) -> Figure:
    """Each head's attention on sinks, layer by layer; and what kinds of tokens a layer's attention goes to."""
    sinks, kinds = found.mass.filter(kind="sinks"), found.mass.filter(pl.col("kind") != "sinks")
    layers, heads = sinks["layer"].n_unique(), sinks["head"].n_unique()
    tall = max(3.2, 0.13 * layers + 1.4)
    figure, [[left, right]] = style.new_figure(8.6, tall, columns=2, width_ratios=(max(heads * 0.22, 2), 5))
    shown = sinks.sort("layer", "head")["mass"].to_numpy().reshape(layers, heads)
    image = left.imshow(shown, vmin=0, vmax=1, cmap=HEAT, aspect="auto", origin="lower")
    left.set(xlabel="head", ylabel="layer", title="mass on sinks, by head")
    left.set_xticks(range(0, heads, max(1, heads // 8)))
    figure.colorbar(image, ax=left, label="share of attention", shrink=0.8)
    rest, base = iter(SEQUENCE[1:]), np.zeros(layers)
    names = {"first": "the first token", "itself": "the destination itself"}
    for kind in kinds["kind"].unique(maintain_order=True):
        by_layer = kinds.filter(kind=kind).group_by("layer").agg(pl.col("mass").mean()).sort("layer")["mass"]
        widths = by_layer.to_numpy()
        if widths.max() >= 1e-3:
            colour, label = _COLOURS.get(kind) or next(rest), names.get(kind, kind)
            right.barh(range(layers), widths, left=base, height=0.9, color=colour, label=label)
            base = base + widths
    right.set(
        xlim=(0, 1),
        ylim=(-0.5, layers - 0.5),
        xlabel="share of attention, mean over heads",
        ylabel="layer",
        title="where a layer's attention goes",
    )
    right.legend(loc="center left", bbox_to_anchor=(1, 0.5), title="attention to")
    return style.save(
        figure,
        path,
        f"Attention sinks of {found.model['name']}: {sum(found.settings.prompts.values())} prompts, mean mass on "
        f"sinks {found.sink_mass:.2f}",
        f"sinks: {_named_sinks(found)}. Means over destinations past the first token, then over prompts.",
    )


def _named_sinks(found: Sinks) -> str:
    ids = list(found.settings.sinks)
    others = found.tokens.filter(pl.col("token_id").is_in(ids))["token"].to_list()
    if not others:
        return f"the first token (no other receives {found.settings.threshold:g} or more)"
    return f"the first token and {', '.join(map(repr, others[:6]))}"


@style.house_style()
def signal_cosines(found: Sinks, path: str | Path | None = None) -> Figure:
    """Cosines between the heads' mean signals: destination signals on the left, source signals on the right."""
    figure, [axes] = style.new_figure(10.6, 5.4, columns=2)
    image: Any = None
    for axis, side in zip(axes, ("query", "key"), strict=True):
        mean = found.means[side]
        values = mean.cosines().double().numpy()
        image = axis.imshow(values, vmin=-1, vmax=1, cmap=SIGNED, interpolation="nearest")
        _layer_ticks(axis, [layer for layer, _ in mean.heads])
        shared = found.directions.filter(side=side)
        most = shared["shared"][0] if len(shared) else 0
        axis.set(
            title=f"{_SIDES[side]}: {len(mean.heads)} heads,\n{most} within |cosine| ≥ 0.9 of the first direction",
            xlabel="head, by layer",
            ylabel="head, by layer",
        )
    figure.colorbar(image, ax=axes, label="cosine between mean signals", shrink=0.8)
    return style.save(
        figure,
        path,
        f"Do heads share the signals that send them to sinks? {found.model['name']}",
        "One row and column per head, in order of layers (labels at a layer's first head). "
        "A block of red: heads that are sent to sinks by the same signal.",
    )


def _layer_ticks(axis: Axes, layers: list[int]) -> None:
    """A label where a layer begins, but not one on top of another."""
    starts = [i for i, layer in enumerate(layers) if i == 0 or layers[i - 1] != layer]
    shown: list[int] = []
    for start in starts:
        if not shown or start - shown[-1] >= max(1, len(layers) / 18):
            shown.append(start)
    names = [f"L{layers[i]}" for i in shown]
    axis.set_xticks(shown, names, rotation=90)
    axis.set_yticks(shown, names)


@style.house_style()
def signal_constancy(found: Sinks, path: str | Path | None = None) -> Figure:
    """How constant each head's signal is over prompts, by layer; and how few directions explain all of them."""
    over = "prompts of different tasks" if len(found.settings.prompts) > 1 else "prompts"
    figure, [[left, right]] = style.new_figure(9.6, 3.8, columns=2, width_ratios=(3, 2))
    for side, colour, shift in (("query", BLUE, -0.15), ("key", VERMILION, 0.15)):
        rows = found.constancy.filter(side=side).drop_nulls("constancy")
        x = [layer + shift for layer in rows["layer"].to_list()]
        left.vlines(x, rows["low"].to_list(), rows["high"].to_list(), color=colour, alpha=0.25, linewidth=0.8)
        left.scatter(x, rows["constancy"].to_list(), s=9, color=colour, label=_SIDES[side])
        share = found.directions.filter(side=side)
        right.plot(
            (share["direction"] + 1).to_list(),
            share["cumulative"].to_list(),
            color=colour,
            marker="o",
            ms=3,
            label=_SIDES[side],
        )
    left.axhline(0, color=INK, linewidth=0.6)
    left.set(
        xlabel="layer",
        ylabel=f"mean cosine over {over}",
        ylim=(min(0, left.get_ylim()[0]), 1.03),
        title="constancy of each head's signal (bars: 95 % over prompts)",
    )
    right.set(
        xlabel="number of common directions",
        ylabel="share of the mean signals explained",
        ylim=(0, 1.03),
        title="what few directions explain",
    )
    right.legend(loc="upper left")
    return style.save(
        figure, path, f"How constant are the signals that send heads to sinks? {found.model['name']}"
    )


@style.house_style()
def sink_collapse(found: Sinks, path: str | Path | None = None) -> Figure:
    """Sink attention, loss and task as directions are removed, beside random directions of the same size."""
    table = found.collapse.filter(task="all")
    measures = [m for m in _MEASURES if m != "accuracy" and len(table.filter(measure=m))]
    sides = ("query", "key", "both")
    figure, axes = style.new_figure(
        9.2, 1.2 + 2.1 * len(measures), rows=len(measures), columns=3, sharey="row"
    )
    for row, measure in zip(axes, measures, strict=True):
        clean = table.filter(measure=measure, removed="nothing")["mean"][0]
        for axis, side in zip(row, sides, strict=True):
            for removed, colour, name in (
                ("signals", VERMILION, "the signals' directions"),
                ("random", GREY, "random directions"),
            ):
                mine = table.filter(measure=measure, side=side, removed=removed).sort("directions")
                x = [str(k) for k in mine["directions"].to_list()]
                axis.plot(x, mine["mean"].to_list(), color=colour, marker="o", ms=4, label=name)
                axis.fill_between(x, mine["low"].to_list(), mine["high"].to_list(), color=colour, alpha=0.15)
            axis.axhline(clean, color=INK, linewidth=0.8, linestyle="--", label="nothing removed")
            if measure == "sink mass":
                axis.set_ylim(0, 1)
        row[0].set_ylabel(_MEASURES[measure])
    for axis, side in zip(axes[0], sides, strict=True):
        where = {
            "query": "from what queries read",
            "key": "from what the sinks' keys read",
            "both": "from both",
        }
        axis.set_title(where[side])
    for axis in axes[-1]:
        axis.set_xlabel("directions removed")
    axes[0][-1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return style.save(
        figure,
        path,
        f"What is left without the common directions of sink signals? {found.model['name']}",
        "Removed inside the running model, norms live. Bands: 95 % over prompts. "
        "Random: as many directions, as much of each token's length.",
    )
