"""What a notebook shows of results: short, readable, and nothing but text whatever the tokens are."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

import headtrace
from headtrace.channels.terms import decompose_all
from tests.conftest import IOI

EVIL = "<img src=x onerror=alert(1)>\u202e</td>\x00"
TAGS = {"p", "table", "thead", "tbody", "tr", "th", "td"}


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    model = headtrace.load("builtin")
    tracer, recording = headtrace.Tracer(model), model.record(IOI)
    return {
        "Recording": recording,
        "Circuit": tracer.trace(IOI, " Mary", " John"),
        "Decomposition": model.decompose(recording, "L1H2:14:2"),
        "Explanation": tracer.explain(IOI, "L2H0:14:10"),
        "ModelChannels": model.channels,
        "FiringTerms": decompose_all(recording, above=0.5),
    }


class Tags(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not attrs
        self.seen.add(tag)


@pytest.mark.parametrize(
    "name", ["Recording", "Circuit", "Decomposition", "Explanation", "ModelChannels", "FiringTerms"]
)
def test_every_result_prints_in_one_short_line(results: dict[str, Any], name: str) -> None:
    text = repr(results[name])
    assert text.startswith(f"{name}(")
    assert len(text) < 150
    assert "\n" not in text
    assert "tensor(" not in text


@pytest.mark.parametrize("name", ["Recording", "Decomposition", "Explanation", "ModelChannels"])
def test_results_are_tables_in_a_notebook(results: dict[str, Any], name: str) -> None:
    html = results[name]._repr_html_()
    assert html.count("<tr>") > 1
    assert Tags(html).seen == TAGS


def test_a_circuit_says_what_it_explains(results: dict[str, Any]) -> None:
    text = repr(results["Circuit"])
    assert text.startswith("Circuit('Mary' rather than 'John', 'builtin', 15 tokens, ")
    assert text.endswith(f"{len(results['Circuit'].edges)} edges)")


def test_a_decomposition_prints_as_a_table(results: dict[str, Any]) -> None:
    why = results["Decomposition"]
    title, head, *rows, rest = str(why).splitlines()
    assert title.startswith("L1H2 14->2: 'to' attends to 'Mary' with ")
    assert head.split() == ["channel", "term", "relative", "singular", "value"]
    assert [int(row.split()[0]) for row in rows] == [term.channel for term in why.top(8)]
    assert rest == "and 24 more channels; * in the signal set"
    assert len({len(line) for line in (head, *rows)}) == 1


def test_hostile_tokens_are_text_in_a_notebook(results: dict[str, Any]) -> None:
    for name in ("Decomposition", "Explanation"):
        evil = replace(results[name], tokens=(EVIL,) * 15)
        html = evil._repr_html_()
        assert Tags(html).seen == TAGS
        assert not set("\u202e\x00") & set(html)
        assert not set("\u202e\x00") & set(str(evil))
    circuit = results["Circuit"]
    circuit = replace(circuit, root=replace(circuit.root, answer_tokens=(EVIL,)))
    assert not set("\u202e\x00") & set(repr(circuit))
