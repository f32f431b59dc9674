"""Figures of one firing and of one model: terms per channel, condition numbers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headtrace.figures.style import (
    BLUE,
    GREY,
    HEAT,
    INK,
    VERMILION,
    house_style,
    new_figure,
    save,
    token_label,
)
from headtrace.vocabulary import head_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from headtrace.channels import Decomposition
    from headtrace.models import Model


def plot_decomposition(why: Decomposition, path: str | Path | None = None) -> Figure:
    """A firing's terms per channel: of the logit (signal set marked) and of relative attention (n_recon)."""
    dest, src = (f"{token_label(why.tokens[i])} ({i})" for i in (why.firing.dest, why.firing.src))
    recon = set(why.relative_terms.argsort(descending=True)[: why.n_recon].tolist())
    rest = (
        ""
        if why.rank == len(why.terms)
        else f", {why.remainder:.2f} outside the {why.rank} channels of this head"
    )
    with house_style():
        figure, axes = new_figure(7.2, 4.6, rows=2, sharex=True)
        figure.suptitle(
            f"{head_name(why.firing.layer, why.firing.head)}: {dest} attends to {src}, "
            f"attention {why.attention:.2f}",
            fontsize=11,
        )
        bars(axes[0][0], why.terms.tolist(), set(why.signal_set), VERMILION)
        axes[0][0].set_ylabel("attention logit")
        axes[0][0].set_title(
            f"logit {why.logit:.2f} = sum of bars{rest}; signal set of {len(why.signal_set)} marked",
            loc="left",
        )
        bars(axes[1][0], why.relative_terms.tolist(), recon, BLUE)
        axes[1][0].set_ylabel("relative attention")
        axes[1][0].set_xlabel("channel, by falling singular value")
        axes[1][0].set_title(
            f"relative attention {why.relative:.2f}: n_recon {why.n_recon} marked, "
            f"sparseness {why.sparseness:.2f}",
            loc="left",
        )
        return save(figure, path)


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
