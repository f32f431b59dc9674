"""The vocabularies that every task must work with."""

from __future__ import annotations

from typing import Any

import pytest

import headtrace
from tests.tasks import vocabularies

KINDS = [
    "gpt2",
    "llama",
    "llama with end token",
    "builtin",
    pytest.param("smollm2", marks=pytest.mark.smollm2),
]


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return vocabularies.make(request.param)


@pytest.fixture(scope="session")
def gpt2_tokenizer() -> Any:
    return vocabularies.make("gpt2")


@pytest.fixture(scope="session")
def llama_tokenizer() -> Any:
    return vocabularies.make("llama")


@pytest.fixture(scope="session")
def builtin_tokenizer() -> Any:
    return vocabularies.make("builtin")


@pytest.fixture(scope="session")
def builtin_model() -> headtrace.Model:
    return headtrace.load("builtin")
