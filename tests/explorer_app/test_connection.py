"""A server that is busy, gone, or has forgotten; and a model so large that drawing it must not stop the page."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import expect

from tests.explorer_app.conftest import IOI

pytestmark = pytest.mark.browser

DONE = "all 12 heads"


def count(page):
    return page.page.locator(".heads .controls output")


def in_turn(page, pattern: str, answers) -> list[str]:
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
    for _ in range(500):
        if len(asked) == 2:
            break
        page.page.wait_for_timeout(20)
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
    for _ in range(400):
        if canvas.evaluate(last):
            break
        page.page.wait_for_timeout(20)
    assert canvas.evaluate(last), "the last head is drawn"
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
