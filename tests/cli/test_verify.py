"""``headtrace verify`` and ``headtrace intervene`` end to end."""

from __future__ import annotations

import json

import polars as pl
import pytest

import headtrace
from headtrace.cli import main
from tests.tiny import prompts, tiny_hf, top_two


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model folder with query and key biases, and the file of a circuit traced on it."""
    folder = tmp_path_factory.mktemp("model")
    tiny_hf("qwen2").save_pretrained(folder)
    model = headtrace.load(str(folder))
    ids = prompts()[0]
    circuit = headtrace.Tracer(model).trace(ids, *top_two(model, ids))
    file = folder / "circuit.json"
    circuit.save(file)
    return folder, file, circuit


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as done:
        main([str(a) for a in arguments])
    return int(done.value.code or 0)


def test_verify_prints_and_writes(made, tmp_path, capsys) -> None:
    _, file, circuit = made
    out = tmp_path / "verification"
    assert run("verify", file, "--edges", "top:5", "--controls", "2", "--out", out) == 0
    shown = capsys.readouterr().out
    for word in ("largest |measured - predicted|", "Edges: 5 (local, scope claim), 2 controls", "logit"):
        assert word in shown
    assert json.loads((out / "verification.json").read_text())["max_prediction_error"] < 1e-4
    assert pl.read_parquet(out / "edges.parquet").height == 5
    assert sum(e.effect is not None for e in headtrace.load_circuit(out / "circuit.json").edges) == 5
    assert (out / "effects.png").read_bytes().startswith(b"\x89PNG")
    assert headtrace.load_circuit(file) == circuit, "the circuit itself is left alone"


def test_verify_can_update_the_circuit_file(made, tmp_path) -> None:
    folder, _, circuit = made
    file = tmp_path / "c.json"
    circuit.save(file)
    assert run("verify", file, "--model", folder, "--edges", "top:3", "--controls", "0", "--update") == 0
    measured = [e for e in headtrace.load_circuit(file).edges if e.effect]
    assert len(measured) == 3
    assert all(isinstance(e.effect["attention"], float) for e in measured)
    assert all(e.effect["control_attention"] is None for e in measured)


def test_intervene_shows_before_and_after(made, tmp_path, capsys) -> None:
    _, file, circuit = made
    edge = circuit.top(1)[0]
    ends = ("--source", circuit.node(edge.source).name, "--target", circuit.node(edge.target).name)
    kept = tmp_path / "one.json"
    assert run("intervene", file, *ends, "--side", edge.side, "--factor", "2", "--json", kept) == 0
    shown = capsys.readouterr().out
    for word in (circuit.node(edge.target).name, "logit difference", "cosine", "before", "after", "times 2"):
        assert word in shown
    numbers = json.loads(kept.read_text())
    assert numbers["attention_before"] == pytest.approx(circuit.node(edge.target).attention, abs=1e-6)
    assert numbers["attention_after"] != numbers["attention_before"]


def test_bad_input_ends_with_code_two(made, tmp_path, capsys) -> None:
    folder, file, circuit = made
    edge = circuit.top(1)[0]
    source, target = circuit.node(edge.source).name, circuit.node(edge.target).name
    offset = next(e for e in circuit.edges if circuit.node(e.source).kind == "offset")
    ends = ("--source", circuit.node(offset.source).name, "--target", circuit.node(offset.target).name)
    into = ("--target", target, "--side")
    other = tmp_path / "other"
    tiny_hf("qwen2", seed=3).save_pretrained(other)
    (tmp_path / "broken.json").write_text("{")
    for arguments, message in (
        (("verify", file, "--model", other), "only be tested on its own model"),
        (("verify", file, "--edges", "some"), "top:N"),
        (("verify", file, "--reach", "everywhere"), "reach"),
        (("verify", tmp_path / "broken.json"), "broken.json"),
        (("verify", tmp_path / "none.json"), "none.json"),
        (
            ("intervene", file, "--source", "MLP 77 @1", *into, "query"),
            "no query edge",
        ),
        (("intervene", file, "--source", source, "--target", "L9H9 1->0", "--side", "key"), "No node"),
        (("intervene", file, *ends, "--side", offset.side, "--reach", "global"), "no component writes it"),
        (
            ("intervene", file, "--source", source, *into, edge.side, "--scope", "x"),
            "scope",
        ),
    ):
        assert run(*arguments) == 2, arguments
        assert message in capsys.readouterr().err.replace("\n", " ")
    assert folder.exists()
