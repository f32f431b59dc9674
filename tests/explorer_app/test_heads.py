"""Prompt, heads and why: what is seen is what the server computed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.explorer_app.conftest import IOI

pytestmark = pytest.mark.browser

ROOT = {"answer": " Mary", "wrong": " John"}


def test_a_typed_prompt_shows_its_tokens_its_answers_and_every_head(explorer, server):
    page = explorer(view="heads")
    page.type(IOI)
    view = server.post("/api/record", {"text": IOI}).json()
    tokens = page.page.locator(".tokens li")
    expect(tokens).to_have_count(len(view["tokens"]))
    assert [text.strip() for text in tokens.all_inner_texts()] == [t.strip() for t in view["tokens"]]
    expect(page.page.locator(".strip .says")).to_have_text(f"Mary {view['answers'][0]['probability']:.0%}")
    page.heads()
    assert page.page.locator(".grid-host").bounding_box()["width"] > 1200, (
        "with no head open, the grid has it all"
    )
    assert page.errors == []
    assert page.strangers == []


def test_an_example_of_a_task_brings_its_prompt_and_its_answers(explorer):
    page = explorer(view="heads")
    page.page.get_by_label("Examples of a task").select_option("ioi")
    first = page.page.locator(".task-examples li .row").first
    text = first.locator("bdi").inner_text()
    first.click()
    expect(page.page.locator("#text")).to_have_value(text)
    assert page.remembers("answer=")
    assert page.remembers("wrong=")
    expect(page.page.get_by_label("Answer", exact=True)).not_to_have_value("")
    assert page.errors == []


@pytest.mark.parametrize("width", [390, 1280])
def test_the_card_of_a_head_stands_beside_its_square(explorer, width):
    page = explorer(view="heads", text=IOI, width=width)
    page.heads()
    grid, card = page.page.locator(".grid-host canvas"), page.page.locator("#card")
    grid.focus()
    for key in ("Home", "ArrowRight", "End"):
        page.page.keyboard.press(key)
        expect(card).to_be_visible()
        one, two = card.bounding_box(), page.page.locator(".grid-host .ring:not(.chosen)").bounding_box()
        across = one["x"] + one["width"] <= two["x"] or two["x"] + two["width"] <= one["x"]
        assert across or one["y"] + one["height"] <= two["y"] or two["y"] + two["height"] <= one["y"], key
        assert one["x"] >= 0
        assert one["x"] + one["width"] <= width


def test_heads_are_ordered_and_left_out_by_what_they_do(explorer, server):
    heads = server.post("/api/record", {"text": IOI}).json()["heads"]
    page = explorer(view="heads", text=IOI, order="most", by="sink")
    count = page.page.locator(".heads .controls output")
    page.heads()
    grid = page.page.locator(".grid-host canvas")
    grid.focus()
    page.page.keyboard.press("Home")
    best = max(heads, key=lambda head: head["sink"])
    expect(page.page.locator("#card h3")).to_have_text(f"L{best['layer']}H{best['head']}")
    page.page.get_by_label("at least").fill("0.1")
    page.page.keyboard.press("Tab")
    expect(count).to_have_text(f"{sum(head['sink'] >= 0.1 for head in heads)} of 12 heads")
    assert page.remembers("least=0.1")
    assert page.errors == []


def canvas_point(page, selector: str, x: float, y: float) -> tuple[float, float]:
    box = page.page.locator(selector).bounding_box()
    return box["x"] + x, box["y"] + y


def test_a_click_opens_a_head_and_pointing_at_a_cell_says_its_exact_number(explorer, server):
    page = explorer(view="heads", text=IOI)
    page.heads()
    page.page.mouse.click(*canvas_point(page, ".grid-host canvas", 60, 60))
    expect(page.page.locator(".zoom-panel h2")).to_have_text("L0H0")
    page.at(view="heads", text=IOI, head="L2H1")
    view = server.post("/api/record", {"text": IOI}).json()
    pattern = server.get(f"/api/recordings/{view['id']}/heads/2/1").json()["attention"]
    expect(page.page.locator(".zoom-panel h2")).to_have_text("L2H1")
    page.page.locator(".zoom-host canvas").focus()
    page.walk(14, 10)
    expect(page.page.locator("#readout b")).to_have_text(f"{pattern[14][10]:.3f}")
    assert page.errors == []


def test_a_head_has_its_name_only_over_its_own_cells(explorer, server):
    held: list[Any] = []
    page = explorer(view="heads", text=IOI, head="L0H0")
    title, readout = page.page.locator(".zoom-panel h2"), page.page.locator("#readout")
    expect(title).to_have_text("L0H0")
    page.page.route("**/heads/2/1", lambda route: held.append(route))
    page.at(view="heads", text=IOI, head="L2H1")
    expect(page.page.locator(".zoom-panel.stale")).to_be_visible()
    expect(title).to_have_text("L0H0")
    page.until(lambda: len(held) == 1)
    held[0].continue_()
    expect(title).to_have_text("L2H1")
    expect(page.page.locator(".zoom-panel.stale")).to_have_count(0)
    view = server.post("/api/record", {"text": IOI}).json()
    pattern = server.get(f"/api/recordings/{view['id']}/heads/2/1").json()["attention"]
    page.page.locator(".zoom-host canvas").focus()
    page.walk(14, 10)
    expect(readout.locator("b")).to_have_text(f"{pattern[14][10]:.3f}")
    assert page.errors == []


def test_with_the_keyboard_alone_from_prompt_to_why(explorer, server):
    page = explorer(view="heads")
    keyboard = page.page.keyboard
    page.page.locator("#text").focus()
    keyboard.type(IOI)
    keyboard.press("Enter")
    page.heads()
    for _ in range(60):
        keyboard.press("Tab")
        if page.page.evaluate("document.activeElement.matches('.grid-host canvas')"):
            break
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "Enter"):
        keyboard.press(key)
    expect(page.page.locator("#readout")).to_contain_text("Point at a cell")
    for _ in range(10):
        keyboard.press("Tab")
        if page.page.evaluate("document.activeElement.matches('.zoom-host canvas')"):
            break
    page.walk(14, 10)
    keyboard.press("Enter")
    expect(page.page.locator(".heads .why-panel h2")).to_have_text("Why does L2H1 attend here?")
    assert page.remembers("cell=14-10")
    assert page.errors == []


def test_a_cell_says_why_in_the_numbers_of_the_library(explorer, server):
    firing = {"layer": 2, "head": 1, "dest": 14, "src": 10}
    why = server.about("why", {"text": IOI}, {"firing": firing, **ROOT}).json()
    page = explorer(view="heads", text=IOI, head="L2H1", cell="14-10", **ROOT)
    panel = page.page.locator(".heads .why-panel")
    expect(panel.locator(".why-sentence")).to_have_text(why["sentence"])
    assert f"{why['attention']:.2f} of its attention" in why["sentence"]
    expect(panel.locator(".channels .in")).to_have_count(
        sum(bar["in_signal_set"] for bar in why["channels"][:10])
    )
    for side in ("query", "key"):
        causes = why[side]["causes"]
        kinds = [[c["name"] for c in causes if c["kind"] == kind] for kind in ("head", "mlp")]
        others = [c["name"] for c in causes if c["kind"] not in ("head", "mlp")]
        rows = panel.locator(f"section.{side} .cause .what")
        shown = [text.split(" \u201c")[0] for text in rows.all_text_contents()]
        assert shown == [*kinds[0], *others, *kinds[1]], "heads first, MLPs last"
        folded = panel.locator(f"section.{side} details.mlps summary")
        assert folded.count() == (len(kinds[1]) > 1)
    assert not panel.locator(".channels").is_visible(), "channels are folded"
    order = panel.evaluate("(e) => [...e.querySelectorAll('section, details')].map((each) => each.className)")
    assert [name for name in order if name != "mlps"] == [
        "value",
        "query",
        "key",
        "change-it",
        "rather-than",
        "channels-section",
    ]
    expect(panel.locator("section.value")).to_contain_text("It contributed")
    page.page.locator(".share-menu summary").click()
    expect(page.page.locator(".share-menu pre")).to_have_text(why["python"])
    assert page.errors == []


def test_a_cause_that_is_a_head_leads_to_its_own_why(explorer):
    page = explorer(view="heads", text=IOI, head="L2H1", cell="14-10")
    link = page.page.locator(".heads .cause button.link").first
    name, place = link.inner_text().split()
    link.click()
    expect(page.page.locator(".heads .why-panel h2")).to_have_text(f"Why does {name} attend here?")
    assert page.remembers(f"cell={place.replace('->', '-')}")


def test_reload_and_back_restore_the_view(explorer):
    page = explorer(view="heads", text=IOI, order="least", by="entropy")
    page.heads()
    page.page.evaluate("location.hash += '&head=L2H1&cell=14-10'")
    title = page.page.locator(".heads .why-panel h2")
    expect(title).to_have_text("Why does L2H1 attend here?")
    page.page.reload()
    expect(title).to_have_text("Why does L2H1 attend here?")
    assert page.page.locator(".heads select").first.input_value() == "least"
    page.page.go_back()
    expect(page.page.locator(".zoom-panel")).to_be_hidden()
    page.page.go_forward()
    expect(title).to_have_text("Why does L2H1 attend here?")
    assert page.errors == []


HOSTILE = [
    '<img src=x onerror="alert(1)"><script>alert(2)</script>',
    "</script></textarea><svg/onload=alert(3)>",
    "\u202egnirts\u202c a\u200bb \u2066x\u2069 \ufeff",
    "javascript:alert(4) `${alert(5)}` {{7*7}}",
]


def harmless(page) -> None:
    assert page.count("main img, main script, main svg[onload], .prompt-panel img, #card img") == 0
    shown = page.page.evaluate("document.body.innerText")
    assert not set("\u202e\u2066\u200b\ufeff") & set(shown), "what acts on the text around it is written out"
    assert page.dialogs == []
    assert page.strangers == []
    assert not any("Content Security Policy" in error for error in page.errors)


def test_a_hostile_prompt_that_is_refused_runs_nothing_and_asks_nobody(explorer):
    text = " ".join(HOSTILE)
    page = explorer(view="heads", text=text, head="L1H1", cell="2-1", search=text, second=text)
    expect(page.page.locator(".prompt-panel .notice.failed")).to_contain_text("<")
    page.page.locator('nav a[data-view="beside"]').click()
    expect(page.page.locator(".side textarea").first).to_have_value(text)
    page.page.locator('nav a[data-view="run"]').click()
    expect(page.page.locator(".family-list li").first).to_be_visible()
    harmless(page)


def test_hostile_tokens_and_words_are_shown_as_text(explorer, server):
    """What a model with any vocabulary may answer, here made up."""
    record = server.post("/api/record", {"text": IOI}).json()
    firing = {"layer": 2, "head": 1, "dest": 14, "src": 10}
    why = server.about("why", {"text": IOI}, {"firing": firing}).json()
    record["tokens"] = [HOSTILE[i % len(HOSTILE)] for i in range(len(record["tokens"]))]
    record["python"] = why["python"] = why["sentence"] = HOSTILE[0]
    question = {"answer": [{"token": HOSTILE[1], "id": 1, "probability": 0.5}], "wrong": None}
    for answer, text in zip(record["answers"], HOSTILE, strict=False):
        answer["token"] = text
    for cause in why["query"]["causes"] + why["key"]["causes"]:
        cause["token"] = HOSTILE[0]
    why["channels"][0]["evidence"] = {
        "words": HOSTILE[1],
        "tokens": HOSTILE,
        "examples": ["so[[ far]] away<< now>>", *HOSTILE],
    }
    why["moved"]["promotes"] = [[text, 1.0] for text in HOSTILE]
    page = explorer(view="heads")
    page.page.route("**/api/record", lambda route: route.fulfill(json=record))
    page.page.route("**/api/why", lambda route: route.fulfill(json=why))
    page.page.route("**/api/question", lambda route: route.fulfill(json=question))
    page.at(view="heads", text="anything", head="L2H1", cell="14-10")
    expect(page.page.locator(".heads .why-panel h2")).to_be_visible()
    expect(page.page.locator(".tokens li").first).to_contain_text("<img")
    page.page.locator(".heads .channels-section summary").click()
    expect(page.page.locator(".evidence")).to_contain_text("</textarea>")
    expect(page.page.locator(".evidence .looked-at")).to_have_text(" far")
    page.heads()
    expect(page.page.locator(".evidence")).to_contain_text("so far away now")
    page.page.locator(".grid-host canvas").focus()
    page.page.keyboard.press("Home")
    expect(page.page.locator("#card")).to_be_visible()
    page.page.locator(".share-menu summary").click()
    expect(page.page.locator(".share-menu pre")).to_have_text(HOSTILE[0])
    harmless(page)
    assert page.errors == []


def test_what_the_server_refuses_is_said_in_its_words_where_it_happened(explorer):
    page = explorer(text="Mary " * 90)
    expect(page.page.locator(".prompt-panel .notice.failed")).to_contain_text("Shorten the prompt")
    page.type(IOI)
    expect(page.page.locator(".prompt-panel .notice")).to_be_hidden()
    page.at(view="heads", text=IOI, head="L7H9")
    expect(page.page.locator(".heads > .notice.failed")).to_contain_text("L7H9")


@pytest.mark.parametrize("width", [420, 1000])
def test_nothing_runs_out_of_a_narrow_window(explorer, width):
    page = explorer(width=width, view="heads", text=IOI, head="L2H1", cell="14-10")
    expect(page.page.locator(".heads .why-panel h2")).to_be_visible()
    assert page.page.evaluate("document.documentElement.scrollWidth") <= width
    page.page.locator(".help summary").click()
    page.page.locator(".share-menu summary").click()
    assert page.page.evaluate("document.documentElement.scrollWidth") <= width
    box = page.page.locator(".share-menu .menu-body").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width


def test_light_and_dark_draw_attention_in_their_own_colours(explorer):
    corner = """(c) => {
      const pixel = [...c.getContext("2d").getImageData(c.width - 40, c.height - 80, 1, 1).data];
      return pixel[3] ? pixel : null;
    }"""
    seen = []
    for scheme in ("light", "dark"):
        page = explorer(scheme=scheme, view="heads", text=IOI).heads()
        canvas = page.page.locator(".grid-host canvas")
        seen.append(page.until(lambda canvas=canvas: canvas.evaluate(corner)))  # the last head is drawn last
    assert sum(seen[0][:3]) > sum(seen[1][:3]) + 100


def test_python_link_and_files_are_offered(explorer, server):
    page = explorer(view="heads", text=IOI)
    page.heads()
    view = server.post("/api/record", {"text": IOI}).json()
    page.page.locator(".share-menu summary").click()
    with page.page.expect_download() as saved:
        page.page.get_by_role("button", name="JSON").click()
    assert json.loads(saved.value.path().read_text())["id"] == view["id"]
    for name, start in (("SVG", b"<svg"), ("PNG", b"\x89PNG")):
        with page.page.expect_download() as saved:
            page.page.locator(".files").get_by_role("button", name=name).click()
        assert saved.value.path().read_bytes().startswith(start)
    expect(page.page.locator(".share-menu pre")).to_have_text(view["python"])
