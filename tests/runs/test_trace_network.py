"""The trace network of the 2024 paper: two kinds of edges, and its skeleton."""

from __future__ import annotations

import pytest

from headtrace.circuits import Node
from headtrace.errors import InputError
from headtrace.runs.merging import DRAWN, SKELETON, skeleton, trace_network
from headtrace.runs.network import dumps, loads
from tests.runs.made import ROLES, ROOT, circuit, head, ioi


def _lines(network) -> set[tuple[str, str, str, str]]:
    return {
        (edge.kind, edge.side, network.node(edge.source).name, network.node(edge.target).name)
        for edge in network.edges
    }


def test_heads_speak_to_tokens_and_tokens_belong_to_heads() -> None:
    top, low = head(3, 0, 7, 1), Node(0, "head", 1, 2, 7, 5, attention=0.2)
    key = Node(0, "head", 0, 4, 1, 0, attention=0.9)
    mlp = Node(0, "mlp", 0, None, 1)
    found = circuit(
        (top, ROOT, "root", 1.0), (low, top, "query", 0.4), (key, top, "key", 0.3), (mlp, top, "key", 0.2)
    )
    network = trace_network([found], roles=[ROLES])
    assert _lines(network) == {
        ("communication", "query", "L1H2", "L3H0 @end"),
        ("communication", "key", "L0H4", "L3H0 @IO"),
        ("attention", "query", "L3H0 @end", "L3H0"),
        ("attention", "key", "L3H0 @IO", "L3H0"),
    }
    weights = {(edge.kind, edge.side): edge.weight for edge in network.edges}
    assert weights["communication", "query"] == 0.4
    assert weights["attention", "key"] == 0.5
    assert network.heads() == ((0, 4), (1, 2), (3, 0))
    assert network.head_edges() == (((0, 4), (3, 0)), ((1, 2), (3, 0)))
    assert loads(dumps(network)) == network


def test_an_edge_of_several_firings_of_a_prompt_counts_once() -> None:
    """Two firings of one head from the same token, both told by the same head: one edge, found in one prompt."""
    one, two, low = head(3, 0, 7, 1), head(3, 0, 7, 3), head(1, 2, 7, 5)
    roots = [(each, ROOT, "root", 1.0) for each in (one, two)]
    found = circuit(*roots, (low, one, "query", 0.4), (low, two, "query", 0.2))
    network = trace_network([found], roles=[ROLES])
    (edge,) = [edge for edge in network.edges if edge.kind == "communication"]
    assert (edge.count, edge.occurrences) == (1, 2)
    assert edge.weight == pytest.approx(0.3)


def test_firings_on_the_first_token_are_left_out() -> None:
    sink, low = head(3, 0, 7, 0), head(1, 2, 7, 5)
    found = circuit((sink, ROOT, "root", 1.0), (low, sink, "query", 0.4))
    network = trace_network([found], roles=[ROLES])
    assert {name for _, _, _, name in _lines(network)} == {"L1H2"}
    with pytest.raises(InputError, match="no trace network"):
        trace_network([circuit((sink, ROOT, "root", 1.0))])


def test_the_papers_shares_are_those_of_its_counts() -> None:
    edges = [circuit((head(3, 0, 7, 1), ROOT, "root", 1.0)), circuit((head(3, 1, 7, 1), ROOT, "root", 1.0))]
    for times, drawn, boned in ((64, False, False), (65, True, False), (169, True, False), (170, True, True)):
        found = [edges[0]] * times + [edges[1]] * (256 - times)
        assert ((3, 0) in trace_network(found).heads()) is drawn
        assert ((3, 0) in skeleton(found).heads()) is boned
    assert (DRAWN * 256, SKELETON * 256) == (65, 170)


def test_the_skeleton_is_a_part_of_the_trace_network() -> None:
    found, examples = ioi()
    whole, bones = trace_network(found, roles=examples), skeleton(found, roles=examples)
    assert set(bones.edges) < set(whole.edges)
    assert bones.edges
    assert all(edge.frequency >= SKELETON for edge in bones.edges)
    assert whole.form == "trace"
    assert {edge.kind for edge in whole.edges} == {"communication", "attention"}
    assert {whole.node(edge.target).kind for edge in whole.edges if edge.kind == "communication"} == {"token"}
