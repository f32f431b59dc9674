"""The numbers that the tutorial prints are those that its commands give."""

from __future__ import annotations

import re

import pytest

import headtrace
from headtrace.interpret import interpret
from tests.documented import ROOT, not_printed

pytestmark = pytest.mark.slow

PROMPT = "Then, Claire and Jack had a great time at the kitchen. Claire gave a computer to"


@pytest.fixture(scope="module")
def found():
    model = headtrace.load("builtin")
    return interpret(headtrace.Tracer(model).trace(PROMPT, " Jack", " Claire"), model, "task:ioi")


def test_the_tutorial_prints_what_comes_out(found) -> None:
    page = (ROOT / "docs" / "tutorial" / "population.md").read_text(encoding="utf-8")
    block = next(
        each for each in re.findall(r"```text\n(.*?)```", page, re.DOTALL) if "with words; supported" in each
    )
    assert not_printed("\n".join(block.splitlines()[:2]), found.summary()) == []
    assert PROMPT in page
    for each in found.signals:
        if each.supported:
            assert each.description is not None
    words = {f"{each.signal.name}: {each.description.text}" for each in found.signals if each.supported}
    listed = re.findall(r"supported +AUROC \S+ and \S+ +(L.*)", block)
    assert listed
    assert set(listed) <= words


def test_its_controls_are_at_or_below_the_rate(found) -> None:
    assert found.controls.above_rate == {}
    assert found.controls.different_words.count == found.controls.shuffled_labels.count == 0
    assert found.controls.shuffled_words.value is not None
    assert found.controls.shuffled_words.value <= 0.05 < (found.fraction.value or 0)
