"""A real Chromium for tests. Without one they are skipped; under CI they fail."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
WAIT = 20_000
"""Milliseconds after which something that should be seen soon is not seen: the machine may be busy."""
# The shell has no windows to manage: it takes a quarter less of the processor.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def browser_path() -> str | None:
    """A Chromium on this machine, if there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def open_browser() -> Iterator[Any]:
    """For fixtures. Not for a whole session: while playwright is open, no other event loop can run in its thread."""
    path = browser_path()
    if path is None:
        message = f"no browser found: looked for {', '.join(NAMES)}"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=WAIT)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


class Opened:
    """A page that is open, and everything that it should not have done."""

    def __init__(self, page):
        self.page = page
        self.requests, self.errors, self.dialogs = [], [], []
        self._heard = {
            "request": lambda request: self.requests.append(request.url),
            "pageerror": lambda error: self.errors.append(str(error)),
            "console": lambda message: message.type == "error" and self.errors.append(message.text),
            "dialog": lambda dialog: (self.dialogs.append(dialog.message), dialog.dismiss()),
        }
        for event, hear in self._heard.items():
            page.on(event, hear)

    def leave(self) -> None:
        """Give the window back, with nothing in it and nothing pointed at."""
        for event, hear in self._heard.items():
            self.page.remove_listener(event, hear)
        self.page.mouse.move(0, 0)
        self.page.goto("about:blank")

    def goto(self, path: Path, address: str = "") -> Opened:
        self.page.goto(path.resolve().as_uri() + address)
        self.page.wait_for_selector('html[data-ready="true"]')
        return self

    def count(self, selector: str) -> int:
        return self.page.locator(selector).count()

    def style(self, selector: str, name: str) -> str:
        return self.page.locator(selector).first.evaluate(f"(e) => getComputedStyle(e).{name}")

    def redrawn(self, action) -> None:
        """Do something that draws anew, and wait until it is drawn."""
        drawn = "Number(document.documentElement.dataset.drawn)"
        before = self.page.evaluate(drawn)
        action()
        for _ in range(3000):  # the page's policy forbids eval, which playwright's own waiting would use
            if self.page.evaluate(drawn) > before:
                return
            self.page.wait_for_timeout(20)
        raise AssertionError("the page was not drawn anew within a minute")

    def axis_token(self, position: int) -> tuple[float, float]:
        """Where on the screen the label of a token hangs, whatever the font makes of its letters."""
        return tuple(
            self.page.locator(f'.axis-token[data-position="{position}"]').evaluate(
                """(e) => {
                  const { x, y } = new DOMPoint(0, 0).matrixTransform(e.getScreenCTM());
                  return [x, y];
                }"""
            )
        )

    def slide(self, selector: str, value: int) -> None:
        code = "(e, v) => { e.value = v; e.dispatchEvent(new Event('input')); }"
        self.redrawn(lambda: self.page.locator(selector).evaluate(code, value))

    def node(self, node_id: int):
        return self.page.locator(f'.node[data-id="{node_id}"]')
