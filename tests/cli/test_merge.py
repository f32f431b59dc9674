"""``headtrace merge`` end to end."""

from __future__ import annotations

import json

import pytest

import headtrace
from headtrace.circuits import write_parquet
from headtrace.cli import main
from headtrace.runs.frames import frames_of
from headtrace.runs.merging import merge
from headtrace.runs.references import reference_names
from tests.runs.made import ioi


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return write_parquet(ioi()[0], tmp_path_factory.mktemp("merge") / "many.parquet")


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as done:
        main([str(a) for a in arguments])
    return int(done.value.code or 0)


def test_a_folder_gets_every_form_of_the_network(table, tmp_path, capsys) -> None:
    out = tmp_path / "structure"
    assert run("merge", table, "--min-frequency", "0.05", "--out", out) == 0
    shown = capsys.readouterr()
    assert "Circuits of 30 prompts, merged by positions" in shown.out
    assert "The 20 most frequent edges" in shown.out
    assert {path.name for path in out.iterdir()} == {
        f"network.{end}" for end in ("json", "graphml", "png", "svg", "html")
    }
    assert headtrace.load_network(out / "network.json") == merge(ioi()[0]).prune(min_frequency=0.05)
    assert (out / "network.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("ending", ["json", "graphml", "svg", "png", "pdf", "html"])
def test_the_ending_says_what_is_written(table, tmp_path, ending) -> None:
    assert run("merge", table, "--skeleton", "--min-frequency", "0.1", "--out", tmp_path / f"n.{ending}") == 0
    begins = {"json": b"{", "html": b"<!doctype", "png": b"\x89PNG", "pdf": b"%PDF"}.get(ending, b"<?xml")
    if ending != "graphml":
        assert (tmp_path / f"n.{ending}").read_bytes().startswith(begins)
    assert (tmp_path / f"n.{ending}").stat().st_size


def test_standard_output_has_the_network_file_and_nothing_else(table, capsys) -> None:
    assert run("merge", table, "--out", "-") == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "headtrace.network/1"


def test_json_is_one_object_with_the_sweep_of_a_reference(table, tmp_path, capsys) -> None:
    reference = {
        "schema": "headtrace.reference/1",
        "name": "movers",
        "model": {"name": "builtin", "n_layers": 3, "n_heads": 4},
        "heads": [{"layer": 1, "head": 2, "group": "mover"}, {"layer": 0, "head": 1}],
        "edges": [{"source": "L0H1", "target": "mover"}],
    }
    (tmp_path / "mine.json").write_text(json.dumps(reference))
    assert run("merge", table, "--trace-network", "--reference", tmp_path / "mine.json", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["form"], found["model"], found["prompts"]) == ("trace", "builtin", 30)
    rows = [row for row in found["agreement"]["sweep"] if row["by"] == "frequency"]
    assert rows[0]["threshold"] == 0
    assert rows[0]["heads"] > len(found["heads"]), "the sweep begins with the whole network"
    assert rows[0]["heads_recall"] == 1
    assert found["agreement"]["groups"][0] == {"group": "mover", "heads": 1, "found": 1, "missing": []}
    assert run("merge", table, "--reference", tmp_path / "mine.json", "--out", tmp_path / "folder") == 0
    assert "Against movers (builtin)" in capsys.readouterr().out
    assert json.loads((tmp_path / "folder" / "agreement.json").read_text())["reference"] == "movers"


def test_the_help_names_every_reference_that_is_known(capsys) -> None:
    assert run("merge", "--help") == 0
    shown = "".join(letter for letter in capsys.readouterr().out if letter.isalnum() or letter == "-")
    assert [name for name in reference_names() if name not in shown] == []


def test_circuits_exported_from_a_run_are_measured_and_merged_by_its_roles(tmp_path, capsys) -> None:
    folder, file, out = tmp_path / "run", tmp_path / "many.parquet", tmp_path / "n.tex"
    assert run("run", "builtin", "--task", "ioi", "-n", "2", "--out", folder) == 0
    assert run("merge", folder, "--min-effect", "0.01") == 2
    assert "`headtrace export RUN --out FILE.parquet` first" in " ".join(capsys.readouterr().err.split())
    assert run("verify", folder, "--update") == 2
    assert f"`headtrace export {folder} --out circuits.parquet`" in " ".join(capsys.readouterr().err.split())
    assert run("export", folder, "--out", file) == 0
    assert run("verify", f"{file}#0", "--edges", "top:4", "--controls", "0", "--update") == 0
    capsys.readouterr()
    assert run("merge", file, "--min-effect", "0.01", "--roles", folder, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["by"] == "roles"
    whole = merge(frames_of(folder))
    assert {edge["source"] for edge in found["top"]} <= {node.name for node in whole.nodes}
    assert 0 < sum(edge["side"] != "root" for edge in found["top"]) <= 4
    assert run("merge", file, "--roles", folder, "--out", out) == 0
    frequencies = [float(line.split(" & ")[3]) for line in out.read_text().splitlines() if "$\\to$" in line]
    assert len(frequencies) > 2, "a place is written with an arrow"
    assert frequencies == sorted(frequencies, reverse=True), "the edges found most often come first"
    assert run("merge", folder, "--roles", folder) == 2
    assert "has its own roles" in capsys.readouterr().err


def test_channels_are_counted_by_themselves(table, capsys) -> None:
    assert run("merge", table, "--channels", "--json") == 0
    assert any(edge["channel"] is not None for edge in json.loads(capsys.readouterr().out)["top"])
    assert run("merge", table, "--channels") == 0
    assert "channel" in capsys.readouterr().out


def test_a_network_of_which_nothing_is_left_says_so(table, tmp_path, capsys) -> None:
    assert run("merge", table, "--min-frequency", "1", "--out", tmp_path / "n.html") == 0
    assert "No edge is left" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--by", "names"], "choose roles, positions or label:NAME"),
        (["--by", "roles"], "have no roles"),
        (["--out", "n.txt"], "end its name in .json, .graphml"),
        (["--out", "-", "--json"], "asked for twice"),
        (["--channels", "--skeleton"], "no channels"),
        (["--reference", "gpt2-ioi"], "'gpt2-small' (12 layers of 12 heads); this network is of 'builtin'"),
        (
            ["--reference", "nothing"],
            "Known by name: gpt2-greater-than, gpt2-ioi, gpt2-pronoun, pythia-160m-ioi",
        ),
        (["--min-frequency", "2"], "less than or equal to 1"),
    ],
)
def test_what_cannot_be_is_an_error_with_exit_code_2(table, capsys, arguments, message) -> None:
    assert run("merge", table, *arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_source_that_is_not_there_is_an_error(tmp_path, capsys) -> None:
    assert run("merge", tmp_path / "nothing") == 2
    assert run("merge", tmp_path) == 2
    told = capsys.readouterr().err
    assert "No circuit file at" in told
    assert "holds no" in told, "neither a run nor circuit files"


def test_a_label_gives_a_network_for_each_of_its_values(tmp_path, capsys) -> None:
    model = headtrace.load("builtin")
    texts = [
        ("a", "When Mary and John went to"),
        ("b/..", "When Tom and Anna went to the"),
        ("a", "When Tom met Mary"),
    ]
    lines = [{"text": text, "top_k": 1, "labels": {"kind": kind}} for kind, text in texts]
    place = headtrace.run(model, lines, out=tmp_path / "run").path
    assert run("merge", place, "--by", "label:kind", "--json", "--out", tmp_path / "out") == 0
    told = json.loads(capsys.readouterr().out)
    assert {value: each["prompts"] for value, each in told["networks"].items()} == {"a": 2, "b/..": 1}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["0-a", "1-b---"]
    circuits = [headtrace.open_run(place).circuit(number) for number in (0, 2)]
    kept = headtrace.load_network(tmp_path / "out" / "0-a" / "network.json")
    assert kept.edges == merge(circuits).edges
    assert run("merge", place, "--by", "label:kind", "--skeleton", "--min-frequency", "0") == 0
    assert "kind b/..:" in capsys.readouterr().out
    for wrong, message in (
        ("label:form", "have no label 'form'. There are: 'kind'"),
        ("words", "label:NAME"),
    ):
        assert run("merge", place, "--by", wrong) == 2
        assert message in " ".join(capsys.readouterr().err.split())
