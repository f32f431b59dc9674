"""Two runs, or two models, on the same prompts: shares against their definition, intervals, what is refused."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from typer.testing import CliRunner

import headtrace
from headtrace.cli import app
from headtrace.errors import InputError
from headtrace.families import compare_models, compare_runs, compare_signals
from headtrace.families.compare import site_name
from headtrace.statistics import mcnemar, paired_difference
from headtrace.tasks import load_task
from tests.families.populations import builtin
from tests.tiny import tiny_model

NUMBER = 12


@pytest.fixture(scope="module")
def tuned() -> headtrace.Model:
    """The built-in model after a few steps towards the other name."""
    hf = copy.deepcopy(builtin().hf).train()
    optimizer = torch.optim.AdamW(hf.parameters(), lr=1e-3)
    examples = load_task("ioi", builtin().tokenizer, n=NUMBER)
    for _ in range(6):
        logits = [hf(input_ids=torch.tensor([each.token_ids])).logits[0, -1] for each in examples]
        wrong = [each.wrong_ids[0] for each in examples]
        loss = torch.nn.functional.cross_entropy(torch.stack(logits), torch.tensor(wrong))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return headtrace.load(hf.eval(), builtin().tokenizer, name="tuned")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[headtrace.Run, headtrace.Run]:
    """The same prompts under two thresholds; one more in the second."""
    folder = tmp_path_factory.mktemp("runs")
    task = load_task("ioi", builtin().tokenizer, n=NUMBER + 1)
    first = list(task)[:NUMBER]
    return (
        headtrace.run(builtin(), first, out=folder / "low", tau=0.05),
        headtrace.run(builtin(), list(task), out=folder / "high", tau=0.9),
    )


def test_runs_that_keep_mechanisms_are_compared_by_steps_too(tuned, tmp_path) -> None:
    """Whatever their circuits follow: kept steps are read from the table, once for each head and prompt."""
    task = list(load_task("ioi", builtin().tokenizer, n=3))
    kept = [
        headtrace.run(model, task, out=tmp_path / model.name, mechanisms=True) for model in (builtin(), tuned)
    ]
    steps = compare_runs(*kept).frame().filter(kind="step")
    assert steps.height
    for place, run in zip(("a", "b"), kept, strict=True):
        counts = Counter[str]()
        for id in run.prompts.collect()["id"]:
            told = run.mechanism(id)
            counts.update({f"{head.name}: {step.role}" for step in told.steps for head in step.heads})
        for row in steps.to_dicts():
            assert row[place] == pytest.approx(counts[row["item"]] / 3), row["item"]


def counted(run: headtrace.Run, ids: list[str], by: Any) -> dict[str, Counter[str]]:
    """In how many prompts nodes and edges are, from the circuits one by one."""
    found = {"node": Counter[str](), "edge": Counter[str]()}
    for id, circuit in run.items(ids):
        row = run.prompts.filter(id=id).collect().row(0, named=True)
        roles = {name.removeprefix("role:"): at for name, at in row.items() if name.startswith("role:")}
        named = {node.id: site_name(node.site, by, roles) for node in circuit.nodes}
        found["node"].update({name for name in named.values() if name not in (None, "root")})
        edges = [(named[e.source], named[e.target], e.side) for e in circuit.edges]
        found["edge"].update(
            {
                f"{source} => {'root' if side == 'root' else f'{side} of {target}'}"
                for source, target, side in edges
                if source is not None and target is not None
            }
        )
    return found


def test_shares_are_those_of_the_circuits(runs: tuple[headtrace.Run, headtrace.Run]) -> None:
    found = compare_runs(*runs, by="components")
    ids = runs[0].prompts.collect()["id"].to_list()
    assert (found.pairs, found.left_out) == (NUMBER, (0, 1))
    one, two = (counted(run, ids, "components") for run in runs)
    for kind in ("node", "edge"):
        rows = found.table.filter(kind=kind).rows(named=True)
        assert {row["item"] for row in rows} == {*one[kind], *two[kind]}
        for row in rows:
            shares = [each[kind][row["item"]] / NUMBER for each in (one, two)]
            assert [row["a"], row["b"]] == pytest.approx(shares)
            assert row["difference"] == pytest.approx(row["b"] - row["a"])
            assert row["only_b"] - row["only_a"] == two[kind][row["item"]] - one[kind][row["item"]]
            assert row["low"] <= row["high"]
            assert row["p"] <= row["q"] + 1e-12
    assert found.went.height, "a higher threshold has fewer firings"
    assert found.frame().equals(found.table)
    assert any("different options (method)" in line for line in found.warnings)


def test_roles_are_the_default_where_there_are_some(runs: tuple[headtrace.Run, headtrace.Run]) -> None:
    found = compare_runs(*runs)
    assert found.by == "roles"
    assert any("end->" in item for item in found.table["item"])


def test_a_run_does_not_differ_from_itself(runs: tuple[headtrace.Run, headtrace.Run], tmp_path: Path) -> None:
    found = compare_runs(runs[0], runs[0].path)
    assert not found.changed.height
    assert set(found.table["difference"]) == {0.0}
    assert ((found.table["low"] < 0) & (found.table["high"] > 0)).all()
    assert found.values["difference"] == 0
    found.save(tmp_path)
    assert json.loads((tmp_path / "comparison.json").read_text())["schema"] == "headtrace.runcomparison/1"
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert "12 prompts: 0 items" in repr(found)


def test_steps_are_compared_where_runs_have_them(tmp_path: Path) -> None:
    text = "When {} and {} went to the store, {} gave a drink to"
    lines = [
        {
            "text": text.format(a, b, b),
            "counterfactual": text.format(a, b, a),
            "answer": f" {a}",
            "wrong": f" {b}",
        }
        for a, b in (("Mary", "John"), ("Tom", "Anna"), ("John", "Tom"))
    ]
    run = headtrace.run(builtin(), lines, out=tmp_path / "difference", paths="difference")
    steps = compare_runs(run, run).table.filter(kind="step")
    expected = {
        f"{head.name}: {step.role}"
        for circuit in run.circuits()
        for step in circuit.mechanism().steps
        for head in step.heads
    }
    assert set(steps["item"]) == expected


def test_models_are_traced_on_the_same_prompts(tuned: headtrace.Model, tmp_path: Path) -> None:
    prompts = load_task("ioi", builtin().tokenizer, n=NUMBER)
    found = compare_models(builtin(), tuned, prompts, root="linear", out=tmp_path)
    assert found.names == ("builtin", "tuned")
    assert found.values["b"] < found.values["a"], "it was trained towards the other name"
    assert found.values["high"] < 0
    assert any("The weights differ" in line for line in found.warnings)
    assert headtrace.open_run(tmp_path / "b").manifest.model.name == "tuned"
    again = compare_runs(tmp_path / "a", tmp_path / "b")
    assert again.table.equals(found.table)


def test_signals_are_compared_only_where_directions_mean_the_same(tuned: headtrace.Model) -> None:
    texts = [each.text for each in load_task("ioi", builtin().tokenizer, n=4)]
    found = compare_models(builtin(), tuned, texts, top_k=1)
    assert found.signals is not None
    assert found.signals.table.height
    assert found.frame("signals")["reads"].is_in(
        ["the same", "partly the same", "something else", "the opposite", "not enough circuits",
         "varies within families, too"]
    ).all()  # fmt: skip
    lines = [{"tokens": [3, 5, 7, 9, 5], "top_k": 1}, {"tokens": [4, 8, 8, 2, 11, 9], "top_k": 1}]
    one, other = tiny_model("llama"), tiny_model("llama", seed=1)
    apart = compare_models(one, other, lines)
    assert apart.signals is None
    assert any("Signals are not compared" in line for line in apart.warnings)
    circuit = headtrace.Tracer(one).trace(lines[0])
    with pytest.raises(InputError, match="need not mean the same"):
        compare_signals(circuit, circuit, one, other=other)
    with pytest.raises(InputError, match="this comparison has items"):
        apart.frame("signals")


def test_what_cannot_be_compared_is_refused(
    runs: tuple[headtrace.Run, headtrace.Run], tmp_path: Path
) -> None:
    other = headtrace.run(builtin(), ["When Mary and John went to"], out=tmp_path / "other", top_k=1)
    with pytest.raises(InputError, match="no prompt in common"):
        compare_runs(runs[0], other)
    tiny = headtrace.run(tiny_model("llama"), [{"tokens": [3, 4, 5], "top_k": 1}], out=tmp_path / "tiny")
    with pytest.raises(InputError, match="different architectures"):
        compare_runs(runs[0], tiny)
    with pytest.raises(InputError, match="has no roles"):
        compare_runs(runs[0], other, by="roles")
    with pytest.raises(InputError, match="layers of"):
        compare_models(builtin(), tiny_model("llama"), ["x"])


def test_the_command_line_takes_runs_and_models(
    runs: tuple[headtrace.Run, headtrace.Run], tuned: headtrace.Model, tmp_path: Path
) -> None:
    def called(*words: object, code: int = 0) -> Any:
        done = CliRunner().invoke(app, ["compare", *map(str, words)])
        assert done.exit_code == code, done.output
        return done

    shown = called(runs[0].path, runs[1].path, "--by", "components").stdout
    assert f"{NUMBER} prompts in both, matched by components" in shown
    assert "Nodes that differ most" in shown
    told = json.loads(called(runs[0].path, runs[1].path, "--json", "--out", tmp_path / "c.png").stdout)
    assert told["pairs"] == NUMBER
    assert (tmp_path / "c.png").stat().st_size > 1000
    tuned.hf.save_pretrained(tmp_path / "tuned")
    tuned.tokenizer.save_pretrained(tmp_path / "tuned")
    lines = [{"text": each.text, "answer": each.answer, "wrong": each.wrong} for each in load_task(
        "ioi", builtin().tokenizer, n=3)]  # fmt: skip
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, [*lines, {"txet": "x"}])))
    asked = ("builtin", tmp_path / "tuned", "--prompts", tmp_path / "prompts.jsonl", "--paths", "attention")
    done = called(*asked, "--json", "--out", tmp_path / "changed", code=3)
    told = json.loads(done.stdout)
    written = {path.name for path in (tmp_path / "changed").iterdir() if path.suffix}
    assert all(name in done.stderr for name in written), "every file that is written is named"
    assert told["names"] == ["builtin", "tuned"]
    assert headtrace.open_run(tmp_path / "changed" / "a").status().done == 3
    assert (tmp_path / "changed" / "comparison.json").exists()
    assert (
        "--paths goes with --prompts"
        in called(runs[0].path, runs[1].path, "--paths", "complete", code=2).stderr
    )
    assert "compares two models" in called("builtin", "--prompts", tmp_path / "prompts.jsonl", code=2).stderr


def test_intervals_of_paired_shares_cover_what_they_should() -> None:
    rng, n = np.random.default_rng(0), 40
    for cells in ((0.3, 0.1, 0.2, 0.4), (0.9, 0.05, 0.03, 0.02)):
        drawn = rng.multinomial(n, cells, 4000)
        low, high = paired_difference(drawn[:, 1], drawn[:, 2], n)
        inside = np.mean((low <= cells[2] - cells[1]) & (cells[2] - cells[1] <= high))
        assert inside > 0.93, cells
    only = rng.integers(0, 20, (30, 2))
    expected = [stats.binomtest(int(a), int(a + b), 0.5).pvalue if a + b else 1.0 for a, b in only]
    np.testing.assert_allclose(mcnemar(only[:, 0], only[:, 1]), expected, rtol=1e-9)
