"""The page as a file: small, closed to the outside, deaf to hostile text, and good for export."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import expect
from typer.testing import CliRunner

from headtrace.circuits import LogitDifference, load_circuit
from headtrace.cli import app
from headtrace.errors import InputError
from headtrace.explorer import page as page_text
from headtrace.explorer import write_page
from headtrace.explorer.page import json_for_script, page_data
from tests.circuits.made_up import TOKENS, random_circuit, small_circuit

HOSTILE = (
    "<script>window.hacked=1</script>",
    "\"><img src=x onerror='window.hacked=1'>",
    "</script><script>alert(1)</script>",
    "\u202eشلوم\u2066",
    "👩‍🔬",
    "<0x0A>",
    "{{script}} ${1} `",
    "\n\t\x00",
)


def test_the_page_without_its_data_is_under_300_kb():
    circuit = random_circuit(500)
    data = json_for_script({"circuits": [page_data(circuit)], "compare": False})
    assert len(page_text(circuit).encode()) - len(data) < 300_000


def test_the_same_circuit_gives_the_same_page(tmp_path):
    circuit = random_circuit(100)
    path = circuit.save(tmp_path / "c.json")
    assert page_text(circuit) == page_text(load_circuit(path))


def test_no_address_of_anything_outside_is_in_the_page():
    text = page_text(small_circuit())
    assert text.count("http") == text.count("http://www.w3.org/2000/svg") + text.count("http-equiv")
    assert " src=" not in text.replace("img-src", "")


def test_a_page_of_nothing_is_refused():
    with pytest.raises(InputError, match="at least one circuit"):
        page_text([])


@pytest.mark.browser
def test_a_hostile_prompt_runs_no_script_and_makes_no_request(open_page):
    circuit = small_circuit(HOSTILE)
    edges = tuple(
        type(e)(**{**e.__dict__, "description": HOSTILE[1], "effect": {HOSTILE[0]: 1.0}})
        for e in circuit.edges
    )
    opened = open_page(circuit.with_edges(edges))
    opened.node(1).click()
    opened.node(4).hover()
    expect(opened.page.locator("#card")).to_be_visible()
    for selector in ("#card", "#panel", ".axes", "#question"):
        assert opened.page.locator(f"{selector} :is(script, img)").count() == 0
    assert opened.page.evaluate("window.hacked") is None
    assert opened.dialogs == []
    assert [url for url in opened.requests if not url.startswith("file:")] == []
    assert len(opened.requests) == 1
    assert opened.errors == []
    shown = opened.page.locator("#panel").inner_text()
    assert "<img src=x onerror" in shown
    axis = opened.page.locator(".axis-token").evaluate_all("(all) => all.map((e) => e.textContent)")
    assert any("<script>win" in label for label in axis)
    assert any("\\u202e" in label for label in axis)
    assert any(label.startswith("👩‍🔬") for label in axis)
    assert any(label.startswith("<0x0A>") for label in axis)
    assert not any("\u202e" in label for label in axis)


ANSWERS = ("\u202e\u05e9\u05dc\u05d5\u05dd\u2066", "\x00\x1b[31m", "Donaudampfschiff" * 40, "\n", "漢" * 60)


@pytest.mark.parametrize("answer", ANSWERS, ids=["bidi", "control", "long", "line", "wide"])
def test_a_hostile_answer_can_be_written_and_stays_inert_in_the_title(answer, tmp_path):
    circuit = small_circuit()
    root = LogitDifference((101,), (103,), value=3.5, answer_tokens=(answer,), wrong_tokens=(" John",))
    text = write_page(replace(circuit, root=root), tmp_path / "c.html").read_text()
    title = text.split("<title>")[1].split("</title>")[0]
    assert title.isprintable()
    assert len(title) < 250


@pytest.mark.browser
@pytest.mark.parametrize("answer", ANSWERS, ids=["bidi", "control", "long", "line", "wide"])
def test_a_hostile_answer_stays_readable_and_within_its_box(open_page, answer):
    root = LogitDifference((101,), (103,), value=3.5, answer_tokens=(answer,), wrong_tokens=(" John",))
    circuit = replace(small_circuit((*HOSTILE[:7], "a" + "\u0301" * 40)), root=root)
    opened = open_page(circuit, width=1280, height=900)
    heading = opened.page.locator("#question").inner_text()
    assert "\u202e" not in heading
    assert set(heading.split(" rather")[0]) - set("Why “”"), "something stands for the answer"
    assert len(heading) <= 180
    texts = opened.page.evaluate("document.body.innerText")
    assert not [c for c in texts if c in "\u202e\u2066\x00"]
    assert "\u0301" * 4 not in texts
    inside, box = (
        opened.node(0).locator(part).evaluate("(e) => e.getBBox().width") for part in (".name", ".body")
    )
    assert inside <= box
    assert opened.errors == []


@pytest.mark.browser
def test_very_long_tokens_are_cut_and_say_how_long_they_are(open_page):
    opened = open_page(small_circuit((*TOKENS[:6], " " * 50, "x" * 5000)))
    labels = opened.page.locator(".axis-token").evaluate_all("(all) => all.map((e) => e.firstChild.data)")
    assert "␣\u00d750" in labels
    assert max(len(label) for label in labels) <= 11
    opened.node(4).hover()
    card = opened.page.locator("#card")
    expect(card).to_contain_text("(5,000 characters)")
    assert card.evaluate("(e) => e.offsetHeight") < 400


@pytest.mark.browser
def test_the_policy_blocks_scripts_styles_and_requests_that_are_not_the_pages_own(open_page):
    opened = open_page(small_circuit())
    blocked = opened.page.evaluate(
        """async () => {
          const seen = [];
          const four = new Promise((done) => document.addEventListener("securitypolicyviolation", (event) => {
            if (seen.push(event.effectiveDirective) === 4) done();
          }));
          const script = document.createElement("script");
          script.textContent = "window.hacked = 1";
          const style = document.createElement("style");
          style.textContent = "body { display: none }";
          const image = new Image();
          image.src = "https://example.org/x.png";
          document.body.append(script, style, image);
          await fetch("https://example.org/").catch(() => {});
          await Promise.race([four, new Promise((done) => setTimeout(done, 20_000))]);
          return [seen.sort(), window.hacked ?? null];
        }"""
    )
    assert blocked[0] == ["connect-src", "img-src", "script-src-elem", "style-src-elem"]
    assert blocked[1] is None


@pytest.mark.browser
def test_the_view_is_saved_as_a_drawing_that_stands_alone(open_page, browser, tmp_path):
    opened = open_page(small_circuit(HOSTILE))
    opened.node(1).hover()  # what was dimmed a moment ago is not dimmed in the file
    with opened.page.expect_download() as waiting:
        opened.page.locator("#save-svg").click()
    waiting.value.save_as(tmp_path / "view.svg")
    root = ElementTree.parse(tmp_path / "view.svg").getroot()
    paths = [
        e
        for e in root.iter("{http://www.w3.org/2000/svg}path")
        if e.get("fill") == "none" and e.get("stroke-width")
    ]
    assert len(paths) == len(small_circuit().edges)
    assert {p.get("stroke") for p in paths} == {
        opened.style(f".edges .{side}", "stroke") for side in ("query", "key", "root")
    }
    scale = opened.page.evaluate("window.headtrace.charts[0].viewport.view.scale")
    widths = sorted(float(p.get("stroke-width")) * scale for p in paths)
    drawn = opened.page.locator(".edges .edge").evaluate_all(
        "(all) => all.map((e) => +getComputedStyle(e).strokeWidth.slice(0, -2))"
    )
    assert widths == pytest.approx(sorted(drawn))
    assert {group.get("opacity") for group in root.findall("{http://www.w3.org/2000/svg}g")} == {None}
    assert not root.findall(".//*[@class]")
    texts = "".join(root.itertext())
    assert "L9H6" in texts
    assert "<script>win" in texts
    assert waiting.value.suggested_filename.endswith(".svg")


@pytest.mark.browser
def test_the_view_is_saved_as_a_picture(open_page, tmp_path):
    from matplotlib import image

    opened = open_page(small_circuit(), scheme="dark")
    with opened.page.expect_download() as waiting:
        opened.page.locator("#save-png").click()
    waiting.value.save_as(tmp_path / "view.png")
    picture = image.imread(tmp_path / "view.png")
    host = opened.page.locator(".host").evaluate("(e) => [e.clientHeight, e.clientWidth]")
    assert list(picture.shape[:2]) == [2 * length for length in host]
    colours = {tuple(colour) for colour in (picture[:, :, :3] * 255).round().astype(int).reshape(-1, 3)}
    for selector, name in (("body", "backgroundColor"), (".node.root .body", "fill")):
        channels = opened.style(selector, name).removeprefix("rgb(").removesuffix(")")
        assert tuple(int(channel) for channel in channels.split(",")) in colours, (selector, colours)


@pytest.mark.browser
def test_in_a_notebook_the_page_shows_inline(browser, tmp_path):
    (tmp_path / "notebook.html").write_text(
        f"<!doctype html><body>{small_circuit(HOSTILE)._repr_html_()}", errors="replace"
    )
    page = browser.new_page()
    page.goto((tmp_path / "notebook.html").as_uri())
    frame = page.frame_locator("iframe")
    frame.locator('html[data-ready="true"]').wait_for()
    assert frame.locator(".edges .edge").count() == 11
    assert page.evaluate("window.hacked") is None
    assert page.locator("table tr").count() == 12
    page.close()


def test_view_writes_the_page_and_opens_it(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    path = small_circuit(TOKENS).save(tmp_path / "c.json")
    result = CliRunner().invoke(app, ["view", str(path)])
    assert result.exit_code == 0
    assert opened == [(tmp_path / "c.html").as_uri()]
    result = CliRunner().invoke(
        app, ["view", str(path), str(path), "--out", str(tmp_path / "both.html"), "--no-open"]
    )
    assert result.exit_code == 0
    assert "both.html" in result.output.replace("\n", "")
    assert len(opened) == 1
    assert '"compare":true' in (tmp_path / "both.html").read_text()


def test_to_html_writes_the_same_page(tmp_path):
    circuit = small_circuit()
    path = circuit.to_html(tmp_path / "a.html")
    assert path.read_bytes() == write_page(circuit, Path(tmp_path / "b.html")).read_bytes()
