"""The site builds from the pages, leads nowhere that is not there, and works from a folder without a network."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

from tests.browsing import open_browser
from tests.documented import PAGES, ROOT

LEAST = 5
"""Words that say what an image shows."""


def build(folder: Path, *, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    """Build the site into a folder, as ``make docs`` does."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Page(HTMLParser):
    """What a page loads, links to, and can be linked to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.images: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag in ("script", "img", "iframe", "source", "video", "audio", "embed") and "src" in given:
            self.loads.append(given["src"])
        if tag == "link" and "href" in given:
            self.loads.append(given["href"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "img":
            self.images.append(given.get("alt", ""))


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}


def _broken(pages: dict[Path, Page]) -> Iterator[str]:
    for path, page in pages.items():
        if path.name == "404.html":  # its addresses are those of a server
            continue
        for link in (*page.links, *page.loads):
            if urlsplit(link).scheme:
                continue
            address, anchor = urldefrag(link)
            target = (path.parent / unquote(address)).resolve() if address else path
            if not target.is_file():
                yield f"{path.name}: {link} leads nowhere"
            elif anchor and target in pages and unquote(anchor) not in pages[target].anchors:
                yield f"{path.name}: {link} names no place on that page"


def test_every_link_and_anchor_of_the_site_resolves(pages: dict[Path, Page]) -> None:
    assert len(pages) > 40
    assert list(_broken(pages)) == []


def test_nothing_is_loaded_from_the_network(site: Path, pages: dict[Path, Page]) -> None:
    loaded = {load for page in pages.values() for load in page.loads}
    assert [load for load in loaded if urlsplit(load).scheme not in ("", "data")] == []
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert re.findall(r"url\(['\"]?(?:https?:)?//[^)]*\)|@import", styles) == []


def test_search_has_an_index_that_opens_from_disk(site: Path) -> None:
    whole = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    index = json.loads(whole.removeprefix("var __index = "))
    titles = {each["location"].partition("#")[0] for each in index["docs"]}
    assert {"reference/commands.html", "reference/api/tracing.html", "reference/glossary.html"} <= titles


def test_every_how_to_is_found_from_their_index() -> None:
    folder = ROOT / "docs" / "how-to"
    linked = set(
        re.findall(r"\((?:\.\./how-to/)?([a-z-]+\.md)", (folder / "index.md").read_text(encoding="utf-8"))
    )
    assert {page.name for page in folder.glob("*.md")} - linked == {"index.md"}


def test_the_reference_has_every_command_and_every_public_name(site: Path) -> None:
    import typer

    import headtrace
    from headtrace.cli import app

    commands = (site / "reference" / "commands.html").read_text(encoding="utf-8")
    known = list(typer.main.get_command(app).commands)
    assert len(known) > 20
    assert [name for name in known if f'id="headtrace-{name}' not in commands] == []
    for room in headtrace._ROOMS:
        page = (site / "reference" / "api" / f"{room}.html").read_text(encoding="utf-8")
        names = getattr(getattr(headtrace, room), "__all__", ())
        assert [name for name in names if f'id="headtrace.{room}.{name}"' not in page] == [], room


def test_a_notebook_is_a_page_with_its_outputs(site: Path) -> None:
    page = (site / "notebooks" / "toy.html").read_text(encoding="utf-8")
    cells = json.loads((ROOT / "docs" / "notebooks" / "toy.ipynb").read_text(encoding="utf-8"))["cells"]
    assert cells[0]["source"][0].removeprefix("# ").strip() in page
    assert 'src="toy-1.png"' in page
    assert (site / "notebooks" / "toy-1.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_image_says_what_it_shows(page: Path) -> None:
    images = re.findall(r"!\[([^\]]*)\]\(", page.read_text(encoding="utf-8"))
    assert [text for text in images if len(text.split()) < LEAST] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_link_of_a_page_leads_to_a_file_of_the_repository(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [urldefrag(link)[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    local = [target for target in targets if target and not urlsplit(target).scheme]
    assert [target for target in local if not (page.parent / target).exists()] == []


BROKEN = r"""# Start

