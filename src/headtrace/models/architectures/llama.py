"""Llama (and SmolLM2): RMSNorm, rotary positions, grouped queries."""

from __future__ import annotations

from headtrace.models.architectures.facts import Architecture, gated_mlp, separate_linears

ARCHITECTURE = Architecture(
    name="Llama",
    model_type="llama",
    layers="model.layers",
    final_norm="model.norm",
    attention="self_attn",
    attention_norm="input_layernorm",
    mlp="mlp",
    mlp_norm="post_attention_layernorm",
    mlp_write="mlp",
    mlp_parts=gated_mlp(),
    projections=separate_linears(),
)
