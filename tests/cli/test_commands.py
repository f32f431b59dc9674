"""What every command offers alike: --json, --out by extension, prompts from files, examples in its help."""

from __future__ import annotations

import json
import os
import stat
import threading

import networkx as nx
import pytest
import typer
from typer.testing import CliRunner

import headtrace
from headtrace.circuits import load_circuit, read_circuits
from headtrace.cli import app, failures
from headtrace.cli.options import PromptOptions
from headtrace.cli.output import destination, show_tokens

PROMPT = "When Mary and John went to the store, John gave a drink to"
ASKED = ("-p", PROMPT, "--answer", " Mary", "--wrong", " John")


@pytest.fixture(scope="module")
def circuit():
    return headtrace.Tracer(headtrace.load("builtin")).trace(PROMPT, " Mary", " John")


@pytest.fixture
def here(circuit, tmp_path, monkeypatch):
    circuit.save(tmp_path / "c.json")
    line = json.dumps({"text": PROMPT, "answer": " Mary", "wrong": " John"})
    (tmp_path / "prompts.jsonl").write_text(f"{line}\n{line}\n")
    (tmp_path / "prompt.txt").write_text(PROMPT + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("webbrowser.open", lambda _: True)
    return tmp_path


def run(*arguments: object, code: int = 0, **how):
    done = CliRunner().invoke(app, [str(a) for a in arguments], **how)
    assert done.exit_code == code, done.output
    return done


COMPUTING = [
    ("models",),
    ("info", "builtin"),
    ("record", "builtin", "-p", PROMPT),
    ("decompose", "builtin", "-p", PROMPT, "--top", "2"),
    ("decompose", "builtin", "-p", PROMPT, "--firing", "L1H2:14:2"),
    ("emerge", "builtin", "builtin", "-p", PROMPT, "--top", "1", "--rotations", "2"),
    ("trace", "builtin", *ASKED),
    ("trace", "builtin", "--prompts", "prompts.jsonl"),
    ("explain", "builtin", "-p", PROMPT, "--firing", "L1H2:14:2"),
    ("show", "c.json"),
    ("view", "c.json"),
    ("export", "c.json", "--out", "c.dot"),
    ("tasks",),
    ("tasks", "show", "ioi", "-n", "1"),
    ("tasks", "accuracy", "builtin", "prompts.jsonl"),
    ("sinks", "builtin", "--task", "ioi", "-n", "2", "--directions", "1"),
    ("toy", "isotropy", "--quick"),
]


@pytest.mark.parametrize("line", COMPUTING, ids=lambda line: " ".join(line[:2]))
def test_json_is_one_object_on_standard_output(line, here) -> None:
    assert isinstance(json.loads(run(*line, "--json").stdout), dict)


def test_the_json_of_a_trace_is_a_circuit_file(here, circuit) -> None:
    (here / "again.json").write_text(run("trace", "builtin", *ASKED, "--json").stdout)
    assert load_circuit(here / "again.json") == circuit


def _commands() -> dict[str, typer.core.TyperCommand]:
    found = {}
    for name, command in typer.main.get_command(app).commands.items():
        found |= {f"{name} {each}": c for each, c in getattr(command, "commands", {}).items()} or {
            name: command
        }
    return found


@pytest.mark.parametrize("name", sorted(_commands()))
def test_the_help_of_every_command_has_examples(name: str) -> None:
    shown = " ".join(run(*name.split(), "--help").output.split())
    assert "Example" in shown
    assert f"headtrace {name}" in shown.split("Example", 1)[1]


@pytest.mark.parametrize(
    "given", [("-p", "-"), ("--prompt-file", "prompt.txt"), ("--prompt-file", "-")], ids=str
)
def test_the_prompt_comes_from_a_file_or_from_standard_input(given, here, circuit) -> None:
    done = run("trace", "builtin", *given, *ASKED[2:], "--json", input=PROMPT + "\n")
    assert json.loads(done.stdout)["prompt"]["token_ids"] == list(circuit.prompt.token_ids)


def test_chat_makes_a_text_what_a_user_says() -> None:
    assert PromptOptions("Who?", chat=True).read() == [{"role": "user", "content": "Who?"}]


def test_out_means_what_its_extension_says(here, circuit) -> None:
    for name in ("one.json", "one.parquet", "folder", "deep/er/one.json"):
        run("trace", "builtin", *ASKED, "--out", name)
        assert read_circuits(name) == [circuit]
    run("trace", "builtin", *ASKED, "--out", "page.html")
    assert (here / "page.html").read_text().startswith("<!doctype html>")
    for name in ("many.parquet", "many"):
        run("trace", "builtin", "--prompts", "prompts.jsonl", "--out", name)
        assert len(read_circuits(name)) == 2
    assert destination("c.PARQUET", many=True).format == "parquet"


@pytest.mark.parametrize("command", ["trace", "view"])
def test_devices_pipes_and_links_are_written_through(command, here) -> None:
    line = ("trace", "builtin", *ASKED) if command == "trace" else ("view", "c.json")
    run(*line, "--out", "/dev/null")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    os.mkfifo(here / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((here / "pipe").read_text()))
    reader.start()
    run(*line, "--out", "pipe")
    reader.join(timeout=60)
    assert read[0].lstrip().startswith("{" if command == "trace" else "<!doctype html>")
    end = "json" if command == "trace" else "html"
    (here / f"target.{end}").write_text("old")
    (here / f"link.{end}").symlink_to(f"target.{end}")
    run(*line, "--out", f"link.{end}")
    assert (here / f"link.{end}").is_symlink()
    assert (here / f"target.{end}").read_text() != "old"


def test_a_circuit_on_standard_output_is_alone_there(here, circuit) -> None:
    done = run("trace", "builtin", *ASKED, "--out", "-")
    assert done.stdout == (here / "c.json").read_text()
    assert "Straight into the root" in done.stderr
    assert 'Why "Mary"' in run("show", "-", input=done.stdout).stdout


def test_an_empty_circuit_replaces_no_file_without_force(here, circuit) -> None:
    swapped = ("-p", PROMPT, "--answer", " John", "--wrong", " Mary")
    for out in ("c.json", "table.parquet", "folder"):
        run("trace", "builtin", *ASKED, "--out", out)
        done = run("trace", "builtin", *swapped, "--out", out, code=2)
        assert "The circuit is empty" in done.stderr
        assert read_circuits(out) == [circuit]
        run("trace", "builtin", *swapped, "--out", out, "--force")
        assert read_circuits(out)[0].reason
    run("trace", "builtin", *swapped, "--out", "new.json")
    assert load_circuit("new.json").reason


def test_an_empty_circuit_says_why_names_components_and_what_to_try(here) -> None:
    done = run("trace", "builtin", "-p", PROMPT, "--answer", " John", "--wrong", " Mary", "--out", "e.json")
    shown = run("show", "e.json").stdout
    for words in (done.stdout, shown):
        for part in (
            "not above the wrong answer's",
            "strongest for it: L1H0 14->4 (+",
            "strongest against it: L1H2 14->2",
        ):
            assert part in words
        for part in (
            "swap the two answers",
            "--root probability",
            "(L1H0, L1H1",
        ):
            assert part in words


def test_show_and_view_read_every_source(here, circuit) -> None:
    run("trace", "builtin", "--prompts", "prompts.jsonl", "--out", "many.parquet")
    run("trace", "builtin", "--prompts", "prompts.jsonl", "--out", "folder")
    for source in ("c.json", "many.parquet#1", "folder#0"):
        assert 'Why "Mary" rather than "John"' in run("show", source).stdout
    assert run("show", "many.parquet").stdout.count('Why "Mary"') == 2
    run("view", "many.parquet#1")
    run("view", "folder", "--out", "all.html")
    assert (here / "many-1.html").exists()
    assert (here / "all.html").exists()


def test_export_speaks_to_other_tools(here, circuit) -> None:
    run("export", "c.json", "--out", "c.graphml")
    assert len(nx.read_graphml("c.graphml").nodes) == len(circuit.nodes)
    run("export", "c.json", "--to", "networkx", "--out", "graph.json")
    data = json.loads((here / "graph.json").read_text())
    assert len(data["edges"]) == len(circuit.edges)
    assert nx.is_isomorphic(nx.node_link_graph(data, edges="edges"), circuit.to_networkx())
    run("export", "c.json", "--to", "neuronpedia", "--out", "np.json")
    assert len(json.loads((here / "np.json").read_text())["nodes"]) == len(circuit.nodes)
    run("export", "c.json", "--out", "c.parquet")
    assert read_circuits("c.parquet") == [circuit]
    run("trace", "builtin", "--prompts", "prompts.jsonl", "--out", "many.parquet")
    run("export", "many.parquet", "--to", "graphml", "--out", "graphs")
    assert sorted(p.name for p in (here / "graphs").iterdir()) == [
        "circuit-00000.graphml",
        "circuit-00001.graphml",
    ]


def test_tokens_and_their_places_are_told_apart(capsys) -> None:
    show_tokens(("2", "+", "2", "\x1b[2J"))
    assert capsys.readouterr().out == 'Tokens  0:"2"  1:"+"  2:"2"  3:"\\x1b[2J"\n'


def test_nothing_of_a_circuit_file_steers_the_terminal(here) -> None:
    text = (here / "c.json").read_text().replace('"Mary"', '"\\u001b[31mMary\\u202e"')
    (here / "evil.json").write_text(text)
    for line in (("show", "evil.json"), ("view", "evil.json")):
        done = run(*line)
        assert not {"\x1b", "\u202e"} & set(done.output)
    assert "\\x1b[31mMary\\u202e" in run("show", "evil.json").stdout


def test_tracing_one_prompt_says_how_far_it_is() -> None:
    told: list[tuple[int, int]] = []
    tracer = headtrace.Tracer(headtrace.load("builtin"))
    circuit = tracer.trace(PROMPT, " Mary", " John", progress=lambda done, of: told.append((done, of)))
    assert told[0][0] == 0
    assert told[-1] == (sum(head.expanded for head in circuit.heads()),) * 2
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    small = headtrace.Tracer(headtrace.load("builtin"), max_firings=2)
    small.trace(PROMPT, " Mary", " John", progress=lambda done, of: told.append((done, of)))
    assert all(done <= of for done, of in told)


def test_many_prompts_say_how_far_they_are() -> None:
    told: list[tuple[int, int]] = []
    tracer = headtrace.Tracer(headtrace.load("builtin"))
    tracer.trace_batch([PROMPT, PROMPT], " Mary", " John", progress=lambda done, of: told.append((done, of)))
    assert told[-1] == (2, 2)
    assert len(told) > 2


def test_where_nobody_sees_a_bar_a_line_tells_the_remaining_time(capsys, monkeypatch) -> None:
    monkeypatch.setattr(failures._Lines, "every", 0.0)
    with failures.progress_bar("Tracing") as bar:
        bar(0, 10)
        bar(5, 10)
    told = capsys.readouterr()
    assert told.out == ""
    assert "Tracing: 5 of 10, about 0 s left" in told.err
