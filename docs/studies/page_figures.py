"""The pictures of the circuit page: trace, write the page, open it in Chromium, photograph it.

python docs/studies/page_figures.py --out FOLDER [--only mechanism mary complete large compare]

Pictures are written to docs/figures, and circuits and pages are kept in FOLDER; a circuit that is there is not traced
again. Needs playwright and Chromium, as the tests of pages do. Look at each picture before it is kept.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, FloatRect, Page, sync_playwright

import headtrace
from headtrace.circuits import Circuit

FIGURES = Path(__file__).resolve().parents[1] / "figures"
MARY = "When Mary and John went to the store, John gave a drink to"
ANNA = "When Anna and Paul went to the park, Paul handed the ball to"
STORY = (
    "Clara was the daughter of the baker, and every morning she carried the bread to the houses at the harbour. "
    "One day the old sailor Anton came back from a long journey. He had a letter in his pocket, and he asked the baker "
    "where he could find his daughter. The baker said that Clara was at the harbour. So Anton walked down the hill, "
    "and when he saw Clara he was so happy that he forgot his hat. He took the letter out of his pocket, "
    "and he gave the letter to"
)
SCALE = 1.5


class Kept:
    """Circuits of SmolLM2-135M in a folder, each traced once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._model: headtrace.Model | None = None

    @property
    def model(self) -> headtrace.Model:
        if self._model is None:
            self._model = headtrace.load("smollm2-135m")
        return self._model

    def circuit(
        self, name: str, prompt: str, answer: str, wrong: str, *, verify: bool = False, **options: Any
    ) -> Circuit:
        path = self.folder / f"{name}.json"
        if path.exists():
            return headtrace.load_circuit(path)
        settings = {key: options.pop(key) for key in ("max_firings", "min_influence") if key in options}
        found = headtrace.Tracer(self.model, **settings).trace(prompt, answer, wrong, **options)
        if verify:
            found = headtrace.verify(found, self.model).annotated()
        found.save(path)
        print(
            f"{name}: {len(found.prompt.tokens)} tokens, {len(found.nodes)} nodes, {len(found.edges)} edges",
            flush=True,
        )
        return found

    def page(self, name: str, *circuits: Circuit) -> Path:
        """The page of one circuit, or of two side by side."""
        return headtrace.explorer.write_page(
            circuits, self.folder / f"{name}.html", compare=len(circuits) == 2
        )


@contextmanager
def opened(
    browser: Browser,
    path: Path,
    width: int = 1440,
    height: int = 900,
    scheme: str = "light",
    scale: float = SCALE,
) -> Generator[Page]:
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if scheme == "dark" else "light",
        device_scale_factor=scale,
        offline=True,
        reduced_motion="reduce",
    )
    page = context.new_page()
    page.goto(path.resolve().as_uri())
    page.wait_for_selector('html[data-ready="true"]')
    yield page
    context.close()


def photograph(page: Page, name: str, clip: FloatRect | None = None) -> None:
    """What the window shows, or a part of the page."""
    page.wait_for_timeout(500)
    path = FIGURES / f"{name}.png"
    page.screenshot(path=str(path), clip=clip, full_page=clip is not None)
    with Image.open(path) as picture:
        picture.convert("RGB").save(path, optimize=True)
    print(f"{name}: {path.stat().st_size:,} bytes", flush=True)


def mechanism(kept: Kept, browser: Browser) -> None:
    """The drawing of a mechanism, without the page's header and the empty room beside it."""
    file = kept.folder / "mechanism.json"
    if not file.exists():
        headtrace.why(kept.model, MARY).save(file)
    path = kept.folder / "mechanism.html"
    headtrace.load_mechanism(file).to_html(path)
    with opened(browser, path, height=1300, scale=2) as page:
        drawing = page.locator(".mechanism-drawing svg").first
        boxes = [drawing.bounding_box(), *(card.bounding_box() for card in drawing.locator(".card").all())]
        whole, *cards = [box for box in boxes if box is not None]
        left = min(box["x"] for box in cards) - 14
        right = max(box["x"] + box["width"] for box in cards) + 14
        clip = FloatRect(x=left, y=whole["y"], width=right - left, height=whole["height"])
        photograph(page, "mechanism", clip)


def mary(kept: Kept, browser: Browser) -> None:
    found = kept.circuit("mary", MARY, " Mary", " John", verify=True)
    path = kept.page("mary", found)
    with opened(browser, path) as page:
        photograph(page, "page-mary-light")
    with opened(browser, path, scheme="dark") as page:
        page.locator(".node", has_text=re.compile("^L23H3")).first.click()
        page.mouse.move(5, 5)
        photograph(page, "page-mary-dark")
    with opened(browser, path, 420, 860) as page:
        photograph(page, "page-narrow")


def complete(kept: Kept, browser: Browser) -> None:
    found = kept.circuit("complete", MARY, " Mary", " John", paths="complete")
    path = kept.page("complete", found)
    with opened(browser, path) as page:
        photograph(page, "complete-circuit")
        page.locator("#paths [value=content]").check(force=True)
        photograph(page, "complete-content")


def large(kept: Kept, browser: Browser) -> None:
    found = kept.circuit("large", STORY, " Clara", " Anton", max_firings=None)
    with opened(browser, kept.page("large", found), 1600, 1000) as page:
        photograph(page, "page-large")


def compare(kept: Kept, browser: Browser) -> None:
    one = kept.circuit("mary", MARY, " Mary", " John", verify=True)
    two = kept.circuit("anna", ANNA, " Anna", " Paul")
    with opened(browser, kept.page("compare", one, two), 1600, 900) as page:
        photograph(page, "page-compare")


PICTURES = {"mechanism": mechanism, "mary": mary, "complete": complete, "large": large, "compare": compare}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder for circuits and pages")
    parser.add_argument("--only", nargs="*", choices=list(PICTURES), default=list(PICTURES))
    given = parser.parse_args()
    kept = Kept(given.out)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        for name in given.only:
            PICTURES[name](kept, browser)
        browser.close()


if __name__ == "__main__":
    main()
