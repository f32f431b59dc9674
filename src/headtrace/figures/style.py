"""One look for all figures: a palette that colour-blind readers can tell apart, sans type, token labels."""

from __future__ import annotations

import io
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headtrace.errors import InputError
from headtrace.writing import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Share = bool | Literal["none", "all", "row", "col"]

BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, GREY, INK = "#56B4E9", "#CC79A7", "#9A9A9A", "#222222"
"""The palette of Okabe and Ito, with a grey for what is not the point and an ink for text."""

SEQUENCE = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY)
HEAT = "cividis"
"""For amounts."""
SIGNED = "RdBu_r"
"""For what may be negative: blue below zero, red above."""

STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "axes.edgecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "figure.dpi": 110,
    "savefig.dpi": 160,
    "text.parse_math": False,  # a token may hold a dollar sign
    "svg.hashsalt": "headtrace",  # names inside an SVG are hashes, by default of something random
}


def token_label(token: str, width: int = 14) -> str:
    """A token as an axis shows it: spaces and line breaks visible, long ones cut.

    >>> token_label(" Mary")
    '␣Mary'
    """
    shown = token.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")
    return shown if len(shown) <= width else shown[: width - 1] + "…"


@contextmanager
def house_style() -> Generator[None]:
    """Draw in the house style without changing anyone's settings."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        yield


def new_figure(
    width: float,
    height: float,
    rows: int = 1,
    columns: int = 1,
    *,
    sharex: Share = False,
    sharey: Share = False,
    width_ratios: Sequence[float] | None = None,
    height_ratios: Sequence[float] | None = None,
) -> tuple[Figure, list[list[Axes]]]:
    """A figure and its axes, free of any window system; use inside ``house_style()``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(
        rows,
        columns,
        squeeze=False,
        sharex=sharex,
        sharey=sharey,
        width_ratios=width_ratios,
        height_ratios=height_ratios,
    )
    return figure, [list(row) for row in axes]


UNITS = {
    "attention": "share of attention",
    "logit difference": "logits",
    "logit": "logits",
    "log-likelihood": "nats",
    "projection": "length along the direction",
}
"""What the measures of roots and metrics are counted in."""


def with_unit(measure: str) -> str:
    """A measure with its unit, for an axis.

    >>> with_unit("logit difference")
    'logit difference (logits)'
    """
    return f"{measure} ({UNITS[measure]})" if measure in UNITS else measure


def log_scale(axis: Axes, sides: str) -> None:
    """Logarithmic ``"x"``, ``"y"`` or both (``"xy"``), labelled with plain numbers: powers would be mathematics."""
    for side in sides:
        axis.set(**{f"{side}scale": "log"})
        (axis.xaxis if side == "x" else axis.yaxis).set_major_formatter("{x:g}")


DATED = {".png": "Software", ".svg": "Date", ".pdf": "CreationDate"}
"""What a file would say about when or by which version it was made; left out, the same figure has the same bytes."""


def figure_kind(path: str | Path) -> str:
    """The extension of a figure's file, which says what is drawn: known before anything is computed.

    >>> figure_kind("why.SVG")
    '.svg'
    """
    kind = Path(path).suffix.lower()
    if kind not in DATED:
        *most, last = DATED
        raise InputError(f"{str(path)!r} is not the name of a figure: end it in {', '.join(most)} or {last}.")
    return kind


def svg(figure: Figure) -> bytes:
    """The figure as SVG, to be put into a page; the same figure gives the same bytes."""
    content = io.BytesIO()
    with house_style():
        figure.savefig(content, format="svg", metadata={DATED[".svg"]: None})
    return content.getvalue()


def save(figure: Figure, path: str | Path | None, title: str = "", note: str = "") -> Figure:
    """Write the figure if a path is given (PNG, PDF or SVG by its name), and return it.

    ``title`` says what it shows, above it; ``note`` how to read its marks, below it.
    """
    if title:
        figure.suptitle(title, fontsize=11)
    if note:
        figure.supxlabel(note, fontsize=8, color="#555555")
    if path is not None:
        kind = figure_kind(path)
        with house_style(), replacing(path) as temporary:
            figure.savefig(temporary, format=kind[1:], metadata={DATED[kind]: None})
    return figure
