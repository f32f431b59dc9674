"""Words on the page: on the drawing, in the card and in the panel, with the test behind them; text stays text."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from playwright.sync_api import expect

from headtrace.circuits import Evidence, EvidenceExample
from tests.circuits.made_up import complete_circuit, random_circuit, small_circuit, worded_circuit

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u202e\u0000"

BOXES = """([words, nodes]) => {
  const box = (element) => {
    const { left, top, right, bottom } = element.getBoundingClientRect();
    return [left, top, right, bottom];
  };
  const all = (selector) => [...document.querySelectorAll(selector)].map(box);
  return [all(words), all(nodes), [...document.querySelectorAll(".host")].map(box)];
}"""


INSIDE = """() => {
  const right = (element) => element.getBoundingClientRect().right;
  const words = [...document.querySelectorAll(".chart .word")];
  const end = (word) => right(word.querySelector("rect"));
  const out = (word) => [...word.querySelectorAll("text")].some((line) => right(line) > end(word));
  return words.filter(out).map((word) => word.textContent);
}"""


def said_of(circuit, share=1):
    """A circuit with words on its signals: every third of them unsupported, some of them long."""
    texts = [
        "The source token has occurred before in the text.",
        'The token is " Mary"' + " or more" * 30,
        "Names.",
    ]
    edges = [
        replace(edge, description=texts[i % 3], evidence=Evidence(i % 3 > 0, 0.01, 0.9, judged=40))
        if edge.side in ("query", "key") and i % share == 0
        else edge
        for i, edge in enumerate(circuit.edges)
    ]
    return circuit.with_edges(tuple(edges))


def test_words_their_test_and_examples_by_pointer_and_by_keyboard(open_page):
    opened = open_page(worded_circuit())
    page, card = opened.page, opened.page.locator("#card")

    labels = page.locator(".words .word")
    assert any("L9H6 The source is a name" in text for text in labels.all_text_contents())
    labels.filter(has_text="is a name").first.hover()
    expect(card).to_be_visible()
    text = card.inner_text()
    for part in (
        "The source is a name.",
        "✓ supported",
        "p 2e\u221210",
        "95% of 40 pairs (84% to 99%)",
        "words by lexical",
    ):
        assert part in text
    assert card.locator(".pair.src").last.inner_text() == "Paul"
    assert card.locator(".examples .pair.dest").first.inner_text() == "to"

    opened.node(1).focus()
    expect(page.locator("#live")).to_contain_text("looks for, in words: The source is a name.")
    page.keyboard.press("Enter")
    said = page.locator("#panel .said")
    assert said.count() == 3
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.tagName") == "SUMMARY":
            break
    expect(page.locator("#panel .examples").first).to_be_hidden()
    page.keyboard.press("Enter")
    examples = page.locator("#panel details[open] .examples li")
    assert examples.count() == 2
    assert examples.first.inner_text().startswith("… went to the park and Paul gave a book to …")
    assert "2.50 ✓" in examples.first.inner_text()
    assert "✗" in examples.nth(1).inner_text()
    assert opened.errors == []


def test_unsupported_words_are_marked_without_colour_and_not_hidden(open_page):
    opened = open_page(worded_circuit(), scheme="dark")
    page = opened.page
    failed = page.locator(".words .word.unsupported").first
    assert failed.locator("text").first.text_content().split(" ", 1)[1].startswith("? ")
    assert opened.style(".word.unsupported rect", "strokeDasharray") != "none"
    assert opened.style(".word:not(.unsupported) rect", "strokeDasharray") == "none"
    expect(page.locator('#legend [data-name="words"]')).to_contain_text("did not pass its test")
    expect(page.locator("#panel .facts").first).to_contain_text("on 4 edges, 2 unsupported")
    opened.node(1).click()
    weak = page.locator("#panel .said.unsupported")
    expect(weak.locator(".badge")).to_have_text("? unsupported")
    expect(weak.locator(".verdict")).to_contain_text("p 0.31 · right about 55% of 40 pairs")
    opened.node(2).click()
    assert "not judged" in page.locator("#panel .said.unsupported").first.inner_text()


def test_hostile_words_and_examples_stay_text(open_page):
    opened = open_page(worded_circuit(HOSTILE + "x" * 300_000, HOSTILE))
    page = opened.page
    page.locator(".words .word").first.hover()
    expect(page.locator("#card")).to_be_visible()
    opened.node(1).click()
    for summary in page.locator("#panel summary").all():
        summary.click()
    shown = page.locator("#panel .examples .pair.src").first.inner_text()
    assert shown.startswith("</script><script>alert(1)")
    assert "\\u202e" in shown
    assert "<img src=x" in page.locator("#panel .description").first.inner_text()
    assert page.locator("main img, main script").count() == 0
    assert opened.dialogs == []
    assert opened.errors == []
    assert len(opened.requests) == 1


@pytest.mark.parametrize(("width", "pair"), [(1280, False), (420, False), (1280, True)])
def test_words_cover_neither_components_nor_each_other_nor_the_axes(open_page, width, pair):
    circuits = [said_of(random_circuit(150)), said_of(complete_circuit())]
    opened = open_page(circuits if pair else circuits[:1], width=width, compare=pair)
    page = opened.page
    words, nodes, hosts = page.evaluate(BOXES, [".chart .word rect", ".node:not(.dot) .body"])
    assert len(words) >= (2 if width < 500 else 6)
    apart = lambda a, b: a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]  # noqa: E731
    assert all(apart(a, b) for i, a in enumerate(words) for b in words[:i])
    assert all(apart(a, b) for a in words for b in nodes)
    assert all(
        any(h[0] <= w[0] and w[2] <= h[2] and h[1] <= w[1] and w[3] <= h[3] for h in hosts) for w in words
    )
    assert page.evaluate(INSIDE) == []


def test_the_switch_takes_words_away_and_a_picture_has_them(open_page):
    opened = open_page(said_of(complete_circuit()))
    page = opened.page
    with page.expect_download() as saved:
        page.click("#save-svg")
    picture = saved.value.path().read_text()
    assert "L9H6" in picture
    assert "The source token has" in picture
    switch = page.locator("#words .chip")
    opened.redrawn(switch.click)
    assert switch.get_attribute("aria-pressed") == "false"
    assert opened.count(".word") == 0
    opened.node(1).click()
    assert opened.count(".word") == 0, "nor of what is pinned"
    opened.redrawn(switch.click)
    assert opened.count(".over .word") > 0


def test_a_circuit_without_words_has_no_switch_and_is_drawn_as_before(open_page):
    plain = small_circuit().with_edges(
        tuple(replace(edge, description=None) for edge in small_circuit().edges)
    )
    opened = open_page(plain)
    expect(opened.page.locator("#words")).to_be_hidden()
    assert opened.count(".word") == 0


def test_evidence_reaches_the_page_as_the_file_has_it():
    from headtrace.explorer.page import page_data

    circuit = worded_circuit()
    shown = [edge["evidence"] for edge in page_data(circuit)["edges"] if "evidence" in edge]
    assert len(shown) == 4
    assert isinstance(circuit.edges[2].evidence.examples[0], EvidenceExample)
    assert json.loads(json.dumps(shown))[0]["examples"][0]["src"] == 1
