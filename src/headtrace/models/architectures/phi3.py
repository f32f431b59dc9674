"""Phi-3, Phi-3.5 and Phi-4: Llama with fused projections in attention and MLP."""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures import llama
from headtrace.models.architectures.facts import fused_gated_mlp, fused_linear

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    name="Phi-3 / Phi-4",
    model_type="phi3",
    projections=fused_linear("qkv_proj", "o_proj"),
    mlp_parts=fused_gated_mlp(),
)
