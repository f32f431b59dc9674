"""OLMo-2: no norm before attention, norms after each write, QK-norm over the whole projection."""

from __future__ import annotations

from headtrace.models.architectures.facts import Architecture, gated_mlp, separate_linears

ARCHITECTURE = Architecture(
    name="OLMo-2",
    model_type="olmo2",
    layers="model.layers",
    final_norm="model.norm",
    attention="self_attn",
    attention_post_norm="post_attention_layernorm",
    mlp="mlp",
    mlp_post_norm="post_feedforward_layernorm",
    mlp_write="post_feedforward_layernorm",
    mlp_parts=gated_mlp(),
    projections=separate_linears(),
    query_key_norm=("q_norm", "k_norm"),
    query_key_norm_axes="token projection",
)
