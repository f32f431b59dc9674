"""MLPs of one token as one element: what is drawn still adds up, nothing leads downwards, and a click unfolds."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from importlib.resources import files

import pytest
from playwright.sync_api import expect

from headtrace.circuits import Circuit, Edge, Node
from headtrace.explorer.page import inline_modules, page_data
from tests.circuits.made_up import random_circuit, small_circuit, with_influence

pytestmark = pytest.mark.browser

ENTRY = """
import { foldMlps, mlpRuns } from "./fold.js";
export const tools = () => ({ foldMlps, mlpRuns });
"""
FOLD = """([data, all]) => {
  const { foldMlps, mlpRuns } = window.headtrace;
  const runs = mlpRuns(data);
  return { runs, folded: foldMlps(data, new Set(all ? runs.map(({ key }) => key) : [])) };
}"""


def column_circuit() -> Circuit:
    """Five MLPs at one token; the head of layer 2 reads the lower two and feeds the upper ones."""
    nodes = (
        Node(0, "root", expanded=True),
        Node(1, "head", 6, 1, 7, 1, attention=0.5, expanded=True),
        Node(2, "mlp", 5, None, 1, expanded=True),
        Node(3, "mlp", 4, None, 1, expanded=True),
        Node(4, "head", 2, 3, 1, 1, attention=0.75, expanded=True),
        Node(5, "mlp", 1, None, 1, expanded=True),
        Node(6, "mlp", 0, None, 1, expanded=True),
        Node(7, "embedding", None, None, 1),
        Node(8, "mlp", 3, None, 1, expanded=True),
    )
    edges = (
        Edge(1, 0, "root", 2.0, contribution=2.0),
        Edge(2, 1, "value", 1.0, contribution=1.0, effect={"metric": -0.5}),
        Edge(3, 1, "value", 0.5, contribution=0.5),
        Edge(3, 1, "key", 0.25, (3, 5), description="a name"),
        Edge(8, 1, "key", 0.125, (3,), description="a weak one"),
        Edge(3, 2, "input", 0.75, contribution=0.75),
        Edge(4, 3, "input", 0.5, contribution=0.5),
        Edge(4, 2, "input", -0.25, contribution=-0.25),
        Edge(6, 4, "value", 0.25, contribution=0.25),
        Edge(5, 4, "value", 0.125, contribution=0.125),
        Edge(6, 5, "input", 0.125, contribution=0.125),
        Edge(7, 6, "input", 0.25, contribution=0.25),
        Edge(5, 3, "input", 0.0625, contribution=0.0625),
        Edge(4, 8, "input", 0.0625, contribution=0.0625),
    )
    circuit = small_circuit()
    return with_influence(replace(circuit, nodes=nodes, edges=edges))


CASES = {"one column": column_circuit(), "random": random_circuit(400), "many": random_circuit(1500, seed=3)}


@pytest.fixture(scope="module")
def fold(browser):
    script = (files("headtrace.explorer") / "page" / "fold.js").read_text()
    page = browser.new_page()
    page.add_script_tag(content=inline_modules({"fold.js": script, "entry.js": ENTRY}, "entry.js", "tools"))
    yield lambda circuit, all=False: page.evaluate(FOLD, [page_data(circuit), all])
    page.close()


@pytest.fixture(scope="module")
def folded(fold):
    """The data of each case, and what folding makes of it, computed once."""
    return {name: (page_data(circuit), fold(circuit)) for name, circuit in CASES.items()}


def sums(data, inside):
    """By component, direction and side, all that enters and leaves those that are not folded."""
    found = defaultdict(float)
    for edge in data["edges"]:
        for end in ("source", "target"):
            if edge[end] not in inside:
                found[edge[end], end, edge["side"]] += edge["weight"]
    return {key: pytest.approx(value, rel=1e-9, abs=1e-12) for key, value in found.items()}


@pytest.mark.parametrize("name", CASES)
def test_what_enters_and_leaves_every_other_component_is_the_same_as_without_folding(folded, name):
    data, found = folded[name]
    inside = {node["id"] for run in found["runs"] for node in run["members"]}
    assert found["runs"]
    assert sums(found["folded"], inside) == sums(data, inside)


@pytest.mark.parametrize("name", CASES)
def test_an_element_takes_and_gives_the_sum_of_what_its_members_do(folded, name):
    data, found = folded[name]
    for run in found["runs"]:
        members = {node["id"] for node in run["members"]}
        (element,) = [node for node in found["folded"]["nodes"] if node["id"] in members]
        assert set(element["members"]["ids"]) == members
        for mine, other in (("source", "target"), ("target", "source")):
            before = [e for e in data["edges"] if e[mine] in members and e[other] not in members]
            after = [e for e in found["folded"]["edges"] if e[mine] == element["id"]]
            for value in ("weight", "flow"):
                assert sum(e[value] for e in after) == pytest.approx(
                    sum(e[value] for e in before), rel=1e-9, abs=1e-12
                )
        assert "flow" not in element
        assert "contribution" not in element, "members feed one another: their numbers are not to be added"


@pytest.mark.parametrize("name", CASES)
def test_no_line_leads_downwards(folded, name):
    made = folded[name][1]["folded"]
    nodes = {node["id"]: node for node in made["nodes"]}
    for edge in made["edges"]:
        source, target = nodes[edge["source"]], nodes[edge["target"]]
        if target["kind"] == "root" or not {"members"} & (source.keys() | target.keys()):
            continue
        low, high = -1 if source["layer"] is None else source["layer"], target["layer"]
        assert low < high or (low == high and target["kind"] == "mlp"), edge


def test_a_head_in_between_ends_a_run(fold):
    runs = fold(column_circuit())["runs"]
    assert [[node["layer"] for node in run["members"]] for run in runs] == [[0, 1], [3, 4, 5]]


def test_unfolded_everywhere_it_is_the_circuit_itself(fold):
    circuit = column_circuit()
    assert fold(circuit, all=True)["folded"] == fold(circuit, all=True)["folded"] | page_data(circuit)


def test_what_was_measured_of_one_member_is_not_told_of_all_and_words_name_theirs(fold):
    edges = fold(column_circuit())["folded"]["edges"]
    (value,) = [e for e in edges if e["target"] == 1 and e["side"] == "value"]
    assert value["joined"] == 2
    assert "effect" not in value
    (key,) = [e for e in edges if e["target"] == 1 and e["side"] == "key"]
    assert key["channels"] == [3, 5]
    assert key["description"] == "MLP 4: a name"


# -- on the page ---------------------------------------------------------------------------------------------


@pytest.fixture
def page(open_page):
    return open_page(column_circuit(), width=1440, height=900)


def names(page) -> list[str]:
    return sorted(page.page.locator(".nodes .node.mlp .name").all_text_contents())


def test_a_click_unfolds_and_a_button_folds_again(page):
    assert names(page) == ["MLPs 0-1", "MLPs 3-5"]
    assert "5 MLPs folded" in page.page.locator("#status").inner_text()
    page.redrawn(lambda: page.page.locator(".node.folded", has_text="MLPs 3-5").click())
    assert names(page) == ["3", "4", "5", "MLPs 0-1"]
    expect(page.page).to_have_url(re.compile(r"mlps=1\.3"))
    assert page.page.locator(".nodes .node.mlp[aria-pressed=true]").count() == 1, "one of them is looked at"
    page.page.reload()
    page.page.wait_for_selector("html[data-ready]")
    assert names(page) == ["3", "4", "5", "MLPs 0-1"]
    page.redrawn(lambda: page.page.get_by_role("button", name="Fold MLPs 3-5").click())
    assert names(page) == ["MLPs 0-1", "MLPs 3-5"]
    page.redrawn(lambda: page.page.get_by_role("button", name="Unfold all MLPs").click())
    assert names(page) == ["0", "1", "3", "4", "5"]
    page.redrawn(lambda: page.page.get_by_role("button", name="Fold MLPs", exact=True).click())
    assert names(page) == ["MLPs 0-1", "MLPs 3-5"]
    assert page.errors == []


def test_the_keyboard_unfolds_and_stays_with_what_it_unfolded(page):
    page.page.locator(".node.folded", has_text="MLPs 0-1").focus()
    page.redrawn(lambda: page.page.keyboard.press("Enter"))
    assert names(page) == ["0", "1", "MLPs 3-5"]
    focused = page.page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert re.match(r"MLP [01] @1", focused)


def test_the_panel_and_the_search_lead_to_members(page):
    page.page.locator("#search").fill("MLP 4")
    assert page.page.locator("#found").inner_text() == "1 found"
    page.page.keyboard.press("Enter")
    panel = page.page.locator("#panel").inner_text()
    assert "MLPs 3, 4, 5" in panel
    assert re.search(r"enters\s+0\.375", panel)
    assert page.page.get_by_role("button", name="Unfold MLPs 3-5").is_visible()


def test_a_link_to_a_member_shows_it(open_page):
    opened = open_page(column_circuit(), width=1440, height=900)
    opened.page.goto(opened.page.url.split("#")[0] + "#pin=2")
    opened.page.reload()
    opened.page.wait_for_selector("html[data-ready]")
    assert "3" in names(opened)
    assert opened.page.locator('.node[data-id="2"][aria-pressed="true"]').count() == 1


def test_beside_another_circuit_nothing_is_folded(open_page):
    opened = open_page([column_circuit(), column_circuit()], compare=True, width=1440, height=900)
    assert opened.count(".node.folded") == 0
    assert opened.errors == []
