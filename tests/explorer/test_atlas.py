"""The atlas in a real browser: heads are found by what they do, and no token of a corpus does anything."""

from __future__ import annotations

from dataclasses import replace

import pytest

import headtrace
from headtrace.explorer import write_atlas_pages
from headtrace.interpret.atlas import atlas, open_atlas
from headtrace.interpret.head_roles import ROLES
from tests.browsing import Opened

pytestmark = pytest.mark.browser

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    "\u202eback",
    "javascript:alert(3)",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An atlas of the built-in model whose tokens have been given hostile names."""
    place = tmp_path_factory.mktemp("atlas")
    made = atlas(headtrace.load("builtin"), "sampled:400", place, channels="top:3", length=50)
    scan = made.scan
    for token, text in zip(sorted(scan.labels, key=lambda t: -_uses(scan, t)), HOSTILE, strict=False):
        scan.labels[token] = text
    scan.save(place)
    hostile = made.channels.with_columns(tokens=_stands_out())
    write_atlas_pages(replace(open_atlas(place), channels=hostile))
    return place


def _uses(scan, token: int) -> int:
    return sum(ids.count(token) for _, ids in scan.contexts.values())


def _stands_out():
    import json

    import polars as pl

    found = [{"what": text, "side": "src", "count": 9, "share": 0.5, "ratio": 4.0} for text in HOSTILE]
    return pl.lit(json.dumps(found))


@pytest.fixture
def opened(windows, folder):
    def open_(name: str, width: int = 1280, scheme: str = "light") -> Opened:
        return windows(width, 800, scheme).goto(folder / name)

    return open_


def names(page) -> list[str]:
    return page.page.locator("#heads tbody tr").evaluate_all("(rows) => rows.map((r) => r.dataset.head)")


def test_the_finder_sorts_by_any_measure_and_both_ways(opened, folder) -> None:
    page = opened("index.html")
    heads = open_atlas(folder).heads
    for measure in ("induction", "entropy", "sink"):
        title = page.page.locator(f'th[data-measure="{measure}"]')
        title.locator("button").click()
        if title.get_attribute("aria-sort") != "descending":
            title.locator("button").click()
        assert names(page) == heads.sort(measure, descending=True)["head"].to_list()
    page.page.locator('th[data-measure="sink"] button').click()
    assert names(page) == heads.sort("sink")["head"].to_list()
    page.page.locator('th[data-measure="head"] button').click()
    assert names(page) == heads["head"].to_list()
    assert page.errors == []


def test_roles_are_shown_with_their_measures_and_found_by_name(opened, folder) -> None:
    entries = [open_atlas(folder).head(*place) for place in heads_of(folder)]
    with_role, without = ([each for each in entries if bool(each.roles) is has] for has in (True, False))
    head, role = with_role[0], with_role[0].roles[0]
    page = opened("index.html")
    page.page.fill("#words", role.name)
    assert {each.name for each in entries if role.name in [own.name for own in each.roles]} <= set(
        names(page)
    )
    assert role.name in page.page.locator(f'tr[data-head="{head.name}"] td.roles').inner_text()
    said = opened(f"heads/{head.name}.html").page.locator("p.roles").inner_text()
    assert f"{role.name} ({ROLES[role.name].about})" in said
    assert "by chance" in said
    assert "None of the roles" in opened(f"heads/{without[0].name}.html").page.locator("p.roles").inner_text()


def heads_of(folder) -> list[tuple[int, int]]:
    return [(row["layer"], row["number"]) for row in open_atlas(folder).heads.iter_rows(named=True)]


def test_the_finder_keeps_what_is_asked_for(opened, folder) -> None:
    page, heads = opened("index.html"), open_atlas(folder).heads
    page.page.fill("#words", "L1H2")
    assert names(page) == ["L1H2"]
    page.page.fill("#words", "onerror")
    assert len(names(page)) == 12, "words of the channels are found, too"
    page.page.fill("#words", "")
    page.page.select_option("#measure", "previous")
    least = float(heads["previous"].sort(descending=True)[3])
    page.page.fill("#least", str(least))
    assert len(names(page)) == 4
    assert page.page.locator("#shown").text_content() == "4 of 12 heads"


def test_a_head_shows_its_channels_side_by_side_with_their_pairs(opened, folder) -> None:
    page = opened("index.html")
    page.page.fill("#words", "L1H2")
    page.page.locator("#heads a").first.click()
    page.page.wait_for_selector('html[data-ready="true"] .channel')
    assert page.page.locator("h1").text_content() == "L1H2"
    boxes = [each.bounding_box() for each in page.page.locator(".channel").all()]
    assert len(boxes) == 3
    assert len({box["y"] for box in boxes}) == 1, "side by side"
    examples = open_atlas(folder).examples(
        "L1H2:" + page.page.locator(".channel").first.get_attribute("data-channel")
    )
    first = page.page.locator(".channel").first
    assert first.locator(".pairs li").count() == min(12, len(examples.top))
    assert first.locator(".pairs li").first.locator("mark.dest").count() == 1
    assert first.locator(".pairs li").first.locator("mark.src").count() == 1
    assert first.locator(".pairs .weight").first.text_content()
    page.page.get_by_role("link", name="all heads").click()
    page.page.wait_for_selector("#heads")
    assert page.errors == []


def test_titles_and_names_stay_in_view_while_the_table_is_scrolled(opened) -> None:
    page = opened("index.html", width=420)
    page.page.set_viewport_size({"width": 420, "height": 420})
    table = page.page.locator(".table")
    table.evaluate("(e) => e.scrollTo(200, 150)")
    assert table.evaluate("(e) => [e.scrollLeft, e.scrollTop]") == [200, 150]
    box = table.bounding_box()
    title, name = (page.page.locator(each).first.bounding_box() for each in ("thead th", "tbody th"))
    assert abs(title["y"] - box["y"]) <= 2
    assert abs(title["x"] - box["x"]) <= 2
    assert abs(name["x"] - box["x"]) <= 2


@pytest.mark.parametrize("name", ["index.html", "heads/L1H2.html"])
def test_tokens_of_a_corpus_are_shown_and_do_nothing(opened, name) -> None:
    page = opened(name)
    text = page.page.locator("body").inner_text()
    assert "<script>alert(1)" in text
    assert "\u202e" not in text
    assert page.page.locator("img").count() == 0
    assert page.page.locator('a[href^="javascript"]').count() == 0
    assert page.dialogs == page.errors == []
    assert all(url.startswith("file:") for url in page.requests)


@pytest.mark.parametrize("name", ["index.html", "heads/L1H2.html"])
def test_narrow_windows_and_dark_ones_are_served(opened, name) -> None:
    narrow = opened(name, width=390)
    assert narrow.page.evaluate("document.documentElement.scrollWidth") <= 390
    light, dark = (
        opened(name, scheme=scheme).style("body", "backgroundColor") for scheme in ("light", "dark")
    )
    assert light != dark
    page = opened(name)
    page.page.locator("#theme").click()
    assert page.style("body", "backgroundColor") == dark
