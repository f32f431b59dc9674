"""Qwen2-MoE: Qwen2 with a mixture of experts, and one expert that every token passes."""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures import llama
from headtrace.models.architectures.facts import expert_mlp

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    name="Qwen2-MoE",
    model_type="qwen2_moe",
    mlp_parts=expert_mlp(),
    experts=True,
)
