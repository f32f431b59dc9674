"""Plugin: leaves out the tests that the run with checked shapes has (``tests/shapes.py``), so that none runs twice."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from zlib import crc32

import pytest

HERE = Path(__file__).parent
SHAPED = {"invariants": 5, "oracle": 2, "tracing": 0, "causal": 0, "channels": 0}
"""Folders whose tests run with checked shapes: one case of each test (the cases call the same functions), and where
there is a number, every so many cases besides (the cases are architectures there)."""
REPEATED = ("test_fuzz_verdicts.py", "test_falsified.py")
"""Files in them whose tests call over and over, with other numbers, what the tests of other files call."""


def with_shapes(items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests that run with checked shapes. What needs real weights, or passes a wrong type on purpose, does not.

    Which cases of a test they are depends on the test's name, so that all architectures have their turn.
    """
    cases: defaultdict[tuple[str, str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        folder = item.path.relative_to(HERE).parts[0] if item.path.is_relative_to(HERE) else ""
        ill_suited = any(item.get_closest_marker(name) for name in ("smollm2", "ill_typed"))
        if folder in SHAPED and item.path.name not in REPEATED and not ill_suited:
            cases[folder, item.path.as_posix(), item.nodeid.split("::", 1)[1].split("[", 1)[0]].append(item)
    chosen: list[pytest.Item] = []
    for (folder, _, name), mine in cases.items():
        first = crc32(name.encode()) % len(mine)
        chosen += [mine[(first + k) % len(mine)] for k in range(0, len(mine), SHAPED[folder] or len(mine))]
    return chosen


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    elsewhere = set(with_shapes(items))
    config.hook.pytest_deselected(items=[item for item in items if item in elsewhere])
    items[:] = [item for item in items if item not in elsewhere]
