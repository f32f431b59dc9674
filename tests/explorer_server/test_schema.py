"""Requests made up from the server's own OpenAPI schema: none brings it down, and answers are as the schema says."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
EXAMPLES = int(os.environ.get("HEADTRACE_SCHEMA_EXAMPLES", "5"))
"""Of each route, good and bad; by hand, far more."""


IOI = "When Mary and John went to the store, John gave a drink to"
SIZES = {
    "layer": 3,
    "head": 4,
    "dest": 15,
    "src": 15,
    "channel": 32,
    "token": 60,
    "generate": 3,
    "model": 2,
}


def real(value: Any, recording: str, name: str = "") -> Any:
    """A made-up request about a recording and places that exist, to reach what lies behind the first checks."""
    match value:
        case dict():
            return {key: real(each, recording, key) for key, each in value.items()}
        case list():
            return [real(each, recording, name.removesuffix("s")) for each in value]
        case bool() | None:
            return value
        case int() if name in SIZES:
            return value % SIZES[name]
        case int() | str() if name in ("answer", "wrong"):
            return " Mary" if name == "answer" else " John"
        case str() if name == "recording":
            return recording
        case str() if name in ("text", "counterfactual"):
            return IOI
    return value


@pytest.mark.filterwarnings("ignore")
def test_made_up_requests_get_answers_that_the_schema_knows(server) -> None:
    schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{server.port}/api/openapi.json")
    recording = server.post("/api/record", {"text": IOI}).json()["id"]
    job = server.about("trace", {"text": IOI}, {"answer": " Mary"}).json()["id"]
    statuses: Counter[int] = Counter()

    def check(case: schemathesis.Case) -> None:
        answer = case.call(timeout=60)
        statuses[answer.status_code] += 1
        case.validate_response(answer, checks=CHECKS)

    def check_real(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):
            case.body = real(case.body, recording)
        if "id" in (case.path_parameters or {}) and case.method != "DELETE":
            case.path_parameters["id"] = recording if "recordings" in case.path else job
        check(case)

    bounded = settings(
        max_examples=EXAMPLES,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=EXAMPLES < 100,
        database=None,
    )
    for found in schema.get_all_operations():
        for mode in GenerationMode:
            made = found.ok().as_strategy(generation_mode=mode)
            for checked in (check, check_real):
                with suppress(Unsatisfiable):  # a route without parameters cannot be asked wrongly
                    bounded(given(made)(checked))()
    print(dict(statuses))
    assert server.logged == []
    assert statuses[200] + statuses[202] > EXAMPLES
    assert not [status for status in statuses if status >= 500]


def test_the_schema_names_the_error_of_every_status(server) -> None:
    for path, operations in server.app.openapi()["paths"].items():
        for operation in operations.values():
            for status, answer in operation["responses"].items():
                if int(status) >= 400:
                    shown = answer["content"]["application/json"]["schema"]
                    assert shown == {"$ref": "#/components/schemas/ErrorView"}, (path, status)
