"""What is hovered is explained beside it: the card never covers it, and makes room for the panel once it is clicked."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.circuits.made_up import small_circuit

pytestmark = pytest.mark.browser

BOXES = """() => Object.fromEntries([...document.querySelectorAll(".nodes .node")].map((node) => {
  const { left, top, right, bottom } = node.getBoundingClientRect();
  return [node.dataset.id, [left, top, right, bottom]];
}))"""
CARD = """(card) => {
  const { left, top, right, bottom } = card.getBoundingClientRect();
  return [left, top, right, bottom];
}"""


def apart(one: list[float], two: list[float]) -> bool:
    return one[2] <= two[0] or two[2] <= one[0] or one[3] <= two[1] or two[3] <= one[1]


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844), (390, 420)])
def test_a_card_stands_beside_its_node_within_the_window(open_page, width, height):
    opened = open_page(small_circuit(), width=width, height=height)
    page, card = opened.page, opened.page.locator("#card")
    hovered = 0
    for id in page.evaluate(BOXES):
        page.mouse.move(0, 0)
        expect(card).to_be_hidden()  # the card of the node before
        node = opened.node(int(id))
        node.scroll_into_view_if_needed()
        left, top, right, bottom = page.evaluate(BOXES)[id]
        page.mouse.move((left + right) / 2, (top + bottom) / 2)
        expect(card).to_be_visible()
        shown = card.evaluate(CARD)
        assert apart(shown, [left, top, right, bottom]), id
        assert shown[0] >= 0
        assert shown[1] >= 0
        assert shown[2] <= width
        assert shown[3] <= height
        hovered += 1
    assert hovered == len(small_circuit().nodes)


MIDDLE = """(path) => {
  const { x, y } = path.getPointAtLength(path.getTotalLength() / 2).matrixTransform(path.getScreenCTM());
  return [x, y];
}"""


def test_a_card_of_an_edge_covers_neither_the_pointer_nor_the_ends_of_the_edge(open_page):
    circuit = small_circuit()
    opened = open_page(circuit)
    page, card = opened.page, opened.page.locator("#card")
    boxes = page.evaluate(BOXES)
    edge = page.locator(".edges .edge").first
    x, y = edge.evaluate(MIDDLE)
    page.mouse.move(x, y)
    expect(card).to_be_visible()
    shown = card.evaluate(CARD)
    assert apart(shown, [x - 5, y - 5, x + 5, y + 5])
    about = circuit.edges[int(edge.get_attribute("data-index"))]
    for end in (about.source, about.target):
        assert apart(shown, boxes[str(end)])


def test_a_click_takes_the_card_away_from_what_the_panel_now_says(open_page):
    opened = open_page(small_circuit())
    page, card = opened.page, opened.page.locator("#card")
    left, top, right, bottom = page.evaluate(BOXES)["1"]
    page.mouse.move((left + right) / 2, (top + bottom) / 2)
    expect(card).to_be_visible()
    page.mouse.down()
    page.mouse.up()
    expect(card).to_be_hidden()
    page.mouse.move((left + right) / 2 + 1, (top + bottom) / 2)
    expect(page.locator("#panel h2")).to_be_visible()
    expect(card).to_be_hidden()
    page.mouse.move(2, 2)
    left, top, right, bottom = page.evaluate(BOXES)["1"]
    page.mouse.move((left + right) / 2, (top + bottom) / 2)
    expect(card).to_be_visible()
