"""Words on circuits: in the file, in ``show``; unsupported ones are marked, not hidden. And the whole run."""

from __future__ import annotations

import json
from dataclasses import replace

import polars as pl
import pytest
from typer.testing import CliRunner

import headtrace
from headtrace.circuits.describe import example
from headtrace.circuits.summary import words_text
from headtrace.cli import app
from headtrace.errors import InputError
from headtrace.interpret import Counts, Description, Judged, annotate, interpret, interpretation
from headtrace.interpret.scored_signals import Pair, circuit_signals
from tests.interpret.scanning import made_up_scan

TEXT = "When Mary and John went to the store, John gave a drink to"


@pytest.fixture(scope="module")
def model():
    return headtrace.load("builtin")


@pytest.fixture(scope="module")
def circuit(model):
    return headtrace.Tracer(model).trace(TEXT, " Mary", " John")


@pytest.fixture
def scanned(monkeypatch):
    monkeypatch.setattr(interpretation, "scan", made_up_scan)


def test_edges_say_what_their_signals_look_for(model, circuit, tmp_path):
    found = interpret(circuit, model, "text", out=tmp_path, scanning=made_up_scan)
    (words,) = found.circuits
    edges = [e for e in words.edges if e.side in ("query", "key") and e.channels]
    places = [words.node(e.target) for e in edges]
    read = [(n.layer, n.head, tuple(sorted(e.channels))) for n, e in zip(places, edges, strict=True)]
    assert (
        len(found.signals) == len(set(read)) < len(edges)
    )  # what is one signal is explained and counted once
    said = {key: set() for key in read}
    for key, edge in zip(read, edges, strict=True):
        said[key].add(edge.description)
    assert all(len(each) == 1 for each in said.values())  # and all its edges say it
    for each in found.signals:
        place = each.signal.edge
        assert place is not None
        edge = words.edges[place[1]]
        assert edge.channels == each.signal.channels
        if each.description is not None:
            assert edge.description == each.description.text
            assert edge.evidence.p_value == each.p_value
            assert edge.evidence.supported == each.supported
            both = each.counts + each.in_second
            assert edge.evidence.judged == both.labelled
            assert edge.evidence.interval == both.accuracy.interval
    assert headtrace.load_circuit(tmp_path / "circuit.json") == words
    saved = json.loads((tmp_path / "interpretation.json").read_text())
    assert saved == json.loads(json.dumps(found.to_dict()))
    assert saved["signals"][0]["examples"][0]["marked"].count("[[") == 1
    assert pl.read_parquet(tmp_path / "descriptions.parquet").equals(found.table)


def test_unsupported_words_are_marked_and_not_hidden(circuit):
    number = next(i for i, edge in enumerate(circuit.edges) if edge.side == "query" and edge.channels)
    scan = made_up_scan(None, None, signals=[circuit])
    signal = next(each for each in scan.signals if each.id.endswith(f":{number}"))
    weak = Judged(signal, "described", Description("Names."), Counts(3, 7, 3, 7), Counts(30, 10, 3, 7))
    edge = annotate(circuit, [weak], "someone", "another").edges[number]
    assert words_text(edge) == "Names. (unsupported, p 1)"
    assert (edge.evidence.explainer, edge.evidence.judge) == ("someone", "another")
    failed = Judged(signal, "failed", Description("Half \ud800 a letter."), Counts(failed=20))
    edge = annotate(circuit, [failed]).edges[number]
    assert words_text(edge) == "Half ? a letter. (unsupported, not judged)"
    assert annotate(circuit, [Judged(signal, "none")]) == circuit


def test_examples_are_few_short_and_keep_both_tokens(circuit):
    number = next(i for i, edge in enumerate(circuit.edges) if edge.side == "query" and edge.channels)
    signal = next(
        s for s in made_up_scan(None, None, signals=[circuit]).signals if s.id.endswith(f":{number}")
    )
    tokens = (*(f" word{i}" for i in range(200)), "x" * 300)
    pairs = [Pair(f"{i}", 190 + i, 2 * i, float(i), tuple(range(201)), tokens) for i in range(11)]
    found = Judged(
        signal,
        "described",
        Description("Words."),
        Counts(9, 1, 1, 9),
        examples=tuple((pair, pair.score > 2) for pair in (*pairs, *pairs)),
    )
    shown = annotate(circuit, [found]).edges[number].evidence.examples
    assert [each.score for each in shown] == [10.0, 9.0, 8.0, 7.0], "the highest, each once"
    for each, pair in zip(shown, pairs[:-5:-1], strict=True):
        assert sum(map(len, each.pieces)) <= 120
        assert each.pieces[each.src] == pair.tokens[pair.src]
        assert each.pieces[each.dest][:39] == pair.tokens[pair.dest][:39]


