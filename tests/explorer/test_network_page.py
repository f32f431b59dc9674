"""The page of a network in a real browser: it draws, asks for nothing and runs nothing."""

from __future__ import annotations

import pytest

from headtrace.runs.merging import merge
from tests.runs.made import ROOT, circuit, head, ioi

pytestmark = pytest.mark.browser


def test_a_network_page_shows_drawing_and_table_and_asks_for_nothing(browser, tmp_path) -> None:
    found, examples = ioi()
    network = merge(found, roles=examples)
    page = browser.new_page()
    asked, errors = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: errors.append(message.text))
    page.goto(network.to_html(tmp_path / "n.html").as_uri())
    assert page.evaluate("document.querySelector('img').naturalWidth") > 100
    assert page.locator("tbody tr").count() == len(network.edges)
    assert page.evaluate("getComputedStyle(document.querySelector('table')).borderCollapse") == "collapse"
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert errors == []
    page.close()


def test_names_of_roles_and_models_stay_text_in_a_browser(browser, tmp_path) -> None:
    evil = "<img src=x onerror=alert(1)>"
    network = merge([circuit((head(2, 0, 7, 1), ROOT, "root", 1.0), name=evil)], roles=[{evil: 1, "end": 7}])
    page = browser.new_page()
    dialogs = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    page.goto(network.to_html(tmp_path / "n.html").as_uri())
    assert page.locator("img").count() == 1
    assert evil in page.inner_text("h1")
    assert evil in page.inner_text("table")
    assert dialogs == []
    page.close()
