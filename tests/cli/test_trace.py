"""`headtrace trace` and `headtrace explain` end to end."""

from __future__ import annotations

import json

import pytest

import headtrace
from tests.cli.test_models_and_record import run
from tests.tiny import prompts, tiny_hf, top_two


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "model"
    tiny_hf("qwen2").save_pretrained(folder)
    ids = prompts()[0]
    answer, wrong = top_two(headtrace.load(folder), ids)
    return str(folder), ids, answer, wrong


def test_trace_with_token_ids_writes_a_circuit_file(case, tmp_path) -> None:
    folder, ids, answer, wrong = case
    file = tmp_path / "c.json"
    tokens = ",".join(map(str, ids))
    done = run(
        "trace",
        folder,
        "--tokens",
        tokens,
        "--answer-id",
        str(answer),
        "--wrong-id",
        str(wrong),
        "--out",
        str(file),
    )
    assert done.returncode == 0, done.stderr
    circuit = headtrace.load_circuit(file)
    assert circuit.root.kind == "linear"
    assert circuit.edges
    assert "Straight into the root" in done.stdout
    shown = run("show", str(file))
    assert shown.returncode == 0
    assert circuit.heads()[0].name in shown.stdout


def test_an_empty_circuit_has_a_reason_and_exit_code_zero(case) -> None:
    folder, ids, answer, wrong = case
    tokens = ",".join(map(str, ids))
    done = run("trace", folder, "--tokens", tokens, "--answer-id", str(wrong), "--wrong-id", str(answer))
    assert done.returncode == 0
    assert "Empty circuit" in done.stdout


def test_many_prompts_go_to_parquet_or_to_a_folder(case, tmp_path) -> None:
    folder, ids, answer, wrong = case
    lines = [{"tokens": ids, "answer": answer, "wrong": wrong}, {"tokens": ids[:8], "answer": answer}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    done = run("trace", folder, "--prompts", str(file), "--out", str(tmp_path / "many.parquet"))
    assert done.returncode == 0, done.stderr
    assert len(headtrace.circuits.read_parquet(tmp_path / "many.parquet")) == 2
    assert run("trace", folder, "--prompts", str(file), "--out", str(tmp_path / "folder")).returncode == 0
    assert len(list((tmp_path / "folder").glob("circuit-*.json"))) == 2


def test_explain_prints_both_sides_and_writes_json(case, tmp_path) -> None:
    folder, ids, *_ = case
    file = tmp_path / "why.json"
    tokens = ",".join(map(str, ids))
    done = run("explain", folder, "--tokens", tokens, "--firing", "L3H1:10:2", "--out", str(file))
    assert done.returncode == 0, done.stderr
    assert "query side" in done.stdout
    assert "key side" in done.stdout
    assert json.loads(file.read_text())["firing"] == {"layer": 3, "head": 1, "dest": 10, "src": 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tokens", "5,6", "--prompts", "x"), "Give one of"),
        (("--prompts", "missing.jsonl", "--answer-id", "5"), "cannot be read"),
        (("--tokens", "5,6,7", "--answer-id", "999"), "Unknown token id 999"),
        (("--tokens", "5,6,7", "--answer-id", "5", "--method", "magic"), "no method 'magic'"),
        (("--tokens", "5,6,7", "--root", "probability"), "exactly one of"),
    ],
)
def test_bad_input_ends_with_exit_code_two(case, arguments, message: str) -> None:
    done = run("trace", case[0], *arguments)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())


def test_a_damaged_prompts_file_names_the_line(case, tmp_path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"tokens": [5, 6]}\n{"tokens": [5,\n{"tokens": [5, 99]}\n')
    done = run("trace", case[0], "--prompts", str(file), "--answer-id", "5", "--json")
    assert done.returncode == 3, done.stderr
    shown = json.loads(done.stdout)
    assert (len(shown["circuits"]), shown["lines"]) == (1, [1])
    assert [each["line"] for each in shown["skipped"]] == [2, 3]
    assert "2 of 3 lines skipped" in done.stderr
    assert "line 2: is not JSON" in done.stderr
    assert "line 3: Unknown token id 99" in done.stderr
    done = run("trace", case[0], "--prompts", str(file), "--answer-id", "5", "--strict")
    assert done.returncode == 2
    assert "line 2 is not JSON" in done.stderr
    file.write_text('{"tokens": [5, 6]}\n{"tokens": [5, 99]}\n')
    done = run("trace", case[0], "--prompts", str(file), "--answer-id", "5", "--strict")
    assert done.returncode == 2
    assert "line 2: Unknown token id 99" in done.stderr
    file.write_text('{"tokens": [5,\n')
    done = run("trace", case[0], "--prompts", str(file), "--answer-id", "5")
    assert done.returncode == 2
    assert "line 1" in done.stderr


def test_heads_start_every_prompt_of_a_file(case, tmp_path) -> None:
    folder, *_ = case
    file, out = tmp_path / "prompts.jsonl", tmp_path / "circuits"
    file.write_text("".join(json.dumps({"tokens": ids}) + "\n" for ids in prompts()), encoding="utf-8")
    done = run("trace", folder, "--prompts", str(file), "--heads", "L3H1,L2H0", "--out", str(out))
    assert done.returncode == 0, done.stderr
    circuits = [headtrace.load_circuit(path) for path in sorted(out.glob("*.json"))]
    assert [circuit.root.heads for circuit in circuits] == [("L3H1", "L2H0")] * 2


def test_neurons_of_a_complete_circuit_are_in_its_file_and_in_show(case, tmp_path) -> None:
    folder, ids, answer, wrong = case
    file = tmp_path / "c.json"
    asked = ["--tokens", ",".join(map(str, ids)), "--answer-id", str(answer), "--wrong-id", str(wrong)]
    done = run("trace", folder, *asked, "--paths", "complete", "--neurons", "2", "--out", str(file))
    assert done.returncode == 0, done.stderr
    assert "By token:" in done.stdout
    mlps = [node for node in headtrace.load_circuit(file).nodes if node.kind == "mlp"]
    assert mlps
    assert all(len(node.neurons) == 2 for node in mlps)
    shown = run("show", str(file))
    assert f"units {mlps[0].neurons[0].unit} (" in " ".join(shown.stdout.split())


def test_neurons_of_many_prompts_go_to_a_table(case, tmp_path) -> None:
    folder, ids, answer, wrong = case
    prompts_file, table = tmp_path / "prompts.jsonl", tmp_path / "c.parquet"
    prompts_file.write_text(json.dumps({"tokens": ids, "answer": answer, "wrong": wrong}))
    followed = ["--paths", "complete", "--neurons", "2"]
    done = run("trace", folder, "--prompts", str(prompts_file), *followed, "--out", str(table))
    assert done.returncode == 0, done.stderr
    (circuit,) = headtrace.circuits.read_parquet(table)
    assert any(node.neurons for node in circuit.nodes)


@pytest.mark.parametrize("options", [["--neurons", "3"], ["--neurons", "-1", "--paths", "content"]])
def test_neurons_need_content_and_a_number(options) -> None:
    done = run("trace", "builtin", "-p", "When Mary", "--answer", " and", *options)
    assert done.returncode == 2
    assert f"neurons={options[1]}" in " ".join(done.stderr.split())
