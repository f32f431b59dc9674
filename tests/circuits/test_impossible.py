"""A circuit file that says what cannot be is refused when it is loaded, with the field by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

import headtrace
from headtrace.circuits.files import dumps, from_json
from headtrace.errors import InputError
from tests.conftest import IOI


@cache
def written() -> str:
    return dumps(headtrace.Tracer(headtrace.load("builtin")).trace(IOI, answer=" Mary", wrong=" John"))


def head(data: Any) -> Any:
    return next(node for node in data["nodes"] if node["kind"] == "head" and node["expanded"])


def signal(data: Any) -> Any:
    return next(edge for edge in data["edges"] if edge["channels"])


def put(part: Callable[[Any], Any], key: str, value: Any) -> Callable[[Any], None]:
    return lambda data: part(data).update({key: value})


def settings(data: Any) -> Any:
    return data["method"]["settings"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (put(head, "attention", 7.5), r"nodes\[\d+\].attention: expected a number from 0 to 1, got 7.5"),
        (put(head, "attention", -0.2), r"nodes\[\d+\].attention: expected a number from 0 to 1"),
        (put(head, "influence", 55.0), r"nodes\[\d+\].influence: expected a number from 0 to 1"),
        (put(head, "threshold", 2.0), r"nodes\[\d+\].threshold: expected a number from 0 to 1"),
        (put(head, "predicted", {"query": 3.0}), r"nodes\[\d+\].predicted.query: expected a number from 0"),
        (put(head, "layer", 10**12), r"nodes\[\d+\].layer: expected a number below 100,000"),
        (put(head, "group", [0, 0]), r"nodes\[\d+\].group\[1\]: expected one that is not listed yet, got 0"),
        (put(signal, "channels", [5, 5]), r"edges\[\d+\].channels\[1\]: expected one that is not listed yet"),
        (lambda data: data.update(influence_kept=941.0), "influence_kept: expected a number from 0 to 1"),
        (
            lambda data: data["root"].update(answer=[3, 3]),
            r"root.answer\[1\]: expected one that is not listed",
        ),
        (put(settings, "paths", "completex"), "method.settings.paths: expected one of attention, content"),
        (
            put(settings, "max_firings", 0),
            "method.settings.max_firings: expected a whole number of at least 1",
        ),
        (put(settings, "max_firings", 2.5), "method.settings.max_firings: expected a whole number"),
        (
            put(settings, "min_influence", 1e300),
            "method.settings.min_influence: expected a number from 0 to 1",
        ),
        (put(settings, "dtype", "bfloat17"), "method.settings.dtype: expected one of bfloat16, float16"),
        (put(settings, "paths", "difference"), "difference: expected an object"),
    ],
)
def test_what_cannot_be_is_refused_on_loading(edit: Callable[[Any], None], message: str) -> None:
    data = json.loads(written())
    edit(data)
    with pytest.raises(InputError, match=message):
        from_json(data)
