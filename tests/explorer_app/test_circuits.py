"""Circuits that grow while they are traced, changes to the running model, two prompts side by side, a run."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import expect

from headtrace.circuits.files import loads
from headtrace.explorer.panels import circuits
from tests.explorer_app.conftest import IOI, endless
from tests.explorer_server.live import LONG

pytestmark = pytest.mark.browser

SWAPPED = "When Mary and John went to the store, Mary gave a drink to"
CIRCUIT = {"view": "circuit", "text": IOI, "answer": " Mary", "wrong": " John", "paths": "attention"}
NODE = ".nodes .node"

# What the page heard of its jobs.
HEARD = """
window.heard = [];
const listen = EventSource.prototype.addEventListener;
EventSource.prototype.addEventListener = function (name, ...rest) {
  if (!["open", "error"].includes(name)) listen.call(this, name, () => window.heard.push(name));
  return listen.call(this, name, ...rest);
};
"""


def traced(server, **changes: Any) -> dict[str, Any]:
    """What the server traces, asked for without a browser."""
    root = {"answer": " Mary", "wrong": " John"}
    id = server.about("trace", {"text": IOI}, {**root, "paths": "attention", **changes}).json()["id"]
    return next(data for _, name, data in server.events(id) if name == "done")


def test_a_circuit_grows_while_it_is_traced_and_is_the_one_of_the_library(explorer, server):
    page = explorer(script=HEARD, **CIRCUIT)
    expect(page.page.get_by_label("Answer", exact=True)).to_have_value("Mary")
    page.page.get_by_role("button", name="Trace", exact=True).click()
    expect(page.page.locator("#question")).to_have_text("Why \u201cMary\u201d rather than \u201cJohn\u201d?")
    expected = traced(server)
    expect(page.page.locator("#status")).to_contain_text("MLPs folded")
    page.page.get_by_role("button", name="Unfold all MLPs").click()
    expect(page.page.locator("#status")).to_have_text(f"{len(expected['circuit']['edges'])} edges drawn")
    expect(page.page.locator(NODE)).to_have_count(len(expected["circuit"]["nodes"]))
    heard = page.page.evaluate("window.heard")
    assert heard[-1] == "done"
    assert "progress" in heard
    page.page.locator(".share-menu summary").click()
    expect(page.page.locator(".share-menu pre")).to_have_text(expected["python"])
    with page.page.expect_download() as saved:
        page.page.get_by_role("link", name="Circuit file").click()
    assert len(loads(saved.value.path().read_text()).edges) == len(expected["circuit"]["edges"])
    with page.page.expect_download() as saved:
        page.page.get_by_role("link", name="HTML page").click()
    assert "<!doctype html>" in saved.value.path().read_text()
    with page.page.expect_download() as saved:
        page.page.locator(".files").get_by_role("button", name="SVG").click()
    assert saved.value.path().read_bytes().startswith(b"<svg")
    assert page.errors == []
    assert page.strangers == []


def test_reload_restores_the_circuit_and_what_is_pinned(explorer):
    page = explorer(**CIRCUIT, traced="yes").traced()
    head = page.page.locator(f"{NODE}.head").first
    name = head.get_attribute("aria-label").split(",")[0].split(":")[0]
    head.click()
    panel = page.page.locator("#panel h2")
    expect(panel).to_contain_text(name.split()[0])
    said = panel.inner_text()
    assert page.remembers("pin")
    page.page.reload()
    expect(panel).to_have_text(said)
    page.page.locator('nav a[data-view="heads"]').click()
    page.heads()
    page.page.go_back()
    expect(panel).to_have_text(said)
    assert page.errors == []


def test_a_cancelled_trace_frees_the_queue(explorer, server, monkeypatch):
    begun = endless(monkeypatch, circuits, "trace")
    page = explorer(**CIRCUIT, traced="yes")
    assert begun.wait(LONG)
    page.page.get_by_role("button", name="Cancel").click()
    expect(page.page.locator(".circuit > .notice")).to_have_text("The trace was cancelled.")
    expect(page.page.get_by_role("button", name="Trace", exact=True)).to_be_visible()
    fresh = server.post("/api/record", {"text": "Mary gave a drink to"})
    assert fresh.status == 200
    monkeypatch.undo()
    page.page.get_by_role("button", name="Trace", exact=True).click()
    expect(page.page.locator(NODE).first).to_be_visible()
    assert page.errors == []


def test_what_is_removed_changes_the_answers_beside_the_clean_ones(explorer, server):
    page = explorer(**CIRCUIT, traced="yes").traced()
    label = page.page.locator("#panel .row").first
    label.click()  # the strongest cause of the root
    page.page.locator(".change-here").get_by_role("button", name="remove").click()
    table = page.page.locator(".answer-table")
    expect(table.locator("tbody tr").first).to_contain_text("Mary")
    name = page.page.locator("#panel h2").inner_text()
    layer, head = name.split()[0][1:].split("H")
    dest, src = name.split()[1].split("->")
    site = {"kind": "head", "layer": int(layer), "head": int(head), "dest": int(dest), "src": int(src)}
    asked = {
        "interventions": [{"kind": "component", "site": site, "factor": 0}],
        "answer": " Mary",
        "wrong": " John",
    }
    found = server.about("intervene", {"text": IOI}, asked).json()
    metric = page.page.locator(".measured-changes p").first
    expect(metric).to_contain_text(found["metric"]["measure"])
    expect(metric.locator("b")).to_contain_text(f"{found['metric']['before']:.2f}")
    page.page.get_by_role("button", name="Continue the text").click()
    expect(page.page.locator(".generated dt")).to_have_count(2)
    page.page.locator(".share-menu summary").click()
    expect(page.page.locator(".share-menu pre")).to_contain_text("headtrace")
    page.page.keyboard.press("Escape")
    page.page.locator('nav a[data-view="heads"]').click()
    page.page.locator(".heads").get_by_text("difference", exact=True).click()
    expect(page.page.locator(".changes")).to_be_visible()  # changes hold in every view of the prompt
    page.page.locator(".change-list button").click()
    expect(page.page.locator(".changes")).to_be_hidden()
    assert page.errors == []


def test_a_signal_can_be_removed_doubled_and_put_back(explorer):
    page = explorer(view="heads", text=IOI, head="L2H1", cell="14-10", answer=" Mary", wrong=" John")
    cause = page.page.locator(".heads section.key .cause").first
    cause.get_by_role("button", name="remove").click()
    effect = page.page.locator(".measured-changes p", has_text="attention of L2H1 14\u219210")
    expect(effect).to_be_visible()
    removed = effect.locator("b").inner_text()
    cause.get_by_role("button", name="double").click()
    expect(page.page.locator(".change-list li")).to_have_count(1)
    expect(page.page.locator(".change-list")).to_contain_text("doubled signal of")
    expect(effect.locator("b")).not_to_have_text(removed)
    page.page.get_by_role("button", name="Undo all").click()
    expect(page.page.locator(".changes")).to_be_hidden()
    assert page.errors == []


def test_two_prompts_side_by_side_show_what_they_share(explorer):
    page = explorer(**(CIRCUIT | {"view": "beside"}), second=SWAPPED, answer2=" John", wrong2=" Mary")
    page.page.get_by_role("button", name="Trace both").click()
    expect(page.page.locator(".frame")).to_have_count(2)
    expect(page.page.locator("#panel h2")).to_have_text("Two circuits")
    expect(page.page.locator("#panel .facts dd").first).to_contain_text("shared edge")
    expect(page.page.locator(".edges .shared").first).to_be_attached()
    page.page.reload()
    expect(page.page.locator("#panel h2")).to_have_text("Two circuits")
    assert page.errors == []


def test_one_prompt_in_two_models_side_by_side(explorer):
    page = explorer(**(CIRCUIT | {"view": "beside", "model2": 1, "traced": "yes"}))
    expect(page.page.locator("#panel .facts dd").first).to_contain_text("0 only here")


def test_the_cluster_map_and_the_search_open_circuits_of_the_run(explorer, server):
    page = explorer(view="run")
    found = server.get("/api/run/map").json()
    expect(page.page.locator(".family-list li")).to_have_count(len(found["families"]))
    cards = page.page.locator(".family-card")
    expect(cards).to_have_count(min(4, len(found["families"])))
    first = server.get(f"/api/run/circuits/{found['families'][0]['representative']}").json()["mechanism"]
    expect(cards.first.locator(".step-chip")).to_have_count(len(first["steps"]))
    rows = page.page.locator(".run-list li")
    expect(rows).to_have_count(found["size"])
    canvas = page.page.locator(".map-host canvas")
    canvas.focus()
    for key in ("ArrowRight", "Enter"):
        page.page.keyboard.press(key)
    expect(page.page.locator(".frame")).to_have_count(2)
    expect(page.page.locator("#panel h2")).to_have_text("Two circuits")
    prompt = server.get("/api/run/prompts").json()["prompts"][0]
    word = prompt["text"].split()[1]
    page.page.get_by_label("Search prompts").fill(word)
    wanted = server.get(f"/api/run/prompts?search={word}").json()
    expect(rows).to_have_count(wanted["found"])
    rows.first.locator(".row").click()
    expect(page.page.locator(".frame")).to_have_count(1)
    expect(page.page.locator("#panel .prompt")).to_contain_text(word)
    page.page.reload()
    expect(page.page.locator("#panel .prompt")).to_contain_text(word)
    assert page.errors == []


def test_circuits_fit_a_narrow_dark_window(explorer):
    page = explorer(width=420, scheme="dark", **CIRCUIT, traced="yes")
    expect(page.page.locator(NODE).first).to_be_visible()
    assert page.page.evaluate("document.documentElement.scrollWidth") <= 420
    page.at(view="run")
    expect(page.page.locator(".family-list li").first).to_be_visible()
    assert page.page.evaluate("document.documentElement.scrollWidth") <= 420
    assert page.errors == []
