"""Every test of a known circuit runs on all of them."""

from __future__ import annotations

import pytest

from tests.truth.known import KNOWN, Known

collect_ignore = ["make_compiled.py"]  # it needs tracr, which no test does


@pytest.fixture(params=KNOWN.values(), ids=str)
def known(request: pytest.FixtureRequest) -> Known:
    return request.param
