"""Explanations of one firing as figures: causes, terms of a ratio of attentions, pairs of writers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headtrace.figures.style import BLUE, INK, SIGNED, VERMILION, house_style, new_figure, save, token_label
from headtrace.vocabulary import ATTENTION_SIDES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from headtrace.tracing.causes import Explanation
    from headtrace.tracing.pairs import Pairs
    from headtrace.tracing.rather_than import RatherThan


def _bars(axes: Axes, names: Sequence[str], values: Sequence[float], unit: str) -> None:
    colours = [BLUE if value >= 0 else VERMILION for value in values]
    axes.barh(range(len(values)), values, color=colours)
    axes.set_yticks(range(len(names)), [token_label(name, 34) for name in names])
    axes.invert_yaxis()
    axes.axvline(0, color=INK, linewidth=0.6)
    axes.set_xlabel(unit)


def plot_causes(why: Explanation, path: str | Path | None = None, k: int = 10) -> Figure:
    """The strongest causes of both sides: the attention that removing each takes away."""
    with house_style():
        figure, axes = new_figure(9, 3.4, columns=2)
        for side, ax in zip(ATTENTION_SIDES, axes[0], strict=True):
            causes = sorted(why.found.side(side).causes, key=lambda cause: -cause.weight)[:k]
            _bars(ax, [why.place(cause) for cause in causes], [cause.weight for cause in causes], "attention")
            ax.set_title(f"{side} side")
        dest, src = (token_label(why.tokens[i]) for i in (why.firing.dest, why.firing.src))
        figure.suptitle(f"Why {why.firing}, {dest} to {src}, attends with {why.attention:.2f}", fontsize=10)
        return save(figure, path)


def plot_rather_than(why: RatherThan, k: int = 10, path: str | Path | None = None) -> Figure:
    """The largest terms of a ratio of attentions on both sides, and all others as one bar."""
    with house_style():
        figure, axes = new_figure(9, 3.6, columns=2)
        for side, ax in zip(ATTENTION_SIDES, axes[0], strict=True):
            terms = why.top(k, side)
            values = [term.value for term in terms]
            rest = why.sum(side) - sum(values)
            _bars(ax, [*map(why.place, terms), "all others"], [*values, rest], "ln ratio of attentions")
            ax.set_title(f"{side} side, {why.sum(side):+.2f} in all")
        here, there = (token_label(why.tokens[i]) for i in (why.firing.src, why.other.src))
        figure.suptitle(
            f"{why.firing}: {here} ({why.attention:.3g}) rather than {there} ({why.other_attention:.3g})",
            fontsize=10,
        )
        return save(figure, path)


def plot_pairs(pairs: Pairs, path: str | Path | None = None, k: int = 12) -> Figure:
    """Writers of the query down, writers of the key across; of many, those of the largest pairs."""
    rows, columns = pairs.queries[:k], pairs.keys[:k]
    values = pairs.matrix[: len(rows), : len(columns)].cpu()
    size = max(float(values.abs().max()), 1e-12)
    with house_style():
        figure, ((ax,),) = new_figure(3.2 + 0.5 * len(columns), 2.2 + 0.34 * len(rows))
        image = ax.imshow(values.numpy(), cmap=SIGNED, vmin=-size, vmax=size, aspect="auto")
        across = [token_label(pairs.key_name(component), 26) for component in columns]
        ax.set_xticks(range(len(columns)), across, rotation=40, ha="right")
        ax.set_yticks(range(len(rows)), [token_label(pairs.query_name(component), 26) for component in rows])
        ax.set_xlabel("wrote the key")
        ax.set_ylabel("wrote the query")
        figure.colorbar(image, ax=ax, label="score (before softmax)")
        than = "" if pairs.other is None else f" rather than {token_label(pairs.tokens[pairs.other.src])}"
        ax.set_title(f"{pairs.firing}{than}: {pairs.total:+.2f} in all, {pairs.remainder:+.2f} not shown")
        return save(figure, path)
