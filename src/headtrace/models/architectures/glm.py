"""GLM: Llama with interleaved rotary pairs and a fused MLP."""

from __future__ import annotations

from dataclasses import replace

from headtrace.models.architectures import llama
from headtrace.models.architectures.facts import fused_gated_mlp

ARCHITECTURE = replace(
    llama.ARCHITECTURE,
    name="GLM",
    model_type="glm",
    mlp_parts=fused_gated_mlp(),
    rotary_pairs="interleaved",
)
