"""The pictures of the explorer: start `headtrace serve`, open its page in Chromium, photograph it.

python docs/studies/explorer_figures.py --out FOLDER [--only start why narrow beside run]

Pictures are written to docs/figures. FOLDER keeps the run that is shown; one that is there is not made again. Needs
playwright and Chromium, as the tests of pages do. Look at each picture before it is kept.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

import headtrace
from headtrace.tasks import load_task

FIGURES = Path(__file__).resolve().parents[1] / "figures"
MARY = "When Mary and John went to the store, John gave a drink to"
SWAPPED = "When John and Mary went to the store, Mary gave a drink to"
REMOVED = {
    "kind": "component",
    "site": {"kind": "head", "layer": 23, "head": 3, "dest": 13, "src": 9},
    "factor": 0,
}
EXPLAINED = '.explain[data-stage="badges"]'
PATIENCE = 900_000
"""Milliseconds: an explanation takes some sixty forward passes."""


@contextmanager
def served(*arguments: str) -> Generator[str]:
    """The address of a server that runs meanwhile."""
    command = [sys.executable, "-m", "headtrace", "serve", *arguments, "--port", "0", "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


@contextmanager
def opened(
    browser: Browser, address: str, there: str, size: tuple[int, int], scheme: str = "light", **state: Any
) -> Generator[Page]:
    """A page at a state, once what is to be seen is there."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme="dark" if scheme == "dark" else "light",
        reduced_motion="reduce",
    )
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    page.goto(f"{address}#{urlencode(state)}")
    page.wait_for_selector(there)
    yield page
    context.close()


def photograph(page: Page, name: str) -> None:
    """What the window shows, in as few colours as it needs."""
    page.wait_for_timeout(1000)
    path = FIGURES / f"explorer-{name}.png"
    page.screenshot(path=str(path))
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{name}: {path.stat().st_size:,} bytes", flush=True)


def start(browser: Browser, address: str) -> None:
    with opened(browser, address, EXPLAINED, (1440, 1000), text=MARY) as page:
        photograph(page, "start")


def why(browser: Browser, address: str) -> None:
    changes = json.dumps([REMOVED])
    with opened(
        browser, address, EXPLAINED, (1440, 1000), text=MARY, head="L23H3", cell="13-9", changes=changes
    ) as page:
        page.wait_for_selector(".explain .why-sentence")
        page.wait_for_selector(".explain .says-now")
        photograph(page, "why")


def narrow(browser: Browser, address: str) -> None:
    with opened(browser, address, EXPLAINED, (420, 1500), text=MARY) as page:
        photograph(page, "narrow")


def beside(browser: Browser, address: str) -> None:
    asked = {"text": MARY, "answer": " Mary", "wrong": " John"}
    other = {"second": SWAPPED, "answer2": " John", "wrong2": " Mary"}
    with opened(
        browser, address, ".nodes .node", (1440, 1100), view="beside", traced="yes", **asked, **other
    ) as page:
        page.get_by_role("button", name="Cancel").wait_for(state="hidden")
        photograph(page, "beside")


def run(browser: Browser, address: str) -> None:
    with opened(browser, address, ".family-card .sentence", (1440, 1100), "dark", view="run") as page:
        photograph(page, "run")


def three_tasks(folder: Path) -> Path:
    """A run of 24 prompts of three tasks on the built-in model."""
    out = folder / "run"
    if not out.exists():
        model = headtrace.load("builtin")
        tasks = [load_task(name, model.tokenizer, n_per_cell=4) for name in ("ioi", "pronoun", "facts")]
        headtrace.run(model, [example for task in tasks for example in task.spread(8)], out=out)
    return out


REAL = {"start": start, "why": why, "narrow": narrow}
BUILTIN = {"beside": beside, "run": run}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder for the run that is shown")
    parser.add_argument("--only", nargs="*", choices=[*REAL, *BUILTIN], default=[*REAL, *BUILTIN])
    given = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for pictures, arguments in (
            (REAL, ["smollm2-135m"]),
            (BUILTIN, ["builtin", "--run", str(three_tasks(given.out))]),
        ):
            chosen = [take for name, take in pictures.items() if name in given.only]
            if chosen:
                with served(*arguments) as address:
                    for take in chosen:
                        take(browser, address)
        browser.close()


if __name__ == "__main__":
    main()
