"""How long the circuit page keeps the browser's main thread busy: a circuit of 2,000 edges in real Chromium.

    python benchmarks/page.py [circuit.json]

Opens the page, draws it with the strongest edges and then with all of them, moves the pointer over it and
pins nodes; the browser itself reports every task over 50 ms. Prints JSON. The times are those of the machine
at that moment: on a busy one every task is longer.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "circuits"))

from made_up import random_circuit

from headtrace.circuits import load_circuit
from headtrace.explorer import write_page

LIMIT_MS = 200
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OBSERVE = """
window.longTasks = [];
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) window.longTasks.push(entry.duration);
}).observe({ type: "longtask", buffered: true });
"""
DRAWN = "Number(document.documentElement.dataset.drawn)"
SLIDE = "(e, v) => { e.value = v; e.dispatchEvent(new Event('input')); }"
ANSWER = """async ([x, y]) => {
  const start = performance.now();
  const chart = document.querySelector(".chart");
  chart.dispatchEvent(new PointerEvent("pointermove", { clientX: x, clientY: y, bubbles: true }));
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  return performance.now() - start;
}"""


def tasks(page: Page) -> list[float]:
    """The long tasks since the last look."""
    page.wait_for_timeout(300)
    return [round(ms, 1) for ms in page.evaluate("window.longTasks.splice(0)")]


def drawn(page: Page, detail: int) -> None:
    before = page.evaluate(DRAWN)
    page.locator("#detail").evaluate(SLIDE, detail)
    while page.evaluate(DRAWN) == before:
        page.wait_for_timeout(20)


def hover(page: Page, steps: int = 60) -> float:
    """Move over the drawing; the median time from the event to the second frame after it."""
    box = page.locator(".host").bounding_box()
    assert box is not None
    times: list[float] = []
    for i in range(steps):
        x = box["x"] + box["width"] * (0.1 + 0.85 * ((i * 7) % steps) / steps)
        y = box["y"] + box["height"] * (0.1 + 0.7 * ((i * 11) % steps) / steps)
        page.mouse.move(x, y)
        times.append(page.evaluate(ANSWER, [x, y]))
    return sorted(times)[len(times) // 2]


def measure(page: Page, path: Path) -> dict[str, object]:
    page.add_init_script(OBSERVE)
    page.goto(path.as_uri())
    page.wait_for_selector('html[data-ready="true"]')
    result: dict[str, object] = {"open": tasks(page)}
    median = hover(page)
    result["hover, strongest edges"] = tasks(page)
    drawn(page, 1000)
    result["draw all edges"] = tasks(page)
    result["edges drawn"] = page.locator(".edges .edge").count()
    median_all = hover(page)
    result["hover, all edges"] = tasks(page)
    for group in page.locator(".node.head").all()[:5]:
        group.dispatch_event("pointerdown", {"button": 0})
        group.dispatch_event("pointerup", {"button": 0})
    result["pin, all edges"] = tasks(page)
    page.locator("#theme").click()
    result["theme, all edges"] = tasks(page)
    result["median ms from hover to the second frame"] = [round(median, 1), round(median_all, 1)]
    return result


def main() -> None:
    browser_path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser_path is None:
        print(json.dumps({"benchmark": "page", "skipped": f"no browser: looked for {', '.join(BROWSERS)}"}))
        return
    circuit = load_circuit(sys.argv[1]) if len(sys.argv) > 1 else random_circuit(2000)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = write_page(circuit, Path(folder).resolve() / "page.html")
        browser = playwright.chromium.launch(executable_path=browser_path, args=ARGUMENTS)
        found = measure(browser.new_page(viewport={"width": 1440, "height": 900}), path)
        browser.close()
        size = path.stat().st_size
    longest = max((ms for value in found.values() if isinstance(value, list) for ms in value), default=0.0)
    report = {
        "benchmark": "page",
        "edges": len(circuit.edges),
        "nodes": len(circuit.nodes),
        "page kB": round(size / 1000),
        "long tasks in ms": found,
        "longest task in ms": longest,
        "limit in ms": LIMIT_MS,
        "within the limit": longest <= LIMIT_MS,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
