"""A figure must be readable alone: every panel says what its axes are, or shares them with one that does."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def missing_labels(figure: Figure) -> list[str]:
    """What is not said: panels without a label for x or y, colour bars without one, a figure without a title."""
    shown = [axis for axis in figure.axes if axis.get_visible()]
    bars = [axis for axis in shown if hasattr(axis, "_colorbar")]
    panels = [axis for axis in shown if axis not in bars]
    missing = [f"colour bar {i}" for i, axis in enumerate(bars) if not axis.get_ylabel() + axis.get_xlabel()]
    for i, axis in enumerate(panels):
        if not any(other.get_xlabel() for other in panels if _in_line(axis, other, column=True)):
            missing.append(f"x of panel {i}")
        if not any(other.get_ylabel() for other in panels if _in_line(axis, other, column=False)):
            missing.append(f"y of panel {i}")
    if not (figure.get_suptitle() or any(axis.get_title() + axis.get_title(loc="left") for axis in panels)):
        missing.append("title")
    return missing


def _in_line(axis: Axes, other: Axes, *, column: bool) -> bool:
    """Whether a label of another panel speaks for this one: it is itself, or in the same column (row) of the grid."""
    one, two = axis.get_subplotspec(), other.get_subplotspec()
    if axis is other or one is None or two is None:
        return axis is other
    return one.colspan == two.colspan if column else one.rowspan == two.rowspan
