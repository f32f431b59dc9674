"""Qwen3: Llama with an RMSNorm on every head's queries and keys."""

from __future__ import annotations

from headtrace.models.architectures.facts import Architecture, gated_mlp, separate_linears

ARCHITECTURE = Architecture(
    name="Qwen3",
    model_type="qwen3",
    layers="model.layers",
    final_norm="model.norm",
    attention="self_attn",
    attention_norm="input_layernorm",
    mlp="mlp",
    mlp_norm="post_attention_layernorm",
    mlp_write="mlp",
    mlp_parts=gated_mlp(),
    projections=separate_linears(),
    query_key_norm=("q_norm", "k_norm"),
)
