"""``headtrace verify``, ``intervene``, ``edges`` and ``faithfulness`` end to end."""

from __future__ import annotations

import json
import stat
from dataclasses import replace

import polars as pl
import pytest

import headtrace
from headtrace.circuits import read_parquet, write_parquet
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
    for word in (
        "PASS:",
        "Tolerance:",
        "largest |measured - predicted|",
        "Edges: 5 (local, scope claim), 2 controls",
        "logit",
    ):
        assert word in shown
    assert "strongest of" not in shown, "all five are in the table"
    assert json.loads((out / "verification.json").read_text())["max_prediction_error"] < 1e-4
    assert pl.read_parquet(out / "edges.parquet").height == 5
    assert sum(e.effect is not None for e in headtrace.load_circuit(out / "circuit.json").edges) == 5
    assert (out / "effects.png").read_bytes().startswith(b"\x89PNG")
    assert headtrace.load_circuit(file) == circuit, "the circuit itself is left alone"


def test_the_table_of_edges_says_how_many_it_leaves_out(made, capsys) -> None:
    _, file, _ = made
    assert run("verify", file, "--edges", "top:5", "--controls", "1", "--show", "2") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "the 2 strongest of 5 edges" in shown


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
    assert run("intervene", file, *ends, "--side", edge.side, "--factor", "2", "--out", kept) == 0
    shown = capsys.readouterr().out
    for word in (circuit.node(edge.target).name, "logit difference", "cosine", "before", "after", "times 2"):
        assert word in shown
    numbers = json.loads(kept.read_text())
    assert run("intervene", file, *ends, "--side", edge.side, "--factor", "2", "--json") == 0
    assert json.loads(capsys.readouterr().out) == numbers
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
        (("verify", file, "--seed", str(2**80)), "seed"),
        (("faithfulness", file, "--seed", "-1"), "seed"),
        (("intervene", file, "--source", source, *into, edge.side, "--factor", "nan"), "finite"),
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


# -- verdicts ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many(made, tmp_path_factory):
    """A true circuit, a false one, one without predictions; by name, in a folder and in a table."""
    _, _, circuit = made
    node = next(n for n in circuit.nodes if n.expanded)
    false = replace(
        circuit, nodes=tuple(replace(n, attention=0.01) if n is node else n for n in circuit.nodes)
    )
    answer, wrong = circuit.root.wrong, circuit.root.answer  # the other way round there is nothing to explain
    model = headtrace.load(str(made[0]))
    empty = headtrace.Tracer(model).trace(list(circuit.prompt.token_ids), list(answer), list(wrong))
    assert empty.reason
    folder = tmp_path_factory.mktemp("circuits")
    circuits = {"true": circuit, "false": false, "empty": empty}
    for name, one in circuits.items():
        one.save(folder / f"{name}.json")
    write_parquet(circuits.values(), folder / "many.parquet")
    return folder, circuits


@pytest.mark.parametrize(
    ("name", "code", "verdict"),
    [("true", 0, "PASS"), ("false", 1, "FAIL"), ("empty", 3, "NOTHING TO VERIFY")],
)
def test_the_exit_code_is_the_verdict(many, capsys, name: str, code: int, verdict: str) -> None:
    folder, _ = many
    assert run("verify", folder / f"{name}.json", "--edges", "none") == code
    assert capsys.readouterr().out.startswith(f"{verdict}:")
    assert run("verify", folder / f"{name}.json", "--edges", "none", "--json") == code
    shown = json.loads(capsys.readouterr().out)
    assert shown["verdict"] == verdict
    assert len(shown["failures"]) == (name == "false")


def test_many_circuits_have_a_line_each_and_one_verdict(many, made, tmp_path, capsys) -> None:
    folder, _ = many
    assert run("verify", folder / "many.parquet", "--edges", "none") == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[:3]] == ["PASS", "FAIL", "NOTHING TO VERIFY"]
    assert lines[3].startswith("FAIL: 3 circuits (1 PASS, 1 FAIL, 1 NOTHING TO VERIFY)")
    assert run("verify", folder / "many.parquet#0", "--edges", "none") == 0
    assert capsys.readouterr().out.startswith("PASS: ")
    out = tmp_path / "out"
    assert run("verify", folder, "--edges", "none", "--json", "--out", out) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["verdict"] == "FAIL"
    assert [one["verdict"] for one in shown["circuits"]] == ["NOTHING TO VERIFY", "FAIL", "PASS"]
    assert json.loads((out / "circuit-00001" / "verification.json").read_text())["verdict"] == "FAIL"
    assert json.loads((out / "verdicts.json").read_text())["verdict"] == "FAIL"


def test_one_circuit_that_cannot_be_compared_does_not_keep_the_others_from_it(many, tmp_path, capsys) -> None:
    _, circuits = many
    other = replace(circuits["true"], model=replace(circuits["true"].model, weights_sha256="0" * 64))
    table = write_parquet([other, circuits["true"]], tmp_path / "two.parquet")
    assert run("verify", table, "--edges", "none") == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("REFUSED")
    assert "only be tested on its own model" in lines[0]
    assert lines[1].startswith("PASS")
    assert lines[2].startswith("REFUSED: 2 circuits")


