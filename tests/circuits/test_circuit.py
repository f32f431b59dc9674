"""What a circuit says about itself, its parts, and to other tools."""

from __future__ import annotations

import json
from dataclasses import replace

import networkx as nx
import pytest
from made_up import TOKENS, random_circuit, small_circuit

from headtrace.circuits import Node
from headtrace.circuits.influence import edge_influence, node_influence
from headtrace.errors import InputError


def test_nodes_are_named_in_the_words_of_the_field():
    names = [node.name for node in small_circuit().nodes]
    assert names[:5] == ["Root", "L9H6 7->1", "L5H2 7->6", "L4H0 1->0", "MLP 3 @7"]
    assert names[6:] == ["Embedding @1", "Embedding @6", "Attention bias 2 @7", "Offset L9H6 @7"]


def test_a_node_is_found_by_id_name_or_itself_and_a_missing_one_is_named():
    circuit = small_circuit()
    assert circuit.node(2) is circuit.node("L5H2 7->6") is circuit.node(circuit.nodes[2])
    with pytest.raises(InputError, match="L1H1 0->0"):
        circuit.node("L1H1 0->0")


def test_edges_into_and_from_a_node():
    circuit = small_circuit()
    assert {edge.source for edge in circuit.edges_into("L5H2 7->6")} == {4, 7}
    assert {(edge.target, edge.side) for edge in circuit.edges_from("MLP 3 @7")} == {
        (0, "root"),
        (1, "query"),
        (2, "query"),
    }


def test_influence_halves_at_every_firing_and_is_never_lost():
    circuit = small_circuit()
    flows = edge_influence(circuit)
    into = {(edge.source, edge.target, edge.side): flow for edge, flow in flows.items()}
    share = 2.5 / 3
    assert into[1, 0, "root"] == pytest.approx(share)
    assert into[2, 1, "query"] == pytest.approx(share / 2 * 0.3 / 0.475)
    assert into[3, 1, "key"] == pytest.approx(share / 2 * 0.2 / 0.45)
    for circuit in (small_circuit(), random_circuit(500)):
        expanded = {edge.target for edge in circuit.edges}
        ends = [value for i, value in node_influence(circuit).items() if i not in expanded]
        assert sum(ends) == pytest.approx(1.0)


def test_a_firing_with_one_side_passes_everything_to_it():
    circuit = small_circuit()
    one_sided = circuit.with_edges(tuple(e for e in circuit.edges if not (e.target == 2 and e.side == "key")))
    influence = node_influence(one_sided)
    flow = next(f for e, f in edge_influence(one_sided).items() if (e.source, e.target) == (4, 2))
    assert flow == pytest.approx(influence[2])


def test_top_gives_the_strongest_edges_first():
    circuit = random_circuit(200)
    weights = [edge.weight for edge in circuit.top(20)]
    assert weights == sorted((e.weight for e in circuit.edges if e.side != "root"), reverse=True)[:20]
    flows = circuit.flows()
    assert [flows[e] for e in circuit.top(20, by="influence")] == sorted(flows.values(), reverse=True)[:20]


def test_prune_keeps_only_what_still_leads_to_the_root():
    pruned = small_circuit().prune(min_weight=0.12)
    assert {node.id for node in pruned.nodes} == {0, 1, 2, 3, 4, 5, 7}
    assert all(edge.side == "root" or edge.weight >= 0.12 for edge in pruned.edges)
    # Without its edge to the root's firing, L5H2 and its strong causes are gone as well.
    gone = small_circuit().prune(min_weight=0.31)
    assert {(e.source, e.target) for e in gone.edges} == {(1, 0), (4, 0)}
    for circuit in (random_circuit(400).prune(min_weight=0.3), random_circuit(400).prune(min_influence=0.01)):
        graph = circuit.to_networkx()
        assert all(nx.has_path(graph, node, 0) for node in graph)


