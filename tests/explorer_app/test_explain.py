"""The first view: the answer, then the heads, then the why. Nothing is covered, nothing old is taken for new."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from threading import Event
from typing import Any

import pytest
from playwright.sync_api import expect

from headtrace.explorer.panels import mechanisms
from headtrace.interpret import HeadRole
from headtrace.mechanism import evidence
from tests.explorer_app.conftest import IOI, endless
from tests.explorer_server.live import LONG

pytestmark = pytest.mark.browser

DONE = '.explain[data-stage="badges"]'
OTHER = "When Anna and Mark went to the store, Mark gave a drink to"


@pytest.fixture(scope="module")
def told(server) -> dict[str, Any]:
    """What the server says of the prompt, asked for without a browser."""
    id = server.about("mechanism", {"text": IOI}, {}).json()["id"]
    return next(data for _, name, data in server.events(id) if name == "done")


def sentence(page):
    return page.page.locator(".explain .sentence")


def overlap(one: dict[str, float], two: dict[str, float]) -> bool:
    apart = one["x"] + one["width"] <= two["x"] or two["x"] + two["width"] <= one["x"]
    return not (apart or one["y"] + one["height"] <= two["y"] or two["y"] + two["height"] <= one["y"])


def test_the_page_opens_on_a_prompt_that_the_model_answers_rightly(explorer, server):
    page = explorer()
    page.page.wait_for_selector(DONE)
    first = server.get("/api/tasks/ioi/starter").json()
    assert first["right"]
    says = page.page.locator(".strip .says")
    expect(says).to_have_text(f"{first['answer'].strip()} {first['probability']:.0%}")
    expect(page.page.get_by_label("Answer", exact=True)).to_have_value(first["answer"].strip())
    expect(sentence(page)).to_contain_text(first["answer"].strip())
    expect(page.page.locator(".explain .badge").first).to_contain_text("removed")
    starters = page.page.locator(".starter")
    others = [
        server.get(f"/api/tasks/{task['name']}/starter").json()
        for task in server.get("/api/server").json()["tasks"]
    ]
    expect(starters).to_have_count(sum(each["right"] for each in others))
    starters.last.click()
    expect(page.page.locator("#text")).to_have_value([each for each in others if each["right"]][-1]["text"])
    assert page.errors == []
    assert page.strangers == []


def test_a_typed_prompt_brings_words_heads_and_the_mechanism(explorer, told):
    page = explorer(text=OTHER)
    page.page.wait_for_selector(DONE)
    page.type(IOI)
    expect(page.page.get_by_label("Answer", exact=True)).to_have_value("Mary")
    expect(page.page.get_by_label("Rival", exact=True)).to_have_value("John")
    expected = told
    expect(page.page.locator(".explain .ledger b").first).to_have_text(
        f"= {expected['mechanism']['whole']:+.2f}"
    )
    weighed = page.page.locator(".tokens li.weighed")
    expect(weighed).to_have_count(sum(value is not None for value in expected["importance"]))
    rows = page.page.locator(".head-row b")
    expect(rows).to_have_text([f"L{head['layer']}H{head['head']}" for head in expected["heads"]])
    first = expected["heads"][0]
    row = page.page.locator(".head-row").first
    expect(row).to_contain_text(f"{first['attention']:.2f}")
    expect(row.locator(".flow")).to_contain_text(f"{first['flow']:+.2f}")
    page.page.locator(".heads-that-matter select").select_option("attention")
    by = sorted(expected["heads"], key=lambda head: -head["attention"])
    expect(rows.first).to_have_text(f"L{by[0]['layer']}H{by[0]['head']}")
    page.page.locator(".all-heads").click()
    ringed = len({(head["layer"], head["head"]) for head in expected["heads"]})
    expect(page.page.locator(".heads .controls output")).to_have_text(
        f"all 12 heads, {ringed} that matter are ringed"
    )
    page.page.locator(".share-menu summary").click()
    assert page.errors == []


def test_each_head_has_its_role_here_and_those_of_the_atlas_that_is_served(
    explorer, server, told, monkeypatch
):
    class Book:
        def channel(self, layer: int, head: int, channel: int) -> None:
            return None

        def roles(self, layer: int, head: int) -> tuple[HeadRole, ...]:
            return (HeadRole("induction", 0.5, 0.1),) if (layer, head) == (2, 1) else ()

    monkeypatch.setattr(server.app.state.session, "atlas", Book())
    page = explorer(text=IOI)
    page.page.wait_for_selector(DONE)
    expected = told["heads"]
    roles = page.page.locator(".head-row .role")
    expect(roles).to_have_count(len(expected))
    for role, row in zip(roles.all_inner_texts(), expected, strict=True):
        assert role == re.sub(r"\*(.*?)\*", "\u201c\\1\u201d", row["role"]), "in words, not in marks"
    own = page.page.locator(".head-row", has_text="L2H1").first.locator(".measured-role")
    expect(own).to_have_text("induction")
    expect(own).to_have_attribute("title", "Over the corpus of the atlas: 0.500, by chance 0.100")
    others = sum((row["layer"], row["head"]) == (2, 1) for row in expected)
    expect(page.page.locator(".measured-role")).to_have_count(others)


def test_each_head_says_what_it_does_to_the_answers_and_no_noise(explorer, told):
    page = explorer(text=IOI)
    page.page.wait_for_selector(DONE)
    expected = []
    for head in told["heads"]:
        if abs(head["straight"]) < abs(head["flow"]) / 2:
            expected.append("acts through later layers")
            continue
        both = zip(("Mary", "John"), head["logits"], strict=True)
        said = sorted(
            (each for each in both if abs(each[1]) >= 0.05 * abs(head["flow"])), key=lambda e: -abs(e[1])
        )
        expected.append(", ".join(f"{'raises' if v > 0 else 'lowers'} {t} {abs(v):.2f}" for t, v in said))
    assert len(set(expected)) > 2
    expect(page.page.locator(".head-row .does")).to_have_text(expected)
    page.at(text=IOI, answer="Mary", alone="yes")
    expect(page.page.get_by_label("Rival", exact=True)).to_have_value("\u0000alone")
    note = page.page.locator(".heads-that-matter .hint").first
    expect(note).to_have_text("Flow of the log-likelihood, compared with changed prompts.")
    for does in page.page.locator(".head-row .does").all_inner_texts():
        assert re.fullmatch(r"acts through later layers|straight to the answer [+\u2212]\d+\.\d\d", does), (
            does
        )
    assert page.errors == []


def test_choosing_a_rival_or_none_asks_at_once_and_the_page_is_restored(explorer, server):
    page = explorer(text=IOI)
    page.page.wait_for_selector(DONE)
    rival = page.page.get_by_label("Rival", exact=True)
    rival.select_option("Susan")
    expect(page.page.locator(".mechanism-drawing")).to_contain_text("Susan")
    rival.select_option(label="nothing: how likely is it?")
    expect(page.page.locator(".explain .origin")).to_contain_text("Log-likelihood")
    page.page.reload()
    expect(page.page.locator(".explain .origin")).to_contain_text("Log-likelihood")
    page.page.locator(".share-menu summary").click()
    expect(page.page.locator(".share-menu pre")).to_contain_text("answer=' Mary'")
    with page.page.expect_download() as saved:
        page.page.get_by_role("link", name="Mechanism file").click()
    assert '"headtrace.mechanism/1"' in saved.value.path().read_text()
    assert page.errors == []


def test_a_click_on_a_word_exchanges_it(explorer, told):
    page = explorer(text=IOI)
    page.page.wait_for_selector(DONE)
    words = {word["positions"][0]: word for word in told["words"]}
    page.page.locator('.strip-token[data-position="10"]').click()
    offered = page.page.locator(".exchange .suggestion")
    expect(offered).to_have_count(len(words[10]["changes"]))
    change = words[10]["changes"][0]
    expect(offered.first).to_contain_text("flips it")
    offered.first.click()
    expect(page.page.locator("#text")).to_have_value(change["text"])
    page.page.locator('.strip-token[data-position="2"]').click()
    page.page.get_by_label("Another word for Mary").fill("Anna")
    page.page.keyboard.press("Enter")
    expect(page.page.locator("#text")).to_have_value(change["text"].replace("Mary", "Anna", 1))
    assert page.errors == []


def test_a_head_opens_its_why_and_changes_do_not_cover_the_drawing(explorer, server):
    page = explorer(text=IOI)
    page.page.wait_for_selector(DONE)
    row = page.page.locator(".head-row", has_text="L2H1")
    row.click()
    drawer = page.page.locator(".explain .drawer")
    expect(drawer.locator(".why-sentence")).to_contain_text(
        "L2H1 at \u201cto\u201d attends to \u201cJohn\u201d"
    )
    assert page.remembers("cell=14-10")
    drawer.locator(".change-it").get_by_role("button", name="remove").click()
    expect(page.page.locator(".explain .says-now")).to_contain_text("It said \u201cMary\u201d 99%")
    drawing = page.page.locator(".mechanism-drawing").bounding_box()
    assert not overlap(drawing, page.page.locator(".changes").bounding_box())
    page.page.get_by_role("button", name="Undo all").click()
    swap = drawer.get_by_label("Another word for John")
    swap.select_option(index=1)
    expect(page.page.locator(".explain .says-now")).to_contain_text("with the other word it says")
    drawer.locator(".rather-than summary").click()
    expect(drawer.locator(".ratio-term").first).to_be_visible()
    drawer.get_by_label("Rather than", exact=True).select_option("2")
    expect(drawer).to_contain_text("The logarithm of that")
    drawer.get_by_role("button", name="Heads that matter").click()
    expect(row).to_be_visible()
    assert page.errors == []


def test_what_is_of_the_previous_prompt_fades_and_says_so(explorer):
    page = explorer(text=IOI)
    page.page.wait_for_selector(DONE)
    body, note = page.page.locator(".explain-right"), page.page.locator(".stale-note")
    expect(note).to_be_hidden()
    page.page.locator("#write").click()
    page.page.locator("#text").fill(OTHER)
    expect(note).to_be_visible()
    assert float(body.evaluate("(e) => getComputedStyle(e).opacity")) < 0.5
    page.page.keyboard.press("Escape")
    expect(note).to_be_hidden()
    page.type(OTHER)
    expect(sentence(page)).to_contain_text("Anna")
    expect(note).to_be_hidden()
    assert float(body.evaluate("(e) => getComputedStyle(e).opacity")) == 1


def test_a_drawing_of_the_previous_rival_is_not_taken_for_the_new_one(explorer, monkeypatch):
    page = explorer(text=IOI)
    page.page.wait_for_selector(DONE)
    held, inner = Event(), mechanisms.explain

    def stopped(*given: Any, partial: Any, **options: Any) -> Any:
        """The heads of this run are told, and nothing more until it is let go."""

        def first(view: Any) -> None:
            partial(view)
            assert held.wait(LONG)

        return inner(*given, partial=first, **options)

    monkeypatch.setattr(mechanisms, "explain", stopped)
    page.page.get_by_label("Rival", exact=True).select_option("Susan")
    page.page.wait_for_selector('.explain[data-stage="run"]')
    expect(page.page.locator(".skeleton").first).to_be_visible()
    expect(page.page.locator(".mechanism-drawing")).to_have_count(0)
    held.set()
    expect(page.page.locator(".mechanism-drawing")).to_contain_text("Susan")


def test_the_grid_of_heads_fades_while_another_prompt_is_typed(explorer):
    page = explorer(view="heads", text=IOI)
    page.heads()
    page.page.locator("#write").click()
    page.page.locator("#text").fill(OTHER)
    expect(page.page.locator(".stale-note")).to_be_visible()
    assert float(page.style(".heads-body", "opacity")) < 0.5
    page.page.keyboard.press("Enter")
    expect(page.page.locator(".stale-note")).to_be_hidden()
    assert float(page.style(".heads-body", "opacity")) == 1


def test_badges_arrive_one_by_one_and_keep_the_step_that_is_chosen(explorer, monkeypatch):
    monkeypatch.setattr(evidence, "TOKENS_AT_ONCE", 1)
    begun, held, inner = Event(), Event(), mechanisms.explain

    def stopped(*given: Any, partial: Any, **options: Any) -> Any:
        def first(view: Any) -> None:
            partial(view)
            if view.mechanism and sum("measured" in step for step in view.mechanism["steps"]) == 1:
                begun.set()
                assert held.wait(LONG)

        return inner(*given, partial=first, **options)

    monkeypatch.setattr(mechanisms, "explain", stopped)
    page = explorer(text=IOI)
    assert begun.wait(LONG)
    status = page.page.locator(".explain-status .notice")
    expect(status).to_contain_text("1 of")
    page.page.locator(".explain .step-chip").nth(1).click()
    chosen = page.text(".step-details h3")
    held.set()
    page.page.wait_for_selector(DONE)
    expect(page.page.locator(".step-details h3")).to_have_text(chosen)
    expect(page.page.locator(".step-details .badge")).to_contain_text("removed")


def test_a_prompt_that_is_written_from_right_to_left_is_shown_so(explorer, server):
    view = server.post("/api/record", {"text": IOI}).json()
    words = ["", "אנה", "גרה", "בעיר", "חיפה", "והיא"]
    view["tokens"] = [*words, *view["tokens"][len(words) :]]
    page = explorer(view="heads")
    page.page.route("**/api/record", lambda route: route.fulfill(json=view))
    page.at(view="heads", text="anything")
    expect(page.page.locator(".strip-token")).to_have_count(len(view["tokens"]))
    first, second = (page.page.locator(".strip-token").nth(i).bounding_box() for i in (1, 2))
    assert first["x"] > second["x"], "what comes first stands at the right"
    says = page.page.locator(".strip .says").bounding_box()
    assert says["x"] < second["x"] or says["y"] > second["y"], "and the answer behind it"
    page.page.locator("#write").click()
    for field in ("#text", ".picker input"):
        assert page.page.locator(field).first.get_attribute("dir") == "auto"
    assert page.errors == []


def test_a_server_that_is_gone_is_said_before_anything_is_asked(explorer):
    page = explorer(text=IOI)
    page.page.wait_for_selector(DONE)
    page.page.route("**/api/server", lambda route: route.abort("connectionrefused"))
    expect(page.page.locator(".waiting")).to_contain_text("connection to the server is lost")
    page.page.unroute("**/api/server")
    expect(page.page.locator(".waiting")).to_be_hidden()


def test_a_circuit_without_edges_offers_other_questions(explorer):
    page = explorer(view="circuit", text=IOI, answer=" John", wrong=" Mary", paths="attention", traced="yes")
    ways = page.page.locator(".circuit .ways")
    expect(ways).to_be_visible()
    expect(page.page.locator(".circuit-view .empty")).to_be_visible()
    expect(page.page.locator(".circuit-view .empty .advice")).to_be_hidden()  # commands for a shell
    ways.get_by_role("button", name="How likely").click()
    expect(page.page.get_by_label("Rival", exact=True)).to_have_value("\u0000alone")
    page.at(view="circuit", text=IOI, answer=" John", wrong=" Mary", paths="attention", traced="yes")
    ways.get_by_role("button", name="Difference").click()
    page.page.wait_for_selector(DONE)
    page.at(view="circuit", text=IOI, answer=" John", wrong=" Mary", paths="attention", traced="yes")
    ways.get_by_role("button", name="Swap").click()
    expect(page.page.locator("#question")).to_have_text("Why \u201cMary\u201d rather than \u201cJohn\u201d?")
    expect(ways).to_be_hidden()
    assert page.errors == []


def test_while_it_is_computed_clicks_are_answered_and_it_can_be_cancelled(explorer, monkeypatch):
    begun = endless(monkeypatch, mechanisms, "explain")
    page = explorer(text=IOI, head="L2H1", cell="14-10")
    assert begun.wait(LONG)
    expect(page.page.locator(".skeleton").first).to_be_visible()
    expect(page.page.locator(".explain .why-sentence")).to_be_visible()
    page.page.get_by_role("button", name="Cancel").click()
    expect(page.page.locator(".explain-status .notice")).to_have_text("Cancelled.")
    monkeypatch.undo()
    page.page.get_by_role("button", name="Explain it").click()
    page.page.wait_for_selector(DONE)
    assert page.errors == []


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1440, "light")])
def test_everything_fits_and_can_be_hit(explorer, width, scheme):
    page = explorer(width=width, scheme=scheme, text=IOI, head="L2H1", cell="14-10")
    page.page.wait_for_selector(DONE)
    expect(page.page.locator(".explain .why-sentence")).to_be_visible()
    assert page.page.evaluate("document.documentElement.scrollWidth") <= width
    small = page.page.evaluate(
        """() => [...document.querySelectorAll("button, select, summary, input, a")]
          .filter((e) => e.checkVisibility() && !e.closest("p, li:has(.cause), .hint"))
          .map((e) => [e.className + e.tagName, e.getBoundingClientRect()])
          .filter(([, box]) => box.width > 0 && (box.height < 24 || box.width < 24)).map(([name]) => name)"""
    )
    assert small == []
    page.at(text=IOI)
    page.page.wait_for_selector(DONE)
    assert page.page.evaluate("document.documentElement.scrollWidth") <= width


MLP = json.dumps([{"kind": "component", "site": {"kind": "mlp", "layer": 1}}])
AXE = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")


def test_axe_finds_nothing_in_either_scheme(explorer):
    page = explorer(text=IOI)
    states = [
        ({}, DONE),
        ({"head": "L2H1", "cell": "14-10", "changes": MLP}, ".explain .says-now"),
        ({"view": "heads", "head": "L2H1", "cell": "14-10"}, ".heads .why-sentence"),
        ({"view": "circuit", "paths": "attention", "traced": "yes"}, ".nodes .node"),
        ({"view": "beside"}, ".side"),
        ({"view": "run"}, ".family-list li"),
    ]
    for state, there in states:
        page.at(text=IOI, **state)
        expect(page.page.locator(there).first).to_be_visible()
        expect(page.page.locator(".stale")).to_have_count(0)  # what is faded is not meant to be read
        if not page.page.evaluate("'axe' in window"):
            page.page.evaluate(AXE)
        for scheme, rules in (("dark", '{ runOnly: ["color-contrast"] }'), ("light", "{}")):
            page.page.emulate_media(color_scheme=scheme)  # other than colours, nothing depends on it
            found = page.page.evaluate(f"axe.run({rules}).then(({{ violations }}) => violations)")
            assert [(each["id"], each["nodes"][0]["html"]) for each in found] == [], (state, scheme)
