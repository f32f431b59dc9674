"""Figures of families can be read alone: every panel says what its axes are."""

from __future__ import annotations

from itertools import combinations

import matplotlib as mpl
import numpy as np
import pytest

from headtrace.families import compare_circuits, compare_signals, find_families
from headtrace.families.ablation import ExclusiveAblation
from headtrace.families.population import Population
from headtrace.figures.families import colours_of
from tests.families.populations import builtin, circuits_of, drawn, ioi, traced
from tests.figures.labels import missing_labels
from tests.figures.untouched import matplotlib_untouched


@pytest.fixture(autouse=True)
def untouched():
    with matplotlib_untouched():
        yield


def test_a_cluster_map_says_what_distances_bars_and_colours_are() -> None:
    found = find_families(ioi(), "edges", n=3)
    figure = found.plot()
    assert "90 circuits compared by their edges: 3 families" in figure.get_suptitle()
    words = _words(figure)
    for word in (
        "family",
        "form",
        "order",
        "ABBA (45)",
        "form: 15 values",
        "Jaccard distance",
        "circuits, in the order",
    ):
        assert word in words
    only = _words(found.plot(columns=["order"]))
    assert "form: 15 values" not in only


def test_a_cluster_map_of_one_family_without_labels_and_with_gaps() -> None:
    circuits = circuits_of(drawn([list(range(8))], 6))
    assert "1 family" in find_families(circuits, "edges", n=1).plot().get_suptitle()
    labels = [{"x": "a"} if i % 2 else {} for i in range(6)]
    words = _words(find_families(Population.of(circuits, labels), "edges", n=2).plot())
    assert "none (3)" in words


def test_many_circuits_are_thinned_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headtrace.figures.families.MOST_CIRCUITS", 10)
    words = _words(find_families(ioi(), "edges", n=2).plot())
    assert "(10 of 90 drawn)" in words


def test_stability_ablation_signals_and_comparison_have_labels(tmp_path) -> None:
    _, circuits = traced("ioi", 1)
    found = find_families(ioi(), "edges", n=3)
    large = [c for c in circuits if len(c.edges) > 20]
    for figure in (
        found.stability(3).plot(tmp_path / "stability.png"),
        _ablated().plot(tmp_path / "ablation.svg"),
        compare_signals(large[:2], large[2:4], builtin()).plot(tmp_path / "signals.pdf"),
        compare_signals(large[0], large[1], builtin()).plot(),
    ):
        assert missing_labels(figure) == []
    assert mpl.rcParams["font.size"] == mpl.rcParamsDefault["font.size"]
    for number in (2, 3):
        words = _words(compare_circuits(circuits[:number]).plot())
        assert "share of the root's whole that passes through" in words
        assert ("of all they have" in words) == (number > 2)


def _ablated() -> ExclusiveAblation:
    import polars as pl

    rng = np.random.default_rng(0)
    rows = [
        {
            "edges_of": e,
            "prompt": f"{f}-{i}",
            "family": f,
            "own": e == f,
            "edges": 3,
            "found": 2,
            "placed": 1,
            "missing": 0,
        }
        | {"signals": 4, "clean": 5.0, "change": -float(rng.random()), "random": -0.1, "random_signals": 4.0}
        for e in (1, 2)
        for f in (1, 2)
        for i in range(3)
    ]
    return ExclusiveAblation(
        pl.DataFrame(rows), "logit difference", {1: ("a",) * 3, 2: ("b",) * 3}, {1: 0, 2: 1}
    )


def _words(figure) -> str:
    """All text of a figure."""
    return "\n".join(text.get_text() for text in figure.findobj(mpl.text.Text))


# What eyes without one kind of cone see of a linear colour (Vienot, Brettel and Mollon 1999), and with all three.
EYES = {
    "all cones": np.eye(3),
    "no red cone": np.array([[0.11238, 0.88762, 0.0], [0.11238, 0.88762, 0.0], [0.00401, -0.00401, 1.0]]),
    "no green cone": np.array([[0.29275, 0.70725, 0.0], [0.29275, 0.70725, 0.0], [-0.02234, 0.02234, 1.0]]),
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


SEEN = 2.3
"""The least difference in CIE L*a*b* that is seen where two colours touch."""


def lab(colour: str, eye: str) -> np.ndarray:
    """A colour as an eye sees it, in CIE L*a*b*."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    x, y, z = np.cbrt((XYZ @ np.clip(EYES[eye] @ linear, 0, 1)) / XYZ.sum(1))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("count", [2, 4, 6, 7])
def test_colours_of_families_can_be_told_apart_by_eyes_without_red_or_green(eye: str, count: int) -> None:
    seen = [lab(colour, eye) for value, colour in colours_of(range(count)).items() if value is not None]
    apart = [np.linalg.norm(one - two) for one, two in combinations(seen, 2)]
    assert min(apart) > 4 * SEEN
