"""Mechanisms in runs: kept beside circuits, resumed like the rest, and told of all prompts, of a label, of families."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from typer.testing import CliRunner

import headtrace
from headtrace.cli import app
from headtrace.errors import InputError
from headtrace.families import find_families, shared_steps
from headtrace.mechanism import tell
from headtrace.runs import Run
from headtrace.statistics import Proportion
from headtrace.tasks import load_task
from headtrace.tracing import Tracer

SHARD = 3


@pytest.fixture(scope="module")
def run(model: headtrace.Model, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Eight prompts in three shards; the first time it is interrupted after the first shard."""
    out = tmp_path_factory.mktemp("mechanisms") / "ioi"
    prompts = load_task("ioi", model.tokenizer, n_per_cell=1).examples[:8]

    def stop(done: int, _: int) -> None:
        if done > SHARD:
            raise KeyboardInterrupt

    how: dict[str, Any] = {"out": out, "mechanisms": True, "shard_size": SHARD}
    with pytest.raises(KeyboardInterrupt):
        headtrace.run(model, prompts, progress=stop, **how)
    told: list[int] = []
    found = headtrace.run(model, prompts, progress=lambda done, _: told.append(done), **how)
    assert told[0] == SHARD, "the first shard was whole"
    return found


def test_a_row_of_a_step_is_what_why_says_of_the_prompt(model: headtrace.Model, run: Run) -> None:
    row = run.prompts.collect().row(4, named=True)
    tracer = Tracer(model)
    request = tracer.request(row["text"], answer=row["answer"], wrong=row["wrong"], paths="difference")
    expected = tell(tracer, tracer.compare(request))
    kept = run.steps.filter(pl.col("prompt") == row["id"]).collect().to_dicts()
    assert [each["rule"] for each in kept] == [step.role for step in expected.steps]
    for each, step in zip(kept, expected.steps, strict=True):
        assert step.measured is not None
        assert each["flow"] == pytest.approx(step.flow, rel=1e-4)
        assert each["share"] == pytest.approx(step.flow / expected.whole, rel=1e-4)
        assert each["without"] == pytest.approx(step.measured.without, abs=1e-3)
        assert each["heads"] == [f"{head.name} {head.dest}->{head.src}" for head in step.heads]
    again = run.mechanism(row["id"])
    assert again.sentence == expected.sentence
    assert sum(line.amount for line in again.ledger) == pytest.approx(again.whole, rel=1e-6)


def test_shares_and_means_are_those_of_the_rows(run: Run) -> None:
    found = shared_steps(run)
    assert found.groups == {"all prompts": 8}
    copies = found.table.filter((pl.col("rule") == "copies") & (pl.col("reads") == "IO")).to_dicts()[0]
    roles = run.prompts.select("id", "role:IO", "role:end").collect()
    mine = run.steps.filter(pl.col("rule") == "copies").collect().join(roles, left_on="prompt", right_on="id")
    mine = mine.filter((pl.col("src") == pl.col("role:IO")) & (pl.col("dest") == pl.col("role:end")))
    assert copies["prompts"] == mine["prompt"].n_unique()
    assert (copies["share_low"], copies["share_high"]) == pytest.approx(
        Proportion(copies["prompts"], 8).interval
    )
    assert copies["flow"] == pytest.approx(mine["flow"].mean())
    assert copies["flow_low"] <= copies["flow"] <= copies["flow_high"]
    assert copies["lost"] == pytest.approx((mine["before"] - mine["without"]).mean())
    assert copies["text"] == "*end* copies *IO*"
    farther = (mine["random"] - mine["without"]) * copies["flow"] / abs(copies["flow"])
    assert copies["beyond"] == pytest.approx(farther.mean())
    assert copies["beyond_low"] <= copies["beyond"] <= copies["beyond_high"]


def test_a_step_that_random_components_match_is_said_to_be_no_more_than_they(run: Run) -> None:
    found = shared_steps(run)
    level = pl.when(pl.col("rule") == "copies").then(-0.1).otherwise(0.1)
    doubted = replace(found, table=found.table.with_columns(beyond_low=level))
    lines = [line for line in doubted.summary().splitlines() if "no more than random ones do" in line]
    assert lines
    assert all("copies" in line for line in lines)


def test_groups_by_label_and_by_family_are_compared_step_by_step(run: Run) -> None:
    found = shared_steps(run, "order")
    assert set(found.groups) == {"order ABBA", "order BABA"}
    both = found.frame("differences")
    for row in both.to_dicts():
        assert row["low"] <= row["difference"] <= row["high"]
        assert row["difference"] == pytest.approx(row["in_a"] - row["in_b"])
        if row["verdict"].startswith("more"):
            assert row["low"] > 0 or row["high"] < 0
    families = find_families(run, n=2)
    assert sum(shared_steps(run, families.labels).groups.values()) == 8
    with pytest.raises(InputError, match="'order'"):
        shared_steps(run, "colour")
    with pytest.raises(InputError, match="choose steps or differences"):
        found.frame("edges")


def test_other_paths_keep_what_the_circuit_itself_tells(model: headtrace.Model, tmp_path: Path) -> None:
    prompts = load_task("ioi", model.tokenizer, n_per_cell=1).examples[:2]
    found = headtrace.run(model, prompts, out=tmp_path / "r", mechanisms=True, paths="complete")
    steps = found.steps.collect()
    assert steps.height
    assert steps["without"].null_count() == steps.height, "nothing was measured"


def test_a_run_without_mechanisms_says_how_to_make_one(undisturbed: Run) -> None:
    with pytest.raises(InputError, match="--mechanisms"):
        _ = undisturbed.steps
    with pytest.raises(InputError, match="--mechanisms"):
        undisturbed.mechanism(0)


def test_the_command_tells_a_run_a_prompt_of_it_and_its_families(run: Run, tmp_path: Path) -> None:
    def said(*words: str) -> str:
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == 0, done.output
        return " ".join(done.output.split())

    assert "*end* copies *IO*" in said("why", run.path)
    out = tmp_path / "steps.json"
    assert "order ABBA" in said("why", run.path, "--by", "order", "--out", str(out))
    assert json.loads(out.read_text())["schema"] == "headtrace.steps/1"
    table = tmp_path / "steps.tex"
    said("why", run.path, "--out", str(table))
    assert "& L1H2" in table.read_text() or "& L1H0" in table.read_text()
    assert "Straight into the answer" in said("why", f"{run.path}#0")
    folder = tmp_path / "families"
    assert "family 1" in said("families", run.path, "--n", "2", "--out", str(folder))
    assert set(json.loads((folder / "families.json").read_text())["steps"]["groups"]) == {
        "family 1",
        "family 2",
    }
    assert "family 2" in said("why", run.path, "--families", str(folder))
    assert json.loads(CliRunner().invoke(app, ["why", run.path, "--json"]).stdout)["groups"] == {
        "all prompts": 8
    }


def test_what_cannot_be_asked_of_a_run_is_said(run: Run) -> None:
    for words, message in (
        (("why", f"{run.path}#0", "--by", "order"), "is one prompt"),
        (("why", run.path, "--by", "colour"), "no label 'colour'"),
        (("why", "builtin", "-p", "When Mary", "--by", "order"), "prompts of a run"),
        (("why", run.path, "--out", "steps.svg"), "end its name in .json, .md"),
    ):
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == 2, done.output
        assert message in " ".join(done.output.split())
