"""The whole run through an endpoint: told beforehand what it costs, cut short without loss, refused in good time."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

import headtrace
from headtrace.cli import app
from headtrace.errors import InputError
from headtrace.interpret import (
    EndpointExplainer,
    EndpointJudge,
    interpret,
    interpret_examples,
    interpretation,
)
from headtrace.interpret.endpoint import KEY
from headtrace.interpret.interpretation import count_signals, estimate
from tests.interpret.made_up_signals import previous, same_token, signal_by
from tests.interpret.scanning import made_up_scan
from tests.interpret.serving import Server, good, serving

TEXT = "When Mary and John went to the store, John gave a drink to"
LIMIT = 4
ASKED = r"(\d+) requests, about (\d+) tokens"


@pytest.fixture(autouse=True)
def _no_key_and_no_corpus(monkeypatch):
    monkeypatch.delenv(KEY, raising=False)
    monkeypatch.setattr(interpretation, "scan", made_up_scan)
    # The client of the endpoint doubles its pauses from here.
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01, raising=False)


@pytest.fixture(scope="module")
def model():
    return headtrace.load("builtin")


@pytest.fixture(scope="module")
def circuit(model, tmp_path_factory):
    found = headtrace.Tracer(model).trace(TEXT, " Mary", " John")
    return found.save(tmp_path_factory.mktemp("circuit") / "c.json")


def _run(circuit, out, *more: str):
    line = ["interpret", str(circuit), "--corpus", "text", "--out", str(out), "--limit", str(LIMIT), *more]
    return CliRunner().invoke(app, line)


def _at(url: str) -> list[str]:
    return ["--base-url", url, "--model-name", "m", "--concurrency", "1"]


def _tokens(server: Server) -> int:
    """What a tokenizer would count, by the rule of thumb of four characters to a token."""
    answers = 20 * server.asked
    return answers + sum(len(each["content"]) for messages in server.messages for each in messages) // 4


@pytest.mark.parametrize(
    ("explainer", "judge"),
    [("lexical", "lexical"), ("vocabulary", "lexical"), ("lexical", "openai"), ("openai", "openai")],
)
def test_what_it_costs_is_told_before_it_starts_and_is_of_the_right_size(explainer, judge, circuit, tmp_path):
    with serving(good) as server:
        asks = "openai" in (explainer, judge)
        found = _run(
            circuit, tmp_path, "--explainer", explainer, "--judge", judge, *(_at(server.url) if asks else ())
        )
    assert found.exit_code == 0, found.output
    first = found.stderr.splitlines()[0]
    assert f"{LIMIT} signals" in first
    assert re.search(r"about \d+ s after the scan", first)
    told = re.search(ASKED, first)
    assert (told is None) == (not asks)
    if told is not None:
        assert 0.75 * server.asked <= int(told[1]) <= 1.35 * server.asked
        # Real text is longer than what was made up: eight tokens are shown around either of the two.
        assert _tokens(server) <= int(told[2]) <= 2.5 * _tokens(server)


def test_a_budget_that_will_not_do_is_told_at_once(circuit, tmp_path):
    with serving(good) as server:
        found = _run(circuit, tmp_path, "--judge", "openai", "--budget", "2000", *_at(server.url))
    assert "the budget of 2000 will not do" in found.stderr.splitlines()[0]
    assert "Some questions were not answered" in found.stderr


def test_an_estimate_counts_signals_and_not_edges(circuit):
    """Edges into the same channels of the same head are one signal, explained once."""
    loaded = headtrace.load_circuit(circuit)
    edges = [each for each in loaded.edges if each.side in ("query", "key") and each.channels]
    read = {
        (loaded.node(e.target).layer, loaded.node(e.target).head, tuple(sorted(e.channels))) for e in edges
    }
    assert count_signals([loaded]) == len(read) < len(edges)
    assert count_signals([loaded], limit=3) <= 3


def test_an_endpoint_that_dies_in_mid_run_loses_nothing(circuit, tmp_path):
    """The server is gone for good after some answers; the same command later asks only for what is missing."""
    names = ("--explainer", "openai", "--judge", "openai")
    with serving(good) as server:
        whole = _run(circuit, tmp_path / "whole", *names, *_at(server.url), "--json")
        asked = server.asked
    survived = LIMIT + 5

    with serving(lambda n, m: good(n, m) if n <= survived else server.die()) as server:
        half = _run(circuit, tmp_path / "half", *names, *_at(server.url), "--timeout", "1", "--json")
    assert half.exit_code == 0, half.output
    told = json.loads(half.stdout)
    assert told["asked"]["unanswered"] > 0
    assert told["failures"]["signals"] > 0
    assert "give the same command again" in half.stderr
    with serving(good) as server:
        again = _run(circuit, tmp_path / "half", *names, *_at(server.url), "--json")
        assert server.asked == asked - survived
    first, second = json.loads(whole.stdout), json.loads(again.stdout)
    for told in (first, second):  # another port
        del told["settings"]
    assert first == second


def test_an_endpoint_that_is_not_there_ends_the_command_with_advice(circuit, tmp_path):
    with serving(good) as server:
        url = server.url
    found = _run(circuit, tmp_path, "--explainer", "openai", "--judge", "openai", *_at(url))
    assert found.exit_code == 2
    assert "None of 4 questions was answered" in found.stderr
    assert "give the same command again" in " ".join(found.stderr.split())
    assert "Traceback" not in found.output


def test_words_without_rules_and_a_judge_of_rules_are_refused_before_anything_is_paid_for(circuit, tmp_path):
    with serving(good) as server:
        found = _run(circuit, tmp_path, "--explainer", "openai", *_at(server.url))
        assert found.exit_code == 2
        assert "--judge openai" in found.stderr
        assert server.asked == 0


@pytest.mark.parametrize(("content", "says"), [(b"", "no text"), (b"\x89PNG\r\n\x1a\n\xff\xfe", "not UTF-8")])
def test_a_corpus_that_is_none_is_refused_before_anything_is_asked(
    content, says, circuit, model, tmp_path, monkeypatch
):
    monkeypatch.undo()
    corpus = tmp_path / "text.txt"
    corpus.write_bytes(content)
    with serving(good) as server:
        explainer, judge = (kind(server.url, "m") for kind in (EndpointExplainer, EndpointJudge))
        with pytest.raises(InputError, match=says):
            interpret(headtrace.load_circuit(circuit), model, str(corpus), explainer=explainer, judge=judge)
        assert server.asked == 0


def test_an_estimate_grows_with_what_there_is_to_do():
    one, ten = (estimate(n, "lexical", "lexical").seconds for n in (1, 10))
    assert ten == pytest.approx(10 * one)


def test_the_same_signals_in_another_order_get_the_same_words_and_verdicts():
    signals = [
        signal_by(rule, f"L{n}H0:{n}", seed=n)
        for n in range(4)
        for rule in (same_token, previous)[n % 2 :][:1]
    ]
    there, back = interpret_examples(signals), interpret_examples(signals[::-1])
    assert [each.to_dict() for each in there.signals] == [each.to_dict() for each in back.signals[::-1]]
