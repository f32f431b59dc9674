"""Gemma-3 text: Gemma-2 without attention softcap, with QK-norm and two rotary bases."""

from __future__ import annotations

from headtrace.models.architectures.facts import Architecture, gated_mlp, separate_linears

ARCHITECTURE = Architecture(
    name="Gemma-3 (text)",
    model_type="gemma3_text",
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
    query_key_norm=("q_norm", "k_norm"),
    query_key_norm_axes="head token d_head",
    refuse=lambda config: "its attention is bidirectional" if config.use_bidirectional_attention else None,
)
