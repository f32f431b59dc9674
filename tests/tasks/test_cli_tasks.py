"""``headtrace tasks``: lists without torch, previews with roles, measures with intervals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headtrace.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["tasks", *arguments])
    output = capsys.readouterr()
    code = ended.value.code
    return (code if isinstance(code, int) else 0), output.out, output.err


def test_lists_every_task(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys)
    assert code == 0
    for word in (
        "ioi",
        "greater-than",
        "pronoun",
        "facts",
        ".jsonl",
        "IO, S1, S2, end",
        "30 cells x 10 = 300",
    ):
        assert word in out


def test_listing_does_not_load_torch() -> None:
    code = (
        "import sys\nfrom headtrace.cli import main\n"
        "try: main(['tasks'])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_shows_examples_with_their_roles(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", "ioi", "--model", "builtin", "-n", "3")
    assert code == 0
    assert out.count("positions:") == 3
    assert "IO 2  S1 4  S2 10  end 14" in out
    assert "order=ABBA" in out


def test_accuracy_as_table_and_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "accuracy.json"
    code, out, _ = run(capsys, "accuracy", "builtin", "ioi", "--n", "1", "--out", str(file))
    assert code == 0
    assert "Wilson 95%" in out
    record = json.loads(file.read_text())
    assert record["model"] == "builtin"
    assert record["total"] == 30
    assert set(record["by_label"]["order"]) == {"ABBA", "BABA"}


def test_own_file_with_lines_left_out_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    good = {"text": "The capital of France is", "answer": " Paris", "wrong": " Rome"}
    path.write_text(json.dumps(good) + "\n" + json.dumps(good | {"answer": " Xanadu"}) + "\n")
    code, _, err = run(capsys, "accuracy", "builtin", str(path))
    assert code == 0
    assert "Left out 1: answer ' Xanadu': not in the vocabulary (line 2)" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "ioy"), "There is no task 'ioy'"),
        (("accuracy", "builtin", "facts", "--n", "500"), "Ask for at most"),
        (("accuracy", "builtin", "facts", "--variant", "flipped"), "no variant 'flipped'"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert message in " ".join(err.split())
    assert "Traceback" not in err
