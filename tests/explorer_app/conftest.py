"""The explorer in a real browser, against its real server with the built-in model."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from threading import Event
from types import ModuleType
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest
from playwright.sync_api import expect

import headtrace
from headtrace.explorer.panels import Settings
from headtrace.explorer.panels.circuits import RunSource
from headtrace.tasks import load_task
from tests.browsing import WAIT, Opened, open_browser
from tests.explorer_server.live import LONG, Live, live

IOI = "When Mary and John went to the store, John gave a drink to"


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    """A small run, for the cluster map."""
    model, folder = headtrace.load("builtin"), tmp_path_factory.mktemp("run") / "ioi"
    headtrace.run(model, load_task("ioi", model.tokenizer, n_per_cell=3).spread(6), out=folder)
    return folder


@pytest.fixture(scope="session")
def server(run_folder) -> Iterator[Live]:
    model = headtrace.load("builtin")
    with live([model, model], Settings(max_tokens=64), run=RunSource(run_folder)) as found:
        yield found


HEAR = """() => {
  window.heard_address = false;
  addEventListener("popstate", () => (window.heard_address = true), { once: true });
}"""


class Explorer(Opened):
    """The explorer, opened at a state."""

    def __init__(self, page, server: Live):
        super().__init__(page)
        self.server = server
        page.set_default_timeout(WAIT)

    def leave(self) -> None:
        self.page.unroute_all(behavior="ignoreErrors")
        super().leave()

    def at(self, **state: Any) -> Explorer:
        address = f"http://127.0.0.1:{self.server.port}/#{urlencode(state)}"
        there = self.page.url.split("#")[0] == address.split("#")[0] and self.page.url != address
        if there:  # the page stays, and hears of its new address a moment after the browser has it
            self.page.evaluate(HEAR)
        self.page.goto(address)
        self.page.wait_for_selector("html[data-view]")
        if there:
            self.until(lambda: self.page.evaluate("window.heard_address"))
        return self

    def until(self, so: Callable[[], Any]) -> Any:
        """Wait until something is so that no selector says, and return it."""
        for _ in range(WAIT // 20):
            if found := so():
                return found
            self.page.wait_for_timeout(20)
        raise AssertionError("it did not come to be so")

    def type(self, text: str) -> None:
        """Write a prompt and press Enter."""
        self.page.wait_for_selector("html[data-view]")  # from then on, the field is there or its button
        field = self.page.locator("#text")
        if not field.is_visible():
            self.page.locator("#write").click()
        field.fill(text)
        field.press("Enter")

    def remembers(self, text: str) -> bool:
        """The address comes to say something: it is written a moment after the page shows it."""
        self.until(lambda: text in self.page.evaluate("location.hash"))
        return True

    def walk(self, dest: int, src: int) -> None:
        """With the keyboard to a cell of the last row, in the head that has the focus: a key at a time."""
        expect(self.page.locator(".zoom-host canvas")).to_be_focused()
        readout = self.page.locator("#readout")
        for key, at in (("Home", 0), *(("ArrowRight", i + 1) for i in range(src))):
            self.page.keyboard.press(key)
            expect(readout).to_contain_text(re.compile(rf"at {dest} attends to .* at {at}: "))

    @property
    def strangers(self) -> list[str]:
        """Requests to anything but its own server."""
        own = f"127.0.0.1:{self.server.port}"
        return [
            url
            for url in self.requests
            if urlsplit(url).netloc != own and not url.startswith(("data:", "blob:"))
        ]

    def settled(self) -> Explorer:
        """Wait until everything of the prompt is there: nothing moves, and nothing is of an earlier question."""
        expect(self.page.locator(".question-row")).to_be_visible()
        expect(self.page.locator(".stale")).to_have_count(0)
        return self

    def heads(self, words: str = "all 12 heads") -> Explorer:
        """Wait until the grid shows the heads of the prompt."""
        expect(self.page.locator(".heads .controls output")).to_have_text(words)
        return self.settled()

    def traced(self) -> Explorer:
        """Wait until the circuit grows no more."""
        expect(self.page.locator(".nodes .node").first).to_be_visible()
        expect(self.page.get_by_role("button", name="Trace", exact=True)).to_be_visible()
        return self

    def text(self, selector: str) -> str:
        return self.page.locator(selector).first.inner_text()


browser = pytest.fixture(scope="package")(open_browser)


@pytest.fixture(scope="package")
def windows(browser) -> defaultdict[tuple[Any, ...], list[Any]]:
    """Windows that tests have left, by size and scheme: a new one takes longer than the page in it."""
    return defaultdict(list)


@pytest.fixture
def explorer(browser, windows, server) -> Iterator[Any]:
    used = []

    def open_(width=1280, height=900, scheme="light", script=None, port=None, **state) -> Explorer:
        size, free = {"width": width, "height": height}, windows[width, height, scheme, script]
        if not free:
            context = browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")
            free.append(context.new_page())
            if script is not None:
                free[-1].add_init_script(script)
        opened = Explorer(free.pop(), server if port is None else Live(None, port))
        used.append((opened, size, scheme, free))
        return opened.at(**state)

    yield open_
    for opened, size, scheme, free in used:
        opened.leave()
        opened.page.set_viewport_size(size)
        opened.page.emulate_media(color_scheme=scheme)
        free.append(opened.page)


def endless(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> Event:
    """Make a job of the server go on until it is cancelled; the event is set when it has begun."""
    begun, inner = Event(), getattr(module, name)

    def job(*given: Any, progress: Any, **options: Any) -> Any:
        begun.set()
        pause = Event()
        for _ in range(int(LONG / 0.02)):
            progress(0, 1)
            pause.wait(0.02)
        return inner(*given, progress=progress, **options)

    monkeypatch.setattr(module, name, job)
    return begun
