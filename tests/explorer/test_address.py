"""The address of the page: a link, a reload, back and forward bring back what was looked at."""

from __future__ import annotations

from playwright.sync_api import expect

from headtrace.explorer.page import frame
from tests.circuits.made_up import complete_circuit, random_circuit, small_circuit


def _fragment(page, expected: str) -> None:
    """Wait until the address says what is expected of it."""
    for _ in range(1000):
        found = page.evaluate("location.hash")
        if found == expected:
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"the address ends in {found!r}, not in {expected!r}")


def _chosen(opened) -> dict:
    page = opened.page
    return {
        "circuits": [page.input_value("#first"), page.input_value("#second")],
        "path": page.locator("#paths :checked").get_attribute("value"),
        "hidden": [chip.inner_text() for chip in page.locator('.chip[aria-pressed="false"]').all()],
        "layers": [page.input_value("#layer-low"), page.input_value("#layer-high")],
        "weight": page.input_value("#weight"),
        "detail": page.inner_text("#detail-value"),
        "pinned": [
            node.get_attribute("data-id") for node in page.locator('.node[aria-pressed="true"]').all()
        ],
        "panel": page.inner_text("#panel h2"),
    }


def test_circuits_filters_and_pin_come_back_from_a_link_a_reload_and_the_back_button(open_page):
    opened = open_page([small_circuit(), complete_circuit(), random_circuit(60)])
    page = opened.page
    first = _chosen(opened)
    assert page.evaluate("location.hash") == ""

    opened.redrawn(lambda: page.select_option("#first", "1"))
    opened.redrawn(lambda: page.locator('#kinds [data-name="embedding"]').click())
    opened.redrawn(lambda: page.locator('#paths [value="content"]').check())
    opened.slide("#weight", 10)
    opened.slide("#layer-low", 1)
    opened.node(1).click()
    _fragment(page, "#circuits=2&paths=content&hide=embedding&weight=10&layers=1-9&pin=1")
    there, link = _chosen(opened), page.evaluate("location.href")
    assert there["pinned"] == ["1"]
    assert there["path"] == "content"

    page.reload()
    page.wait_for_selector('html[data-ready="true"]')
    assert _chosen(opened) == there

    opened.redrawn(page.go_back)
    assert _chosen(opened) == there | {"pinned": [], "panel": "This circuit"}
    opened.redrawn(page.go_back)
    assert _chosen(opened) == first
    opened.redrawn(page.go_forward)
    opened.redrawn(page.go_forward)
    assert _chosen(opened) == there

    page.goto("about:blank")
    page.goto(link)
    page.wait_for_selector('html[data-ready="true"]')
    assert _chosen(opened) == there
    assert opened.errors == []


def test_two_circuits_and_a_pin_in_the_second_come_back(open_page):
    opened = open_page([small_circuit(), random_circuit(60)], compare=True)
    page = opened.page
    opened.redrawn(lambda: page.select_option("#match", "only"))
    page.locator('.host[data-side="B"] .node.head').first.focus()
    page.keyboard.press("Enter")
    pinned = page.locator('.host[data-side="B"] .node[aria-pressed="true"]').get_attribute("data-id")
    _fragment(page, f"#match=only&pin=B{pinned}")
    before = _chosen(opened)
    page.reload()
    page.wait_for_selector('html[data-ready="true"]')
    assert _chosen(opened) == before
    assert page.input_value("#match") == "only"


def test_an_address_that_makes_no_sense_is_passed_over(open_page):
    opened = open_page([small_circuit(), complete_circuit()])
    page, first = opened.page, _chosen(opened)
    for fragment in (
        "#circuits=9,x&paths=toString&pin=B999&layers=7-x&detail=-1&weight=1e9&hide=__proto__",
        "#%E0%A4%A&&=",
        "#1",
    ):
        opened.redrawn(
            lambda fragment=fragment: page.evaluate("(hash) => { location.hash = hash; }", fragment)
        )
        assert _chosen(opened) == first
    assert opened.errors == []


def test_what_is_pinned_and_then_filtered_out_leaves_the_panel(open_page):
    opened = open_page(small_circuit())
    opened.node(4).click()
    expect(opened.page.locator("#panel h2")).to_have_text("MLP 3 @7")
    opened.redrawn(lambda: opened.page.locator('#kinds [data-name="mlp"]').click())
    expect(opened.page.locator("#panel h2")).to_have_text("This circuit")
    _fragment(opened.page, "#hide=mlp")


def test_in_the_frame_of_a_notebook_the_page_works_without_an_address(browser, tmp_path):
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><meta charset=utf-8>{frame(small_circuit())}", encoding="utf-8")
    page = browser.new_context(viewport={"width": 1000, "height": 760}).new_page()
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: message.type == "error" and errors.append(message.text))
    page.goto(path.as_uri())
    inner = page.frame_locator("iframe")
    inner.locator('html[data-ready="true"]').wait_for()
    inner.locator('.node[data-id="1"]').click()
    expect(inner.locator("#panel h2")).to_have_text("L9H6 7->1")
    length = page.evaluate("history.length")
    inner.locator('#kinds [data-name="mlp"]').click()
    expect(inner.locator('#kinds [data-name="mlp"]')).to_have_attribute("aria-pressed", "false")
    assert page.evaluate("history.length") == length
    assert page.url == path.as_uri()
    assert errors == []
    page.context.close()