def test_update_keeps_mode_links_and_the_other_circuits_of_a_table(many, tmp_path) -> None:
    _, circuits = many
    file, link = (tmp_path / name for name in ("c.json", "link.json"))
    circuits["true"].save(file)
    file.chmod(0o640)
    link.symlink_to(file)
    assert run("verify", link, "--edges", "top:2", "--controls", "0", "--update") == 0
    assert link.is_symlink()
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert sum(e.effect is not None for e in headtrace.load_circuit(file).edges) == 2
    table = write_parquet([circuits["true"], circuits["empty"]], tmp_path / "two.parquet")
    table.chmod(0o600)
    assert run("verify", f"{table}#0", "--edges", "top:1", "--controls", "0", "--update") == 0
    first, second = read_parquet(table)
    assert sum(e.effect is not None for e in first.edges) == 1
    assert second == circuits["empty"]
    assert stat.S_IMODE(table.stat().st_mode) == 0o600


def test_what_cannot_be_written_is_known_before_anything_is_computed(
    made, tmp_path, capsys, monkeypatch
) -> None:
    _, file, circuit = made
    monkeypatch.setattr(headtrace.models, "load", lambda *a, **k: pytest.fail("a model was loaded"))
    (tmp_path / "file").write_text("")
    edge = circuit.top(1)[0]
    ends = ("--source", circuit.node(edge.source).name, "--target", circuit.node(edge.target).name)
    below = tmp_path / "file" / "x.json"
    head = circuit.node(edge.target).name.split(" ")[0]
    for arguments in (
        ("verify", file, "--out", tmp_path / "file"),
        ("verify", "-", "--update"),
        ("intervene", file, *ends, "--side", edge.side, "--out", below),
        ("faithfulness", file, "--out", below),
        ("faithfulness", file, "--png", tmp_path / "file" / "x.png"),
        ("edges", file, head, "--out", below),
        ("edges", file, head, "--out", "numbers.txt"),
        ("edges", file, head, "--png", tmp_path),
        ("edges", file, head, "--json", "--out", "-"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdin", open(file, encoding="utf-8"))  # noqa: SIM115
            assert run(*arguments) == 2, arguments
        assert "Error:" in capsys.readouterr().err


def test_no_control_character_of_a_file_reaches_the_terminal(made, many, tmp_path, capsys) -> None:
    _, circuits = many
    tokens = ("\x1b[31mred", *circuits["true"].prompt.tokens[1:])
    bad = replace(circuits["true"], prompt=replace(circuits["true"].prompt, tokens=tokens))
    bad.save(tmp_path / "bad.json")
    assert run("verify", tmp_path / "bad.json", "--edges", "none") == 1
    shown = capsys.readouterr()
    assert "prompt.tokens[0]" in shown.out
    assert "\x1b" not in shown.out + shown.err


# -- faithfulness and edges ----------------------------------------------------------------------------------


def test_faithfulness_prints_writes_and_draws(made, tmp_path, capsys) -> None:
    _, file, circuit = made
    out, png, reference = (tmp_path / name for name in ("f.json", "f.png", "prompts.jsonl"))
    reference.write_text('{"tokens": [5, 6, 7, 8]}\n{"tokens": [9, 10, 11]}\n')
    how = ("--controls", "1", "--reference", reference, "--mlps", "ablate")
    assert run("faithfulness", file, *how, "--out", out, "--png", png) == 0
    shown = capsys.readouterr().out
    assert "mean (reference) ablation" in shown
    assert "firings kept" in shown
    kept = json.loads(out.read_text())
    assert len(kept["curve"]) == len(circuit.heads()) + 1
    assert png.read_bytes().startswith(b"\x89PNG")
    assert run("faithfulness", file, *how, "--json") == 0
    assert json.loads(capsys.readouterr().out) == kept
    assert run("faithfulness", file, "--unit", "layer") == 2
    assert "unit='layer'" in capsys.readouterr().err


def test_edges_into_a_head_are_ranked(made, tmp_path, capsys) -> None:
    _, file, circuit = made
    target = circuit.node(circuit.top(1)[0].target)
    head = target.name.split(" ")[0]
    out, png = tmp_path / "e.json", tmp_path / "e.png"
    assert run("edges", file, head.lower(), "--out", out, "--png", png) == 0
    shown = capsys.readouterr().out
    assert f"{head.lower()}, local:" in shown
    assert target.name in shown
    kept = json.loads(out.read_text())
    assert {edge["reach"] for edge in kept["edges"]} == {"local", "global"}
    assert png.read_bytes().startswith(b"\x89PNG")
    firing = f"{head}:{target.dest}:{target.src}"
    assert run("edges", file, firing, "--reach", "local", "--json") == 0
    mine = json.loads(capsys.readouterr().out)["edges"]
    assert {edge["target"] for edge in mine} == {target.name}
    assert run("edges", file, "L3H77") == 2
    assert "edges go into" in capsys.readouterr().err
