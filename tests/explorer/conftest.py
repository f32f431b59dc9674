"""The circuit page, written to disk and opened in a real browser."""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.browsing import Opened, open_browser

browser = pytest.fixture(scope="package")(open_browser)


@pytest.fixture(scope="package")
def windows(browser):
    """Windows that tests have left, by size and scheme: a new one takes longer than the page in it."""
    return defaultdict(list)


@pytest.fixture
def open_page(browser, windows, tmp_path):
    """Write circuits to a page and open it from disk, with the network off."""
    from headtrace.explorer import write_page

    used = []

    def open_(circuits, width=1280, height=800, scheme="light", address="", **options) -> Opened:
        path = write_page(circuits, tmp_path / "page.html", **options)
        size = {"width": width, "height": height}
        free = windows[width, height, scheme]
        opened = Opened(free.pop() if free else new_window(browser, size, scheme))
        used.append((opened, size, free))
        return opened.goto(path, address)

    yield open_
    for opened, size, free in used:
        opened.leave()
        opened.page.set_viewport_size(size)
        free.append(opened.page)


def new_window(browser, size, scheme):
    context = browser.new_context(viewport=size, color_scheme=scheme, offline=True, reduced_motion="reduce")
    return context.new_page()
