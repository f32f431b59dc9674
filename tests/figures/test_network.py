"""The figure of a network: what it shows can be read off it alone."""

from __future__ import annotations

from headtrace.runs.merging import merge, trace_network
from tests.figures.labels import missing_labels
from tests.figures.untouched import matplotlib_untouched
from tests.runs.made import ROOT, circuit, head, ioi


def _arrows(figure):
    from matplotlib.patches import FancyArrowPatch

    return [patch for patch in figure.axes[0].patches if isinstance(patch, FancyArrowPatch)]


def test_a_network_is_drawn_by_layer_and_role_with_as_many_edges_as_asked_for(tmp_path) -> None:
    found, examples = ioi()
    network = merge(found, roles=examples)
    with matplotlib_untouched():
        figure = network.plot(tmp_path / "n.png", k=25)
    assert missing_labels(figure) == []
    assert len(_arrows(figure)) == 25
    assert "the 25 most frequent of" in figure.get_suptitle()
    axis = figure.axes[0]
    assert [label.get_text() for label in axis.get_xticklabels()][-1] == "end"
    assert "root" in [label.get_text() for label in axis.get_yticklabels()]


def test_kinds_of_edges_are_told_apart_without_colour() -> None:
    found, examples = ioi()
    figure = trace_network(found, roles=examples).plot()
    handles = figure.legends[0].legend_handles
    kinds = {handle.get_label().split(":")[0]: handle.get_linestyle() for handle in handles[:3]}
    assert set(kinds) == {"communication, query", "communication, key", "attention"}
    dashes = {handle.get_label(): str(handle._dash_pattern) for handle in handles[:3]}
    assert len(set(dashes.values())) == 3


def test_edges_are_wider_where_they_are_more_frequent() -> None:
    one, two = head(2, 0, 7, 1), head(2, 1, 7, 3)
    figure = merge(
        [circuit((one, ROOT, "root", 1.0)), circuit((one, ROOT, "root", 1.0), (two, ROOT, "root", 1.0))]
    ).plot()
    widths = sorted(arrow.get_linewidth() for arrow in _arrows(figure))
    assert widths[0] < widths[1]


def test_an_empty_network_and_odd_names_can_be_drawn(tmp_path) -> None:
    found = circuit((head(2, 0, 7, 1), ROOT, "root", 1.0), name="$x$ & <b>")
    network = merge([found], roles=[{"$IO_1$": 1, "end": 7}])
    network.plot(tmp_path / "odd.svg")
    figure = network.prune(min_count=2).plot(tmp_path / "empty.png")
    assert _arrows(figure) == []


def test_the_same_network_gives_the_same_bytes(tmp_path) -> None:
    found, examples = ioi()
    network = merge(found, roles=examples)
    for ending in ("png", "svg"):
        network.plot(tmp_path / f"a.{ending}")
        network.plot(tmp_path / f"b.{ending}")
        assert (tmp_path / f"a.{ending}").read_bytes() == (tmp_path / f"b.{ending}").read_bytes()
