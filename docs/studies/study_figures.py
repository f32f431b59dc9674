"""Figures that only the studies draw: channels in use, signal sizes, token strengths, condition numbers, curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from headtrace.figures.style import (
    BLUE,
    GREY,
    HEAT,
    INK,
    ORANGE,
    VERMILION,
    house_style,
    new_figure,
    save,
    token_label,
)
from headtrace.vocabulary import head_name

if TYPE_CHECKING:
    from docs.studies.survey import Survey
    from matplotlib.figure import Figure

    from headtrace.models import Model


def plot_slices_used(
    found: Survey, heads: Sequence[tuple[int, int]], path: str | Path | None = None
) -> Figure:
    """Which channels are in a head's signal sets, prompt by prompt, where it fires and where it does not."""
    with house_style():
        figure, axes = new_figure(
            2.3 * len(heads) + 0.9, 4.6, rows=2, columns=len(heads), sharex=True, sharey=True
        )
        for column, (layer, head) in enumerate(heads):
            for row, fires in enumerate((True, False)):
                used = found.slices_used(layer, head, fires=fires).numpy()
                axis = axes[row][column]
                axis.set_facecolor("#DDDDDD")  # prompts without such a pair
                axis.imshow(
                    used, aspect="auto", cmap=HEAT, vmin=0, vmax=1, interpolation="nearest", origin="upper"
                )
                count = len(found.rows_of(layer, head, fires=fires))
                axis.set_title(
                    f"{head_name(layer, head)} {'fires' if fires else 'does not fire'} ({count})",
                    loc="left",
                    fontsize=9,
                )
            axes[1][column].set_xlabel("channel")
        for row in (0, 1):
            axes[row][0].set_ylabel("prompt")
        figure.colorbar(
            axes[0][0].images[0],
            ax=[a for row in axes for a in row],
            label="share of pairs whose signal set\nhas the channel",
            pad=0.01,
        )
        return save(
            figure,
            path,
            "Channels in the signal sets of some heads",
            "Grey: a prompt without such a token pair.",
        )


def plot_signal_sizes(found: Survey, path: str | Path | None = None) -> Figure:
    """How many channels a signal set has, where heads fire and where not: all pairs, and head by head."""
    width = found.signal_sets.shape[1]
    sizes = {fires: np.array(found.sizes(fires=fires)) for fires in (True, False)}
    with house_style():
        figure, axes = new_figure(7.2, 3.2, columns=2)
        axis = axes[0][0]
        steps = np.arange(width + 2) - 0.5
        for fires, colour, style in ((True, VERMILION, "-"), (False, BLUE, "--")):
            name = "firing" if fires else "not firing"
            share = np.histogram(sizes[fires], steps)[0] / max(1, len(sizes[fires]))
            label = f"{name}: median {np.median(sizes[fires]):.0f} (n = {len(sizes[fires]):,})"
            axis.stairs(share, steps, color=colour, linestyle=style, linewidth=1.6, label=label)
        axis.set_xlabel(f"signal-set size, of {width} channels")
        axis.set_ylabel("share of token pairs")
        axis.legend()
        axis.set_title("all heads", loc="left")
        table = found.heads.filter((pl.col("firings") > 0) & pl.col("signal_size_quiet").is_not_null())
        axis = axes[0][1]
        axis.plot([0, width], [0, width], color=GREY, linewidth=0.8)
        points = axis.scatter(
            table["signal_size_quiet"], table["signal_size"], c=table["layer"], cmap=HEAT, s=14, linewidths=0
        )
        figure.colorbar(points, ax=axis, label="layer")
        top = float(max(table["signal_size"].max() or 1, table["signal_size_quiet"].max() or 1))  # type: ignore[arg-type]
        axis.set_xlim(0, top + 1)
        axis.set_ylim(0, top + 1)
        axis.set_xlabel("median size (channels), not firing")
        axis.set_ylabel("median size (channels), firing")
        axis.set_title("one point per head", loc="left")
        return save(figure, path, "How many channels a signal set has")


