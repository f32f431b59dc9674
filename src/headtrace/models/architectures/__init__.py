"""The architectures that headtrace can decompose exactly: one file of facts each.

To add one here, write such a file and list it below. A package of your own adds one without a change here: call
``register_architecture(Architecture(...))``, or name the ``Architecture`` in the entry point group
``headtrace.architectures``. `docs/how-to/add-an-architecture.md` goes through both.
"""

from __future__ import annotations

from typing import Any

from headtrace.errors import UnsupportedModelError
from headtrace.models.architectures import (
    apertus,
    arcee,
    biogpt,
    codegen,
    cohere,
    cohere2,
    cwm,
    ernie4_5,
    exaone4,
    falcon,
    gemma,
    gemma2,
    gemma3,
    gemma3_multimodal,
    glm,
    glm4,
    gpt2,
    gpt_bigcode,
    gpt_neo,
    gpt_neox,
    gptj,
    granite,
    granitemoe,
    helium,
    hyperclovax,
    jais2,
    llama,
    ministral,
    mistral,
    mixtral,
    nanochat,
    nemotron,
    olmo,
    olmo2,
    olmo3,
    olmoe,
    opt,
    phi,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
    vaultgemma,
)
from headtrace.models.architectures.facts import Architecture, Projections
from headtrace.models.architectures.unfit import why_unfit
from headtrace.registry import Registry

ARCHITECTURES: Registry[Architecture] = Registry(
    "architecture",
    "headtrace.architectures",
    {
        module.ARCHITECTURE.model_type: module.ARCHITECTURE
        for module in (
            gpt2,
            opt,
            gpt_neox,
            llama,
            mistral,
            qwen2,
            qwen3,
            gemma2,
            gemma3,
            olmo2,
            falcon,
            gpt_neo,
            codegen,
            gptj,
            apertus,
            arcee,
            biogpt,
            cohere,
            cohere2,
            cwm,
            ernie4_5,
            exaone4,
            gemma,
            gemma3_multimodal,
            glm,
            glm4,
            gpt_bigcode,
            granite,
            granitemoe,
            helium,
            hyperclovax,
            jais2,
            ministral,
            mixtral,
            nanochat,
            nemotron,
            olmo,
            olmo3,
            olmoe,
            phi,
            phi3,
            qwen2_moe,
            qwen3_moe,
            seed_oss,
            smollm3,
            stablelm,
            starcoder2,
            vaultgemma,
        )
    },
    check=lambda found: isinstance(found, Architecture),
)
"""Every known architecture by its ``model_type``; those of installed packages are found by entry point."""

HOW_TO_ADD = "docs/how-to/add-an-architecture.md"


def register_architecture(architecture: Architecture) -> None:
    """Make a model family known under its ``model_type``, for this process."""
    ARCHITECTURES.add(architecture.model_type, architecture)


def find_architecture(config: Any) -> Architecture:
    """The facts for a transformers config, or an error that names what was given and what is supported."""
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        reason = why_unfit(config)
        advice = f"{HOW_TO_ADD} explains how to add one: it takes one file of facts."
        raise UnsupportedModelError(
            f"The architecture {config.model_type!r} is not supported{'' if reason is None else f': {reason}'}. "
            f"Supported: {', '.join(sorted(ARCHITECTURES))}.{f' {advice}' if reason is None else ''}"
        )
    text = config.get_text_config()
    reason = architecture.refuse(text)
    if reason is not None:
        raise UnsupportedModelError(
            f"This {architecture.name} model cannot be decomposed exactly: {reason}. "
            "Choose another checkpoint of the family."
        )
    return architecture.of(text)


__all__ = [
    "ARCHITECTURES",
    "HOW_TO_ADD",
    "Architecture",
    "Projections",
    "find_architecture",
    "register_architecture",
]
