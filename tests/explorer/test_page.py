"""The circuit page in a real browser: what is drawn is the circuit, and what is done is seen."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import expect

from headtrace.circuits import Direction, Edge, Heads, Likelihood, LogitDifference, Node
from headtrace.explorer import write_page
from headtrace.vocabulary import SIDES
from tests.browsing import ARGUMENTS, browser_path
from tests.circuits.made_up import TOKENS, content_circuit, many_seeds, random_circuit, small_circuit

pytestmark = pytest.mark.browser
UNFOLDED = "#mlps=all"

# A point of an edge, on the screen, where nothing else is near: no component, and no other edge within reach.
ALONE = """(index) => {
  const edges = [...document.querySelectorAll(".edges .edge")];
  const screen = (e, share) => {
    const { x, y } = e.getPointAtLength(e.getTotalLength() * share).matrixTransform(e.getScreenCTM());
    return [x, y];
  };
  const steps = Array.from({ length: 99 }, (_, i) => (i + 1) / 100);
  const own = edges.find((e) => e.dataset.index === String(index));
  const others = edges.filter((e) => e !== own).flatMap((e) => steps.map((share) => screen(e, share)));
  const free = ([x, y]) => others.every(([ox, oy]) => Math.hypot(x - ox, y - oy) > 15);
  const bare = ([x, y]) => !document.elementFromPoint(x, y)?.closest(".node");
  return steps.map((share) => screen(own, share)).find((point) => bare(point) && free(point));
}"""


@pytest.fixture
def small(open_page):
    return open_page(small_circuit())


# What is drawn


def test_every_node_and_edge_is_drawn_with_its_label_and_width(small):
    circuit = small_circuit()
    assert small.count(".nodes .node") == len(circuit.nodes)
    assert small.count(".edges .edge") == len(circuit.edges)
    heaviest = {"root": 2.5, "query": 0.3, "key": 0.3}
    for i, edge in enumerate(circuit.edges):
        path = small.page.locator(f'.edges .edge[data-index="{i}"]')
        assert edge.side in path.get_attribute("class").split()
        width = 0.75 + 5.25 * edge.weight / heaviest[edge.side]
        written = float(path.get_attribute("stroke-width"))
        assert written == pytest.approx(width, abs=0.005 + 1e-9), "two decimals are written"
    for node in circuit.heads():
        text = small.node(node.id).text_content()
        assert node.name.split()[0] in text
        assert circuit.token(node.src).strip()[:5] in text
    assert small.errors == []


def test_sides_differ_in_colour_and_dash_and_leaves_in_shape(small):
    looks = {
        side: (small.style(f".edges .{side}", "stroke"), small.style(f".edges .{side}", "strokeDasharray"))
        for side in ("query", "key", "root")
    }
    assert len({colour for colour, _ in looks.values()}) == 3
    assert looks["query"][1] == "none" != looks["key"][1]
    kinds = ("head", "mlp", "embedding", "attention_bias", "offset")
    outlines = {
        kind: small.page.locator(f".nodes .{kind} .body").first.evaluate(
            "(e) => e.tagName + (e.getAttribute('d') ?? e.getAttribute('rx'))"
        )
        for kind in kinds
    }
    assert len(set(outlines.values())) == len(kinds)
    assert small.count("#kinds .chip .body") == len(kinds), "the legend shows every shape"


def test_sources_are_marked_and_unexpanded_firings_look_different(small):
    assert small.count(".source") == 3
    assert small.style('.node[data-id="3"] .body', "strokeDasharray") != "none"
    assert small.style('.node[data-id="2"] .body', "strokeDasharray") == "none"


def test_a_measured_effect_is_written_on_its_edge(small):
    chips = small.page.locator(".effects .effect")
    assert chips.count() == 1
    assert chips.text_content() == "\u22120.31"
    assert small_circuit().edges[int(chips.get_attribute("data-index"))].effect is not None


def test_tokens_stand_on_the_axis_in_order_and_apart(small):
    assert small.count(".axis-token") == len(TOKENS)
    for position, token in enumerate(TOKENS):
        label = small.page.locator(f'.axis-token[data-position="{position}"]')
        assert label.evaluate("(e) => e.firstChild.data") == token.strip()
    places = [small.axis_token(position)[0] for position in range(len(TOKENS))]
    size = float(small.style(".axis-token", "fontSize").removesuffix("px"))
    assert all(right - left >= size for left, right in pairwise(places))


BOX = "(e) => { const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; }"


def boxes(page, selector: str) -> list[list[float]]:
    """Where the elements are on the screen: left, top, right, bottom."""
    return page.page.locator(selector).evaluate_all(f"(all) => all.map({BOX})")


def overlap(a: list[float], b: list[float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


@pytest.mark.parametrize("width", [1400, 420])
@pytest.mark.parametrize("nodes", [0, 1], ids=["no node", "a root"])
def test_an_empty_circuit_says_why_and_what_to_try_and_nothing_overlaps(open_page, width, nodes):
    circuit = small_circuit()
    reason = "no head among the seeds; strongest: MLP 3 @7 (0.5)\nand L9H6 7->1 (0.1)"
    page = open_page(
        replace(circuit, nodes=circuit.nodes[:nodes], edges=(), reason=reason), width=width, height=900
    )
    message = page.page.locator(".empty")
    text = message.inner_text()
    for part in ("No head among the seeds", "MLP 3 @7 (0.5)", "L9H6 7->1 (0.1)", "What to try", "--root"):
        assert part in text
    seen = page.page.locator(".host .layer, #toolbar, #stage-bar, #search, #save-svg").evaluate_all(
        "(all) => all.filter((e) => e.checkVisibility()).map((e) => e.id || e.classList[0])"
    )
    assert seen == [], "what is left would lie over the message, or control nothing"
    parts = boxes(page, ".empty > *, .top, .panel-content")
    assert not any(overlap(a, b) for a, b in combinations(parts, 2))
    assert page.errors == []


def test_an_empty_circuit_beside_another_leaves_that_one_its_drawing(open_page):
    empty = replace(small_circuit(), nodes=small_circuit().nodes[:1], edges=(), reason="nothing there")
    page = open_page([small_circuit(), empty], compare=True)
    assert page.count('.host[data-side="A"] .empty') == 0
    assert "Nothing there" in page.page.locator('.host[data-side="B"] .empty').inner_text()
    assert page.count('.host[data-side="A"] .edges .edge') == 11
    assert page.page.locator("#toolbar").is_visible()
    assert page.errors == []


def test_filters_that_let_nothing_through_say_so(small):
    for side in ("query", "key", "root"):
        small.redrawn(lambda side=side: small.page.locator(f'#sides [data-name="{side}"]').click())
    assert small.page.locator("#status").inner_text() == "no edge passes the filters, of 11 edges"
    assert small.errors == []


# What the page holds at the moment its document has been read: the first frame comes after it.
AT_FIRST = """
document.addEventListener("DOMContentLoaded", () => {
  const count = (selector) => document.querySelectorAll(selector).length;
  window.atFirst = {
    ready: document.documentElement.dataset.ready ?? null,
    ...Object.fromEntries([".edges .edge", ".nodes .node", ".axis-token", ".axis-layer", "#panel .row", ".tag"]
      .map((selector) => [selector, count(selector)])),
  };
});
"""


def test_the_first_frame_is_drawn_before_anything_waits(browser, tmp_path):
    circuit = small_circuit()
    page = browser.new_page()
    page.add_init_script(AT_FIRST)
    page.goto(write_page(circuit, tmp_path / "c.html").as_uri())
    assert page.evaluate("window.atFirst") == {
        "ready": "true",
        ".edges .edge": len(circuit.edges),
        ".nodes .node": len(circuit.nodes),
        ".axis-token": len(TOKENS),
        ".axis-layer": 7,
        "#panel .row": 12,  # eleven edges, and what is not shown
        ".tag": 0,
    }
    page.close()


def test_of_a_large_circuit_the_first_frame_has_edges_shapes_and_labels(browser, tmp_path):
    page = browser.new_page()
    page.add_init_script(AT_FIRST)
    page.goto(write_page(random_circuit(2000), tmp_path / "c.html").as_uri())
    first = page.evaluate("window.atFirst")
    shapes = page.locator(".nodes .node:not(.dot)").count()
    assert first[".edges .edge"] == page.locator(".edges .edge").count() > 10, "all that will be drawn"
    assert first[".nodes .node"] >= shapes
    assert first[".axis-token"] > 10
    assert first[".tag"] > 10
    page.close()


def test_a_picture_taken_without_waiting_is_the_finished_one(browser, tmp_path):
    path = write_page(small_circuit(), tmp_path / "c.html")
    pictures = []
    for name, wait in (("soon", []), ("late", ["--virtual-time-budget=3000"])):
        picture = tmp_path / f"{name}.png"
        arguments = ["--headless", f"--screenshot={picture}", "--window-size=1000,700", *ARGUMENTS, *wait]
        subprocess.run(
            [browser_path(), *arguments, path.as_uri()], check=True, capture_output=True, timeout=60
        )
        pictures.append(np.asarray(Image.open(picture).convert("RGB"), dtype=int))
    soon, late = pictures
    assert np.unique(late).size > 10, "there is something to see"
    assert (abs(soon - late).max(-1) > 32).mean() < 0.001, "nothing to be seen appears later"


def test_a_window_of_another_size_is_filled_at_once(small):
    before = small.page.locator(".chart .world").get_attribute("transform")
    small.page.set_viewport_size({"width": 900, "height": 700})
    expect(small.page.locator(".chart .world")).not_to_have_attribute("transform", before)
    host = small.page.locator(".host").evaluate(BOX)
    for left, _, right, _ in boxes(small, ".nodes .node .body"):
        assert host[0] <= left
        assert right <= host[2]


@pytest.mark.parametrize(
    "make", [small_circuit, lambda: random_circuit(60, n_tokens=12, n_layers=8)], ids=["small", "60"]
)
def test_at_420_pixels_mlps_keep_their_numbers_and_the_answer_its_token(open_page, make):
    circuit = make()
    page = open_page(circuit, width=420, height=900, address=UNFOLDED)
    answer = len(circuit.prompt.tokens) - 1
    label = page.page.locator(f'.axis-token[data-position="{answer}"]')
    assert label.evaluate("(e) => e.firstChild.data") == circuit.prompt.tokens[answer].strip()
    mlps = [node for node in circuit.nodes if node.kind == "mlp"]
    assert mlps
    tags = page.page.locator(
        ".chart .tag.mlp"
    )  # written over the drawing where its own names would be too small
    written = list(zip(tags.all_text_contents(), boxes(page, ".chart .tag.mlp"), strict=True))
    for node in mlps:
        text = page.node(node.id).locator("text")
        assert text.text_content() == str(node.layer)
        left, top, right, bottom = page.node(node.id).locator(".body").evaluate(BOX)
        middle = (left + right) / 2, (top + bottom) / 2
        tagged = [
            name for name, (x0, y0, x1, y1) in written if x0 <= middle[0] <= x1 and y0 <= middle[1] <= y1
        ]
        assert text.is_visible() or str(node.layer) in tagged
    assert all(y1 - y0 >= 11 for _, (_, y0, _, y1) in written), "large enough to read"
    width = page.page.locator(".host").evaluate(BOX)[2]
    assert all(right <= width for _, _, right, _ in boxes(page, ".nodes .node .body"))


def test_room_goes_to_the_columns_that_hold_most(open_page):
    page = open_page(small_circuit(), width=1400, height=900)
    columns = page.page.evaluate(
        "headtrace.charts[0].geometry.columns.map((c) => [c.position, c.used, c.width, c.lanes])"
    )
    widths = {position: width for position, _, width, _ in columns}
    assert widths[7] > widths[1] > widths[6] > max(width for _, used, width, _ in columns if not used)
    heads, leaves = columns[7][3]
    for node in small_circuit().nodes:
        if node.dest == 7:
            x = page.page.evaluate(f"headtrace.charts[0].geometry.nodes.get({node.id}).x")
            assert x == pytest.approx(heads if node.kind == "head" else leaves)


def test_layers_without_a_component_are_marked_on_the_axis(small):
    marks = small.page.locator(".axis-gap")
    assert marks.evaluate_all("(all) => all.map((e) => e.dataset.layers)") == ["6-8", "1-1"]
    left, top, right, bottom = marks.first.locator("circle").nth(1).evaluate(BOX)
    small.page.mouse.move((left + right) / 2, (top + bottom) / 2)
    expect(small.page.locator("#card")).to_contain_text("Layers 6 to 8")
    assert small.count(".host.focusing") == 0


def test_measured_numbers_on_edges_are_explained_where_there_are_some(small, open_page):
    assert (
        small.page.locator("#effects").inner_text().endswith("measured change of attention without that edge")
    )
    plain = small_circuit().with_edges(tuple(replace(e, effect=None) for e in small_circuit().edges))
    page = open_page(plain)
    assert page.page.locator("#effects").is_hidden()
    assert page.count(".list-head .measured") == 0


def test_lists_say_their_order_and_what_their_numbers_are(small):
    heads = small.page.locator("#panel .list-head").all_inner_texts()
    assert [text.split("\n") for text in heads] == [
        ["strongest first", "contribution: logit difference"],
        ["by influence", "measured", "weight: attention"],
    ]
    small.node(1).click()
    assert "weight: attention" in small.page.locator("#panel .list-head").first.inner_text()


def numbers_under(page, title: str) -> list[float]:
    """The numbers of a list of the panel, as they are printed."""
    rows = page.page.locator("#panel section", has=page.page.locator("h3", has_text=title)).locator("li .row")
    return [float(text.replace("\u2212", "-")) for text in rows.locator(".weight").all_inner_texts()]


def test_what_goes_into_the_root_adds_up_with_what_is_not_shown(open_page):
    """Nine seeds and a value that others lower: eight are listed, and the rest is a line of its own."""
    circuit = many_seeds()
    folded = numbers_under(open_page(circuit), "Straight into the root")
    assert len(folded) == 4, "six MLPs are one line"
    assert sum(folded) == pytest.approx(circuit.root.value, abs=0.005 * len(folded))
    page = open_page(circuit, address=UNFOLDED)
    listed = numbers_under(page, "Straight into the root")
    assert len(listed) == 9
    assert sum(listed) == pytest.approx(circuit.root.value, abs=0.005 * len(listed)), (
        "three digits are printed"
    )
    assert page.page.locator("#panel li.rest").first.inner_text().split("\n")[0] == "not shown"
    page.node(0).click()  # the root: all nine, and what is left
    listed = numbers_under(page, "What leads to it")
    assert len(listed) == 10
    assert sum(listed) == pytest.approx(circuit.root.value, abs=0.005 * len(listed)), (
        "three digits are printed"
    )
    likelihood = replace(circuit, root=Likelihood((101,), value=-0.5))
    assert open_page(likelihood).count("#panel li.rest") == 0, (
        "integrated gradients do not sum to a log-likelihood"
    )


def test_lists_that_say_strongest_first_are_sorted_by_the_number_that_they_print(open_page):
    page = open_page(many_seeds(), address=UNFOLDED)
    for title in ("Straight into the root", "Strongest content"):
        sizes = [abs(value) for value in numbers_under(page, title)]
        sizes = sizes[:-1] if title.startswith("Straight") else sizes  # the last one is what is not shown
        assert len(sizes) > 5, title
        assert sizes == sorted(sizes, reverse=True), title
    heads = page.page.locator("#panel .list-head").all_inner_texts()
    assert not any(text.startswith("strongest first") and "weight" in text for text in heads)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_content_is_drawn_with_sides_and_kinds_of_its_own(open_page, scheme):
    circuit = content_circuit()
    page = open_page(circuit, scheme=scheme)
    assert page.count(".nodes .node") == len(circuit.nodes)
    for side in SIDES:
        assert page.count(f".edges .edge.{side}") == sum(edge.side == side for edge in circuit.edges)
    looks = {
        side: tuple(
            page.style(f".edges .edge.{side}:not(.opposing)", name) for name in ("stroke", "strokeDasharray")
        )
        for side in SIDES
    }
    assert looks["value"] == looks["input"] == looks["root"]
    assert looks["value"][1] == "none", "content is solid"
    assert len(set(looks.values())) == 3
    assert len({stroke for stroke, _ in looks.values()}) == 3
    assert page.count("#kinds .chip") == len({node.kind for node in circuit.nodes} - {"root"})
    page.node(2).click()
    panel = page.page.locator("#panel").inner_text()
    for part in ("MLP 5 @1", "What it reads", "L5H2 1->0", "Offset L5 @1", "What it wrote"):
        assert part in panel
    page.node(1).click()
    panel = page.page.locator("#panel").inner_text()
    for part in ("Causes of its query", "Causes of its key", "What it moves", "Rounding 5 @1"):
        assert part in panel
    assert page.errors == []


def test_the_legend_shows_only_the_sides_that_are_there(small, open_page):
    sides = "(all) => all.map((e) => e.dataset.name)"
    assert small.page.locator("#sides .chip").evaluate_all(sides) == ["query", "key", "root"]
    page = open_page([small_circuit(), content_circuit()])
    assert page.page.locator("#sides .chip").evaluate_all(sides) == list(SIDES)


@pytest.mark.parametrize(
    ("root", "shown"),
    [
        (LogitDifference((101,), (103,), value=3.5), ("“Mary” rather than “John”", "logit difference 3.50")),
        (Likelihood((101,), value=-0.5), ("“Mary”", "log-likelihood \u22120.500")),
        (Direction(9, value=2.0, label="a name is due"), ("a name is due", "projection 2.00")),
        (Heads(("L9H6",), value=0.75), ("the attention of L9H6", "attention 0.750")),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_every_root_says_what_it_measures(open_page, root, shown):
    page = open_page(replace(small_circuit(), root=root))
    assert page.page.locator("#question").inner_text() == f"Why {shown[0]}?"
    assert shown[1] in page.node(0).text_content()
    assert shown[1] in page.page.locator("#panel").inner_text()


# Looking


def test_hovering_a_node_shows_attention_tokens_and_influence(small):
    small.node(1).hover()
    expect(small.page.locator("#card")).to_be_visible()
    text = small.page.locator("#card").inner_text()
    for part in ("L9H6 7->1", "“ told”", "“ Mary”", "0.750", "without query", "0.200 (predicted)", "83%"):
        assert part in text


def test_hovering_an_edge_shows_weight_channels_tokens_description_and_effect(small):
    index = next(i for i, e in enumerate(small_circuit().edges) if e.effect)
    small.page.mouse.move(*small.page.evaluate(ALONE, index))
    card = small.page.locator("#card")
    expect(card).to_be_visible()
    text = small.page.locator("#card").inner_text()
    for part in (
        "L5H2 7->6",
        "query of L9H6 7->1",
        "“ told”",
        "0.300",
        "1, 4",
        "a name, again",
        "0.300 (attention)",
        "change of attention, edge removed\n\u22120.310",
        "change of logit difference, edge removed\n\u22121.25",
    ):
        assert part in text
    small.page.mouse.move(5, 5)
    expect(card).to_be_hidden()


def test_equal_channels_are_shown_as_one_and_positions_have_a_shape_of_their_own(open_page):
    circuit = small_circuit()
    index = next(i for i, e in enumerate(circuit.edges) if e.effect)
    edge = replace(circuit.edges[index], channels=(1, 2, 3, 7))
    nodes = [replace(n, equal_channels=((1, 2, 3),)) if n.id == edge.target else n for n in circuit.nodes]
    place = Node(99, "position", dest=circuit.node(edge.target).dest)
    edges = [*circuit.edges[:index], edge, *circuit.edges[index + 1 :]]
    edges.append(Edge(place.id, edge.target, "query", 0.1, (3,)))
    opened = open_page(replace(circuit, nodes=(*nodes, place), edges=tuple(edges)))
    opened.page.mouse.move(*opened.page.evaluate(ALONE, index))
    expect(opened.page.locator("#card")).to_be_visible()
    text = opened.page.locator("#card").inner_text()
    assert "1\u20133 (equal singular values: one channel), 7" in text
    assert opened.count(".node.position .body") == 2  # in the drawing, and in the legend
    assert opened.style(".node.position .body", "fill") == opened.style(".node.embedding .body", "fill")


def test_a_click_pins_a_node_dims_the_rest_and_lists_its_causes(small):
    small.node(2).click()
    small.page.mouse.move(5, 5)
    assert small.count(".lit .edge.on") == 3  # two causes, one effect
    assert small.count(".lit .edge.near") == 1  # the rest of its way to the root
    assert small.count(".lit .node") == 5  # itself, the three other ends, and the root
    assert small.count(".lit .node.self") == 1
    assert float(small.style(".chart", "opacity")) < 0.5
    assert float(small.style(".over", "opacity")) == 1
    panel = small.page.locator("#panel").inner_text()
    for part in (
        "L5H2 7->6",
        "Causes of its query",
        "MLP 3 @7",
        "Causes of its key",
        "Embedding @6",
        "What it causes",
        "L9H6 7->1",
    ):
        assert part in panel
    small.page.locator("#panel .row", has_text="MLP 3 @7").click()
    assert small.page.locator("#panel h2").inner_text() == "MLP 3 @7"
    small.page.locator("#panel [aria-label=Unpin]").click()
    assert small.count(".host.focusing") == 0
    assert "This circuit" in small.page.locator("#panel").inner_text()


def test_signals_that_act_on_competing_keys_are_listed(small):
    small.node(1).click()
    panel = small.page.locator("#panel").inner_text()
    assert "Acts on other keys only" in panel
    assert "L8H3" in panel
    assert "weight 0.0125, channels 2, 6" in panel


def test_hovering_the_axis_shows_the_token_in_full(open_page):
    page = open_page(small_circuit(("When", " incomprehensibilities", *TOKENS[2:])))
    page.page.mouse.move(*page.axis_token(1))
    expect(page.page.locator("#card")).to_be_visible()
    text = page.page.locator("#card").inner_text()
    assert "“ incomprehensibilities”" in text
    assert "101" in text
    assert "incomprehe…" in page.page.locator('.axis-token[data-position="1"]').text_content()


def test_the_keyboard_walks_along_edges_and_pins(small):
    page = small.page
    page.locator("#fit").focus()
    page.evaluate("document.querySelector('.chart .node[tabindex=\"0\"]').focus()")
    focused = "document.activeElement.dataset.id"
    assert page.evaluate(focused) == "0"
    page.keyboard.press("ArrowDown")
    assert page.evaluate(focused) == "1", "the strongest cause of the root"
    page.keyboard.press("ArrowDown")
    assert page.evaluate(focused) == "2"
    page.keyboard.press("ArrowRight")
    assert page.evaluate(focused) not in ("1", "2")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    assert page.locator("#panel h2").inner_text() == "L5H2 7->6"
    assert small.page.locator('.node[aria-pressed="true"]').get_attribute("data-id") == "2"
    assert (
        "L5H2 7->6, attention head at “ told”, reads “ John”, attention 0.500"
        in page.locator("#live").text_content()
    )
    page.keyboard.press("Escape")
    assert small.count(".host.pinned") == 0
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    assert page.evaluate(focused) == "0"


def test_only_one_node_is_in_the_tab_order_and_all_have_names(small):
    assert small.count('.node[tabindex="0"]') == 1
    names = small.page.locator(".nodes .node").evaluate_all(
        "(all) => all.map((e) => e.getAttribute('aria-label'))"
    )
    assert len(set(names)) == len(names) == 10
    unnamed = small.page.locator("button, input, select").evaluate_all(
        """(all) => all.filter((e) => !(e.textContent.trim() || e.ariaLabel || e.labels?.length))
          .map((e) => e.id)"""
    )
    assert unnamed == []


# Filters


@pytest.mark.parametrize("side", ["query", "key", "root"])
def test_a_side_can_be_hidden(small, side):
    small.redrawn(lambda: small.page.locator(f'#sides [data-name="{side}"]').click())
    kept = [edge for edge in small_circuit().edges if edge.side != side]
    assert small.count(f".edges .{side}") == 0
    assert small.count(".edges .edge") == len(kept)
    assert small.page.locator(f'#sides [data-name="{side}"]').get_attribute("aria-pressed") == "false"


def test_a_kind_can_be_hidden(small):
    small.redrawn(lambda: small.page.locator('#kinds [data-name="mlp"]').click())
    assert small.count(".nodes .mlp") == 0
    assert small.count(".edges .edge") == sum(
        small_circuit().node(e.source).kind != "mlp" for e in small_circuit().edges
    )


def test_layers_can_be_narrowed(small):
    small.redrawn(lambda: small.page.locator("#layer-low").fill("4"))
    circuit = small_circuit()
    low = {node.id for node in circuit.nodes if node.layer is not None and node.layer < 4}
    kept = [e for e in circuit.edges if not {e.source, e.target} & low]
    assert small.count(".edges .edge") == len(kept)


def test_weak_edges_can_be_hidden(small):
    small.slide("#weight", 70)  # squared: 49% of the heaviest
    kept = [e for e in small_circuit().edges if e.weight / (2.5 if e.side == "root" else 0.3) >= 0.49]
    assert small.count(".edges .edge") == len(kept)


@pytest.mark.parametrize(
    ("text", "ids"),
    [("L9H6", {1}), ("9.6", {1}), ("l5h2 7", {2}), ("mlp 3", {4}), ("mary", {3, 5, 6}), ("L9H7", set())],
)
def test_search_finds_heads_components_and_tokens(small, text, ids):
    small.page.locator("#search").fill(text)
    found = small.page.locator(".node.found").evaluate_all("(all) => all.map((e) => Number(e.dataset.id))")
    assert set(found) == ids
    small.page.keyboard.press("Enter")
    pinned = small.page.evaluate("window.headtrace.charts[0].pinned")
    assert (pinned in ids) if ids else (pinned is None)


def test_theme_follows_the_system_and_the_button(open_page):
    page = open_page(small_circuit(), scheme="dark")
    dark = page.style("body", "backgroundColor")
    page.page.locator("#theme").click()
    light = page.style("body", "backgroundColor")
    assert dark != light
    assert open_page(small_circuit(), scheme="light").style("body", "backgroundColor") == light


# Many edges


def test_a_large_circuit_shows_its_strongest_edges_and_bundles_the_rest(open_page):
    circuit = random_circuit(2000)
    page = open_page(circuit, address=UNFOLDED)
    drawn = page.page.locator(".edges .edge").evaluate_all("(all) => all.map((e) => Number(e.dataset.index))")
    flows = circuit.flows()
    strongest = sorted(range(2000), key=lambda i: (-flows[circuit.edges[i]], -circuit.edges[i].weight, i))
    assert set(drawn) == set(strongest[:110])
    assert 0 < page.count(".bundle") < 800
    assert page.count(".nodes .node") == len(circuit.nodes)
    page.slide("#detail", 1000)
    assert page.count(".edges .edge") == 2000
    assert page.count(".bundle") == 0
    assert page.errors == []


def test_pinning_a_dot_brings_out_edges_that_were_bundled(open_page):
    circuit = random_circuit(2000)
    page = open_page(circuit, address=UNFOLDED)
    dot = page.page.locator(".node.dot.head").first
    node = circuit.node(int(dot.get_attribute("data-id")))
    page.page.evaluate(f"document.querySelector('.node[data-id=\"{node.id}\"]').focus()")
    page.page.keyboard.press("Enter")
    assert page.count(".lit .edge.on") == len(circuit.edges_into(node)) + len(circuit.edges_from(node))


def test_labels_of_a_large_circuit_do_not_overlap(open_page):
    page = open_page(random_circuit(1500))
    tags = page.page.locator(".tag").evaluate_all(
        "(all) => all.map((e) => ['x', 'y', 'textLength'].map((name) => Number(e.getAttribute(name))))"
    )
    size = float(page.style(".tag", "fontSize").removesuffix("px"))
    assert len(tags) > 10
    for (x, y, width), (other_x, other_y, other_width) in combinations(tags, 2):
        beside = abs(x - other_x) >= (width + other_width) / 2
        assert beside or abs(y - other_y) >= size
    widths = page.page.locator(".tag").evaluate_all("(all) => all.map((e) => e.getComputedTextLength())")
    assert widths == pytest.approx([width for *_, width in tags], rel=0.01), "whatever the font"


def test_from_afar_every_head_has_a_name_or_is_filled_and_gets_its_name_when_pointed_at(open_page):
    page = open_page(random_circuit(1500), width=1000)
    tags, nameless = page.page.locator(".chart .tag.head"), page.page.locator(".chart .nameless")
    names = tags.all_text_contents()
    assert len(names) + nameless.count() == page.count(".nodes .node.head:not(.dot)")
    assert {re.sub(r"\d+", "", name) for name in names} == {"LH", "H"}, (
        "short names where whole ones do not fit"
    )
    assert min(tags.evaluate_all("(all) => all.map((e) => e.getBBox().x)")) >= 40, "none is under the axis"
    box = nameless.first.bounding_box()
    at = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    said = page.page.evaluate("([x, y]) => document.elementFromPoint(x, y).closest('.node').ariaLabel", at)
    page.page.mouse.move(*at)
    expect(page.page.locator(".over .tag").get_by_text(said.split()[0], exact=True)).to_be_attached()


def test_zoom_brings_out_captions_and_fit_goes_back(open_page):
    page = open_page(random_circuit(1500))
    assert page.count(".host.far") == 1
    whole = page.page.locator(".chart .world").get_attribute("transform")
    for _ in range(8):
        page.page.locator("#closer").click()
    assert page.count(".host.far") == 0
    page.page.locator("#fit").click()
    assert page.page.locator(".chart .world").get_attribute("transform") == whole


# Several circuits


def test_two_circuits_side_by_side_mark_shared_and_exclusive_edges(open_page):
    a = small_circuit()
    b = a.with_edges(a.edges[:6])
    page = open_page([a, b], compare=True)
    assert page.count(".frame") == 2
    assert page.count('.host[data-side="A"] .edge.shared') == 6
    assert page.count('.host[data-side="A"] .edge.only') == 5
    assert page.count('.host[data-side="B"] .edge.only') == 0
    assert page.style('.host[data-side="A"] .edges .query.shared', "stroke") != page.style(
        '.host[data-side="A"] .edges .query.only', "stroke"
    )
    assert "6 shared edges, 5 only here" in page.page.locator("#panel").inner_text()
    page.redrawn(lambda: page.page.locator("#match").select_option("only"))
    assert page.count('.host[data-side="A"] .edges .edge') == 5
    assert page.errors == []


def test_circuits_of_different_prompts_are_matched_by_component(open_page):
    a = small_circuit()
    moved = tuple(
        replace(n, dest=n.dest - 1, src=None if n.src is None else n.src - 1) if n.dest and n.dest > 1 else n
        for n in a.nodes
    )
    b = replace(a, nodes=moved, prompt=replace(a.prompt, token_ids=tuple(range(8))))
    page = open_page([a, b], compare=True)
    assert page.count(".edges .edge.only") == 0
    assert "whatever the position" in page.page.locator("#panel").inner_text()


def test_a_switch_changes_the_circuit(open_page):
    page = open_page(
        [small_circuit(), random_circuit(60, n_tokens=6), random_circuit(30, n_tokens=6, seed=4)],
        address=UNFOLDED,
    )
    assert page.count(".frame") == 1
    page.redrawn(lambda: page.page.locator("#first").select_option("1"))
    assert page.count(".edges .edge") == 60
    page.redrawn(lambda: page.page.locator("#second").select_option("2"))
    assert page.count(".frame") == 2
    page.redrawn(lambda: page.page.locator("#second").select_option(""))
    assert page.count(".frame") == 1
    assert page.errors == []


def test_a_narrow_window_shows_everything_without_scrolling_sideways(open_page):
    page = open_page(small_circuit(), width=380, height=800)
    assert page.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.count(".edges .edge") == 11
    page.page.locator("#toolbar summary").click()
    assert page.page.locator("#detail").is_visible()
    assert page.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
