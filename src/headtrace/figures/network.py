"""A network drawn layer over layer and role beside role: what the prompts of a run have in common, at a glance."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headtrace.figures import style
from headtrace.figures.style import BLUE, GREEN, GREY, INK, PURPLE, VERMILION
from headtrace.vocabulary import head_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from headtrace.runs.network import Network, NetworkEdge, NetworkNode

_SLOT = 0.78
_ROW = {"merged": 0.7, "trace": 1.05}
"""Inches that a node takes in a row, and between two rows."""
_NOTE = {
    "merged": "A head sits at the token it writes to; the arrow in its name says which it reads.",
    "trace": "Heads have round corners, the tokens they attend between have square ones.",
}
_STYLES: dict[str, tuple[str, Any, str]] = {
    "query": (BLUE, "solid", "query: what makes a head attend from here"),
    "key": (VERMILION, (0, (4, 1.5)), "key: what makes a head attend to here"),
    "value": (GREEN, (0, (6, 1.5, 1, 1.5)), "value: what a head moves"),
    "input": (PURPLE, (0, (1, 1)), "input of an MLP"),
    "root": (INK, (0, (8, 1)), "root: what makes the answer"),
    "attention": (GREY, (0, (1, 1.6)), "attention: from a token to the head that attends from or to it"),
}
"""Colour, dashes and words for each side, and for attention edges: distinguishable without the colour, too."""
_Spot = tuple[float, float]
"""Where a node is drawn: x and y."""


@style.house_style()
def plot_network(network: Network, path: str | Path | None = None, k: int = 40) -> Figure:
    """The ``k`` most frequent edges: layers upwards, roles from left to right, width by frequency."""
    shown = network.keeping(network.top(k))
    rows = _rows(shown)
    columns = {node.id: _column(shown, node) for node in shown.nodes}
    spots, ticks, width = _spots(shown, rows, columns)
    height = _ROW[network.form] * (max(rows.values(), default=0) + 1) + 2.0
    figure, axes = style.new_figure(max(7.0, _SLOT * width + 1.1), max(3.0, height))
    axis = axes[0][0]
    for edge in sorted(shown.edges, key=lambda edge: edge.frequency):
        _draw_edge(axis, edge, spots)
    for node in shown.nodes:
        _draw_node(axis, node, spots[node.id], network.prompts)
    axis.set(xlim=(0, max(width, 0.5)), ylim=(-0.75, max(rows.values(), default=0) + 0.75))
    for low, high in list(ticks.values())[1::2]:
        axis.axvspan(low, high, color="#F4F4F4", zorder=0, linewidth=0)
    axis.set_xticks([sum(ends) / 2 for ends in ticks.values()], [style.token_label(place) for place in ticks])
    axis.set_yticks(list(rows.values()), [str(key) for key in rows])
    axis.tick_params(length=0)
    axis.set(xlabel="role of the token" if network.by == "roles" else "position of the token", ylabel="layer")
    _legend(figure, shown)
    what = "trace network" if network.form == "trace" else "network"
    model = "" if network.model is None else f" of {network.model.name}"
    some = f"the {len(shown.edges)} most frequent of " if len(shown.edges) < len(network.edges) else ""
    return style.save(
        figure, path, f"The {what}{model}, {network.prompts:,} prompts: {some}{len(network.edges):,} edges"
    )


# -- where things are --------------------------------------------------------------------------------------------


def _rows(network: Network) -> dict[Any, int]:
    """A row for what comes before all layers, for each layer that is there, and for the root."""
    layers = sorted({node.layer for node in network.nodes if node.layer is not None})
    early = any(node.layer is None and node.kind != "root" for node in network.nodes)
    keys: list[Any] = [*(["input"] if early else []), *layers]
    if any(node.kind == "root" for node in network.nodes):
        keys.append("root")
    return {key: row for row, key in enumerate(keys)}


def _column(network: Network, node: NetworkNode) -> str:
    """The place of a node; of a head as such, where it mostly attends from, or else is heard; of the root, that of most
    of its causes."""
    if node.dest is not None:
        return node.dest
    places: Counter[str] = Counter()
    for edge in network.edges:
        if edge.target == node.id and edge.side in ("query", "root"):
            places[network.node(edge.source).dest or ""] += edge.count * len(network.edges)
        elif edge.source == node.id:
            places[network.node(edge.target).dest or ""] += edge.count
    places.pop("", None)
    last = network.places[-1] if network.places else ""
    return places.most_common(1)[0][0] if places else ("end" if "end" in network.places else last)


def _spots(
    network: Network, rows: dict[Any, int], columns: dict[int, str]
) -> tuple[dict[int, _Spot], dict[str, tuple[float, float]], float]:
    """Where each node is; from where to where each place goes; how wide all is, in slots."""
    cells: dict[tuple[str, float], list[NetworkNode]] = defaultdict(list)
    for node in network.nodes:
        row = "root" if node.kind == "root" else "input" if node.layer is None else node.layer
        lift = {"token": -0.45, "mlp": 0.42}.get(
            node.kind, 0.0
        )  # tokens below the heads of a layer, MLPs above
        cells[columns[node.id], rows[row] + lift].append(node)
    order = [place for place in network.places if place in columns.values()]
    order += [place for place in dict.fromkeys(columns.values()) if place not in order]
    spots: dict[int, _Spot] = {}
    ticks: dict[str, tuple[float, float]] = {}
    left = 0.0
    for place in order:
        width = max(len(nodes) for (at, _), nodes in cells.items() if at == place) + 0.15
        ticks[place] = (left, left + width)
        for (at, y), nodes in cells.items():
            for i, node in enumerate(nodes if at == place else ()):
                spots[node.id] = (left + width * (i + 0.5) / len(nodes), y)
        left += width
    return spots, ticks, left


# -- drawing -----------------------------------------------------------------------------------------------------


def _draw_edge(axis: Axes, edge: NetworkEdge, spots: dict[int, _Spot]) -> None:
    from matplotlib.patches import FancyArrowPatch

    colour, dashes, _ = _STYLES["attention" if edge.kind == "attention" else edge.side]
    start, end = spots[edge.source], spots[edge.target]
    bend = {"query": 0.07, "key": -0.07}.get(edge.side, 0.0)
    arrow = FancyArrowPatch(
        start,
        end,
        connectionstyle=f"arc3,rad={bend}",
        arrowstyle="-|>",
        mutation_scale=6 + 3 * edge.frequency,
        shrinkA=7,
        shrinkB=9,
        linewidth=0.4 + 2.6 * edge.frequency,
        linestyle=dashes,
        color=colour,
        alpha=0.75,
        zorder=1,
    )
    axis.add_patch(arrow)


def _draw_node(axis: Axes, node: NetworkNode, spot: _Spot, prompts: int) -> None:
    share = node.count / prompts if prompts else 0.0
    light = 1 - 0.32 * min(share, 1.0)
    box = {"head": "round,pad=0.32,rounding_size=0.6", "root": "round4,pad=0.4"}.get(
        node.kind, "square,pad=0.25"
    )
    axis.text(
        *spot,
        _label(node),
        ha="center",
        va="center",
        fontsize=6.5,
        color=INK,
        linespacing=1.05,
        zorder=2,
        bbox={
            "boxstyle": box,
            "facecolor": (light, light, 1 - 0.12 * share),
            "edgecolor": INK,
            "linewidth": 0.6,
        },
    )


def _label(node: NetworkNode) -> str:
    """What stands in the box: the place is where the box is."""
    if node.kind == "root":
        return "root"
    if node.kind == "head":
        name = head_name(node.layer or 0, node.head or 0)
        return name if node.src is None else f"{name}\n→ {style.token_label(node.src, 10)}"
    if node.kind == "token":
        return f"{head_name(node.layer or 0, node.head or 0)}\n@ {style.token_label(node.dest or '', 10)}"
    layer = "" if node.layer is None else f" {node.layer}"
    return {"mlp": f"MLP{layer}", "embedding": "embed"}.get(
        node.kind, f"{node.kind.replace('_', ' ')}{layer}"
    )


def _legend(figure: Figure, network: Network) -> None:
    from matplotlib.lines import Line2D

    before = "communication, " if network.form == "trace" else ""
    kinds = {"attention" if edge.kind == "attention" else edge.side for edge in network.edges}
    handles: list[Line2D] = []
    for kind, (colour, dashes, words) in _STYLES.items():
        if kind in kinds:
            label = words if kind == "attention" else before + words
            handles.append(Line2D([], [], color=colour, linestyle=dashes, linewidth=1.6, label=label))
    shares = sorted({edge.frequency for edge in network.edges})
    for share in dict.fromkeys((*shares[:1], *shares[-1:])):
        line = Line2D([], [], color=INK, linewidth=0.4 + 2.6 * share, label=f"in {share:.0%} of prompts")
        handles.append(line)
    note = f"{_NOTE[network.form]} Darker ones are in more prompts."
    figure.legend(
        handles=handles, loc="outside lower center", ncols=2, handlelength=4, title=note, title_fontsize=8
    )