[page](none.md) [place](#none) [file](../none.py) [`name`][headtrace.none] $\frac{1$ $\nonsense$
"""


def test_what_is_broken_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(BROKEN)
    (tmp_path / "docs" / "not-listed.md").write_text("# A page that nobody finds\n")
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[0]
    settings = re.sub(r"docs/site\b|(?<=\[)src\b", lambda place: str(ROOT / place[0]), settings)
    settings = re.sub(
        r"^watch:.*$|^ *- \S*/(commands|notebooks)\.py$", "", settings, flags=re.MULTILINE
    )  # no pages but ours
    (tmp_path / "mkdocs.yml").write_text(settings + "\nnav:\n  - Start: index.md\n")
    done = build(tmp_path / "site", config=tmp_path / "mkdocs.yml")
    assert done.returncode != 0
    for told in ("none.md", "#none", "../none.py", "headtrace.none", "frac", "nonsense", "not-listed.md"):
        assert told in done.stderr, told


# -- in a browser ------------------------------------------------------------------------------------------------


browser = pytest.fixture(scope="module")(open_browser)


@pytest.fixture
def offline(browser):
    """A page of a browser that reaches nothing but files, and what it asked for besides."""
    context = browser.new_context(viewport={"width": 1300, "height": 900})
    asked: list[str] = []
    context.route(re.compile("^https?:"), lambda route: (asked.append(route.request.url), route.abort()))
    page = context.new_page()
    page.on("pageerror", lambda error: asked.append(str(error)))
    yield page, asked
    context.close()


@pytest.mark.browser
def test_search_finds_pages_from_disk_without_a_network(site: Path, offline) -> None:
    page, asked = offline
    page.goto((site / "index.html").as_uri())
    found = {"representative": "glossary", "which heads do induction": "atlas", "steering": "causal"}
    for words, where in found.items():
        page.locator(".md-search__input").fill("")
        page.locator(".md-search__input").press_sequentially(words)
        page.locator(f".md-search-result__item a[href*='{where}.html']").first.wait_for(timeout=60_000)
    assert asked == []


@pytest.mark.browser
@pytest.mark.parametrize("width", [1300, 390])
def test_pages_fit_their_window_in_light_and_dark(site: Path, offline, width: int) -> None:
    page, asked = offline
    page.set_viewport_size({"width": width, "height": 900})
    for name in ("index", "reference/api/tracing", "reference/commands", "reference/circuit-file"):
        page.goto((site / f"{name}.html").as_uri())
        for scheme in ("light", "dark"):
            in_scheme(page, scheme)
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"{name} is {wide} pixels wide"
    assert asked == []


def in_scheme(page: Any, scheme: str) -> None:
    """Wait until an open page has the colours of a scheme: its own script sees to that."""
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    there = {"light": "default", "dark": "slate"}[scheme]
    page.wait_for_selector(f'body[data-md-color-scheme="{there}"]')


@pytest.mark.browser
def test_findings_are_cards_that_fit_a_phone(site: Path, offline) -> None:
    page, asked = offline
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto((site / "findings" / "index.html").as_uri())
    cards = page.locator(".grid.cards > ul > li")
    assert cards.count() > 15
    ends = cards.evaluate_all(
        "cards => cards.map(card => card.getBoundingClientRect().right + card.scrollWidth - card.clientWidth)"
    )
    assert max(ends) <= 390
    assert page.locator("article table").count() == 0
    assert asked == []


AXE = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")


@pytest.mark.browser
def test_axe_finds_nothing_in_light_and_dark(site: Path, offline) -> None:
    page, asked = offline
    for name in ("index", "gallery", "findings/index", "tutorial/one-head", "reference/api/vocabulary"):
        page.goto((site / f"{name}.html").as_uri())
        page.evaluate(AXE)
        for scheme, rules in (("dark", '{ runOnly: ["color-contrast"] }'), ("light", "{}")):
            in_scheme(page, scheme)  # nothing but colours depends on it
            found = page.evaluate(f"axe.run({rules}).then(({{ violations }}) => violations)")
            told = [f"{each['id']}: {[node['target'] for node in each['nodes']]}" for each in found]
            assert told == [], (name, scheme)
    assert asked == []
