"""Requests made up from the server's own OpenAPI schema: none brings it down, and answers are as the schema says."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, settings

schemathesis = pytest.importorskip("schemathesis")

from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
EXAMPLES = int(os.environ.get("HEADTRACE_SCHEMA_EXAMPLES", "6"))
"""Of each route and kind; by hand, far more."""


@pytest.fixture(scope="module")
def interface(server):
    return schemathesis.openapi.from_url(f"http://127.0.0.1:{server.port}/api/openapi.json")


@pytest.mark.filterwarnings("ignore")
@schemathesis.pytest.from_fixture("interface").parametrize()
@settings(
    max_examples=EXAMPLES,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=EXAMPLES < 100,
)
def test_made_up_requests_get_answers_that_the_schema_knows(case, server) -> None:
    case.call_and_validate(checks=CHECKS)
    assert server.logged == []


def test_the_schema_names_the_error_of_every_status(server) -> None:
    for path, operations in server.app.openapi()["paths"].items():
        for operation in operations.values():
            for status, answer in operation["responses"].items():
                if int(status) >= 400:
                    shown = answer["content"]["application/json"]["schema"]
                    assert shown == {"$ref": "#/components/schemas/ErrorView"}, (path, status)