def test_words_for_another_circuit_change_nothing(model, circuit):
    text = TEXT.replace("John", "Tom").replace("Mary", "Anna")
    other = headtrace.Tracer(model).trace(text, " Anna", " Tom")
    found = interpret(other, model, "text", scanning=made_up_scan)
    assert annotate(circuit, found.signals) == circuit


def test_limit_takes_the_strongest(model, circuit):
    found = interpret(circuit, model, "text", limit=5, scanning=made_up_scan)
    assert len(found.signals) == 5
    weights = dict[object, float]()  # a signal may have several edges: it is as strong as the strongest
    for signal in circuit_signals(circuit):
        weight = circuit.edges[signal.edge[1]].weight
        weights[signal.reads] = max(weight, weights.get(signal.reads, weight))
    taken = {each.signal.reads for each in found.signals}
    assert taken == set(sorted(weights, key=lambda reads: -weights[reads])[:5])
    described = [e for e in found.circuits[0].edges if e.description is not None]
    assert len(described) > 5  # all edges of a signal say what it is


def test_circuits_without_signals_are_refused(model):
    whole = example()
    bare = replace(whole, nodes=whole.nodes[:2], edges=whole.edges[:1])
    with pytest.raises(InputError, match="no signals to explain"):
        interpret(bare, model, "text", scanning=made_up_scan)


def test_circuits_of_another_model_are_refused(model, circuit):
    other = replace(circuit, model=replace(circuit.model, weights_sha256="0" * 64))
    with pytest.raises(InputError, match="its own model"):
        interpret([circuit, other], model, "text", scanning=made_up_scan)


def test_vocabulary_names_tokens_on_both_sides(model, circuit):
    found = interpret(circuit, model, "text", explainer="vocabulary", limit=3, scanning=made_up_scan)
    for each in found.signals:
        assert each.description is not None
        assert "destination token is" in each.description.text
        assert "Through the unembedding" in each.description.text


def test_the_command_writes_everything_and_show_prints_the_words(scanned, circuit, tmp_path):
    file, out = circuit.save(tmp_path / "c.json"), tmp_path / "words"
    line = ["interpret", str(file), "--corpus", "text", "--out", str(out), "--limit", "4"]
    result = CliRunner().invoke(app, [*line, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["schema"] == "headtrace.interpretation/2"
    assert "Explaining and judging 4 signals: about" in result.stderr
    shown = CliRunner().invoke(app, ["show", str(out / "circuit.json"), "--depth", "30"]).stdout
    assert "earlier occurrence of the destination token" in shown or "just before" in shown
    assert "supported" in CliRunner().invoke(app, line).stdout


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--explainer", "nobody"], "There is no explainer 'nobody'"),
        (["--judge", "nobody"], "There is no judge 'nobody'"),
        (["--base-url", "http://localhost:1/v1"], "asks an endpoint"),
        (["--explainer", "openai"], "--model-name"),
        (["--explainer", "openai", "--model-name", "m"], "OPENAI_API_KEY"),
    ],
)
def test_what_cannot_work_is_told_before_anything_is_computed(
    more, told, scanned, circuit, tmp_path, monkeypatch
):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    file = circuit.save(tmp_path / "c.json")
    result = CliRunner().invoke(
        app, ["interpret", str(file), "--corpus", "text", "--out", str(tmp_path / "w"), *more]
    )
    assert result.exit_code == 2
    assert told in result.stderr
    assert not (tmp_path / "w").exists()


def test_a_real_scan_is_explained_and_the_same_call_again_says_the_same(model, circuit, tmp_path):
    names = ("Mary", "John", "Anna", "Tom", "Emma", "Paul")
    lines = [
        f"When {a} and {b} went to the store, {b} gave a drink to {a}."
        for a in names
        for b in names
        if a != b
    ]
    corpus = tmp_path / "text.txt"
    corpus.write_text("\n\n".join(lines))
    found = interpret(circuit, model, str(corpus), limit=6, out=tmp_path / "words")
    assert len(found.signals) == 6
    assert {each.status for each in found.signals} <= {"described", "none", "too few"}
    assert any(each.tested for each in found.signals)
    again = interpret(circuit, model, str(corpus), limit=6, out=tmp_path / "words")
    assert again.to_dict() == found.to_dict()
