"""Circuit files: what is saved is what is loaded, and a damaged file is told where it is damaged."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import random_circuit, small_circuit

import headtrace
from headtrace.circuits import Circuit, Edge, load_circuit, read_parquet, write_parquet
from headtrace.circuits.files import dumps, loads
from headtrace.errors import InputError


def test_a_saved_circuit_loads_equal_and_saves_to_the_same_bytes(tmp_path):
    circuit = random_circuit(300)
    first = circuit.save(tmp_path / "a.json").read_bytes()
    again = headtrace.load_circuit(tmp_path / "a.json")
    assert again == circuit
    assert again.save(tmp_path / "b.json").read_bytes() == first
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".json"], (
        "a temporary file was left behind"
    )


def test_the_order_in_which_nodes_and_edges_are_given_does_not_matter():
    circuit = small_circuit()
    assert dumps(replace(circuit, nodes=circuit.nodes[::-1], edges=circuit.edges[::-1])) == dumps(circuit)


def test_every_line_holds_one_node_or_edge():
    circuit = small_circuit()
    lines = dumps(circuit).splitlines()
    assert sum(line.startswith('{"id"') for line in lines) == len(circuit.nodes)
    assert sum(line.startswith('{"source"') for line in lines) == len(circuit.edges)


@settings(max_examples=50, deadline=None)
@given(
    text=st.text(max_size=20) | st.just("\ud800 half a pair"),
    weight=st.floats(allow_nan=False, allow_infinity=False),
)
def test_text_and_weights_survive_exactly(text, weight):
    circuit = small_circuit((text, *small_circuit().prompt.tokens[1:]))
    edges = (replace(circuit.edges[0], weight=weight, description=text), *circuit.edges[1:])
    circuit = circuit.with_edges(edges)
    assert loads(dumps(circuit)) == circuit


def test_numpy_scalars_are_written_as_plain_numbers():
    circuit = small_circuit()
    edge = replace(circuit.edges[0], weight=np.float32(0.1), source=np.int64(1))
    loaded = loads(dumps(circuit.with_edges((edge, *circuit.edges[1:]))))
    assert loaded.edges[0].weight == float(np.float32(0.1))


def _damaged(change) -> str:
    data = json.loads(dumps(small_circuit()))
    change(data)
    return json.dumps(data)


def _set(*path_and_value):
    *path, value = path_and_value

    def change(data):
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return change


def _drop(*path):
    def change(data):
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]

    return change


DAMAGE = [
    (_set("edges", 3, "channels", ["x"]), 'edges[3].channels[0]: expected a non-negative integer, got "x"'),
    (_set("edges", 3, "channels", [-1]), "edges[3].channels[0]: expected a non-negative integer, got -1"),
    (_set("edges", 2, "weight", True), "edges[2].weight: expected a finite number, got true"),
    (_set("edges", 2, "weight", None), "edges[2].weight: expected a finite number, got null"),
    (_set("edges", 1, "side", "value"), "edges[1].side: expected one of query, key, root"),
    (_set("edges", 0, "target", 99), "edges[0].target: expected the id of a node, got 99"),
    (_set("edges", 2, "source", 0), "edges[2].source: expected a component, not the root, got 0"),
    (_set("edges", 2, "source", 1), "edges[2].source: expected a component below layer 9"),
    (_set("edges", 0, "side", "key"), "edges[0].side: expected"),
    (_set("edges", 0, "effect", {"attention": [1]}), "edges[0].effect.attention: expected a number"),
    (_set("edges", 0, "wieght", 1), "edges[0].wieght: unknown key"),
    (_drop("edges", 0, "side"), "edges[0].side: missing"),
    (_set("nodes", 1, "dest", 8), "nodes[1].dest: expected a position below 8"),
    (_set("nodes", 1, "src", None), "nodes[1].src: expected an integer"),
    (_set("nodes", 4, "src", 2), "nodes[4].src: expected null, got 2"),
    (_set("nodes", 3, "src", 5), "nodes[3].src: expected a position at or before dest (1), got 5"),
    (_set("nodes", 1, "id", 2), "nodes[2].id: 2 is already taken"),
    (_set("nodes", 1, "kind", "neuron"), "nodes[1].kind: expected one of"),
    (_set("nodes", 1, "expanded", 1), "nodes[1].expanded: expected true or false, got 1"),
    (_set("nodes", 7, "dest", 1), "nodes: 'Embedding @1' occurs more than once"),
    (
        _set("nodes", 1, "elsewhere", 0, "channels", [0.5]),
        "nodes[1].elsewhere[0].channels[0]: expected a non-neg",
    ),
    (_set("nodes", {}), "nodes: expected a list"),
    (_set("prompt", "tokens", ["a"]), "prompt.tokens: expected 8, one per token id, got 1"),
    (_set("root", "kind", "logit"), "root.kind: expected one of linear, probability, direction"),
    (_set("schema", "headtrace.circuit/9"), "schema: expected 'headtrace.circuit/1'"),
    (_set("extra", 1), "extra: unknown key"),
    (_drop("method"), "method: missing"),
]


@pytest.mark.parametrize(("change", "message"), DAMAGE, ids=[message[:40] for _, message in DAMAGE])
def test_a_damaged_file_names_the_field(change, message):
    with pytest.raises(InputError) as error:
        loads(_damaged(change))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON at line 1"),
        (dumps(small_circuit())[:-40], "not valid JSON"),
        ("[]", "expected a JSON object"),
        ('{"schema": "headtrace.circuit/1", "model": NaN}', "NaN"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_text_that_is_no_circuit_is_refused_with_a_reason(text, message):
    with pytest.raises(InputError, match=message):
        loads(text)


def test_a_second_edge_between_the_same_ends_is_refused():
    circuit = small_circuit()
    with pytest.raises(InputError, match="a second query edge"):
        dumps(circuit.with_edges((*circuit.edges, replace(circuit.edges[2], weight=1.0))))


def test_what_cannot_be_loaded_is_not_saved(tmp_path):
    circuit = small_circuit()
    path = circuit.save(tmp_path / "c.json")
    before = path.read_bytes()
    for edge in (Edge(1, 99, "query", 0.1), Edge(4, 1, "key", float("nan"))):
        with pytest.raises(InputError):
            circuit.with_edges((edge,)).save(path)
    assert path.read_bytes() == before


def test_unreadable_places_are_named(tmp_path):
    (tmp_path / "latin").write_bytes(b"\xff\xfe{}")
    for path, message in (
        (tmp_path / "none.json", "No circuit file"),
        (tmp_path, "is a folder"),
        (tmp_path / "latin", "UTF-8"),
    ):
        with pytest.raises(InputError, match=message):
            load_circuit(path)


def test_parquet_gives_back_the_same_circuits(tmp_path):
    empty = replace(
        small_circuit(), edges=(), nodes=(), reason="the answer is less likely than the wrong one"
    )
    circuits = [small_circuit(), empty, random_circuit(120), random_circuit(50, seed=3)]
    path = write_parquet(circuits, tmp_path / "c.parquet")
    assert read_parquet(path) == circuits
    assert write_parquet(circuits, tmp_path / "d.parquet").read_bytes() == path.read_bytes()


def test_parquet_rows_can_be_queried_without_rebuilding_circuits(tmp_path):
    import polars as pl

    table = pl.read_parquet(write_parquet([small_circuit()], tmp_path / "c.parquet"))
    row = table.filter((pl.col("source_layer") == 5) & (pl.col("side") == "query")).row(0, named=True)
    assert (row["target_head"], row["weight"], row["channels"]) == (6, 0.3, [1, 4])


def test_a_file_that_is_no_parquet_is_refused(tmp_path):
    (tmp_path / "x.parquet").write_text("no")
    with pytest.raises(InputError, match="not a Parquet file"):
        read_parquet(tmp_path / "x.parquet")


def test_circuits_and_their_page_load_without_torch():
    code = "import sys, headtrace.circuits, headtrace.explorer; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_loading_leaves_the_data_given_to_it_alone():
    data = json.loads(dumps(small_circuit()))
    before = copy.deepcopy(data)
    from headtrace.circuits.reading import circuit_from_json

    assert isinstance(circuit_from_json(data), Circuit)
    assert data == before