def plot_token_strengths(
    strengths: pl.DataFrame, group: str, title: str, path: str | Path | None = None, most: int = 60
) -> Figure:
    """Tokens by their mean strength in a head's consensus subspace; one group in colour, hatched.

    Of more than ``most`` tokens those that occur most often are shown, half of them of the group.
    """
    if strengths.height > most:
        often, member = strengths.sort("n", "token", descending=[True, False]), pl.col("group") == group
        strengths = pl.concat(
            [often.filter(member).head(most // 2), often.filter(~member).head(most - most // 2)]
        )
    shown = strengths.sort("strength", descending=True)
    inside = [g == group for g in shown["group"]]
    with house_style():
        from matplotlib.patches import Patch

        figure, axes = new_figure(max(5.0, 0.14 * len(shown) + 1), 3.2)
        axis = axes[0][0]
        axis.bar(
            range(len(shown)),
            shown["strength"],
            color=[VERMILION if m else BLUE for m in inside],
            hatch=["////" if m else "" for m in inside],
            edgecolor="white",
            linewidth=0,
        )
        axis.set_xticks(range(len(shown)), [token_label(t) for t in shown["token"]], rotation=90, fontsize=7)
        axis.set_ylabel("mean strength |P x|")
        axis.set_xlabel("token, by falling strength")
        axis.margins(x=0.01)
        axis.set_title(title, loc="left")
        axis.legend(
            handles=[
                Patch(facecolor=VERMILION, hatch="////", edgecolor="white", label=group),
                Patch(facecolor=BLUE, label="other tokens"),
            ]
        )
        return save(figure, path)


def plot_rotations(found: Survey, path: str | Path | None = None) -> Figure:
    """Sparseness in the true basis and under both rotations: distributions over firings, and head by head."""
    firing = found.frame.filter(pl.col("fires"))
    kinds = (
        ("sparseness", "true basis", VERMILION, "-"),
        ("sparseness_basis", "rotated basis, same logit", BLUE, "--"),
        ("sparseness_spectrum", "rotated U and V, same spectrum", ORANGE, ":"),
    )
    with house_style():
        figure, axes = new_figure(7.2, 3.2, columns=2)
        axis = axes[0][0]
        steps = np.linspace(0, 0.8, 41)
        for column, name, colour, style in kinds:
            values = firing[column].to_numpy()
            share = np.histogram(values, steps)[0] / len(values)
            label = f"{name}: median {np.median(values):.2f}"
            axis.stairs(share, steps, color=colour, linestyle=style, linewidth=1.6, label=label)
        axis.set_ylim(0, axis.get_ylim()[1] * 1.35)
        axis.legend(loc="upper right")
        axis.set_xlabel("sparseness of relative attention (smaller is sparser)")
        axis.set_ylabel("share of firings")
        axis.set_title(f"{len(firing):,} firings", loc="left")
        heads = firing.group_by("layer", "head").agg(pl.col(c).mean() for c, *_ in kinds)
        axis = axes[0][1]
        for (column, name, colour, _), marker in zip(kinds[1:], ("o", "^"), strict=True):
            axis.scatter(
                heads[column],
                heads["sparseness"],
                s=12,
                color=colour,
                marker=marker,
                alpha=0.7,
                linewidths=0,
                label=name,
            )
        low, high = 0.0, float(max(heads[c].max() or 0 for c, *_ in kinds)) * 1.05  # type: ignore[arg-type]
        axis.plot([low, high], [low, high], color=INK, linewidth=0.8)
        axis.set_xlim(low, high)
        axis.set_ylim(low, high * 1.2)
        axis.set_xlabel("mean sparseness, rotated")
        axis.set_ylabel("mean sparseness, true basis")
        axis.set_title(f"{len(heads)} heads: below the line is sparser", loc="left")
        axis.legend(loc="upper left")
        return save(figure, path, "Sparseness in the head's own basis and in rotated ones")


def plot_condition_numbers(model: Model, path: str | Path | None = None) -> Figure:
    """Condition numbers of every W_Q and W_K as heat maps: layers up, heads across, one scale for both."""
    from headtrace.channels import condition_numbers

    pair = [numbers.numpy() for numbers in condition_numbers(model)]
    finite = np.concatenate([n[np.isfinite(n)] for n in pair])
    with house_style():
        from matplotlib.colors import LogNorm

        height = max(2.6, 0.17 * model.n_layers + 1.2)
        figure, axes = new_figure(
            7.2, height, columns=2, sharey=True, width_ratios=[float(n.shape[1]) for n in pair]
        )
        norm = LogNorm(vmin=max(1.0, float(finite.min())), vmax=float(finite.max()))
        for axis, numbers, name in zip(axes[0], pair, ("W_Q", "W_K"), strict=True):
            axis.imshow(numbers, origin="lower", aspect="auto", cmap=HEAT, norm=norm)
            axis.set_title(
                f"{name}\nmedian {np.median(numbers):.0f}, largest {numbers.max():.0f}", loc="left"
            )
            axis.set_xlabel(
                "head" if name == "W_Q" or model.n_kv_heads == model.n_heads else "key-value head"
            )
            axis.set_xticks(range(0, numbers.shape[1], 1 + numbers.shape[1] // 13))
            for layer, head in zip(*np.nonzero(~np.isfinite(numbers)), strict=True):
                axis.text(head, layer, "∞", ha="center", va="center", fontsize=7)  # rank-deficient
        axes[0][0].set_ylabel("layer")
        figure.colorbar(axes[0][0].images[0], ax=axes[0], label="condition number", format="%g", pad=0.02)
        figure.suptitle(f"{Path(model.name).name}: how far each head is from low rank", fontsize=11)
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
            axis.axhline(0, color=INK, linewidth=0.6)
            axis.axhline(1, color=INK, linewidth=0.6, linestyle="--")
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
        return save(
            figure, path, f"Keeping only the circuit: share of the {metric} that attention brings", note
        )
