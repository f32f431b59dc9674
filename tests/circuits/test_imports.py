"""Circuits of other tools: read as circuits, and used without the weights of any model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import networkx as nx
import polars as pl
import pytest

from headtrace.circuits import Circuit, imported, read_circuits
from headtrace.circuits.describe import example
from headtrace.circuits.exports import TEXTS
from headtrace.errors import InputError
from headtrace.families import find_families
from headtrace.runs import merge
from tests.circuits.made_up import complete_circuit, content_circuit, random_circuit, worded_circuit

ROOT = "('IO-S direction', 'end')"
EDGES = (
    ("(9, 6, 'end', 'IO')", ROOT, "d", 1.5, None),
    ("(0, 'MLP', 'end', 'end')", "(9, 6, 'end', 'IO')", "d", 0.5, "[3, 1]"),
    ("(3, 0, 'S2', 'S1')", "(9, 6, 'end', 'IO')", "s", 0.25, "[4]"),
    ("(0, 'AH bias', 'IO', 'IO')", "(9, 6, 'end', 'IO')", "s", 0.125, "[0]"),
    ("(0, 'AH offset', 'end', 'end')", "(9, 6, 'end', 'IO')", "d", 0.0625, "[2]"),
    ("(0, 'Embedding', 'S2', 'S2')", "(3, 0, 'S2', 'S1')", "d", 2.0, None),
)
FOUND = {
    ("L9H6 3->1", "root", "root", 1.5, None),
    ("MLP 0 @3", "L9H6 3->1", "query", 0.5, (3, 1)),
    ("L3H0 2->0", "L9H6 3->1", "key", 0.25, (4,)),
    ("Attention bias 0 @1", "L9H6 3->1", "key", 0.125, (0,)),
    ("Offset L9H6 @3", "L9H6 3->1", "query", 0.0625, (2,)),
    ("Embedding @2", "L3H0 2->0", "query", 2.0, None),
}


def said(circuit: Circuit) -> set[tuple]:
    order = {token: i for i, token in enumerate(("S1", "IO", "S2", "end"))}
    at = {i: order[token] for i, token in enumerate(circuit.prompt.tokens)}

    def name(i: int) -> str:
        from dataclasses import replace

        node = circuit.node(i)
        moved = replace(node, dest=None if node.dest is None else at[node.dest])
        moved = replace(moved, src=None if node.src is None else at[node.src])
        return "root" if node.kind == "root" else moved.name

    return {(name(e.source), name(e.target), e.side, e.weight, e.channels) for e in circuit.edges}


def as_graphml(path: Path) -> Path:
    graph: nx.MultiDiGraph = nx.MultiDiGraph()
    for number, (source, target, kind, weight, channels) in enumerate(EDGES):
        graph.add_edge(
            source,
            target,
            key=number,
            type=kind,
            weight=weight,
            **({} if channels is None else {"svs_used": channels}),
        )
    graph.nodes["(9, 6, 'end', 'IO')"]["attn_weight"] = 0.75
    nx.write_graphml(graph, path)
    return path


def as_json(path: Path) -> Path:
    names = dict.fromkeys(end for edge in EDGES for end in edge[:2])
    nodes = {name: {"attn_weight": 0.75} if name.startswith("(9") else {} for name in names}
    edges = [
        {"u": u, "v": v, "type": kind, "svs_used": channels, "weight": weight}
        for u, v, kind, weight, channels in EDGES
    ]
    path.write_text(json.dumps({"nodes": nodes, "edges": edges}), encoding="utf-8")
    return path


def as_table(path: Path) -> Path:
    rows = [
        {
            "model": model,
            "task": "ioi",
            "prompt": prompt,
            "source": u,
            "target": v,
            "type": kind,
            "weight": weight,
        }
        for model in ("gpt2-small", "pythia-160m")
        for prompt in (7, 12, 13)
        for u, v, kind, weight, _ in EDGES
        if prompt == 7 or "(3, 0" not in u + v
    ]
    pl.DataFrame(rows).write_parquet(path)
    return path


@pytest.mark.parametrize("written", [as_graphml, as_json])
def test_graphs_of_acc_have_their_edges_sides_and_channels(written, tmp_path) -> None:
    file = "g.graphml" if written is as_graphml else "g.json"
    (circuit,) = imported(written(tmp_path / file), model="gpt2-small")
    assert said(circuit) == FOUND
    head = next(node for node in circuit.nodes if node.layer == 9 and node.kind == "head")
    assert (head.attention, head.expanded, head.influence) == (0.75, True, None)
    assert circuit.model.name == "gpt2-small"
    assert circuit.root.question() == "IO-S direction"
    assert circuit.prompt.token_ids == ()  # nobody knows them


def test_a_table_of_edges_is_a_circuit_for_each_prompt(tmp_path) -> None:
    table = as_table(tmp_path / "t.parquet")
    assert [(c.model.name, c.method.settings["prompt"]) for c in imported(table)] == [
        ("gpt2-small", "7"),
        ("gpt2-small", "12"),
        ("gpt2-small", "13"),
        ("pythia-160m", "7"),
        ("pythia-160m", "12"),
        ("pythia-160m", "13"),
    ]
    chosen = imported(table, where={"model": "gpt2-small", "prompt": "7"})
    assert [len(circuit.edges) for circuit in chosen] == [6]
    with pytest.raises(InputError, match=r"no row has task=gt: expected ioi$"):
        imported(table, where={"task": "gt"})


def test_roles_that_attend_to_each_other_have_two_places(tmp_path) -> None:
    """'punct' stands for several tokens: before and after the verb."""
    edges = [
        {"u": "(1, 0, 'punct', 'verb')", "v": ROOT, "type": "d", "weight": 1.0},
        {"u": "(0, 3, 'verb', 'punct')", "v": "(1, 0, 'punct', 'verb')", "type": "s", "weight": 0.5},
    ]
    (tmp_path / "g.json").write_text(json.dumps({"nodes": {}, "edges": edges}))
    first = imported(tmp_path / "g.json")[0]
    assert sum(token.endswith("(earlier)") for token in first.prompt.tokens) == 1
    for node in first.heads():
        assert node.src <= node.dest
    code = "import sys; from headtrace.circuits import imported; print(imported(sys.argv[1])[0].content_id)"
    ids = set[str]()
    for seed in ("1", "2", "3"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}
        command = [sys.executable, "-c", code, str(tmp_path / "g.json")]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        ids.add(done.stdout.strip())
    assert ids == {first.content_id}  # whatever the order of sets


@pytest.mark.parametrize("format_", ["graphml", "networkx", "neuronpedia", "json"])
@pytest.mark.parametrize(
    "circuit",
    [example(), random_circuit(40), content_circuit(), complete_circuit(), worded_circuit()],
    ids=["small", "random", "content", "complete", "worded"],
)
def test_what_headtrace_exports_comes_back_as_it_was(format_: str, circuit: Circuit, tmp_path) -> None:
    path = tmp_path / ("c.graphml" if format_ == "graphml" else "c.json")
    path.write_text(TEXTS[format_](circuit), encoding="utf-8")
    assert imported(path) == [circuit]


def test_neuronpedias_features_of_a_layer_and_token_are_one_mlp(tmp_path) -> None:
    def node(name: str, layer: str, at: int, kind: str, **more) -> dict:
        return {"node_id": name, "layer": layer, "ctx_idx": at, "feature_type": kind, **more}

    transcoder = "cross layer transcoder"
    data = {
        "metadata": {
            "scan": "gemma-2-2b",
            "prompt": "The capital",
            "prompt_tokens": ["<bos>", "The", " capital"],
        },
        "nodes": [
            node("E_1_1", "E", 1, "embedding"),
            node("4_10_2", "4", 2, transcoder),
            node("4_11_2", "4", 2, transcoder),
            node("6_1_2", "6", 2, "mlp reconstruction error"),
            node("27_5_2", "27", 2, "logit", is_target_logit=True, token_prob=0.6, clerp="Austin"),
            node("27_6_2", "27", 2, "logit", is_target_logit=False, token_prob=0.3),
        ],
        "links": [
            {"source": "E_1_1", "target": "4_10_2", "weight": 1.0},
            {"source": "E_1_1", "target": "4_11_2", "weight": 0.5},
            {"source": "4_10_2", "target": "27_5_2", "weight": 2.0},
            {"source": "4_11_2", "target": "27_5_2", "weight": -0.5},
            {"source": "4_11_2", "target": "27_6_2", "weight": 9.0},
            {"source": "6_1_2", "target": "27_5_2", "weight": 0.25},
        ],
    }
    (tmp_path / "g.json").write_text(json.dumps(data))
    (circuit,) = imported(tmp_path / "g.json")
    edges = {
        (circuit.node(e.source).name, circuit.node(e.target).kind, e.side): e.weight for e in circuit.edges
    }
    assert edges == {
        ("Embedding @1", "mlp", "input"): 1.5,
        ("MLP 4 @2", "root", "root"): 1.5,
        ("MLP 6 @2", "root", "root"): 0.25,
    }
    assert (circuit.model.name, circuit.root.question()) == ("gemma-2-2b", "Austin")


def test_imported_circuits_are_merged_grouped_and_shown_without_weights(tmp_path) -> None:
    table = as_table(tmp_path / "t.parquet")
    circuits = imported(table, where={"model": "gpt2-small"})
    network = merge(circuits)
    assert network.by == "roles"
    assert {"S1", "IO", "S2", "end"} <= set(network.places)
    assert len(find_families(circuits, "edges", n=2).family) == 3
    page = circuits[0].to_html(tmp_path / "c.html")
    assert "IO-S direction" in Path(page).read_text(encoding="utf-8")


def test_the_command_writes_circuits_that_others_read(tmp_path) -> None:
    from typer.testing import CliRunner

    from headtrace.cli import app

    as_graphml(tmp_path / "a.graphml")
    as_json(tmp_path / "b.json")
    out = tmp_path / "both.parquet"
    done = CliRunner().invoke(
        app, ["import", str(tmp_path), "--model", "gpt2-small", "--out", str(out), "--json"]
    )
    assert done.exit_code == 0, done.output
    assert [said(circuit) for circuit in read_circuits(out)] == [FOUND, FOUND]


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("g.json", "[1]", "expected a JSON object"),
        ("g.json", '{"nodes": []}', "not a circuit that headtrace can read"),
        ("g.json", '{"nodes": {"(1, 2)": {}}, "edges": []}', "is not a node of ACC"),
        ("g.json", '{"nodes": {"__import__(\'os\')": {}}, "edges": []}', "is not a node of ACC"),
        ("g.graphml", "<graphml", "not GraphML"),
        ("g.parquet", "PAR1", "not a Parquet table"),
    ],
)
def test_what_is_no_circuit_is_refused_in_one_line(name: str, content: str, match: str, tmp_path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=match) as raised:
        imported(tmp_path / name)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("command", ["verify", "faithfulness"])
def test_a_circuit_without_token_ids_is_not_tested_and_no_model_is_loaded_for_it(
    command: str, tmp_path
) -> None:
    from typer.testing import CliRunner

    from headtrace.cli import app

    as_graphml(tmp_path / "a.graphml")
    made = CliRunner().invoke(app, ["import", str(tmp_path / "a.graphml"), "--out", str(tmp_path / "c.json")])
    assert made.exit_code == 0
    assert "1 circuit, " in made.output
    done = CliRunner().invoke(app, [command, str(tmp_path / "c.json"), "--model", "no/such-model"])
    assert done.exit_code == 2
    assert "The circuit has no token ids" in done.output


@pytest.mark.parametrize("name", ["a.graphml", "b.json"])
def test_another_tools_graph_in_the_place_of_a_circuit_names_the_command_that_reads_it(
    name: str, tmp_path
) -> None:
    as_graphml(tmp_path / "a.graphml")
    as_json(tmp_path / "b.json")
    with pytest.raises(InputError, match=f"headtrace import .*{name} --out circuit.json` reads those"):
        read_circuits(tmp_path / name)
