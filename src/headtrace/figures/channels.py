"""Figures of one firing and its channels: terms, causes, two sources compared, pairs of writers, sparsity."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from headtrace.figures import style
from headtrace.figures.style import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    SIGNED,
    VERMILION,
    house_style,
    new_figure,
    save,
    token_label,
)
from headtrace.vocabulary import ATTENTION_SIDES, head_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from headtrace.channels import Decomposition
    from headtrace.channels.emergence import Emergence
    from headtrace.tracing.causes import Explanation
    from headtrace.tracing.pairs import Pairs
    from headtrace.tracing.rather_than import RatherThan


@style.house_style()
def plot_decomposition(why: Decomposition, path: str | Path | None = None) -> Figure:
    """A firing's terms per channel: of the logit (signal set marked) and of relative attention (n_recon)."""
    dest, src = (f"{style.token_label(why.tokens[i])} ({i})" for i in (why.firing.dest, why.firing.src))
    recon = set(why.relative_terms.argsort(descending=True)[: why.n_recon].tolist())
    rest = (
        ""
        if why.rank == len(why.terms)
        else f", {why.remainder:.2f} outside the {why.rank} channels of this head"
    )
    figure, axes = style.new_figure(7.2, 4.6, rows=2, sharex=True)
    figure.suptitle(
        f"{head_name(why.firing.layer, why.firing.head)}: {dest} attends to {src}, "
        f"attention {why.attention:.2f}",
        fontsize=11,
    )
    bars(axes[0][0], why.terms.tolist(), set(why.signal_set), VERMILION)
    axes[0][0].set(
        ylabel="attention logit",
        title=f"logit {why.logit:.2f} = sum of bars{rest}; signal set of {len(why.signal_set)} marked",
    )
    bars(axes[1][0], why.relative_terms.tolist(), recon, BLUE)
    axes[1][0].set(
        ylabel="relative attention",
        xlabel="channel, by falling singular value",
        title=f"relative attention {why.relative:.2f}: n_recon {why.n_recon} marked, "
        f"sparseness {why.sparseness:.2f}",
    )
    return style.save(figure, path)


def bars(axis: Axes, values: list[float], marked: set[int], colour: str, label: bool = True) -> None:
    """Bars per channel; marked ones in colour, hatched and numbered, so that print in grey shows them too."""
    shown = [k in marked for k in range(len(values))]
    axis.bar(
        range(len(values)),
        values,
        color=[colour if m else GREY for m in shown],
        hatch=["////" if m else "" for m in shown],
        edgecolor=["white" if m else GREY for m in shown],
        linewidth=0,
        width=0.85,
    )
    axis.axhline(0, color=INK, linewidth=0.6)
    axis.margins(x=0.01, y=0.15)
    for k in sorted(marked, key=lambda k: -abs(values[k]))[: 6 if label else 0]:
        up = values[k] >= 0
        axis.annotate(
            str(k),
            (k, values[k]),
            xytext=(0, 2 if up else -2),
            textcoords="offset points",
            ha="center",
            va="bottom" if up else "top",
            fontsize=7,
            color=INK,
        )


LINES = (
    ("true", "singular basis", VERMILION, "-", "o"),
    ("basis", "rotated basis, same logit", BLUE, "--", "s"),
    ("spectrum", "rotated U and V, same spectrum", ORANGE, ":", "^"),
)
LABELS = {"sparseness": "sparseness (smaller is sparser)", "n_recon": "channels to reconstruct (n_recon)"}


@style.house_style()
def plot_emergence(found: Emergence, path: str | Path | None = None, title: str = "") -> Figure:
    """Sparseness and n_recon at each checkpoint: means over heads, shaded 95% intervals, true and rotated."""
    summary = found.summary()
    figure, axes = style.new_figure(7.2, 3.5, columns=2)
    for axis, measure in zip(axes[0], ("sparseness", "n_recon"), strict=True):
        _lines(axis, summary.filter(pl.col("measure") == measure), found.checkpoints)
        axis.set_ylabel(LABELS[measure])
    heads = found.frame.select("layer", "head").n_unique()
    handles, labels = axes[0][0].get_legend_handles_labels()
    note = "Lines: means over heads; bands: 95% intervals."
    figure.legend(handles, labels, loc="outside lower center", ncols=3, title=note, title_fontsize=8)
    shown = title or f"{len(found.cases)} firings of {heads} heads over training"
    return style.save(figure, path, shown)


def _lines(axis: Axes, rows: pl.DataFrame, checkpoints: list[str]) -> None:
    """Against the training step where checkpoints have one (early steps spread out), else in order."""
    steps = rows["step"].to_list()
    numbered = None not in steps and len(set(steps)) == len(checkpoints)
    for basis, label, colour, line, marker in LINES:
        part = rows.filter(pl.col("basis") == basis)
        if part.is_empty():
            continue
        x = part["step"].to_list() if numbered else [checkpoints.index(c) for c in part["checkpoint"]]
        axis.plot(x, part["mean"], color=colour, linestyle=line, marker=marker, markersize=3, label=label)
        interval = part.with_columns(x=pl.Series(x)).drop_nulls(["low", "high"])
        axis.fill_between(
            interval["x"].to_numpy(),
            interval["low"].to_numpy(),
            interval["high"].to_numpy(),
            color=colour,
            alpha=0.18,
            linewidth=0,
        )
    if not numbered:
        axis.set_xticks(range(len(checkpoints)), checkpoints, rotation=45, ha="right")
        axis.set_xlabel("checkpoint")
        return
    positive = sorted({s for s in steps if s > 0})
    if positive and positive[-1] / positive[0] >= 30:
        axis.set_xscale("symlog", linthresh=positive[0])
        axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("training step")


@style.house_style()
def plot_early_and_late(
    found: Emergence, cases: list[int] | None = None, path: str | Path | None = None
) -> Figure:
    """Terms of relative attention of some firings: first checkpoint, last one, and the last one rotated."""
    if cases is None:
        last = found.frame.filter(pl.col("checkpoint") == found.checkpoints[-1])
        chosen = last.sort("sparseness")["case"].head(4).to_list()
    else:
        chosen = cases
    figure, axes = style.new_figure(2.1 * len(chosen) + 0.6, 4.4, rows=3, columns=len(chosen), sharex=True)
    stages = (
        (found.checkpoints[0], found.relative_terms[0]),
        (found.checkpoints[-1], found.relative_terms[-1]),
        ("rotated U and V", found.rotated_terms),
    )
    for column, case in enumerate(chosen):
        f, (dest, src) = found.cases[case].firing, found.labels[case]
        name = found.cases[case].name or head_name(f.layer, f.head)
        for row, (stage, terms) in enumerate(stages):
            values = terms[case].tolist()
            largest = max(range(len(values)), key=lambda k: values[k])
            bars(axes[row][column], values, {largest}, (GREY, VERMILION, ORANGE)[row] if row else BLUE)
            if column == 0:
                axes[row][0].set_ylabel(f"relative attention\n{stage}", fontsize=8)
        axes[0][column].set_title(
            f"{name}\n{style.token_label(dest, 10)} → {style.token_label(src, 10)}", loc="left", fontsize=9
        )
        axes[2][column].set_xlabel("channel")
    return style.save(
        figure,
        path,
        "Terms of relative attention, early and late in training",
        "In colour: the largest term.",
    )


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
