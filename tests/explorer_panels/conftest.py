"""One session with a small model and one recorded prompt, for all panels."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest

import headtrace
from headtrace.explorer.panels import Session
from headtrace.explorer.panels.requests import PromptRequest
from tests.conftest import IOI


@pytest.fixture(scope="package")
def model():
    return headtrace.load("builtin")


@pytest.fixture(scope="package")
def session(model):
    return Session([model, model])


@pytest.fixture(scope="package")
def tracer(session):
    return session.tracers[0]


@pytest.fixture(scope="package")
def prompt():
    return PromptRequest(text=IOI)


@pytest.fixture(scope="package")
def root():
    return {"answer": " Mary", "wrong": " John"}


@pytest.fixture(scope="package")
def recorded(session, prompt):
    return session.record(prompt)


@pytest.fixture(scope="package")
def recording(recorded):
    return recorded.recording


@pytest.fixture
def run_lines(model, monkeypatch):
    """Runs a panel's Python lines, with the loaded model, and gives the names that they define."""
    monkeypatch.setattr(headtrace, "load", lambda *_, **__: model, raising=False)

    def run(lines: str) -> dict[str, Any]:
        names: dict[str, Any] = {}
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(lines, "snippet", "exec"), names)
        return names

    return run
