r"""``--out x.tex``: commands whose result is a table write it as LaTeX, with the numbers that ``--json`` prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from typer.testing import CliRunner

import headtrace
from headtrace.cli import app
from headtrace.cli.output import Output
from headtrace.errors import InputError
from headtrace.tables import latex_table
from headtrace.tasks import load_task

TEXT = "When Mary and John went to the store, John gave a drink to"
OTHER = "When Anna and Tom went to the store, Emma gave a drink to"
FIRING = ("-p", TEXT, "--firing", "L1H0:5:2")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A circuit, a run with mechanisms, and a second run of the same prompts."""
    folder, model = tmp_path_factory.mktemp("tables"), headtrace.load("builtin")
    headtrace.Tracer(model).trace(TEXT, " Mary", " John").save(folder / "c.json")
    examples = load_task("ioi", model.tokenizer, n_per_cell=1).examples[:6]
    lines = [
        {"id": f"p{number}", "text": each.text, "answer": each.answer, "wrong": each.wrong}
        for number, each in enumerate(examples)
    ]
    (folder / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    for name, option in (("r", ("--mechanisms",)), ("r2", ("--paths", "complete"))):
        done = CliRunner().invoke(
            app,
            ["run", "builtin", "--prompts", str(folder / "p.jsonl"), *option, "--out", str(folder / name)],
        )
        assert done.exit_code == 0, done.output
    return folder


def of(under: str, *names: str) -> Callable[[Any], list[tuple[Any, ...]]]:
    """Some fields of each row of a list in what is printed as JSON."""
    return lambda content: [tuple(row[name] for name in names) for row in content[under]]


Rows = Callable[[Any], list[tuple[Any, ...]]]
TABLES: dict[str, tuple[tuple[str, ...], tuple[str, ...], Rows]] = {
    "the strongest firings": (
        ("decompose", "builtin", "-p", TEXT),
        ("n_recon", "sparseness"),
        of("firings", "n_recon", "sparseness"),
    ),
    "the channels of a firing": (
        ("decompose", "builtin", *FIRING),
        ("relative_term",),
        lambda found: [(term,) for term in sorted(found["relative_terms"], reverse=True)],
    ),
    "the causes of a firing": (
        ("explain", "builtin", *FIRING),
        ("side", "weight"),
        lambda found: [
            (side, cause["weight"])
            for side, cause in sorted(
                ((side, cause) for side in ("query", "key") for cause in found[side]["causes"]),
                key=lambda each: -each[1]["weight"],
            )
        ],
    ),
    "the pairs behind a firing": (
        ("explain", "builtin", *FIRING, "--pairs", "4"),
        ("value",),
        lambda found: [(pair["value"],) for pair in found["pairs"]["pairs"]],
    ),
    "a change": (
        ("intervene", "c.json", "--source", "L1H0 14->4", "--target", "L2H0 14->10", "--side", "query"),
        ("cosine", "attention_after"),
        lambda found: [(found["edges"][0]["cosine"], found["attention_after"])],
    ),
    "edges into a head": (
        ("edges", "c.json", "L2H0"),
        ("weight", "reach", "attention"),
        of("edges", "weight", "reach", "attention"),
    ),
    "sufficiency": (
        ("sufficiency", "c.json", "--counterfactual", OTHER, "--baselines"),
        ("ranking", "cmd"),
        lambda found: [
            ("circuit", found["cmd"]),
            *((name, curve["cmd"]) for name, curve in found["baselines"].items()),
        ],
    ),
    "faithfulness": (
        ("faithfulness", "c.json"),
        ("firings", "metric"),
        of("curve", "firings", "metric"),
    ),
    "families": (
        ("families", "r", "--n", "2"),
        ("family", "circuits"),
        lambda found: [(int(name), size) for name, size in found["sizes"].items()],
    ),
    "signals": (
        ("signals", "r2#p0", "r2#p1"),
        ("side", "cosine"),
        of("table", "side", "cosine"),
    ),
    "two runs": (("compare", "r", "r2"), ("kind", "difference"), of("items", "kind", "difference")),
    "two circuits": (("compare", "r#p0", "r#p1"), ("kind", "first"), of("items", "kind", "first")),
    "accuracy": (
        ("tasks", "accuracy", "builtin", "ioi", "-n", "1"),
        ("value", "total"),
        lambda found: [
            ("", found["total"]),
            *((value, each["total"]) for part in found["by_label"].values() for value, each in part.items()),
        ],
    ),
    "predictions": (
        ("verify", "c.json", "--edges", "none"),
        ("firing", "measured"),
        of("predictions", "firing", "measured"),
    ),
    "verdicts": (("verify", "r", "--edges", "none"), ("verdict", "why"), of("circuits", "verdict", "why")),
    "a mechanism": (
        ("why", "builtin", "-p", TEXT, "--answer", " Mary", "--wrong", " John"),
        ("flow",),
        of("steps", "flow"),
    ),
    "the mechanisms of a run": (("why", "r"), ("share", "flow"), of("steps", "share", "flow")),
    "the mechanism of one prompt of it": (("why", "r#p0"), ("flow",), of("steps", "flow")),
    "words of a prompt": (
        ("matters", "builtin", "-p", TEXT, "--answer", " Mary", "--wrong", " John", "--budget", "20"),
        ("mean",),
        lambda found: [
            (each["mean"],) for each in sorted(found["words"], key=lambda each: each["positions"])
        ],
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_the_rows_that_json_has(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(here)
    line, columns, expected = TABLES[name]
    out = tmp_path / "x.tex"
    done = CliRunner().invoke(app, [*line, "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    head, rows = read(out)
    places = [head.index(column) for column in columns]
    # As the table rounds them.
    rounded = pl.DataFrame(expected(json.loads(done.stdout)), schema=columns, orient="row")
    (tmp_path / "expected.tex").write_text(latex_table(rounded), encoding="utf-8")
    assert rows
    assert [[row[place] for place in places] for row in rows] == read(tmp_path / "expected.tex")[1]


def read(file: Path) -> tuple[list[str], list[list[str]]]:
    """The headings and the rows of a table, all with as many cells as it has columns."""
    lines = file.read_text(encoding="utf-8").splitlines()
    head, *rows = (line.removesuffix(r" \\").split(" & ") for line in lines if line.endswith(r"\\"))
    sides = lines[0].removeprefix(r"\begin{tabular}{").removesuffix("}")
    assert {len(each) for each in (sides, *rows)} == {len(head)}
    return [each.replace(r"\_", "_") for each in head], rows


def test_the_edges_of_a_verification_have_their_controls_beside_them(here: Path, tmp_path: Path) -> None:
    line = ["verify", str(here / "c.json"), "--edges", "top:4", "--controls", "1"]
    for out in ("x.tex", "folder"):
        done = CliRunner().invoke(app, [*line, "--out", str(tmp_path / out)])
        assert done.exit_code == 0, done.output
    head, rows = read(tmp_path / "x.tex")
    edges = pl.read_parquet(tmp_path / "folder" / "edges.parquet")
    (tmp_path / "expected.tex").write_text(latex_table(edges.select(head)), encoding="utf-8")
    assert read(tmp_path / "expected.tex") == (head, rows)
    assert {"ablate_attention", "control_ablate_attention"} <= set(head)
    assert len(rows) == 4


def test_what_is_resumed_in_a_folder_keeps_it_beside_the_table(here: Path, tmp_path: Path) -> None:
    for line, made, first in (
        (["atlas", "builtin", "--corpus", "sampled:256", "--channels", "top:1"], "heads.parquet", "head"),
        (
            ["interpret", str(here / "c.json"), "--corpus", "sampled:512", "--limit", "2"],
            "interpretation.json",
            "signal",
        ),
    ):
        done = CliRunner().invoke(app, [*line, "--out", str(tmp_path / f"{first}.tex")])
        assert done.exit_code == 0, done.output
        head, rows = read(tmp_path / f"{first}.tex")
        assert head[0] == first
        assert rows
        assert (tmp_path / first / made).is_file()


def test_sinks_by_head(tmp_path: Path) -> None:
    line = ["sinks", "builtin", "--task", "ioi", "-n", "2", "--directions", ""]
    for out in ("x.tex", "folder.v2"):
        done = CliRunner().invoke(app, [*line, "--out", str(tmp_path / out)])
        assert done.exit_code == 0, done.output
    mass = pl.read_parquet(tmp_path / "folder.v2" / "mass.parquet")
    assert (tmp_path / "x.tex").read_text(encoding="utf-8") == latex_table(mass) + "\n"


def test_a_name_with_another_ending_is_a_folder_unless_there_are_files_of_other_kinds(tmp_path: Path) -> None:
    assert Output(False, str(tmp_path / "gpt2-v1.5"), [".tex"], folder=True).ending == ""
    assert Output(False, str(tmp_path / "x.TEX"), [".tex"], folder=True).ending == ".tex"
    with pytest.raises(InputError, match=r"end its name in .tex, or give a folder"):
        Output(False, "-", [".tex"], folder=True)
    with pytest.raises(InputError, match=r"end its name in .json, .tex"):
        Output(False, str(tmp_path / "gpt2-v1.5"), [".json", ".tex"])
