"""Mistral: Llama with a sliding window, which reaches headtrace through the model's own mask."""

from __future__ import annotations

from headtrace.models.architectures.facts import Architecture, gated_mlp, separate_linears

ARCHITECTURE = Architecture(
    name="Mistral",
    model_type="mistral",
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
