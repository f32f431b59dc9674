"""The architectures that headtrace can decompose exactly: one file of facts each.

To add one, write such a file and list it here; `docs/how-to/add-an-architecture.md` goes through it.
"""

from __future__ import annotations

from typing import Any

from headtrace.errors import UnsupportedModelError
from headtrace.models.architectures import (
    gemma2,
    gemma3,
    gpt2,
    gpt_neox,
    llama,
    mistral,
    olmo2,
    opt,
    qwen2,
    qwen3,
)
from headtrace.models.architectures.facts import Architecture, Projections

ARCHITECTURES: dict[str, Architecture] = {
    module.ARCHITECTURE.model_type: module.ARCHITECTURE
    for module in (gpt2, opt, gpt_neox, llama, mistral, qwen2, qwen3, gemma2, gemma3, olmo2)
}

HOW_TO_ADD = "docs/how-to/add-an-architecture.md"


def find_architecture(config: Any) -> Architecture:
    """The facts for a transformers config, or an error that names what was given and what is supported."""
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        supported = ", ".join(f"{a.name} ({a.model_type})" for a in ARCHITECTURES.values())
        raise UnsupportedModelError(
            f"The architecture {config.model_type!r} is not supported. Supported: {supported}. "
            f"{HOW_TO_ADD} explains how to add one: it takes one file of facts."
        )
    reason = architecture.refuse(config)
    if reason is not None:
        raise UnsupportedModelError(
            f"This {architecture.name} model cannot be decomposed exactly: {reason}. "
            "Choose another checkpoint of the family."
        )
    return architecture


__all__ = ["ARCHITECTURES", "HOW_TO_ADD", "Architecture", "Projections", "find_architecture"]
