"""The circuit page, written to disk and opened in a real browser."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.browsing import ARGUMENTS, Opened, browser, browser_path

__all__ = ["ARGUMENTS", "Opened", "browser", "browser_path"]

sys.path.insert(0, str(Path(__file__).parents[1] / "circuits"))  # the made-up circuits


@pytest.fixture
def open_page(browser, tmp_path):
    """Write circuits to a page and open it from disk, with the network off."""
    from headtrace.explorer import write_page

    contexts = []

    def open_(circuits, width=1280, height=800, scheme="light", **options) -> Opened:
        path = write_page(circuits, tmp_path / "page.html", **options)
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme=scheme,
            offline=True,
            reduced_motion="reduce",
        )
        contexts.append(context)
        return Opened(context.new_page()).goto(path)

    yield open_
    for context in contexts:
        context.close()
