"""``headtrace sinks``: from a task to a folder of tables and figures."""

from __future__ import annotations

import json

from typer.testing import CliRunner

import headtrace
from headtrace.cli import app


def run(*arguments: object, code: int = 0):
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    assert done.exit_code == code, done.output
    return done


def test_two_tasks_become_a_folder_and_one_json_object(tmp_path) -> None:
    out = tmp_path / "sinks"
    asked = ("--task", "ioi", "--task", "facts", "-n", 4, "--directions", "1")
    done = run("sinks", "builtin", *asked, "--out", out, "--json")
    content = json.loads(done.stdout)
    assert content["settings"]["prompts"] == {"ioi": 4, "facts": 4}
    assert headtrace.load_sinks(out).to_dict()["collapse"] == content["collapse"]
    assert (out / "sinks-signals.png").stat().st_size > 1000
    assert "Wrote" in done.stderr


def test_prompts_of_your_own_are_shown_to_people(tmp_path) -> None:
    texts = (
        "When Mary and John went to the store, John gave a drink to",
        "When Tom and Anna went to the park, Tom met",
    )
    lines = [json.dumps({"text": text, "answer": " Mary", "wrong": " John"}) for text in texts]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    shown = run("sinks", "builtin", "--prompts", tmp_path / "mine.jsonl", "--directions", "1").stdout
    assert "Sinks of builtin (2 mine)" in shown
    assert "Without 1 direction on the key side" in shown


def test_lines_that_cannot_be_read_are_counted_in_the_files_and_the_exit_code(tmp_path) -> None:
    """Two of four: more than one in ten."""
    text = "When Mary and John went to the store, John gave a drink to"
    lines = [
        json.dumps({"text": text}),
        "{broken",
        json.dumps({"text": "When Zorblax"}),
        json.dumps({"text": text}),
    ]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    asked = ("sinks", "builtin", "--prompts", tmp_path / "mine.jsonl", "--directions", "")
    done = run(*asked, "--out", tmp_path / "out", "--json", code=3)
    (skipped,) = json.loads(done.stdout)["settings"]["skipped"].values()
    assert [each["line"] for each in skipped] == [2, 3]
    assert "Zorblax" in skipped[1]["reason"]
    saved = json.loads((tmp_path / "out" / "sinks.json").read_text())["settings"]
    assert saved["skipped"] == {"mine": skipped}
    assert headtrace.load_sinks(tmp_path / "out").settings.skipped == {"mine": skipped}
    assert "2 of 4 prompts failed" in done.stderr
    (tmp_path / "good.jsonl").write_text("\n".join([lines[0]] * 9 + lines[1:2]))
    few = run("sinks", "builtin", "--prompts", tmp_path / "good.jsonl", "--directions", "", "--json")
    assert [each["line"] for each in json.loads(few.stdout)["settings"]["skipped"]["good"]] == [10]


def test_wrong_questions_end_with_a_reason(tmp_path) -> None:
    assert "--task" in run("sinks", "builtin", code=2).stderr
    assert "no task 'iou'" in run("sinks", "builtin", "--task", "iou", code=2).stderr
    (tmp_path / "file").write_text("")
    blocked = run("sinks", "builtin", "--task", "ioi", "--out", tmp_path / "file" / "x", code=2)
    assert "folder" in blocked.stderr
    assert "not a list" in run("sinks", "builtin", "--task", "ioi", "--directions", "few", code=2).stderr