def test_between_is_the_union_of_all_paths():
    circuit = random_circuit(300, n_tokens=10)
    graph = nx.DiGraph(circuit.to_networkx())
    leaf = next(n for n in circuit.nodes if n.kind == "mlp" and len(circuit.edges_from(n)) > 1)
    expected = {i for i in graph if nx.has_path(graph, leaf.id, i) and nx.has_path(graph, i, 0)}
    assert {node.id for node in circuit.between(leaf, 0).nodes} == expected
    assert circuit.between(0, leaf) == circuit.between(leaf, 0)
    apart = small_circuit().between("Embedding @1", "Embedding @6")
    assert (len(apart.nodes), apart.edges) == (2, ())


def test_networkx_has_every_node_and_edge_with_its_fields():
    circuit = small_circuit()
    graph = circuit.to_networkx()
    assert graph.number_of_nodes() == 10
    assert graph.number_of_edges() == 11
    assert graph.edges[2, 1, "query"]["channels"] == (1, 4)
    assert graph.nodes[1]["token"] == " told"


def test_graphml_is_read_back_by_networkx_even_with_hostile_tokens(tmp_path):
    circuit = small_circuit(("<&\"'>", "\x00\x07", "\ud800", "\uffff", *TOKENS[4:]))
    graph = nx.read_graphml(circuit.to_graphml(tmp_path / "c.graphml"), node_type=int, force_multigraph=True)
    assert graph.number_of_nodes() == 10
    assert graph.number_of_edges() == 11
    assert graph.edges[2, 1, "query"]["weight"] == 0.3
    assert graph.nodes[3]["token"] == "\ufffd\ufffd"


def test_dot_quotes_whatever_a_token_holds(tmp_path):
    text = small_circuit(('"];x [label="', "\\", "\n", *TOKENS[3:])).to_dot(tmp_path / "c.dot")
    assert (tmp_path / "c.dot").read_text() == text
    assert text.count(" -> n") == 11
    assert all(_quotes_are_closed(line) for line in text.splitlines())


def _quotes_are_closed(line: str) -> bool:
    return line.replace("\\\\", "").replace('\\"', "").count('"') % 2 == 0


def test_neuronpedia_graph_has_what_their_schema_requires(tmp_path):
    circuit = random_circuit(200)
    data = circuit.to_neuronpedia(tmp_path / "np.json", slug="mary")
    assert json.loads((tmp_path / "np.json").read_text()) == data
    assert {"slug", "scan", "prompt_tokens", "prompt"} <= data["metadata"].keys()
    required = {"node_id", "feature", "layer", "ctx_idx", "feature_type", "jsNodeId", "clerp"}
    assert all(required <= node.keys() for node in data["nodes"])
    assert all(isinstance(node["layer"], str) and isinstance(node["ctx_idx"], int) for node in data["nodes"])
    ids = [node["node_id"] for node in data["nodes"]]
    assert len(set(ids)) == len(ids) == len(circuit.nodes)
    assert {link[end] for link in data["links"] for end in ("source", "target")} <= set(ids)
    assert max(node["influence"] for node in data["nodes"]) == pytest.approx(1.0)
    assert next(n for n in data["nodes"] if n["is_target_logit"])["influence"] == min(
        n["influence"] for n in data["nodes"]
    )


def test_summary_names_question_size_and_seeds():
    text = small_circuit().summary()
    assert 'Why " Mary" rather than " John"?' in text
    assert "3 firings (2 expanded), 11 edges (2 root, 5 query, 4 key)" in text
    assert 'L9H6 7->1 (" told" -> " Mary")' in text


def test_an_empty_circuit_says_why():
    empty = replace(small_circuit(), nodes=(Node(0, "root"),), edges=(), reason="no head among the seeds")
    assert "No circuit: no head among the seeds" in empty.summary()
    assert empty.prune(min_weight=0.5).edges == ()
    assert empty.top(3, by="influence") == ()
