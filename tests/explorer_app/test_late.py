"""An answer of the server that is late: until it is there, what stands in its place is faded, and it comes to stand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.explorer_app.conftest import IOI

pytestmark = pytest.mark.browser

OTHER = "When Anna and Mark went to the store, Mark gave a drink to"
SUSAN = {"answer": " Mary", "wrong": " Susan"}
HEAD = {"head": "L2H1", "cell": "14-10"}
FIRST_MLP, LAST_MLP = (
    json.dumps([{"kind": "component", "site": {"kind": "mlp", "layer": layer}, "factor": 0}])
    for layer in (0, 1)
)


class Held:
    """Requests to an address, which wait until they are let go."""

    def __init__(self, page, address: str) -> None:
        self.opened, self.routes, self.holding = page, [], True
        page.page.route(f"**{address}", self.came)

    def came(self, route: Any) -> None:
        if self.holding:
            self.routes.append(route)
        else:
            route.continue_()

    def let_go(self) -> None:
        self.opened.until(lambda: len(self.routes) > 0)
        self.holding = False
        for route in self.routes:
            route.continue_()


def faded(page, selector: str) -> None:
    """All of an element is faded."""
    expect(page.page.locator(selector).first).to_be_visible()
    assert page.page.locator(selector).first.evaluate("(e) => e.closest('.stale') !== null"), selector


@pytest.mark.parametrize(
    ("address", "view", "before", "after", "old"),
    [
        ("/api/record", "heads", {}, {"text": OTHER}, ".strip"),
        ("/api/question", "heads", {}, {"text": OTHER}, ".question-row select"),
        ("/api/question", "heads", {}, SUSAN, ".question-row select"),
        ("/patterns", "heads", {}, {"text": OTHER}, ".grid-host canvas"),
        ("/heads/2/1", "heads", HEAD, {"text": OTHER}, ".zoom-panel h2"),
        ("/heads/1/0", "heads", HEAD, {"head": "L1H0"}, ".zoom-panel h2"),
        ("/api/why", "heads", HEAD, {"text": OTHER}, ".heads .why-sentence"),
        ("/api/why", "explain", HEAD, SUSAN, ".explain .why-sentence"),
        ("/api/mechanism", "explain", {}, SUSAN, ".head-row"),
        ("/api/intervene", "heads", {"changes": FIRST_MLP}, {"changes": LAST_MLP}, ".says-now"),
        ("/patterns", "heads", {"changes": FIRST_MLP}, {"show": "changed"}, ".grid-host canvas"),
    ],
)  # fmt: skip
def test_what_an_earlier_question_left_is_faded_until_the_new_answer_is_there(
    explorer, address, view, before, after, old
):
    page = explorer(view=view, text=IOI, **before)
    expect(page.page.locator(old).first).to_be_visible()
    page.settled()
    waiting = Held(page, address)
    page.at(**{"view": view, "text": IOI, **before, **after})
    faded(page, old)
    waiting.let_go()
    expect(page.page.locator(old).first).to_be_visible()
    page.settled()
    assert page.errors == []


def test_an_answer_to_a_question_that_was_taken_back_is_not_shown(explorer):
    page = explorer(view="heads", text=IOI, **HEAD)
    said = page.page.locator(".heads .value")
    expect(said).to_contain_text("It contributed")
    text = said.inner_text()
    waiting = Held(page, "/api/why")
    page.at(view="heads", text=IOI, **SUSAN, **HEAD)
    faded(page, ".heads .value")
    page.until(lambda: len(waiting.routes) > 0)  # what is not asked yet cannot be late
    page.at(view="heads", text=IOI, **HEAD)
    page.settled()
    waiting.let_go()
    page.page.wait_for_timeout(300)
    assert said.inner_text() == text


def test_what_was_shown_comes_back_after_a_question_that_was_refused(explorer):
    page = explorer(view="heads", text=IOI, **HEAD)
    said = page.page.locator(".heads .why-sentence")
    expect(said).to_be_visible()
    refusal = {"code": "x", "message": "This was refused."}
    page.page.route("**/api/why", lambda route: route.fulfill(status=400, json=refusal))
    page.at(view="heads", text=IOI, **SUSAN, **HEAD)
    expect(page.page.locator(".heads .why-panel > .notice")).to_have_text("This was refused.")
    expect(said).to_have_count(0)
    page.page.unroute("**/api/why")
    page.at(view="heads", text=IOI, **HEAD)
    expect(said).to_be_visible()
    expect(page.page.locator(".heads .why-panel > .notice")).to_be_hidden()


def test_a_word_of_an_earlier_prompt_cannot_be_exchanged_in_the_new_one(explorer):
    page = explorer(view="heads", text=IOI).heads()
    waiting = Held(page, "/api/record")
    page.at(view="heads", text=OTHER)
    assert page.page.locator(".strip").evaluate("(e) => e.inert")
    waiting.let_go()
    page.settled()
    page.page.locator('.strip-token[data-position="2"]').click()
    expect(page.page.get_by_label("Another word for Anna")).to_be_visible()


def test_a_late_answer_leaves_the_keyboard_at_the_cell_it_was_moved_to(explorer):
    page = explorer(view="heads", text=IOI, head="L2H1", changes=FIRST_MLP)
    readout = page.page.locator("#readout")
    expect(readout).to_contain_text("Point at a cell")
    page.page.locator(".zoom-host canvas").focus()
    page.walk(14, 10)
    waiting = Held(page, "/heads/2/1")
    page.at(view="heads", text=IOI, head="L2H1", changes=FIRST_MLP, show="changed")
    page.page.keyboard.press("ArrowLeft")
    expect(readout).to_contain_text("at 9: ")
    waiting.let_go()
    expect(readout).to_contain_text("with your changes")
    expect(readout).to_contain_text("at 9: ")
    page.page.keyboard.press("ArrowRight")
    expect(readout).to_contain_text("at 10: ")
    assert page.errors == []


def test_a_prompt_to_begin_with_does_not_take_the_place_of_what_is_typed(explorer):
    page = explorer(view="heads")
    waiting, field = Held(page, "/starter"), page.page.locator("#text")
    page.at()
    field.fill("When Anna")
    waiting.let_go()
    expect(page.page.locator(".starter")).not_to_have_count(0)
    expect(field).to_be_visible()
    expect(field).to_have_value("When Anna")
    field.fill(OTHER)
    field.press("Enter")
    expect(page.page.locator(".strip .says")).to_contain_text("Anna")
    assert page.errors == []
