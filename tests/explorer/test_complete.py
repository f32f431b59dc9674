"""Complete circuits on the page: what tokens contribute, content and what opposes it, MLPs that can be opened."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from playwright.sync_api import expect

from headtrace.circuits import Edge, Heads, Neuron
from tests.circuits.made_up import (
    TOKENS,
    complete_circuit,
    content_circuit,
    random_circuit,
    small_circuit,
    with_influence,
)

pytestmark = pytest.mark.browser

SCHEMES = pytest.mark.parametrize("scheme", ["light", "dark"])
WIDTHS = pytest.mark.parametrize("width", [1280, 420])
MINUS = "\u2212"


@pytest.fixture
def complete(open_page):
    return open_page(complete_circuit())


def index_of(source: int, target: int, side: str) -> int:
    edges = complete_circuit().edges
    return next(i for i, e in enumerate(edges) if (e.source, e.target, e.side) == (source, target, side))


def choose(page, name: str) -> None:
    page.redrawn(lambda: page.page.locator(f"#paths [value={name}]").check(force=True))


def drawn_edges(page) -> set[int]:
    found = page.page.locator(".edges .edge").evaluate_all("(all) => all.map((e) => Number(e.dataset.index))")
    return set(found)


def drawn_nodes(page) -> set[int]:
    found = page.page.locator(".nodes .node").evaluate_all("(all) => all.map((e) => Number(e.dataset.id))")
    return set(found)


# What each token contributes


@WIDTHS
@SCHEMES
def test_each_token_has_a_bar_of_what_it_contributes_and_the_strong_ones_their_number(
    open_page, width, scheme
):
    page = open_page(complete_circuit(), width=width, scheme=scheme)
    labels = page.page.locator(".axis-token").evaluate_all(
        """(all) => Object.fromEntries(all.map((e) =>
             [e.dataset.position, e.firstChild.data + (e.querySelector(".amount")?.textContent ?? "")]))"""
    )
    assert labels["1"] == "Mary +3.8"
    assert labels["3"] == f"John {MINUS}1.5"
    assert labels["6"] == f"John {MINUS}0.25"
    assert all("+" not in label for i, label in labels.items() if i in ("2", "4", "5"))
    bars = page.page.locator(".amount-bar").evaluate_all(
        """(all) => all.map((e) => [Number(e.dataset.position), e.classList.contains("opposing"),
                                    Number(e.querySelector("rect").getAttribute("height"))])"""
    )
    heights = {position: (-height if against else height) for position, against, height in bars}
    assert set(heights) == {1, 3, 6, 7}, "what is next to nothing has no bar, nor have constants"
    for position, height in heights.items():
        share = complete_circuit().prompt.contributions[position] / 3.75
        assert height / heights[1] == pytest.approx(share, abs=0.02)
    assert page.style(".amount-bar.opposing rect", "fill") == "none"
    assert page.style(".amount-bar:not(.opposing) rect", "fill") == page.style(".edges .root", "stroke")
    assert page.count(".amount-bar.opposing line") == 2, "a bar at its end, as opposing edges have"
    assert page.errors == []


@WIDTHS
def test_bars_stand_in_their_columns_between_drawing_and_labels(open_page, width):
    page = open_page(complete_circuit(), width=width)
    for position in (1, 3):
        bar = page.page.locator(f'.amount-bar[data-position="{position}"]').bounding_box()
        x, y = page.axis_token(position)
        assert abs(bar["x"] + bar["width"] / 2 - x) < 6
        assert bar["y"] + bar["height"] < y
    axis = page.page.locator(".axis-line").bounding_box()["y"]
    assert all(
        box["y"] >= axis for box in [each.bounding_box() for each in page.page.locator(".amount-bar").all()]
    )
    assert page.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_labels_with_numbers_do_not_run_into_each_other_in_a_narrow_window(open_page):
    page = open_page(complete_circuit(), width=420)
    places = sorted(page.axis_token(i)[0] for i in (0, 1, 3, 6, 7))
    assert all(b - a >= 15 for a, b in pairwise(places))


def test_without_contributions_there_are_no_bars_and_no_room_for_them(open_page):
    page = open_page(small_circuit())
    assert page.count(".amount-bar") == page.count(".axis-zero") == page.count(".axis-token .amount") == 0
    plain = page.page.locator(".axis-line").bounding_box()["y"]
    page = open_page(complete_circuit())
    assert page.page.locator(".axis-line").bounding_box()["y"] < plain - 30


def test_the_panel_lists_what_tokens_contribute_first_and_leads_to_them(complete):
    section = complete.page.locator("#panel section").first
    text = section.inner_text()
    assert text.splitlines()[0] == "What each token contributes"
    assert text.index("Mary") < text.index("John")
    assert "+3.75" in text
    against = section.locator(".row").nth(1)
    assert "opposing" in against.inner_text()
    assert f"{MINUS}1.50" in against.inner_text()
    assert against.locator(".balance span").evaluate("(e) => getComputedStyle(e).borderTopStyle") == "dashed"
    section.locator("button").first.click()
    expect(complete.page.locator("#panel h2")).to_have_text("Embedding @1")


def test_hovering_a_token_says_what_it_contributes(complete):
    complete.page.mouse.move(*complete.axis_token(3))
    card = complete.page.locator("#card")
    expect(card).to_be_visible()
    assert f"{MINUS}1.50 (logit difference) opposing" in card.inner_text()


def test_side_by_side_each_circuit_has_the_bars_of_its_own_tokens(open_page):
    other = complete_circuit()
    other = replace(other, prompt=replace(other.prompt, contributions=(0.0, 3.0) + (0.0,) * 6))
    page = open_page([complete_circuit(), other], compare=True)
    assert page.count('[data-side="A"] .amount-bar') == 4
    assert page.count('[data-side="B"] .amount-bar') == 1
    page = open_page([complete_circuit(), small_circuit()], compare=True)
    assert page.count('[data-side="B"] .amount-bar') == 0
    heights = [page.page.locator(f'[data-side="{side}"] .axis-line').bounding_box()["y"] for side in "AB"]
    assert heights[0] == heights[1], "rows are the same in both"


# What opposes


@SCHEMES
def test_what_opposes_has_a_pattern_and_an_end_of_its_own(open_page, scheme):
    page = open_page(complete_circuit(), scheme=scheme)
    against = {index_of(2, 0, "root"), index_of(8, 2, "value")}
    found = page.page.locator(".edges .edge.opposing").evaluate_all(
        "(all) => all.map((e) => Number(e.dataset.index))"
    )
    assert set(found) == against
    assert page.count(".edges .edge-end") == len(against)
    dashes = {
        name: page.style(f".edges .edge.{name}", "strokeDasharray") for name in ("opposing", "key", "query")
    }
    assert len(set(dashes.values())) == 3
    assert page.style(".edges .edge.root:not(.opposing)", "strokeDasharray") == "none"
    assert page.style(".edges .edge.opposing", "stroke") == page.style(".edges .edge.value", "stroke")


def test_what_opposes_is_as_wide_as_it_is_strong_and_its_bar_lies_across_its_end(complete):
    path = complete.page.locator(f'.edges .edge[data-index="{index_of(2, 0, "root")}"]')
    assert float(path.get_attribute("stroke-width")) == pytest.approx(0.75 + 5.25 * 1.25 / 2.75, abs=0.006)
    across = path.evaluate(
        """(e) => {
          const end = e.getPointAtLength(e.getTotalLength());
          const before = e.getPointAtLength(e.getTotalLength() - 1);
          const bar = e.nextElementSibling;
          const [a, b] = [bar.getPointAtLength(0), bar.getPointAtLength(bar.getTotalLength())];
          const turn = (end.x - before.x) * (b.x - a.x) + (end.y - before.y) * (b.y - a.y);
          const near = Math.hypot((a.x + b.x) / 2 - end.x, (a.y + b.y) / 2 - end.y);
          return [Math.abs(turn) / Math.hypot(b.x - a.x, b.y - a.y), near];
        }"""
    )
    assert across[0] < 0.1
    assert across[1] < 6


def test_what_opposes_is_said_in_words(complete):
    complete.node(0).click()
    row = complete.page.locator(f'#panel .row[data-index="{index_of(2, 0, "root")}"]')
    assert "opposing" in row.inner_text()
    assert f"{MINUS}1.25" in row.inner_text()
    complete.node(2).click()
    assert f"{MINUS}1.25 (logit difference) opposing" in complete.page.locator("#panel .facts").inner_text()
    assert "opposing" in complete.node(2).get_attribute("aria-label")


def test_the_strongest_edges_are_those_that_most_of_the_root_passes_through(complete):
    """Influence alone would leave out what opposes, and set what is moved behind why heads attend."""
    complete.slide("#detail", 0)
    strongest = [(1, 0, "root"), (3, 1, "value"), (7, 3, "input"), (2, 0, "root"), (8, 2, "value")]
    assert drawn_edges(complete) == {index_of(*edge) for edge in strongest}


def test_where_heads_are_the_root_content_is_told_as_shares_of_signals(open_page):
    circuit = complete_circuit()
    edges = [replace(edge, contribution=None) for edge in circuit.edges]
    prompt = replace(circuit.prompt, contributions=None)
    page = open_page(replace(circuit, root=Heads(("L9H6",), value=0.75), prompt=prompt, edges=tuple(edges)))
    page.node(4).click()
    assert page.page.locator("#panel .list-head .weight").first.inner_text() == "weight: share of signals"
    assert page.errors == []


@SCHEMES
def test_the_legend_explains_the_lines_that_are_there(open_page, scheme):
    page = open_page([complete_circuit(), small_circuit()], scheme=scheme)
    legend = page.page.locator("#legend")
    expect(legend).to_be_visible()
    names = "(all) => all.map((e) => e.dataset.name)"
    assert legend.locator(":scope > span").evaluate_all(names) == ["attention", "content", "opposing"]
    for words in ("why a head attends", "what is moved", "opposing"):
        assert words in legend.inner_text()
    sample = '#legend [data-name="opposing"] .edge'
    assert page.style(sample, "strokeDasharray") == page.style(".edges .opposing", "strokeDasharray")
    page.page.select_option("#first", "1")
    expect(legend).to_be_hidden()


# Attention, content, both


def test_a_circuit_of_one_kind_offers_no_switch(open_page):
    for circuit in (small_circuit(), random_circuit(40)):
        expect(open_page(circuit).page.locator("#paths")).to_be_hidden()
    expect(open_page(content_circuit()).page.locator("#paths")).to_be_visible()


@WIDTHS
def test_attention_and_content_can_be_seen_apart(open_page, width):
    circuit = complete_circuit()
    page = open_page(circuit, width=width)
    if width < 860:
        page.page.locator("#toolbar summary").click()
    everything = set(range(len(circuit.edges)))
    assert drawn_edges(page) == everything
    choose(page, "attention")
    sides = {circuit.edges[i].side for i in drawn_edges(page)}
    assert sides == {"query", "key", "root"}
    assert drawn_nodes(page) == {0, 1, 2, 3, 4}, "what has no edge that is shown is not shown"
    choose(page, "content")
    assert {circuit.edges[i].side for i in drawn_edges(page)} == {"value", "input", "root"}
    assert drawn_nodes(page) == {0, 1, 2, 3, 6, 7, 8}, (
        "content that became a signal does not lead to the root"
    )
    choose(page, "both")
    assert drawn_edges(page) == everything
    assert page.errors == []


def test_the_switch_is_worked_by_the_keyboard_and_says_what_it_is(complete):
    assert complete.page.get_by_role("group", name="Paths that are shown").is_visible()
    complete.page.get_by_role("radio", name="both").focus()
    complete.redrawn(lambda: complete.page.keyboard.press("ArrowRight"))
    expect(complete.page.get_by_role("radio", name="attention")).to_be_checked()
    complete.redrawn(lambda: complete.page.keyboard.press("ArrowRight"))
    expect(complete.page.get_by_role("radio", name="content")).to_be_checked()
    assert complete.page.locator("#paths label:has(:checked)").inner_text() == "content"
    assert complete.style("#paths label:has(:focus-visible)", "outlineStyle") == "solid"


def test_sides_that_the_switch_leaves_out_cannot_be_chosen(complete):
    choose(complete, "content")
    chips = complete.page.locator("#sides .chip:disabled")
    assert chips.evaluate_all("(all) => all.map((e) => e.dataset.name)") == ["query", "key"]
    choose(complete, "both")
    assert chips.count() == 0


def test_what_is_lit_and_walked_along_is_what_the_switch_shows(complete):
    choose(complete, "content")
    complete.node(3).click()
    lit = complete.page.locator(".lit .edge").evaluate_all("(all) => all.map((e) => e.getAttribute('class'))")
    assert lit
    assert not any("key" in each or "query" in each for each in lit)
    complete.page.keyboard.press("Escape")
    complete.node(1).focus()
    complete.page.keyboard.press("ArrowDown")
    assert complete.page.evaluate("document.activeElement.dataset.id") == "3"


def test_the_choice_of_paths_is_kept_with_the_other_filters_while_there_is_one(open_page):
    """Another circuit of both kinds opens as the last one was seen; one without the choice shows everything."""
    page = open_page([complete_circuit(), content_circuit(), small_circuit()])
    choose(page, "content")
    page.redrawn(lambda: page.page.select_option("#first", "1"))
    expect(page.page.locator("#paths [value=content]")).to_be_checked()
    assert page.count(".edges .edge.key") == 0
    page.redrawn(lambda: page.page.select_option("#first", "2"))
    expect(page.page.locator("#paths")).to_be_hidden()
    assert page.count(".edges .edge") == len(small_circuit().edges)


# An MLP that is opened


def test_an_mlp_says_what_it_read_what_it_wrote_and_what_holds_its_signals_up(complete):
    complete.node(3).click()
    panel = complete.page.locator("#panel").inner_text()
    for part in (
        "MLP 5 @1",
        "+2.50 (logit difference)",
        "What it reads",
        "Embedding @1",
        "2.25",
        "What it wrote",
        "value of L9H6 7->1",
        "key of L9H6 7->1",
        "Without what L0H1 1->0 and Embedding @1 wrote into its input, the MLP still writes 25% of this key signal.",
    ):
        assert part in panel


@pytest.mark.parametrize(
    ("through", "left", "words"),
    [
        ((), 1.0, "Nothing was found in its input that holds this key signal up."),
        (
            (7,),
            -0.08,
            f"Without what Embedding @1 wrote into its input, the MLP writes nothing ({MINUS}8.0%) of this",
        ),
    ],
)
def test_a_signal_that_nothing_holds_up_or_that_turns_around_says_so(open_page, through, left, words):
    circuit = complete_circuit()
    edges = [replace(e, through=through, left=left) if e.left is not None else e for e in circuit.edges]
    page = open_page(circuit.with_edges(tuple(edges)))
    page.node(3).click()
    assert words in page.page.locator("#panel").inner_text()


@SCHEMES
def test_the_neurons_of_an_mlp_are_listed_with_their_amounts(open_page, scheme):
    page = open_page(complete_circuit(), scheme=scheme)
    page.node(3).click()
    section = page.page.locator("#panel section", has_text="Hidden units that contribute most")
    rows = section.locator(".row").all_inner_texts()
    assert [row.split()[:2] for row in rows] == [["unit", "12"], ["unit", "3"]]
    assert "+1.25" in rows[0]
    assert "opposing" in rows[1]
    assert f"{MINUS}0.500" in rows[1]
    page.node(5).click()
    assert page.page.locator("#panel section", has_text="Hidden units").count() == 0


def test_a_weight_that_stands_for_a_signal_is_not_given_out_as_a_contribution(complete):
    complete.node(4).click()
    row = complete.page.locator(f'#panel .row[data-index="{index_of(5, 4, "value")}"]')
    assert f"{MINUS}0.0625" in row.inner_text(), "what passes, in the unit of the root"
    assert "opposing" in row.inner_text()
    assert "opposing" not in row.get_attribute("class"), "it is followed for the signal, which it holds up"


def test_firings_in_layer_0_that_were_not_followed_look_like_any_other_such(complete):
    assert "unexpanded" in complete.node(6).get_attribute("class")
    assert "not expanded" in complete.node(6).get_attribute("aria-label")
    assert "unexpanded" in complete.node(2).get_attribute("class")


# Hostile input, saved views


def test_hostile_tokens_stay_inert_beside_their_amounts(open_page):
    tokens = ("<img src=x onerror=alert(1)>", "</text><script>alert(2)</script>", *TOKENS[2:])
    circuit = complete_circuit(tokens)
    nodes = [
        replace(n, label="<b onclick=alert(3)>", neurons=n.neurons and (Neuron(2**31, -1e300),))
        for n in circuit.nodes
    ]
    page = open_page(replace(circuit, nodes=tuple(nodes)))
    page.node(3).click()
    assert page.count("#panel img, #panel script, .axes img, .axes script, #panel b[onclick]") == 0
    assert "<img" in page.page.locator('.axis-token[data-position="0"]').text_content()
    assert page.dialogs == []
    assert page.errors == []


def test_a_saved_view_keeps_bars_ends_and_the_meaning_of_opposing(complete):
    with complete.page.expect_download() as download:
        complete.page.click("#save-svg")
    text = Path(download.value.path()).read_text(encoding="utf-8")
    assert "opposing" in text
    assert "Mary" in text
    assert "+3.8" in text
    assert text.count('stroke-dasharray="2px, 2px"') + text.count('stroke-dasharray="2, 2"') >= 2


# What was found by removing one signal alone


def test_what_holds_a_head_down_or_carries_it_alone_says_so(open_page):
    made = complete_circuit()
    edges = [
        replace(edge, alone=True, weight=-0.4) if (edge.source, edge.target) == (4, 1) else edge
        for edge in made.edges
    ]
    edges.append(Edge(6, 4, "query", 0.6, (1,), alone=True))
    page = open_page(with_influence(replace(made, edges=tuple(edges))))
    card, panel = page.page.locator("#card"), page.page.locator("#panel")
    page.node(4).hover()
    expect(card).to_contain_text("here because it")
    expect(card).to_contain_text("holds L9H6 down")
    page.node(6).hover()
    expect(card).not_to_contain_text("here because it")  # it moves content, too
    page.node(1).click()
    row = panel.locator("li", has_text="L3H2")
    expect(row).to_contain_text("holds it down")
    expect(panel.locator("li", has_text="mlp").first).not_to_contain_text("holds it down")
    page.node(4).click()
    expect(panel.locator("li", has_text="L0H1")).to_contain_text("carries it alone")
    assert page.errors == []
