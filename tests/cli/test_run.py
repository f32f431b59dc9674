"""``headtrace run`` and ``headtrace runs``, and a circuit of a run wherever a circuit is taken."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

import headtrace
from headtrace.cli import app
from headtrace.tasks import TASKS
from tests.starting import Started, command

MARY = "When Mary and John went to the store, John gave a drink to"
GOOD = {"text": MARY, "answer": " Mary", "wrong": " John", "labels": {"kind": "ioi"}, "roles": {"IO": [5, 9]}}


def called(*words: str, code: int = 0) -> str:
    found = CliRunner().invoke(app, list(words))
    assert found.exit_code == code, found.output
    return found.output


def wrong(*words: str) -> str:
    return " ".join(called(*words, code=2).split())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("runs") / "ioi")
    called("run", "builtin", "--task", "ioi", "-n", "30", "--out", folder)
    return folder


def written(folder: Path, *lines: object) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("".join(each if isinstance(each, str) else json.dumps(each) + "\n" for each in lines))
    return str(path)


def test_a_task_is_traced_balanced_and_told(run: str) -> None:
    orders = headtrace.open_run(run).prompts.collect()["label:order"].value_counts()
    assert orders["count"].to_list() == [15, 15]
    told = called("runs", run)
    assert "30 prompts: 30 done, 0 failed, 0 left" in told
    found = json.loads(called("runs", run, "--json"))
    assert (found["done"], found["left"], found["manifest"]["schema"]) == (30, 0, "headtrace.run/1")
    assert found["manifest"]["options"]["paths"] == "attention"


def test_a_circuit_of_a_run_is_shown_viewed_verified_and_exported(run: str, tmp_path: Path) -> None:
    name = headtrace.open_run(run).prompts.collect()["id"][4]
    assert "Root (" in called("show", f"{run}#0")
    called("view", f"{run}#{name[:8]}", "--out", str(tmp_path / "c.html"), "--no-open")
    called("export", f"{run}#{name}", "--out", str(tmp_path / "c.json"))
    assert headtrace.load_circuit(tmp_path / "c.json") == headtrace.open_run(run).circuit(name)
    assert "PASS" in called("verify", f"{run}#{name}", "--edges", "none")
    assert "no prompt 'zzz'" in wrong("show", f"{run}#zzz")


def test_the_same_command_goes_on_and_another_is_refused_with_the_difference(run: str) -> None:
    called("run", "builtin", "--task", "ioi", "-n", "30", "--out", run)
    told = wrong("run", "builtin", "--task", "ioi", "-n", "30", "--out", run, "--paths", "content")
    assert 'options.paths: "attention" there, "content" now' in told


def test_a_file_of_prompts_is_traced_with_labels_and_roles(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD, {"tokens": [2, 7, 201, 4, 202], "answer": 201})
    told = json.loads(called("run", "builtin", "--prompts", path, "--out", str(tmp_path / "r"), "--json"))
    assert told["prompts"] == 2
    row = headtrace.open_run(tmp_path / "r").prompts.collect().filter(index=0).to_dicts()[0]
    assert (row["label:kind"], row["role:IO"]) == ("ioi", 2)


def test_a_broken_line_is_told_with_number_and_field_and_strict_makes_it_an_error(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD, "{broken\n", {"text": MARY, "answer": True}, GOOD | {"labels": [1]})
    out = str(tmp_path / "r")
    told = wrong("run", "builtin", "--prompts", path, "--out", out, "--strict")
    assert "line 2" in told
    assert not Path(out).exists()
    told = " ".join(called("run", "builtin", "--prompts", path, "--out", out, code=3).split())
    assert "3 of 4 lines skipped" in told
    assert "line 3: 'answer' must be" in told
    assert "line 4: 'labels' must be" in told


def test_an_unknown_word_fails_alone_and_with_strict_stops_the_run(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD, GOOD | {"answer": " Zorblax"})
    told = called("run", "builtin", "--prompts", path, "--out", str(tmp_path / "r"), code=3)
    assert "1 done, 1 failed" in told
    assert "Zorblax" in told
    assert "Prompt 1: " in wrong(
        "run", "builtin", "--prompts", path, "--out", str(tmp_path / "s"), "--strict"
    )


def test_skipped_lines_keep_their_places_numbers_and_reasons(tmp_path: Path) -> None:
    path = written(tmp_path, "[1]\n", GOOD, "{broken\n", GOOD | {"id": "last"})
    out = str(tmp_path / "r")
    found = CliRunner().invoke(app, ["run", "builtin", "--prompts", path, "--out", out, "--json"])
    assert found.exit_code == 3
    told = json.loads(found.stdout)
    assert (told["prompts"], told["done"], told["failed"], told["skipped"]) == (4, 2, 2, 2)
    plan = told["manifest"]["plan"]
    assert plan["skipped"] == 2
    assert [line["line"] for line in plan["skipped_lines"]] == [1, 3]
    assert "expected a JSON object" in plan["skipped_lines"][0]["reason"]
    rows = headtrace.open_run(out).prompts.sort("index").collect().to_dicts()
    assert [row["status"] for row in rows] == ["failed", "done", "failed", "done"], (
        "the index counts lines as given"
    )
    assert rows[3]["id"] == "last"
    assert rows[2]["reason"].startswith("input: line 3: is not JSON")
    called("run", "builtin", "--prompts", path, "--out", out, code=3)  # nothing is left to do


def test_the_exit_code_follows_from_the_share_that_failed(tmp_path: Path) -> None:
    """One in ten is said and counted, more than that is exit code 3; an empty circuit is a result."""
    lines = [GOOD] * 9
    path = written(tmp_path, *lines, "{broken\n")
    called("run", "builtin", "--prompts", path, "--out", str(tmp_path / "a"), code=0)
    path = written(tmp_path, *lines[:8], "{broken\n")
    called("run", "builtin", "--prompts", path, "--out", str(tmp_path / "b"), code=3)
    empty = GOOD | {"answer": " John", "wrong": " Mary"}
    path = written(tmp_path, empty)
    told = called("run", "builtin", "--prompts", path, "--out", str(tmp_path / "c"), code=0)
    assert "no circuit: 1" in told


def test_a_run_in_memory_is_refused_before_anything_is_computed() -> None:
    told = wrong("run", "builtin", "--task", "ioi", "-n", "30", "--out", "memory://z")
    assert "lost when it ends" in told


def test_what_is_asked_for_wrongly_is_told(tmp_path: Path, run: str) -> None:
    out = str(tmp_path / "r")
    assert "either --task" in wrong("run", "builtin", "--out", out)
    assert "no task 'oio'" in wrong("run", "builtin", "--task", "oio", "--out", out)
    assert "-n belongs to" in wrong("run", "builtin", "--prompts", "x", "-n", "3", "--out", out)
    assert "choose local or ray" in wrong("run", "builtin", "--task", "ioi", "--engine", "dask", "--out", out)
    assert "choose 'attention'" in wrong("run", "builtin", "--task", "ioi", "--paths", "all", "--out", out)
    assert "is not a run" in wrong("runs", str(tmp_path))
    (tmp_path / "other").write_text("")
    assert "holds other files" in wrong("run", "builtin", "--task", "ioi", "--out", str(tmp_path))


def test_a_task_that_the_vocabulary_cannot_express_is_told(tmp_path: Path) -> None:
    words = ("run", "builtin", "--task", "facts", "-n", str(TASKS["facts"].n_cells * 1000))
    told = wrong(*words, "--out", str(tmp_path / "r"))
    assert "for this tokenizer's vocabulary" in told
    assert not (tmp_path / "r").exists()


def test_an_interrupt_ends_with_130_and_says_the_command_that_goes_on(tmp_path: Path) -> None:
    words = [
        "run",
        "builtin",
        "--task",
        "ioi",
        "-n",
        "600",
        "--out",
        str(tmp_path / "r"),
        "--shard-size",
        "4",
    ]
    process = Started(command, *words)
    first = tmp_path / "r" / "shards" / "00000.json"
    while not first.exists():
        assert process.wait(0.01) is None, process.told()
    process.send_signal(signal.SIGINT)
    told = process.told()
    assert process.wait() == 130
    assert f"To resume: headtrace {' '.join(words)}" in " ".join(told.split())
    assert "Traceback" not in told
    assert headtrace.open_run(tmp_path / "r").status().done > 0


def test_any_number_of_prompts_is_spread_evenly_over_the_cells_of_a_task(tmp_path: Path) -> None:
    told = called("run", "builtin", "--task", "ioi", "-n", "40", "--out", str(tmp_path / "r"))
    assert "40 prompts over 30 cells" in told
    prompts = headtrace.open_run(str(tmp_path / "r")).prompts.collect()
    assert prompts.height == 40
    assert set(prompts.group_by("label:form", "label:order").len()["len"]) == {1, 2}
