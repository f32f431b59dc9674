"""The page on the circuit file says what the types say."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from headtrace.circuits import Circuit, CompetingKeySignal, Edge, MethodInfo, ModelInfo, Node, PromptInfo
from headtrace.circuits.describe import describe_schema, example, field_docs
from headtrace.circuits.files import loads
from headtrace.roots import ROOTS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "circuit-file.md"


def test_the_page_is_what_the_types_say():
    message = "make it anew: python -m headtrace.circuits.describe > docs/reference/circuit-file.md"
    assert PAGE.read_text(encoding="utf-8") == describe_schema(), message


@pytest.mark.parametrize(
    "shape", [Circuit, ModelInfo, PromptInfo, MethodInfo, CompetingKeySignal, Node, Edge, *ROOTS.values()]
)
def test_every_field_has_its_docstring(shape):
    # The kind of a root is the heading of its table; a likelihood has nothing to be compared with.
    expected = {field.name for field in fields(shape)} - (
        {"kind", "wrong"} if shape in ROOTS.values() else set()
    )
    assert expected <= field_docs(shape).keys()


def test_the_example_of_the_page_loads():
    text = re.search(r"```json\n(.*?)```", describe_schema(), re.DOTALL)[1]
    assert loads(text) == example()
    assert list(json.loads(text))[-2:] == ["nodes", "edges"]
