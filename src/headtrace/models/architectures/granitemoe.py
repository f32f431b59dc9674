"""Granite-MoE: Granite with a mixture of experts in every block."""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures import granite
from headtrace.models.architectures.facts import expert_mlp

ARCHITECTURE = replace(
    granite.ARCHITECTURE,
    name="Granite-MoE",
    model_type="granitemoe",
    mlp="block_sparse_moe",
    mlp_write="block_sparse_moe",
    mlp_parts=expert_mlp("block_sparse_moe", "router"),
    experts=True,
)
