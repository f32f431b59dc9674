from __future__ import annotations

from collections.abc import Iterator

import pytest

import headtrace
from headtrace.explorer.panels import Settings
from tests.explorer_server.live import Live, live


@pytest.fixture(scope="session")
def builtin() -> headtrace.Model:
    return headtrace.load("builtin")


@pytest.fixture(scope="session")
def server(builtin) -> Iterator[Live]:
    """Shared: a test that needs limits of its own starts one of its own."""
    with live([builtin, builtin], Settings(max_tokens=40)) as found:
        yield found
