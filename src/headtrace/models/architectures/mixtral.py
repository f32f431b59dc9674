"""Mixtral: Mistral with a mixture of experts in every block."""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures import llama
from headtrace.models.architectures.facts import expert_mlp

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    name="Mixtral",
    model_type="mixtral",
    mlp_parts=expert_mlp(),
    experts=True,
)
