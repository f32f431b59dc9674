"""The circuit page, written to disk and opened in a real browser."""

from __future__ import annotations

from collections import defaultdict

import pytest

from tests.browsing import Opened, open_browser

browser = pytest.fixture(scope="package")(open_browser)


@pytest.fixture(scope="package")
def free_windows(browser):
    """Windows that tests have left, by size and scheme: a new one takes longer than the page in it."""
    return defaultdict(list)


@pytest.fixture
def windows(browser, free_windows):
    """A window of a size and a scheme, with the network off; it goes back after the test."""
    used = []

    def window(width, height, scheme) -> Opened:
        size, free = {"width": width, "height": height}, free_windows[width, height, scheme]
        if not free:
            how = {"viewport": size, "color_scheme": scheme, "offline": True, "reduced_motion": "reduce"}
            free.append(browser.new_context(**how).new_page())
        opened = Opened(free.pop())
        used.append((opened, size, free))
        return opened

    yield window
    for opened, size, free in used:
        opened.leave()
        opened.page.set_viewport_size(size)
        free.append(opened.page)


@pytest.fixture
def open_page(windows, tmp_path):
    """Write circuits to a page and open it from disk."""
    from headtrace.explorer import write_page

    def open_(circuits, width=1280, height=800, scheme="light", address="", **options) -> Opened:
        path = write_page(circuits, tmp_path / "page.html", **options)
        return windows(width, height, scheme).goto(path, address)

    return open_
