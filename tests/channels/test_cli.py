"""``headtrace decompose``: the table, one firing, its files, and clear errors."""

from __future__ import annotations

import json

import pytest

from headtrace.cli import main
from tests.tiny import tiny_hf


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("tiny")
    tiny_hf("qwen2").save_pretrained(path)
    return str(path)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as done:
        main(list(arguments))
    return int(done.value.code or 0)


def test_without_a_firing_the_strongest_are_listed(folder: str, capsys, tmp_path) -> None:
    file = tmp_path / "all.json"
    assert run("decompose", folder, "--tokens", "5,6,7,8,9,10", "--top", "5", "--out", str(file)) == 0
    shown = capsys.readouterr().out
    assert "n_recon" in shown
    rows = json.loads(file.read_text())["firings"]
    assert len(rows) == 5
    for row in rows:
        f = row["firing"]
        assert f"L{f['layer']}H{f['head']} {f['dest']}->{f['src']}" in shown
        assert repr(row["tokens"][f["src"]]) in shown
        assert f"{len(row['signal_set'])}/8" in shown
    strengths = [row["attention"] for row in rows]
    assert strengths == sorted(strengths, reverse=True)


def test_one_firing_is_shown_drawn_and_written(folder: str, capsys, tmp_path) -> None:
    png, file = tmp_path / "a" / "why.png", tmp_path / "why.json"
    arguments = ("--tokens", "5,6,7,8,9,10", "--firing", "L2H1:4:2", "--png", str(png), "--out", str(file))
    assert run("decompose", folder, *arguments) == 0
    shown = capsys.readouterr().out
    assert "L2H1 4->2" in shown
    assert "rotated bases of the same logit" in shown.replace("\n", " ")
    assert png.read_bytes().startswith(b"\x89PNG")
    why = json.loads(file.read_text())
    assert sum(why["terms"]) == pytest.approx(why["logit"], abs=1e-4)
    assert sum(why["relative_terms"]) == pytest.approx(why["relative_attention"], abs=1e-4)
    assert why["tokens"] == ["#5", "#6", "#7", "#8", "#9", "#10"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--firing", "L2H1:4:2:1"), "not a firing"),
        (("--firing", "L2H1:2:4"), "does not see"),
        (("--png", "a.png"), "--firing"),
        (("--bias", "none"), "offset or homogeneous"),
        (("--bias", "homogeneous"), "rotary"),
    ],
)
def test_bad_input_ends_with_code_two(folder: str, capsys, arguments, message: str) -> None:
    assert run("decompose", folder, "--tokens", "5,6,7,8,9", *arguments) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")
