"""Methods side by side: what is measured agrees with sufficiency itself, and what cannot be is counted."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import headtrace
from headtrace.causal.bench import METHODS, bench
from headtrace.cli import app
from headtrace.errors import InputError

PROMPT = "When Mary and John went to the store, John gave a drink to"
OTHER = "When Anna and Tom went to the store, Emma gave a drink to"
LINES = (
    {"text": PROMPT, "answer": " Mary", "wrong": " John", "counterfactual": OTHER},
    {"text": PROMPT, "answer": " John", "wrong": " Mary", "counterfactual": OTHER},  # answered wrongly
    {"text": PROMPT, "answer": " Mary", "wrong": " John", "counterfactual": OTHER + " the"},  # longer
    {"text": PROMPT, "answer": " Mary", "wrong": " John"},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs")
    (path / "ioi.jsonl").write_text("\n".join(map(json.dumps, LINES)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def found(folder):
    return bench(headtrace.load("builtin"), folder, n=4)


def test_every_method_is_measured_on_prompts_that_can_be(found) -> None:
    assert found.medians["method"].to_list() == list(METHODS)
    assert dict(found.passed["ioi"]) == {
        "used": 1,
        "answered wrongly": 1,
        "counterfactual of another length": 1,
        "no counterfactual": 1,
    }
    costs = dict(found.medians.select("method", "cost").rows())
    assert costs.pop("random") == 0
    assert all(cost > 0 for cost in costs.values())


def test_numbers_are_those_of_sufficiency(found) -> None:
    model = headtrace.load("builtin")
    circuit = headtrace.Tracer(model).trace(PROMPT, answer=" Mary", wrong=" John")
    direct = headtrace.sufficiency(circuit, model, OTHER, baselines=["attribution patching"])
    rows = {row["method"]: row for row in found.rows}
    assert rows["acc++"]["at 5"] == pytest.approx(direct.at(5), abs=1e-5)
    assert rows["acc++"]["cpr"] == pytest.approx(direct.cpr, abs=1e-5)
    patching = direct.compared["attribution patching"]
    assert rows["attribution patching"]["at 10"] == pytest.approx(patching.at(10), abs=1e-5)
    assert rows["attribution patching"]["cmd"] == pytest.approx(patching.cmd, abs=1e-5)


def test_scores_for_mib_are_flows_between_named_components(found) -> None:
    model = headtrace.load("builtin")
    circuit = headtrace.Tracer(model).trace(
        PROMPT, answer=" Mary", wrong=" John", paths="difference", counterfactual=OTHER
    )
    scores = found.mib()
    layers, heads = range(model.n_layers), range(model.n_heads)
    assert scores["cfg"] == {
        "n_layers": len(layers),
        "n_heads": len(heads),
        "d_model": model.d_model,
        "parallel_attn_mlp": False,
    }
    # The graph that the benchmark builds from cfg: what comes before in the residual stream can be read.
    stream, possible = ["input"], set[str]()
    for layer in layers:
        own = [f"a{layer}.h{head}" for head in heads]
        possible |= {f"{name}->{head}<{side}>" for name in stream for head in own for side in "qkv"}
        stream += own
        possible |= {f"{name}->m{layer}" for name in stream}
        stream.append(f"m{layer}")
    possible |= {f"{name}->logits" for name in stream}
    assert scores["edges"].keys() <= possible
    # A node without a score would be kept in every circuit there.
    assert list(scores["nodes"]) == [*stream, "logits"]
    assert all("score" in each for name, each in scores["nodes"].items() if name != "logits")
    assert {name for name, each in scores["nodes"].items() if each["in_graph"]} >= {"input", "logits"}
    into_root = sum(each["score"] for name, each in scores["edges"].items() if name.endswith("->logits"))
    shown = sum(edge.weight for edge in circuit.edges if edge.side == "root")
    assert into_root == pytest.approx(shown, abs=1e-4)


def test_the_figure_is_labelled_with_the_sizes_that_were_measured(found) -> None:
    axis = found.plot().axes[0]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["5", "10", "20", "40"]
    assert not len(axis.xaxis.get_minorticklocs())


def test_the_command_writes_a_folder_a_table_and_scores(folder, tmp_path) -> None:
    given = ["bench", "builtin", "--prompts", str(folder), "--methods", "difference,random"]
    for more, written in (
        (["--out", str(tmp_path / "all")], ["all/bench.json", "all/bench.png", "all/bench.parquet"]),
        (["--out", str(tmp_path / "t.tex")], ["t.tex"]),
        (["--to", "mib", "--out", str(tmp_path / "mib.json")], ["mib.json"]),
    ):
        done = CliRunner().invoke(app, [*given, *more])
        assert done.exit_code == 0, done.output
        assert all((tmp_path / name).stat().st_size for name in written)
    assert (tmp_path / "t.tex").read_text(encoding="utf-8").startswith(r"\begin{tabular}{llr")
    assert json.loads((tmp_path / "mib.json").read_text(encoding="utf-8")).keys() == {"cfg", "nodes", "edges"}


def test_what_cannot_be_measured_is_said_in_one_line(folder, tmp_path) -> None:
    model = headtrace.load("builtin")
    (tmp_path / "p.jsonl").write_text(json.dumps(LINES[3]), encoding="utf-8")
    for given, options, match in (
        (folder, {"methods": ["magic"]}, "no method"),
        (tmp_path / "empty", {}, "cannot be read"),
        (tmp_path / "p.jsonl", {}, "No prompt could be measured.*no counterfactual"),
    ):
        with pytest.raises(InputError, match=match):
            bench(model, given, **options)


def test_lines_that_cannot_be_read_are_listed_and_set_the_exit_code(tmp_path) -> None:
    (tmp_path / "ioi.jsonl").write_text("\n".join([json.dumps(LINES[0]), "{broken", '{"answer": " Mary"}']))
    given = ["bench", "builtin", "--prompts", str(tmp_path / "ioi.jsonl"), "--methods", "random"]
    done = CliRunner().invoke(app, [*given, "--json", "--out", str(tmp_path / "out")])
    assert done.exit_code == 3, done.output
    for content in (json.loads(done.stdout), json.loads((tmp_path / "out" / "bench.json").read_text())):
        assert [each["line"] for each in content["skipped"]["ioi"]] == [2, 3]
        assert content["lines"] == 3
