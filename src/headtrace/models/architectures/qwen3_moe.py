"""Qwen3-MoE: Qwen3 with a mixture of experts in some or all blocks."""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures import qwen3
from headtrace.models.architectures.facts import expert_mlp

ARCHITECTURE = replace(
    qwen3.ARCHITECTURE,
    name="Qwen3-MoE",
    model_type="qwen3_moe",
    mlp_parts=expert_mlp(),
    experts=True,
)
