"""The layout, on its own: a pure function of the graph, run in the browser that will use it."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from itertools import pairwise

import pytest

from headtrace.circuits import Edge
from headtrace.explorer.page import inline_modules, page_data
from headtrace.vocabulary import KINDS, SIDES
from tests.circuits.made_up import complete_circuit, content_circuit, random_circuit, small_circuit

pytestmark = pytest.mark.browser

ENTRY = """
import { layout } from "./layout.js";
import { FILTERS, KINDS, SIDES, filterEdges, indexCircuit } from "./graph.js";
export const tools = () => ({ layout, FILTERS, KINDS, SIDES, filterEdges, indexCircuit });
"""
RUN = """([data, detail, room]) => {
  const { layout, FILTERS, filterEdges, indexCircuit } = window.headtrace;
  const graph = indexCircuit(data);
  const selection = filterEdges(graph, { ...FILTERS, detail });
  const made = layout(graph, selection, room);
  const again = layout(indexCircuit(data), filterEdges(graph, { ...FILTERS, detail }), room);
  const plain = (g) => ({ ...g, nodes: [...g.nodes.values()] });
  return { ...plain(made), same: JSON.stringify(plain(made)) === JSON.stringify(plain(again)) };
}"""


@pytest.fixture(scope="module")
def script(browser):
    """A page with nothing but the layout and the graph in it."""
    folder = files("headtrace.explorer") / "page"
    modules = {name: (folder / name).read_text() for name in ("layout.js", "graph.js", "fold.js", "text.js")}
    page = browser.new_page()
    page.add_script_tag(content=inline_modules({**modules, "entry.js": ENTRY}, "entry.js", "tools"))
    yield page
    page.close()


@pytest.fixture(scope="module")
def lay_out(script):
    def run(circuit, detail=10_000, room=(900, 600)):
        return script.evaluate(RUN, [page_data(circuit), detail, list(room)])

    return run


CASES = {
    "small": (small_circuit(), 10_000),
    "content": (content_circuit(), 10_000),
    "complete": (complete_circuit(), 10_000),
    "many edges": (random_circuit(1200), 10_000),
    "strongest only": (random_circuit(1200), 80),
}


@pytest.fixture(params=CASES, scope="module")
def case(request, lay_out):
    circuit, detail = CASES[request.param]
    return circuit, lay_out(circuit, detail)


def test_the_same_graph_always_gets_the_same_layout(case):
    assert case[1]["same"]


def test_every_node_sits_in_the_column_of_its_position_and_the_row_of_its_layer(case):
    circuit, made = case
    columns = {column["position"]: column for column in made["columns"]}
    rows = {row["layer"]: row for row in made["rows"]}
    assert {place["id"] for place in made["nodes"]} == {node.id for node in circuit.nodes}
    for place in made["nodes"]:
        node = circuit.node(place["id"])
        if node.kind == "root":
            assert place["y"] + place["h"] / 2 < made["rows"][0]["y"]
            continue
        column, row = columns[node.dest], rows[-1 if node.layer is None else node.layer]
        assert column["x"] <= place["x"] - place["w"] / 2
        assert place["x"] + place["w"] / 2 <= column["x"] + column["width"]
        assert row["y"] <= place["y"] - place["h"] / 2 + 1e-6
        assert place["y"] + place["h"] / 2 <= row["y"] + row["height"] + 1e-6


def test_no_two_nodes_overlap(case):
    assert_apart(case[1])


def assert_apart(made) -> None:
    boxes = [
        (p["x"] - p["w"] / 2, p["y"] - p["h"] / 2, p["x"] + p["w"] / 2, p["y"] + p["h"] / 2)
        for p in made["nodes"]
    ]
    boxes.sort()
    for i, a in enumerate(boxes):
        for b in boxes[i + 1 :]:
            if b[0] >= a[2]:
                break
            assert a[3] <= b[1] or b[3] <= a[1], (a, b)


def test_higher_layers_are_higher_up_and_later_tokens_further_right(case):
    rows = sorted(case[1]["rows"], key=lambda row: row["layer"])
    assert all(low["y"] > high["y"] for low, high in pairwise(rows))
    xs = [column["middle"] for column in case[1]["columns"]]
    assert xs == sorted(xs)


def test_every_edge_is_drawn_or_in_exactly_one_bundle(case):
    circuit, made = case
    alone = [edge["index"] for edge in made["edges"]]
    bundled = [index for bundle in made["bundles"] for index in bundle["edges"]]
    assert sorted(alone + bundled) == list(range(len(circuit.edges)))


def test_edges_start_at_their_source_and_end_under_their_target(case):
    circuit, made = case
    places = {place["id"]: place for place in made["nodes"]}
    for curve in made["edges"]:
        edge = circuit.edges[curve["index"]]
        source, target = places[edge.source], places[edge.target]
        assert abs(curve["x0"] - source["x"]) <= source["w"] / 2 + 1e-6
        assert abs(curve["y0"] - source["y"]) <= source["h"] / 2 + 1e-6
        assert abs(curve["x3"] - target["x"]) <= target["w"] / 2
        assert curve["y3"] == pytest.approx(target["y"] + target["h"] / 2)
        if edge.side in ("query", "key"):
            assert (curve["x3"] < target["x"]) == (edge.side == "key")


def test_the_page_knows_every_kind_and_side_there_is(script):
    assert set(script.evaluate("Object.keys(headtrace.KINDS)")) == set(KINDS)
    assert set(script.evaluate("Object.keys(headtrace.SIDES)")) == set(SIDES)


def test_heads_mark_their_source_column(case):
    circuit, made = case
    columns = {column["position"]: column for column in made["columns"]}
    full = {place["id"] for place in made["nodes"] if not place["dot"]}
    expected = {node.id for node in circuit.heads() if node.id in full and node.src != node.dest}
    assert {mark["id"] for mark in made["sources"]} == expected
    for mark in made["sources"]:
        assert mark["x"] == columns[circuit.node(mark["id"]).src]["middle"]


def test_room_is_filled_and_never_squeezed(lay_out):
    circuit = small_circuit()
    natural = lay_out(circuit, room=(0, 0))
    wide = lay_out(circuit, room=(2000, 600))
    assert wide["width"] >= natural["width"]
    assert wide["width"] / wide["height"] == pytest.approx(2000 / 600, rel=0.1)
    assert wide["form"] == "full"
    assert lay_out(circuit, room=(130, 700))["form"] == "brief", (
        "names alone, where there is no room for more"
    )
    assert_apart(lay_out(circuit, room=(10, 10)))


def test_a_crowded_cell_is_stacked_where_the_window_is_narrow_and_spread_where_it_is_wide(lay_out):
    circuit = small_circuit()
    crowd = tuple(replace(circuit.nodes[2], id=20 + head, head=head) for head in range(3, 9))
    edges = tuple(Edge(node.id, 1, "query", 0.1, (1,)) for node in crowd)
    many = replace(circuit, nodes=circuit.nodes + crowd, edges=circuit.edges + edges)
    lines = {}
    for name, room in (("narrow", (350, 900)), ("wide", (2400, 500))):
        made = lay_out(many, room=room)
        assert_apart(made)
        heights = {place["y"] for place in made["nodes"] if place["id"] in {node.id for node in crowd}}
        lines[name] = len(heights)
    assert lines["narrow"] > lines["wide"]
