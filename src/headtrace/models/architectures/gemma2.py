"""Gemma-2: norms after each write, softcaps, alternating windows, its own query scale."""

from __future__ import annotations

from headtrace.models.architectures.facts import Architecture, gated_mlp, separate_linears

ARCHITECTURE = Architecture(
    name="Gemma-2",
    model_type="gemma2",
    layers="model.layers",
    final_norm="model.norm",
    attention="self_attn",
    attention_norm="input_layernorm",
    attention_post_norm="post_attention_layernorm",
    mlp="mlp",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
    mlp_write="post_feedforward_layernorm",
    mlp_parts=gated_mlp(),
    projections=separate_linears(),
    gain_offset=1.0,
)
