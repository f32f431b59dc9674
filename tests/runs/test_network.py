"""Many circuits into one network: what is counted, what it is called, and what is kept."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import networkx as nx
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headtrace
from headtrace.circuits import Node, read_circuits, write_parquet
from headtrace.errors import InputError
from headtrace.runs.frames import frames_of, place_names
from headtrace.runs.merging import merge
from headtrace.runs.network import Network, dumps, from_json, loads, to_json
from headtrace.vocabulary import site_name
from tests.runs.made import ROLES, ROOT, circuit, circuits, head, ioi

MANY = st.lists(circuits(), min_size=1, max_size=5)
PLACED = st.sampled_from((None, ROLES))


def _roles(found: list, roles: dict | None) -> list | None:
    return None if roles is None else [roles] * len(found)


# -- what is counted -----------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(MANY, PLACED, st.booleans())
def test_merging_a_list_with_itself_keeps_frequencies_and_means(found, roles, channels) -> None:
    once = merge(found, roles=_roles(found, roles), channels=channels)
    twice = merge(found * 2, roles=_roles(found * 2, roles), channels=channels)
    assert twice.prompts == 2 * once.prompts
    assert [node.name for node in once.nodes] == [node.name for node in twice.nodes]
    for a, b in zip(once.edges, twice.edges, strict=True):
        assert (a.source, a.target, a.side, a.channel) == (b.source, b.target, b.side, b.channel)
        assert (2 * a.count, 2 * a.occurrences, a.frequency) == (b.count, b.occurrences, b.frequency)
        assert a.weight == pytest.approx(b.weight)


@settings(max_examples=40)
@given(MANY, PLACED)
def test_counts_are_bounded_by_prompts_and_every_edge_is_counted(found, roles) -> None:
    network = merge(found, roles=_roles(found, roles))
    for each in (*network.edges, *network.nodes):
        assert 1 <= each.count <= network.prompts == len(found)
        assert each.count <= each.occurrences
    assert sum(edge.occurrences for edge in network.edges) == sum(len(each.edges) for each in found)
    total = sum(edge.weight for each in found for edge in each.edges)
    assert sum(edge.weight * edge.occurrences for edge in network.edges) == pytest.approx(total)


@settings(max_examples=30)
@given(MANY, PLACED, st.randoms())
def test_the_order_of_circuits_does_not_matter(found, roles, random) -> None:
    shuffled = random.sample(found, len(found))
    one, two = (merge(each, roles=_roles(each, roles)) for each in (found, shuffled))
    assert one == two


def test_two_edges_of_one_prompt_that_share_their_roles_count_once() -> None:
    one, two = head(2, 0, 7, 2), head(2, 0, 7, 6)
    found = merge([circuit((one, ROOT, "root", 1.0), (two, ROOT, "root", 2.0))], roles=[ROLES])
    (edge,) = found.edges
    assert found.node(edge.source).name == "L2H0 end->other"
    assert (edge.count, edge.occurrences, edge.frequency, edge.weight) == (1, 2, 1.0, 1.5)


def test_an_edge_is_counted_for_each_of_its_channels() -> None:
    top, low = head(2, 0, 7, 1), head(1, 1, 7, 5)
    signal = circuit((top, ROOT, "root", 1.0), (low, top, "query", 0.5), channels=(2, 4))
    network = merge([signal, signal], channels=True)
    assert [(e.side, e.channel, e.count, e.weight) for e in network.edges if e.side == "query"] == [
        ("query", 2, 2, 0.5),
        ("query", 4, 2, 0.5),
    ]
    assert [e.channel for e in network.edges if e.side == "root"] == [None]
    assert network.channels


def test_prompts_without_a_circuit_are_told_and_not_counted() -> None:
    full = circuit((head(2, 0, 7, 1), ROOT, "root", 1.0))
    network = merge([full, replace(full, edges=(), reason="nothing found")])
    assert (network.prompts, network.without) == (1, 1)
    assert all(edge.frequency == 1 for edge in network.edges)
    with pytest.raises(InputError, match="none of the prompts has a circuit"):
        merge([replace(full, edges=(), reason="nothing found")])
    with pytest.raises(InputError, match="no circuits"):
        merge([])


def test_circuits_of_two_models_are_refused_with_both_named() -> None:
    edge = (head(2, 0, 7, 1), ROOT, "root", 1.0)
    with pytest.raises(InputError, match=r"'one'.*number 1 of 'two'"):
        merge([circuit(edge, name="one"), circuit(edge, name="two")])
    with pytest.raises(InputError, match="with other weights"):
        merge([circuit(edge, weights_sha256="a"), circuit(edge, weights_sha256="b")])


# -- roles ---------------------------------------------------------------------------------------------------------


def test_positions_are_called_by_role_neighbour_first_token_or_other() -> None:
    frames = frames_of([circuit((head(2, 0, 7, 1), ROOT, "root", 1.0))], roles=[ROLES])
    places = dict(place_names(frames, "roles").select("position", "place").collect().iter_rows())
    assert places == {0: "BOS", 1: "IO", 3: "S1", 4: "S1+1", 5: "S2", 7: "end"}
    every = [(head(2, 0, 7, src), ROOT, "root", 1.0) for src in range(8)]
    network = merge([circuit(*every)], roles=[ROLES])
    assert {node.src for node in network.nodes if node.kind == "head"} == {*places.values(), "other"}
    assert network.places == ("BOS", "IO", "S1", "S1+1", "other", "S2", "end")


def test_a_role_comes_before_a_neighbour_and_a_neighbour_before_the_first_token() -> None:
    found = [circuit((head(2, 0, 7, 1), ROOT, "root", 1.0))]
    frames = frames_of(found, roles=[{"S1": 3, "IO": 4, "first of two": 0}])
    places = dict(place_names(frames, "roles").select("position", "place").collect().iter_rows())
    assert places == {3: "S1", 4: "IO", 0: "first of two"}
    more = dict(place_names(frames, "roles", after=("IO",)).select("position", "place").collect().iter_rows())
    assert more[5] == "IO+1"


def test_the_first_token_is_bos_only_where_it_is_a_special_one() -> None:
    special = circuit((head(2, 0, 7, 0), ROOT, "root", 1.0))
    word = replace(special, prompt=replace(special.prompt, tokens=("When", *special.prompt.tokens[1:])))
    assert {node.src for node in merge([special], roles=[ROLES]).nodes} == {None, "BOS"}
    assert {node.src for node in merge([word], roles=[ROLES]).nodes} == {None, "first"}


def test_without_roles_places_are_positions_and_asking_for_roles_is_an_error() -> None:
    found = [circuit((head(2, 0, 7, 1), ROOT, "root", 1.0))]
    network = merge(found)
    assert network.by == "positions"
    assert {node.name for node in network.nodes} == {"L2H0 7->1", "Root"}
    with pytest.raises(InputError, match="have no roles"):
        merge(found, by="roles")
    assert merge(found, by="positions", roles=[ROLES]).by == "positions"


def test_roles_come_from_examples_in_any_order_from_mappings_or_by_text() -> None:
    found, examples = ioi()
    by_examples = merge(found, roles=list(reversed(examples)))
    by_mappings = merge(found, roles=[example.roles for example in examples])
    assert by_examples == by_mappings
    text = circuit((head(2, 0, 7, 1), ROOT, "root", 1.0))
    text = replace(text, prompt=replace(text.prompt, text="one"))
    assert "IO" in merge([text], roles={"one": ROLES}).places


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ([{"IO": 8}], r"roles\[0\]\['IO'\]: expected a position from 0 to 7, got 8"),
        ([ROLES, ROLES], "one mapping for each of 1 circuits, got 2"),
        ([SimpleNamespace(token_ids=(9, 9), roles={})], "No example has the tokens"),
    ],
)
def test_wrong_roles_are_refused(roles, message) -> None:
    with pytest.raises(InputError, match=message):
        merge([circuit((head(2, 0, 7, 1), ROOT, "root", 1.0))], roles=roles)


# -- sources -------------------------------------------------------------------------------------------------------


def test_a_run_a_table_a_folder_and_a_list_give_the_same_network(tmp_path) -> None:
    found, examples = ioi()
    frames = frames_of(found, roles=examples)
    run = SimpleNamespace(
        prompts=frames.prompts, nodes=frames.nodes, edges=frames.edges, model=found[0].model
    )
    assert merge(run) == merge(found, roles=examples)
    with pytest.raises(InputError, match="has its own roles"):
        merge(run, roles=examples)
    table = write_parquet(found, tmp_path / "many.parquet")
    for i, each in enumerate(found):
        each.save(tmp_path / "folder" / f"{i:03d}.json")
    assert merge(table) == merge(found) == merge(tmp_path / "folder")


def test_a_run_is_merged_by_its_own_roles(tmp_path) -> None:
    found, examples = ioi()
    run = headtrace.run(headtrace.load("builtin"), examples[:6], out=tmp_path / "run")
    of_run, of_circuits = merge(tmp_path / "run"), merge(found[:6], roles=examples)
    assert merge(run) == of_run
    assert of_run.by == "roles"
    assert of_run.model is not None
    assert of_run.model.name == "builtin"
    assert set(of_run.places) == set(of_circuits.places)
    assert [(node.name, node.count) for node in of_run.nodes] == [
        (node.name, node.count) for node in of_circuits.nodes
    ]


def test_real_circuits_show_the_movers_of_both_orders() -> None:
    """In the built-in model one head moves the indirect object of each order: a network says so at a glance."""
    found, examples = ioi()
    network = merge(found, roles=examples)
    assert network.prompts == 30
    movers = {node.name for node in network.nodes if (node.dest, node.src) == ("end", "IO")}
    assert {"L1H0 end->IO", "L1H2 end->IO"} <= movers
    assert network.node("L1H2 end->IO").count >= 10


def test_complete_paths_keep_all_sides_and_contributions() -> None:
    found, examples = ioi("complete")
    network = merge(found, roles=examples)
    assert {edge.side for edge in network.edges} == {"query", "key", "value", "input", "root"}
    assert any(node.contribution is not None for node in network.nodes)
    assert any(edge.contribution is not None for edge in network.edges)
    assert loads(dumps(network)) == network


# -- cutting down --------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(MANY, st.floats(0, 1), st.floats(0, 1), st.integers(0, 5))
def test_pruning_is_monotone_and_pruning_by_nothing_changes_nothing(found, share, weight, count) -> None:
    network = merge(found)
    assert network.prune() == network
    less = network.prune(share, weight, count)
    assert set(less.edges) <= set(network.edges)
    assert set(less.nodes) <= set(network.nodes)
    more = less.prune(min(1.0, share + 0.1), weight + 0.1, count + 1)
    assert set(more.edges) <= set(less.edges)
    assert more.prune(share, weight, count) == more
    assert {end for edge in less.edges for end in (edge.source, edge.target)} == {n.id for n in less.nodes}
    assert all(edge.frequency >= share and edge.count >= count for edge in less.edges)


def test_weights_of_other_units_are_not_compared_with_attention() -> None:
    top = head(2, 0, 7, 1)
    network = merge([circuit((top, ROOT, "root", 0.01), (head(1, 0, 7, 5), top, "query", 0.2))])
    assert [edge.side for edge in network.prune(min_weight=0.5).edges] == ["root"]
    assert network.prune(min_weight=0.5).min_weight == 0.5
    with pytest.raises(InputError, match="at most 1"):
        network.prune(min_frequency=2)
    with pytest.raises(InputError, match="finite"):
        network.prune(min_weight=float("nan"))


def test_measured_effects_are_means_and_can_be_pruned_by(tmp_path) -> None:
    """Two circuits whose edges were ablated in the running model; merged from a table, as the command does."""
    found, examples = ioi()
    model = headtrace.load("builtin")
    reports = [headtrace.verify(each, model, edges="top:8", controls=0) for each in found[:2]]
    table = write_parquet([report.annotated() for report in reports], tmp_path / "measured.parquet")
    network = merge(read_circuits(table), roles=examples[:2])
    places = [{position: name for name, position in example.roles.items()} for example in examples[:2]]

    def place(position: int | None, names: dict[int, str]) -> str | None:
        near = {position + 1: "S1+1" for position, name in names.items() if name == "S1"}
        return None if position is None else ({0: "first"} | near | names).get(position, "other")

    measured: dict[tuple[str, str, str], list[float]] = {}
    for report, names in zip(reports, places, strict=True):
        for effect in report.effects:
            ends = [report.circuit.node(end) for end in (effect.edge.source, effect.edge.target)]
            key = [
                site_name(n.kind, n.layer, n.head, place(n.dest, names), place(n.src, names)) for n in ends
            ]
            measured.setdefault((key[0], key[1], effect.edge.side), []).append(effect.ablate_metric or 0.0)
    merged = {
        (network.node(edge.source).name, network.node(edge.target).name, edge.side): edge.effect
        for edge in network.edges
        if edge.effect is not None
    }
    assert merged == pytest.approx({key: sum(each) / len(each) for key, each in measured.items()})
    limit = sorted(map(abs, merged.values()))[len(merged) // 2]
    strong = network.prune(min_effect=limit)
    kept = [edge for edge in strong.edges if edge.side != "root"]
    assert 0 < len(kept) < len(merged)
    assert all(edge.effect is not None and abs(edge.effect) >= limit for edge in kept)
    assert {edge.side for edge in strong.edges} > {"root"}
    assert loads(dumps(strong)) == strong
    assert strong.min_effect == limit
    with pytest.raises(InputError, match=r"no edge of these circuits was measured.*verify"):
        merge(found[:2]).prune(min_effect=0.1)


def test_top_is_by_frequency_and_heads_and_pairs_of_heads_are_whatever_their_roles() -> None:
    top, low = head(2, 0, 7, 1), head(1, 1, 7, 5)
    network = merge(
        [circuit((top, ROOT, "root", 1.0), (low, top, "query", 0.2)), circuit((top, ROOT, "root", 3.0))]
    )
    assert [(edge.side, edge.count, edge.weight) for edge in network.top(5)] == [
        ("root", 2, 2.0),
        ("query", 1, 0.2),
    ]
    assert network.heads() == ((1, 1), (2, 0))
    assert network.head_edges() == (((1, 1), (2, 0)),)
    assert network.frame()["frequency"].to_list() == [1.0, 0.5]
    with pytest.raises(InputError, match="No node 'L9H9'"):
        network.node("L9H9")


# -- files ---------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(MANY, PLACED, st.booleans())
def test_what_is_saved_is_loaded(found, roles, channels) -> None:
    network = merge(found, roles=_roles(found, roles), channels=channels).prune(min_frequency=0.3)
    assert loads(dumps(network)) == network


def test_a_network_file_is_of_its_schema_and_graphml_is_read_by_networkx(tmp_path) -> None:
    found, examples = ioi()
    network = merge(found, roles=examples)
    assert headtrace.load_network(network.save(tmp_path / "n.json")) == network
    assert json.loads((tmp_path / "n.json").read_text())["schema"] == "headtrace.network/1"
    graph = nx.read_graphml(network.save(tmp_path / "n.graphml"), force_multigraph=True)
    assert (graph.number_of_nodes(), graph.number_of_edges()) == (len(network.nodes), len(network.edges))
    own = network.to_networkx()
    edge = network.edges[0]
    assert own.edges[edge.source, edge.target, edge.side]["frequency"] == edge.frequency
    with pytest.raises(InputError, match=r"\.json or \.graphml"):
        network.save(tmp_path / "n.txt")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema="headtrace.circuit/2"), 'schema: expected "headtrace.network/1"'),
        (lambda d: d.update(by="names"), "by: expected one of"),
        (lambda d: d.update(more=1), "more: unknown key"),
        (lambda d: d.pop("prompts"), "prompts: missing"),
        (lambda d: d["edges"][0].update(count=0), r"edges\[0\]\.count: expected 1 to 1"),
        (lambda d: d["edges"][0].update(count="x"), r"edges\[0\]\.count"),
        (lambda d: d["edges"][0].update(frequency=0.5), r"edges\[0\]\.frequency: expected 1/1"),
        (lambda d: d["edges"][0].update(occurrences=0), r"edges\[0\]\.occurrences"),
        (
            lambda d: d["edges"][0].update(weight=float("inf")),
            r"edges\[0\]\.weight: expected a finite number",
        ),
        (lambda d: d["edges"][0].update(side="mouth"), r"edges\[0\]\.side"),
        (lambda d: d["edges"][0].update(source=99), r"edges\[0\]\.source: expected the id of a node"),
        (lambda d: d["edges"].append(d["edges"][0]), r"edges\[1\]: a second root edge"),
        (lambda d: d["nodes"].append(d["nodes"][0]), r"nodes\[2\]\.id: 0 is already taken"),
        (lambda d: d["nodes"][0].update(count=7), r"nodes\[0\]\.count: expected at most 1"),
        (lambda d: d["nodes"][0].update(kind="token"), r"nodes\[0\]\.kind: expected a component"),
        (lambda d: d["nodes"][0].update(layer=-1), r"nodes\[0\]\.layer"),
    ],
)
def test_a_damaged_network_file_names_the_field(change, message) -> None:
    data = to_json(merge([circuit((head(2, 0, 7, 1), ROOT, "root", 1.0))]))
    change(data)
    with pytest.raises(InputError, match=message):
        from_json(data)


def test_files_that_are_no_networks_are_refused(tmp_path) -> None:
    with pytest.raises(InputError, match="No network file at"):
        headtrace.load_network(tmp_path / "none.json")
    for text, message in (
        ("[]", "a JSON object"),
        ("{", "not a network file"),
        ("[" * 100_000, "nested too deeply"),
    ):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(InputError, match=message):
            headtrace.load_network(tmp_path / "bad.json")


# -- showing -------------------------------------------------------------------------------------------------------


def test_names_on_the_page_are_text_and_nothing_is_asked_for(tmp_path) -> None:
    evil = "</style><script>alert(1)</script>\u202e"
    found = circuit((head(2, 0, 7, 1), ROOT, "root", 1.0), name=evil)
    page = merge([found], roles=[{evil: 1, "end": 7}]).to_html(tmp_path / "n.html").read_text()
    assert "<script" not in page
    assert "\u202e" not in page
    assert "default-src 'none'" in page
    assert page.count("</style>") == 1
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert 'src="data:image/svg+xml;base64,' in page


def test_a_network_prints_in_one_line() -> None:
    network = merge([circuit((head(2, 0, 7, 1), ROOT, "root", 1.0))])
    assert repr(network) == "Network(merged, 'made-up', by positions, 1 prompts, 2 nodes, 1 edges)"
    assert isinstance(network, Network)
    assert isinstance(network.frame(), pl.DataFrame)


def test_a_node_of_every_kind_has_a_name_by_role() -> None:
    mlp, bias = Node(0, "mlp", 1, None, 7), Node(0, "offset", None, None, 7)
    network = merge([circuit((mlp, ROOT, "root", 1.0), (bias, ROOT, "root", 0.1))], roles=[ROLES])
    assert {node.name for node in network.nodes} == {"Root", "MLP 1 @end", "Offset root @end"}
