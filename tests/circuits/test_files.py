"""Circuit files: what is saved is what is loaded, and a damaged file is told where it is damaged."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import complete_circuit, content_circuit, random_circuit, small_circuit, worded_circuit

import headtrace
from headtrace.circuits import (
    Circuit,
    Direction,
    Edge,
    Heads,
    Likelihood,
    LogitDifference,
    load_circuit,
    read_parquet,
    write_parquet,
)
from headtrace.circuits.files import dumps, from_json, loads
from headtrace.errors import InputError

DATA = Path(__file__).parent / "data"


@pytest.mark.parametrize(
    "circuit",
    [random_circuit(300), content_circuit(), complete_circuit(), worded_circuit()],
    ids=["attention", "content", "complete", "words"],
)
def test_a_saved_circuit_loads_equal_and_saves_to_the_same_bytes(circuit, tmp_path):
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


def test_what_says_nothing_is_not_written_except_where_the_schema_asks_for_it():
    data = json.loads(dumps(small_circuit()))
    always = ["id", "kind", "layer", "head", "dest", "src", "attention", "influence", "expanded", "explained"]
    assert list(data["nodes"][6]) == always
    assert list(data["edges"][0]) == ["source", "target", "side", "weight", "channels"]
    assert list(data["root"]) == ["kind", "answer", "wrong", "value", "position"]
    assert list(data["model"]) == ["name", "revision", "architecture", "weights_sha256"]
    assert list(data["method"]) == ["name", "tau", "ig_steps", "version"]


@settings(max_examples=50, deadline=None)
@given(
    text=st.text(st.characters(codec="utf-8"), max_size=20),
    weight=st.floats(allow_nan=False, allow_infinity=False),
)
def test_text_and_weights_survive_exactly(text, weight):
    circuit = small_circuit((text, *small_circuit().prompt.tokens[1:]))
    edges = (replace(circuit.edges[0], weight=weight, description=text), *circuit.edges[1:])
    circuit = circuit.with_edges(edges)
    assert loads(dumps(circuit)) == circuit


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
    (_set("edges", 3, "channels", ["x"]), 'edges[3].channels[0]: expected a valid integer, got "x"'),
    (_set("edges", 3, "channels", [1.5]), "edges[3].channels[0]: expected a valid integer, got 1.5"),
    (_set("edges", 3, "channels", [-1]), "edges[3].channels[0]: expected a number of at least 0, got -1"),
    (_set("edges", 3, "channels", 3), "edges[3].channels: expected a list, got 3"),
    (_set("edges", 2, "weight", True), "edges[2].weight: expected a finite number, got true"),
    (_set("edges", 2, "weight", None), "edges[2].weight: expected a finite number, got null"),
    (_set("edges", 2, "weight", "0.5"), 'edges[2].weight: expected a finite number, got "0.5"'),
    (_set("edges", 2, "weight", math.nan), "edges[2].weight: expected a finite number, got NaN"),
    (_set("edges", 2, "weight", -math.inf), "edges[2].weight: expected a finite number, got -Infinity"),
    (_set("prompt", "tokens", 1, "\ud800"), "prompt.tokens[1]: expected text with no lone surrogates, got"),
    (_set("prompt", "text", "\udfff"), 'prompt.text: expected text with no lone surrogates, got "\\udfff"'),
    (_set("method", "tau", "\ud800"), "method.tau: expected text with no lone surrogates"),
    (_set("method", "settings", {"\ud800": 1}), "method.settings"),
    (_set("prompt", "token_ids", 1, 10**400), "prompt.token_ids[1]: expected a number of at most"),
    (_set("nodes", 1, "dest", -1), "nodes[1].dest: expected a number of at least 0, got -1"),
    (_set("nodes", 1, "attention", 10**400), "nodes[1].attention: expected a finite number, got 1000"),
    (_set("edges", 2, "weight", 10**400), "edges[2].weight: expected a finite number, got 1000"),
    (_set("edges", 2, "source", 2**63), "edges[2].source: expected a number of at most 9223372036854775807"),
    (
        _set("edges", 1, "side", "values"),
        "edges[1].side: expected one of query, key, value, input or root, got",
    ),
    (_set("edges", 0, "target", 99), "edges[0].target: expected the id of a node, got 99"),
    (_set("edges", 3, "target", 6), "edges[3].target: expected a node of kind head or mlp or root, got"),
    (_set("edges", 2, "source", 0), "edges[2].source: expected a component, not the root, got 0"),
    (_set("edges", 2, "source", 1), "edges[2].source: expected a component below 'L9H6 7->1', got"),
    (
        _set("edges", 0, "side", "key"),
        "edges[0].side: expected root, since the target is 'Root', got \"key\"",
    ),
    (_set("edges", 2, "side", "input"), "edges[2].side: expected query or key or value, since the target is"),
    (
        _set("edges", 0, "effect", {"attention": [1]}),
        "edges[0].effect.attention: expected a finite number or text",
    ),
    (
        _set("edges", 0, "effect", {"attention": math.nan}),
        "edges[0].effect.attention: expected a finite number",
    ),
    (_set("edges", 0, "effect", 3), "edges[0].effect: expected a JSON object, got 3"),
    (
        _set("edges", 0, "wieght", 1),
        "edges[0].wieght: unknown key; expected one of source, target, side, weight",
    ),
    (_drop("edges", 0, "side"), "edges[0].side: missing"),
    (
        _set("nodes", 1, "dest", 8),
        "nodes[1].dest: expected a position below 8, the length of the prompt, got 8",
    ),
    (_set("nodes", 1, "src", None), "nodes[1].src: expected an integer, since a node of kind 'head' has one"),
    (_set("nodes", 4, "src", 2), "nodes[4].src: expected null, since a node of kind 'mlp' has none, got 2"),
    (_set("nodes", 3, "src", 5), "nodes[3].src: expected a position at or before dest (1), got 5"),
    (_set("nodes", 1, "id", 2), "nodes[2].id: 2 is already taken"),
    (_set("nodes", 1, "kind", "neuron"), "nodes[1].kind: expected one of root, head, mlp,"),
    (_set("nodes", 1, "expanded", 1), "nodes[1].expanded: expected true or false, got 1"),
    (_set("nodes", 1, "predicted", "query", "low"), "nodes[1].predicted.query: expected a finite number"),
    (_set("nodes", 1, "predicted", {"gate": 0.5}), "nodes[1].predicted.gate: expected one of query, key"),
    (_set("nodes", 7, "dest", 1), "nodes[7]: 'Embedding @1' occurs more than once"),
    (_set("nodes", 9, "layer", None), "nodes[9].layer: expected an integer, since a head has a layer"),
    (
        _set("nodes", 1, "elsewhere", 0, "channels", [0.5]),
        "nodes[1].elsewhere[0].channels[0]: expected a valid",
    ),
    (
        _set("nodes", 1, "elsewhere", 0, "at", 1),
        "nodes[1].elsewhere[0].at: unknown key; expected one of layer",
    ),
    (_set("nodes", 1, "elsewhere", 0, "src", 8), "nodes[1].elsewhere[0].src: expected a position below 8"),
    (_set("nodes", 2, "head 5"), 'nodes[2]: expected a JSON object, got "head 5"'),
    (_set("nodes", {}), "nodes: expected a list"),
    (_set("prompt", "tokens", ["a"]), "prompt.tokens: expected 8, one per token id, got 1"),
    (_drop("prompt", "tokens"), "prompt.tokens: missing"),
    (_set("edges", 2, "through", [4, 99]), "edges[2].through[1]: expected the id of a node, got 99"),
    (_set("prompt", "contributions", [0.5]), "prompt.contributions: expected 8, one per token, got 1"),
    (_set("prompt", "contributions", ["x"] * 8), "prompt.contributions[0]: expected a finite number"),
    (_set("nodes", 4, "neurons", [{"unit": -1, "contribution": 1}]), "nodes[4].neurons[0].unit: expected"),
    (_set("nodes", 4, "neurons", [{"unit": 1}]), "nodes[4].neurons[0].contribution: missing"),
    (
        _set("nodes", 4, "neurons", [{"unit": 1, "contribution": 1}, {"unit": 1, "contribution": 0}]),
        "nodes[4].neurons[1].unit: expected a unit that is not listed yet, got 1",
    ),
    (
        _set("nodes", 1, "neurons", [{"unit": 1, "contribution": 1}]),
        "nodes[1].neurons: expected null, since a node of kind 'head' has no hidden units",
    ),
    (_set("prompt", 5), "prompt: expected a JSON object, got 5"),
    (_set("root", 5), "root: expected a JSON object, got 5"),
    (_set("root", "kind", "logit"), "root.kind: expected one of linear, probability, direction, heads, got"),
    (
        _set("root", "kind", ["linear"]),
        "root.kind: expected one of linear, probability, direction, heads, got",
    ),
    (_drop("root", "kind"), "root.kind: missing"),
    (_set("root", "answer", []), "root.answer: expected at least 1 of them, got []"),
    (_set("root", "answer", [-1]), "root.answer[0]: expected a number of at least 0, got -1"),
    (_set("root", "layer", 3), "root.layer: unknown key; expected one of answer, wrong, value"),
    (_set("root", "position", 8), "root.position: expected a position below 8"),
    (_set("method", "tau", [1]), "method.tau: expected a finite number or text, got [1]"),
    (
        _set("method", "settings", {"seed": 2**64}),
        "method.settings.seed: expected a finite number or text or",
    ),
    (_set("method", "tau", True), "method.tau: expected a finite number or text, got true"),
    (
        _set("schema", "headtrace.circuit/9"),
        "schema: expected 'headtrace.circuit/2' or 'headtrace.circuit/1'",
    ),
    (_set("extra", 1), "extra: unknown key; expected one of model, prompt, root"),
    (_set("unexplained", []), "unexplained: unknown key"),
    (_set("x" * 5000, 1), "xxx...: unknown key"),
    (_set("\ud800", 1), 'expected text with no lone surrogates, got "\\ud800"'),
    (_drop("method"), "method: missing"),
    (_drop("nodes"), "nodes: missing"),
]


CONTENT_DAMAGE = [
    (
        _set("nodes", 3, "layer", 6),
        "edges[6].source: expected a component below 'MLP 5 @1', got \"L6H2 1->0\"",
    ),
    (
        _set("nodes", 2, "layer", 9),
        "edges[4].source: expected a component below 'L9H6 7->1', got \"MLP 9 @1\"",
    ),
    (_set("edges", 7, "side", "value"), "edges[7].side: expected input, since the target is 'MLP 5 @1'"),
    (_set("nodes", 9, "layer", None), "nodes[9].layer: expected an integer, since a node of kind 'rounding'"),
    (
        _set("nodes", 8, "dest", None),
        "nodes[8].dest: expected an integer, since a node of kind 'offset' has one",
    ),
    (_set("nodes", 8, "src", 1), "nodes[8].src: expected null, since a node of kind 'offset' has none"),
    (_set("nodes", 1, "contribution", "2"), 'nodes[1].contribution: expected a finite number, got "2"'),
    (_set("root", "vector", [0.5, None]), "root.vector[1]: expected a finite number, got null"),
    (_drop("root", "layer"), "root.layer: missing"),
]


WORDS = ("edges", 2, "evidence")
WORDS_DAMAGE = [
    (_set(*WORDS, "p_value", 1.5), "edges[2].evidence.p_value: expected a number of at most 1.0, got 1.5"),
    (_set(*WORDS, "p_value", None), "edges[2].evidence.p_value: expected a number, since the words are"),
    (_set(*WORDS, "supported", "yes"), 'edges[2].evidence.supported: expected true or false, got "yes"'),
    (_drop(*WORDS, "supported"), "edges[2].evidence.supported: missing"),
    (_set(*WORDS, "interval", [0.5]), "edges[2].evidence.interval[1]: missing"),
    (_set(*WORDS, "examples", 0, "dest", 5), "edges[2].evidence.examples[0].dest: expected a piece below 5"),
    (_set(*WORDS, "examples", 0, "src", 4), "edges[2].evidence.examples[0].src: expected a piece at or bef"),
    (
        _set(*WORDS, "examples", 1, "pieces", [7, "a"]),
        "edges[2].evidence.examples[1].pieces[0]: expected text",
    ),
    (_set(*WORDS, "examples", 0, "holds", 1), "edges[2].evidence.examples[0].holds: expected true or false"),
    (
        _set(*WORDS, "author", "me"),
        "edges[2].evidence.author: unknown key; expected one of supported, p_value",
    ),
    (_drop("edges", 2, "description"), "edges[2].evidence: expected null, since the edge has no description"),
]


@pytest.mark.parametrize(("change", "message"), WORDS_DAMAGE, ids=[m[18:60] for _, m in WORDS_DAMAGE])
def test_damaged_evidence_names_the_field(change, message):
    data = json.loads(dumps(worded_circuit()))
    change(data)
    with pytest.raises(InputError) as error:
        from_json(data)
    assert message in str(error.value)


def test_words_without_evidence_still_load_and_keep_their_id():
    """A file, and a table, of before there was any: the same bytes, and the same circuit."""
    before = '"effect": {"attention": -0.31, "metric": -1.25}, "description": "a name, again"}'
    assert before in dumps(small_circuit())
    assert small_circuit().content_id == "baca658aacdbd9e1f80d3426d6edcd81"


@pytest.mark.parametrize(("change", "message"), CONTENT_DAMAGE, ids=[m[:40] for _, m in CONTENT_DAMAGE])
def test_a_damaged_file_with_content_names_the_field(change, message):
    data = json.loads(dumps(content_circuit()))
    change(data)
    with pytest.raises(InputError) as error:
        from_json(data)
    assert message in str(error.value)


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
        ('{"schema": "headtrace.circuit/1", "model": NaN}', "model: expected a JSON object, got NaN"),
        ('{"schema": ' + "9" * 5000 + "}", "a number that cannot be read"),
        ("[" * 100_000, "nested too deeply"),
        (
            '{"schema": "headtrace.circuit/2", "model": ' + "[" * 400 + "]" * 400 + "}",
            "model: expected a JSON object",
        ),
        (
            dumps(small_circuit()).replace('"weight": 2.5', '"weight": 1e400'),
            "expected a finite number, got Infinity",
        ),
        (
            dumps(small_circuit()).replace('"nodes"', '"edges": [], "nodes"', 1),
            'the key "edges" occurs more than once in one object',
        ),
    ],
)
def test_text_that_is_no_circuit_is_refused_with_a_reason(text, message):
    with pytest.raises(InputError, match=message):
        loads(text)


def test_a_second_edge_between_the_same_ends_is_refused():
    circuit = small_circuit()
    with pytest.raises(InputError, match=r"edges\[11\]: a second query edge"):
        circuit.with_edges((*circuit.edges, replace(circuit.edges[2], weight=1.0)))


def test_what_could_not_be_loaded_is_not_even_made():
    with pytest.raises(InputError, match=r"edges\[0\].target: expected the id of a node, got 99"):
        small_circuit().with_edges((Edge(1, 99, "query", 0.1),))
    for weight in (math.nan, math.inf, True, "0.5", 10**400, 10**5000, None):
        with pytest.raises(InputError, match=r"^Circuit.edges\[0\].weight: expected a finite number, got"):
            small_circuit().with_edges((Edge(4, 1, "key", weight),))


def _with_node(**fields):
    """The small circuit with another node 4, an mlp."""
    circuit = small_circuit()
    return replace(circuit, nodes=tuple(replace(n, **fields) if n.id == 4 else n for n in circuit.nodes))


def _with_edge(**fields):
    circuit = small_circuit()
    return circuit.with_edges((replace(circuit.edges[0], **fields), *circuit.edges[1:]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: _with_node(id=-1), r"Circuit.nodes\[4\].id: expected a number of at least 0, got -1"),
        (lambda: _with_node(kind="neuron"), r'Circuit.nodes\[4\].kind: expected one of root, .*got "neuron"'),
        (
            lambda: _with_node(label="\ud800"),
            r"Circuit.nodes\[4\].label: expected text with no lone surrogates, got .\\ud800",
        ),
        (
            lambda: _with_edge(effect={"a": math.inf}),
            r"Circuit.edges\[0\].effect.a: expected a finite number",
        ),
        (
            lambda: _with_edge(channels=(1, "x")),
            r"Circuit.edges\[0\].channels\[1\]: expected a valid integer",
        ),
        (
            lambda: _with_edge(channels=(1, -4)),
            r"Circuit.edges\[0\].channels\[1\]: expected a number of at least",
        ),
        (
            lambda: _with_edge(contribution=math.inf),
            r"Circuit.edges\[0\].contribution: expected a finite number",
        ),
        (lambda: _with_edge(target=True), r"Circuit.edges\[0\].target: expected a valid integer"),
        (lambda: _with_edge(side="left"), r"Circuit.edges\[0\].side: expected one of"),
        (lambda: LogitDifference(()), "LogitDifference.answer: expected at least 1"),
        (lambda: Likelihood(top_p=2.0), "Likelihood.top_p: expected a number of at most 1"),
        (lambda: Heads(("\udfff",)), r"Heads.heads\[0\]: expected text with no lone surrogates"),
        (lambda: Heads(("L1H1",), colour="red"), "Heads.colour: unknown key; expected one of heads"),
        (lambda: Heads(), "Heads.heads: missing"),
        (lambda: Heads(("L1H1",), None, None, "heads", 5), "Heads: expected at most 4 values"),
        (lambda: replace(small_circuit(), nodes=("head",)), r'Circuit.nodes\[0\]: expected a .*, got "head"'),
        (lambda: replace(small_circuit(), edges=None), "Circuit.edges: expected a list, got null"),
        (lambda: replace(small_circuit(), root="linear"), "Circuit.root: expected"),
        (lambda: replace(small_circuit(), reason="\ud800"), "Circuit.reason: expected text with no lone"),
        (lambda: replace(small_circuit(), influence_kept=True), "Circuit.influence_kept: expected a finite"),
    ],
)
def test_what_is_made_in_python_is_checked_like_a_file(make, message):
    with pytest.raises(InputError, match=f"^{message}"):
        make()


def test_what_cannot_be_loaded_is_not_saved(tmp_path):
    path = small_circuit().save(tmp_path / "c.json")
    before = path.read_bytes()
    for field, value in (("influence_kept", math.nan), ("reason", 3), ("influence_kept", {1, 2})):
        with pytest.raises(InputError, match=f"^Circuit.{field}: expected"):
            replace(small_circuit(), **{field: value}).save(path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["c.json"]


def test_a_byte_order_mark_is_passed_over(tmp_path):
    (tmp_path / "c.json").write_text(dumps(small_circuit()), encoding="utf-8-sig")
    assert load_circuit(tmp_path / "c.json") == small_circuit()


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
    circuits = [small_circuit(), empty, content_circuit(), complete_circuit(), worded_circuit()]
    path = write_parquet(circuits, tmp_path / "c.parquet")
    assert read_parquet(path) == circuits
    assert write_parquet(circuits, tmp_path / "d.parquet").read_bytes() == path.read_bytes()


def test_parquet_rows_can_be_queried_without_rebuilding_circuits(tmp_path):
    import polars as pl

    table = pl.read_parquet(write_parquet([small_circuit()], tmp_path / "c.parquet"))
    row = table.filter((pl.col("source_layer") == 5) & (pl.col("side") == "query")).row(0, named=True)
    assert (row["target_head"], row["weight"], row["channels"]) == (6, 0.3, [1, 4])


def test_a_damaged_table_names_the_circuit_and_the_field(tmp_path):
    import polars as pl

    path = write_parquet([small_circuit(), content_circuit()], tmp_path / "c.parquet")
    table = pl.read_parquet(path).with_columns(side=pl.col("side").str.replace("value", "values"))
    table.write_parquet(path)
    with pytest.raises(InputError, match=r"c.parquet: circuit \w{32}: edges\[\d\].side: expected one of"):
        read_parquet(path)


CIRCUITS = [small_circuit(), content_circuit(), complete_circuit(), random_circuit(40)]


@pytest.fixture
def table(tmp_path):
    import polars as pl

    return pl.read_parquet(write_parquet(CIRCUITS, tmp_path / "whole.parquet"))


def _read(frame, folder):
    frame.write_parquet(folder / "changed.parquet")
    return read_parquet(folder / "changed.parquet")


def test_tables_put_together_keep_every_circuit(table, tmp_path):
    import polars as pl

    others = [random_circuit(30, seed=5), small_circuit()]
    other = pl.read_parquet(write_parquet(others, tmp_path / "other.parquet"))
    assert _read(pl.concat([table, other]), tmp_path) == [*CIRCUITS, *others]
    assert _read(pl.concat([table, table]), tmp_path) == [*CIRCUITS, *CIRCUITS]


def test_rows_in_another_order_are_the_same_circuits(table, tmp_path):
    for frame in (table.reverse(), table.sort("weight"), table.sample(fraction=1, shuffle=True, seed=1)):
        found = _read(frame, tmp_path)
        assert sorted(c.content_id for c in found) == sorted(c.content_id for c in CIRCUITS)
        assert all(circuit in CIRCUITS for circuit in found)


def test_circuits_are_picked_by_their_id(table, tmp_path):
    import polars as pl

    one = table.filter(pl.col("circuit") == content_circuit().content_id)
    assert _read(one, tmp_path) == [content_circuit()]


@pytest.mark.parametrize(
    "part",
    [
        lambda t: t.filter(t["weight"] > 0.2),
        lambda t: t.filter(t["source_kind"] == "head"),
        lambda t: t[1:],
        lambda t: t[:-1],
        lambda t: t.filter(t["circuit_json"].is_null()),
    ],
    ids=["weight", "kind", "first row", "last row", "all first rows"],
)
def test_a_part_of_a_circuit_is_not_taken_for_the_whole(table, tmp_path, part):
    with pytest.raises(
        InputError, match=r"only part of it is in the table \(\d+ of \d+ edges.*circuit\.prune"
    ):
        _read(part(table), tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.with_columns(weight=t["weight"] * 2), "its content id differs"),
        (lambda t: t.with_columns(channels=None), "its content id differs"),
        (lambda t: t.with_columns(n_nodes=t["n_nodes"] + 1), "its content id differs"),
        (lambda t: t.with_columns(n_edges=t["source"]), "do not agree on how many"),
        (lambda t: t.with_columns(n_edges=None), "do not agree on how many"),
        (lambda t: t.with_columns(circuit_json=t["circuit_json"].str.slice(0, 40)), "not valid JSON"),
        (
            lambda t: t.with_columns(circuit_json=t["circuit_json"].str.replace(".+", "5")),
            "expected a JSON object",
        ),
        (
            lambda t: t.with_columns(
                circuit_json=t["circuit_json"].str.replace('"value": 3.5', '"value": 1e400')
            ),
            "finite number",
        ),
        (lambda t: t.with_columns(effect=t["side"]), "not valid JSON"),
        (lambda t: t.with_columns(source=t["channels"]), "only part of it|valid integer"),
        (lambda t: t.with_columns(circuit=None), "column 'circuit' must hold the id"),
        (lambda t: t.with_columns(circuit=t["channels"]), "column 'circuit' must hold the id"),
        (lambda t: t.vstack(t[5:6]), "occur more often than others"),
        (lambda t: t.drop("circuit_json"), "columns circuit_json are missing"),
    ],
)
def test_a_changed_table_is_refused_with_what_to_do(table, tmp_path, change, message):
    with pytest.raises(InputError, match=rf"changed\.parquet.*({message})"):
        _read(change(table), tmp_path)


def test_a_content_id_is_of_what_is_said_not_of_how():
    circuit = small_circuit()
    assert (
        circuit.content_id
        == replace(circuit, nodes=circuit.nodes[::-1]).content_id
        == small_circuit().content_id
    )
    one = replace(circuit, method=replace(circuit.method, settings={"a": 1, "b": 0.0}))
    same = replace(circuit, method=replace(circuit.method, settings={"b": -0.0, "a": 1.0}))
    assert one == same
    assert one.content_id == same.content_id != circuit.content_id


def test_tables_of_version_1_are_read(tmp_path):
    import polars as pl

    data = json.loads((DATA / "linear-1.json").read_text())
    rows = [{"circuit": 0, "effect": None, **edge} for edge in data.pop("edges")]
    rows[0]["circuit_json"] = json.dumps(data)
    assert _read(pl.DataFrame(rows), tmp_path) == [load_circuit(DATA / "linear-1.json")]


def test_tables_that_number_their_circuits_are_read_where_they_can_be_told_apart(tmp_path):
    """``numbered.parquet`` was written by the version that had no content ids."""
    import polars as pl

    empty = replace(
        small_circuit(), edges=(), nodes=(), reason="the answer is less likely than the wrong one"
    )
    assert read_parquet(DATA / "numbered.parquet") == [
        small_circuit(),
        empty,
        content_circuit(),
        random_circuit(40),
    ]
    table = pl.read_parquet(DATA / "numbered.parquet")
    last = table.filter(pl.col("circuit") == 3)
    assert _read(last, tmp_path) == [random_circuit(40)]
    for frame, message in (
        (table.vstack(table), r"circuit 0: it is there 2 times.*Read each file by itself"),
        (last[1:], r"circuit 3: it has no first row"),
        (last[:20], r"circuit 3: only part of it is in the table: no edge names"),
        (table.vstack(table[3:4]), r"circuit 0: one of its edges occurs more than once"),
    ):
        with pytest.raises(InputError, match=message):
            _read(frame, tmp_path)


def test_a_file_that_is_no_parquet_is_refused(tmp_path):
    (tmp_path / "x.parquet").write_text("no")
    with pytest.raises(InputError, match="not a Parquet file"):
        read_parquet(tmp_path / "x.parquet")


def test_circuits_and_their_page_load_without_torch():
    code = "import sys, headtrace.circuits, headtrace.explorer; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _places(data, path=()):
    """The path to every value of JSON data."""
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in inside:
        yield (*path, key)
        yield from _places(value, (*path, key))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
PLACES = list(_places(json.loads(dumps(small_circuit()))))


@settings(max_examples=300, deadline=None)
@given(path=st.sampled_from(PLACES), value=JSON_VALUES)
def test_whatever_stands_in_a_field_it_is_either_loaded_or_refused_by_name(path, value):
    data = json.loads(dumps(small_circuit()))
    _set(*path, value)(data)
    refused = r"(?s)^(schema|model|prompt|root|method|influence_kept|nodes|edges)\b.*: "
    try:
        circuit = from_json(data)
    except InputError:
        with pytest.raises(InputError, match=refused):
            from_json(data)
    else:
        assert loads(dumps(circuit)) == circuit


@pytest.mark.parametrize("path", sorted(DATA.glob("*-1.json")), ids=lambda path: path.stem)
def test_files_of_version_1_load_and_are_saved_as_version_2(path, tmp_path):
    old = json.loads(path.read_text())
    circuit = load_circuit(path)
    kept = ("id", "kind", "layer", "head", "dest", "src", "attention", "influence", "expanded", "explained")
    assert [{key: getattr(node, key) for key in kept} for node in circuit.nodes] == [
        {key: node[key] for key in kept} for node in old["nodes"]
    ]
    assert [(e.source, e.target, e.side, e.weight, e.channels) for e in circuit.edges] == [
        (e["source"], e["target"], e["side"], e["weight"], e["channels"] and tuple(e["channels"]))
        for e in old["edges"]
    ]
    assert (circuit.root.value, circuit.root.position) == (old["root"]["value"], old["root"]["position"])
    new = circuit.save(tmp_path / "c.json")
    assert json.loads(new.read_text())["schema"] == "headtrace.circuit/2"
    assert load_circuit(new) == circuit


def test_roots_of_version_1_become_the_types_they_meant():
    roots = {path.stem: load_circuit(path).root for path in DATA.glob("*-1.json")}
    assert roots["heads-1"] == Heads(("L2H0", "L2H1"), value=roots["heads-1"].value, position=14)
    assert roots["direction-1"] == Direction(2, 14, value=roots["direction-1"].value)
    assert isinstance(roots["probability-1"], Likelihood)
    assert roots["probability-1"].support == roots["probability-1"].answer == (201, 202)
    assert roots["probability-top-1"].support == (201, 202, 225)
    assert isinstance(roots["linear-1"], LogitDifference)
    assert (roots["linear-1"].answer, roots["linear-1"].wrong_tokens) == ((201,), ("John",))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("unexplained", "L2H0 14->2"), "unexplained: expected a list of text"),
        (_set("root", "kind", "logit"), "root.kind: expected one of"),
        (_set("root", "kind", ["linear"]), "root.kind: expected one of"),
        (_set("root", None), "root: expected a JSON object, got null"),
        (_set("root", "answre", [1]), "root.answre: unknown key"),
        (_set("edges", 0, "source", "0"), 'edges[0].source: expected a valid integer, got "0"'),
    ],
)
def test_a_damaged_file_of_version_1_names_the_field(change, message):
    data = json.loads((DATA / "linear-1.json").read_text())
    change(data)
    with pytest.raises(InputError) as error:
        from_json(data)
    assert message in str(error.value)


def test_firings_that_version_1_listed_as_unexplained_are_told_by_their_nodes():
    data = json.loads((DATA / "linear-1.json").read_text())
    firing = next(node for node in data["nodes"] if node["expanded"])
    firing["explained"] = False
    circuit = from_json(data | {"unexplained": ["a firing that was pruned away"]})
    assert circuit.unexplained == (circuit.node(firing["id"]).name,)


def test_loading_leaves_the_data_given_to_it_alone():
    data = json.loads(dumps(small_circuit()))
    before = copy.deepcopy(data)
    assert isinstance(from_json(data), Circuit)
    assert data == before
