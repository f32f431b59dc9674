"""Mechanisms of answers of several tokens, and of prompts that fill a screen."""

from __future__ import annotations

from dataclasses import replace

import pytest

import headtrace
from tests.conftest import IOI

FLIPPED = IOI.replace("John gave", "Mary gave")


@pytest.fixture(scope="module")
def builtin() -> headtrace.Model:
    return headtrace.load("builtin")


def test_why_takes_continuations(builtin: headtrace.Model) -> None:
    found = headtrace.why(builtin, IOI, answer=" Mary and", wrong=" John and", budget=40)
    assert found.steps
    assert sum(line.amount for line in found.ledger) == pytest.approx(found.whole, rel=1e-3)
    assert found.circuit.root.rest is not None


def test_long_prompts_are_shortened_where_a_mechanism_is_shown(builtin: headtrace.Model) -> None:
    found = headtrace.Tracer(builtin).trace(IOI, " Mary", " John", paths="difference", counterfactual=FLIPPED)
    compared = replace(found.difference, prompts=(replace(found.difference.prompts[0], text=FLIPPED * 50),))
    long = replace(found, prompt=replace(found.prompt, text=IOI * 50), difference=compared)
    first, second = long.mechanism().summary().splitlines()[:2]
    assert "characters]" in first
    assert "characters]" in second
    assert max(len(first), len(second)) < 500
