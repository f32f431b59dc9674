"""A server that is busy, gone, or has forgotten; and a model so large that drawing it must not stop the page."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect

from tests.explorer_app.conftest import IOI
from tests.explorer_server.live import live
from tests.starting import Started, command

pytestmark = pytest.mark.browser

DONE = "all 12 heads"
OTHER = "When Anna and Mark went to the store, Mark gave a drink to"


def count(page):
    return page.page.locator(".heads .controls output")


def in_turn(page, pattern: Any, answers) -> list[str]:
    """Answer requests to an address in turn; afterwards they go to the server. Returns what was asked, as it grows.

    What is shown between two attempts is there for a moment: who wants to see it lets many fail, and empties
    ``answers`` (a list) when it was seen.
    """
    asked: list[str] = []

    def answer(route):
        asked.append(route.request.method)
        given = answers.pop(0) if answers else None
        if given is None:
            route.continue_()
        elif given == "lost":
            route.abort("connectionrefused")
        else:
            status, headers, body = given
            route.fulfill(
                status=status, headers=headers, body=json.dumps(body), content_type="application/json"
            )

    page.page.route(pattern, answer)
    return asked


def test_a_busy_server_is_waited_for_and_asked_again(explorer):
    page = explorer(view="heads")
    busy = (429, {"Retry-After": "1"}, {"code": "busy", "message": "32 computations are waiting."})
    answers = [busy] * 100
    asked = in_turn(page, "**/api/record", answers)
    page.type(IOI)
    expect(page.page.locator(".waiting")).to_contain_text("32 computations are waiting. Trying again in 1 s.")
    answers.clear()
    expect(count(page)).to_have_text(DONE)
    expect(page.page.locator(".waiting")).to_be_hidden()
    assert len(asked) >= 2


def test_a_lost_connection_is_said_and_recovered_from(explorer):
    page = explorer(view="heads")
    answers = ["lost"] * 100
    in_turn(page, "**/api/record", answers)
    page.type(IOI)
    expect(page.page.locator(".waiting")).to_contain_text("connection to the server is lost")
    answers.clear()
    expect(count(page)).to_have_text(DONE)
    expect(page.page.locator(".waiting")).to_be_hidden()


def test_a_killed_server_is_said_at_once_and_one_started_at_its_port_is_gone_on_with(explorer, server):
    process = Started(command, "serve", "builtin", "--no-open", "--port", "0")
    try:
        port = urlsplit(process.stdout.readline().strip()).port
        page = explorer(port=port, text=IOI)
        waiting, note = page.page.locator(".waiting"), page.page.locator(".stale-note")
        done = page.page.locator('.explain[data-stage="badges"] .sentence')
        expect(done).to_contain_text("Mary")
    finally:
        process.close()  # SIGKILL: the page hears nothing of it
    expect(waiting).to_contain_text("The connection to the server is lost")
    expect(note).to_be_hidden()
    expect(page.page.locator(".stale")).to_have_count(0)
    expect(done).to_be_visible()
    page.type(OTHER)
    expect(note).to_have_text("What is shown here still answers the previous question.")
    for old in (".mechanism-slot", ".explain-right", ".strip", ".question-row"):
        assert float(page.style(old, "opacity")) < 0.5
    expect(waiting).to_contain_text("lost")
    with live(server.app.state.session.models[0], port=port):
        expect(done).to_contain_text("Anna")
        expect(waiting).to_be_hidden()
        expect(note).to_be_hidden()
        expect(page.page.locator(".stale")).to_have_count(0)
        page.page.goto("about:blank")  # it would go on asking a server that is gone
    assert [error for error in page.errors if "net::ERR_" not in error] == []


# Of what the page waits for with a clock, five seconds are over at once.
HURRIED = """
const later = window.setTimeout;
window.setTimeout = (run, milliseconds, ...given) => later(run, milliseconds === 5000 ? 100 : milliseconds, ...given);
"""


def test_a_server_that_does_not_answer_is_said_and_recovered_from(explorer):
    page = explorer(script=HURRIED, view="heads", text=IOI).heads()
    waiting, held = page.page.locator(".waiting"), []
    page.page.route("**/api/server", lambda route: held.append(route))
    expect(waiting).to_contain_text("The server does not answer.")
    page.until(lambda: len(held) == 1)
    page.page.wait_for_timeout(1500)
    assert len(held) == 1, "it is not asked again while it is silent"
    page.page.unroute("**/api/server")
    expect(waiting).to_be_hidden()
    assert page.errors == []


def test_what_was_computed_when_the_server_was_killed_is_asked_for_again(explorer, server):
    page = explorer(text=IOI)
    page.page.wait_for_selector('.explain[data-stage="badges"]')
    lost = {"code": "no_job", "message": "There is no such job: the server was restarted since."}
    pattern = re.compile("/api/jobs/[^/]+$")
    events = in_turn(page, "**/api/jobs/*/events", ["lost"])
    asked = in_turn(page, pattern, [(404, {}, lost)])
    page.type(OTHER)
    expect(page.page.locator('.explain[data-stage="badges"] .sentence')).to_contain_text("Anna")
    assert asked == ["GET"], "the job was looked for"
    assert len(events) == 2, "and the work was begun once more"
    expect(page.page.locator(".notice.failed:visible")).to_have_count(0)


GONE = (404, {}, {"code": "not_kept", "message": "This recording is no longer kept."})


@pytest.mark.parametrize(
    ("address", "state"),
    [
        ("/patterns", {}),
        ("/heads/2/1", {"head": "L2H1"}),
        ("/api/why", {"head": "L2H1", "cell": "14-10"}),
        (
            "/api/intervene",
            {"changes": json.dumps([{"kind": "component", "site": {"kind": "mlp", "layer": 1}}])},
        ),
        ("/api/trace", {"view": "circuit", "answer": " Mary", "paths": "attention", "traced": "yes"}),
    ],
)
def test_a_recording_that_the_server_dropped_is_recorded_again(explorer, address, state):
    page = explorer(view="heads")
    asked = in_turn(page, f"**{address}", [GONE])
    page.at(**{"view": "heads", "text": IOI, **state})
    page.until(lambda: len(asked) == 2)
    first, second = (i for i, url in enumerate(page.requests) if url.endswith(address))
    assert any(url.endswith("/api/record") for url in page.requests[first:second])
    expect(page.page.locator(".notice.busy:visible")).to_have_count(0)
    expect(page.page.locator(".notice.failed:visible")).to_have_count(0)
    assert len(asked) == 2, "asked again, once"


def test_who_types_on_takes_the_old_question_back(explorer):
    page = explorer(view="heads")
    failed: list[str] = []
    page.page.on("requestfailed", lambda request: failed.append(request.post_data or ""))
    page.page.route("**/api/record", lambda route: "Susan" in route.request.post_data or route.continue_())
    page.type("When Susan and Paul")
    expect(page.page.locator(".prompt-panel .notice.busy")).to_be_visible()
    page.type(IOI)
    expect(count(page)).to_have_text(DONE)
    assert any("Susan" in body for body in failed), "the outdated request was aborted"


# A clock that goes on by a millisecond whenever it is read, and how many heads are drawn in each task of the page.
COUNTED = """
let [clock, counting] = [0, false];
performance.now = () => ++clock;
window.drawn = [];
const draw = CanvasRenderingContext2D.prototype.drawImage;
CanvasRenderingContext2D.prototype.drawImage = function (...given) {
  if (!counting) {
    counting = true;
    window.drawn.push(0);
    setTimeout(() => (counting = false));
  }
  window.drawn[window.drawn.length - 1]++;
  return draw.apply(this, given);
};
"""


def made_up(page, server, layers: int, heads: int, tokens: int) -> None:
    """A model and a prompt of any size, in the place of those of the server."""
    served = server.get("/api/server").json()
    served["models"] = [served["models"][0] | {"n_layers": layers, "n_heads": heads}]
    measures = {"sink": 0.5, "entropy": 2.0, "previous": 0.1, "strongest": [5, 3, 0.4]}
    view = {
        "id": "made-up",
        "model": 0,
        "text": "made up",
        "tokens": [f" t{i}" for i in range(tokens)],
        "token_ids": list(range(tokens)),
        "answers": [{"token": " a", "id": 1, "probability": 0.5}],
        "heads": [{"layer": i, "head": h, **measures} for i in range(layers) for h in range(heads)],
        "python": "",
    }
    question = {"answer": view["answers"], "wrong": None}
    weights = bytes(i * 7 % 256 for i in range(layers * heads * tokens * (tokens + 1) // 2))
    page.page.route("**/api/server", lambda route: route.fulfill(json=served))
    page.page.route("**/api/record", lambda route: route.fulfill(json=view))
    page.page.route("**/api/question", lambda route: route.fulfill(json=question))
    page.page.route("**/patterns", lambda route: route.fulfill(body=weights))


def test_270_heads_of_128_tokens_are_drawn_in_short_tasks_so_that_the_page_goes_on(explorer, server):
    layers, heads = 30, 9
    page = explorer(script=COUNTED, view="heads")
    made_up(page, server, layers, heads, 128)
    page.page.reload()
    page.type("made up")
    expect(page.page.locator(".heads .controls output")).to_have_text("all 270 heads")
    last = "(c) => c.getContext('2d').getImageData(c.width - 60, c.height - 30, 1, 1).data[3]"
    canvas = page.page.locator(".grid-host canvas")
    page.until(lambda: canvas.evaluate(last))  # the last head is drawn
    drawn = page.page.evaluate("window.drawn")
    assert sum(drawn) >= layers * heads
    assert max(drawn) <= 20, "what a task draws is bounded by the clock, not by how many heads there are"


# How often a canvas was painted on, however small the stroke.
PAINTED = """
window.painted = 0;
for (const name of ["fillRect", "putImageData", "drawImage"]) {
  const paint = CanvasRenderingContext2D.prototype[name];
  CanvasRenderingContext2D.prototype[name] = function (...given) {
    window.painted++;
    return paint.apply(this, given);
  };
}
"""


# How many tokens of the prompt are laid out in each task of the page.
LAID = """
window.laid = [];
addEventListener("DOMContentLoaded", () => new MutationObserver((all) => {
  const added = all.flatMap(({ addedNodes }) => [...addedNodes]).filter((node) => node.querySelector?.(".strip-token"));
  if (added.length) window.laid.push(added.length);
}).observe(document, { childList: true, subtree: true }));
"""


@pytest.mark.parametrize("width", [390, 1440])
def test_a_prompt_of_512_tokens_is_laid_out_in_parts_and_its_end_is_in_sight(explorer, server, width):
    page = explorer(script=LAID, view="heads", width=width)
    made_up(page, server, 1, 1, 512)
    page.page.reload()
    page.page.evaluate("window.laid.length = 0")
    page.type("made up")
    strip = page.page.locator(".tokens")
    expect(page.page.locator(".strip-token")).to_have_count(512)
    laid = page.page.evaluate("window.laid")
    assert sum(laid) == 512
    assert max(laid) <= 80, "a task lays out some of them, whatever their number"
    hidden = "(e) => e.scrollHeight - e.clientHeight - e.scrollTop"
    page.until(lambda: strip.evaluate(hidden) < 1)
    expect(strip).to_have_class("tokens above")
    page.page.set_viewport_size({"width": 700, "height": 900})
    page.until(lambda: strip.evaluate(hidden) < 1)
    strip.evaluate("(e) => (e.scrollTop = 0)")
    expect(strip).to_have_class("tokens")
    page.page.set_viewport_size({"width": 560, "height": 900})
    page.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert strip.evaluate("(e) => e.scrollTop") == 0, "another width does not take the reader back to the end"


def test_a_head_of_512_tokens_is_one_picture_with_names_at_the_chosen_cell(explorer, server):
    tokens = 512
    pattern = {"layer": 0, "head": 0, "attention": [[1 / (d + 1)] * (d + 1) for d in range(tokens)]}
    page = explorer(script=PAINTED, view="heads", width=2560)
    made_up(page, server, 1, 1, tokens)
    page.page.route("**/heads/0/0", lambda route: route.fulfill(json=pattern))
    page.page.route("**/api/why", lambda route: route.fulfill(status=404, json={"code": "x", "message": "x"}))
    page.page.reload()
    page.type("made up")
    expect(page.page.locator(".strip-token")).to_have_count(tokens)
    page.page.evaluate("location.hash += '&head=L0H0&cell=400-300'")
    expect(page.page.locator(".cell-name")).to_have_text(["t400", "t300"])
    assert page.page.evaluate("window.painted") < tokens, "not one stroke for each of 131,328 cells"
    box = page.page.locator(".zoom-host canvas").bounding_box()
    assert box["width"] > 700, "it takes the room that it has"
    page.page.mouse.move(box["x"] + 60, box["y"] + box["height"] - 20)
    expect(page.page.locator("#readout")).to_contain_text("attends to")


# All in one go: what is read one after the other may have moved in between.
BOXES = """() => [".heads .zoom-scroll", ".zoom-host canvas", ".cell-name"].flatMap((name) =>
  [...document.querySelectorAll(name)].map((e) => e.getBoundingClientRect().toJSON()))"""


def test_the_names_of_a_chosen_cell_are_within_the_drawing_and_apart(explorer, server):
    tokens = 512
    pattern = {"layer": 0, "head": 0, "attention": [[1 / (d + 1)] * (d + 1) for d in range(tokens)]}
    page = explorer(view="heads", width=390)
    made_up(page, server, 1, 1, tokens)
    page.page.route("**/heads/0/0", lambda route: route.fulfill(json=pattern))
    page.page.route("**/api/why", lambda route: route.fulfill(status=404, json={"code": "x", "message": "x"}))
    page.page.goto("about:blank")
    names = page.page.locator(".cell-name")
    for cell in ("0-0", "511-0", "511-511", "511-202"):
        page.at(view="heads", text="made up", head="L0H0", cell=cell)
        expect(names).to_have_text([f"t{position}" for position in cell.split("-")])
        drawing, canvas, one, two = page.page.evaluate(BOXES)
        assert drawing["right"] - drawing["left"] < 390
        for box in (canvas, one, two):
            assert drawing["left"] <= box["left"] + 0.01, cell
            assert box["right"] <= drawing["right"] + 0.01, cell
            assert drawing["top"] <= box["top"] + 0.01, cell
            assert box["bottom"] <= drawing["bottom"] + 0.01, cell
        assert two["bottom"] <= one["top"], cell


def test_a_map_of_many_circuits_is_one_picture_and_not_a_stroke_for_each_pair(explorer, server):
    count = 60
    found = server.get("/api/run/map").json()
    found["ids"] = [f"made-up-{i}" for i in range(count)]
    found["family"] = [found["families"][0]["family"]] * count
    found["distances"] = [[abs(i - j) / count for j in range(count)] for i in range(count)]
    page = explorer(script=PAINTED, view="beside")
    page.page.route("**/api/run/map", lambda route: route.fulfill(json=found | {"size": count}))
    page.at(view="run")
    expect(page.page.locator(".family-list li")).to_have_count(len(found["families"]))
    page.until(lambda: page.page.evaluate("window.painted") > 0)
    assert page.page.evaluate("window.painted") < count * count
    corner = "(c) => [...c.getContext('2d').getImageData(c.width - 3, c.height - 3, 1, 1).data]"
    other = "(c) => [...c.getContext('2d').getImageData(c.width - 3, 40, 1, 1).data]"
    canvas = page.page.locator(".map-host canvas")
    assert canvas.evaluate(corner) != canvas.evaluate(other), (
        "equal circuits and distant ones have other colours"
    )
