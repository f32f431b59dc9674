"""What a circuit says about itself, its parts, and to other tools."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import TOKENS, complete_circuit, content_circuit, many_seeds, random_circuit, small_circuit

from headtrace.circuits import Direction, Edge, Heads, Likelihood, LogitDifference, Node
from headtrace.circuits.graph import edge_influence, node_influence, spread
from headtrace.errors import InputError
from headtrace.vocabulary import SIDES, Site


def test_nodes_are_named_in_the_words_of_the_field():
    names = [node.name for node in small_circuit().nodes]
    assert names[:5] == ["Root", "L9H6 7->1", "L5H2 7->6", "L4H0 1->0", "MLP 3 @7"]
    assert names[6:] == ["Embedding @1", "Embedding @6", "Attention bias 2 @7", "Offset L9H6 @7"]


def test_a_node_is_named_as_its_site_is():
    for node in (*small_circuit().nodes, *content_circuit().nodes):
        assert node.name == str(node) == str(node.site)
        assert node.site == Site(node.kind, node.layer, node.head, node.dest, node.src)
    assert content_circuit().node("Offset root @7").id == 8
    assert content_circuit().node("Offset L5 @1").id == 7
    assert content_circuit().node("Rounding 5 @1").id == 9


def test_parts_are_made_by_position_and_changed_by_replace():
    edge = Edge(2, 1, "query", 1.0, (1, 4))
    assert edge == Edge(source=2, target=1, side="query", weight=1.0, channels=(1, 4))
    assert replace(edge, weight=0.5).weight == 0.5
    assert hash(replace(edge, effect={"attention": 0.1})) == hash(edge)
    with pytest.raises(FrozenInstanceError):
        edge.weight = 2.0


def test_unexplained_firings_are_those_of_the_nodes_that_are_left():
    circuit = small_circuit()
    nodes = tuple(replace(node, explained=node.id not in (2, 3)) for node in circuit.nodes)
    circuit = replace(circuit, nodes=nodes)
    assert circuit.unexplained == ("L5H2 7->6",), "L4H0 was not expanded, so nothing was asked of it"
    assert "Unexplained firings: L5H2 7->6" in circuit.summary()
    assert circuit.prune(min_weight=0.31).unexplained == ()


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


WEIGHTS = st.floats(-10, 10, allow_subnormal=False)


@given(st.lists(st.tuples(st.sampled_from(SIDES), WEIGHTS), max_size=12))
def test_influence_is_spread_evenly_over_sides_and_by_weight_within_them(edges):
    shares = spread(edges)
    positive = {side for side, weight in edges if weight > 0}
    for side in SIDES:
        here = [(weight, share) for (s, weight), share in zip(edges, shares, strict=True) if s == side]
        whole = sum(weight for weight, _ in here if weight > 0)
        for weight, share in here:
            # A share is a quotient of a sum of at most 12 weights: a few roundings of double precision.
            part = weight / whole / len(positive) if weight > 0 else 0.0
            assert share == pytest.approx(part, rel=1e-14)
    assert sum(shares) == pytest.approx(1.0 if positive else 0.0, rel=1e-14)


def test_influence_goes_through_mlps_and_what_opposes_carries_none():
    circuit = content_circuit()
    influence, flows = node_influence(circuit), edge_influence(circuit)
    into = {(edge.source, edge.target): flow for edge, flow in flows.items()}
    assert into[1, 0] == 1.0
    assert into[8, 0] == into[7, 2] == 0.0
    assert influence[2] == pytest.approx(1.5 / 1.501 / 3)
    assert into[3, 2] == pytest.approx(influence[2] * 0.75 / 1.5)  # the head of the mlp's own layer
    assert influence[3] == into[3, 2]
    ends = [value for i, value in influence.items() if not circuit.edges_into(i)]
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


@pytest.mark.parametrize("make", [small_circuit, content_circuit, complete_circuit])
def test_every_export_holds_every_kind_and_side(make, tmp_path):
    circuit = make()
    graph = circuit.to_networkx()
    assert (len(graph), graph.number_of_edges()) == (len(circuit.nodes), len(circuit.edges))
    read = nx.read_graphml(circuit.to_graphml(tmp_path / "c.graphml"), force_multigraph=True)
    assert (len(read), read.number_of_edges()) == (len(circuit.nodes), len(circuit.edges))
    assert circuit.to_dot().count(" -> n") == len(circuit.edges)
    data = circuit.to_neuronpedia()
    assert len({node["node_id"] for node in data["nodes"]}) == len(circuit.nodes)
    assert {link["side"] for link in data["links"]} == {edge.side for edge in circuit.edges}
    assert all(isinstance(node["ctx_idx"], int) and node["layer"] != "None" for node in data["nodes"])


def test_networkx_has_every_node_and_edge_with_its_fields():
    circuit = small_circuit()
    graph = circuit.to_networkx()
    assert graph.number_of_nodes() == 10
    assert graph.number_of_edges() == 11
    assert graph.edges[2, 1, "query"]["channels"] == (1, 4)
    assert graph.nodes[1]["token"] == " told"


def test_graphml_is_read_back_by_networkx_even_with_hostile_tokens(tmp_path):
    circuit = small_circuit(("<&\"'>", "\x00\x07", "\ufffe", "\uffff", *TOKENS[4:]))
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
    assert "3 firings (2 expanded; not expanded: 1 not followed by acc++)" in text
    assert "11 edges (2 root, 5 query, 4 key)" in text
    assert 'L9H6 7->1 (" told" -> " Mary")' in text


def test_the_summary_says_what_was_cut_and_never_rounds_to_all():
    circuit = replace(
        small_circuit(),
        nodes=(*small_circuit().nodes, Node(20, "head", 0, 1, 3, 2), Node(21, "head", 3, 1, 0, 0)),
    )
    whole, cut = (replace(circuit, influence_kept=kept).summary() for kept in (1.0, 0.998))
    assert "100% of the influence followed" in whole
    assert "2 not followed by acc++" in whole
    assert "99.8% of the influence followed" in cut
    assert "1 at the first token" in cut
    assert "2 cut by the budget" in cut  # the one in layer 0 as well, which has causes as any other


def test_summary_of_a_circuit_with_content_counts_only_the_sides_it_has():
    text = content_circuit().summary()
    assert "2 firings (1 expanded; not expanded: 1 cut by the budget)" in text
    assert "10 edges (2 root, 1 query, 1 key, 2 value, 4 input; 2 opposing)" in text
    assert "Why a name is due? (direction root, projection 1.75; made-up, acc++)" in text


def test_summary_of_a_complete_circuit_tells_tokens_content_and_what_opposes():
    text = complete_circuit().summary()
    head, tokens, seeds, moved, signals, untold = text.split("\n\n")
    assert "4 firings (2 expanded; not expanded: " in head
    assert "1 opposing" in head
    assert "2 opposing" in head
    assert tokens.splitlines()[:3] == ["By token:", '   +3.7500  " Mary" 1', '   -1.5000  " John" 3']
    assert '  -1.2500  L8H4 7->3 (" told" -> " John") (opposing)' in seeds
    assert moved.splitlines()[0] == "Strongest content:"
    assert '2.5000  MLP 5 @1 (" Mary") => value of L9H6 7->1' in moved
    assert "-0.0625  MLP 2 @6" in moved, "what passes, and not the weight, which stands for a signal"
    assert signals.splitlines()[0] == "Strongest signals:"
    assert "of the influence ends at heads and MLPs that the budget did not follow" in untold


def numbers(lines: str) -> list[float]:
    return [float(line.split()[0]) for line in lines.splitlines()[1:]]


def test_what_goes_into_the_root_adds_up_with_what_is_not_shown():
    circuit = many_seeds()
    seeds = next(part for part in circuit.summary().split("\n\n") if part.startswith("Straight"))
    assert len(numbers(seeds)) == 9
    assert sum(numbers(seeds)) == pytest.approx(circuit.root.value, abs=9e-4)
    assert seeds.endswith("not shown")
    whole = replace(
        circuit, root=replace(circuit.root, value=sum(edge.weight for edge in circuit.edges[:7]) + 1.5)
    )
    assert "not shown" in whole.summary(), "one of nine is left out"
    likelihood = replace(circuit, root=Likelihood((101,), value=-0.5))
    assert "not shown" not in likelihood.summary(), "integrated gradients do not sum to a log-likelihood"


def test_lists_of_the_summary_are_sorted_by_the_number_that_they_print():
    parts = many_seeds().summary().split("\n\n")
    for title in ("Straight into the root", "Strongest content", "Strongest signals"):
        lines = next(part for part in parts if part.startswith(title)).removesuffix("not shown").splitlines()
        sizes = [abs(float(line.split()[0])) for line in lines[1:] if len(line.split()) > 1]
        assert len(sizes) > 1, title
        assert sizes == sorted(sizes, reverse=True), title


def test_a_firing_of_a_complete_circuit_that_lacks_influence_was_cut_by_the_budget():
    circuit = complete_circuit()
    nodes = [replace(node, influence=0.01) if node.id == 2 else node for node in circuit.nodes]
    assert "not expanded: 2 cut by the budget)" in replace(circuit, nodes=tuple(nodes)).summary()


def test_a_prompt_with_empty_lines_is_shown_whole(tmp_path):
    from typer.testing import CliRunner

    from headtrace.cli import app

    circuit = small_circuit()
    circuit = replace(circuit, prompt=replace(circuit.prompt, text="When\n\nMary"))
    result = CliRunner().invoke(app, ["show", str(circuit.save(tmp_path / "c.json"))])
    assert "3 firings (2 expanded" in result.output


def test_a_part_of_a_circuit_makes_no_claim_about_nodes_that_are_gone():
    part = complete_circuit().prune(min_influence=0.1)
    assert 6 not in {node.id for node in part.nodes}
    (key,) = [edge for edge in part.edges if edge.side == "key"]
    assert (key.through, key.left) == (None, None)


def test_what_opposes_ends_in_a_bar_for_graphviz():
    (line,) = [line for line in complete_circuit().to_dot().splitlines() if "n2 -> n0" in line]
    assert "arrowhead=tee" in line
    assert "opposing" in line


@pytest.mark.parametrize(
    ("root", "words"),
    [
        (LogitDifference((101,), (103,)), '" Mary" rather than " John"'),
        (LogitDifference((101, 9)), '" Mary / token 9"'),
        (LogitDifference((101,), (103,), answer_tokens=("M",)), '"M" rather than " John"'),
        (Likelihood((101, 107), continuation=True), '" Mary told"'),
        (Likelihood(top_k=3), "the 3 likeliest next tokens"),
        (Likelihood(support=(1, 2)), "the next token"),
        (Direction(4), "a direction at layer 4"),
        (Heads(("L9H6", "L5H2")), "the attention of L9H6, L5H2"),
    ],
)
def test_the_question_is_put_in_words_with_the_text_of_the_prompt(root, words):
    assert f"Why {words}? ({root.kind} root; " in replace(small_circuit(), root=root).summary()


def test_an_empty_circuit_says_why():
    empty = replace(small_circuit(), nodes=(Node(0, "root"),), edges=(), reason="no head among the seeds")
    assert "No circuit: no head among the seeds" in empty.summary()
    assert empty.prune(min_weight=0.5).edges == ()
    assert empty.top(3, by="influence") == ()


def test_a_circuit_converts_what_its_parts_hold_and_refuses_what_it_cannot():
    circuit = small_circuit()
    given = replace(circuit.edges[2], weight=1, channels=[1, 4])
    found = circuit.with_edges((given,)).edges[0]
    assert (found.weight, type(found.weight), found.channels) == (1.0, float, (1, 4))
    with pytest.raises(InputError, match=r"edges\[0\]\.weight: expected a finite number"):
        circuit.with_edges((replace(given, weight="heavy"),))
