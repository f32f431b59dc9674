"""Difference circuits on the page: what was compared, measured importance as the bars, flow against the difference."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

import headtrace
from headtrace.circuits import Circuit
from tests.circuits.made_up import complete_circuit

pytestmark = pytest.mark.browser
MARY = "When Mary and John went to the store, John gave a drink to"
FLIPPED = "When Mary and John went to the store, Mary gave a drink to"


@pytest.fixture(scope="module")
def tracer() -> headtrace.Tracer:
    return headtrace.Tracer(headtrace.load("builtin"), max_firings=None, min_influence=0.001)


@pytest.fixture(scope="module")
def given(tracer: headtrace.Tracer) -> Circuit:
    return tracer.trace(MARY, answer=" Mary", wrong=" John", paths="difference", counterfactual=FLIPPED)


def numbers(page) -> dict[str, str]:
    return page.page.locator(".axis-token").evaluate_all(
        """(all) => Object.fromEntries(all.map((e) =>
             [e.dataset.position, e.querySelector(".amount")?.textContent ?? ""]))"""
    )


def test_the_page_says_what_was_compared_and_how_much_is_shown(open_page, given):
    page = open_page(given)
    said = page.page.locator(".compared")
    expect(said).to_contain_text(FLIPPED)
    expect(said).to_contain_text(re.compile(r"6\.62.* here, .*7\.8.* there, difference \+14\.\d"))
    expect(said).to_contain_text("of it")
    assert page.page.locator(".amount-bar").count() == 1, "one token differs, and carries all of the flow"
    assert numbers(page)["10"].strip().startswith("+14")


def test_measured_importance_is_what_the_bars_show(open_page, tracer):
    found = tracer.trace(MARY, paths="difference")
    page = open_page(found)
    expect(page.page.locator("body")).to_contain_text(
        "What matters (measured: mean loss when the word is exchanged)"
    )
    assert page.page.locator(".amount-bar[data-position='0']").count() == 0
    importance = found.prompt.importance
    best = max(range(len(importance)), key=lambda i: importance[i] or 0.0)
    shown = {
        place: float(text.replace("\u2212", "-")) for place, text in numbers(page).items() if text.strip()
    }
    assert max(shown, key=lambda place: shown[place]) == str(best)


def test_flow_against_the_difference_is_marked_on_every_side(open_page, given):
    page = open_page(given)
    against = {i for i, edge in enumerate(given.edges) if edge.weight * given.difference.change < 0}
    drawn = page.page.locator(".edges .edge").evaluate_all(
        "(all) => all.map((e) => [Number(e.dataset.index), e.classList.contains('opposing')])"
    )
    assert any(opposing for _, opposing in drawn)
    assert all(opposing == (index in against) for index, opposing in drawn)
    expect(page.page.locator("#legend [data-name=opposing]")).to_contain_text("flows against the difference")


def test_what_rests_on_the_first_token_is_told_apart(open_page):
    """Constants and sinks are no word of the prompt."""
    circuit = complete_circuit()
    page = open_page(circuit)
    assert circuit.prompt.contributions[0] != 0
    assert page.page.locator(".amount-bar[data-position='0']").count() == 0
    expect(page.page.locator(".constants")).to_contain_text(
        "constants and sinks, which rest on the first token"
    )
