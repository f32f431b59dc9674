"""One small model and one recorded prompt for all views."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest

import headtrace
from headtrace.explorer.server.schemas import PromptRequest, RootRequest
from headtrace.explorer.views.prompts import record
from tests.conftest import IOI


@pytest.fixture(scope="package")
def model():
    return headtrace.load("builtin")


@pytest.fixture(scope="package")
def tracer(model):
    return headtrace.Tracer(model)


@pytest.fixture(scope="package")
def prompt():
    return PromptRequest(text=IOI)


@pytest.fixture(scope="package")
def root():
    return RootRequest(answer=" Mary", wrong=" John")


@pytest.fixture(scope="package")
def recording(model, prompt):
    return record(model, prompt)


@pytest.fixture
def run_lines(model, monkeypatch):
    """Runs a view's Python lines, with the loaded model, and gives the names that they define."""
    monkeypatch.setattr(headtrace, "load", lambda *_, **__: model, raising=False)

    def run(lines: str) -> dict[str, Any]:
        names: dict[str, Any] = {}
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(lines, "snippet", "exec"), names)
        return names

    return run
