"""The explorer in a real browser, against its real server with the built-in model."""

from __future__ import annotations

from collections.abc import Iterator
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
from tests.browsing import Opened, browser
from tests.explorer_server.live import LONG, Live, live

__all__ = ["browser"]

IOI = "When Mary and John went to the store, John gave a drink to"
WAIT = 20_000
"""Milliseconds after which something that should be seen soon is not seen: the machine may be busy."""


expect.set_options(timeout=WAIT)


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


class Explorer(Opened):
    """The explorer, opened at a state."""

    def __init__(self, page, server: Live):
        super().__init__(page)
        self.server = server
        page.set_default_timeout(WAIT)

    def at(self, **state: Any) -> Explorer:
        self.page.goto(f"http://127.0.0.1:{self.server.port}/#{urlencode(state)}")
        self.page.wait_for_selector("html[data-view]")
        return self

    def type(self, text: str) -> None:
        """Write a prompt and press Enter."""
        write, field = self.page.locator("#write"), self.page.locator("#text")
        if not field.is_visible():
            write.click()
        field.fill(text)
        self.page.keyboard.press("Enter")

    def remembers(self, text: str) -> bool:
        """Whether the address comes to say something: it is written a moment after the page shows it."""
        for _ in range(150):
            if text in self.page.evaluate("location.hash"):
                return True
            self.page.wait_for_timeout(20)
        return False

    @property
    def strangers(self) -> list[str]:
        """Requests to anything but its own server."""
        own = f"127.0.0.1:{self.server.port}"
        return [
            url
            for url in self.requests
            if urlsplit(url).netloc != own and not url.startswith(("data:", "blob:"))
        ]

    def text(self, selector: str) -> str:
        return self.page.locator(selector).first.inner_text()


@pytest.fixture
def explorer(browser, server) -> Iterator[Any]:
    contexts = []

    def open_(width=1280, height=900, scheme="light", script=None, **state) -> Explorer:
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
        )
        contexts.append(context)
        page = context.new_page()
        if script is not None:
            page.add_init_script(script)
        return Explorer(page, server).at(**state)

    yield open_
    for context in contexts:
        context.close()


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
