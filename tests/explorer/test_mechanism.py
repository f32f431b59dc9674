"""The page of a mechanism in a real browser: the sentence first, cards that light, a list on a phone."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.resources import files
from xml.etree import ElementTree

import pytest
from matplotlib.image import imread
from playwright.sync_api import expect

import headtrace
from headtrace.circuits import Circuit
from tests.circuits.made_up import random_circuit

pytestmark = pytest.mark.browser
AXE = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")

MARY = "When Mary and John went to the store, John gave a drink to"


@pytest.fixture(scope="module")
def mechanism() -> headtrace.Mechanism:
    return headtrace.why(headtrace.load("builtin"), MARY, budget=40)


@pytest.fixture
def page(open_page, mechanism):
    return open_page(mechanism.circuit, width=1440, height=900, mechanism=mechanism).page


def test_the_page_opens_on_the_sentence_with_a_chip_for_each_step(page, mechanism) -> None:
    assert len(page.locator(".sentence").inner_text()) > 100
    chips = page.locator(".sentence .step-chip").all_inner_texts()
    assert sorted(map(int, chips)) == [step.id for step in mechanism.steps]
    assert page.locator(".mechanism-drawing .card").count() == len(mechanism.steps)
    assert page.locator("#charts").is_hidden()
    ledger = page.locator(".ledger").first.inner_text()
    assert f"= +{mechanism.whole:.2f}" in ledger


def test_the_graph_and_the_table_are_one_click_away(page, mechanism) -> None:
    page.click("#tab-graph")
    assert page.locator("#charts").is_visible()
    assert page.locator(".mechanism").is_hidden()
    page.click("#tab-table")
    assert page.locator(".edge-table tbody tr").count() == len(mechanism.circuit.edges)
    expect(page).to_have_url(re.compile("tab=table"))
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.locator(".edge-table").is_visible(), "the address keeps what is shown"


def test_a_chip_lights_its_card_and_unfolds_its_heads(page, mechanism) -> None:
    step = next(step for step in mechanism.steps if step.heads)
    page.locator(f'.step-chip[data-step="{step.id}"]').click()
    lit = page.locator(".mechanism-drawing .card.on").evaluate_all(
        "nodes => nodes.map((n) => n.dataset.step)"
    )
    assert lit == [str(step.id)]
    details = page.locator(".step-details").inner_text()
    for head in step.heads:
        assert head.name in details
    assert step.measured is not None
    assert f"{step.measured.without:.2f}" in details


def test_an_unfolded_head_shows_where_it_attends_here_and_in_the_other_prompts(page, mechanism) -> None:
    step = next(step for step in mechanism.steps if step.heads)
    head = step.heads[0]
    assert head.src in [place for place, _, _ in head.looks], "the token of the step is among them"
    page.locator(f'.step-chip[data-step="{step.id}"]').click()
    crop = page.locator(".step-details .crop").first
    assert crop.locator("tbody tr").count() == len(head.looks)
    row = crop.locator("tr.read")
    assert row.locator("td").last.inner_text() == f"{head.attention:.2f}"
    widths = row.locator(".bar").evaluate_all(
        "bars => bars.map((bar) => bar.getBoundingClientRect().width / bar.parentElement.clientWidth)"
    )
    assert widths == pytest.approx([head.attention, head.other_attention], abs=0.02)


def test_the_header_says_how_many_steps_were_confirmed(open_page, page, mechanism) -> None:
    assert page.locator(".top .verdict").inner_text() == mechanism.verdict
    assert "confirmed" in mechanism.verdict
    first, *others = mechanism.steps
    measured = first.measured
    doubted = replace(first, measured=replace(measured, random=measured.without))
    told = replace(mechanism, steps=(doubted, *others))
    held = sum(step.doubt is None for step in told.steps)
    assert told.verdict == f"{held} of {len(told.steps)} steps confirmed"
    again = open_page(mechanism.circuit, width=1440, height=900, mechanism=told).page
    assert again.locator(".top .verdict.hollow").inner_text() == told.verdict


def test_arrow_keys_go_from_step_to_step(page, mechanism) -> None:
    page.locator(".mechanism").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".step-details h3").inner_text().startswith("1.")
    page.keyboard.press("ArrowRight")
    assert page.locator(".step-details h3").inner_text().startswith("2.")
    page.keyboard.press("Escape")
    assert page.locator(".step-details").inner_text() == ""


def test_on_a_phone_cards_are_a_list_and_nothing_is_wider_than_the_window(open_page, mechanism) -> None:
    page = open_page(mechanism.circuit, width=390, height=800, mechanism=mechanism).page
    assert page.locator(".mechanism-list .step-card").first.is_visible()
    assert page.locator(".mechanism-drawing").is_hidden()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    card = page.locator(".mechanism-list .step-card").nth(1)
    card.click()
    assert card.locator(".step-details li").count() >= 1, "a card unfolds where it is"
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (1440, "dark"), (1000, "light")])
def test_no_text_is_smaller_than_eleven_pixels(open_page, mechanism, width, scheme) -> None:
    page = open_page(mechanism.circuit, width=width, height=900, scheme=scheme, mechanism=mechanism).page
    page.locator(".step-chip").first.click()
    sizes = page.evaluate(
        """() => [...document.querySelectorAll(".mechanism *")]
          .filter((n) => [...n.childNodes].some((c) => c.nodeType === 3 && c.data.trim()))
          .filter((n) => n.getBoundingClientRect().width)
          .map((n) => parseFloat(getComputedStyle(n).fontSize) * (n.ownerSVGElement
            ? n.ownerSVGElement.getBoundingClientRect().width / n.ownerSVGElement.viewBox.baseVal.width : 1))"""
    )
    assert sizes
    assert min(sizes) >= 11


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(open_page, mechanism, scheme) -> None:
    page = open_page(mechanism.circuit, width=1440, height=900, scheme=scheme, mechanism=mechanism).page
    page.evaluate(AXE)
    for tab in ("mechanism", "graph", "table"):
        page.click(f"#tab-{tab}")
        if tab == "mechanism":
            page.locator(".step-chip").first.click()
        found = page.evaluate("axe.run().then(({ violations }) => violations)")
        assert [(each["id"], each["nodes"][0]["html"]) for each in found] == [], tab


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_drawing_is_saved_in_the_colours_of_the_page(open_page, mechanism, scheme, tmp_path) -> None:
    page = open_page(mechanism.circuit, width=1440, height=900, scheme=scheme, mechanism=mechanism).page
    with page.expect_download() as waiting:
        page.click("#save-mechanism-svg")
    drawn = tmp_path / "m.svg"
    waiting.value.save_as(drawn)
    root = ElementTree.parse(drawn).getroot()
    assert "var(" not in drawn.read_text()
    assert len(root.findall(".//*[@class='card']")) == len(mechanism.steps)
    with page.expect_download() as waiting:
        page.click("#save-mechanism-png")
    waiting.value.save_as(tmp_path / "m.png")
    picture = imread(tmp_path / "m.png")
    width, height = (round(float(each)) for each in root.attrib["viewBox"].split()[2:])
    assert picture.shape[:2] == (2 * height, 2 * width)
    ground = picture[2, 2, :3].mean()
    assert ground > 0.8 if scheme == "light" else ground < 0.3


def test_a_difference_circuit_alone_opens_on_its_mechanism(open_page, mechanism) -> None:
    circuit: Circuit = mechanism.circuit
    page = open_page(circuit, width=1440, height=900).page
    assert page.locator(".badge.hollow").count() >= 1, "nothing was measured, and that is said"


def test_where_nothing_can_be_told_buttons_say_what_to_do(open_page, mechanism) -> None:
    circuit = replace(
        mechanism.circuit, nodes=mechanism.circuit.nodes[:1], edges=(), reason="nothing differs"
    )
    page = open_page(circuit, width=1440, height=900, mechanism=circuit.mechanism()).page
    assert page.locator(".sentence").inner_text().strip() == "nothing differs"
    button = page.get_by_role("button", name="compare with natural changes")
    button.click()
    expect(page.locator(".advice code").first).to_have_text(f"headtrace why builtin -p '{MARY}'")


# The size on the screen of every text in the drawing, and whether each head says what it reads.
DRAWN_TEXT = """() => {
  const seen = [...document.querySelectorAll("#charts text, #charts tspan")]
    .filter((e) => e.getBoundingClientRect().width && e.textContent.trim());
  const size = (e) => {
    const { a, b } = e.getScreenCTM();
    return parseFloat(getComputedStyle(e).fontSize) * Math.hypot(a, b);
  };
  const heads = [...document.querySelectorAll(".nodes .node.head:not(.dot)")];
  const reading = heads.filter((e) => [...e.querySelectorAll(".reads")].some((t) => t.getBoundingClientRect().width));
  return { smallest: Math.min(...seen.map(size)), heads: heads.length, reading: reading.length };
}"""


@pytest.mark.parametrize("width", [2560, 1440, 390])
def test_no_text_of_the_graph_is_smaller_than_eleven_pixels_and_heads_say_what_they_read(
    open_page, mechanism, width
) -> None:
    measured = mechanism.circuit.with_edges(
        tuple(replace(edge, effect={"metric": -0.25}) for edge in mechanism.circuit.edges)
    )
    page = open_page(measured, width=width, height=900, address="#tab=graph").page
    drawn = page.evaluate(DRAWN_TEXT)
    assert drawn["smallest"] >= 10.9, "eleven, but for the rounding of the screen's own matrix"
    if width >= 1440:
        assert drawn["reading"] == drawn["heads"] > 3


def test_a_circuit_that_does_not_fit_still_has_no_small_text(open_page) -> None:
    page = open_page(random_circuit(1500), width=1000, height=700).page
    assert page.evaluate(DRAWN_TEXT)["smallest"] >= 10.9
