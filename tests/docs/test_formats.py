"""The pages on files name every table, column and key that the code writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headtrace.causal import Report, Tolerance
from headtrace.causal.effects import edge_table
from headtrace.circuits.describe import example
from headtrace.families import FamiliesFile
from headtrace.interpret import atlas, interpretation
from headtrace.interpret.head_roles import MEASURES
from headtrace.interpret.scan import Tally
from headtrace.models import Recording
from headtrace.runs import manifest
from tests.documented import ROOT

FORMATS = ROOT / "docs" / "reference" / "formats"


def report() -> Report:
    nothing = {"metric": None, "clean_metric": None, "reach": "", "scope": "", "controls": 0, "seed": 0}
    return Report(
        circuit=example(),
        tolerance=Tolerance("float32", 1, 1e-5),
        failures=(),
        checked={},
        not_checked=(),
        predictions=(),
        effects=(),
        **nothing,
    )


CASES = {
    "run": [
        *manifest.TABLES,
        *manifest.plan_schema([], []),
        *(name for name in manifest.empty_table("prompts", [], []).column_names),
        *(name for name in manifest.empty_table("edges", [], []).column_names if name.startswith("source_")),
        *manifest.empty_table("signals", [], []).column_names,
        *manifest.empty_table("steps", [], []).column_names,
        *manifest.empty_table("mechanisms", [], []).column_names,
    ],
    "recording": list(Recording.FIELDS),
    "verification": [*report().to_dict(), *edge_table([]).columns],
    "families": [name for name in FamiliesFile.__dataclass_fields__ if name not in ("more",)],
    "atlas": [
        *atlas.PAIR_COLUMNS,
        *MEASURES,
        *Tally.__dataclass_fields__,
        *interpretation.COLUMNS,
    ],
}


def named(page: Path) -> set[str]:
    """What a page names: code on it, and fields of classes whose tables the site puts in."""
    text = page.read_text(encoding="utf-8")
    return set(re.findall(r"`([^`\n]+)`", text)) | _in_tables(text)


def _in_tables(text: str) -> set[str]:
    from importlib import import_module
    from typing import get_type_hints

    found: set[str] = set()
    for path in re.findall(r"<!-- fields of ([\w.]+)", text):
        module, _, name = path.rpartition(".")
        found |= get_type_hints(getattr(import_module(module), name)).keys()
    return found


@pytest.mark.parametrize("page", CASES)
def test_the_page_names_everything_that_is_written(page: str) -> None:
    told = named(FORMATS / f"{page}.md")
    assert [name for name in CASES[page] if name not in told] == []
