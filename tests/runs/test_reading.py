"""What a run gives back: frames with the columns that are promised, and circuits that equal those that were traced."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import polars as pl
import pytest
import torch

import headtrace
from headtrace.causal.signals import Reader, Signal, channel_mask
from headtrace.circuits import Edge, Evidence, EvidenceExample, Node, read_circuit, read_circuits
from headtrace.circuits.describe import example
from headtrace.circuits.rows import circuit_of, edge_table, node_table, rest_columns
from headtrace.errors import InputError
from headtrace.prompts import batches
from headtrace.runs import Run, open_run
from headtrace.runs.manifest import shard_file
from tests.rounding import rounding
from tests.runs.conftest import frames

MARY = "When Mary and John went to the store, John gave a drink to"


@pytest.mark.parametrize("paths", ["attention", "complete"])
def test_circuits_equal_those_of_the_tracer(model, prompts, tmp_path: Path, paths) -> None:
    some = list(prompts)[:12]
    run = headtrace.run(model, some, out=tmp_path, paths=paths)
    (group,) = batches([len(example.token_ids) for example in some])
    traced = headtrace.Tracer(model).trace_batch([some[i] for i in group], paths=paths)
    for index, circuit in zip(group, traced, strict=True):
        assert run.circuit(index) == circuit
        assert run.circuit(index).content_id == circuit.content_id


def test_other_roots_come_back_whole(model, tmp_path: Path) -> None:
    for name, how in {
        "k": {"top_k": 3},
        "heads": {"heads": ["L1H2", "L1H3"]},
        "long": {"answer": " Mary and"},
    }.items():
        run = headtrace.run(model, [MARY], out=tmp_path / name, **how)
        assert run.circuit(0) == headtrace.Tracer(model).trace(MARY, **how)


def test_the_columns_are_those_that_others_rely_on(undisturbed: Run, prompts) -> None:
    columns = undisturbed.prompts.collect_schema()
    promised = ["id", "index", "shard", "text", "token_ids", "tokens", "answer", "wrong", "status", "reason"]
    promised += ["root_value", "n_nodes", "n_edges", "label:form", "label:order"]
    promised += ["role:IO", "role:S1", "role:S2", "role:end"]
    assert list(columns) == promised
    assert columns["role:IO"] == pl.Int64
    assert columns["label:order"] == pl.String
    assert list(undisturbed.nodes.collect_schema()) == ["prompt", *(field.name for field in fields(Node))]
    ends = [
        f"{end}_{key}" for end in ("source", "target") for key in ("kind", "layer", "head", "dest", "src")
    ]
    assert list(undisturbed.edges.collect_schema()) == [
        "prompt",
        *(field.name for field in fields(Edge) if field.name != "evidence"),  # a trace has none
        *ends,
    ]
    assert undisturbed.edges.collect_schema()["channels"] == pl.List(pl.Int64)


def test_words_and_their_evidence_survive_in_the_tables() -> None:
    circuit = example()
    tested = Evidence(True, 0.001, examples=(EvidenceExample((" Mary", " told"), dest=1, src=0),))
    edges = (circuit.edges[0], replace(circuit.edges[1], description="A name.", evidence=tested))
    circuit = circuit.with_edges(edges)
    row = {name: column[0] for name, column in rest_columns([circuit]).items()}
    row |= {name: getattr(circuit.prompt, name) for name in ("text", "token_ids", "tokens")}
    tables = [make([("a", circuit)]).to_pylist() for make in (node_table, edge_table)]
    assert circuit_of(row, *tables) == circuit


def test_the_rows_say_what_the_circuits_say(undisturbed: Run, prompts) -> None:
    row = undisturbed.prompts.filter(pl.col("index") == 3).collect().to_dicts()[0]
    circuit = undisturbed.circuit(row["id"])
    assert (row["n_nodes"], row["n_edges"]) == (len(circuit.nodes), len(circuit.edges))
    assert row["root_value"] == circuit.root.value
    assert tuple(row["token_ids"]) == prompts[3].token_ids
    edges = undisturbed.edges.filter(pl.col("prompt") == row["id"]).collect()
    assert edges["weight"].to_list() == [edge.weight for edge in circuit.edges]
    assert edges["source_layer"].to_list() == [circuit.node(edge.source).layer for edge in circuit.edges]


def test_circuits_are_chosen_by_an_expression_or_by_ids(undisturbed: Run) -> None:
    abba = list(undisturbed.items(pl.col("label:order") == "ABBA"))
    assert len(abba) == 15
    ids = [name for name, _ in abba]
    assert [circuit.content_id for circuit in undisturbed.circuits(ids[:3])] == [
        circuit.content_id for _, circuit in abba[:3]
    ]
    assert len(list(undisturbed.circuits())) == len(undisturbed) == 30
    with pytest.raises(InputError, match=r"no prompt 'nobody'"):
        list(undisturbed.circuits([ids[0], "nobody"]))


def test_only_the_shards_that_are_asked_for_are_read(
    undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    kept = type(undisturbed.store).open
    monkeypatch.setattr(
        type(undisturbed.store), "open", lambda self, name: read.append(name) or kept(self, name)
    )
    stream = undisturbed.circuits()
    next(stream)
    assert read == [shard_file(0, table) for table in ("prompts", "nodes", "edges")]


def test_a_circuit_of_a_run_is_named_by_id_by_its_beginning_and_by_number(undisturbed: Run) -> None:
    first = undisturbed.prompts.filter(pl.col("index") == 0).collect()["id"][0]
    circuit = undisturbed.circuit(0)
    assert read_circuit(f"{undisturbed.path}#{first}") == circuit
    assert read_circuit(f"{undisturbed.path}#{first[:12]}") == circuit
    assert read_circuit(f"{undisturbed.path}#0") == circuit
    assert len(read_circuits(undisturbed.path)) == 30
    for wrong in ("99", "nothing-like-it"):
        with pytest.raises(InputError, match=f"no prompt '{wrong}'"):
            read_circuit(f"{undisturbed.path}#{wrong}")


def test_the_beginning_of_several_ids_is_refused(model, tmp_path: Path) -> None:
    run = headtrace.run(model, [MARY, MARY], out=tmp_path, top_k=1)
    first = run.prompts.filter(pl.col("index") == 0).collect()["id"][0]
    assert run.circuit(first) == run.circuit(0)  # a whole id is no beginning
    with pytest.raises(InputError, match=r"beginning of several"):
        run.circuit(first[:10])


def test_a_failed_prompt_is_a_row_with_its_reason_and_stops_nothing(model, tmp_path: Path) -> None:
    given = [
        {"text": MARY, "answer": " Mary", "wrong": " John"},
        {"tokens": [5] * 5000, "answer": 6},
        {"text": "When Tom and", "answer": " Anna"},
    ]
    run = headtrace.run(model, given, out=tmp_path)
    rows = run.prompts.sort("index").collect()
    assert rows["status"].to_list() == ["done", "failed", "failed"]
    assert rows["reason"][1].startswith("input: ")
    assert rows["reason"][2].startswith("no circuit: ")
    status = run.status()
    assert (status.done, status.failed, status.left) == (1, 2, 0)
    assert status.failures == {"input": 1, "no circuit": 1}
    assert rows["id"][1] in status.examples["input"]
    with pytest.raises(InputError, match=r"no circuit of prompt .*5000"):
        run.circuit(1)
    assert run.circuit(2).reason is not None  # it says what speaks for and against the answer
    assert len(list(run.circuits())) == 1


def test_signals_are_the_minimal_residual_vectors_that_carry_the_channels(
    model, prompts, tmp_path: Path
) -> None:
    run = headtrace.run(model, list(prompts)[:2], out=tmp_path, signals=True)
    circuit = run.circuit(0)
    name = run.prompts.filter(pl.col("index") == 0).collect()["id"][0]
    rows = run.signals.filter(pl.col("prompt") == name).collect().to_dicts()
    edges = {(e.source, e.target, e.side): e for e in circuit.edges if e.side in ("query", "key")}
    assert {(row["source"], row["target"], row["side"]) for row in rows} == set(edges)
    recording = model.record([list(circuit.prompt.token_ids)])
    for row in rows[:6]:
        signal = Signal.of(circuit, edges[row["source"], row["target"], row["side"]])
        reader = Reader(recording, signal.firing, signal.side)
        place = signal.firing.dest if signal.side == "query" else signal.firing.src
        vector = torch.tensor(row["signal"])
        carried = reader.read(vector.expand(recording.lengths[0], -1))[place]
        written = reader.coefficients(signal.component)[place]
        mask = channel_mask(signal.channels, written.shape[-1], written)
        size = (
            (vector / reader.norm_scale[place]).abs().max()
            * reader.W.abs().max()
            * reader.bases[0].abs().max()
        )
        bound = rounding(torch.float32, model.d_model * model.d_head, float(size))
        assert (carried - written * mask).abs().max() <= bound
    with pytest.raises(InputError, match=r"without signals"):
        headtrace.run(model, [MARY], out=tmp_path / "none", top_k=1).signals  # noqa: B018


def test_a_run_that_has_only_begun_has_empty_frames_of_the_same_columns(again, undisturbed, tmp_path) -> None:
    def stop(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        again(progress=stop)
    run = open_run(tmp_path / "ioi")
    assert (run.status().left, list(run.circuits())) == (30, [])
    for name, frame in frames(run).items():
        assert frame.is_empty()
        assert frame.schema == frames(undisturbed)[name].schema


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is not a run: it holds no run.json"):
        open_run(tmp_path)
    with pytest.raises(InputError, match=r"folder of the run is an empty text"):
        open_run("")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"schema": "headtrace.run/7"}', "headtrace.run/7.*reads 'headtrace.run/1'"),
        ("{", "not JSON"),
        ('{"schema": "headtrace.run/1"}', "field 'headtrace'"),
        ("[]", "schema"),
    ],
)
def test_a_manifest_of_another_version_or_damaged_is_told(tmp_path: Path, content: str, told: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(InputError, match=told):
        open_run(tmp_path)


def test_it_prints_how_far_it_is(undisturbed: Run) -> None:
    assert repr(undisturbed).endswith("'builtin', 30 of 30 prompts)")
    assert "<td>30</td>" in undisturbed._repr_html_()


def test_reading_a_run_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, headtrace.runs.reading; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
